"""The backends of attention agree with each other, in values and gradients, alone and divided over a mesh."""

import dataclasses
import functools
import importlib.util
import os
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from looped.attention import causal_attention
from looped.attention_backends import (
    BACKENDS,
    choose_backend,
    cudnn_attention,
    obstacle,
    splash_attention,
    xla_attention,
)
from looped.config import ModelConfig
from looped.errors import UserError
from looped.sharding import MeshShape, make_mesh

INTERPRETED = functools.partial(splash_attention, interpret=True)


def inputs(dtype=jnp.float32, rows=2, length=128, heads=2, groups=1, size=32):
    """q, k, v and weights of the output in a sum."""
    random = np.random.default_rng(0)
    shapes = [(rows, length, n, size) for n in (heads, groups, groups, heads)]
    return [jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes]


def by_jax(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def values_and_gradients(attend, q, k, v, weights):
    """[output, dq, dk, dv] of the weighted sum of `attend`'s output, in one program."""

    @jax.jit
    def both(q, k, v):
        output, pull = jax.vjp(attend, q, k, v)
        return [output, *pull(weights)]

    return [np.asarray(x, np.float32) for x in both(q, k, v)]


def assert_close(got, expected, tolerance):
    for x, y in zip(got, expected, strict=True):
        assert np.abs(x - y).max() < tolerance * np.abs(y).max()


@pytest.mark.parametrize(
    ("length", "heads", "groups"), [(1, 2, 2), (7, 2, 1), (64, 4, 2), (130, 2, 2), (300, 4, 2)]
)
def test_xla_is_attention_and_its_derivatives(length, heads, groups):
    """Against `jax.nn.dot_product_attention`: lengths of one block of queries, of full ones, of one that is cut."""
    arguments = inputs(length=length, heads=heads, groups=groups)
    expected = values_and_gradients(by_jax, *arguments)
    assert_close(values_and_gradients(xla_attention, *arguments)[:1], expected[:1], 3e-6)
    if length > 1:  # one position attends to itself alone, whatever q and k
        assert_close(values_and_gradients(xla_attention, *arguments), expected, 3e-6)


def test_xla_of_bfloat16_is_as_near_to_float32_as_jax_is():
    exact = values_and_gradients(by_jax, *(x.astype(jnp.float32) for x in inputs(jnp.bfloat16)))
    assert_close(values_and_gradients(xla_attention, *inputs(jnp.bfloat16)), exact, 0.01)


def test_large_scores_do_not_overflow():
    q, k, v, weights = inputs(length=70)
    arguments = 100 * q, 100 * k, v, weights
    assert_close(
        values_and_gradients(xla_attention, *arguments)[:1],
        values_and_gradients(by_jax, *arguments)[:1],
        1e-5,
    )
    assert all(np.isfinite(x).all() for x in values_and_gradients(xla_attention, *arguments))


def test_a_block_skips_the_keys_that_come_after_it():
    """Four blocks of queries read 1, 2, 3 and 4 quarters of the keys: 10 of 16 parts of each product."""
    sizes = re.findall(
        r"dot_general.* -> tensor<2x2x1x(\d+)x(\d+)x",
        jax.jit(xla_attention).lower(*inputs(length=256, size=16, groups=2)[:3]).as_text(),
    )
    assert [(int(t), int(s)) for t, s in sizes if int(s) != 16] == [(64, 64), (64, 128), (64, 192), (64, 256)]


@pytest.mark.parametrize(
    ("dtype", "groups", "tolerance"),
    [(jnp.float32, 2, 3e-6), (jnp.float32, 1, 3e-6), (jnp.bfloat16, 1, 0.01)],
)
def test_splash_agrees_with_xla(dtype, groups, tolerance):
    """Interpreted; as many key heads as query heads, and one for two."""
    arguments = inputs(dtype, groups=groups)
    expected = values_and_gradients(xla_attention, *arguments)
    assert_close(values_and_gradients(INTERPRETED, *arguments), expected, tolerance)


MESHES = [
    MeshShape(replica=2, fsdp=2, tensor=2),
    MeshShape(fsdp=2, sequence=2, tensor=2),
    MeshShape(sequence=8),
]


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_xla_agrees_over_a_mesh(shape):
    arguments = inputs(rows=4, length=256, heads=4, groups=2)
    expected = values_and_gradients(by_jax, *arguments)
    with jax.set_mesh(make_mesh(shape)):
        assert_close(values_and_gradients(xla_attention, *arguments), expected, 3e-6)


@pytest.mark.parametrize("shape", [MESHES[0], MeshShape(sequence=2)], ids=str)
def test_splash_agrees_over_a_mesh(shape):
    """Where the sequence is divided, a device's queries do not begin at position 0, and its mask knows."""
    arguments = inputs(rows=4, length=256, heads=4, groups=2)
    expected = values_and_gradients(by_jax, *arguments)
    with jax.set_mesh(make_mesh(shape, jax.devices()[: shape.devices])):
        assert_close(values_and_gradients(INTERPRETED, *arguments), expected, 3e-6)


def test_cudnn_lowers_to_its_fused_kernels():
    """For CUDA, with no GPU here: the version of cuDNN is the one thing that JAX asks the machine for."""
    arguments = inputs(jnp.bfloat16, size=64)
    with pytest.MonkeyPatch.context() as patch:
        version = types.SimpleNamespace(cudnn_get_version=lambda: 91000)
        patch.setattr(fused_attention_stablehlo, "cuda_versions", version)
        traced = jax.jit(lambda q, k, v, w: jax.vjp(cudnn_attention, q, k, v)[1](w)).trace(*arguments)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = set(re.findall(r"__cudnn\$\w+", text))
    assert calls == {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}


ON_TPU = """
import sys, jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding
from looped.attention_backends import KEYS, QUERIES, splash_attention
from looped.sharding import MeshShape, make_mesh

topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
mesh = make_mesh(MeshShape(fsdp=2, sequence=2), topology.devices)
gradients = jax.jit(jax.grad(lambda q, k, v: splash_attention(q, k, v).astype(jnp.float32).sum(), (0, 1, 2)))
for dtype in (jnp.float32, jnp.bfloat16):
    q, k, v = (
        jax.ShapeDtypeStruct((2, 256, heads, 64), dtype, sharding=NamedSharding(mesh, spec))
        for heads, spec in ((2, QUERIES), (1, KEYS), (1, KEYS))
    )
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        text = gradients.lower(q, k, v).compile().as_text()
    print(text.count('custom_call_target="tpu_custom_call"'))
"""


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no libtpu to compile for TPU with")
def test_splash_compiles_for_a_tpu_slice():
    """Forward, dq and dk with dv for four v5e chips, in both types, at the highest precision that can be set."""
    settings = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, "-c", ON_TPU], env=os.environ | settings, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["3", "3"]


