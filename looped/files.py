"""Small files written whole or not at all, on a local disk or gs://."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator

from etils import epath

from looped.errors import UserError


def is_remote(path: epath.PathLike) -> bool:
    """Whether `path` is on an object store: no appending, no locks, no folders of their own."""
    return "://" in os.fspath(path)


def check_folder(path: epath.PathLike, field: str) -> None:
    """Raises `UserError`, before what takes longer, where `path` is no folder and cannot become one; makes nothing."""
    folder = epath.Path(path)
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise UserError(f"{field} is {folder}, and {there} is a file; name another folder.")


def write_whole(path: epath.PathLike, content: str | bytes) -> None:
    """Replaces the file in one step, its folder made where it is missing: no reader finds half of it."""
    path = epath.Path(path)
    data = content.encode() if isinstance(content, str) else content
    if is_remote(path):  # an object appears when it is complete
        path.write_bytes(data)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as partial:
        partial.write_bytes(data)


@contextlib.contextmanager
def whole(path: epath.Path) -> Iterator[epath.Path]:
    """Yields the place of a file that becomes `path` when the context ends well, and is removed where it does not."""
    # Not to be guessed, so that nobody puts a link there in a folder that several write to.
    partial = path.parent / f".{path.name}.{secrets.token_hex(8)}"
    try:
        yield partial
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # it may never have been made
            partial.unlink()
        raise


def forget_listings(path: epath.PathLike) -> None:
    """Has the next look at `path` ask the object store, whose client keeps for ever what a folder held once."""
    if is_remote(path):
        from etils.epath import backend

        with contextlib.suppress(ImportError, AttributeError):  # read by TensorFlow, which keeps nothing
            backend.fsspec_backend.fs(os.fspath(path)).invalidate_cache()
