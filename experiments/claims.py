"""Who is at work on a sweep's folder: one holder a share, and all of them on the same runs in the same shares.

A claim is a file, `.claims/3-of-8`.  In a local folder the kernel locks it (`flock`), and it is free again when the
processes that hold it have ended, however they end.

An object store has no locks, so there a claim is a lease.  Its holder writes a sign of life every BEAT_SECONDS; who
finds a claim waits until it sees another sign, and is refused, or has seen none for SILENCE_SECONDS, and takes it over.
This keeps out a second launcher of the same share, which is what happens.  It cannot keep out one that writes more than
SETTLE_SECONDS after it read that the share was free, nor keep a holder that the network cut off for SILENCE_SECONDS
from going on while its share is taken over.  Either notices at its next sign that the claim is not its own, and stops.
Both would have trained the same numbers until then; a checkpoint or record in the making may be lost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import re
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

from etils import epath

from experiments.shares import Share
from looped.errors import UserError, first_line, unwritable
from looped.files import forget_listings, is_remote, write_whole
from looped.jsonable import from_json, parse_json, to_json
from looped.machine import process_exists

FOLDER = ".claims"
BEAT_SECONDS = 20.0
SILENCE_SECONDS = 70.0
SETTLE_SECONDS = 3.0
_ORPHANS_SECONDS = 60.0  # how long the workers of a sweep that was killed may take to save


@dataclasses.dataclass(frozen=True)
class Holder:
    """Who holds a share, since when, and of which runs (`Manifest.fingerprint`)."""

    share: Share
    owner: str
    pid: int | None
    host: str
    since: str
    runs: str
    beat: float
    """Seconds since 1970 at its last sign of life."""

    @property
    def silent_seconds(self) -> float:
        return time.time() - self.beat

    def describe(self) -> str:
        what = "" if self.share.is_whole else f" on share {self.share}"
        return f"process {self.pid} on {self.host} is at work{what} since {self.since}"


class Claim:
    """A share that is held: the descriptor of the lock, for a local folder, and whether another took it over."""

    def __init__(self, descriptor: int | None = None):
        self.descriptor = descriptor
        self.lost_to: Holder | None = None


@contextlib.contextmanager
def hold(directory: epath.PathLike, share: Share, runs: str) -> Iterator[Claim]:
    """Holds `share` of the runs whose fingerprint is `runs`, as long as the context lasts.

    Processes that inherit the descriptor of a local folder's lock hold it too: workers that outlive a killed sweep keep
    others out until they have saved.  Raises `UserError` with who is at work and what to do where the share is held, or
    where another is held of other runs or in other shares; and where a lease was lost meanwhile, after the
    KeyboardInterrupt with which that ends the work.
    """
    root = epath.Path(directory)
    own = Holder(share, uuid.uuid4().hex, os.getpid(), socket.gethostname(), _clock(), runs, time.time())
    with _lease(root, own) if is_remote(root) else _lock(root, own) as claim:
        _check_others(root, own)
        yield claim


def holders(directory: epath.PathLike) -> list[Holder]:
    """Those at work on `directory`, by share: who holds a lock, or gave a sign within SILENCE_SECONDS."""
    root = epath.Path(directory)
    forget_listings(root)
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in sorted((root / FOLDER).iterdir()):
            share = _share_of(path.name)
            if share is None:
                continue
            holder = _read(path, share) if is_remote(root) else _who_locked(path, share)
            if holder is not None and (not is_remote(root) or holder.silent_seconds < SILENCE_SECONDS):
                found.append(holder)
    return sorted(found, key=lambda holder: (holder.share.count, holder.share.index))


def was_claimed(directory: epath.PathLike) -> bool:
    """Whether a sweep has ever been at work on `directory`, so that `holders` tells what is under way."""
    return (epath.Path(directory) / FOLDER).exists()


def _check_others(root: epath.Path, own: Holder) -> None:
    """Both of two that begin at once have written their claims before either looks, so at least one sees the other."""
    for other in holders(root):
        if other.owner == own.owner:
            continue
        if other.share.count != own.share.count or other.share == own.share:
            asked = "the whole sweep" if own.share.is_whole else f"share {own.share}"
            raise UserError(_refusal(root, other, f"{asked} would train its runs a second time"))
        if other.runs != own.runs:
            raise UserError(
                _refusal(root, other, "it is of other runs than these, so that the shares differ")
            )


def _refusal(root: epath.Path, other: Holder, why: str = "") -> str:
    gone = f" (if it is gone: its claim ends after {SILENCE_SECONDS:.0f} s)" if is_remote(root) else ""
    return f"output is {root}, where {other.describe()}{why and ', and '}{why}; wait for it or end it{gone}."


def _path(root: epath.Path, share: Share) -> epath.Path:
    return root / FOLDER / f"{share.index}-of-{share.count}"


def _share_of(name: str) -> Share | None:
    found = re.fullmatch(r"([1-9]\d{0,4})-of-([1-9]\d{0,4})", name, re.ASCII)
    if found is None or int(found[1]) > int(found[2]):
        return None
    return Share(int(found[1]), int(found[2]))


def _clock() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")


def _to_text(holder: Holder) -> str:
    values = dataclasses.asdict(holder)
    del values["share"]  # the file's name says it
    return json.dumps(values)


def _from_text(text: str, share: Share) -> Holder | None:
    try:
        return from_json(Holder, parse_json(text) | {"share": to_json(share)})
    except (TypeError, ValueError):
        return None


# --- A local folder: the kernel's lock ----------------------------------------------------------------------


@contextlib.contextmanager
def _lock(root: epath.Path, own: Holder) -> Iterator[Claim]:
    path = pathlib.Path(_path(root, own.share))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = open(path, "a+", encoding="utf-8", errors="replace", opener=_no_link)  # noqa: SIM115 -- closed below
    except OSError as error:
        raise unwritable(error, f"output is {root}", "name another folder") from None
    with opened as file:
        patience = time.monotonic() + _ORPHANS_SECONDS
        while not _try_lock(file):
            file.seek(0)
            owner = _from_text(file.read(), own.share)
            if owner is None:  # it has not written its name yet
                owner = dataclasses.replace(own, pid=None, since="just now")
            if _is_alive(owner) or time.monotonic() > patience:
                raise UserError(_refusal(root, owner))
            time.sleep(0.2)
        file.seek(0)
        file.truncate()
        file.write(_to_text(own))
        file.flush()
        yield Claim(file.fileno())


def _no_link(path: str, flags: int) -> int:
    """Opens the file itself: what a link in a shared folder leads to must not be overwritten."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _who_locked(path: epath.Path, share: Share) -> Holder | None:
    with open(path, encoding="utf-8", errors="replace") as file:
        if _try_lock(file, fcntl.LOCK_SH):
            return None
        return _from_text(file.read(), share)


