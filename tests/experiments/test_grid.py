"""The published grids, against the published counts; other presets against what the paper says of them."""

import csv
import json
import pathlib

import pytest

from experiments.grid import rows
from experiments.presets import PAPER_SIZES, PRESETS, paper_width, preset
from looped.errors import UserError
from looped.jsonable import to_json

# Computed by the published code (PyTorch, arXiv:2604.21106) for its vanilla grid at r = 1 and r = 4.
COUNTS = pathlib.Path(__file__).parents[1] / "data" / "counts.csv"
LOSSES = pathlib.Path(__file__).parents[2] / "fit" / "data"
RATES = ("matrix_lr", "adam_lr_scale")


@pytest.fixture(scope="module")
def vanilla():
    return rows(preset("paper-vanilla").specs())


def test_counts_steps_and_rates_are_the_published_ones(vanilla):
    with COUNTS.open() as file:
        published = list(csv.DictReader(file))
    ours = [row for row in vanilla if row["recurrences"] in (1, 4)]
    assert len(ours) == len(published) == 58
    for row, expected in zip(ours, published, strict=True):  # in the published order
        assert row["arm"] == expected.pop("arm")
        for name in RATES:
            assert row[name] == pytest.approx(float(expected.pop(name)), rel=1e-9)
        for name, value in expected.items():
            assert row[name] == float(value), (name, expected)


@pytest.mark.parametrize("name", ["paper-vanilla", "paper-truncated"])
def test_tokens_and_parameters_are_those_of_the_published_losses(name):
    """All 116 vanilla runs, and the truncated ones at the four lower budgets with their 20 r = 1 baselines."""
    grid = {}
    for arm in ("paper-vanilla", "paper-truncated"):
        for row in rows(preset(arm).specs()):
            grid[row["arm"], row["budget_flops"], row["recurrences"], row["d_model"]] = row
    with (LOSSES / f"{name}.csv").open() as file:
        for published in csv.DictReader(file):
            row = grid[
                published["arm"],
                float(published["budget_flops"]),
                int(published["recurrences"]),
                int(published["d_model"]),
            ]
            for column in ("backprop_recurrences", "n_once", "n_rec", "flops_per_token", "tokens"):
                assert row[column] == int(published[column]), (column, published)


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("paper-vanilla", 116),
        ("paper-truncated", 102),
        ("paper-hyperconnect", 90),
        ("paper-learning-rate", 16),
        ("paper-injection", 4),
        ("paper-flagship", 2),
    ],
)
def test_number_of_runs(name, runs):
    specs = preset(name).specs()
    assert len(specs) == runs


@pytest.mark.parametrize("name", PRESETS)
def test_every_run_of_a_preset_has_an_id_of_its_own_and_at_least_one_step(name):
    found = rows(preset(name).specs())
    assert len({row["run_id"] for row in found}) == len(found)
    assert min(row["steps"] for row in found) >= 1


