"""The command line: help, errors in one sentence, exit statuses."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from looped import __main__ as command_line

ROOT = pathlib.Path(__file__).parents[1]
NAMES = [name for group in command_line.COMMANDS.values() for name in group]


def looped(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "looped", *arguments], cwd=ROOT, capture_output=True, text=True, **options
    )


def test_help_lists_every_command_with_a_summary_in_groups(capsys):
    assert command_line.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for group, commands in command_line.COMMANDS.items():
        assert group in lines
        for name in commands:
            (line,) = [line for line in lines if line.startswith(f"  {name} ")]
            assert len(line.removeprefix(f"  {name}").strip()) > 20


def test_help_imports_neither_jax_nor_any_command():
    code = (
        "import sys; from looped.__main__ import main; main(['--help']);"
        "print(*sorted({'jax', 'flax', 'experiments.commands', 'fit.commands'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ""


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as stop:
        command_line.main([*name.split(), "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: looped {name}")
    assert command_line._summary(*command_line._BY_NAME[name]) in text


@pytest.mark.parametrize("first", ["sweep", "data"])
def test_a_first_word_alone_lists_its_commands(first, capsys):
    assert command_line.main([first]) == 0
    text = capsys.readouterr().out
    assert all((f"  {name} " in text) == name.startswith(first) for name in NAMES)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["quickstrat"], "Did you mean 'quickstart'"),
        (["sweep", "statsu"], "Did you mean 'status'?"),
        (["grid", "paper-vanila"], "Did you mean 'paper-vanilla'"),
        (["sweep", "status", "no/such/folder"], "no/such/folder holds no sweep"),
        (["sweep", "run", "quickstart", "--budgets", "7"], "budgets has 7"),
        (["sweep", "run", "quickstart", "--output", "LICENSE"], "LICENSE, which is a file"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(arguments, expected, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert command_line.main(arguments) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["grid", "--jsn"], "--json"),
        (["train", "--d-modle", "64", "--steps", "1"], "--d-model"),
        (["train", "--steps", "1", "--recurrences", "0"], "recurrences is 0"),
        (["train", "--steps", "1", "--d-model", "63"], "d_model is 63"),
        (["train", "--steps", "1", "--recurrences", "2", "--backprop-recurrences", "3"], "must not exceed"),
        (["train"], "give exactly one"),
    ],
)
def test_bad_options_are_explained_with_status_2(arguments, expected, capsys):
    try:
        status = command_line.main(arguments)
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    assert status == 2
    assert expected in captured.err
    assert "Traceback" not in captured.err


def test_grid_prints_json_and_nothing_else(capsys):
    assert command_line.main(["grid", "paper-truncated", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 102
    assert {"arm", "effective_params", "flops_per_token", "n_once", "n_rec", "run_id"} <= rows[0].keys()


def test_grid_prints_a_table_of_the_runs_and_of_the_presets(capsys):
    assert command_line.main(["grid", "quickstart"]) == 0
    assert "truncated" in capsys.readouterr().out
    assert command_line.main(["grid"]) == 0
    assert "paper-hyperconnect" in capsys.readouterr().out


def test_a_reader_that_leaves_early_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m looped grid paper-vanilla --json | head -1",
        cwd=ROOT, shell=True, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "[\n"
    assert done.stderr == ""


def test_ctrl_c_ends_with_130_and_says_how_to_go_on(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "looped", "sweep", "run", "quickstart", "--output", str(tmp_path / "sweep")],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"LOOPED_DATA": str(tmp_path / "data")},
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 300
        while not (tmp_path / "sweep" / "sweep.json").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "the same command goes on" in errors
    assert "Traceback" not in errors


def test_version_is_the_packages():
    done = looped("--version")
    assert done.stdout.startswith("looped ")
    assert done.returncode == 0
