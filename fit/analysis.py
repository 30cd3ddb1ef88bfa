"""From a losses table to φ of every arm, with intervals, and the differences between arms."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from fit.identify import Verdict, after_fitting, before_fitting
from fit.law import Law, Rows, make_rows
from fit.losses import Baseline, Losses
from fit.solve import HUBER, Fit, Objective, fit_law
from fit.uncertainty import LEVEL, RESAMPLES, Bootstrap, Draws, Interval, bootstrap, draw, percentiles
from looped.errors import UserError

Unit = Literal["cell", "row", "budget"]
REFERENCE_ARMS = ("full", "vanilla", "baseline")
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
class ArmResult:
    """One arm: the table rows it used [n], the verdict, and, if identified, its fit and resamples."""

    arm: str
    index: np.ndarray
    rows: Rows | None
    verdict: Verdict
    fit: Fit | None = None
    boot: Bootstrap | None = None
    interval: Interval | None = None
    warnings: tuple[str, ...] = ()

    @property
    def phi(self) -> float | None:
        return None if self.fit is None or self.interval is None else self.fit.parameters["phi"]


@dataclasses.dataclass(frozen=True)
class Difference:
    """φ of `arm` minus φ of `against`, from resamples in which both keep the same r = 1 cells."""

    arm: str
    against: str
    estimate: float
    interval: Interval


@dataclasses.dataclass(frozen=True)
class Analysis:
    losses: Losses
    options: Options
    arms: dict[str, ArmResult]
    differences: tuple[Difference, ...]
    draws: Draws | None

    @property
    def identified(self) -> list[ArmResult]:
        return [a for a in self.arms.values() if a.phi is not None]


def arm_rows(losses: Losses, index: np.ndarray, arm: np.ndarray | None = None):
    """`fit.law.make_rows` for the rows `index` of the table."""
    return make_rows(
        losses.n_once[index],
        losses.n_rec[index],
        losses.recurrences[index],
        losses.tokens[index],
        losses.loss[index],
        arm,
    )


def analyse(losses: Losses, options: Options = DEFAULTS) -> Analysis:
    """Fits the joint law to every arm and resamples all arms together."""
    results = {}
    for arm in losses.unnamed_arms:
        index = losses.rows_of(arm, options.baseline)
        results[arm] = fit_arm(losses, arm, index, options)
    able = [a for a in results.values() if a.fit is not None]
    draws = None
    if able:
        try:
            draws = draw_table(losses, able, options)
        except UserError as error:
            refused = Verdict((str(error).rstrip("."),))
            for a in able:
                results[a.arm] = dataclasses.replace(a, verdict=refused)
    if draws is not None:
        for a in able:
            assert a.fit is not None
            assert a.rows is not None
            boot = bootstrap(a.fit, a.rows, draws, a.index)
            results[a.arm] = with_interval(a, boot, options)
    return Analysis(losses, options, results, tuple(differences(results, options)), draws)


def fit_arm(losses: Losses, arm: str, index: np.ndarray, options: Options) -> ArmResult:
    """The arm's fit, or the verdict that says why there is none."""
    law = Law()
    verdict = before_fitting(losses, index, law)
    if not verdict.identified:
        return ArmResult(arm, index, None, verdict)
    rows, scale = arm_rows(losses, index)
    fit = fit_law(law, rows, scale, objective=options.objective)
    after = after_fitting(fit)
    verdict = Verdict(after.reasons, verdict.doubts + after.doubts)
    return ArmResult(arm, index, rows, verdict, fit if verdict.identified else None)


def draw_table(losses: Losses, arms: list[ArmResult], options: Options) -> Draws:
    """Resamples the rows that `arms` use: multiplicities [s, rows of the whole table]."""
    used = np.unique(np.concatenate([a.index for a in arms]))
    cells = losses.cells(options.unit, options.pair == "cells")[used]
    _, cells = np.unique(cells, return_inverse=True)
    where = {row: i for i, row in enumerate(used)}
    groups = []
    for a in arms:
        budget = np.nan_to_num(losses.budget[a.index], nan=0.0)
        groups.append((np.array([where[row] for row in a.index]), losses.recurrences[a.index], budget))
    unit = options.unit if np.isfinite(losses.budget).all() else "row"
    fewest = min(len(np.unique(budgets)) for _, _, budgets in groups)
    if unit == "budget" and fewest < _FEWEST_BUDGETS:
        raise UserError(f"{fewest} budgets are too few to resample; resample cells, or add budgets.")
    draws = draw(cells, groups, options.resamples, options.seed, unit)
    weights = np.zeros((options.resamples, len(losses)))
    weights[:, used] = draws.weights
    everywhere = np.full(len(losses), -1)
    everywhere[used] = cells
    return dataclasses.replace(draws, weights=weights, cells=everywhere)


def with_interval(result: ArmResult, boot: Bootstrap, options: Options) -> ArmResult:
    notes = list(result.verdict.doubts)
    if boot.usable.mean() < 0.5:
        verdict = Verdict((f"{boot.failed} of {len(boot.usable)} resamples could not be fitted: add runs",))
        return dataclasses.replace(result, verdict=verdict, boot=boot)
    bad = boot.failed + boot.at_bound
    if bad > _MANY_BAD_REFITS * len(boot.usable):
        notes.append(
            f"of {len(boot.usable)} resamples {boot.failed} could not be fitted and {boot.at_bound} ended with a"
            " parameter at a bound: the interval is rough"
        )
    if boot.redrawn:
        notes.append(f"{boot.redrawn} resamples lost an r, or all budgets but one, and were drawn again")
    if boot.units < _FEW_CELLS and boot.unit == "cell":
        notes.append(f"the interval rests on {boot.units} cells (budget × r) and is rough: add budgets")
    interval = boot.interval(boot.values["phi"], options.level)
    return dataclasses.replace(result, boot=boot, interval=interval, warnings=tuple(notes))


def reference_arm(names: list[str]) -> str:
    """The arm others are compared with: `full`, `vanilla` or `baseline` if there is one, else the first."""
    return next((n for n in REFERENCE_ARMS if n in names), names[0])


def differences(
    results: dict[str, ArmResult], options: Options, every_pair: bool = False
) -> list[Difference]:
    """φ differences of the arms against the reference arm, or of every pair."""
    able = {name: a for name, a in results.items() if a.phi is not None}
    if len(able) < 2:
        return []
    names = list(able)
    reference = reference_arm(names)
    order = [reference] + [n for n in names if n != reference]
    pairs = [(b, a) for i, a in enumerate(order) for b in order[i + 1 :] if every_pair or a == reference]
    found = []
    for name, against in pairs:
        one, other = able[name], able[against]
        assert one.boot is not None
        assert other.boot is not None
        assert one.phi is not None
        assert other.phi is not None
        both = one.boot.usable & other.boot.usable
        gap = (one.boot.values["phi"] - other.boot.values["phi"])[both]
        interval = percentiles(gap, options.level, min(one.boot.units, other.boot.units))
        found.append(Difference(name, against, one.phi - other.phi, interval))
    return found
