"""Intervals: the published one, what is resampled and redrawn, and the likelihood behind the profile."""

import dataclasses
import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import TRUTH

from fit.analysis import Options, analyse, arm_rows, fit_arm
from fit.law import Law
from fit.solve import HUBER, Objective, fit_law, predict, solve
from fit.statistics import bootstrap_tail
from fit.uncertainty import Interval, bootstrap, dispersion, draw, percentiles, profile
from looped.errors import UserError


def test_no_usable_resample_gives_no_interval():
    found = percentiles(np.array([]), 0.95, 10)
    assert math.isnan(found.low)
    assert math.isnan(found.high)


@pytest.mark.parametrize("objective", [HUBER, Objective("squares")])
def test_residuals_of_zero_leave_a_scale_to_divide_by(objective):
    assert 0 < dispersion(objective, np.zeros(10), 6) < 1e-30


def test_a_hopeless_design_is_given_up_before_long():
    cells = np.arange(400)
    with pytest.raises(UserError, match="resampling 400 cells hardly ever keeps every r"):
        draw(cells, [(cells, np.arange(400), np.ones(400))], resamples=50, seed=0)


def test_the_interval_of_the_published_grid(analysis):
    interval = analysis.arms["vanilla"].interval
    assert abs(interval.low - 0.415) < 0.02
    assert abs(interval.high - 0.516) < 0.02


def test_rows_resampled_give_the_narrower_interval_measured(vanilla):
    found = analyse(vanilla, Options(unit="row", resamples=400)).arms["vanilla"].interval
    assert abs(found.low - 0.426) < 0.012
    assert abs(found.high - 0.491) < 0.012


def test_warm_started_refits_are_as_good_as_fits_from_many_starts(analysis):
    arm = analysis.arms["vanilla"]
    phi = arm.boot.values["phi"]
    for i in (0, int(phi.argmin()), int(phi.argmax())):
        weights = arm.draws.weights[i, arm.index]
        fresh = fit_law(arm.fit.law, arm.rows, arm.fit.scale, weights=weights)
        assert math.isclose(fresh.parameters["phi"], phi[i], abs_tol=1e-4)


def test_the_seed_decides_the_draws_and_nothing_else(vanilla):
    options = [Options(resamples=60, seed=seed) for seed in (0, 0, 1)]
    arms = [analyse(vanilla, o).arms["vanilla"] for o in options]
    assert arms[0].interval == arms[1].interval
    assert arms[0].interval != arms[2].interval
    assert arms[0].phi == arms[2].phi


def test_arms_are_resampled_with_the_same_r_1_cells(compared):
    vanilla, truncated = compared.arms["vanilla"], compared.arms["truncated"]
    shared = np.intersect1d(vanilla.index, truncated.index)
    assert len(shared) == 20
    weights = compared.draws.weights
    cells = compared.losses.cells()
    for cell in np.unique(cells):
        drawn = weights[:, cells == cell]
        assert (drawn == drawn[:, :1]).all()  # a cell is drawn whole
    assert (weights.sum(axis=1) > 0).all()


def test_the_difference_is_that_of_the_estimates_and_its_interval_that_of_the_pairs(compared):
    (d,) = compared.differences
    assert (d.arm, d.against) == ("truncated", "vanilla")
    assert math.isclose(d.estimate, compared.arms["truncated"].phi - compared.arms["vanilla"].phi)
    gap = compared.arms["truncated"].paired.values["phi"] - compared.arms["vanilla"].paired.values["phi"]
    inside = (gap >= d.interval.low) & (gap <= d.interval.high)
    assert abs(inside.mean() - (1 - 2 * bootstrap_tail(0.95, 24))) <= 2 / len(gap)


def test_few_units_widen_an_interval_and_many_leave_it():
    """Hesterberg (2015): for n = 24 the 2.5 % tail becomes Φ(−t₂₃·√(24/23)) = 1.73 %."""
    assert math.isclose(
        bootstrap_tail(0.95, 24), scipy.stats.norm.cdf(-2.0686576 * math.sqrt(24 / 23)), rel_tol=1e-6
    )
    assert bootstrap_tail(0.95, 6) < 0.003
    assert math.isclose(bootstrap_tail(0.95, 100_000), 0.025, rel_tol=1e-3)


@given(st.integers(0, 1000))
@settings(max_examples=20)
def test_no_draw_loses_an_r_or_all_budgets_but_one(seed):
    r = np.repeat([1, 2, 4], 4)
    budget = np.tile([1e12, 1e12, 4e12, 4e12], 3)
    cells = np.repeat(np.arange(6), 2)
    draws = draw(cells, [(np.arange(12), r, budget)], 50, seed)
    assert draws.redrawn > 0  # six cells of three r: most draws lose one
    for weights in draws.weights:
        assert set(r[weights > 0]) == {1, 2, 4}
        assert len(set(budget[weights > 0])) == 2
        assert weights.sum() == 12


