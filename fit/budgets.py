"""Which runs share a training budget, stated or read off what they spent."""

from __future__ import annotations

import itertools

import numpy as np

_STATED = 0.005  # relative steps between values of one stated budget: rounding
_SPENT = 0.05  # and between what the runs of one budget spent: whole steps
_ONE = 0.8  # twice the width, in log FLOPs, of a single budget


def resolve_budgets(
    stated: list[float | None], flops_per_token: list[float | None], tokens: np.ndarray, effective: np.ndarray
) -> tuple[np.ndarray, list[str]]:
    """Returns the budget in FLOPs of every row [n] and notes on how it was found.

    The stated budgets where every row has one; else tokens × flops_per_token; else 6·tokens·`effective`, the parameters
    counted once a use.  NaN everywhere where what was spent shows no separate budgets.
    """
    if all(v is not None for v in stated):
        return group(np.array(stated, dtype=np.float64), _STATED), []
    if all(v is not None for v in flops_per_token):
        spent, how = tokens * np.array(flops_per_token, dtype=np.float64), "tokens × flops_per_token"
    else:
        spent, how = 6 * tokens * effective, "6·(n_once + r·n_rec)·tokens"
    grouped = group(spent, _SPENT)
    budgets = len(np.unique(grouped))
    if budgets > max(1, len(tokens) // 3) or not _apart(spent, grouped):
        note = (
            f"the table has no budget_flops, and {how} shows no separate budgets: rows are resampled in place of cells"
            " (budget × r), and every r = 1 row is the baseline"
        )
        return np.full(len(tokens), np.nan), [note]
    return grouped, [f"budgets were read from {how}: {budgets} of them"]


def _apart(spent: np.ndarray, grouped: np.ndarray) -> bool:
    """Whether the gaps between groups are at least twice as wide as any group: chance gaps in a continuum are not."""
    logs = [np.log(spent[grouped == g]) for g in np.unique(grouped)]
    widest = max(float(np.ptp(values)) for values in logs)
    gaps = [float(b.min() - a.max()) for a, b in itertools.pairwise(logs)]
    return 2 * widest < min(gaps, default=_ONE)


def group(values: np.ndarray, tolerance: float) -> np.ndarray:
    """Gives values linked by relative steps below `tolerance` one value: their own, or their geometric mean."""
    order = np.argsort(values)
    jumps = np.diff(np.log(values[order])) > tolerance
    number = np.concatenate([[0], np.cumsum(jumps)])
    out = np.empty_like(values, dtype=np.float64)
    for g in range(number[-1] + 1):
        members = order[number == g]
        same = np.unique(values[members])
        out[members] = same[0] if len(same) == 1 else float(f"{np.exp(np.log(values[members]).mean()):.4g}")
    return out
