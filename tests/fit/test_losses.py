"""Losses in: what is read, what is left out, what is refused, and in which words."""

import json
import math
import time

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from etils import epath
from hypothesis import given
from hypothesis import strategies as st
from tables import CORE, TRUNCATED, VANILLA, published_rows

from fit.budgets import group, resolve_budgets
from fit.losses import read_losses
from fit.reading import MAX_ROWS
from looped.errors import UserError
from looped.jsonable import to_json
from looped.record import ParameterGroups, RunRecord, count_parameters, write_record


def test_the_published_table_is_read_whole(vanilla):
    assert len(vanilla) == 116
    assert vanilla.arms == ("vanilla",)
    assert vanilla.convention == "published"
    assert len(np.unique(vanilla.budget)) == 6
    assert len(np.unique(vanilla.cells())) == 24
    assert not vanilla.excluded
    assert not vanilla.warnings
    assert vanilla.loss[0] == 2.88368
    assert vanilla.columns["reading"][0] == "ok"


def test_the_shipped_tables_go_by_name_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(read_losses("paper-vanilla")) == 116


def test_r_1_rows_are_the_baseline_of_every_arm_whatever_arm_they_name(both_arms):
    assert both_arms.arms == ("vanilla", "truncated")
    assert len(both_arms.rows_of("vanilla")) == 116
    matched, every = both_arms.rows_of("truncated"), both_arms.rows_of("truncated", "all")
    assert (len(matched), len(every)) == (61 + 20, 61 + 29)
    assert set(both_arms.budget[matched]) == set(sorted(set(both_arms.budget))[:4])
    assert len(both_arms.excluded) == 20  # the r = 1 runs that both files carry
    assert "row 1 (line 2)" in both_arms.excluded[0].row


def test_the_reference_arm_comes_first_wherever_its_rows_are(table):
    rows = published_rows(TRUNCATED)[::-1] + published_rows(VANILLA)
    assert read_losses(table(rows)).arms == ("vanilla", "truncated")


def test_two_arms_in_one_file_may_each_bring_the_baseline(table, both_arms):
    rows = published_rows() + published_rows(TRUNCATED)
    losses = read_losses(table(rows))
    assert len(losses.excluded) == 20
    assert (losses.loss == both_arms.loss).all()


def test_cells_of_r_1_are_shared_and_others_are_not_unless_paired(both_arms):
    cells, paired = both_arms.cells(), both_arms.cells(paired=True)
    assert len(np.unique(cells)) == 24 + 12
    assert len(np.unique(paired)) == 24
    assert len(np.unique(both_arms.cells("budget"))) == 6
    assert len(np.unique(both_arms.cells("row"))) == len(both_arms)


def test_the_five_columns_are_enough(table):
    rows = published_rows()
    losses = read_losses(table(rows, columns=list(CORE)))
    assert losses.arms == ("all",)
    assert losses.convention == "unstated"
    assert len(losses) == 116
    assert "budget" in losses.warnings[0]


def test_a_table_without_an_arm_column_takes_its_file_name_where_there_are_several(table):
    rows = published_rows()
    looped = [row for row in rows if row["recurrences"] != "1"]
    paths = [
        table(rows, "mine.csv", [*CORE, "budget_flops"]),
        table(looped[:40], "yours.csv", [*CORE, "budget_flops"]),
    ]
    assert read_losses(paths).arms == ("mine", "yours")


def test_written_and_read_again_a_table_is_the_same(both_arms, tmp_path):
    path = tmp_path / "again.csv"
    path.write_text(both_arms.to_csv())
    again = read_losses(path)
    for name in ("recurrences", "n_once", "n_rec", "tokens", "loss", "budget", "arm"):
        assert (getattr(again, name) == getattr(both_arms, name)).all(), name
    assert again.convention == both_arms.convention


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_other_delimiters_and_a_byte_order_mark_are_understood(tmp_path, delimiter):
    text = VANILLA.read_text().replace(",", delimiter)
    path = tmp_path / "losses.txt"
    path.write_text(text, encoding="utf-8-sig")
    assert len(read_losses(path)) == 116


