"""The law beside its neighbours: does φ survive another form, and which form predicts rows it has not seen?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from fit.analysis import Analysis, ArmFit
from fit.law import NEIGHBOURS, FixedExponent, Law, Multipliers, power_law_phi
from fit.losses import Losses
from fit.solve import Fit, fit_law, predict, solve
from fit.uncertainty import Interval, bootstrap

_HELD_OUT_BUDGETS = 1 / 3


@dataclasses.dataclass(frozen=True)
class LawRow:
    """One law on one arm.

    `misfit` is the rmse over the rows fitted, `left_out` that over rows predicted with their cell (budget × r) left
    out, `extrapolated` that over the upper third of the budgets, predicted from the others; all in nats per token, None
    where the table has too few cells or budgets.  `phi` is None where the law has a multiplier for each r; where it has
    another form it is that of the power of r with the same worth at r = 4.
    """

    law: Law
    phi: float | None
    interval: Interval | None
    misfit: float
    left_out: float | None
    extrapolated: float | None
    phi_low_budgets: float | None
    parameters: dict[str, float]
    status: str


def laws_beside(recurrences: np.ndarray) -> tuple[Law, ...]:
    """The law, φ fixed at 0 and at 1, a multiplier for each r, and the neighbouring forms."""
    free = Multipliers(tuple(int(r) for r in np.unique(recurrences) if r > 1))
    return (NEIGHBOURS[0], FixedExponent(0.0), FixedExponent(1.0), free, *NEIGHBOURS[1:])


def sensitivity(analysis: Analysis, arm: ArmFit, laws: Sequence[Law] | None = None) -> list[LawRow]:
    """Fits every law to the rows of `arm`, which must be identified, under the resamples of `analysis`."""
    if laws is None:
        laws = laws_beside(analysis.losses.recurrences[arm.index])
    found = []
    for law in laws:
        fit = fit_law(law, arm.rows, arm.fit.scale, objective=analysis.options.objective)
        interval = None
        if power_law_phi(law, fit.parameters) is not None and not isinstance(law, FixedExponent):
            boot = bootstrap(fit, arm.rows, arm.draws, arm.index)
            phis = power_law_phi(law, boot.values)
            if boot.usable.mean() > 0.5 and phis is not None:
                interval = boot.interval(phis, analysis.options.level)
        upper, lower_phi = extrapolation(analysis.losses, arm, fit)
        found.append(
            LawRow(
                law=law,
                phi=_scalar(power_law_phi(law, fit.parameters)),
                interval=interval,
                misfit=fit.rmse,
                left_out=leave_cells_out(analysis.losses, arm, fit)[0],
                extrapolated=upper,
                phi_low_budgets=lower_phi,
                parameters=fit.parameters,
                status=fit.status,
            )
        )
    return found


def _scalar(value) -> float | None:
    return None if value is None else float(value)


def leave_cells_out(losses: Losses, arm: ArmFit, fit: Fit) -> tuple[float | None, np.ndarray, np.ndarray]:
    """Refits without each cell: (rmse over all rows, each predicted without its cell; cells [n]; vectors [cells, p]).

    The rmse is in nats, and None with fewer than four cells.
    """
    _, cells = np.unique(losses.cells("cell")[arm.index], return_inverse=True)
    count = int(cells.max()) + 1
    if count < 4:
        return None, cells, np.repeat(fit.x[None], count, axis=0)
    weights = (cells[None] != np.arange(count)[:, None]).astype(float)
    x, _ = solve(fit.law, arm.rows, np.repeat(fit.x[None], count, axis=0), weights, fit.objective)
    predicted = predict(fit.law, x, arm.rows)[cells, np.arange(len(cells))]
    return _rmse(predicted, arm.rows.log_loss), cells, x


def extrapolation(losses: Losses, arm: ArmFit, fit: Fit) -> tuple[float | None, float | None]:
    """Fits the lower budgets, predicts the upper third; returns (rmse in nats of those, φ of the lower budgets)."""
    budgets = np.unique(losses.budget[arm.index])
    held = math.floor(len(budgets) * _HELD_OUT_BUDGETS)
    if not np.isfinite(budgets).all() or held < 1 or len(budgets) - held < 2:
        return None, None
    low = losses.budget[arm.index] < budgets[-held]
    lower = fit_law(fit.law, arm.rows, fit.scale, weights=low.astype(float), objective=fit.objective)
    upper = _rmse(predict(fit.law, lower.x, arm.rows)[~low], arm.rows.log_loss[~low])
    return upper, _scalar(power_law_phi(fit.law, lower.parameters))


def _rmse(predicted: np.ndarray, observed: np.ndarray) -> float:
    return float(np.sqrt(np.mean((np.exp(predicted) - np.exp(observed)) ** 2)))
