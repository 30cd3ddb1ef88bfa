"""The sd that is predicted for φ: against the definition, against simulated errors, and where there is none."""

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import TRUNCATED, TRUTH, VANILLA, law_losses, with_losses
from tables import take as rows_where

from fit.analysis import DEFAULTS, PointFit, fit_point
from fit.design import WIDEST_SD, Design, worst
from fit.losses import read_losses
from fit.noise import Noise, noise_about
from fit.prior import PUBLISHED, PUBLISHED_PRIOR, Prior
from fit.progress import joined
from fit.solve import HUBER, Objective
from looped.errors import UserError

SQUARES = Objective("squares")
PRIOR = Prior({"all": TRUTH}, "the tests' own")


def table(path=VANILLA):
    losses = read_losses(path)
    return with_losses(losses, law_losses(losses, TRUTH))


def two_arms():
    """The published vanilla runs and the looped ones of the truncated table."""
    truncated = table(TRUNCATED)
    return joined(table(), rows_where(truncated, truncated.looped))


def by_definition(losses, arms, noise):
    """sds from finite differences of the law as the tests write it, and the full covariance of the noise."""

    def log_loss(values):
        return np.log(law_losses(losses, dict(zip(TRUTH, values, strict=True))))

    at = np.array(list(TRUTH.values()))
    columns = []
    for i, value in enumerate(at):
        step = np.zeros_like(at)
        step[i] = 1e-5 * value
        columns.append((log_loss(at + step) - log_loss(at - step)) / (2 * step[i]))
    J = np.stack(columns, axis=1)
    same = (losses.budget[:, None] == losses.budget) & (losses.recurrences[:, None] == losses.recurrences)
    same &= (losses.arm[:, None] == losses.arm) | (losses.recurrences == 1)
    V = noise.row**2 * np.eye(len(losses)) + noise.cell**2 * same
    errors = {}
    for arm in arms:
        index = losses.rows_of(arm)
        errors[arm] = np.zeros(len(losses))
        errors[arm][index] = np.linalg.pinv(J[index], rcond=1e-14)[list(TRUTH).index("phi")]
    first = errors[arms[0]]
    quantities = [*errors.values(), *(errors[a] - first for a in arms[1:])]
    return [float(np.sqrt(g @ V @ g)) for g in quantities]


@pytest.mark.parametrize("noise", [Noise(0.004, 0.0), Noise(0.002, 0.003)])
def test_the_sds_are_those_of_the_definition_for_least_squares(noise):
    losses = two_arms()
    design = Design(losses, PRIOR, noise, SQUARES)
    assert design.quantities == (("vanilla", None), ("truncated", None), ("truncated", "vanilla"))
    expected = by_definition(losses, losses.arms, noise)
    assert [p.sd for p in design.predict()] == pytest.approx(expected, rel=1e-3)


def test_published_grid_as_estimated_elsewhere():
    """Row noise of 0.004: 0.017 for all 116 runs and 0.034 for the 36 of the two lowest budgets."""
    losses = read_losses(VANILLA)
    design = Design(losses, PUBLISHED_PRIOR, Noise(0.004, 0.0), SQUARES)
    low = losses.budget <= 1e18
    assert low.sum() == 36
    assert worst(design.predict()) == pytest.approx(0.017, abs=0.0005)
    assert worst(design.predict(low)) == pytest.approx(0.034, abs=0.0005)


@pytest.mark.parametrize("noise", [Noise(0.004, 0.0), Noise(0.0033, 0.0018), Noise(0.0005, 0.004)])
def test_the_influence_of_noise_on_a_huber_fit_is_that_of_drawn_errors(noise):
    rng = np.random.default_rng(0)
    shared = noise.cell * rng.standard_normal(400_000)
    one, other = (shared + noise.row * rng.standard_normal(len(shared)) for _ in range(2))
    slope = np.mean(np.abs(one) < HUBER.delta)
    psi = [np.clip(e, -HUBER.delta, HUBER.delta) / slope for e in (one, other)]
    variance, covariance = noise.influence()
    assert variance == pytest.approx(np.var(psi[0]), rel=0.03)
    assert covariance == pytest.approx(np.mean(psi[0] * psi[1]), rel=0.05, abs=2e-3 * variance)


