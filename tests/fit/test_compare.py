"""Arms against each other: a difference is charged to what was changed."""

import dataclasses

import numpy as np
import pytest
from tables import TRUNCATED, TRUTH, VANILLA, law_losses, take, with_losses

from fit.analysis import Options
from fit.compare import PARTS, compare, evaluate
from fit.losses import read_losses
from looped.errors import UserError

FEW = Options(resamples=50)


def two_arms(losses, noise=1e-4, **changed):
    """The published grid run by two arms; the second has other parameters, or `tokens` times as many tokens."""
    rng = np.random.default_rng(0)
    more = changed.pop("tokens", 1.0)
    looped = take(losses, losses.looped)
    first = law_losses(losses, TRUTH)
    second = law_losses(looped, TRUTH | changed, tokens=looped.tokens * more)
    stacked = {}
    for field in dataclasses.fields(losses):
        one, other = getattr(losses, field.name), getattr(looped, field.name)
        stacked[field.name] = np.concatenate([one, other]) if isinstance(one, np.ndarray) else one
    stacked["loss"] = np.concatenate([first, second]) + noise * rng.standard_normal(len(losses) + len(looped))
    stacked["tokens"] = np.concatenate([losses.tokens, looped.tokens * more])
    stacked["arm"] = np.array(["full"] * len(losses) + ["other"] * len(looped), dtype=object)
    stacked["labels"] = losses.labels + looped.labels
    stacked["columns"] = {}
    return dataclasses.replace(losses, **stacked)


@pytest.mark.parametrize(
    ("changed", "part"),
    [({"phi": 0.25}, "loop"), ({"tokens": 1.3}, "tokens"), ({"E": 1.5}, "recipe")],
    ids=["loop", "tokens", "recipe"],
)
def test_a_change_is_charged_to_the_part_that_was_changed(vanilla, changed, part):
    losses = two_arms(vanilla, **changed)
    if (
        part == "recipe"
    ):  # the shared r = 1 rows belong to one recipe: give the other arm a baseline of its own
        losses = take(losses, losses.looped)
    overall = next(s for s in compare(losses, FEW).splits if s.recurrences is None)
    assert overall.pairs == 87
    assert abs(overall.fitted - overall.observed) < 3e-4
    for other in PARTS:
        expected = overall.observed if other == part else 0.0
        assert abs(overall.parts[other] - expected) < 0.1 * abs(overall.observed), other
    assert np.sign(overall.parts[part]) == (1 if part == "loop" else -1)


def test_the_parts_add_up_for_every_r(both_arms):
    found = compare(both_arms, FEW)
    assert [s.recurrences for s in found.splits] == [None, 2, 4, 8]
    for s in found.splits:
        assert np.isclose(sum(s.parts.values()), s.fitted)
        for part in PARTS:
            assert s.intervals[part].low <= s.intervals[part].high
    assert found.splits[0].parts["tokens"] < -0.03  # truncation buys tokens: the training-side gain


def test_a_known_difference_of_exponents_is_found_in_both_views(vanilla):
    found = compare(two_arms(vanilla, phi=0.25), FEW)
    for view in found.views[:2]:
        (d,) = view.differences
        assert abs(d.estimate - (0.25 - TRUTH["phi"])) < 0.01
        assert d.interval.low < 0.25 - TRUTH["phi"] < d.interval.high
        assert d.interval.high < 0
    misfits = [view.misfit for view in found.views]
    assert misfits[2] > 5 * misfits[1]  # one φ for both does not fit


def test_every_pair_of_three_arms_is_compared(both_arms):
    third = both_arms.arm.copy()
    third[(both_arms.arm == "truncated") & (both_arms.recurrences == 8)] = "deep"
    mixed = dataclasses.replace(both_arms, arm=third)
    found = compare(mixed, FEW)
    pairs = {(d.arm, d.against) for d in found.differences}
    assert pairs == {("truncated", "vanilla"), ("deep", "vanilla"), ("deep", "truncated")}
    assert set(found.views[1].phi) == {"vanilla", "truncated", "deep"}
    by_pair = {(d.arm, d.against): d.estimate for d in found.differences}
    assert np.isclose(
        by_pair["deep", "vanilla"] - by_pair["truncated", "vanilla"], by_pair["deep", "truncated"]
    )


def test_paired_cells_are_an_option(both_arms):
    paired = compare(both_arms, Options(resamples=50, pair="cells"))
    assert paired.analysis.draws is not None
    assert len(np.unique(paired.analysis.draws.cells)) == 24


def test_tables_of_two_conventions_are_refused_by_name(tmp_path):
    other = tmp_path / "truncated.csv"
    other.write_text(TRUNCATED.read_text().replace("published", "no-injection"))
    with pytest.raises(UserError, match=r"'published' .* and 'no-injection'"):
        read_losses([VANILLA, other])
    assert read_losses([VANILLA, other], convention="published").convention == "published"


def test_one_arm_is_not_compared(vanilla, both_arms):
    with pytest.raises(UserError, match=r"needs two arms .* has 1 \(vanilla\)"):
        compare(vanilla, FEW)
    one_budget = (both_arms.arm == "vanilla") | (both_arms.budget == 1e18)
    with pytest.raises(UserError, match="truncated: all rows have one compute budget"):
        compare(take(both_arms, one_budget), FEW)


def test_arms_without_a_common_configuration_are_said_to_have_none(both_arms):
    budget = both_arms.budget * np.where(both_arms.arm == "truncated", 1.1, 1.0)
    found = compare(
        with_losses(both_arms, both_arms.loss, budget=budget), Options(resamples=50, baseline="all")
    )
    assert found.splits == ()
    assert found.notes == ("truncated and vanilla have no configuration in common",)


def test_the_formula_in_natural_parameters_broadcasts(vanilla):
    by_hand = law_losses(vanilla, TRUTH)
    r = vanilla.recurrences.astype(float)
    np.testing.assert_allclose(
        evaluate(TRUTH, vanilla.n_once, vanilla.n_rec, r, vanilla.tokens), by_hand, rtol=1e-12
    )