def _try_lock(file: Any, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError as error:
        raise UserError(f"{file.name}: cannot be locked ({error}); put the folder on a local disk.") from None


def _is_alive(owner: Holder) -> bool:
    if owner.pid is None:
        return False
    return owner.host != socket.gethostname() or process_exists(owner.pid)


# --- An object store: a lease -------------------------------------------------------------------------------


@contextlib.contextmanager
def _lease(root: epath.Path, own: Holder) -> Iterator[Claim]:
    path = _path(root, own.share)
    other = None
    while other is None:  # another wrote over it, and ended
        _wait_until_silent(root, path, own.share)
        _beat(path, own)
        time.sleep(SETTLE_SECONDS)
        other = _read(path, own.share)
    if other.owner != own.owner:
        raise UserError(_refusal(root, other))
    claim, ended = Claim(), threading.Event()
    thread = threading.Thread(target=_keep, args=(path, own, claim, ended), daemon=True)
    thread.start()
    try:
        yield claim
    except KeyboardInterrupt:
        if claim.lost_to is not None:
            raise UserError(
                f"output is {root}, where {claim.lost_to.describe()} instead of this one."
            ) from None
        raise
    finally:
        ended.set()
        thread.join(BEAT_SECONDS)
        if claim.lost_to is None:
            with contextlib.suppress(Exception):  # it ends by itself
                path.unlink()


def _wait_until_silent(root: epath.Path, path: epath.Path, share: Share) -> None:
    """Returns once nobody holds the claim; `UserError` at a sign of life."""
    first, since = _read(path, share), time.monotonic()
    while first is not None and time.monotonic() - since < SILENCE_SECONDS:
        time.sleep(min(2.0, BEAT_SECONDS / 4))
        now = _read(path, share)
        if now is None:
            return
        if (now.owner, now.beat) != (first.owner, first.beat):
            raise UserError(_refusal(root, now))


def _keep(path: epath.Path, own: Holder, claim: Claim, ended: threading.Event) -> None:
    while not ended.wait(BEAT_SECONDS):
        with contextlib.suppress(Exception):  # an outage: the next sign may come through
            other = _read(path, own.share)
            if other is not None and other.owner != own.owner:
                claim.lost_to = other
                main = threading.main_thread().ident
                if main is not None:
                    signal.pthread_kill(main, signal.SIGINT)  # as Ctrl-C: what is under way saves
                return
            _beat(path, own)


def _beat(path: epath.Path, own: Holder) -> None:
    try:
        write_whole(path, _to_text(dataclasses.replace(own, beat=time.time())))
    except Exception as error:
        raise UserError(
            f"output is {path.parent.parent}, which cannot be written ({first_line(error)}); see that the bucket exists"
            " and that this account may create objects in it."
        ) from None


def _read(path: epath.Path, share: Share) -> Holder | None:
    """The claim there; an object that was replaced while it was read is read again."""
    for _ in range(3):
        try:
            holder = _from_text(path.read_bytes().decode(errors="replace"), share)
        except FileNotFoundError:
            return None
        if holder is not None:
            return holder
    return None
