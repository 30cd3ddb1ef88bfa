"""Small files written whole or not at all, on a local disk or gs://."""

from __future__ import annotations

import contextlib
import os

from etils import epath


def is_remote(path: epath.PathLike) -> bool:
    """Whether `path` is on an object store: no appending, no locks, no folders of their own."""
    return "://" in os.fspath(path)


def write_whole(path: epath.PathLike, text: str) -> None:
    """Replaces the file in one step, its folder made where it is missing: no reader finds half of it."""
    path = epath.Path(path)
    if is_remote(path):  # an object appears when it is complete
        path.write_text(text)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.parent / f".{path.name}.{os.getpid()}"
    partial.write_text(text)
    partial.replace(path)


def forget_listings(path: epath.PathLike) -> None:
    """Has the next look at `path` ask the object store, whose client keeps for ever what a folder held once."""
    if is_remote(path):
        from etils.epath import backend

        with contextlib.suppress(ImportError, AttributeError):  # read by TensorFlow, which keeps nothing
            backend.fsspec_backend.fs(os.fspath(path)).invalidate_cache()
