"""Iso-FLOP minima: a parabola in log N through the runs of one arm, r and budget (N = n_once + n_rec)."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from fit.losses import Baseline, Losses
from fit.statistics import student_quantile
from looped.errors import UserError

_FARTHEST = 30.0  # of log N from the runs, a factor of 1e13: a bound beyond is none


@dataclasses.dataclass(frozen=True)
class Minimum:
    """The vertex of one parabola.

    `n_optimal` (parameters) and `loss` (nats per token) are None where the parabola opens downwards, hardly bends or
    fewer than three sizes were run; `interval` bounds n_optimal and is None where the data leave it open on either
    side.  `interior`: the vertex lies between the smallest and the largest size that was run.
    """

    arm: str
    recurrences: int
    budget_flops: float
    n_optimal: float | None
    loss: float | None
    interval: tuple[float, float] | None
    interior: bool
    runs: int
    note: str = ""


@dataclasses.dataclass(frozen=True)
class _Parabola:
    """Coefficients (a, b, c) of a + b·u + c·u², u = log N − centre, with (XᵀX)⁻¹ and the residual sum of squares."""

    coefficients: np.ndarray
    inverse: np.ndarray
    centre: float
    squares: float
    spare: int


def iso_flop_minima(losses: Losses, baseline: Baseline = "matched", level: float = 0.95) -> list[Minimum]:
    """Returns the minimum of every arm, r and budget, in that order.

    The interval on N* is Fieller's, with the noise pooled over all parabolas of the arm: single cells have hardly a
    degree of freedom of their own.  Raises `UserError` where the table shows no budgets.
    """
    if not np.isfinite(losses.budget).all():
        raise UserError(
            "the table shows no separate budgets; add a column budget_flops to find iso-FLOP minima."
        )
    found = []
    for arm in losses.unnamed_arms:
        index = losses.rows_of(arm, baseline)
        cells = {}
        for r in np.unique(losses.recurrences[index]):
            at_r = index[losses.recurrences[index] == r]
            for budget in np.unique(losses.budget[at_r]):
                cells[int(r), float(budget)] = at_r[losses.budget[at_r] == budget]
        parabolas = {key: _parabola(losses, rows) for key, rows in cells.items()}
        known = [p for p in parabolas.values() if p is not None]
        spare = sum(p.spare for p in known)
        variance = sum(p.squares for p in known) / spare if spare else math.nan
        for (r, budget), rows in cells.items():
            found.append(_minimum(losses, arm, r, budget, rows, parabolas[r, budget], variance, spare, level))
    return found


def _sizes(losses: Losses, rows: np.ndarray) -> np.ndarray:
    return losses.n_once[rows] + losses.n_rec[rows]


def _parabola(losses: Losses, rows: np.ndarray) -> _Parabola | None:
    log_n = np.log(_sizes(losses, rows))
    if len(np.unique(log_n.round(6))) < 3:  # closer ones are one size to a parabola in float64
        return None
    centre = float(log_n.mean())
    u = log_n - centre
    design = np.stack([np.ones_like(u), u, u**2], axis=1)
    coefficients = np.linalg.lstsq(design, losses.loss[rows], rcond=None)[0]
    squares = float(((losses.loss[rows] - design @ coefficients) ** 2).sum())
    return _Parabola(coefficients, np.linalg.inv(design.T @ design), centre, squares, len(rows) - 3)


def _minimum(losses, arm, r, budget, rows, parabola, variance, spare, level) -> Minimum:
    sizes = _sizes(losses, rows)
    if parabola is None:
        return Minimum(arm, r, budget, None, None, None, False, len(rows), "fewer than three sizes")
    a, b, c = parabola.coefficients
    if c <= 0:
        note = "no minimum: the losses bend downwards"
        return Minimum(arm, r, budget, None, None, None, False, len(rows), note)
    vertex = -b / (2 * c)
    if not abs(vertex) < _FARTHEST:
        note = "no minimum: the losses hardly bend"
        return Minimum(arm, r, budget, None, None, None, False, len(rows), note)
    n_optimal = math.exp(parabola.centre + vertex)
    interior = bool(sizes.min() < n_optimal < sizes.max())
    side = "above the largest" if n_optimal >= sizes.max() else "below the smallest"
    note = "" if interior else f"no interior minimum: the vertex lies {side} size"
    bounds = _fieller(parabola, variance, spare, level)
    return Minimum(arm, r, budget, n_optimal, float(a - b * b / (4 * c)), bounds, interior, len(rows), note)


def _fieller(parabola: _Parabola, variance: float, spare: int, level: float) -> tuple[float, float] | None:
    """Bounds of −b/2c: the values v at which b + 2·c·v does not differ from zero."""
    if not spare or not math.isfinite(variance):
        return None
    _, b, c = parabola.coefficients
    t2 = student_quantile((1 + level) / 2, spare) ** 2
    v_bb, v_bc, v_cc = (variance * parabola.inverse[i, j] for i, j in ((1, 1), (1, 2), (2, 2)))
    # (b + 2cv)² ≤ t²·(v_bb + 4v·v_bc + 4v²·v_cc)
    second, first, zeroth = 4 * (c * c - t2 * v_cc), 4 * (b * c - t2 * v_bc), b * b - t2 * v_bb
    inside = first * first - 4 * second * zeroth
    if second <= 0 or inside < 0:
        return None
    low, high = ((-first + sign * math.sqrt(inside)) / (2 * second) for sign in (-1, 1))
    if not -_FARTHEST < low <= high < _FARTHEST:
        return None
    return math.exp(parabola.centre + low), math.exp(parabola.centre + high)
