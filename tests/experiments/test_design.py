"""Designs made on the spot from the presets' grids."""

import pytest

from experiments.design import Changes, design
from experiments.presets import PRESETS, preset
from looped.errors import UserError


def shape(specs):
    return {(s.arm, s.budget_flops, s.model.recurrences, s.model.d_model, s.seed) for s in specs}


@pytest.mark.parametrize("name", list(PRESETS))
def test_without_changes_it_is_the_preset(name):
    assert design([name]) == preset(name).specs()
    assert design([name, name]) == preset(name).specs()


def test_a_design_has_every_combination_and_trains_r_1_once():
    changes = Changes(budgets=(1e18, 3e18), recurrences=(1, 4, 16), widths=(512, 768), seeds=(0, 3))
    specs = design(["paper-vanilla", "paper-truncated"], changes)
    looped = {
        (a, b, r, w, s)
        for a in ("vanilla", "truncated")
        for b in (1e18, 3e18)
        for r in (4, 16)
        for w in (512, 768)
        for s in (0, 3)
    }
    baseline = {("vanilla", b, 1, w, s) for b in (1e18, 3e18) for w in (512, 768) for s in (0, 3)}
    assert shape(specs) == looped | baseline
    assert len(specs) == len(looped | baseline)
    depths = {
        s.model.prelude_layers + s.model.coda_layers + s.model.recurrences * s.model.recurrent_layers
        for s in specs
    }
    assert depths == {20}
    assert {s.model.k for s in specs if s.arm == "truncated"} == {2, 8}


def test_runs_that_a_preset_has_keep_their_ids():
    ids = {s.run_id for s in preset("paper-vanilla").specs()}
    some = design(["paper-vanilla"], Changes(budgets=(4.64e17,), recurrences=(1, 8)))
    assert len(some) == 8
    assert {s.run_id for s in some} < ids
    again = design(["paper-vanilla"], Changes(widths=(384, 512, 640, 768), budgets=(4.64e17,)))
    assert {s.run_id for s in again} == {s.run_id for s in preset("paper-vanilla").specs(budgets=(4.64e17,))}


def test_arms_of_other_presets_can_be_named():
    specs = design(["paper-vanilla"], Changes(arms=("vanilla", "hyperconnect"), budgets=(1e18,)))
    assert {s.arm for s in specs} == {"vanilla", "hyperconnect"}
    assert {s.model.lanes for s in specs if s.arm == "hyperconnect"} == {2}
    assert {s.arm for s in design(["laptop"], Changes(arms=("truncated",)))} == {"truncated"}


@pytest.mark.parametrize(
    ("names", "changes", "said"),
    [
        (["paper-vanila"], {"budgets": (1e18,)}, "'paper-vanilla'"),
        (["paper-flagship"], {"widths": (512,)}, "no grid of budgets and widths"),
        (["paper-vanilla", "laptop"], {"recurrences": (1, 4)}, "have different models"),
        (["paper-vanilla"], {"budgets": (3e18,)}, "budgets has 3e.18, which .* lacks; .*add the widths"),
        (["paper-vanilla"], {"budgets": (-1.0,)}, "budgets has -1"),
        (["paper-vanilla"], {"widths": (500,)}, "widths has 500; .* multiples of 128"),
        (["paper-vanilla"], {"recurrences": (3,)}, "recurrences has 3; .*some of 1, 2, 4, 8, 16"),
        (["paper-vanilla"], {"recurrences": (0,)}, "recurrences has 0"),
        (["paper-vanilla"], {"arms": ("truncatd",)}, "arms has 'truncatd'.*'truncated'"),
        (["paper-vanilla"], {"arms": ("full",)}, "arms has 'full', which is unknown"),
        (["paper-vanilla"], {"seeds": (-1,)}, "seeds has -1"),
    ],
)
def test_what_cannot_be_made_says_why(names, changes, said):
    with pytest.raises(UserError, match=said):
        design(names, Changes(**changes))
