"""What a process asks of its machine."""

import os
import subprocess
import sys

import pytest

from looped.machine import available_cores

REPEATED = """
import resource, sys
from looped.machine import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
import jax, jax.numpy as jnp

@jax.jit
def f(x):
    y = x @ x.T  # 64 MB
    return jnp.sum(jnp.sin(y @ y[:, :8]))

x = jnp.ones((4096, 8))
for _ in range(20):
    f(x).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    f(x).block_until_ready()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 20)
"""


def pages_a_call(argument):
    environment = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", REPEATED, argument]
    return int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="the GNU C library's settings")
def test_freed_memory_is_used_again_without_asking_for_its_pages():
    """A program with 64 MB of temporaries, 16,384 pages: each call touches them anew, or few do.

    Which call is the first that finds a hole of that size depends on what else was taken in between.
    """
    if "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""):
        pytest.skip("another C library")
    assert pages_a_call("forget") > 10_000
    assert pages_a_call("keep") < 4_000


def test_there_is_a_core_to_use():
    assert available_cores()