def test_a_design_that_hardly_survives_resampling_is_refused():
    n = 14
    with pytest.raises(UserError, match="hardly ever keeps every r"):
        draw(np.arange(n), [(np.arange(n), np.arange(1, n + 1), np.arange(n) % 2 + 1.0)], 50, 0)


def test_refits_that_fail_or_end_at_a_bound_are_counted(analysis):
    arm = analysis.arms["vanilla"]
    boot = arm.boot
    assert (boot.failed, boot.at_bound) == (0, 0)
    assert boot.usable.all()
    weights = np.array(arm.draws.weights[:4])
    weights[0] = np.nan
    draws = dataclasses.replace(arm.draws, weights=weights)
    spoilt = bootstrap(arm.fit, arm.rows, draws, arm.index)
    assert spoilt.failed == 1
    assert not spoilt.usable[0]
    assert np.isfinite(spoilt.interval(spoilt.values["phi"]).low)


def test_the_dispersion_of_squares_is_the_residual_variance():
    errors = np.random.default_rng(0).normal(size=50)
    expected = (errors**2).sum() / 44
    assert math.isclose(dispersion(Objective("squares"), errors, 6), expected)
    wide = Objective("huber", 0.999)
    assert math.isclose(dispersion(wide, errors / 10, 6), expected / 100, rel_tol=1e-9)


def test_the_dispersion_of_laplace_errors_is_theirs():
    """Far beyond δ the objective is δ·|e|: with density exp(−|e|/b)/2b, E[ψ²]/E[ψ′] is δ²/(δ/b) = δ·b."""
    errors = np.random.default_rng(0).laplace(scale=0.05, size=200_000)
    assert math.isclose(dispersion(HUBER, errors, 0), HUBER.delta * 0.05, rel_tol=0.45)
    assert dispersion(HUBER, errors, 0) > HUBER.delta * 0.05  # the cusp is smoothed: conservative


@pytest.mark.parametrize("noise", [0.002, 0.01])
def test_the_drop_at_the_truth_is_chi_square(vanilla, noise):
    """For independent normal errors the mean of twice the drop at the true φ is 1."""
    rows, scale = arm_rows(vanilla, np.arange(len(vanilla)))
    truth = Law().vector(TRUTH, scale)
    clean = np.exp(predict(Law(), truth, rows))
    rng = np.random.default_rng(0)
    drops = []
    for _ in range(60):
        noisy = rows._replace(log_loss=np.log(clean + noise * rng.standard_normal(116)))
        free, value = solve(Law(), noisy, truth[None], np.ones(116), HUBER)
        _, held = solve(Law(), noisy, truth[None], np.ones(116), HUBER, held=("phi",))
        residuals = predict(Law(), free[0], noisy) - noisy.log_loss
        drops.append(2 * (held[0] - value[0]) / dispersion(HUBER, residuals, 6))
    assert 0.6 < np.mean(drops) < 1.5


def test_the_profile_is_lowest_at_the_fit_and_rises_on_both_sides(analysis):
    arm = analysis.arms["vanilla"]
    found = profile(arm.fit, arm.rows, 0.35, 0.58, points=9)
    centre = int(np.argmin(found.drop))
    assert found.phi[centre] == arm.phi
    assert (np.diff(found.drop[: centre + 1]) < 0).all()
    assert (np.diff(found.drop[centre:]) > 0).all()
    assert found.interval.low < arm.phi < found.interval.high
    assert found.drop[centre] < 1e-6


def test_a_profile_that_does_not_close_is_cut_at_its_range(analysis):
    arm = analysis.arms["vanilla"]
    found = profile(arm.fit, arm.rows, arm.phi - 0.005, arm.phi + 0.005, points=3)
    assert found.interval == Interval(arm.phi - 0.005, arm.phi + 0.005)


def test_rows_without_budgets_are_resampled_one_by_one(vanilla):
    blind = dataclasses.replace(vanilla, budget=np.full(len(vanilla), np.nan))
    arm = fit_arm(blind, "vanilla", blind.rows_of("vanilla"), Options(resamples=50))
    assert (arm.boot.unit, arm.boot.units) == ("row", 116)


def test_the_interval_of_an_arm_does_not_depend_on_the_arms_beside_it(vanilla, compared):
    alone = analyse(vanilla, Options(resamples=200)).arms["vanilla"]
    assert alone.interval == compared.arms["vanilla"].interval
