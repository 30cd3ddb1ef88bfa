"""Numbers as people read them."""

from __future__ import annotations


def short(number: float) -> str:
    """Returns `3e11` for 300,000,000,000, `2e-5` for 0.00002 and `0.014` for 0.014."""
    mantissa, _, exponent = f"{number:.4g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def clock(seconds: float | None) -> str:
    """Returns `4 s`, `3 min`, `1 h 20 min`, or nothing for None."""
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
