"""From a losses table to φ of every arm, with intervals, and the differences between arms."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

import numpy as np

from fit.identify import after_fitting, before_fitting
from fit.law import Law, Rows, Scale, make_rows
from fit.losses import Baseline, Losses
from fit.solve import HUBER, Fit, Objective, fit_law
from fit.uncertainty import LEVEL, RESAMPLES, Bootstrap, Draws, Interval, bootstrap, draw, percentiles
from looped.errors import UserError

Unit = Literal["cell", "row", "budget"]
_FEW_CELLS = 10
_FEWEST_BUDGETS = 4  # fewer give hardly more than one draw that keeps two of them
_MANY_BAD_REFITS = 0.05


@dataclasses.dataclass(frozen=True)
class Options:
    """How to fit.  `pair`: which cells the arms share when resampled together, the r = 1 cells or every (budget, r)."""

    objective: Objective = HUBER
    baseline: Baseline = "matched"
    unit: Unit = "cell"
    pair: Literal["baseline", "cells"] = "baseline"
    resamples: int = RESAMPLES
    level: float = LEVEL
    seed: int = 0

    def __post_init__(self):
        if not 0.5 <= self.level < 1:
            raise UserError(
                f"level is {self.level}; give the coverage of the interval as a fraction, such as 0.95."
            )
        if not 50 <= self.resamples <= 100_000:
            raise UserError(f"resamples is {self.resamples}; give between 50 and 100000, such as 1000.")
        if self.seed < 0:
            raise UserError(f"seed is {self.seed}; give a whole number of at least 0.")


DEFAULTS = Options()


@dataclasses.dataclass(frozen=True)
class Unidentified:
    """An arm whose rows (`index` [n] of the table) do not give a φ, and why."""

    arm: str
    index: np.ndarray
    reasons: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class PointFit:
    """The law fitted to the rows `index` [n] of the table, without an interval yet; `doubts` weaken it."""

    arm: str
    index: np.ndarray
    rows: Rows
    fit: Fit
    doubts: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ArmFit:
    """One arm: the rows `index` [n] of the table that it used, its fit, and φ's interval from its own resamples.

    `paired` are refits to the resamples that all arms of the table share (`boot` itself for a single arm).
    """

    arm: str
    index: np.ndarray
    rows: Rows
    fit: Fit
    draws: Draws
    boot: Bootstrap
    interval: Interval
    warnings: tuple[str, ...]
    paired: Bootstrap

    @property
    def phi(self) -> float:
        return self.fit.parameters["phi"]


@dataclasses.dataclass(frozen=True)
class Difference:
    """φ of `arm` minus φ of `against`, from resamples in which both keep the same r = 1 cells."""

    arm: str
    against: str
    estimate: float
    interval: Interval


@dataclasses.dataclass(frozen=True)
class Analysis:
    """Every arm of a table; `draws` are the resamples that the identified arms share, None if there can be none."""

    losses: Losses
    options: Options
    arms: dict[str, ArmFit | Unidentified]
    differences: tuple[Difference, ...]
    draws: Draws | None
    notes: tuple[str, ...] = ()

    @property
    def identified(self) -> list[ArmFit]:
        return [a for a in self.arms.values() if isinstance(a, ArmFit)]


def arm_rows(losses: Losses, index: np.ndarray, arm: np.ndarray | None = None) -> tuple[Rows, Scale]:
    """`fit.law.make_rows` for the rows `index` of the table."""
    once, rec, r = losses.n_once[index], losses.n_rec[index], losses.recurrences[index]
    return make_rows(once, rec, r, losses.tokens[index], losses.loss[index], arm)


def analyse(losses: Losses, options: Options = DEFAULTS) -> Analysis:
    """Fits the joint law to every arm, resamples each, and, for differences, all together."""
    results = {}
    for arm in losses.unnamed_arms:
        results[arm] = fit_arm(losses, arm, losses.rows_of(arm, options.baseline), options)
    able = [a for a in results.values() if isinstance(a, ArmFit)]
    if len(able) < 2:
        return Analysis(losses, options, results, (), able[0].draws if able else None)
    try:
        draws = draw_table(losses, [a.index for a in able], options)
    except UserError as error:
        return Analysis(losses, options, results, (), None, (f"no differences: {str(error).rstrip('.')}",))
    for a in able:
        results[a.arm] = dataclasses.replace(a, paired=bootstrap(a.fit, a.rows, draws, a.index))
    return Analysis(losses, options, results, tuple(differences(results, options)), draws)


def fit_point(losses: Losses, arm: str, index: np.ndarray, options: Options) -> PointFit | Unidentified:
    """The arm's fit, or why there is none."""
    law = Law()
    before = before_fitting(losses, index, law)
    if not before.identified:
        return Unidentified(arm, index, before.reasons)
    rows, scale = arm_rows(losses, index)
    try:
        fit = fit_law(law, rows, scale, objective=options.objective)
    except UserError as error:
        return Unidentified(arm, index, (str(error).rstrip("."),))
    after = after_fitting(fit)
    if not after.identified:
        return Unidentified(arm, index, after.reasons)
    return PointFit(arm, index, rows, fit, before.doubts + after.doubts)


