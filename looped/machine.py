"""What this machine lets a process use."""

from __future__ import annotations

import contextlib
import ctypes
import os


def available_cores() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def process_exists(pid: int) -> bool:
    """Whether a process of this number, which a file of others' making may have given, is there, of whatever user."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def keep_freed_memory() -> None:
    """Makes this process keep the large blocks that it frees and use them again, where JAX is to use the CPU.

    That is, where the environment says JAX_PLATFORMS=cpu; to be called before JAX takes its devices.

    XLA on CPU takes the memory for a step's temporaries anew in every step, and the GNU C library gives blocks of that
    size back to the system at once, which hands out every page again, zeroed: a sixth of the time of a small step
    (tests/benchmarks/train_speed.py --forget).  With another C library nothing happens.
    """
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        return
    try:
        known = (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, OSError, ValueError):
        known = False
    if not known:
        return
    trim_threshold, mmap_threshold, arena_max = -1, -3, -8  # of malloc.h
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(arena_max, 1)  # any other arena takes blocks over 64 MB from the system
        library.mallopt(mmap_threshold, 2**30)
        library.mallopt(trim_threshold, 2**31 - 1)
