"""A sweep trains what is missing, once, whatever happens: real processes, a stand-in for training."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import fake_training
import pytest

from experiments import claims, manifest, sweep
from looped.config import DataConfig, ModelConfig, RunSpec
from looped.errors import UserError
from looped.record import read_record


def specs(*arms, widths=(16,), budgets=(1e9,), source="docstrings"):
    return tuple(
        RunSpec(
            model=ModelConfig(d_model=width, n_heads=1),
            arm=arm,
            budget_flops=budget,
            data=DataConfig(source=source),
        )
        for arm in arms
        for width in widths
        for budget in budgets
    )


def run(wanted, directory, **options):
    options = {"preset": "test", "train": "fake_training:train", "prepare": "fake_training:prepare"} | options
    return sweep.run(wanted, directory, **options)


def calls(directory, spec):
    """(process id, first step, cores) of every time the run was trained or gone on with."""
    file = pathlib.Path(directory) / spec.run_id / "calls"
    return [tuple(line.split()) for line in file.read_text().splitlines()] if file.exists() else []


class Recorder:
    def __init__(self):
        self.states = []
        self.most_running = 0

    def update(self, board):
        self.states.append([run.state for run in board.runs])
        self.most_running = max(self.most_running, len(board.having("running")))

    def stopping(self):
        raise AssertionError("nobody interrupts here")


def test_trains_every_run_once_and_nothing_the_second_time(tmp_path):
    wanted, view = specs("full", widths=(16, 32), budgets=(1e9, 2e9)), Recorder()
    first = run(wanted, tmp_path / "sweep", view=view)
    assert [r.state for r in first.runs] == ["done"] * 4
    assert all(read_record(r.directory).status == "done" for r in first.runs)
    assert first.there_before == 0
    assert view.most_running == 1  # one run at a time, unless asked otherwise
    assert view.states[-1] == ["done"] * 4

    second = run(wanted, tmp_path / "sweep")
    assert second.there_before == 4
    assert second.log is None
    assert all(len(calls(tmp_path / "sweep", spec)) == 1 for spec in wanted)


def test_a_grown_sweep_trains_the_new_runs_alone(tmp_path):
    run(specs("full"), tmp_path)
    grown = specs("full", budgets=(1e9, 2e9))
    outcome = run(grown, tmp_path)
    assert [r.state for r in outcome.runs] == ["done", "done"]
    assert [len(calls(tmp_path, spec)) for spec in grown] == [1, 1]
    assert manifest.read(tmp_path).specs == grown


def test_two_workers_share_the_cores_and_keep_to_one_program_each(tmp_path):
    wanted = specs("full", widths=(16, 32), budgets=(1e9, 2e9, 3e9))
    outcome = run(wanted, tmp_path, workers=2)
    assert [r.state for r in outcome.runs] == ["done"] * 6
    trained = {spec: calls(tmp_path, spec)[0] for spec in wanted}
    cores = {process: set(kept.split(",")) for process, _, kept in trained.values()}
    assert len(cores) == 2
    if len(os.sched_getaffinity(0)) >= 2:
        assert not set.intersection(*cores.values())


@pytest.mark.parametrize("content", ["notes.txt", "another sweep", "a file"])
def test_a_folder_that_is_not_this_sweeps_is_refused_and_left_alone(tmp_path, content):
    target = tmp_path / "target"
    if content == "a file":
        target.write_text("mine")
    elif content == "another sweep":
        run(specs("full", budgets=(1e9, 2e9)), target)
    else:
        target.mkdir()
        (target / content).write_text("mine")
    before = {p: p.read_bytes() for p in sorted(tmp_path.rglob("*")) if p.is_file()}
    with pytest.raises(UserError, match=r"output is .*name"):
        run(specs("full", budgets=(2e9, 3e9)), target)
    assert {p: p.read_bytes() for p in sorted(tmp_path.rglob("*")) if p.is_file()} == before


def test_a_failed_run_is_reported_and_retried_only_when_asked(tmp_path):
    wanted = specs("nan", "full")
    first = run(wanted, tmp_path)
    assert [r.state for r in first.runs] == ["failed", "done"]
    assert "nan" in first.runs[0].reason
    run(wanted, tmp_path)
    assert len(calls(tmp_path, wanted[0])) == 1
    keep = tmp_path / wanted[0].run_id / "checkpoints"
    keep.mkdir()
    run(wanted, tmp_path, retry_failed=True)
    assert len(calls(tmp_path, wanted[0])) == 1  # its folder was emptied first
    assert not keep.exists()
    assert len(calls(tmp_path, wanted[1])) == 1


def test_a_crash_stops_neither_the_other_runs_nor_the_next_call(tmp_path):
    wanted = specs("raises", "full")
    outcome = run(wanted, tmp_path)
    assert [r.state for r in outcome.runs] == ["crashed", "done"]
    assert "disk on fire" in outcome.runs[0].reason
    assert "Traceback" in (pathlib.Path(outcome.log) / "worker-0.log").read_text()
    run(wanted, tmp_path)
    assert len(calls(tmp_path, wanted[0])) == 2


def test_the_same_crash_twice_ends_the_sweep(tmp_path):
    outcome = run(specs("raises", budgets=(1e9, 2e9, 3e9, 4e9)), tmp_path)
    assert sorted(r.state for r in outcome.runs) == ["crashed", "crashed", "waiting", "waiting"]


def test_a_dead_worker_is_replaced_and_its_run_goes_on_next_time(tmp_path):
    wanted = specs("dies-once", "full", budgets=(1e9,))
    outcome = run(wanted, tmp_path)
    assert {r.spec.arm: r.state for r in outcome.runs} == {"dies-once": "crashed", "full": "done"}
    assert "signal 9" in outcome.runs[0].reason
    again = run(wanted, tmp_path)
    assert [r.state for r in again.runs] == ["done", "done"]
    assert again.there_before == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_killed_before_it_has_a_run_is_replaced(tmp_path, monkeypatch, workers):
    deaths = tmp_path / "deaths"
    deaths.write_text("once\nagain")
    monkeypatch.setenv("DEATHS", str(deaths))
    wanted = specs("full", widths=(16, 32))
    outcome = run(wanted, tmp_path / "sweep", workers=workers)
    assert [r.state for r in outcome.runs] == ["done"] * 2
    assert deaths.read_text() == ""
    assert all(len(calls(tmp_path / "sweep", spec)) == 1 for spec in wanted)


def test_workers_that_are_always_killed_end_the_sweep(tmp_path, monkeypatch):
    deaths = tmp_path / "deaths"
    deaths.write_text("again\n" * 10)
    monkeypatch.setenv("DEATHS", str(deaths))
    with pytest.raises(UserError, match="was killed by signal 9 before it could train; see"):
        run(specs("full"), tmp_path / "sweep")
    assert len(deaths.read_text().splitlines()) == 6, "it was tried four times"


def test_bad_input_found_by_a_worker_is_the_users_to_read(tmp_path):
    with pytest.raises(UserError, match="nowhere"):
        run(specs("full", source="nowhere"), tmp_path)


def test_workers_below_one_are_refused(tmp_path):
    with pytest.raises(UserError, match="workers is 0"):
        run(specs("full"), tmp_path / "sweep", workers=0)
    assert not (tmp_path / "sweep").exists()


SCRIPT = """
import sys
from test_sweep import run, specs
run(specs("slow", widths=(16, 32)), sys.argv[1], workers=2)
"""


def start_slow_sweep(directory):
    """Starts a sweep of two runs of 10 s each in another process and returns it once both are under way."""
    path = os.pathsep.join(p for p in sys.path if p)
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(directory)],
        env=os.environ | {"PYTHONPATH": path},
        stderr=subprocess.PIPE,
        text=True,
    )
    wanted = specs("slow", widths=(16, 32))
    deadline = time.monotonic() + 300
    while not all((record := read_record(directory / s.run_id)) and record.step >= 4 for s in wanted):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(process.communicate()[1])
        time.sleep(0.1)
    return process, wanted


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_or_killed_sweep_ends_its_workers_and_goes_on(tmp_path, monkeypatch, how):
    process, wanted = start_slow_sweep(tmp_path)
    try:
        assert claims.holders(tmp_path)
        with pytest.raises(UserError, match=f"process {process.pid}"):
            run(wanted, tmp_path)
    finally:
        process.send_signal(how)
        _, errors = process.communicate(timeout=120)
    if how != signal.SIGKILL:
        assert ("KeyboardInterrupt" if how == signal.SIGINT else "Preempted") in errors
        assert not claims.holders(tmp_path)  # it ended only once its workers had

    monkeypatch.setenv("SLOW_STEP", "0.001")
    outcome = run(wanted, tmp_path)  # waits for the workers of a sweep that was killed
    logs = "".join(log.read_text() for log in (tmp_path / "logs").iterdir())
    assert logs.count("interrupted") == 2
    assert [r.state for r in outcome.runs] == ["done", "done"]
    for spec in wanted:
        (_, start, _), (_, again, _) = calls(tmp_path, spec)
        assert int(start) == 0
        assert 4 <= int(again) < fake_training.STEPS


def test_a_worker_that_is_told_to_stop_stops_the_sweep_once_all_have_saved(tmp_path):
    process, wanted = start_slow_sweep(tmp_path)
    worker = int(calls(tmp_path, wanted[0])[0][0])
    os.kill(worker, signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert "Preempted" in errors
    assert all(read_record(tmp_path / spec.run_id).step >= 4 for spec in wanted)
    assert not any((tmp_path / spec.run_id / "attempts.json").exists() for spec in wanted)
