"""Numbers, times and lines as people read and write them, and the line that tells how far something is."""

from __future__ import annotations

import datetime
import sys
import time
import unicodedata


def short(number: float) -> str:
    """Returns `3e11` for 300,000,000,000, `2e-5` for 0.00002 and `0.014` for 0.014."""
    mantissa, _, exponent = f"{number:.4g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def one_line(text: object, most: int | None = None) -> str:
    """Returns `text` as one printable line: runs of spaces, line ends and unprintable characters become a space.

    Where it has more than `most` characters it is cut and ends in `…`.
    """
    line = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    return line if most is None or len(line) <= most else line[: most - 1] + "…"


def has_breaks(text: str) -> bool:
    """Whether `text` has control characters, ends of lines or half a character: no name or folder to be sent on."""
    return any(unicodedata.category(letter) in ("Cc", "Zl", "Zp", "Cs") for letter in text)


def seconds_since(written: str | None) -> float | None:
    """Seconds since an ISO 8601 time with its zone, at least 0; None where the text is no such time."""
    try:
        then = datetime.datetime.fromisoformat(written or "")
        return max(0.0, (datetime.datetime.now(datetime.UTC) - then).total_seconds())
    except (ValueError, TypeError):  # TypeError: a time without its zone
        return None


def clock(seconds: float | None) -> str:
    """Returns `4 s`, `3 min`, `1 h 20 min`, or nothing for None."""
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


class ProgressLine:
    """One line on stderr that is rewritten on a terminal; elsewhere a line now and then."""

    def __init__(self):
        self._live = sys.stderr.isatty()
        self._seconds = 0.2 if self._live else 10.0
        self._last = float("-inf")

    def show(self, line: str, last: bool = False) -> None:
        """Shows `line`, unless the one before is too recent and this is not the `last`."""
        now = time.monotonic()
        if now - self._last < self._seconds and not last:
            return
        self._last = now
        end = "" if self._live else "\n"
        print(f"\r{line:<78}" if self._live else line, end=end, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._live and self._last > float("-inf"):
            print(file=sys.stderr)
