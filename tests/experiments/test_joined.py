"""Processes that train every run together: one decides, all are at the same run, all stop at the same one."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import fake_training
import pytest
from test_sweep import calls, specs

from experiments import claims, manifest
from experiments.attempts import LIMIT
from experiments.board import Run
from experiments.joined import in_order
from experiments.schedule import program
from looped.record import read_record

SCRIPT = """
import sys, time
import fake_training
from test_sweep import specs
from experiments import joined
from experiments.shares import Share
from looped import distributed
distributed.initialize(60)
own = int(sys.argv[2])

def train(spec, run_dir, **options):
    if distributed.is_writer():  # as in real training, one of them writes
        record = fake_training.train(spec, run_dir, **options)
        distributed.barrier(spec.run_id)
        return record
    print("also", spec.run_id, flush=True)
    distributed.barrier(spec.run_id)
    return fake_training.made(spec, status="done", step=fake_training.STEPS, loss=3.0)

wanted = specs(*sys.argv[4:], widths=(16, 32))
outcome = joined.run(wanted, sys.argv[1], preset="mine", share=Share.parse(sys.argv[3]), train=train)
print("outcome", *(run.state for run in outcome.runs), flush=True)
"""


def start(directory, *arms, share="1/1"):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = []
    for own in range(2):
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": str(own),
        }
        command = [sys.executable, "-c", SCRIPT, str(directory), str(own), share, *arms]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        processes.append(subprocess.Popen(command, env=environment, text=True, **pipes))
    return processes


def end(processes, seconds=180):
    try:
        return [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()


def test_all_train_the_same_runs_in_one_order_and_one_writes(tmp_path):
    wanted = specs("full", "other", widths=(16, 32))
    said = end(start(tmp_path, "full", "other"))
    assert said[0][0].splitlines()[-1] == "outcome done done done done", said[0][1]
    also = [line.split()[1] for line in said[1][0].splitlines() if line.startswith("also")]
    assert also == [run.run_id for run in in_order([Run(spec, "") for spec in wanted])]
    assert all(len(calls(tmp_path, spec)) == 1 for spec in wanted)
    assert manifest.read(tmp_path).run_ids == {spec.run_id for spec in wanted}
    assert claims.holders(tmp_path) == []
    assert not list(tmp_path.glob("*/attempts.json"))


def test_a_refusal_reaches_all_of_them(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    processes = start(tmp_path, "full")
    said = end(processes)
    assert all("UserError" in errors and "holds 'notes.txt'" in errors for _, errors in said)
    assert all(process.returncode == 1 for process in processes)
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith(".")) == ["notes.txt"]


def test_sigterm_at_one_stops_all_before_the_next_run(tmp_path):
    processes = start(tmp_path, "slow", "full")
    deadline = time.monotonic() + 120
    first = in_order([Run(spec, "") for spec in specs("slow", "full", widths=(16, 32))])[0].spec
    while not calls(tmp_path, first):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    processes[1].send_signal(signal.SIGTERM)
    said = end(processes)
    assert all("Preempted" in errors for _, errors in said), said
    assert claims.holders(tmp_path) == []


def test_runs_of_one_program_follow_each_other():
    runs = [Run(spec, "") for spec in specs("full", widths=(16, 32), budgets=(1e9, 3e9, 2e9))]
    order = in_order(runs[::2] + runs[1::2])
    programs = [program(run) for run in order]
    assert programs == sorted(programs, key=programs.index)
    assert len(order) == len(runs)


def test_a_crash_is_counted_and_at_last_the_run_is_given_up(tmp_path):
    """One process alone, whose answers are immediate: what would end the process is raised."""
    from experiments import joined

    wanted = specs("raises-later", "full")
    for _ in range(LIMIT + 1):  # the first gets further, to step 7
        with pytest.raises(joined.CrashedError, match="disk on fire") as error:
            joined.run(wanted, tmp_path, preset="mine", train=fake_training.train)
        assert error.value.again
    outcome = joined.run(wanted, tmp_path, preset="mine", train=fake_training.train)
    assert [run.state for run in outcome.runs] == ["failed", "done"]
    assert read_record(tmp_path / wanted[0].run_id).status == "failed"


def test_a_crash_for_the_reason_that_another_run_was_given_up_for_is_no_accident(tmp_path):
    from experiments import joined

    wanted = specs("raises-later", widths=(16, 32))
    again = []
    for _ in range(LIMIT + 2):
        with pytest.raises(joined.CrashedError) as error:
            joined.run(wanted, tmp_path, preset="mine", train=fake_training.train)
        again.append(error.value.again)
    assert again == [*[True] * (LIMIT + 1), False]


REAL = """
import os, sys
from experiments import presets
from looped.__main__ import main
from looped.config import DataConfig, ModelConfig, OptimizerConfig, RunSpec

model = ModelConfig(sequence_length=32, d_model=16, n_heads=1, recurrent_layers=1, recurrences=2)
presets.PRESETS["two"] = presets.Preset("two", "two runs", lambda: tuple(
    RunSpec(
        model=model, optimizer=OptimizerConfig(polar_dtype="float32"), data=DataConfig(source=sys.argv[1]),
        steps=steps, batch_size=8, validation_sequences=16,
    )
    for steps in (200, 4)
))
sys.exit(main(["sweep", "run", "two", "--output", sys.argv[2], "--distributed"]))
"""


def start_real(directory, data):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = []
    for own in range(2):
        environment = os.environ | {
            "XLA_FLAGS": "",
            "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": str(own),
        }
        command = [sys.executable, "-c", REAL, data, str(directory)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        processes.append(subprocess.Popen(command, env=environment, text=True, **pipes))
    return processes


@pytest.mark.slow
def test_two_processes_train_a_sweep_stop_together_and_go_on(tmp_path, packed_folder):
    processes = start_real(tmp_path / "sweep", packed_folder)
    deadline = time.monotonic() + 240
    curve = None
    while curve is None or curve.read_text().count("\n") < 3:
        assert time.monotonic() < deadline
        assert all(process.poll() is None for process in processes)
        curve = next((tmp_path / "sweep").glob("*/metrics.jsonl"), None)
        time.sleep(0.1)
    processes[1].send_signal(signal.SIGTERM)
    said = end(processes, 400)
    assert [process.returncode for process in processes] == [75, 75], said
    run_dir = curve.parent
    stopped = read_record(run_dir)
    assert stopped.status == "running"
    assert 3 <= stopped.step < 200
    assert not (run_dir / "attempts.json").exists()

    processes = start_real(tmp_path / "sweep", packed_folder)
    said = end(processes, 400)
    assert [process.returncode for process in processes] == [0, 0], said
    assert "2 of 2 runs are done" in said[0][0]
    assert "runs are done" not in said[1][0], "one of them speaks"
    steps = [json.loads(line)["step"] for line in curve.read_text().splitlines()]
    assert steps == list(range(1, 201))
