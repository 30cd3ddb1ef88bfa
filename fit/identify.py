"""Whether a table can say anything about φ at all; where it cannot, no φ is printed."""

from __future__ import annotations

import dataclasses

import numpy as np

from fit.law import Law
from fit.losses import Losses
from fit.solve import Fit

_FEWEST_SPARE_ROWS = 2
_COLLINEAR = (
    0.02  # nats of log D about its regression on log N: below this the two terms cannot be told apart
)
_ONE_BUDGET = 1.5  # ratio of training compute below which runs without stated budgets are one budget
_WORST_CONDITION = 1e7  # of the Jacobian's unit columns; 155 for the published 116 runs


@dataclasses.dataclass(frozen=True)
class Verdict:
    """`reasons` say why φ cannot be given (empty: it can); `doubts` what weakens it."""

    reasons: tuple[str, ...]
    doubts: tuple[str, ...] = ()

    @property
    def identified(self) -> bool:
        return not self.reasons


def before_fitting(losses: Losses, rows: np.ndarray, law: Law) -> Verdict:
    """Judges the design: the rows `rows` of the table, whatever their losses."""
    reasons, doubts = [], []
    n, p = len(rows), len(law.parameters)
    r, budget = losses.recurrences[rows], losses.budget[rows]
    looped = np.unique(r[r > 1])
    if n < p + _FEWEST_SPARE_ROWS:
        reasons.append(
            f"{n} rows are too few for {p} parameters: add runs until there are {p + _FEWEST_SPARE_ROWS}, better 20"
        )
    if not len(looped):
        reasons.append("no row has r > 1, so nothing says what a recurrence is worth: add looped runs")
    elif len(np.unique(r)) == 1:
        reasons.append(f"every row has r = {looped[0]}: add runs at r = 1, the baseline, or at another r")
    elif 1 not in r:
        doubts.append("no row has r = 1: φ rests on differences between looped models alone")
    if _one_budget(losses, rows, budget):
        reasons.append(
            "all rows have one compute budget, where tokens follow from parameters and φ is not determined: add a"
            " second budget, at least twice the first"
        )
    once, rec, log_d = losses.n_once[rows], losses.n_rec[rows], np.log(losses.tokens[rows])
    sizes = [np.log(once + r**phi * rec) for phi in (0.0, 0.5, 1.0)]  # unique, typical and used parameters
    reasons += _sizes(sizes, log_d, r)
    return Verdict(tuple(reasons), tuple(doubts))


def _one_budget(losses: Losses, rows: np.ndarray, budget: np.ndarray) -> bool:
    if np.isfinite(budget).all():
        return len(np.unique(budget)) == 1 and len(rows) > 1
    spent = (losses.n_once + losses.recurrences * losses.n_rec)[rows] * losses.tokens[rows]
    return bool(spent.max() < _ONE_BUDGET * spent.min())


def _sizes(sizes: list[np.ndarray], log_d: np.ndarray, r: np.ndarray) -> list[str]:
    """Judges log tokens [n] against log parameters [n], counted in each of the ways that tokens may have followed."""
    if np.ptp(log_d) < _COLLINEAR:
        return ["every row has the same number of tokens, so B and β are not determined: vary the tokens"]
    if max(np.ptp(sizes[0][r == value]) for value in np.unique(r)) < _COLLINEAR:
        return ["every r comes in one size, so A and α are not determined: add models of another width"]
    for log_n in sizes:
        design = np.stack([np.ones_like(log_n), log_n], axis=1)
        residual = log_d - design @ np.linalg.lstsq(design, log_d, rcond=None)[0]
        if len(log_n) > 3 and np.sqrt(np.mean(residual**2)) < _COLLINEAR:
            return [
                "tokens are a fixed power of parameters in every row (D ∝ N), so the model and the data term cannot be"
                " told apart: train some sizes on more or fewer tokens"
            ]
    return []


def after_fitting(fit: Fit) -> Verdict:
    """Judges the fit: a Jacobian without full rank, terms of no size, starts that disagree."""
    reasons, doubts = [], []
    if not np.isfinite(list(fit.parameters.values())).all():
        beyond = ", ".join(name for name, value in fit.parameters.items() if not np.isfinite(value))
        reasons.append(
            f"{beyond} grew beyond any number, so the rows do not determine it: add budgets, widths or r"
        )
    elif not fit.condition_number < _WORST_CONDITION:
        reasons.append(
            f"the rows do not determine all {len(fit.law.parameters)} parameters (condition number"
            f" {fit.condition_number:.1e}): add budgets, widths or r"
        )
    if fit.at_bound:
        doubts.append(
            f"{', '.join(fit.at_bound)} ended at a bound: the law has a term too many for these rows"
        )
    if fit.status == "starts disagree":
        doubts.append(f"only {fit.agreement:.0%} of {fit.starts} starts reach the best objective")
    return Verdict(tuple(reasons), tuple(doubts))
