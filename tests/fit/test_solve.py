"""The solver reaches the published coefficients, the known truth, and what an independent optimiser reaches."""

import math

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given
from hypothesis import strategies as st
from tables import TRUTH, VANILLA, law_losses, take, with_losses

from fit.analysis import Options, PointFit, analyse, arm_rows, fit_point
from fit.law import FixedExponent, Law
from fit.losses import read_losses
from fit.solve import HUBER, Objective, fit_law, solve
from fit.starts import nonnegative_solve, starting_points
from looped.errors import UserError


def fitted(losses, arm=None, baseline="matched", objective=HUBER):
    arm = arm or losses.arms[0]
    found = fit_point(losses, arm, losses.rows_of(arm, baseline), Options(objective=objective))
    assert isinstance(found, PointFit)
    return found.fit


def test_the_published_vanilla_coefficients(vanilla):
    fit = fitted(vanilla)
    p = fit.parameters
    assert abs(p["phi"] - 0.458) < 0.003
    assert abs(p["alpha"] - 0.1998) < 0.003
    assert abs(p["beta"] - 0.3675) < 0.005
    assert abs(p["E"] - 1.568) < 0.01
    assert abs(fit.r_squared - 0.9972) < 0.0002
    assert abs(fit.rmse - 0.0102) < 0.0002
    assert fit.status == "converged"
    assert fit.agreement > 0.9
    assert not fit.at_bound


@pytest.mark.parametrize(("baseline", "phi"), [("matched", 0.379), ("all", 0.352)])
def test_the_published_truncated_exponents_under_both_baselines(both_arms, baseline, phi):
    assert abs(fitted(both_arms, "truncated", baseline).parameters["phi"] - phi) < 0.005


@pytest.mark.parametrize(
    ("convention", "phi"),
    [
        ("injection-recurrent", 0.433),
        ("no-injection", 0.472),
        ("unembedding-once", 0.379),
        ("embeddings-once", 0.291),
    ],
)
def test_other_conventions_move_phi_as_measured(convention, phi):
    fit = fitted(read_losses(VANILLA, convention=convention))
    assert abs(fit.parameters["phi"] - phi) < 0.005
    assert fit.r_squared > 0.9965


def test_scipy_finds_no_better_objective_and_the_same_minimum(vanilla):
    """An independent objective in plain NumPy, searched from our minimum and from the paper's."""
    fit = fitted(vanilla)

    def objective(p):
        e, a, b, alpha, beta, phi = p
        n = vanilla.n_once + vanilla.recurrences.astype(float) ** phi * vanilla.n_rec
        loss = math.exp(e) + np.exp(a) * n**-alpha + np.exp(b) * vanilla.tokens**-beta
        size = np.abs(np.log(loss / vanilla.loss))
        return 1e4 * np.where(size <= 1e-3, size**2 / 2, 1e-3 * (size - 5e-4)).sum()

    p = fit.parameters
    ours = [math.log(p["E"]), math.log(p["A"]), math.log(p["B"]), p["alpha"], p["beta"], p["phi"]]
    assert math.isclose(objective(ours), 1e4 * fit.value, rel_tol=1e-9)
    paper = [math.log(1.56773), math.log(28.027), math.log(915.82), 0.19924, 0.36863, 0.459]
    for start in (ours, paper):
        found = scipy.optimize.minimize(
            objective, start, method="Nelder-Mead", options={"maxiter": 4000, "xatol": 1e-9, "fatol": 1e-12}
        )
        assert found.fun > objective(ours) * (1 - 1e-6)


def test_nothing_in_the_fit_is_random_and_row_order_does_not_matter(vanilla):
    shuffled = take(vanilla, np.ones(len(vanilla)))
    order = np.random.default_rng(3).permutation(len(vanilla))
    for name in ("recurrences", "n_once", "n_rec", "tokens", "loss", "budget", "arm"):
        getattr(shuffled, name)[:] = getattr(vanilla, name)[order]
    one, other = fitted(vanilla).parameters, fitted(shuffled).parameters
    for name in one:
        assert math.isclose(one[name], other[name], rel_tol=1e-6), name
    assert one == fitted(vanilla).parameters


def random_truth(rng):
    return {
        "E": rng.uniform(0.5, 2.2),
        "alpha": rng.uniform(0.1, 0.5),
        "beta": rng.uniform(0.15, 0.5),
        "phi": rng.uniform(-0.2, 1.2),
        "model": rng.uniform(0.2, 1.5),  # nats of each term at the middle of the grid
        "data": rng.uniform(0.2, 1.5),
    }


@pytest.mark.slow
def test_100_random_truths_are_recovered_without_noise(vanilla):
    rng = np.random.default_rng(0)
    worst = 0.0
    for _ in range(100):
        truth = random_truth(rng)
        truth["A"] = truth["model"] * 1e8 ** truth["alpha"]
        truth["B"] = truth["data"] * 2e9 ** truth["beta"]
        found = fitted(with_losses(vanilla, law_losses(vanilla, truth))).parameters
        worst = max([worst, *(abs(found[n] / truth[n] - 1) for n in found)])
    assert worst < 1e-4


def small_sweep(vanilla):
    """The grid's shape at the size of a laptop's sweep: byte tokens, budgets of 1e11 to 1e13 FLOPs."""
    shrink = 1e-3
    return with_losses(
        vanilla,
        vanilla.loss,
        n_once=vanilla.n_once * shrink,
        n_rec=vanilla.n_rec * shrink,
        tokens=vanilla.tokens * shrink,
    )


