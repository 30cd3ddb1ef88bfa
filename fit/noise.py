"""How losses scatter about the law: each run by itself, and the runs of a cell (budget × r) together."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from fit.solve import HUBER, Objective
from looped.errors import UserError


@dataclasses.dataclass(frozen=True)
class Noise:
    """Standard deviations of the log losses about the law: a run's own, and what the runs of a cell share.

    The defaults are what the published vanilla losses show about their own fit (`noise_about`): chance and misfit.
    """

    row: float = 0.0033
    cell: float = 0.0018

    def __post_init__(self):
        for name in ("row", "cell"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise UserError(
                    f"{name} noise is {value}; give the sd of the log losses, from 0 to below 1, such as 0.004."
                )
        if not self.row + self.cell:
            raise UserError("row and cell noise are both 0; losses without noise need no plan.")

    def influence(self, objective: Objective = HUBER) -> tuple[float, float]:
        """(variance, covariance within a cell) of ψ(e)/E[ψ′], what takes the place of e in a fit by `objective`."""
        total = math.hypot(self.row, self.cell)
        if objective.kind == "squares":
            return total**2, self.cell**2
        k = objective.delta / total
        inside = math.erf(k / math.sqrt(2))
        density = math.exp(-(k**2) / 2) / math.sqrt(2 * math.pi)
        square = inside - 2 * k * density + k**2 * (1 - inside)  # E[ψ²] in units of the total noise
        points = np.linspace(-8, 8, 801)
        weights = np.exp(-(points**2) / 2)
        weights /= weights.sum()
        errors = self.cell * points[:, None] + self.row * points
        given_cell = np.clip(errors, -objective.delta, objective.delta) @ weights
        return total**2 * square / inside**2, float(weights @ given_cell**2) / inside**2


def noise_about(residuals: np.ndarray, cells: np.ndarray) -> Noise | None:
    """The noise that log residuals [n] of runs in `cells` [n] show (analysis of variance); None if none can be seen."""
    _, cells = np.unique(cells, return_inverse=True)
    sizes = np.bincount(cells)
    n, count = len(cells), len(sizes)
    if n - count < 2 or count < 3:
        return None
    means = np.bincount(cells, residuals) / sizes
    within = ((residuals - means[cells]) ** 2).sum() / (n - count)
    between = (sizes * (means - residuals.mean()) ** 2).sum() / (count - 1)
    if not within + between > 0:
        return None  # losses without noise, as those of the law itself
    typical = (n - (sizes**2).sum() / n) / (count - 1)
    return Noise(math.sqrt(within), math.sqrt(max(0.0, (between - within) / typical)))
