"""What earlier programs left on a machine that keeps its TPU from starting, found and named before anything is trained.

Both are silent otherwise: libtpu says that the TPU is in use where nobody uses it, and a process that takes itself for
one slice of several waits for the others for ever.
"""

from __future__ import annotations

import fcntl
import os
import pathlib
from collections.abc import Mapping

from looped.errors import UserError

LOCK = pathlib.Path("/tmp/libtpu_lockfile")
_MULTI_SLICE = ("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID")
_WHOLE_HOST = ("", "2,2,1")  # values of TPU_CHIPS_PER_PROCESS_BOUNDS under which libtpu takes its lock


def check_machine(joined: bool, lock: pathlib.Path = LOCK) -> None:
    """Raises `UserError`, saying what to remove, if something here keeps a TPU from starting.

    `joined` says whether this process is to be one of several (`looped.distributed`).  Call it before JAX touches a
    device: it opens and closes libtpu's lock file, and a process that closes it gives up a lock that it holds.
    """
    check_multi_slice(joined, os.environ)
    if _uses_tpu(os.environ):
        check_lock(lock)


def _uses_tpu(environment: Mapping[str, str]) -> bool:
    platforms = environment.get("JAX_PLATFORMS", "")
    if platforms and "tpu" not in platforms.split(","):
        return False
    if environment.get("TPU_CHIPS_PER_PROCESS_BOUNDS", "") not in _WHOLE_HOST:
        return False
    vfio = pathlib.Path("/dev/vfio")
    return any(pathlib.Path("/dev").glob("accel*")) or any(p.name.isdigit() for p in vfio.glob("*"))


def check_lock(lock: pathlib.Path) -> None:
    """Raises `UserError` if a process holds libtpu's lock, or if nobody does and this user cannot take it.

    libtpu opens the file for writing, made where it is missing, and takes a POSIX lock on it.  The lock ends with its
    process, but the file stays, and one that another user left cannot be opened.
    """
    if not lock.exists():
        return
    try:
        descriptor = os.open(lock, os.O_CREAT | os.O_RDWR, 0o644)
    except OSError:
        own = holder(lock)
        if own is not None:
            raise UserError(_in_use(own)) from None
        raise UserError(
            f"{lock} was left by a process of another user (uid {lock.stat().st_uid}) that has ended, and libtpu would"
            f" take the TPU to be in use; remove it: sudo rm {lock}"
        ) from None
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UserError(_in_use(holder(lock))) from None
    finally:
        os.close(descriptor)


def _in_use(process: int | None) -> str:
    who = "another process" if process is None else f"process {process}"
    return f"the TPU of this machine is in use by {who}; wait for it or end it."


def holder(lock: pathlib.Path) -> int | None:
    """The process that holds a POSIX lock on the file, where the kernel says so."""
    inode = str(lock.stat().st_ino)
    try:
        lines = pathlib.Path("/proc/locks").read_text().splitlines()
    except OSError:  # not on macOS
        return None
    for fields in map(str.split, lines):  # 1: POSIX ADVISORY WRITE 1234 08:01:131076 0 EOF
        if len(fields) >= 6 and fields[1] == "POSIX" and fields[5].rpartition(":")[2] == inode:
            return int(fields[4]) if int(fields[4]) > 0 else None
    return None


def check_multi_slice(joined: bool, environment: Mapping[str, str]) -> None:
    """Raises `UserError` if the variables that make a process part of several slices contradict themselves or it."""
    given = {name: environment[name] for name in _MULTI_SLICE if environment.get(name)}
    slices, own = (given.get(name) for name in _MULTI_SLICE[1:])
    if not given or (slices == "1" and own in (None, "0")):
        return
    said = ", ".join(f"{name}={value}" for name, value in given.items())
    remedy = f"unset what is left from an earlier start: unset {' '.join(given)}"
    missing = [name for name in _MULTI_SLICE if name not in given]
    if missing:
        raise UserError(f"{said} is set and {' and '.join(missing)} is not; set all of them, or {remedy}")
    if not (slices.isdigit() and own.isdigit() and int(own) < int(slices)):  # type: ignore[union-attr]
        raise UserError(f"{said} is set, which is no slice of {slices} slices, counted from 0; {remedy}")
    if not joined:
        raise UserError(
            f"{said} is set, so that this process would wait for the other slices, and it is to train alone; give"
            f" --distributed where the slices train together, or {remedy}"
        )
