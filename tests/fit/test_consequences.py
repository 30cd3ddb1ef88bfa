"""What φ means: the abstract's example, and optima against closed forms."""

import itertools
import math

import numpy as np
import pytest
from tables import TRUTH, law_losses, with_losses

from fit.analysis import Options, analyse
from fit.consequences import compute_optimal, equivalent, family
from looped.errors import UserError


def test_the_abstracts_example(analysis):
    found = equivalent(analysis, analysis.arms["vanilla"], 4, width=2048, tokens=1e10)
    assert abs(found.unique - 411e6) < 0.5e6
    assert 580e6 < found.equal_loss < 590e6
    assert abs(found.equal_cost - 1.0e9) < 0.02e9
    assert found.equal_loss_interval.low < found.equal_loss < found.equal_loss_interval.high
    assert found.loss_at_equal_cost < found.loss


def test_a_width_that_was_run_has_the_parameters_of_the_table(analysis, vanilla):
    grown = family(vanilla, analysis.arms["vanilla"], 4)
    for i in np.flatnonzero(vanilla.recurrences == 4):
        once, rec, flops = grown.at(float(vanilla.columns["d_model"][i]))
        assert math.isclose(once, vanilla.n_once[i], rel_tol=1e-9)
        assert math.isclose(rec, vanilla.n_rec[i], rel_tol=1e-9)
        assert math.isclose(flops, float(vanilla.columns["flops_per_token"][i]), rel_tol=1e-6)


def test_an_unlooped_model_equals_itself(analysis):
    found = equivalent(analysis, analysis.arms["vanilla"], 1, n_once=0.0, n_rec=1e8)
    assert found.equal_loss == found.equal_cost == 1e8
    assert found.equal_loss_interval.low == found.equal_loss_interval.high == 1e8


def test_passes_without_gradient_cost_a_third(compared):
    truncated = compared.arms["truncated"]
    found = equivalent(compared, truncated, 4, n_once=1e8, n_rec=1e8)
    assert found.backprop_recurrences == 2  # as the table says
    assert math.isclose(found.equal_cost, 1e8 + (2 + 2 / 3) * 1e8)
    full = equivalent(compared, truncated, 4, n_once=1e8, n_rec=1e8, backprop_recurrences=4)
    assert full.equal_cost == 5e8


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "give --width, or both --n-once and --n-rec"),
        ({"n_once": 1e8}, "give --width, or both"),
        ({"width": 512, "n_once": 1.0, "n_rec": 1.0}, "give --width, or both"),
        ({"width": -1}, "width is -1"),
        ({"n_once": -1.0, "n_rec": 1e8}, "n_rec above 0"),
        ({"width": 512, "tokens": 0.0}, "tokens is 0"),
        (
            {"width": 512, "recurrences": 3},
            "recurrences is 3, which arm vanilla has no runs at; it has r = 1, 2, 4, 8",
        ),
        ({"n_once": 1.0, "n_rec": 1e8, "recurrences": 0}, "recurrences is 0"),
        ({"width": 512, "backprop_recurrences": 9}, "backprop_recurrences is 9"),
    ],
)
def test_an_equivalent_that_makes_no_sense_is_refused(analysis, given, said):
    given = {"recurrences": 4} | given
    with pytest.raises(UserError, match=said.replace("(", r"\(")):
        equivalent(analysis, analysis.arms["vanilla"], **given)


def test_optima_are_the_closed_form_for_unshared_models(vanilla):
    """At r = 1 and 6·N FLOPs a token, N* = G·(C/6)^(β/(α+β)) with G = (αA/βB)^(1/(α+β))."""
    columns = {k: v for k, v in vanilla.columns.items() if k not in ("flops_per_token", "d_model")}
    losses = with_losses(vanilla, law_losses(vanilla, TRUTH), columns=columns)
    found = analyse(losses, Options(resamples=50))
    a, b = TRUTH["alpha"], TRUTH["beta"]
    G = (a * TRUTH["A"] / (b * TRUTH["B"])) ** (1 / (a + b))
    for o in compute_optimal(found, found.arms["vanilla"], [1e18, 1e19]):
        if o.recurrences == 1:
            n = G * (o.budget_flops / 6) ** (b / (a + b))
            assert math.isclose(o.n_optimal, n, rel_tol=1e-3)
            assert math.isclose(o.tokens, o.budget_flops / (6 * n), rel_tol=1e-3)
            lowest = TRUTH["E"] + TRUTH["A"] * n**-a + TRUTH["B"] * o.tokens**-b
            assert math.isclose(o.loss, lowest, abs_tol=1e-5)


def test_optima_grow_with_the_budget_and_more_passes_want_fewer_parameters(analysis):
    found = compute_optimal(analysis, analysis.arms["vanilla"])
    assert len(found) == 24
    by = {(o.recurrences, o.budget_flops): o for o in found}
    budgets = sorted({o.budget_flops for o in found})
    for r in (1, 2, 4, 8):
        assert all(by[r, b].n_optimal < by[r, c].n_optimal for b, c in itertools.pairwise(budgets))
        assert all(by[r, b].loss > by[r, c].loss for b, c in itertools.pairwise(budgets))
    for b in budgets:
        assert by[1, b].n_optimal > by[2, b].n_optimal > by[4, b].n_optimal > by[8, b].n_optimal
    for o in found:
        assert o.n_interval.low <= o.n_optimal <= o.n_interval.high
        assert o.loss_interval.low <= o.loss <= o.loss_interval.high


def test_an_optimum_outside_the_widths_that_were_run_is_flagged(analysis):
    (far,) = [o for o in compute_optimal(analysis, analysis.arms["vanilla"], [1e22]) if o.recurrences == 4]
    assert far.extrapolated
