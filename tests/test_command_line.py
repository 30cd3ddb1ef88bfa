"""The command line: help, errors in one sentence, exit statuses."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import types

import pytest

from looped import __main__ as command_line
from looped.execution import Execution
from looped.sharding import MeshAxes

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
    assert command_line.main([*name.split(), "--help"]) == 0
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
    assert command_line.main(arguments) == 2
    captured = capsys.readouterr()
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


@pytest.mark.parametrize(
    ("fields", "status", "expected"),
    [
        ({"status": "done", "loss": 3.14159}, 0, "loss 3.1416 nats per token on 4,096"),
        (
            {"status": "failed", "reason": "the training loss at step 3 is nan"},
            1,
            "failed: the training loss at",
        ),
    ],
)
def test_train_reports_progress_and_how_it_ended(fields, status, expected, capsys, monkeypatch):
    seen = {}

    def train(spec, run_dir, *, progress, execution, track, **_):
        assert execution == Execution(mesh=MeshAxes(fsdp=4), remat="dots")
        assert track == ()
        seen.update(spec=spec, run_dir=run_dir)
        progress(1, 2, 5.5, 1234.0, 90.0)
        progress(2, 2, 4.5, 1234.0, 0.0)
        record = {"run_id": spec.run_id, "tokens": 10_000, "validation_tokens": 4096, "train_seconds": 61.0}
        return types.SimpleNamespace(**(record | fields))

    monkeypatch.setitem(sys.modules, "looped.train", types.SimpleNamespace(train=train))
    arguments = ["--steps", "2", "--d-model", "32", "--n-heads", "2", "--matrix-lr", "0.02", "--seed", "7"]
    arguments += ["--fsdp", "4", "--remat", "dots"]
    assert command_line.main(["train", *arguments]) == status
    spec = seen["spec"]
    assert (spec.steps, spec.model.d_model, spec.optimizer.matrix_lr, spec.seed) == (2, 32, 0.02, 7)
    assert seen["run_dir"] == f"runs/{spec.run_id}"
    captured = capsys.readouterr()
    assert expected in captured.out
    assert "step 2 of 2  loss 4.5000  1,234 tokens/s" in captured.err


def test_data_prepare_says_what_it_made(capsys, monkeypatch):
    def prepare(source, sequence_length, tokenizer):
        assert (source, sequence_length, tokenizer) == ("docstrings", 64, "bytes")
        facts = {"directory": "there", "train_rows": 1000, "validation_rows": 10, "sequence_length": 64}
        return types.SimpleNamespace(**facts, vocab_size=257, hash="abc")

    monkeypatch.setattr("looped.data.loader.prepare", prepare)
    assert command_line.main(["data", "prepare", "--sequence-length", "64"]) == 0
    assert "there: 1,000 training and 10 validation rows" in capsys.readouterr().out


def test_quickstart_trains_then_fits_in_the_same_folder(capsys, monkeypatch):
    called = []

    def run_sweep(preset, specs, directory, **options):
        called.append((preset, len(specs), directory, options["workers"]))
        return types.SimpleNamespace(directory="runs/laptop", exit_status=0)

    def measure(source, out_dir):
        called.append((source, out_dir))
        return types.SimpleNamespace(summary=lambda: "φ is what it is")

    monkeypatch.setattr("experiments.console.run_sweep", run_sweep)
    monkeypatch.setattr("fit.report.measure", measure)
    assert command_line.main(["quickstart", "--preset", "laptop", "--workers", "2"]) == 0
    assert called[0][0] == "laptop"
    assert called[0][1] > 10
    assert called[0][3] == 2
    assert called[1] == ("runs/laptop", "runs/laptop")
    assert "φ is what it is" in capsys.readouterr().out


def test_a_sweep_carries_its_runs_out_as_asked(monkeypatch):
    called = {}

    def run_sweep(preset, specs, directory, **options):
        called.update(options["options"])
        return types.SimpleNamespace(exit_status=0)

    monkeypatch.setattr("experiments.console.run_sweep", run_sweep)
    assert command_line.main(["sweep", "run", "quickstart"]) == 0
    assert called == {}, "as train does by itself"
    assert command_line.main(["sweep", "run", "quickstart", "--remat", "pass", "--sequence", "2"]) == 0
    assert called == {"execution": Execution(mesh=MeshAxes(sequence=2), remat="pass")}


@pytest.mark.parametrize(
    "arguments", [["--help"], ["grid", "paper-vanilla"], ["grid", "quickstart", "--json"]]
)
def test_a_full_disk_is_an_error_in_one_sentence(arguments):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "looped", *arguments],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    assert done.stderr == "looped: no space is left; make room and start the same command again.\n"


def test_a_reader_that_goes_away_is_no_error():
    process = subprocess.Popen(
        [sys.executable, "-m", "looped", "grid", "paper-vanilla", "--json"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(60) == 141


def test_a_place_that_cannot_be_written_is_an_error_in_one_sentence(capsys, monkeypatch):
    def prepare(*arguments):
        raise PermissionError(13, "Permission denied", "/there/data")

    monkeypatch.setattr("looped.data.loader.prepare", prepare)
    assert command_line.main(["data", "prepare"]) == 2
    assert capsys.readouterr().err == (
        "looped: /there/data: Permission denied; name another place or change its permissions.\n"
    )