def test_parquet_says_what_csv_says(tmp_path, vanilla):
    rows = published_rows()
    columns = {name: [float(row[name]) for row in rows] for name in (*CORE, "budget_flops")}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "losses.parquet")
    losses = read_losses(tmp_path / "losses.parquet")
    assert (losses.loss == vanilla.loss).all()
    assert losses.labels[3] == "row 4"


def test_unfinished_failed_and_non_finite_runs_are_left_out_and_listed(table):
    rows = published_rows()
    for row in rows:
        row["status"] = "done"
    rows[3]["status"] = "failed"
    rows[3]["reason"] = "the loss was not finite at step 12"
    rows[4]["loss"] = "nan"
    rows[5]["loss"] = ""
    rows[6]["status"] = "running"
    losses = read_losses(table(rows, columns=[*rows[0], "reason"]))
    assert len(losses) == 112
    said = {e.row: e.reason for e in losses.excluded}
    assert said == {
        "row 4 (line 5)": "failed: the loss was not finite at step 12",
        "row 5 (line 6)": "the loss is not finite (nan)",
        "row 6 (line 7)": "no loss",
        "row 7 (line 8)": "still running or interrupted",
    }


def test_a_run_id_counts_once(table):
    rows = published_rows()
    for i, row in enumerate(rows):
        row["run_id"] = f"run-{i}"
    losses = read_losses(table([*rows, rows[7]]))
    assert len(losses) == 116
    assert losses.excluded[0].reason == "repeats run_id run-7 of row 8 (line 9)"


def test_seeds_tell_repeats_apart(table):
    rows = [row | {"seed": seed} for seed in ("0", "1") for row in published_rows()]
    losses = read_losses(table(rows))
    assert len(losses) == 232
    assert len(np.unique(losses.cells())) == 24
    assert losses.columns["seed"][-1] == "1"


def test_bits_become_nats_when_told(table, vanilla):
    rows = published_rows()
    for row in rows:
        row["loss"] = repr(float(row["loss"]) / math.log(2))
    losses = read_losses(table(rows), loss_unit="bits")
    np.testing.assert_allclose(losses.loss, vanilla.loss, rtol=1e-12)


def test_a_convention_recounts_from_the_parameter_groups(vanilla):
    recounted = read_losses(VANILLA, convention="injection-recurrent")
    assert recounted.convention == "injection-recurrent"
    moved = recounted.n_rec - vanilla.n_rec
    width = np.array([float(d) for d in vanilla.columns["d_model"]])
    np.testing.assert_array_equal(moved, np.where(vanilla.recurrences > 1, 2 * width**2, 0))
    np.testing.assert_array_equal(recounted.n_once + recounted.n_rec, vanilla.n_once + vanilla.n_rec)
    again = read_losses(VANILLA, convention="published")
    np.testing.assert_array_equal(again.n_once, vanilla.n_once)


def change(number, **values):
    rows = published_rows()
    rows[number].update({name: str(value) for name, value in values.items()})
    return rows


