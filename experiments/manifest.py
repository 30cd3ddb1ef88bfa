"""A sweep's folder: which runs belong to it, and who is at work on it.

`sweep.json` lists the runs; each has a folder of its own, named by its run id.  A lock keeps a second
sweep out of a local folder.  It is the kernel's (`flock`), so it ends with the processes that hold it,
however they end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import socket
import time
from collections.abc import Iterator, Sequence

from etils import epath

from looped.config import RunSpec
from looped.errors import UserError
from looped.jsonable import from_json, to_json

SCHEMA_VERSION = 1
MANIFEST_FILE = "sweep.json"
LOCK_FILE = ".sweep.lock"
_ORPHANS_SECONDS = 60.0  # how long the workers of a sweep that was killed may take to save


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a sweep trains."""

    preset: str
    specs: tuple[RunSpec, ...]
    schema_version: int = SCHEMA_VERSION

    @property
    def run_ids(self) -> frozenset[str]:
        return frozenset(spec.run_id for spec in self.specs)


def read(directory: epath.PathLike) -> Manifest | None:
    """Returns the manifest in `directory`, or None; raises `UserError` if it is unreadable."""
    path = epath.Path(directory) / MANIFEST_FILE
    try:
        data = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}); name another folder.") from None
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise UserError(
            f"{path}: sweep schema {version!r}, this version reads {SCHEMA_VERSION};"
            " use the `looped` that wrote it."
        )
    return from_json(Manifest, data, f"{path}: ")


def check(directory: epath.PathLike, specs: Sequence[RunSpec]) -> None:
    """Raises `UserError` unless `directory` is free for a sweep of `specs`; touches nothing.

    Free is a folder that is absent or empty, or that holds a sweep all of whose runs are among `specs`:
    a sweep may grow, but no run in its folder may be another's.
    """
    root = epath.Path(directory)
    if not root.exists():
        return
    if not root.is_dir():
        raise UserError(f"output is {root}, which is a file; name a folder.")
    there = read(root)
    if there is None:
        found = sorted(p.name for p in root.iterdir() if not p.name.startswith("."))
        if found:
            raise UserError(
                f"output is {root}, which holds {found[0]!r} and no sweep; name a new or empty folder."
            )
        return
    foreign = there.run_ids - {spec.run_id for spec in specs}
    if foreign:
        raise UserError(
            f"output is {root}, which holds another sweep ({there.preset!r}, {len(foreign)} of whose"
            f" {len(there.specs)} runs are not among these {len(specs)}); name another folder."
        )


def write(directory: epath.PathLike, manifest: Manifest) -> None:
    """Replaces the manifest of `directory` atomically."""
    root = epath.Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    partial = root / f".{MANIFEST_FILE}.{os.getpid()}"
    partial.write_text(json.dumps(to_json(manifest), indent=1) + "\n")
    partial.replace(root / MANIFEST_FILE)


@contextlib.contextmanager
def hold(directory: epath.PathLike) -> Iterator[int | None]:
    """Holds the folder's lock and yields its file descriptor (None on a remote file system, which has
    no locks).

    Processes that inherit the descriptor hold the lock too: workers that outlive a killed sweep keep
    others out until they have saved.  Raises `UserError` with the owner's process id where another
    sweep is at work.
    """
    if is_remote(directory):
        yield None
        return
    path = pathlib.Path(directory) / LOCK_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+") as file:
        patience = time.monotonic() + _ORPHANS_SECONDS
        while (owner := _try_lock(file)) is not None:
            if _is_alive(owner) or time.monotonic() > patience:
                raise UserError(
                    f"output is {directory}, where process {owner['pid']} on {owner['host']} is at work"
                    f" since {owner['since']}; wait for it or end it."
                )
            time.sleep(0.2)
        file.seek(0)
        file.truncate()
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": since}, file)
        file.flush()
        yield file.fileno()


def is_held(directory: epath.PathLike) -> bool:
    """Whether a sweep is at work on `directory` (never known on a remote file system: False)."""
    path = pathlib.Path(directory) / LOCK_FILE
    if is_remote(directory) or not path.exists():
        return False
    with open(path) as file:
        return _try_lock(file) is not None


def is_remote(directory: epath.PathLike) -> bool:
    return "://" in os.fspath(directory)


def _try_lock(file) -> dict | None:
    """Takes the lock and returns None, or returns who has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        file.seek(0)
        try:
            return json.loads(file.read())
        except ValueError:  # the owner has not written its name yet
            return {"pid": None, "host": "this machine", "since": "just now"}
    except OSError as error:
        raise UserError(f"{file.name}: cannot be locked ({error}); put the folder on a local disk.") from None


def _is_alive(owner: dict) -> bool:
    if owner["pid"] is None:
        return False
    if owner["host"] != socket.gethostname():
        return True
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
