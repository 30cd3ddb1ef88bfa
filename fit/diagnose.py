"""Where the law fits and where it does not: multipliers by r, parts of the grid, single cells, misfit."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from fit.analysis import Analysis, ArmFit, Options, Unidentified, fit_arm
from fit.law import Multipliers, worth
from fit.sensitivity import leave_cells_out
from fit.solve import fit_law
from fit.statistics import chi2_tail, f_tail
from fit.uncertainty import Interval, Profile, bootstrap, dispersion, profile

_SUBSET_RESAMPLES = 200


@dataclasses.dataclass(frozen=True)
class Multiplier:
    """The worth of r passes: a free m(r) with its interval beside r^φ."""

    recurrences: int
    free: float
    interval: Interval
    power: float


@dataclasses.dataclass(frozen=True)
class LackOfFit:
    """Whether m(r) departs from r^φ by more than chance.

    `rows_p` is the quasi-likelihood-ratio test with rows independent; `cells_p` the Wald F test of log m(r) against
    φ·log r with the covariance of the resamples, which lets the runs of a cell err together.  None with one r above 1,
    or as many parameters as cells.
    """

    multipliers: tuple[Multiplier, ...]
    misfit: float
    rows_p: float | None
    cells_p: float | None


@dataclasses.dataclass(frozen=True)
class Subset:
    """φ from a part of the rows, or why it gives none."""

    name: str
    rows: int
    phi: float | None
    interval: Interval | None
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Influence:
    """How φ moves when one cell (budget × r) is left out."""

    recurrences: int
    budget_flops: float
    change: float


@dataclasses.dataclass(frozen=True)
class Misfit:
    """Log residuals (predicted − observed) of a group of rows: mean, and rmse in nats."""

    name: str
    rows: int
    mean_log: float
    rmse: float


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    arm: str
    lack_of_fit: LackOfFit
    subsets: tuple[Subset, ...]
    influence: tuple[Influence, ...]
    misfit: tuple[Misfit, ...]
    profile: Profile


def diagnose(analysis: Analysis, arm: ArmFit) -> Diagnosis:
    """Diagnoses an arm that has a φ."""
    return Diagnosis(
        arm=arm.arm,
        lack_of_fit=lack_of_fit(analysis, arm),
        subsets=tuple(subsets(analysis, arm)),
        influence=tuple(influence(analysis, arm)),
        misfit=tuple(misfits(analysis, arm)),
        profile=phi_profile(analysis, arm),
    )


def lack_of_fit(analysis: Analysis, arm: ArmFit) -> LackOfFit:
    """Fits one multiplier for each r above 1 in place of r^φ."""
    fit, rows = arm.fit, arm.rows
    recurrences = tuple(int(r) for r in np.unique(analysis.losses.recurrences[arm.index]) if r > 1)
    free = fit_law(Multipliers(recurrences), rows, fit.scale, objective=fit.objective)
    boot = bootstrap(free, rows, arm.draws, arm.index)
    names = [f"m({r})" for r in recurrences]
    multipliers = tuple(
        Multiplier(
            r,
            free.parameters[name],
            boot.interval(boot.values[name], analysis.options.level),
            float(worth(fit.parameters["phi"], r)),
        )
        for r, name in zip(recurrences, names, strict=True)
    )
    spare = len(recurrences) - 1
    if spare < 1:
        return LackOfFit(multipliers, free.rmse, None, None)
    ratio = 2 * (fit.value - free.value) / dispersion(fit.objective, free.residuals, len(free.x))
    # The solver's vector holds log m(r), finite at m(r) = 0.
    at = [free.law.names.index(name) for name in names]
    logs, estimate = boot.x[boot.usable][:, at], free.x[at]
    rows_p, cells_p = chi2_tail(ratio, spare), math.nan
    if len(logs) > len(names):
        wald = _distance_to_power(estimate, np.cov(logs.T), np.log(recurrences))
        cells_p = f_tail(wald / spare, spare, boot.units - len(free.x))
    return LackOfFit(multipliers, free.rmse, *(None if math.isnan(p) else p for p in (rows_p, cells_p)))


def _distance_to_power(log_m: np.ndarray, covariance: np.ndarray, log_r: np.ndarray) -> float:
    """Smallest (log m − φ·log r)ᵀ C⁻¹ (log m − φ·log r) over φ; NaN where C says nothing, as that of equal draws."""
    inverse = np.linalg.pinv(covariance)
    weight = log_r @ inverse @ log_r
    if not weight > 0:
        return math.nan
    phi = (log_r @ inverse @ log_m) / weight
    gap = log_m - phi * log_r
    return float(gap @ inverse @ gap)


def subsets(analysis: Analysis, arm: ArmFit) -> list[Subset]:
    """φ without each r, and from the lower and the upper half of the budgets."""
    losses = analysis.losses
    r, budget = losses.recurrences[arm.index], losses.budget[arm.index]
    parts = [(f"without r = {value}", arm.index[r != value]) for value in np.unique(r)]
    levels = np.unique(budget)
    if np.isfinite(levels).all() and len(levels) >= 4:
        middle = len(levels) // 2
        parts.append(
            (f"lower budgets, to {levels[middle - 1]:.3g} FLOPs", arm.index[budget <= levels[middle - 1]])
        )
        parts.append(
            (f"upper budgets, from {levels[-middle]:.3g} FLOPs", arm.index[budget >= levels[-middle]])
        )
    return [_subset(analysis, arm, name, index) for name, index in parts]


def _subset(analysis: Analysis, arm: ArmFit, name: str, index: np.ndarray) -> Subset:
    options: Options = dataclasses.replace(
        analysis.options, resamples=min(_SUBSET_RESAMPLES, analysis.options.resamples)
    )
    part = fit_arm(analysis.losses, arm.arm, index, options)
    if isinstance(part, Unidentified):
        return Subset(name, len(index), None, None, part.reasons[0])
    return Subset(name, len(index), part.phi, part.interval)


def influence(analysis: Analysis, arm: ArmFit) -> list[Influence]:
    """The change of φ without each cell, largest first."""
    fit = arm.fit
    _, cells, x = leave_cells_out(analysis.losses, arm, fit)
    phi = fit.law.names.index("phi")
    found = []
    for cell in range(int(cells.max()) + 1):
        row = arm.index[np.flatnonzero(cells == cell)[0]]
        change = float(x[cell, phi] - fit.x[phi])
        found.append(
            Influence(int(analysis.losses.recurrences[row]), float(analysis.losses.budget[row]), change)
        )
    return sorted(found, key=lambda i: -abs(i.change))


def misfits(analysis: Analysis, arm: ArmFit) -> list[Misfit]:
    """Misfit by r, then by budget."""
    fit, losses = arm.fit, analysis.losses
    observed = losses.loss[arm.index]
    r, budget = losses.recurrences[arm.index], losses.budget[arm.index]
    groups = [(f"r = {value}", r == value) for value in np.unique(r)]
    groups += [(f"{value:.3g} FLOPs", budget == value) for value in np.unique(budget) if np.isfinite(value)]
    return [
        Misfit(
            name,
            int(at.sum()),
            float(fit.residuals[at].mean()),
            float(np.sqrt(np.mean((fit.predicted[at] - observed[at]) ** 2))),
        )
        for name, at in groups
    ]


def phi_profile(analysis: Analysis, arm: ArmFit) -> Profile:
    """The profile of φ over a range three times as wide as its interval, and wider where that does not close."""
    fit, rows, interval, phi = arm.fit, arm.rows, arm.interval, arm.phi
    reach = 1.5 * max(interval.high - phi, phi - interval.low, 0.05)
    for _ in range(4):
        found = profile(fit, rows, phi - reach, phi + reach, level=analysis.options.level)
        if found.interval.low > phi - reach and found.interval.high < phi + reach:
            break
        reach *= 2
    return found
