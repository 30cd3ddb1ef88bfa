"""Iso-FLOP minima: exact on parabolas, flagged where there is none, covered by their intervals."""

import math

import numpy as np
import pytest
import scipy.stats
from tables import take, with_losses

from fit.minima import iso_flop_minima
from fit.statistics import chi2_tail, f_tail, student_quantile
from looped.errors import UserError


def bowls(losses, bottom, bend=0.05, noise=0.0, rng=None):
    """Losses on parabolas in log N with their minimum at `bottom`(budget, r) parameters."""
    n = losses.n_once + losses.n_rec
    at = np.array([bottom(b, r) for b, r in zip(losses.budget, losses.recurrences, strict=True)])
    loss = 2.5 + bend * np.log(n / at) ** 2
    return with_losses(losses, loss + (noise * rng.standard_normal(len(loss)) if rng else 0))


def bottom(budget, r):
    return 5e7 * (budget / 1e18) ** 0.5 / r**0.3


@pytest.mark.parametrize("apart", [1e-12, 1e-8, 1e-5, 1e-3])
def test_sizes_nearly_alike_give_no_minimum_far_away(vanilla, apart):
    """Three sizes closer than float64 can bend a parabola through, or so close that it bends by noise alone."""
    cell = np.flatnonzero((vanilla.budget == vanilla.budget[0]) & (vanilla.recurrences == 1))[:3]
    one = take(vanilla, np.isin(np.arange(116), cell))
    one = with_losses(
        one, [2.5, 2.5 - 1e-12, 2.5 + 1e-3], n_rec=1e8 * (1 + apart * np.arange(3)), n_once=np.zeros(3)
    )
    (found,) = iso_flop_minima(one)
    assert found.n_optimal is None or 1e8 / 1e14 < found.n_optimal < 1e8 * 1e14
    assert (found.n_optimal is None) == bool(found.note) or not found.interior


def test_exact_parabolas_are_met(vanilla):
    found = iso_flop_minima(bowls(vanilla, bottom))
    assert len(found) == 24
    for m in found:
        assert math.isclose(m.n_optimal, bottom(m.budget_flops, m.recurrences), rel_tol=1e-9)
        assert math.isclose(m.loss, 2.5, abs_tol=1e-12)


def test_every_arm_has_its_minima_with_the_shared_baseline(both_arms):
    found = iso_flop_minima(both_arms)
    assert len([m for m in found if m.arm == "vanilla"]) == 24
    truncated = [m for m in found if m.arm == "truncated"]
    assert len(truncated) == 16
    shared = {m.budget_flops: m.n_optimal for m in found if m.arm == "vanilla" and m.recurrences == 1}
    assert all(m.n_optimal == shared[m.budget_flops] for m in truncated if m.recurrences == 1)


def test_the_published_losses_have_interior_minima_that_grow_with_the_budget(vanilla):
    found = iso_flop_minima(vanilla)
    for r in (1, 2, 4, 8):
        sizes = [m.n_optimal for m in found if m.recurrences == r]
        assert sizes == sorted(sizes)
        assert all(
            m.interior and m.interval[0] < m.n_optimal < m.interval[1] for m in found if m.recurrences == r
        )


def test_numpys_polyfit_finds_the_same_vertex(vanilla):
    for m in iso_flop_minima(vanilla):
        at = (vanilla.budget == m.budget_flops) & (vanilla.recurrences == m.recurrences)
        c, b, a = np.polyfit(np.log((vanilla.n_once + vanilla.n_rec)[at]), vanilla.loss[at], 2)
        assert math.isclose(m.n_optimal, math.exp(-b / (2 * c)), rel_tol=1e-6)
        assert math.isclose(m.loss, a - b * b / (4 * c), abs_tol=1e-8)


def test_a_cell_without_an_interior_minimum_is_flagged(vanilla):
    outside = iso_flop_minima(bowls(vanilla, lambda b, r: 1e11))
    assert not any(m.interior for m in outside)
    assert all("above the largest" in m.note for m in outside)
    upside_down = iso_flop_minima(bowls(vanilla, bottom, bend=-0.05))
    assert all(m.n_optimal is None and m.loss is None and not m.interior for m in upside_down)
    two = iso_flop_minima(take(vanilla, np.isin(np.arange(116), [0, 1, 4, 5, 20, 21, 22, 23])))
    assert {m.note for m in two} >= {"fewer than three sizes"}


def test_the_interval_covers_the_truth_as_often_as_it_says(vanilla):
    rng = np.random.default_rng(1)
    hits = []
    for _ in range(60):
        for m in iso_flop_minima(bowls(vanilla, bottom, noise=0.003, rng=rng)):
            low, high = m.interval or (0.0, math.inf)
            hits.append(low <= bottom(m.budget_flops, m.recurrences) <= high)
    assert 0.93 < np.mean(hits) < 0.97


def test_a_table_without_budgets_is_refused(vanilla):
    with pytest.raises(UserError, match="budget_flops"):
        iso_flop_minima(with_losses(vanilla, vanilla.loss, budget=np.full(116, np.nan)))


@pytest.mark.parametrize(("probability", "degrees"), [(0.975, 1), (0.975, 44), (0.9, 3), (0.995, 7)])
def test_student_quantiles_are_scipys(probability, degrees):
    assert math.isclose(
        student_quantile(probability, degrees), scipy.stats.t.ppf(probability, degrees), rel_tol=1e-9
    )


@pytest.mark.parametrize(("statistic", "degrees"), [(0.0, (1, 5)), (3.1, (2, 16)), (8.5, (3, 4))])
def test_f_tails_are_scipys(statistic, degrees):
    assert math.isclose(f_tail(statistic, *degrees), scipy.stats.f.sf(statistic, *degrees), rel_tol=1e-9)


@pytest.mark.parametrize(("statistic", "degrees"), [(0.0, 1), (3.84, 1), (25.0, 2), (7.0, 5)])
def test_chi_square_tails_are_scipys(statistic, degrees):
    assert math.isclose(chi2_tail(statistic, degrees), scipy.stats.chi2.sf(statistic, degrees), rel_tol=1e-9)
