"""The one exception a user is meant to read."""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Iterable, Iterator

from looped.credentials import without


class UserError(ValueError):
    """Bad input: the message names the field, the value and the remedy.

    The command line prints it as one sentence without a traceback and exits with status 2; library callers catch it as
    the `ValueError` it is.
    """


def first_line(error: BaseException) -> str:
    """Returns the error's kind and the first line of what it says, for a message about something of others' making.

    Credentials are left out: such messages end in logs and records.
    """
    return without(f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}")


def nearest(name: str, valid: Iterable[str]) -> str:
    """Returns ` Did you mean 'x'?` and the valid names, to close an error about an unknown name."""
    valid = sorted(valid)
    close = difflib.get_close_matches(name, valid, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(repr(c) for c in close)}?" if close else ""
    return f"{hint} Valid: {', '.join(valid)}."


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FULL_WORDS = tuple(os.strerror(number) for number in _FULL)


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yields `error` and those from which it was made or while which it came up."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting += [one.__context__, one.__cause__]


def out_of_room(error: BaseException) -> OSError | None:
    """The error of a full disk, quota or file-size limit behind `error`; None where there is none.

    Libraries in C++ say it in words alone, in errors of their own.
    """
    for cause in causes(error):
        if isinstance(cause, OSError) and cause.errno in _FULL:
            return cause
        if not isinstance(cause, (OSError, UserError)) and any(word in str(cause) for word in _FULL_WORDS):
            return OSError(errno.ENOSPC, first_line(cause))
    return None


def unwritable(error: OSError, what: str, remedy: str) -> Exception:
    """What to raise where `what`, a field with its value, cannot be written: a `UserError` with the remedy.

    A full disk is no fault of the input; its error is returned as it is, and the command line says the same of it
    everywhere.
    """
    if out_of_room(error) is not None:
        return error
    return UserError(f"{what}, which cannot be written ({error.strerror or error}); {remedy}.")
