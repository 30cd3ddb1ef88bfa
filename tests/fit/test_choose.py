"""Which runs are chosen: against every subset of a small design, and against whole budgets."""

import numpy as np
import pytest
from tables import TRUTH, VANILLA, law_losses, with_losses
from tables import take as rows_where

from fit.choose import cheapest, most_precise, next_runs
from fit.design import Design, worst
from fit.losses import read_losses
from fit.noise import Noise
from fit.prior import PUBLISHED_PRIOR, Prior, prior_of

PRIOR = Prior({"all": TRUTH}, "the tests' own")
TARGET = 0.03


def spent(losses):
    return losses.tokens * np.array([float(f) for f in losses.columns["flops_per_token"]])


@pytest.fixture(scope="module")
def whole():
    """(the design of the published grid, the FLOPs of its runs)."""
    losses = read_losses(VANILLA)
    losses = with_losses(losses, law_losses(losses, TRUTH))
    return Design(losses, PRIOR), spent(losses)


@pytest.fixture(scope="module")
def small():
    """Twelve runs, r = 1 and 8 at three budgets, with the sd and the cost of every subset."""
    losses = read_losses(VANILLA)
    ends = np.zeros(len(losses), dtype=bool)
    for budget in (4.64e17, 2.15e18, 1e19):
        for r in (1, 8):
            cell = np.flatnonzero((losses.budget == budget) & (losses.recurrences == r))
            ends[cell[[0, -1]]] = True
    losses = rows_where(losses, ends)
    losses = with_losses(losses, law_losses(losses, TRUTH))
    design, cost = Design(losses, PRIOR), spent(losses)
    masks = np.array([[i >> b & 1 for b in range(12)] for i in range(1, 2**12)], dtype=bool)
    masks = masks[masks.sum(1) >= 8]
    return design, cost, masks, np.array([worst(design.predict(m)) for m in masks])


@pytest.mark.parametrize("looseness", [1.05, 1.2, 1.5])
def test_the_search_comes_near_the_cheapest_of_all_subsets(small, looseness):
    design, cost, masks, sds = small
    target = float(sds.min()) * looseness
    optimum = (masks[sds <= target] @ cost).min()
    found = cheapest(design, cost, target)
    assert found is not None
    assert found.sd <= target
    assert found.cost == pytest.approx(cost[found.mask].sum())
    assert optimum <= found.cost <= 1.25 * optimum


@pytest.mark.parametrize("share", [0.5, 0.8, 1.0])
def test_the_search_comes_near_the_most_precise_for_a_cost(small, share):
    design, cost, masks, sds = small
    limit = float(cost.sum()) * share
    optimum = sds[masks @ cost <= limit].min()
    found = most_precise(design, cost, limit)
    assert found is not None
    assert found.cost <= limit * (1 + 1e-12)
    assert optimum * (1 - 1e-9) <= found.sd <= 1.15 * optimum


def test_what_cannot_be_reached_is_not_found(small):
    design, cost, _, sds = small
    assert cheapest(design, cost, float(sds.min()) * 0.99) is None
    assert most_precise(design, cost, float(cost.min())) is None


def test_the_search_costs_less_than_the_cheapest_whole_budgets(whole):
    design, cost = whole
    budgets = np.unique(design.losses.budget)
    lowest = (design.losses.budget <= b for b in budgets)
    product = next(m for m in lowest if worst(design.predict(m)) <= TARGET)
    found = cheapest(design, cost, TARGET)
    assert found is not None
    assert found.cost < 0.6 * cost[product].sum()


@pytest.mark.parametrize("noise", [Noise(0.004, 0.0), Noise()])
def test_the_next_runs_take_at_most_three_fifths_of_whole_budgets(whole, noise):
    """From the two lowest budgets, simulated with noise and fitted, to a predicted sd of 0.03."""
    _, cost = whole
    losses = read_losses(VANILLA)
    losses = with_losses(losses, law_losses(losses, TRUTH))
    cells = losses.cells("cell")
    rng = np.random.default_rng(2)
    error = (
        noise.row * rng.standard_normal(len(losses)) + noise.cell * rng.standard_normal(len(losses))[cells]
    )
    budgets = np.unique(losses.budget)
    have = losses.budget <= budgets[1]
    prior, told = prior_of(rows_where(with_losses(losses, losses.loss * np.exp(error)), have))
    assert prior is not None
    assert "vanilla" in told[0]
    design = Design(losses, prior, noise)
    steps = next_runs(design, cost, have, 100, target=TARGET)
    assert worst(steps[-1].predicted) <= TARGET < worst(steps[-2].predicted)
    added = (losses.budget <= b for b in budgets[2:])
    whole_budgets = next(m for m in added if worst(design.predict(m)) <= TARGET)
    assert steps[-1].cost <= 0.6 * cost[whole_budgets & ~have].sum()


def test_steps_add_up_and_keep_to_their_limits(whole):
    design, cost = whole
    have = design.losses.budget <= 4.64e17
    steps = next_runs(design, cost, have, 5)
    chosen = [step.index for step in steps]
    assert len(set(chosen)) == 5
    assert not have[chosen].any()
    assert [step.cost for step in steps] == pytest.approx(list(np.cumsum(cost[chosen])))
    limited = next_runs(design, cost, have, 100, limit=5e18)
    assert 0 < limited[-1].cost <= 5e18
    assert next_runs(design, cost, np.ones(len(have), dtype=bool), 5) == []
    assert next_runs(design, cost, have, 5, limit=1e10) == []


def test_from_one_budget_the_next_run_is_at_another(whole):
    design, cost = whole
    have = design.losses.budget == 1e18
    assert worst(design.predict(have)) == float("inf")
    first, second = next_runs(design, cost, have, 2)
    assert design.losses.budget[first.index] != 1e18
    assert second.cost > first.cost


def test_runs_can_be_ranked_from_nothing():
    losses = read_losses(VANILLA)
    design = Design(losses, PUBLISHED_PRIOR)
    steps = next_runs(design, spent(losses), np.zeros(len(losses), dtype=bool), 30)
    sds = [worst(step.predicted) for step in steps]
    assert sds[0] == float("inf")
    assert sds[-1] < 0.1
