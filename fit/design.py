"""How well runs would pin φ down, before any of them is trained.

Near the truth the fitted φ is linear in the noise of the losses, φ̂ − φ = Σ gᵢ·ψ(eᵢ)/E[ψ′], with g the row of φ in
(JᵀJ)⁻¹Jᵀ, J the law's derivatives and ψ that of the fit's objective (Huber, Robust Statistics, 1981, chapter 7).  The
noise eᵢ of a run's log loss is normal, in part its own and in part that of its cell (budget × r).

Losses that miss the law in a pattern spread φ more widely than that: 0.063 over resampled rows of the laptop grid's
full arm (`looped fit experiments/results/laptop/losses.csv --resample row`), where noise of the same size gives 0.031.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fit.analysis import arm_rows
from fit.compare import evaluate
from fit.identify import before_fitting
from fit.law import Law
from fit.losses import Losses
from fit.noise import Noise
from fit.prior import Prior
from fit.solve import HUBER, Objective, jacobian

_LAW = Law()
_PHI = _LAW.names.index("phi")
_NORMAL = 1.96
WIDEST_SD = 0.25
"""A predicted sd above this is no answer: its 95 % interval is as wide as the way from no worth (0) to full (1)."""


def planned_losses(rows: Sequence[Mapping[str, Any]], prior: Prior) -> Losses:
    """The losses table of runs that are yet to be made, each loss that of the law.

    `rows` hold run_id, arm, recurrences, budget_flops, n_once, n_rec, tokens, flops_per_token and seed; a run without
    a budget is at what it spends.
    """
    columns = {name: tuple(row[name] for row in rows) for name in rows[0]}
    r = np.array(columns["recurrences"], dtype=np.int64)
    once, rec, tokens = (np.array(columns[name], dtype=np.float64) for name in ("n_once", "n_rec", "tokens"))
    arms = np.array(columns["arm"], dtype=object)
    loss = np.empty(len(rows))
    for arm in dict.fromkeys(columns["arm"]):
        own = arms == arm
        loss[own] = evaluate(prior.of(arm), once[own], rec[own], r[own].astype(float), tokens[own])
    spent = [float(row["budget_flops"] or row["tokens"] * row["flops_per_token"]) for row in rows]
    return Losses(r, once, rec, tokens, loss, np.array(spent), arms, columns["run_id"], columns, "published")


@dataclasses.dataclass(frozen=True)
class Predicted:
    """The sd of the fitted φ of `arm`, or of its difference from `against`.

    None where the runs do not determine it, and `reasons` say why; `doubts` weaken it.
    """

    arm: str
    against: str | None
    sd: float | None
    reasons: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()


class Design:
    """What n runs, done or planned, say of φ: made once, it judges any number of subsets of them.

    `quantities` are φ of every arm and, where there are several, the difference of each from the first.  Arms share
    their r = 1 runs, as `Losses.rows_of` says.
    """

    def __init__(
        self, losses: Losses, prior: Prior, noise: Noise | None = None, objective: Objective = HUBER
    ):
        self.losses, self.prior, self.noise = losses, prior, noise or Noise()
        variance, self._shared = self.noise.influence(objective)
        self._own, self._unit = variance - self._shared, variance
        self.arms = losses.unnamed_arms
        self.quantities: tuple[tuple[str, str | None], ...] = (
            *((arm, None) for arm in self.arms),
            *((arm, self.arms[0]) for arm in self.arms[1:]),
        )
        self._members = [losses.looped & (losses.arm == arm) for arm in self.arms]
        everything = np.arange(len(losses))
        self._jacobians = []
        for arm in self.arms:
            rows, scale = arm_rows(losses, everything)
            self._jacobians.append(jacobian(_LAW, _LAW.vector(prior.of(arm), scale), rows))
        self._cells = _one_hot(losses.cells("cell"))
        budgets_known = np.isfinite(losses.budget).all()
        self._budgets = _one_hot(losses.budget if budgets_known else np.zeros(len(losses)))

    def sd(self, masks: np.ndarray, anchored: bool = False) -> np.ndarray:
        """The sd [s, q] of every quantity for each subset of the runs in `masks` [s, n]; inf where it has none.

        Too few or too similar runs are seen by `predict` alone.  `anchored` adds a prior of sd 1 on each of the law's
        parameters in the solver's scale, which says next to nothing but lets runs be ranked before there are enough.
        """
        masks = np.atleast_2d(masks)
        influences, priors = zip(
            *(self._influence(i, masks, anchored) for i in range(len(self.arms))), strict=True
        )
        found = []
        for arm, against in self.quantities:
            g, extra = influences[self.arms.index(arm)], priors[self.arms.index(arm)]
            if against is not None:
                g, extra = g - influences[0], extra + priors[0]
            variance = self._own * (g**2).sum(1) + self._shared * ((g @ self._cells) ** 2).sum(1) + extra
            found.append(np.where(np.isfinite(variance), np.sqrt(np.abs(variance)), np.inf))
        return np.stack(found, axis=1)

    def rows_of(self, arm: int, masks: np.ndarray) -> np.ndarray:
        """Which runs [s, n] of each subset the arm numbered `arm` is fitted to: its own, and r = 1 at their budgets."""
        own = masks & self._members[arm]
        here = (own @ self._budgets > 0) @ self._budgets.T > 0
        here |= ~own.any(1, keepdims=True)
        return own | (masks & ~self.losses.looped & here)

    def _influence(self, arm: int, masks: np.ndarray, anchored: bool) -> tuple[np.ndarray, np.ndarray]:
        """(derivative of the arm's φ by each run's error [s, n], the variance that the prior adds [s])."""
        J = self._jacobians[arm]
        rows = self.rows_of(arm, masks).astype(float)
        n, p = J.shape
        gram = (rows @ (J[:, :, None] * J[:, None, :]).reshape(n, p * p)).reshape(-1, p, p)
        scale = self._unit if anchored else 0.0
        inverse = _inverse(gram + scale * np.eye(p))[:, _PHI]
        return rows * (inverse @ J.T), scale**2 * (inverse**2).sum(1)

    def predict(self, mask: np.ndarray | None = None) -> tuple[Predicted, ...]:
        """Every quantity for the runs in `mask` [n] (all of them unless given), with reasons where it has none."""
        mask = np.ones(len(self.losses), dtype=bool) if mask is None else mask
        if not mask.any():
            return tuple(Predicted(a, b, None, ("there are no runs",)) for a, b in self.quantities)
        sds = self.sd(mask)[0]
        verdicts = {}
        for i, arm in enumerate(self.arms):
            index = np.flatnonzero(self.rows_of(i, mask[None])[0])
            if not len(index):
                verdicts[arm] = (("there are no runs of it, nor at r = 1",), ())
                continue
            verdict = before_fitting(self.losses, index, _LAW)
            verdicts[arm] = (verdict.reasons, verdict.doubts)
        found = []
        for (arm, against), sd in zip(self.quantities, sds, strict=True):
            about = [arm] if against is None else [against, arm]
            reasons = _merge(verdicts[a][0] for a in about)
            if not reasons and not sd <= WIDEST_SD:
                reasons = (
                    f"the runs leave it open: a sd above {WIDEST_SD:g} is no answer; add budgets, widths or r",
                )
            doubts = _merge(verdicts[a][1] for a in about)
            found.append(Predicted(arm, against, None if reasons else float(sd), reasons, doubts))
        return tuple(found)


def in_words(predicted: Predicted) -> str:
    """`φ of vanilla: sd 0.024, a 95 % interval of about ±0.047`, or why there is none."""
    name = f"φ of {predicted.arm}"
    if predicted.against is not None:
        name = f"Δφ of {predicted.arm} − {predicted.against}"
    if predicted.sd is None:
        return f"{name}: not determined: {'; '.join(predicted.reasons)}."
    doubts = "".join(f"; {doubt}" for doubt in predicted.doubts)
    return f"{name}: sd {predicted.sd:.3f}, a 95 % interval of about ±{_NORMAL * predicted.sd:.3f}{doubts}."


def worst(predicted: Sequence[Predicted]) -> float:
    """The largest sd; inf where any quantity has none."""
    return max(math.inf if p.sd is None else p.sd for p in predicted)


def _merge(groups) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text for texts in groups for text in texts))


def _one_hot(labels: np.ndarray) -> np.ndarray:
    """[n, distinct labels]"""
    _, index = np.unique(labels, return_inverse=True)
    return np.eye(int(index.max()) + 1)[index]


def _inverse(gram: np.ndarray) -> np.ndarray:
    """Inverses of symmetric matrices [s, p, p]; NaN where one is singular to working precision."""
    diagonal = np.einsum("spp->sp", gram)
    size = np.sqrt(np.where(diagonal > 0, diagonal, 1.0))
    values, vectors = np.linalg.eigh(gram / (size[:, :, None] * size[:, None, :]))
    values = np.where(values > 1e-12 * values[:, -1:], values, np.nan)
    inverse = (vectors / values[:, None, :]) @ np.swapaxes(vectors, 1, 2)
    return inverse / (size[:, :, None] * size[:, None, :])
