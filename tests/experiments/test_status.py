"""A sweep's status is what its records say, wherever they are; the losses table has each run once."""

import csv
import datetime
import io
import json

import fake_training
import pytest
from test_sweep import run, specs

from experiments import attempts, claims, console, manifest
from experiments.collect import COLUMNS, collect, write_table
from experiments.shares import WHOLE
from experiments.status import SIGN_SECONDS, read_status, to_data
from fit.losses import read_losses
from looped.errors import UserError

WANTED = specs("full", widths=(16, 32, 48, 64))


def at(seconds_ago):
    then = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=seconds_ago)
    return then.isoformat(timespec="seconds")


def put(directory, spec, status, step, *, updated_at="", **fields):
    """Leaves a record as training does, without training."""
    (directory / spec.run_id).mkdir(parents=True, exist_ok=True)
    fake_training._write(
        directory / spec.run_id, spec, status=status, step=step, updated_at=updated_at, **fields
    )


@pytest.fixture(params=["local", "remote"])
def sweep_dir(request, tmp_path):
    """A sweep with a run in every state."""
    directory = (
        tmp_path / "sweep" if request.param == "local" else request.getfixturevalue("bucket") / "sweep"
    )
    manifest.write(directory, manifest.Manifest("mine", WANTED))
    put(directory, WANTED[0], "done", 40, loss=3.25, updated_at=at(5000))
    put(directory, WANTED[1], "running", 12, updated_at=at(70))
    put(directory, WANTED[2], "failed", 3, reason="the training loss at step 3 is nan", updated_at=at(900))
    return directory


def test_every_state_is_told_from_the_records_alone(sweep_dir):
    data = to_data(read_status(sweep_dir))
    assert [data[state] for state in ("done", "running", "waiting", "failed")] == [1, 1, 1, 1]
    done, running, failed, waiting = data["runs"]
    assert (done["state"], done["loss"]) == ("done", 3.25)
    assert (running["state"], running["step"], running["steps"]) == ("running", 12, 40)
    assert 70 <= running["age_seconds"] < 80
    assert (failed["state"], failed["reason"]) == ("failed", "the training loss at step 3 is nan")
    assert (waiting["state"], waiting["step"], waiting["age_seconds"]) == ("waiting", 0, None)


def test_a_run_without_a_recent_sign_waits(sweep_dir):
    put(sweep_dir, WANTED[1], "running", 12, updated_at=at(SIGN_SECONDS + 1))
    assert to_data(read_status(sweep_dir))["runs"][1]["state"] == "waiting"


def test_a_run_is_running_only_while_a_sweep_that_claims_is_at_work(tmp_path):
    manifest.write(tmp_path, manifest.Manifest("mine", WANTED))
    put(tmp_path, WANTED[0], "running", 12, updated_at=at(10))
    with claims.hold(tmp_path, WHOLE, "runs"):
        assert to_data(read_status(tmp_path))["runs"][0]["state"] == "running"
        assert to_data(read_status(tmp_path))["at_work"][0]["share"] == "1/1"
    assert to_data(read_status(tmp_path))["runs"][0]["state"] == "waiting"


def test_the_table_shows_steps_signs_and_reasons(tmp_path, capsys):
    manifest.write(tmp_path, manifest.Manifest("mine", WANTED))
    put(tmp_path, WANTED[1], "running", 12, updated_at=at(70))
    put(tmp_path, WANTED[2], "failed", 3, reason="the training loss at step 3 is nan")
    put(tmp_path, WANTED[3], "running", 20, updated_at=at(7200))
    attempts.write(tmp_path / WANTED[3].run_id, attempts.Attempts(2, 20, ("OSError: disk full",)))
    console.show_status(str(tmp_path))
    said = " ".join(capsys.readouterr().out.split())
    assert "12 of 40" in said
    assert "1 min ago" in said
    assert "2 h 0 min ago" in said
    assert f"({WANTED[2].run_id}): the training loss at step 3 is nan" in said
    assert "2 of 3 attempts got no further than step 20: OSError: disk full" in said


def test_json_is_json_and_nothing_else(sweep_dir, capsys):
    console.show_status(str(sweep_dir), as_json=True)
    data = json.loads(capsys.readouterr().out)
    assert data["preset"] == "mine"
    assert len(data["runs"]) == 4


def test_watching_ends_with_the_last_run(tmp_path, capsys, monkeypatch):
    manifest.write(tmp_path, manifest.Manifest("mine", WANTED[:2]))
    put(tmp_path, WANTED[0], "done", 40, loss=3.0)

    def pause(seconds):
        put(tmp_path, WANTED[1], "done", 40, loss=3.0)

    monkeypatch.setattr(console.time, "sleep", pause)
    console.show_status(str(tmp_path), watch=True)
    said = capsys.readouterr().out
    assert said.startswith("1 of 2 done, 1 left; no sweep is at work on it\n")
    assert "2 of 2 done" in " ".join(said.split())


