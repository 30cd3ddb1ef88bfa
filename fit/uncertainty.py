"""How well the rows determine the law: bootstraps by cell, row or budget, and the profile likelihood of φ."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from fit.law import Rows
from fit.solve import Fit, Objective, at_bound, solve
from fit.statistics import bootstrap_tail
from looped.errors import UserError

RESAMPLES = 1000
LEVEL = 0.95
_REDRAWS = 200
_HOPELESS = 20  # times as many draws as are wanted without a single whole one
_ROUNDING = 1e-32  # the square of what float64 leaves of a residual of zero


@dataclasses.dataclass(frozen=True)
class Interval:
    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclasses.dataclass(frozen=True)
class Draws:
    """Resamples of a table of n rows.

    `cells` [n] is the unit each row belongs to (−1: not resampled), `weights` [s, n] are multiplicities, `redrawn`
    counts draws that were rejected.
    """

    unit: str
    cells: np.ndarray
    weights: np.ndarray
    redrawn: int


@dataclasses.dataclass(frozen=True)
class Bootstrap:
    """Refits of one law to resamples.

    `values` [s] by parameter name (natural), `usable` [s] is False for refits that failed.  `at_bound` counts refits
    with a parameter at a bound; they are kept.
    """

    unit: str
    units: int
    values: dict[str, np.ndarray]
    usable: np.ndarray
    failed: int
    at_bound: int
    redrawn: int
    x: np.ndarray

    def interval(self, values: np.ndarray, level: float = LEVEL) -> Interval:
        """The expanded percentile interval of a statistic [s] of the refits."""
        return percentiles(values[self.usable], level, self.units)


def percentiles(values: np.ndarray, level: float, units: int) -> Interval:
    """The interval of resampled `values` [s] that covers `level` when `units` units were drawn; NaN without values."""
    if not len(values):
        return Interval(math.nan, math.nan)
    tail = bootstrap_tail(level, units)
    with np.errstate(invalid="ignore"):  # between two infinite values there is none
        low, high = np.quantile(values, [tail, 1 - tail])
    return Interval(float(low), float(high))


def draw(
    cells: np.ndarray,
    groups: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]],
    resamples: int,
    seed: int,
    unit: str = "cell",
) -> Draws:
    """Resamples the units `cells` [n] with replacement.

    Each of `groups` is (rows, recurrences, budgets) of an arm; a draw that leaves an arm without one of its r, or with
    one budget where it had several, cannot be fitted and is redrawn.  Raises `UserError` if hardly any draw could be.
    """
    rng = np.random.default_rng(seed)
    count = int(cells.max()) + 1
    weights = np.zeros((0, len(cells)))
    rejected = 0
    for _ in range(_REDRAWS):
        need = resamples - len(weights)
        if need == 0 or (not len(weights) and rejected >= _HOPELESS * resamples):
            break
        drawn = rng.multinomial(count, np.full(count, 1 / count), size=need)[:, cells].astype(float)
        whole = np.ones(need, dtype=bool)
        for rows, recurrences, budgets in groups:
            present = drawn[:, rows] > 0
            for r in np.unique(recurrences):
                whole &= present[:, recurrences == r].any(axis=1)
            levels = np.unique(budgets)
            if len(levels) > 1:
                whole &= sum(present[:, budgets == b].any(axis=1).astype(int) for b in levels) > 1
        rejected += int((~whole).sum())
        weights = np.concatenate([weights, drawn[whole]])
    if len(weights) < resamples:
        raise UserError(
            f"resampling {count} {unit}s hardly ever keeps every r and two budgets; add runs, or resample rows with"
            " --resample row."
        )
    return Draws(unit, cells, weights, rejected)


def bootstrap(fit: Fit, rows: Rows, draws: Draws, index: np.ndarray) -> Bootstrap:
    """Refits `fit.law` to every resample, from the fit itself; `rows` are the rows `index` of the table drawn."""
    weights = draws.weights[:, index]
    x, values = solve(fit.law, rows, np.repeat(fit.x[None], len(weights), axis=0), weights, fit.objective)
    natural = fit.law.natural(x, fit.scale)
    usable = np.isfinite(values) & np.all([np.isfinite(v) for v in natural.values()], axis=0)
    bound = sum(bool(at_bound(fit.law, v, rows)) for v in x[usable])
    return Bootstrap(
        unit=draws.unit,
        units=len(np.unique(draws.cells[index])),
        values=natural,
        usable=usable,
        failed=int((~usable).sum()),
        at_bound=int(bound),
        redrawn=draws.redrawn,
        x=x,
    )


@dataclasses.dataclass(frozen=True)
class Profile:
    """Twice the drop in quasi log likelihood [m] with φ held at `phi` [m], and where it is below the quantile."""

    phi: np.ndarray
    drop: np.ndarray
    interval: Interval


def profile(fit: Fit, rows: Rows, low: float, high: float, points: int = 41, level: float = LEVEL) -> Profile:
    """Profiles φ between `low` and `high`, the other parameters refitted at every point.

    The objective, divided by its `dispersion`, stands for minus the log likelihood of independent rows.  An interval
    that reaches `low` or `high` is cut there.
    """
    index = fit.law.names.index("phi")
    phis = np.unique(np.append(np.linspace(low, high, points), fit.x[index]))
    x0 = np.repeat(fit.x[None], len(phis), axis=0)
    x0[:, index] = phis
    n = len(rows.log_loss)
    _, values = solve(fit.law, rows, x0, np.ones(n), fit.objective, held=("phi",))
    drop = 2 * np.maximum(values - fit.value, 0) / dispersion(fit.objective, fit.residuals, len(fit.x))
    limit = NormalDist().inv_cdf((1 + level) / 2) ** 2
    centre = int(np.argmin(drop))
    return Profile(
        phis, drop, Interval(_cross(phis, drop, centre, limit, -1), _cross(phis, drop, centre, limit, 1))
    )


def _cross(phis: np.ndarray, drop: np.ndarray, centre: int, limit: float, step: int) -> float:
    i = centre
    while 0 <= i + step < len(phis) and drop[i + step] < limit:
        i += step
    j = i + step
    if not 0 <= j < len(phis):
        return float(phis[i])
    return float(phis[i] + (limit - drop[i]) / (drop[j] - drop[i]) * (phis[j] - phis[i]))


def dispersion(objective: Objective, residuals: np.ndarray, parameters: int) -> float:
    """E[ψ²]/E[ψ′] of the log residuals [n], ψ the objective's derivative: the scale of differences of the objective.

    Twice a rise of the objective, divided by this, is χ² for independent rows whatever their distribution (Hampel et
    al., Robust Statistics, 1986, section 7.2).  E[ψ′], the share within δ, is read off the rows nearest zero.
    """
    size = np.abs(residuals)
    spare = max(len(size) - parameters, 1)
    if objective.kind == "squares":
        return max(float((size**2).sum()) / spare, _ROUNDING)
    within = max(objective.delta, float(np.median(size)))
    slope = float(np.mean(size <= within)) * objective.delta / within
    return max(float((np.minimum(size, objective.delta) ** 2).sum()) / spare / slope, _ROUNDING)