SPOILT = {
    "text in a number": (lambda: change(4, tokens="many"), "row 5 (line 6): tokens is 'many', which is no number"),
    "no number": (lambda: change(4, n_rec=""), "row 5 (line 6): n_rec is missing"),
    "zero tokens": (lambda: change(4, tokens=0), "row 5 (line 6): tokens is 0; give"),
    "negative tokens": (lambda: change(4, tokens=-5e8), "row 5 (line 6): tokens is -500000000.0; give"),
    "infinite tokens": (lambda: change(4, tokens="inf"), "row 5 (line 6): tokens is inf; give"),
    "r of zero": (lambda: change(4, recurrences=0), "row 5 (line 6): recurrences is 0; give a whole number"),
    "fractional r": (lambda: change(4, recurrences=2.5), "row 5 (line 6): recurrences is 2.5; give a whole number"),
    "loss of zero": (lambda: change(4, loss=0), "row 5 (line 6): loss is 0; give the final loss in nats"),
    "negative loss": (lambda: change(4, loss=-2.7), "row 5 (line 6): loss is -2.7; give the final loss in nats"),
    "perplexity": (lambda: change(4, loss=21.3), "row 5 (line 6): loss is 21.3; give the final loss in nats"),
    "text loss": (lambda: change(4, loss="lost"), "row 5 (line 6): loss is 'lost', which is no number"),
    "one loss in bits": (lambda: change(9, loss=4.20), "row 10 (line 11): loss is 4.2, as far from the others at 4"),
    "tokens in billions": (lambda: change(4, tokens=0.97), "row 5 (line 6): tokens is 0.97 where"),
    "parameters in millions": (lambda: change(4, n_once=0, n_rec=7.1), "row 5 (line 6): n_once + n_rec is 7.1 where"),
    "tokens of another arm": (lambda: change(4, tokens=2.1e9), "row 5 (line 6): tokens × flops_per_token is 2.1"),
    "repeated row": (lambda: [*published_rows(), published_rows()[6]], "row 117 (line 118) repeats row 7 (line 8)"),
    "two conventions": (lambda: change(4, convention="mine"), "(row 1 (line 2)) and 'mine' (row 5 (line 6))"),
    "several wrong rows": (
        lambda: [r | {"tokens": "x"} for r in published_rows()],
        "above 0 and to 1e+18 (115 more rows are wrong; the next, row 2 (line 3): tokens is 'x', which is no number).",
    ),
    "r beyond any integer": (lambda: change(4, recurrences=1e300), "recurrences is 1e+300; give a whole number"),
    "tokens beyond any run": (lambda: change(4, tokens=1e30), "tokens is 1e+30; give the number of tokens"),
    "n_once in billions": (lambda: change(4, n_once=0.0003), "n_once is 0.0003; give the number of parameters"),
    "no n_rec to speak of": (lambda: change(4, n_rec=1e-320), "n_rec is 1e-320; give the number of parameters"),
    "loss near zero": (lambda: change(4, loss=1e-300), "loss is 1e-300; give the final loss in nats"),
    "FLOPs of nothing": (lambda: change(4, flops_per_token=1e-320), "flops_per_token is 1e-320; give a number of"),
    "width in words": (lambda: change(4, d_model="wide"), "d_model is 'wide', which is no number; give a"),
    "width of zero": (lambda: change(4, d_model=0), "d_model is 0; give a width"),
    "k in words": (lambda: change(4, backprop_recurrences="half"), "recurrences is 'half', which is no number; give a"),
    "k above r": (lambda: change(4, backprop_recurrences=9), "recurrences is 9; give a whole number from 1 to"),
    "a page in a number": (lambda: change(4, tokens="x " * 9999), "x x x x …, which is no number; give the"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_row_is_named_with_its_value(name, table):
    rows, message = SPOILT[name]
    with pytest.raises(UserError) as error:
        read_losses(table(rows()))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_one_budget_in_bits_is_noticed(table):
    rows = published_rows()
    for row in rows:
        if row["budget_flops"] == "2.15e+18":
            row["loss"] = str(float(row["loss"]) * 1.4427)
    with pytest.raises(UserError, match=r"a smaller budget, as bits would be"):
        read_losses(table(rows))


def test_every_token_count_in_billions_is_noticed(table):
    rows = [row | {"tokens": str(float(row["tokens"]) / 1e9)} for row in published_rows()]
    with pytest.raises(UserError, match=r"tokens is 0\.3\d+, too few to train on"):
        read_losses(table(rows))


@pytest.mark.parametrize("missing", CORE)
def test_a_misspelt_column_is_named_with_the_nearest(missing, table):
    rows = [{(f"{k}s" if k == missing else k): v for k, v in row.items()} for row in published_rows()]
    with pytest.raises(UserError, match=f"column '{missing}' is missing; rename '{missing}s'"):
        read_losses(table(rows))


def test_a_column_of_bits_is_not_taken_for_losses(table):
    rows = [{("bits_per_byte" if k == "loss" else k): v for k, v in row.items()} for row in published_rows()]
    with pytest.raises(UserError, match="'bits_per_byte' seems to be in bits"):
        read_losses(table(rows))


def test_seeds_are_told_apart_however_they_are_written(table):
    given = ["0", "", "1.0", "1", "a", "inf"]
    rows = [row | {"seed": given[i % 6]} for i, row in enumerate(published_rows())]
    assert read_losses(table(rows)).seeds[:6].tolist() == ["0", "0", "1", "1", "a", "inf"]
    assert set(read_losses(VANILLA).seeds) == {"0"}


FILES = {
    "binary": (b"\x89PNG\r\n\x1a\n\x00\x00", "not UTF-8 text"),
    "nothing": (b"", "it is empty"),
    "json": (b'{"phi": 0.46}', "looks like JSON"),
    "prose": (b"The losses are in the other file.\n", "names one column"),
    "false parquet": (b"PAR1 and then nothing of the kind", "begins like Parquet"),
    "a header alone": (b"recurrences,n_once,n_rec,tokens,loss\n", "no rows below its header"),
    "a short line": (
        b"recurrences,n_once,n_rec,tokens,loss\n1,0,1e6,1e9\n",
        "line 2 has 4 fields and the header 5",
    ),
    "a column twice": (b"recurrences,n_once,n_rec,tokens,loss,loss\n", "column 'loss' appears twice"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_table_is_refused(name, tmp_path):
    content, message = FILES[name]
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_losses(tmp_path / "file")


def test_a_path_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UserError, match="no such file or directory"):
        read_losses(tmp_path / "nowhere.csv")
    with pytest.raises(UserError, match="holds no runs"):
        read_losses(tmp_path)


def test_a_remote_path_without_its_package_says_what_to_install(monkeypatch):
    def missing(self):
        raise ImportError("Please install gcsfs to access Google Storage")

    monkeypatch.setattr(type(epath.Path("gs://bucket/losses.csv")), "exists", missing)
    with pytest.raises(UserError, match=r"gs://bucket/losses.csv: cannot be reached; please install gcsfs"):
        read_losses("gs://bucket/losses.csv")


def test_a_training_log_is_refused_before_it_is_fitted(tmp_path):
    rows = "".join(f"4,1000000,1000000,{10000 + i},{5 - i * 1e-5:.5f}\n" for i in range(100_000))
    (tmp_path / "log.csv").write_text("recurrences,n_once,n_rec,tokens,loss\n" + rows)
    with pytest.raises(UserError, match=rf"row {MAX_ROWS + 1} is one too many.*training log"):
        read_losses(tmp_path / "log.csv")


def test_a_convention_needs_the_parameter_groups(table):
    rows = published_rows(TRUNCATED)
    path = table(rows, columns=[name for name in rows[0] if name != "params_coda"])
    with pytest.raises(UserError, match="params_coda is missing"):
        read_losses(path, convention="no-injection")
    with pytest.raises(UserError, match=r"'no-injektion' is unknown\. Did you mean 'no-injection'"):
        read_losses(path, convention="no-injektion")


def record(run_id, **changes):
    groups = ParameterGroups(1000, 1000, 4000, 6000, 4000, 500, 30)
    once, rec = count_parameters(groups, 4)
    values = {
        "run_id": run_id, "status": "done", "arm": "full", "recurrences": 4, "backprop_recurrences": 4, "d_model": 32,
        "n_once": once, "n_rec": rec, "convention": "published", "parameters": groups, "flops_per_token": 1e5,
        "budget_flops": 1e12, "tokens": 10_000_000, "steps": 100, "seed": 0, "loss": 1.5, "validation_tokens": 1 << 20,
        "data_hash": "abc", "epochs": 0.5, "spec": {}, "versions": {}, "device": "cpu",
        "started_at": "2026-01-01T00:00:00+00:00", "updated_at": "2026-01-01T00:10:00+00:00",
    }  # fmt: skip
    return RunRecord(**(values | changes))


def test_losses_of_records_may_lie_as_far_apart_as_nats_and_bits(tmp_path, table):
    """A record states its unit; a table with the same losses does not, and is refused."""
    for name, loss in {"a": 1.50, "b": 1.52, "c": 1.50 / math.log(2)}.items():
        write_record(tmp_path / "runs" / name, record(name, loss=loss, seed=ord(name)))
    losses = read_losses(tmp_path / "runs")
    assert sorted(losses.loss) == [1.50, 1.52, 1.50 / math.log(2)]
    (tmp_path / "again.csv").write_text(losses.to_csv())
    with pytest.raises(UserError, match="as far from the others at 1e\\+12 FLOPs as bits would be"):
        read_losses(tmp_path / "again.csv")


def test_run_records_become_a_table_and_those_without_a_result_are_named(tmp_path):
    write_record(tmp_path / "a", record("a"))
    write_record(tmp_path / "b", record("b", recurrences=1, backprop_recurrences=1, loss=1.4, seed=3))
    write_record(tmp_path / "c", record("c", status="failed", loss=None, reason="loss nan at step 7"))
    write_record(tmp_path / "d", record("d", status="running", loss=None))
    write_record(tmp_path / "copy-of-a", record("a"))
    (tmp_path / "e" / "record").mkdir(parents=True)
    (tmp_path / "e" / "record" / "metadata").write_text("{")
    (tmp_path / "phi.json").write_text("{}")  # an earlier result lies among the runs
    losses = read_losses(tmp_path)
    assert losses.labels == ("run a", "run b")
    assert losses.columns["params_injection"] == (500, 500)
    assert losses.columns["seed"] == (0, 3)
    reasons = {e.row: e.reason for e in losses.excluded}
    assert reasons["run c"] == "failed: loss nan at step 7"
    assert reasons["run d"] == "still running or interrupted"
    assert reasons["run copy-of-a"] == "repeats run_id a of run a"
    assert "not JSON" in reasons["run e"]


def test_a_thousand_runs_are_read_in_seconds(tmp_path):
    text = json.dumps(to_json(record("x")))
    for i in range(1000):
        folder = tmp_path / f"run-{i:04}" / "record"
        folder.mkdir(parents=True)
        (folder / "metadata").write_text(
            text.replace('"x"', f'"x{i}"').replace("10000000", str(10_000_000 + i))
        )
    began = time.process_time()
    losses = read_losses(tmp_path)
    assert len(losses) == 1000
    assert time.process_time() - began < 10


def test_budgets_are_read_off_what_was_spent():
    tokens = np.array([1e9, 5e8, 4e9, 2e9, 1.01e9, 4.02e9])
    flops: list[float | None] = [1.0, 2.0, 1.0, 2.0, 1.0, 1.0]
    budgets, notes = resolve_budgets([None] * 6, flops, tokens, np.ones(6))
    assert len(np.unique(budgets)) == 2
    assert budgets[0] == budgets[1] == budgets[4]
    assert "2 of them" in notes[0]


def test_chance_gaps_are_not_taken_for_budgets(vanilla):
    """Without the unembedding's FLOPs, what the published runs spent spreads by two within a budget."""
    effective = vanilla.n_once + vanilla.recurrences * vanilla.n_rec
    budgets, notes = resolve_budgets([None] * 116, [None] * 116, vanilla.tokens, effective)
    assert np.isnan(budgets).all()
    assert "no separate budgets" in notes[0]
    one, _ = resolve_budgets([None] * 4, [None] * 4, np.array([1.0, 1.02, 1.04, 1.08]), np.ones(4) * 1e9)
    assert len(np.unique(one)) == 1
    assert np.isfinite(one).all()


@given(
    st.lists(st.sampled_from([1e17, 3e17, 1e18, 1e19]), min_size=1, max_size=20),
    st.randoms(use_true_random=False),
)
def test_rounding_does_not_split_a_budget(budgets, random):
    spent = np.array([b * (1 + random.uniform(-0.001, 0.001)) for b in budgets])
    grouped = group(spent, 0.005)
    for b in set(budgets):
        members = grouped[np.array(budgets) == b]
        assert len(set(members)) == 1
        assert abs(members[0] / b - 1) < 0.002
    assert len(set(grouped)) == len(set(budgets))
