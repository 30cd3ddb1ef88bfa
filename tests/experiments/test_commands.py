"""The commands on sweeps as they are typed: what is refused before anything is touched, and exit statuses."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from test_sweep import run, specs

from looped.__main__ import main
from looped.preemption import REQUEUE

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--share", "0/8"], "share is 0/8"),
        (["--share", "three"], "share is 'three'; write I/N"),
        (["--distributed", "--workers", "2"], "workers is 2; with --distributed"),
        (["--track", "wanbd"], "track has 'wanbd'"),
        (["--track", "tensorboard", "neptune"], "track has 'neptune'"),
    ],
)
def test_bad_options_of_a_sweep_are_refused_before_anything_is_touched(arguments, expected, tmp_path, capsys):
    assert main(["sweep", "run", "quickstart", "--output", str(tmp_path / "sweep"), *arguments]) == 2
    said = capsys.readouterr().err
    assert expected in said
    assert said.count("\n") == 1
    assert not (tmp_path / "sweep").exists()


def test_a_folder_that_cannot_be_made_is_said(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    output = str(tmp_path / "file" / "sweep")
    assert main(["sweep", "run", "quickstart", "--output", output]) == 2
    assert f"output is {output}, which cannot be written (Not a directory)" in capsys.readouterr().err


def test_sigterm_ends_a_sweep_with_the_status_that_asks_for_another_start(tmp_path):
    output = tmp_path / "sweep"
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "looped",
            "sweep",
            "run",
            "quickstart",
            "--output",
            str(output),
            "--share",
            "2/5",
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"LOOPED_DATA": str(tmp_path / "data")},
    )
    try:
        deadline = time.monotonic() + 300
        while not list(output.glob("logs/share-2-of-5/worker-0.log")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        said, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == REQUEUE == 75
    assert "the same command goes on from what is there (status 75: start it again)" in errors
    assert "Traceback" not in errors
    assert "5 of 5 runs are done" not in said


def test_a_sweep_becomes_a_status_and_a_table(tmp_path, capsys):
    wanted = specs("full", widths=(16, 32))
    run(wanted, tmp_path / "sweep")
    assert main(["sweep", "status", str(tmp_path / "sweep"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["done"] == 2
    table = tmp_path / "losses.csv"
    assert main(["sweep", "collect", str(tmp_path / "sweep"), "--output", str(table)]) == 0
    assert "2 runs, each once: 2 done" in capsys.readouterr().err
    assert len(table.read_text().splitlines()) == 3
    assert main(["sweep", "collect", str(tmp_path / "sweep")]) == 0
    assert capsys.readouterr().out == table.read_text()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["status", "no/such/folder", "--watch"], "no/such/folder holds no sweep"),
        (["collect", "no/such/folder"], "no/such/folder: no such directory of runs"),
    ],
)
def test_folders_that_are_not_there_are_said(arguments, expected, capsys):
    assert main(["sweep", *arguments]) == 2
    assert expected in capsys.readouterr().err
