"""Arms against each other: Δφ under three views of what arms share, and what a loss difference is made of."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fit.analysis import (
    Analysis,
    ArmFit,
    Difference,
    Options,
    Unidentified,
    analyse,
    arm_rows,
    differences,
)
from fit.law import ArmExponents, Law, worth
from fit.losses import Losses
from fit.solve import fit_law
from fit.uncertainty import Interval, bootstrap, percentiles
from looped.errors import UserError

PARTS: tuple[str, ...] = ("loop", "tokens", "recipe")
_SAME_SIZE = 0.1  # of log N
RECIPE = ("E", "A", "B", "alpha", "beta")


@dataclasses.dataclass(frozen=True)
class Split:
    """What the loss of `arm` minus that of `against` is made of, at equal compute, in nats per token.

    Negative is better for `arm`.
    Means over the `pairs` of runs of equal budget, r and (to a tenth) size, for one `recurrences` or for all (None).
    `loop` is the part of φ, `tokens` that of what the same FLOPs buy (tokens, and the difference in size if there is
    one), `recipe` that of E, A, B, α and β; they add up to `fitted`.  `observed` is the difference of the losses.
    """

    arm: str
    against: str
    recurrences: int | None
    pairs: int
    observed: float
    fitted: float
    parts: dict[str, float]
    intervals: dict[str, Interval]


@dataclasses.dataclass(frozen=True)
class View:
    """One view of what the arms share: φ by arm with its interval, differences, and the misfit in nats (rmse)."""

    shares: str
    phi: dict[str, float]
    intervals: dict[str, Interval]
    differences: tuple[Difference, ...]
    misfit: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    analysis: Analysis
    differences: tuple[Difference, ...]
    views: tuple[View, ...]
    splits: tuple[Split, ...]
    notes: tuple[str, ...]


def compare(losses: Losses, options: Options) -> Comparison:
    """Compares two or more arms of one table, all fitted under one baseline policy, convention and objective.

    Raises `UserError` with fewer than two arms, or where fewer than two of them have a φ.
    """
    if len(losses.arms) < 2:
        have = ", ".join(losses.arms) or "none"
        raise UserError(
            f"compare needs two arms with r > 1 and the table has {len(losses.arms)} ({have}); name them in a column"
            " `arm`, or give one file an arm."
        )
    analysis = analyse(losses, options)
    able = {a.arm: a for a in analysis.identified}
    if len(able) < 2:
        refused = [a for a in analysis.arms.values() if isinstance(a, Unidentified)]
        why = "; ".join(f"{a.arm}: {a.reasons[0]}" for a in refused)
        raise UserError(
            f"compare needs a φ for two arms and {len(able)} of {len(analysis.arms)} has one: {why}."
        )
    if analysis.draws is None:
        raise UserError(f"{analysis.notes[0]}.")
    pairs = tuple(differences(analysis.arms, options, every_pair=True))
    own = View(
        "nothing: every arm has its own law",
        {name: a.phi for name, a in able.items()},
        {name: a.interval for name, a in able.items()},
        pairs,
        _pooled_misfit(able),
    )
    shared, doubts = _shared_exponents(analysis, able)
    reference, *others = able.values()
    splits = [part for other in others for part in split(analysis, other, reference)]
    notes = [f"{s.arm} and {s.against} have no configuration in common" for s in splits if not s.pairs]
    views = (own, shared, _one_law(analysis, able))
    return Comparison(analysis, pairs, views, tuple(s for s in splits if s.pairs), tuple(notes + doubts))


def _pooled_misfit(able: Mapping[str, ArmFit]) -> float:
    squares = [(a.fit.predicted - np.exp(a.rows.log_loss)) ** 2 for a in able.values()]
    return float(np.sqrt(np.concatenate(squares).mean()))


def _shared_exponents(analysis: Analysis, able: Mapping[str, ArmFit]) -> tuple[View, list[str]]:
    """One law with its own φ for each arm: E, A, B, α, β shared, every r = 1 row counted once."""
    losses, names = analysis.losses, list(able)
    index = np.unique(np.concatenate([a.index for a in able.values()]))
    arm = [
        names.index(a) if r > 1 else 0
        for a, r in zip(losses.arm[index], losses.recurrences[index], strict=True)
    ]
    rows, scale = arm_rows(losses, index, np.array(arm))
    fit = fit_law(ArmExponents(arms=len(names)), rows, scale, objective=analysis.options.objective)
    assert analysis.draws is not None
    boot = bootstrap(fit, rows, analysis.draws, index)
    level = analysis.options.level
    values = {name: boot.values[f"phi[{i}]"] for i, name in enumerate(names)}
    phi = {name: fit.parameters[f"phi[{i}]"] for i, name in enumerate(names)}
    found = [
        Difference(b, a, phi[b] - phi[a], boot.interval(values[b] - values[a], level))
        for a, b in itertools.combinations(names, 2)
    ]
    intervals = {name: boot.interval(v, level) for name, v in values.items()}
    view = View("everything but φ (one E, A, B, α, β)", phi, intervals, tuple(found), fit.rmse)
    notes = (
        [f"with shared parameters the fit is not settled: {fit.status}"] if fit.status != "converged" else []
    )
    return view, notes


def _one_law(analysis: Analysis, able: Mapping[str, ArmFit]) -> View:
    """One law and one φ for every arm."""
    index = np.unique(np.concatenate([a.index for a in able.values()]))
    rows, scale = arm_rows(analysis.losses, index)
    fit = fit_law(Law(), rows, scale, objective=analysis.options.objective)
    return View("everything (one law, one φ)", dict.fromkeys(able, fit.parameters["phi"]), {}, (), fit.rmse)


def split(analysis: Analysis, arm: ArmFit, against: ArmFit) -> list[Split]:
    """Splits the loss difference of two arms at equal compute, for every r > 1 and for all of them.

    Each part is its average effect over the orders in which φ, the tokens and the recipe can be exchanged (Shapley's),
    so that the parts add up and no order is preferred.
    """
    here, there = _matched(analysis.losses, arm, against)
    if not len(here):
        return [Split(arm.arm, against.arm, None, 0, math.nan, math.nan, {}, {})]
    r = analysis.losses.recurrences[here]
    point = _parts(analysis.losses, here, there, _one(arm), _one(against))
    draws = _parts(analysis.losses, here, there, _many(arm), _many(against))
    usable = arm.paired.usable & against.paired.usable
    observed = analysis.losses.loss[here] - analysis.losses.loss[there]
    units = min(arm.paired.units, against.paired.units)
    found = []
    for value in [None, *(int(v) for v in np.unique(r))]:
        at = np.ones(len(r), dtype=bool) if value is None else r == value
        parts = {part: float(point[part][0, at].mean()) for part in PARTS}
        intervals = {}
        for part in PARTS:
            intervals[part] = percentiles(
                draws[part][usable][:, at].mean(axis=1), analysis.options.level, units
            )
        found.append(
            Split(
                arm=arm.arm,
                against=against.arm,
                recurrences=value,
                pairs=int(at.sum()),
                observed=float(observed[at].mean()),
                fitted=sum(parts.values()),
                parts=parts,
                intervals=intervals,
            )
        )
    return found


def _matched(losses: Losses, arm: ArmFit, against: ArmFit) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of rows with r > 1 and equal budget, r and (where stated) seed, nearest in size and within a tenth."""
    size = np.log(losses.n_once + losses.n_rec)
    seeds = losses.seeds

    def key(i: int) -> tuple:
        return losses.budget[i], losses.recurrences[i], seeds[i]

    theirs: dict[tuple, list[int]] = {}
    for i in against.index:
        if losses.recurrences[i] > 1:
            theirs.setdefault(key(i), []).append(i)
    pairs = []
    for i in arm.index:
        others = theirs.get(key(i), []) if losses.recurrences[i] > 1 else []
        if others:
            nearest = min(others, key=lambda j: abs(size[j] - size[i]))
            if abs(size[nearest] - size[i]) < _SAME_SIZE:
                pairs.append((i, nearest))
    here, there = zip(*pairs, strict=True) if pairs else ((), ())
    return np.array(here, dtype=int), np.array(there, dtype=int)


def _one(arm: ArmFit) -> dict[str, np.ndarray]:
    return {k: np.array([[v]]) for k, v in arm.fit.parameters.items()}


def _many(arm: ArmFit) -> dict[str, np.ndarray]:
    return {k: v[:, None] for k, v in arm.paired.values.items()}


def evaluate(p: Mapping[str, Any], n_once, n_rec, recurrences, tokens) -> np.ndarray:
    """The joint law in natural parameters; arrays broadcast."""
    n = n_once + worth(p["phi"], recurrences) * n_rec
    with np.errstate(over="ignore", invalid="ignore"):
        return p["E"] + p["A"] * n ** -p["alpha"] + p["B"] * tokens ** -p["beta"]


def _parts(losses: Losses, here, there, ours, theirs) -> dict[str, np.ndarray]:
    """Each part [s, pairs]."""

    def at(exchanged: frozenset[str]) -> np.ndarray:
        recipe = ours if "recipe" in exchanged else theirs
        p = {name: recipe[name] for name in RECIPE} | {
            "phi": (ours if "loop" in exchanged else theirs)["phi"]
        }
        rows = here if "tokens" in exchanged else there
        return evaluate(
            p, losses.n_once[rows], losses.n_rec[rows], losses.recurrences[rows] * 1.0, losses.tokens[rows]
        )

    value = {frozenset(s): at(frozenset(s)) for n in range(4) for s in itertools.combinations(PARTS, n)}
    parts = {}
    for part in PARTS:
        steps = []
        for order in itertools.permutations(PARTS):
            before = frozenset(order[: order.index(part)])
            steps.append(value[before | {part}] - value[before])
        parts[part] = np.mean(steps, axis=0)
    return parts