def test_equal_depth_equal_budget_and_half_the_passes(vanilla):
    for spec in (*preset("paper-vanilla").specs(), *preset("paper-truncated").specs()):
        model = spec.model
        once = model.prelude_layers + model.coda_layers
        assert once + model.recurrences * model.recurrent_layers == 20
        assert model.k == (model.recurrences // 2 if spec.arm == "truncated" else model.recurrences)
    assert {row["n_once"] for row in vanilla if row["recurrences"] == 1} == {0}


def test_truncated_runs_have_more_tokens_for_the_same_budget(vanilla):
    """The median ratio over shared cells is 1.315 (paper, appendix G.1)."""
    key = ("budget_flops", "recurrences", "d_model")
    full = {tuple(row[k] for k in key): row["tokens"] for row in vanilla}
    ratios = sorted(
        row["tokens"] / full[cell]
        for row in rows(preset("paper-truncated").specs())
        if (cell := tuple(row[k] for k in key)) in full and row["budget_flops"] <= 4.64e18
    )
    assert ratios[len(ratios) // 2] == pytest.approx(1.315, abs=0.01)


def test_injection_ablation_trains_on_the_tokens_the_paper_prints():
    """Table 5: 955 M for the linear injection, 973 M for those without its cost."""
    millions = {row["arm"]: round(row["tokens"] / 1e6) for row in rows(preset("paper-injection").specs())}
    assert millions == {"linear": 955, "additive": 973, "passthrough": 973, "hyperconnect": 973}


def test_hyperconnect_adds_the_scalars_the_paper_counts():
    """r (K² + 2 K) scalars: 32 at two lanes and r = 4 (appendix G.1)."""
    for row in rows(preset("paper-hyperconnect").specs()):
        assert row["params_injection"] == 8 * row["recurrences"]
        assert row["backprop_recurrences"] == row["recurrences"]


def test_flagship_and_learning_rate_sweep_have_the_papers_tokens():
    assert {round(row["tokens"] / 1e9) for row in rows(preset("paper-flagship").specs())} == {47}
    sweep = rows(preset("paper-learning-rate").specs())
    assert all(0.95e9 < row["tokens"] < 1.05e9 for row in sweep)  # "about 1 B"
    rates = sorted({spec.optimizer.matrix_lr for spec in preset("paper-learning-rate").specs()})
    assert (len(rates), rates[0], rates[-1], 0.014 in rates) == (8, 0.008, 0.024, True)


@pytest.mark.parametrize("name", ["quickstart", "laptop"])
def test_ones_own_grids_pair_their_arms_at_equal_depth_and_head_size(name):
    specs = preset(name).specs()
    cells = {(s.arm, s.model.recurrences, s.model.d_model, s.budget_flops) for s in specs}
    full = {cell[1:] for cell in cells if cell[0] == "full"}
    truncated = {cell[1:] for cell in cells if cell[0] == "truncated"}
    assert truncated == {cell for cell in full if cell[0] > 1}  # r = 1 is trained once, for both
    assert {1, 4} < {r for r, _, _ in full}
    assert len({s.budget_flops for s in specs}) >= 2
    assert len({s.model.d_model for s in specs}) >= 3
    assert len({s.model.head_dim for s in specs}) == 1
    depths = {
        s.model.prelude_layers + s.model.coda_layers + s.model.recurrences * s.model.recurrent_layers
        for s in specs
    }
    assert len(depths) == 1


def test_quickstart_has_the_recurrences_it_promises():
    assert {s.model.recurrences for s in preset("quickstart").specs()} == {1, 2, 4}


def test_seeds_multiply_and_budgets_select():
    whole = preset("quickstart").specs()
    budget = whole[0].budget_flops
    some = preset("quickstart").specs(seeds=(3, 4), budgets=(budget,))
    assert {s.seed for s in some} == {3, 4}
    assert len(some) == 2 * sum(s.budget_flops == budget for s in whole)
    with pytest.raises(UserError, match=r"budgets has 7, .* it has "):
        preset("quickstart").specs(budgets=(7.0,))
    with pytest.raises(UserError, match="no budgets"):
        preset("paper-flagship").specs(budgets=(7.0,))


def test_the_laptops_baseline_is_repeated_and_seeds_asked_for_take_its_place():
    whole = preset("laptop").specs()
    assert {s.seed for s in whole if s.model.recurrences == 1} == {0, 1}
    assert {s.seed for s in whole if s.model.recurrences > 1} == {0}
    asked = preset("laptop").specs(seeds=(5, 5))
    assert {s.seed for s in asked} == {5}
    assert len(asked) == len({s.run_id for s in asked}) == sum(s.seed == 0 for s in whole)


def test_widths_are_whole_heads():
    assert [paper_width(s) for s in (6, 7, 10)] == [384, 512, 640]
    assert all(paper_width(s) == 64 * s for sizes in PAPER_SIZES.values() for s in sizes)


def test_an_unknown_preset_is_answered_with_the_nearest():
    with pytest.raises(UserError, match="'paper-truncated'"):
        preset("paper-truncted")


# --- A plan's file ------------------------------------------------------------------------------------------


def test_the_runs_of_a_plan_are_those_that_it_was_made_of(tmp_path):
    specs = preset("quickstart").specs()[3:9]
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"runs": [{"spec": to_json(spec), "seconds": 1.0} for spec in specs]}))
    assert preset(str(file)).name == "mine"
    assert preset(str(file)).specs() == specs
    assert preset(str(file)).specs(budgets=[specs[0].budget_flops])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read .*; write one with `looped plan"),
        ("{", "not JSON"),
        ("[]", "not a plan"),
        ('{"runs": [{"spec": {"stepz": 1}}]}', "runs\\[0\\].spec.stepz: not a field of RunSpec"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path, content, words):
    file = tmp_path / "mine.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match=words):
        preset(str(file))