def test_what_is_no_sweep_or_out_of_reach_is_said(tmp_path, bucket, monkeypatch):
    with pytest.raises(UserError, match="holds no sweep"):
        read_status(tmp_path)
    (tmp_path / "sweep.json").write_text('{"schema_version": 99}')
    with pytest.raises(UserError, match="sweep schema 99, this version reads 1"):
        read_status(tmp_path)

    def refuse(*_):
        raise PermissionError("Forbidden: storage.objects.get")

    monkeypatch.setattr(type(bucket), "read_text", refuse)
    with pytest.raises(UserError, match=r"gs://bucket/sweep\.json: cannot be read \(Forbidden"):
        read_status(bucket)


# --- The losses table ---------------------------------------------------------------------------------------


def table(collected):
    return list(csv.DictReader(io.StringIO(collected.to_csv())))


def test_the_table_has_each_run_once_and_everything_the_fit_needs(sweep_dir, tmp_path):
    collected = collect([sweep_dir])
    rows = table(collected)
    assert {row["run_id"]: row["status"] for row in rows} == {
        WANTED[0].run_id: "done",
        WANTED[1].run_id: "running",
        WANTED[2].run_id: "failed",
    }
    write_table(tmp_path / "losses.csv", collected)
    losses = read_losses(tmp_path / "losses.csv")
    assert losses.loss.tolist() == [3.25]
    assert losses.convention == "published"
    assert sorted(e.reason for e in losses.excluded) == [
        "failed: the training loss at step 3 is nan",
        "still running or interrupted",
    ]


def test_the_fit_reads_the_same_from_the_table_as_from_the_folder(tmp_path):
    wanted = specs("full", widths=(16, 32), budgets=(1e9, 2e9))
    run(wanted, tmp_path / "sweep")
    write_table(tmp_path / "losses.csv", collect([tmp_path / "sweep"]))
    from_table, from_folder = read_losses(tmp_path / "losses.csv"), read_losses(tmp_path / "sweep")
    for name in ("recurrences", "n_once", "n_rec", "tokens", "loss", "budget", "arm"):
        assert getattr(from_table, name).tolist() == getattr(from_folder, name).tolist(), name


def test_a_run_in_several_places_is_taken_where_it_is_done_or_furthest(tmp_path):
    put(tmp_path / "a", WANTED[0], "running", 30)
    put(tmp_path / "b", WANTED[0], "done", 40, loss=3.25)
    put(tmp_path / "c", WANTED[0], "done", 40, loss=3.25)
    put(tmp_path / "a", WANTED[1], "running", 3)
    put(tmp_path / "b", WANTED[1], "running", 9)
    collected = collect([tmp_path / "a", tmp_path / "b", tmp_path / "c"])
    assert [(r.status, r.step) for _, r in collected.records] == [("done", 40), ("running", 9)]
    assert collected.records[0][0] == str(tmp_path / "b" / WANTED[0].run_id)


def test_two_losses_of_one_run_are_an_error_that_names_both(tmp_path):
    put(tmp_path / "a", WANTED[0], "done", 40, loss=3.25)
    put(tmp_path / "b", WANTED[0], "done", 40, loss=3.2500000000000004)
    with pytest.raises(UserError) as error:
        collect([tmp_path / "a", tmp_path / "b"])
    for part in (WANTED[0].run_id, str(tmp_path / "a"), str(tmp_path / "b"), "3.25 ", "3.2500000000000004"):
        assert part in str(error.value)


def test_an_unreadable_record_is_named_and_the_others_collected(tmp_path, capsys):
    put(tmp_path, WANTED[0], "done", 40, loss=3.25)
    (tmp_path / "broken" / "record").mkdir(parents=True)
    (tmp_path / "broken" / "record" / "metadata").write_text("{")
    console.collect_losses([str(tmp_path)], None)
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 2
    assert "1 runs, each once: 1 done." in captured.err
    assert "Left out: " in captured.err
    assert "not JSON" in captured.err


def test_only_a_table_of_its_own_kind_is_replaced(tmp_path):
    put(tmp_path / "a", WANTED[0], "done", 40, loss=3.25)
    collected = collect([tmp_path / "a"])
    target = tmp_path / "losses.csv"
    target.write_text("arm,loss\nmine,3\n")
    with pytest.raises(UserError, match="holds something else"):
        write_table(target, collected)
    assert target.read_text() == "arm,loss\nmine,3\n"
    target.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="holds something else"):
        write_table(target, collected)
    target.unlink()
    write_table(target, collected)
    put(tmp_path / "a", WANTED[1], "done", 40, loss=3.0)
    write_table(target, collect([tmp_path / "a"]))
    assert len(target.read_text().splitlines()) == 3
    with pytest.raises(UserError, match="which is a folder"):
        write_table(tmp_path, collected)


def test_no_runs_at_all_is_an_error(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no run is in .*empty"):
        collect([tmp_path / "empty"])
    with pytest.raises(UserError, match="no such directory"):
        collect([tmp_path / "missing"])


def test_the_columns_are_those_of_the_records(tmp_path):
    assert {"run_id", "status", "reason", "loss", "tokens", "n_once", "n_rec", "data_hash"} <= set(COLUMNS)
    assert {"params_prelude", "params_unembed"} <= set(COLUMNS)
    assert len(set(COLUMNS)) == len(COLUMNS)