def test_a_small_sweep_fits_as_well_as_a_large_one(vanilla):
    small = small_sweep(vanilla)
    truth = {"E": 0.9, "A": 4.0, "alpha": 0.25, "B": 60.0, "beta": 0.35, "phi": 0.6}
    fit = fitted(with_losses(small, law_losses(small, truth)))
    assert fit.agreement > 0.9
    for name, value in truth.items():
        assert math.isclose(fit.parameters[name], value, rel_tol=1e-4), name


def test_units_of_size_and_tokens_leave_the_exponents_alone(vanilla):
    one, other = fitted(vanilla).parameters, fitted(small_sweep(vanilla)).parameters
    for name in ("E", "alpha", "beta", "phi"):
        assert math.isclose(one[name], other[name], rel_tol=1e-6), name
    assert math.isclose(other["A"], one["A"] * 1e-3 ** one["alpha"], rel_tol=1e-5)


def test_least_squares_is_an_option_and_agrees_with_scipy(vanilla):
    fit = fitted(vanilla, objective=Objective("squares"))

    def residuals(p):
        n = vanilla.n_once + vanilla.recurrences.astype(float) ** p[5] * vanilla.n_rec
        terms = p[1] * (n / 1e8) ** -p[3] + p[2] * (vanilla.tokens / 2e9) ** -p[4]
        return np.log((p[0] + terms) / vanilla.loss)

    found = scipy.optimize.least_squares(
        residuals, [1.5, 0.7, 0.4, 0.2, 0.35, 0.5], xtol=1e-15, ftol=1e-15, gtol=1e-15
    )
    assert math.isclose(fit.parameters["phi"], found.x[5], abs_tol=1e-5)
    assert math.isclose(fit.value, found.cost, rel_tol=1e-9)


def test_weights_count_rows_as_often_as_they_say(vanilla):
    rows, scale = arm_rows(vanilla, np.arange(len(vanilla)))
    twice = np.where(vanilla.recurrences == 4, 2.0, 1.0)
    weighted = fit_law(Law(), rows, scale, weights=twice, starts=16)
    index = np.repeat(np.arange(len(vanilla)), twice.astype(int))
    repeated_fit = fit_law(Law(), *arm_rows(vanilla, index), starts=16)
    assert math.isclose(weighted.value, repeated_fit.value, rel_tol=1e-9)
    assert math.isclose(weighted.parameters["phi"], repeated_fit.parameters["phi"], abs_tol=1e-6)


def test_a_held_parameter_stays_and_the_others_move(vanilla):
    rows, scale = arm_rows(vanilla, np.arange(len(vanilla)))
    x0 = fit_law(Law(), rows, scale, starts=8).x[None].copy()
    x0[0, Law().names.index("phi")] = 1.0
    x, value = solve(Law(), rows, x0, np.ones(len(vanilla)), HUBER, held=("phi",))
    fixed = fit_law(FixedExponent(1.0), rows, scale, starts=16)
    assert x[0, -1] == 1.0
    assert math.isclose(value[0], fixed.value, rel_tol=1e-6)


def test_a_law_with_a_term_too_many_says_so(vanilla):
    """Losses without a floor: E is driven to zero."""
    losses = with_losses(vanilla, law_losses(vanilla, TRUTH | {"E": 0.0}))
    fit = fitted(losses)
    assert fit.status == "at a bound"
    assert fit.at_bound == ("E",)


@given(st.lists(st.floats(-0.5, 0.5), min_size=1, max_size=20), st.floats(1e-4, 0.1))
def test_the_squared_roots_are_twice_the_objective(residuals, delta):
    objective = Objective("huber", delta)
    r = np.array(residuals)
    half = 0.5 * (np.asarray(objective.root(r)) * delta) ** 2
    np.testing.assert_allclose(half, np.asarray(objective.value(r)), rtol=2e-5, atol=1e-9)  # float32 here


@pytest.mark.parametrize("delta", [0.0, -1.0, 1.0, float("nan")])
def test_a_threshold_that_is_none_is_refused(delta):
    with pytest.raises(UserError, match="delta is"):
        Objective("huber", delta)


@given(st.integers(0, 10_000))
def test_the_non_negative_solution_is_scipys(seed):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(12, 3)), rng.normal(size=12)
    c, value = nonnegative_solve((x.T @ x)[None], (x.T @ y)[None], float(y @ y))
    expected, norm = scipy.optimize.nnls(x, y)
    np.testing.assert_allclose(c[0], expected, atol=1e-8)
    assert math.isclose(value[0], norm**2, rel_tol=1e-8, abs_tol=1e-10)


def test_starts_begin_near_the_minimum_and_reach_far_from_it(vanilla):
    rows, _ = arm_rows(vanilla, np.arange(len(vanilla)))
    points = starting_points(Law(), rows, np.ones(len(vanilla)), 64)
    phi = points[:, Law().names.index("phi")]
    assert points.shape == (64, 6)
    assert np.isfinite(points).all()
    assert phi.min() < 0.1
    assert phi.max() > 0.9


def test_options_that_make_no_sense_are_refused():
    for wrong in ({"level": 95.0}, {"resamples": 3}, {"seed": -1}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            Options(**wrong)


def test_analyse_gives_each_arm_its_own_fit(both_arms):
    found = analyse(both_arms, Options(resamples=50))
    assert set(found.arms) == {"vanilla", "truncated"}
    assert [d.against for d in found.differences] == ["vanilla"]
