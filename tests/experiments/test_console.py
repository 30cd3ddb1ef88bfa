"""What a sweep shows while it runs and says at its end."""

import functools
import io
import types

import pytest
from rich.console import Console

from experiments import console, manifest, sweep
from experiments.board import Board, Run, load
from experiments.display import Plain, Tables, show, summary
from experiments.presets import preset
from looped.config import ModelConfig, RunSpec
from looped.errors import UserError


@pytest.fixture(autouse=True)
def fake_training(monkeypatch):
    fake = functools.partial(sweep.run, train="fake_training:train", prepare="fake_training:prepare")
    monkeypatch.setattr(sweep, "run", fake)


def specs(*arms, budgets=(1e9,)):
    model = ModelConfig(d_model=16, n_heads=1)
    return tuple(RunSpec(model=model, arm=arm, budget_flops=budget) for arm in arms for budget in budgets)


def board(count=3):
    return Board([Run(spec, "") for spec in specs("full", budgets=[1e9 * (i + 1) for i in range(count)])])


def terminal(height=24):
    return Console(file=io.StringIO(), force_terminal=True, width=100, height=height)


def test_the_first_call_says_what_was_trained_and_the_second_that_all_was_there(tmp_path, capsys):
    wanted = specs("full", budgets=(1e9, 2e9))
    first = console.run_sweep("mine", wanted, str(tmp_path), workers=1)
    assert first.exit_status == 0
    out = capsys.readouterr().out
    assert "2 of 2 runs are done" in out
    assert "2 trained" in out
    assert "[2/2]" in out  # a line when a run ends
    second = console.run_sweep("mine", wanted, str(tmp_path), workers=1)
    assert second.exit_status == 0
    assert "All 2 runs were there" in capsys.readouterr().out


def test_failures_and_crashes_are_named_with_the_remedy_and_status_1(tmp_path, capsys):
    result = console.run_sweep("mine", specs("nan", "raises", "full"), str(tmp_path), workers=1)
    assert result.exit_status == 1
    out = capsys.readouterr().out
    assert "1 of 3 runs are done" in out
    assert "Failed: nan r = 2, width 16, 1e9 FLOPs" in out
    assert "the training loss at step 3 is nan" in out
    assert "--retry-failed" in out
    assert "Crashed: raises" in out
    assert "disk on fire" in out
    assert str(tmp_path / "logs") in out


def test_status_shows_every_run(tmp_path, capsys):
    console.run_sweep("mine", specs("nan", "full"), str(tmp_path), workers=1)
    capsys.readouterr()
    console.show_status(str(tmp_path))
    out = " ".join(capsys.readouterr().out.split())
    assert "sweep mine" in out
    assert "1 of 2 done, 1 failed" in out
    assert "3.0000" in out
    assert "no sweep is at work" in out
    with pytest.raises(UserError, match="holds no sweep"):
        console.show_status(str(tmp_path / "elsewhere"))


def test_the_default_folder_is_named_by_the_preset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert console.run_sweep("mine", specs("full"), None, workers=1).directory == "runs/mine"
    assert manifest.read("runs/mine").preset == "mine"


def test_the_live_table_shows_runs_under_way_and_stays_within_the_terminal():
    runs = board(40)
    for run in runs.runs[:20]:
        run.state, run.loss = "done", 3.25
    runs.runs[20].state = "running"
    runs.runs[20].step, runs.runs[20].steps, runs.runs[20].loss = 5, 10, 4.125
    runs.runs[20].seconds_left, runs.runs[20].tokens_per_second = 90.0, 1234.5
    target = terminal()
    view = Tables("sweep", target)
    view.update(runs)
    target.print(view.render())
    text = target.file.getvalue()
    assert len(text.splitlines()) <= target.height
    assert all(
        word in text for word in ("running", "50%", "4.1250", "1,234", "2 min", "20 of 40 done", "19 left")
    )


def test_on_a_terminal_the_last_table_stays():
    target = terminal()
    runs = board(2)
    with show("sweep", target) as view:
        view.update(runs)
        runs.runs[0].state, runs.runs[0].loss = "done", 2.5
        view.update(runs)
        view.stopping()
    text = target.file.getvalue()
    assert "2.5000" in text
    assert "Stopping" in text


def test_plain_lines_appear_when_something_changes_and_not_otherwise():
    target = Console(file=io.StringIO(), width=200)
    view, runs = Plain("sweep", target), board(2)
    for state in ("waiting", "running", "running", "done", "done"):
        runs.runs[0].state, runs.runs[0].loss, runs.runs[0].train_seconds = state, 3.5, 61.0
        view.update(runs)
    lines = target.file.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0] == "sweep: 0 of 2 done, 2 left"
    assert lines[1].startswith("[0/2] full r = 2, width 16, 1e9 FLOPs: running")
    assert lines[2].startswith("[1/2]")
    assert "done, loss 3.5000 nats per token, 1 min" in lines[2]


def test_time_left_is_the_rest_at_the_pace_so_far():
    runs = board(2)  # 1e9 and 2e9 FLOPs
    assert runs.seconds_left() is None
    runs.started -= 10.0
    runs.runs[0].state = "done"
    assert runs.seconds_left() == pytest.approx(20.0, rel=0.01)
    runs.runs[1].state, runs.runs[1].step, runs.runs[1].steps = "running", 1, 2
    assert runs.seconds_left() == pytest.approx(5.0, rel=0.01)
    assert "about 5 s left" in summary(runs)


def test_an_interrupted_run_is_loaded_as_waiting_and_shown_as_begun(tmp_path, capsys):
    (spec,) = specs("dies-once")
    sweep.run((spec,), tmp_path, preset="mine")
    (run,) = load((spec,), tmp_path)
    assert (run.state, run.step, run.was_there) == ("waiting", 7, False)
    console.show_status(str(tmp_path))
    assert "begun 18%" in capsys.readouterr().out  # 7 of 40 steps


def test_a_manifest_that_is_broken_or_of_another_version_is_refused(tmp_path):
    (tmp_path / "sweep.json").write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        sweep.run(specs("full"), tmp_path, preset="mine")
    (tmp_path / "sweep.json").write_text('{"schema_version": 99}')
    with pytest.raises(UserError, match="schema 99"):
        sweep.run(specs("full"), tmp_path, preset="mine")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["sweep.json"]


def test_a_manifest_comes_back_as_it_went(tmp_path):
    wanted = manifest.Manifest("quickstart", preset("quickstart").specs(seeds=(1,)))
    manifest.write(tmp_path, wanted)
    assert manifest.read(tmp_path) == wanted


@pytest.mark.parametrize("view", [Plain, Tables])
def test_a_run_that_goes_on_is_shown_before_its_first_report(view):
    """Its record knows steps and seconds but no loss yet."""
    runs = board(1)
    [run] = runs.runs
    record = types.SimpleNamespace(
        status="running",
        loss=None,
        reason=None,
        step=40,
        steps=100,
        tokens=1000,
        train_seconds=3.0,
        updated_at="",
    )
    run.take(record)
    assert run.tokens_per_second is None, "the speed of a finished run alone is known from its record"
    run.state = "running"
    shown = terminal()
    display = view("sweep", shown)
    display.update(runs)
    if isinstance(display, Tables):
        shown.print(display.render())
    assert "running" in shown.file.getvalue()
