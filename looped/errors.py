"""The one exception a user is meant to read."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input: the message names the field, the value and the remedy.

    The command line prints it as one sentence without a traceback and exits with status 2; library callers catch it as
    the `ValueError` it is.
    """


def first_line(error: BaseException) -> str:
    """Returns the error's kind and the first line of what it says, for a message about something of others' making."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"


def nearest(name: str, valid: Iterable[str]) -> str:
    """Returns ` Did you mean 'x'?` and the valid names, to close an error about an unknown name."""
    valid = sorted(valid)
    close = difflib.get_close_matches(name, valid, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(repr(c) for c in close)}?" if close else ""
    return f"{hint} Valid: {', '.join(valid)}."
