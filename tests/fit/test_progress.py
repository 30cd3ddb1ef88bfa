"""Losses that are there beside planned runs, and the laws that a plan can start from."""

import csv
import json

import numpy as np
import pytest
from tables import TRUNCATED, TRUTH, VANILLA, law_losses, published_rows, with_losses

from experiments.grid import rows
from experiments.presets import preset
from fit.design import planned_losses
from fit.losses import read_losses
from fit.prior import PUBLISHED, PUBLISHED_PRIOR, Prior, prior_of, read_prior
from fit.progress import are_done, joined, read_done, take
from looped.errors import UserError


@pytest.fixture(scope="module")
def planned():
    return planned_losses(rows(preset("paper-vanilla").specs()), PUBLISHED_PRIOR)


def write(path, table):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, table[0])
        writer.writeheader()
        writer.writerows(table)
    return str(path)


def test_planned_losses_are_those_of_the_law(planned):
    assert planned.loss == pytest.approx(law_losses(planned, PUBLISHED))
    published = read_losses(VANILLA)
    assert np.array_equal(planned.tokens, published.tokens)
    assert np.abs(planned.loss - published.loss).max() < 0.05  # the law's own misfit, at most


def test_the_published_losses_are_the_published_grid_done(planned):
    assert are_done(planned, read_done(VANILLA, planned)).all()
    truncated = read_done(TRUNCATED, planned)  # which holds the r = 1 runs of four budgets
    assert are_done(planned, truncated).sum() == 20


def test_runs_are_told_apart_by_seed_and_known_by_id(planned, tmp_path):
    table = published_rows()[:40]
    again = planned_losses(
        [row | {"seed": 1, "run_id": f"{row['run_id']}-1"} for row in rows(preset("paper-vanilla").specs())],
        PUBLISHED_PRIOR,
    )
    done = read_done(write(tmp_path / "some.csv", table), planned)
    assert are_done(planned, done).sum() == 40
    assert not are_done(again, done).any()
    seeded = read_done(write(tmp_path / "seed.csv", [row | {"seed": "1"} for row in table]), planned)
    assert are_done(again, seeded).sum() == 40
    known = [row | {"run_id": again.labels[i], "seed": "5"} for i, row in enumerate(table[:3])]
    named = read_done(
        write(tmp_path / "named.csv", known + [row | {"seed": "0", "run_id": ""} for row in table[3:]]),
        planned,
    )
    assert are_done(again, named).sum() == 3


def test_losses_that_name_no_arm_take_the_plans(planned, tmp_path):
    table = [{k: v for k, v in row.items() if k != "arm"} for row in published_rows()]
    path = write(tmp_path / "no-arm.csv", table)
    assert are_done(planned, read_done(path, planned)).all()
    both = joined(planned, planned_losses(rows(preset("paper-truncated").specs()), PUBLISHED_PRIOR))
    with pytest.raises(UserError, match="no column `arm`, and the plan has the arms vanilla, truncated"):
        read_done(path, both)


def test_losses_counted_otherwise_are_counted_again(planned, tmp_path):
    table = [row | {"convention": "no-injection", "n_once": "1"} for row in published_rows()]
    assert are_done(planned, read_done(write(tmp_path / "other.csv", table), planned)).all()


def test_joined_tables_keep_their_rows_and_share_their_cells(planned):
    low = planned.budget <= 1e18
    published = read_losses(VANILLA)
    both = joined(take(planned, low), take(published, ~low))
    assert len(both) == len(planned)
    assert len(np.unique(both.cells("cell"))) == 24
    off = take(published, low)
    off = with_losses(off, off.loss, budget=off.budget * 1.01)
    assert len(np.unique(joined(take(planned, low), off).cells("cell"))) == 8


def test_laws_come_from_losses_that_determine_one():
    losses = read_losses(VANILLA)
    exact = with_losses(losses, law_losses(losses, TRUTH))
    prior, told = prior_of(exact)
    assert prior is not None
    assert prior.of("vanilla") == pytest.approx(TRUTH, rel=1e-3)
    assert prior.tokens == (losses.tokens.min(), losses.tokens.max())
    assert len(told) <= 1
    assert prior_of(take(exact, exact.budget == 1e18)) == (None, [])


def test_laws_of_other_arms_are_those_of_the_first_and_far_runs_are_told(planned):
    prior = Prior({"full": TRUTH, "other": PUBLISHED}, "two", (1e3, 1e5), (1e8, 1e11))
    assert prior.of("other") is PUBLISHED
    assert prior.of("third") is TRUTH
    (told,) = prior.reservations(planned)
    assert "parameters" in told
    assert "1e+03 to 1e+05" in told
    assert PUBLISHED_PRIOR.reservations(planned) == []
    laptop = planned_losses(rows(preset("laptop").specs()), PUBLISHED_PRIOR)
    assert len(PUBLISHED_PRIOR.reservations(laptop)) == 2


def phi_json(tmp_path, **changes):
    arm = {**TRUTH, "phi": {"estimate": TRUTH["phi"], "interval": [0.4, 0.5]}, "convention": "published"}
    path = tmp_path / "phi.json"
    path.write_text(json.dumps({"arms": {"full": arm | changes, "none": {"phi": None}}}))
    return path


def test_a_phi_json_is_read_for_the_arms_that_have_one(tmp_path):
    prior = read_prior(phi_json(tmp_path))
    assert dict(prior.arms) == {"full": TRUTH}
    assert "full of" in prior.source


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"phi": None}, "no arm has a φ"),
        ({"A": None}, "has A None"),
        ({"alpha": "x"}, "has alpha 'x'"),
        ({"E": 0.0}, "has E 0; the law of a plan needs it above 0"),
        ({"convention": "no-injection"}, "counts parameters under convention 'no-injection'"),
    ],
)
def test_a_phi_json_that_gives_no_law_is_refused(tmp_path, changes, said):
    with pytest.raises(UserError, match=said):
        read_prior(phi_json(tmp_path, **changes))


@pytest.mark.parametrize(
    ("text", "said"), [("no", "not JSON"), ("[]", "has no arms"), ('{"arms": 1}', "no arms")]
)
def test_a_file_that_is_no_phi_json_is_refused(tmp_path, text, said):
    path = tmp_path / "phi.json"
    path.write_text(text)
    with pytest.raises(UserError, match=said):
        read_prior(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_prior(tmp_path / "absent.json")