def model(**changes):
    return dataclasses.replace(
        ModelConfig(sequence_length=2048, d_model=640, n_heads=5, compute_dtype="bfloat16"), **changes
    )


@pytest.mark.parametrize(
    ("platform", "changes", "sequence", "expected"),
    [
        ("cpu", {}, 1, "xla"),
        ("tpu", {}, 1, "splash"),
        ("tpu", {"compute_dtype": "float32"}, 16, "splash"),
        ("tpu", {}, 32, "xla"),
        ("tpu", {"sequence_length": 200}, 1, "xla"),
        ("gpu", {}, 1, "cudnn"),
        ("cuda", {}, 1, "cudnn"),
        ("gpu", {}, 2, "xla"),
        ("gpu", {"compute_dtype": "float32"}, 1, "xla"),
        ("gpu", {"n_heads": 2}, 1, "xla"),
    ],
)
def test_the_backend_follows_the_platform_where_the_model_allows(platform, changes, sequence, expected):
    assert choose_backend(platform, model(**changes), sequence=sequence) == expected
    assert obstacle(expected, platform, model(**changes), sequence) is None


@pytest.mark.parametrize(
    ("wanted", "platform", "changes", "named"),
    [
        ("splash", "cpu", {}, "platform is cpu"),
        ("splash", "tpu", {"sequence_length": 200}, "sequence_length 200"),
        ("cudnn", "tpu", {}, "platform is tpu"),
        ("cudnn", "gpu", {"compute_dtype": "float32"}, "compute_dtype is float32"),
        ("cudnn", "gpu", {"n_heads": 2}, "it is 320"),
    ],
)
def test_a_backend_that_cannot_is_refused_by_reason(wanted, platform, changes, named):
    with pytest.raises(UserError, match=named):
        choose_backend(platform, model(**changes), wanted)
    assert choose_backend(platform, model(**changes), "xla") == "xla"


def test_splash_names_a_length_that_it_cannot_take():
    with pytest.raises(UserError, match="100 positions"):
        splash_attention(*inputs(length=100)[:3])


def test_every_backend_stands_behind_the_one_function(monkeypatch):
    q, k, v, _ = inputs(length=5)
    for name in BACKENDS:
        monkeypatch.setitem(BACKENDS, name, lambda q, k, v, name=name: name)
        assert causal_attention(q, k, v, backend=name) == name
