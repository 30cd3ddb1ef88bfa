"""What this machine lets a process use."""

from __future__ import annotations

import os


def available_cores() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