def test_the_default_noise_and_law_are_those_of_the_published_losses():
    losses = read_losses(VANILLA)
    fit = fit_point(losses, "vanilla", losses.rows_of("vanilla"), DEFAULTS)
    assert isinstance(fit, PointFit)
    seen = noise_about(fit.fit.residuals, losses.cells("cell"))
    assert seen is not None
    assert (round(seen.row, 4), round(seen.cell, 4)) == (Noise().row, Noise().cell)
    assert fit.fit.parameters == pytest.approx(dict(PUBLISHED), rel=0.03)


def test_noise_about_finds_what_was_put_in():
    rng = np.random.default_rng(1)
    cells = np.repeat(np.arange(400), rng.integers(2, 6, 400))
    errors = 0.003 * rng.standard_normal(len(cells)) + 0.005 * rng.standard_normal(400)[cells]
    seen = noise_about(errors, cells)
    assert seen is not None
    assert (seen.row, seen.cell) == pytest.approx((0.003, 0.005), rel=0.1)
    assert noise_about(errors, np.arange(len(cells))) is None
    assert noise_about(np.zeros(len(cells)), cells) is None


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), share=st.floats(0.1, 0.9))
def test_more_runs_never_say_less_where_runs_err_alone(seed, share):
    losses = table()
    design = Design(losses, PRIOR, Noise(0.004, 0.0), SQUARES)
    rng = np.random.default_rng(seed)
    some = rng.random(len(losses)) < share
    more = some | (rng.random(len(losses)) < 0.3)
    for anchored in (False, True):
        fewer_sd, more_sd = design.sd(np.stack([some, more]), anchored)[:, 0]
        if np.isfinite(fewer_sd):
            assert more_sd <= fewer_sd * (1 + 1e-6)


def test_repeating_every_run_takes_away_the_runs_own_noise_alone():
    losses = table()
    twice = joined(losses, losses)

    def sd(rows, noise):
        return worst(Design(rows, PRIOR, noise, SQUARES).predict())

    assert sd(twice, Noise(0.004, 0.0)) == pytest.approx(sd(losses, Noise(0.004, 0.0)) / 2**0.5)
    assert sd(twice, Noise(0.0, 0.003)) == pytest.approx(sd(losses, Noise(0.0, 0.003)))
    assert sd(losses, Noise(0.008, 0.002)) == pytest.approx(2 * sd(losses, Noise(0.004, 0.001)))


@pytest.mark.parametrize(
    ("keep", "reason"),
    [
        (lambda t: t.budget == 1e18, "one compute budget"),
        (lambda t: t.recurrences == 4, "every row has r = 4"),
        (lambda t: t.recurrences == 1, "no row has r > 1"),
        (lambda t: np.isin(np.arange(len(t)), [0, 5, 10, 20, 30, 40]), "rows are too few for 6 parameters"),
    ],
)
def test_runs_that_cannot_say_phi_have_no_sd_and_a_reason(keep, reason):
    losses = table()
    (one,) = Design(losses, PRIOR).predict(np.asarray(keep(losses)))
    assert one.sd is None
    assert reason in "; ".join(one.reasons)


def test_noise_too_large_for_the_runs_gives_a_reason_in_place_of_a_huge_number():
    losses = table()
    design = Design(losses, PRIOR, Noise(0.03, 0.03))
    low = losses.budget <= 1e18
    assert design.sd(low)[0, 0] > WIDEST_SD
    (one,) = design.predict(low)
    assert one.sd is None
    assert "leave it open" in one.reasons[0]
    assert worst((one,)) == float("inf")


def test_an_arm_without_runs_in_a_subset_has_none_and_the_others_keep_theirs():
    losses = two_arms()
    design = Design(losses, PRIOR)
    vanilla = losses.arm == "vanilla"
    first, second, difference = design.predict(vanilla)
    assert first.sd is not None
    assert (second.sd, difference.sd) == (None, None)
    assert design.predict(np.zeros(len(losses), dtype=bool))[0].reasons == ("there are no runs",)


@pytest.mark.parametrize("values", [(-0.1, 0.0), (0.0, 0.0), (0.004, 1.0), (float("nan"), 0.0)])
def test_noise_that_is_none_is_refused(values):
    with pytest.raises(UserError, match="noise"):
        Noise(*values)


@pytest.mark.slow
def test_the_predicted_sd_is_that_of_fits_to_simulated_sweeps():
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    try:
        from plan_precision import planned, simulated
    finally:
        sys.path.pop(0)
    from experiments.design import Changes

    design, flops = planned(["paper-vanilla"], Changes(budgets=(4.64e17, 1e18)))
    everything = np.ones(len(flops), dtype=bool)
    assert worst(design.predict()) == pytest.approx(simulated(design, everything, 100)[0], rel=0.3)
