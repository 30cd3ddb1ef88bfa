"""Which runs to make: the cheapest that reach an sd, the best for a cost, and those that are worth most next.

The search judges every product of budgets × recurrences × a pattern of widths, adds runs to those that say most for
their cost, and drops runs and cells (budget × r in an arm) again while that pays, but for the last two widths of a
cell.  What it finds is the best of those, not of all subsets, of which there are too many.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import numpy as np

from fit.design import Design, Predicted, worst
from fit.losses import Losses

_STARTS = 24  # products that runs are added to and dropped from
_HOPELESS = 3  # products that all other runs do not bring to the target
_EXCHANGED = (1, 2, 4)  # runs added to a design before others are dropped again
_CHUNK = 2048  # subsets judged at once
_MOST_PRODUCTS = 200_000
_FEWEST_WIDTHS = 2


@dataclasses.dataclass(frozen=True)
class Choice:
    """A subset `mask` [n] of the runs: what it costs and what it says.  Empty `predicted`: there is none."""

    mask: np.ndarray
    cost: float
    predicted: tuple[Predicted, ...]

    @property
    def sd(self) -> float:
        """The largest sd of all quantities; inf where one has none."""
        return worst(self.predicted) if self.predicted else math.inf


@dataclasses.dataclass(frozen=True)
class Step:
    """A run (`index` of the table) to make next: what the steps up to it cost, and what is known after it."""

    index: int
    cost: float
    predicted: tuple[Predicted, ...]


def next_runs(
    design: Design,
    cost: np.ndarray,
    have: np.ndarray,
    count: int,
    target: float | None = None,
    limit: float | None = None,
) -> list[Step]:
    """Up to `count` runs to add to those in `have` [n], each the one that says most for its `cost` [n].

    What a run says is the drop of the mean log variance over all quantities.  It ends where every sd is at most
    `target`, where what is left costs more than `limit` in all, or where no run says anything more.
    """
    mask, steps, spent = have.copy(), [], 0.0
    while len(steps) < count and not (target is not None and worst(design.predict(mask)) <= target):
        index = _most_for_its_cost(design, cost, mask, math.inf if limit is None else limit - spent)
        if index is None:
            break
        mask[index] = True
        spent += float(cost[index])
        steps.append(Step(index, spent, design.predict(mask)))
    return steps


def _most_for_its_cost(design: Design, cost: np.ndarray, mask: np.ndarray, limit: float) -> int | None:
    candidates = np.flatnonzero(~mask & (cost <= limit))
    if not len(candidates):
        return None
    masks = np.repeat(mask[None], len(candidates) + 1, axis=0)
    masks[np.arange(len(candidates)), candidates] = True
    said = -2 * np.log(design.sd(masks, anchored=True)).mean(1)
    gain = (said[:-1] - said[-1]) / cost[candidates]
    best = int(np.argmax(gain))
    return int(candidates[best]) if gain[best] > 0 else None


def cheapest(design: Design, cost: np.ndarray, target: float) -> Choice | None:
    """The cheapest subset found whose sds are all at most `target`; None where not even all runs reach it."""
    found: Choice | None = None
    for tried, mask in enumerate(_starts(design, cost)):
        if found is None and tried == _HOPELESS:
            break
        reached = _judge(design, cost, _extended(design, cost, mask, target=target))
        if not reached.sd <= target:
            continue
        choice = _judge(design, cost, _pruned(design, cost, reached.mask, target))
        if found is None or choice.cost < found.cost:
            found = _exchanged(design, cost, choice, target)
    return found


def _exchanged(design: Design, cost: np.ndarray, choice: Choice, target: float) -> Choice:
    """Adds a few runs and drops others, for as long as that makes `choice` cheaper."""
    for count in _EXCHANGED:
        more = _extended(design, cost, choice.mask, count=count)
        other = _judge(design, cost, _pruned(design, cost, more, target))
        if other.cost < choice.cost and other.sd <= target:
            return _exchanged(design, cost, other, target)
    return choice


def most_precise(design: Design, cost: np.ndarray, limit: float) -> Choice | None:
    """The subset found with the least of the largest sd that costs at most `limit`; None where none says anything."""
    found: Choice | None = None
    for mask in _starts(design, cost, limit):
        for one in (mask, _extended(design, cost, mask, limit=limit - float(cost @ mask))):
            choice = _judge(design, cost, one)
            if math.isfinite(choice.sd) and (found is None or choice.sd < found.sd):
                found = choice
    return found


def _starts(design: Design, cost: np.ndarray, limit: float = math.inf) -> Iterator[np.ndarray]:
    """The products of a cost of at most `limit` with the least cost × sd², which no repetition of runs would change."""
    masks, sds = _products(design)
    costs = masks @ cost
    worth = np.where(costs <= limit, costs * sds**2, np.inf)
    for i in np.argsort(worth, kind="stable")[:_STARTS]:
        if np.isfinite(worth[i]):
            yield masks[i]


def _extended(
    design: Design,
    cost: np.ndarray,
    mask: np.ndarray,
    count: int | None = None,
    target: float | None = None,
    limit: float | None = None,
) -> np.ndarray:
    """`mask` with the `next_runs`, as many as `count` or as there are."""
    mask = mask.copy()
    for step in next_runs(design, cost, mask, len(mask) if count is None else count, target, limit):
        mask[step.index] = True
    return mask


def _judge(design: Design, cost: np.ndarray, mask: np.ndarray) -> Choice:
    return Choice(mask, float(mask @ cost), design.predict(mask))


def _products(design: Design) -> tuple[np.ndarray, np.ndarray]:
    """(subsets [s, n] of several budgets, several r and a pattern of widths, the largest sd [s] of each)."""
    losses = design.losses
    masks = np.array(list(itertools.islice(_product_masks(losses), _MOST_PRODUCTS)), dtype=bool)
    masks = np.unique(masks.reshape(-1, len(losses)), axis=0)
    if not len(masks):
        return masks, np.zeros(0)
    chunks = [design.sd(masks[i : i + _CHUNK]).max(1) for i in range(0, len(masks), _CHUNK)]
    return masks, np.concatenate(chunks)


def _product_masks(losses: Losses) -> Iterator[np.ndarray]:
    budgets, recurrences = np.unique(losses.budget), np.unique(losses.recurrences)
    patterns = list(_patterns(losses))
    for of_r in _several(recurrences):
        keep = np.isin(losses.recurrences, of_r)
        for of_budgets in _several(budgets):
            here = keep & np.isin(losses.budget, of_budgets)
            for pattern in patterns:
                yield here & pattern


def _several(values: np.ndarray) -> Iterator[tuple]:
    """Every subset of two values or more, small ones first."""
    return itertools.chain.from_iterable(
        itertools.combinations(values, size) for size in range(2, len(values) + 1)
    )


def _patterns(losses: Losses) -> Iterator[np.ndarray]:
    """Which widths of every cell, and how many seeds: all, the ends, the ends and the middle, every second."""
    rank, last = np.zeros(len(losses), dtype=int), np.zeros(len(losses), dtype=int)
    for rows in _cells(losses):
        _, order = np.unique((losses.n_once + losses.n_rec)[rows], return_inverse=True)
        rank[rows], last[rows] = order, order.max()
    ends = (rank == 0) | (rank == last)
    widths = (np.ones(len(losses), dtype=bool), ends, ends | (rank == last // 2), rank % 2 == 0)
    given = losses.seeds
    for seeds, pattern in itertools.product(range(1, len(np.unique(given)) + 1), widths):
        yield pattern & np.isin(given, np.unique(given)[:seeds])


def _cells(losses: Losses) -> list[np.ndarray]:
    labels = losses.cells("cell")
    return [np.flatnonzero(labels == c) for c in np.unique(labels)]


def _pruned(design: Design, cost: np.ndarray, mask: np.ndarray, target: float) -> np.ndarray:
    """Drops single runs and whole cells while every sd stays at most `target`, those first that save most for it."""
    cells = _cells(design.losses)
    mask = mask.copy()
    while True:
        smaller = _smaller(design.losses, cells, mask)
        if not len(smaller):
            return mask
        sds, saved = design.sd(smaller).max(1), cost @ mask - smaller @ cost
        now = float(design.sd(mask).max())
        lost = np.maximum(np.log(sds / now), 1e-9)  # some runs only add noise to a fit that weighs all alike
        order = np.argsort(np.where(sds <= target, -saved / lost, np.inf))
        able = (i for i in order if sds[i] <= target and worst(design.predict(smaller[i])) <= target)
        best = next(able, None)
        if best is None:
            return mask
        mask = smaller[best]


def _smaller(losses: Losses, cells: list[np.ndarray], mask: np.ndarray) -> np.ndarray:
    """Every subset [s, n] that lacks one run of a cell of more than two widths, or one cell."""
    sizes = losses.n_once + losses.n_rec
    without = []
    for rows in cells:
        inside = rows[mask[rows]]
        if not len(inside):
            continue
        without.append(inside)
        for run in inside:
            if len(np.unique(sizes[inside[inside != run]])) >= _FEWEST_WIDTHS:
                without.append(np.array([run]))
    found = np.repeat(mask[None], len(without), axis=0)
    for row, runs in zip(found, without, strict=True):
        row[runs] = False
    return found[found.any(1)]
