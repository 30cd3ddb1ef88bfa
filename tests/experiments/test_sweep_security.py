"""Sweeps: what a record names is not run, workers import packages alone, keys are kept out of what is left behind."""

import json
import sys

import fake_training
import pytest

from experiments import claims, sweep
from experiments.shares import WHOLE
from looped import __main__ as command_line
from looped.config import RunSpec
from looped.errors import UserError
from looped.jsonable import to_json
from looped.restore import load_run

SECRET = "s3cr3t-v4lue-0f-ours"


def test_code_that_a_record_names_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "evil_mechanism.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    monkeypatch.chdir(tmp_path)
    spec = to_json(RunSpec(steps=1))
    spec["model"]["injection"] = "evil_mechanism:Evil"
    record = to_json(fake_training.made(RunSpec(steps=1), status="done", step=1, loss=1.0)) | {"spec": spec}
    (tmp_path / "run" / "record").mkdir(parents=True)
    (tmp_path / "run" / "record" / "metadata").write_text(json.dumps(record))
    with pytest.raises(
        UserError, match="names the injection 'evil_mechanism:Evil', whose module would be imported"
    ):
        load_run(tmp_path / "run")
    assert not (tmp_path / "ran").exists()


def test_workers_do_not_take_files_of_the_working_directory_for_packages(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("jax", "numpy", "etils", "tqdm"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\n")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    specs = (RunSpec(steps=1),)
    stand_ins = {"train": "fake_training:train", "prepare": "fake_training:prepare"}
    assert sweep.run(specs, tmp_path / "sweep", preset="test", **stand_ins).having("done")
    assert not (tmp_path / "ran").exists()


def test_a_run_that_crashes_leaves_no_secret_anywhere(tmp_path, monkeypatch, capfd):
    """An error that names a key ends in the worker's log, the run's attempts, its record, the status and the table."""
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    folder, spec = tmp_path / "sweep", RunSpec(steps=1, arm="leaks")
    stand_ins = {"train": "leaking_training:train", "prepare": "fake_training:prepare"}
    for _ in range(3):
        outcome = sweep.run((spec,), folder, preset="test", **stand_ins)
        capfd.readouterr()
    assert outcome.having("crashed", "failed")
    for line in (f"sweep status {folder}", f"sweep status {folder} --json", f"sweep collect {folder}"):
        command_line.main(line.split())
    out, err = capfd.readouterr()
    assert "401" in out
    written = [path for path in folder.rglob("*") if path.is_file()]
    assert any("401" in path.read_text(errors="replace") for path in written)
    assert [str(path) for path in written if SECRET in path.read_text(errors="replace")] == []
    assert SECRET not in out + err


def test_a_claim_does_not_write_through_a_link(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (tmp_path / "sweep" / ".claims").mkdir(parents=True)
    (tmp_path / "sweep" / ".claims" / "1-of-1").symlink_to(precious)
    with pytest.raises(UserError, match="cannot be written"), claims.hold(tmp_path / "sweep", WHOLE, "x"):
        pass
    assert precious.read_text() == "kept"


OWNER = {"owner": "x", "pid": 1, "host": "h", "since": "s", "runs": "r", "beat": 1.0}


@pytest.mark.parametrize(
    "text",
    ["", "[]", "3", "null", "{}", json.dumps(OWNER | {"pid": "1; true"}), json.dumps(OWNER | {"beat": "now"}),
     json.dumps(OWNER | {"share": {"index": 9, "count": 9}}) + "}", json.dumps(OWNER | {"more": 1}), "[" * 10_000],
    ids=lambda value: value[:30],
)  # fmt: skip
def test_a_claim_that_is_none_is_no_holder(text):
    assert claims._from_text(text, WHOLE) is None


def test_a_claim_is_of_the_share_that_its_files_name_says():
    holder = claims._from_text(json.dumps(OWNER | {"share": {"index": 9, "count": 9}}), WHOLE)
    assert holder is not None
    assert holder.share == WHOLE
    assert holder.beat == 1.0


@pytest.mark.parametrize("name", ["0-of-0", "9-of-8", "1-of-999999", "../1-of-1", "1-of-1\n", "٣-of-٨", "x"])
def test_a_file_that_is_no_share_is_no_claim(name):
    assert claims._share_of(name) is None


def test_a_process_that_cannot_be_is_not_alive():
    import socket

    holder = claims._from_text(json.dumps(OWNER | {"pid": 10**30, "host": socket.gethostname()}), WHOLE)
    assert holder is not None
    assert not claims._is_alive(holder)


def test_a_record_whose_time_has_no_zone_has_no_age():
    from experiments.board import Run
    from experiments.status import sign_age

    assert sign_age(Run(RunSpec(steps=1), "x", updated_at="2026-01-01T00:00:00")) is None
