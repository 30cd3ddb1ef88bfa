"""What a whole table can get wrong that no single row shows: units that change, budgets that do not add up."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from looped.errors import UserError

if TYPE_CHECKING:
    from fit.losses import Losses

_UNIT_GAP = 1e4  # no sweep jumps by this factor between neighbouring values; a change of unit does
_FEWEST_TOKENS = 1000
_BITS = 1 / math.log(2)
_GAP = 0.2  # of log loss: wider than any gap between neighbouring runs of one budget


def check_table(losses: Losses, units_known: bool = False) -> list[str]:
    """Raises `UserError` for mixed units and impossible budgets; returns warnings for what merely looks odd.

    `units_known`: the rows are records of runs, where a wide gap is a wide gap and no change of unit.
    """
    if not units_known:
        _check_units(losses)
    return _check_budgets(losses) + _check_sets(losses)


def _check_units(losses: Losses) -> None:
    _check_unit(losses, losses.tokens, "tokens")
    _check_unit(losses, losses.n_once + losses.n_rec, "n_once + n_rec")
    few = int(np.argmin(losses.tokens))
    if losses.tokens[few] < _FEWEST_TOKENS:
        raise UserError(
            f"{losses.labels[few]}: tokens is {losses.tokens[few]:g}, too few to train on; give a count of tokens,"
            " not millions or billions of them."
        )
    _check_bits(losses)


def _check_unit(losses: Losses, values: np.ndarray, name: str) -> None:
    order = np.argsort(values)
    steps = values[order][1:] / values[order][:-1]
    if len(steps) and steps.max() >= _UNIT_GAP:
        cut = int(np.argmax(steps))
        small, large = order[cut], order[cut + 1]
        raise UserError(
            f"{losses.labels[small]}: {name} is {values[small]:g} where {losses.labels[large]} has {values[large]:g};"
            " give every row in units, not some in millions or billions."
        )


def _check_bits(losses: Losses) -> None:
    """A gap in the losses of one budget as wide as the step from nats to bits, or losses that rise with the budget."""
    lowest = (0.0, np.inf)
    for budget in np.unique(losses.budget[np.isfinite(losses.budget)]):
        rows = np.flatnonzero(losses.budget == budget)
        order = rows[np.argsort(losses.loss[rows])]
        logs = np.log(losses.loss[order])
        steps = np.diff(logs)
        if len(steps) and steps.max() > _GAP:
            cut = int(np.argmax(steps)) + 1
            ratio = float(np.exp(np.median(logs[cut:]) - np.median(logs[:cut])))
            if abs(ratio / _BITS - 1) < 0.1:
                odd, unit = (order[cut], "bits") if 2 * cut >= len(order) else (order[0], "nats")
                _unit_error(losses, odd, f"the others at {budget:.3g} FLOPs", unit)
        if losses.loss[order[0]] > lowest[1] * np.exp(_GAP):
            _unit_error(losses, order[0], f"those at {lowest[0]:.3g} FLOPs, a smaller budget,", "bits")
        lowest = min(lowest, (float(budget), float(losses.loss[order[0]])), key=lambda pair: pair[1])


def _unit_error(losses: Losses, row: int, others: str, unit: str) -> None:
    raise UserError(
        f"{losses.labels[row]}: loss is {losses.loss[row]:g}, as far from {others} as {unit} would be; give every"
        " loss in nats per token (bits × ln 2)."
    )


def _check_budgets(losses: Losses) -> list[str]:
    """tokens × flops_per_token against budget_flops: a token count from another arm's FLOPs shows here."""
    flops = losses.columns.get("flops_per_token")
    if flops is None or "budget_flops" not in losses.columns or any(v in (None, "") for v in flops):
        return []
    ratio = losses.tokens * np.array([float(v) for v in flops]) / losses.budget
    worst = int(np.nanargmax(np.abs(np.log(ratio)))) if np.isfinite(ratio).any() else None
    if worst is None or 0.95 <= ratio[worst] <= 1.05:
        return []
    message = (
        f"{losses.labels[worst]}: tokens × flops_per_token is {ratio[worst]:.3g} of budget_flops; give tokens and FLOPs"
        " of the run itself (truncated runs have truncated FLOPs)"
    )
    if not 0.5 <= ratio[worst] <= 2:
        raise UserError(f"{message}.")
    return [message]


def _check_sets(losses: Losses) -> list[str]:
    hashes = {h for h in losses.columns.get("data_hash", ()) if h}
    if len(hashes) > 1:
        return [
            f"the runs were trained on {len(hashes)} different data sets: their losses may not be comparable"
        ]
    return []