def fit_arm(losses: Losses, arm: str, index: np.ndarray, options: Options) -> ArmFit | Unidentified:
    """The arm's fit with its interval, or why there is none."""
    point = fit_point(losses, arm, index, options)
    if isinstance(point, Unidentified):
        return point
    try:
        draws = draw_table(losses, [index], options)
    except UserError as error:
        return Unidentified(arm, index, (str(error).rstrip("."),))
    boot = bootstrap(point.fit, point.rows, draws, index)
    if boot.usable.mean() < 0.5:
        reason = f"{boot.failed} of {len(boot.usable)} resamples could not be fitted: add runs"
        return Unidentified(arm, index, (reason,))
    interval = boot.interval(boot.values["phi"], options.level)
    notes = point.doubts + doubts_of(boot)
    return ArmFit(arm, index, point.rows, point.fit, draws, boot, interval, notes, paired=boot)


def draw_table(losses: Losses, indices: list[np.ndarray], options: Options) -> Draws:
    """Resamples the rows `indices` of one or several arms: multiplicities [s, rows of the whole table]."""
    used = np.unique(np.concatenate(indices))
    _, cells = np.unique(losses.cells(options.unit, options.pair == "cells")[used], return_inverse=True)
    where = {row: i for i, row in enumerate(used)}
    groups = []
    for index in indices:
        budget = np.nan_to_num(losses.budget[index], nan=0.0)
        groups.append((np.array([where[row] for row in index]), losses.recurrences[index], budget))
    unit = options.unit if np.isfinite(losses.budget).all() else "row"
    fewest = min(len(np.unique(budget)) for _, _, budget in groups)
    if unit == "budget" and fewest < _FEWEST_BUDGETS:
        raise UserError(f"{fewest} budgets are too few to resample; resample cells, or add budgets.")
    draws = draw(cells, groups, options.resamples, options.seed, unit)
    weights = np.zeros((options.resamples, len(losses)))
    weights[:, used] = draws.weights
    everywhere = np.full(len(losses), -1)
    everywhere[used] = cells
    return dataclasses.replace(draws, weights=weights, cells=everywhere)


def doubts_of(boot: Bootstrap) -> tuple[str, ...]:
    """What the resampling itself says against its interval."""
    notes = []
    if boot.failed + boot.at_bound > _MANY_BAD_REFITS * len(boot.usable):
        notes.append(
            f"of {len(boot.usable)} resamples {boot.failed} could not be fitted and {boot.at_bound} ended with a"
            " parameter at a bound: the interval is rough"
        )
    if boot.redrawn:
        notes.append(f"{boot.redrawn} resamples lost an r, or all budgets but one, and were drawn again")
    if boot.units < _FEW_CELLS and boot.unit == "cell":
        notes.append(f"the interval rests on {boot.units} cells (budget × r) and is rough: add budgets")
    return tuple(notes)


def differences(
    results: Mapping[str, ArmFit | Unidentified], options: Options, every_pair: bool = False
) -> list[Difference]:
    """φ differences of the arms against the reference arm, or of every pair."""
    able = {name: a for name, a in results.items() if isinstance(a, ArmFit)}
    if len(able) < 2:
        return []
    order = list(able)  # as the table's arms are, the reference first
    pairs = [(b, a) for i, a in enumerate(order) for b in order[i + 1 :] if every_pair or i == 0]
    found = []
    for name, against in pairs:
        one, other = able[name], able[against]
        both = one.paired.usable & other.paired.usable
        gap = (one.paired.values["phi"] - other.paired.values["phi"])[both]
        interval = percentiles(gap, options.level, min(one.paired.units, other.paired.units))
        found.append(Difference(name, against, one.phi - other.phi, interval))
    return found
