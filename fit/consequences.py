"""What an estimate of φ means: equivalent unshared models, and the compute-optimal size, tokens and loss."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from fit.analysis import Analysis, ArmFit
from fit.compare import evaluate
from fit.law import worth
from fit.losses import Losses
from fit.uncertainty import Interval, percentiles
from looped.errors import UserError


@dataclasses.dataclass(frozen=True)
class Equivalent:
    """A looped model beside unshared ones; sizes in parameters, without the tables the convention leaves out.

    `equal_loss`: n_once + r^φ·n_rec, the unshared model of the same loss on the same tokens.  `equal_cost`: n_once +
    r·n_rec, the one of the same training FLOPs a token (with k < r, a pass without gradient costs a third of one with).
    Losses are given where `tokens` is.
    """

    arm: str
    recurrences: int
    backprop_recurrences: int
    d_model: int | None
    n_once: float
    n_rec: float
    equal_loss: float
    equal_loss_interval: Interval
    equal_cost: float
    tokens: float | None
    loss: float | None
    loss_at_equal_cost: float | None

    @property
    def unique(self) -> float:
        return self.n_once + self.n_rec


@dataclasses.dataclass(frozen=True)
class Family:
    """How the models of one arm and r grow.

    Each of `once`, `rec` and `flops` (per token) is a quadratic in width without a constant, in coefficients (of d², of
    d), or, without widths, proportional to the size.  `widths` are the smallest and largest run.
    """

    once: np.ndarray
    rec: np.ndarray
    flops: np.ndarray
    widths: tuple[float, float]
    by_width: bool

    def at(self, width):
        """(n_once, n_rec, FLOPs per token) at `width` (or, without widths, at a size in parameters)."""
        width = np.asarray(width, dtype=np.float64)
        square = width**2 if self.by_width else np.zeros_like(width)
        return tuple(c[0] * square + c[1] * width for c in (self.once, self.rec, self.flops))


def _column(losses: Losses, name: str, index: np.ndarray) -> np.ndarray | None:
    values = losses.columns.get(name)
    if values is None or any(values[i] in (None, "") for i in index):
        return None
    return np.array([float(values[i]) for i in index])


def family(losses: Losses, arm: ArmFit, recurrences: int) -> Family:
    """Reads the family of models at `recurrences` off the table.  Raises `UserError` if the arm has no such runs."""
    index = arm.index[losses.recurrences[arm.index] == recurrences]
    have = ", ".join(str(r) for r in np.unique(losses.recurrences[arm.index]))
    if not len(index):
        raise UserError(
            f"recurrences is {recurrences}, which arm {arm.arm} has no runs at; it has r = {have}."
        )
    once, rec = losses.n_once[index], losses.n_rec[index]
    flops = _column(losses, "flops_per_token", index)
    flops = 6 * (once + recurrences * rec) if flops is None else flops
    width = _column(losses, "d_model", index)
    by_width = width is not None and len(np.unique(width)) > 1 and _quadratic(width, once, rec)
    if not by_width or width is None:
        width = once + rec
    columns = np.stack([width**2, width], axis=1) if by_width else width[:, None]

    def coefficients(values: np.ndarray) -> np.ndarray:
        weights = 1 / np.maximum(values, 1e-9 * np.abs(values).max() + 1e-300)
        solved = np.linalg.lstsq(columns * weights[:, None], values * weights, rcond=None)[0]
        return solved if by_width else np.array([0.0, solved[0]])

    grown = [np.zeros(2) if not v.any() else coefficients(v) for v in (once, rec, flops)]
    return Family(grown[0], grown[1], grown[2], (float(width.min()), float(width.max())), by_width)


def _quadratic(width: np.ndarray, once: np.ndarray, rec: np.ndarray) -> bool:
    """Whether parameters are c·d² + e·d to a thousandth: models of one depth, whatever the width."""
    columns = np.stack([width**2, width], axis=1)
    for values in (once, rec):
        if values.any():
            fitted = columns @ np.linalg.lstsq(columns, values, rcond=None)[0]
            if np.abs(fitted - values).max() > 1e-3 * values.max():
                return False
    return True


def equivalent(
    analysis: Analysis,
    arm: ArmFit,
    recurrences: int,
    width: int | None = None,
    n_once: float | None = None,
    n_rec: float | None = None,
    tokens: float | None = None,
    backprop_recurrences: int | None = None,
) -> Equivalent:
    """The unshared models that equal a looped one, named by `width` (of the table's family) or by `n_once` and `n_rec`.

    Raises `UserError` where the size is not given one way, or the table cannot tell the parameters of that width.
    """
    if (width is None) == (n_once is None) or (n_once is None) != (n_rec is None):
        raise UserError(
            f"width is {width}, n_once {n_once}, n_rec {n_rec}; give --width, or both --n-once and --n-rec."
        )
    if recurrences < 1:
        raise UserError(f"recurrences is {recurrences}; give a whole number of at least 1.")
    if width is not None:
        grown = family(analysis.losses, arm, recurrences)
        if not grown.by_width:
            raise UserError(
                "the table has no column d_model (or depth changes with it), so a width says nothing about parameters;"
                " give --n-once and --n-rec."
            )
        if width < 1:
            raise UserError(f"width is {width}; give a d_model of at least 1.")
        n_once, n_rec = (float(v) for v in grown.at(width)[:2])
    assert n_once is not None
    assert n_rec is not None
    if not (n_once >= 0 and n_rec > 0 and math.isfinite(n_once + n_rec)):
        raise UserError(
            f"n_once is {n_once:g} and n_rec {n_rec:g}; give numbers of parameters, n_rec above 0."
        )
    if tokens is not None and not (tokens > 0 and math.isfinite(tokens)):
        raise UserError(f"tokens is {tokens:g}; give a number of tokens above 0.")
    k = _backprop(analysis.losses, arm, recurrences) if backprop_recurrences is None else backprop_recurrences
    if not 1 <= k <= recurrences:
        raise UserError(f"backprop_recurrences is {k}; it must lie between 1 and recurrences, {recurrences}.")
    equal_loss = n_once + float(worth(arm.fit.parameters["phi"], recurrences)) * n_rec
    drawn = n_once + worth(arm.boot.values["phi"], recurrences) * n_rec
    bounds = arm.boot.interval(drawn, analysis.options.level)
    cost = n_once + (k + (recurrences - k) / 3) * n_rec
    p = arm.fit.parameters
    loss = costly = None
    if tokens is not None:
        loss = float(evaluate(p, n_once, n_rec, float(recurrences), tokens))
        costly = float(evaluate(p, 0.0, cost, 1.0, tokens))
    return Equivalent(
        arm.arm, recurrences, k, width, n_once, n_rec, equal_loss, bounds, cost, tokens, loss, costly
    )  # fmt: skip


def _backprop(losses: Losses, arm: ArmFit, recurrences: int) -> int:
    """The k of the arm's runs at r, where the table says; else r."""
    index = arm.index[losses.recurrences[arm.index] == recurrences]
    values = _column(losses, "backprop_recurrences", index) if len(index) else None
    return recurrences if values is None or len(np.unique(values)) > 1 else int(values[0])


@dataclasses.dataclass(frozen=True)
class Optimum:
    """The best model of one arm and r at a budget under the law: parameters (unique), tokens and loss, with intervals.

    `extrapolated`: the best width lies outside those that were run.
    """

    arm: str
    recurrences: int
    budget_flops: float
    n_optimal: float
    n_interval: Interval
    tokens: float
    tokens_interval: Interval
    loss: float
    loss_interval: Interval
    extrapolated: bool


def compute_optimal(
    analysis: Analysis, arm: ArmFit, budgets: list[float] | None = None, points: int = 400
) -> list[Optimum]:
    """The optimum for every r of the arm at each of `budgets` (those of the table unless given, FLOPs)."""
    losses = analysis.losses
    known = np.unique(losses.budget[arm.index])
    wanted = [float(b) for b in (known[np.isfinite(known)] if budgets is None else budgets)]
    one = {k: np.array([[v]]) for k, v in arm.fit.parameters.items()}
    many = {k: v[arm.boot.usable][:, None] for k, v in arm.boot.values.items()}
    found = []
    for r in np.unique(losses.recurrences[arm.index]):
        grown = family(losses, arm, int(r))
        spread = grown.widths[1] / grown.widths[0]
        widths = np.geomspace(grown.widths[0] / (3 * spread), grown.widths[1] * 3 * spread, points)
        once, rec, flops = grown.at(widths)
        for budget in wanted:
            tokens = budget / flops
            best = _lowest(evaluate(one, once, rec, float(r), tokens), np.log(widths))
            drawn = _lowest(evaluate(many, once, rec, float(r), tokens), np.log(widths))
            found.append(_optimum(analysis, arm, int(r), budget, grown, best, drawn))
    return found


def _lowest(loss: np.ndarray, log_width: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(log width, loss) [s] at the minimum of each row of loss [s, m], a parabola through its three lowest points."""
    i = np.clip(np.argmin(loss, axis=1), 1, loss.shape[1] - 2)
    s = np.arange(len(loss))
    left, middle, right = loss[s, i - 1], loss[s, i], loss[s, i + 1]
    with np.errstate(invalid="ignore"):  # infinite losses of refits gone astray
        bend = left - 2 * middle + right
        slope = np.where(bend > 0, left - right, 0.0)
    offset = np.clip(0.5 * slope / np.where(bend > 0, bend, 1.0), -1, 1)
    step = log_width[1] - log_width[0]
    return log_width[i] + offset * step, middle - 0.25 * slope * offset


def _optimum(analysis, arm, r: int, budget: float, grown: Family, best, drawn) -> Optimum:
    def sizes(log_width):
        once, rec, flops = grown.at(np.exp(log_width))
        return once + rec, budget / flops

    def interval(values) -> Interval:
        return percentiles(values, analysis.options.level, arm.boot.units)

    n, tokens = sizes(best[0][0])
    drawn_n, drawn_tokens = sizes(drawn[0])
    width = math.exp(best[0][0])
    return Optimum(
        arm=arm.arm,
        recurrences=r,
        budget_flops=budget,
        n_optimal=float(n),
        n_interval=interval(drawn_n),
        tokens=float(tokens),
        tokens_interval=interval(drawn_tokens),
        loss=float(best[1][0]),
        loss_interval=interval(drawn[1]),
        extrapolated=not grown.widths[0] <= width <= grown.widths[1],
    )
