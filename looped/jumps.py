"""Losses that jump: what a look at the curve would show, noted in the record."""

from __future__ import annotations

import statistics
from collections import deque
from typing import Any

WINDOW = 32
"""Steps that the loss of a step is compared with."""
DEVIATIONS, LEAST = 6.0, 0.1
"""A jump is a loss above their mean by so many standard deviations and by so many nats."""
KEPT = 100
"""Jumps that are noted; a run that has more is known to be in trouble."""


class JumpWatch:
    """Sees the loss of every step in turn; `jumps` are the steps whose loss jumped.

    What it remembers goes into checkpoints (`notes`), so that a resumed run notes the same jumps.
    """

    def __init__(self, notes: dict[str, Any] | None = None):
        notes = notes or {}
        self.step: int = notes.get("step", 0)
        self.jumps: list[int] = list(notes.get("jumps", ()))
        self._recent: deque[float] = deque(notes.get("recent", ()), WINDOW)

    def see(self, step: int, loss: float) -> None:
        """Takes the training loss of `step`, in nats per token; a step that it has seen is passed over."""
        if step <= self.step:
            return
        self.step = step
        if len(self._recent) == WINDOW and len(self.jumps) < KEPT:
            mean, deviation = statistics.fmean(self._recent), statistics.pstdev(self._recent)
            if loss > mean + max(DEVIATIONS * deviation, LEAST):
                self.jumps.append(step)
        self._recent.append(loss)

    def notes(self) -> dict[str, Any]:
        """What another process needs to go on, as JSON."""
        return {"step": self.step, "jumps": self.jumps, "recent": list(self._recent)}
