"""Diagnosis: the published misfit, tests that are quiet when the law holds and loud when it does not."""

import dataclasses
import math

import numpy as np
import pytest
from tables import TRUTH, law_losses, take, with_losses

from fit.analysis import Options, analyse
from fit.diagnose import _distance_to_power, diagnose, influence, lack_of_fit, misfits, phi_profile, subsets
from fit.law import Law
from fit.sensitivity import laws_beside, leave_cells_out, sensitivity
from fit.words import diagnosis_tables


@pytest.fixture(scope="module")
def arm(analysis):
    return analysis.arms["vanilla"]


def test_draws_that_are_all_alike_give_no_test():
    assert math.isnan(_distance_to_power(np.array([0.5, 1.0]), np.zeros((2, 2)), np.log([2.0, 4.0])))


def test_the_published_multipliers_and_their_misfit(analysis, arm):
    found = lack_of_fit(analysis, arm)
    free = {m.recurrences: m.free for m in found.multipliers}
    for r, expected in {2: 1.31, 4: 2.00, 8: 2.50}.items():
        assert abs(free[r] - expected) < 0.02
    for m in found.multipliers:
        assert m.interval.low < m.free < m.interval.high
    assert found.misfit < arm.fit.rmse
    assert found.rows_p < found.cells_p < 0.1


def test_the_published_mean_residuals_by_r(analysis, arm):
    by_name = {m.name: m for m in misfits(analysis, arm)}
    assert abs(by_name["r = 2"].mean_log - -0.0017) < 0.0001
    assert abs(by_name["r = 4"].mean_log - 0.0020) < 0.0001
    assert sum(m.rows for m in by_name.values()) == 2 * 116
    assert "2.15e+19 FLOPs" in by_name


def noisy(losses, sizes, seed):
    loss = law_losses(losses, TRUTH)
    return with_losses(losses, loss + sizes * np.random.default_rng(seed).standard_normal(len(loss)))


def test_lack_of_fit_is_quiet_where_the_law_holds_and_loud_where_it_does_not(vanilla):
    quiet = []
    for seed in range(1, 6):
        holds = analyse(noisy(vanilla, 0.004, seed), Options(resamples=100))
        found = lack_of_fit(holds, holds.arms["vanilla"])
        quiet.append((found.rows_p, found.cells_p))
    assert (np.median(quiet, axis=0) > 0.1).all()
    worth = np.where(vanilla.recurrences == 2, 0.9, vanilla.recurrences ** TRUTH["phi"])
    n = vanilla.n_once + worth * vanilla.n_rec
    loss = TRUTH["E"] + TRUTH["A"] * n ** -TRUTH["alpha"] + TRUTH["B"] * vanilla.tokens ** -TRUTH["beta"]
    loss = loss + 0.004 * np.random.default_rng(0).standard_normal(len(loss))
    breaks = analyse(with_losses(vanilla, loss), Options(resamples=200))
    found = lack_of_fit(breaks, breaks.arms["vanilla"])
    assert found.rows_p < 1e-6
    assert found.cells_p < 1e-4


def test_parts_of_the_grid(analysis, arm):
    found = {s.name: s for s in subsets(analysis, arm)}
    assert list(found)[:4] == [f"without r = {r}" for r in (1, 2, 4, 8)]
    halves = [s for name, s in found.items() if "budgets" in name]
    assert sum(s.rows for s in halves) == 116
    for s in found.values():
        assert s.phi is not None
        assert s.interval.low < s.phi < s.interval.high


def test_a_part_that_does_not_identify_phi_says_why(vanilla):
    two = with_losses(vanilla, law_losses(vanilla, TRUTH))
    keep = np.isin(vanilla.recurrences, [1, 4])
    found = analyse(take(two, keep), Options(resamples=50))
    parts = {s.name: s for s in subsets(found, found.arms["vanilla"])}
    assert parts["without r = 1"].phi is None
    assert "r = 4" in parts["without r = 1"].reason


def test_a_table_without_budgets_is_diagnosed_row_by_row_and_without_nan(vanilla):
    blind = with_losses(vanilla, vanilla.loss, budget=np.full(len(vanilla), np.nan))
    found = analyse(blind, Options(resamples=50))
    texts = [table.text() for table in diagnosis_tables(diagnose(found, found.arms["vanilla"]))]
    assert len(influence(found, found.arms["vanilla"])) == 116
    assert not any("nan" in text for text in texts)


def test_a_cell_pulled_away_has_the_most_influence(vanilla):
    loss = law_losses(vanilla, TRUTH)
    pulled = (vanilla.recurrences == 8) & (vanilla.budget == 2.15e19)
    loss = loss + 0.001 * np.random.default_rng(0).standard_normal(len(loss)) + 0.01 * pulled
    found = analyse(with_losses(vanilla, loss), Options(resamples=50))
    first = influence(found, found.arms["vanilla"])[0]
    assert (first.recurrences, first.budget_flops) == (8, 2.15e19)
    assert first.change > 0  # without the bad losses, recurrences look better


def test_the_profile_closes_around_phi(analysis, arm):
    found = phi_profile(analysis, arm)
    assert found.phi[0] < found.interval.low < arm.phi < found.interval.high < found.phi[-1]


@pytest.mark.slow
def test_neighbouring_laws_as_measured_by_hand(analysis, arm):
    few = dataclasses.replace(arm, draws=dataclasses.replace(arm.draws, weights=arm.draws.weights[:100]))
    rows = {row.law.name: row for row in sensitivity(analysis, few)}
    assert [len(law.parameters) for law in laws_beside(analysis.losses.recurrences)] == [
        6,
        5,
        5,
        8,
        7,
        7,
        6,
        7,
    ]
    misfit = {name: 1000 * row.misfit for name, row in rows.items()}
    assert abs(misfit["r^φ"] - 10.2) < 0.1
    assert abs(rows["floor E + ε·log₂ r"].phi - 0.60) < 0.01
    assert abs(rows["data D·r^ψ"].phi - 0.41) < 0.01
    assert abs(misfit["1 + c·log₂ r"] - 11.7) < 0.1
    assert abs(misfit["q-norm"] - 6.9) < 0.1
    assert abs(rows["q-norm"].phi - 0.469) < 0.003
    assert abs(rows["q-norm"].parameters["q"] - 2.6) < 0.05
    assert rows["q-norm"].extrapolated < 0.4 * rows["r^φ"].extrapolated
    assert rows["m(r)"].phi is None
    assert rows["φ = 0"].phi == 0
    for row in rows.values():
        assert row.left_out is not None
        assert row.left_out > row.misfit * 0.9


def test_rows_left_out_are_predicted_by_a_fit_that_has_not_seen_them(analysis, arm):
    error, cells, x = leave_cells_out(analysis.losses, arm, arm.fit)
    assert len(x) == cells.max() + 1 == 24
    assert error > arm.fit.rmse
    assert len(np.unique(x[:, Law().names.index("phi")])) == 24
