"""Two processes of four devices train one run: one writer, the losses of one device; and what keeps them apart."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from looped.config import DataConfig, ModelConfig, OptimizerConfig, RunSpec
from looped.errors import UserError
from looped.jsonable import to_json
from looped.record import find_records, read_record
from looped.train import train

TRAIN = """
import dataclasses, json, sys
from looped import distributed
from looped.config import RunSpec
from looped.errors import UserError
from looped.execution import Execution
from looped.jsonable import from_json
from looped.sharding import MeshAxes
try:
    distributed.initialize(int(sys.argv[1]))
except UserError as error:
    sys.exit(f"refused: {error}")
import jax
from looped.train import train
assert (jax.process_count(), jax.device_count(), jax.local_device_count()) == (2, 8, 4)
spec = from_json(RunSpec, json.loads(sys.argv[2]))
record = train(spec, sys.argv[3], execution=Execution(mesh=MeshAxes(sequence=2), unroll=False))
print(json.dumps([distributed.is_writer(), record.loss, record.execution["mesh"], record.device]))
"""


def start(own, port, *arguments, timeout=120):
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": str(own),
    }
    command = [sys.executable, "-c", TRAIN, str(timeout), *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, text=True, **pipes)


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


@pytest.fixture
def spec(packed_folder):
    return RunSpec(
        model=ModelConfig(sequence_length=32, d_model=16, n_heads=1, recurrent_layers=1),
        optimizer=OptimizerConfig(polar_dtype="float32"),
        data=DataConfig(source=packed_folder),
        steps=20,
        batch_size=8,
        validation_sequences=20,
    )


def curve(run_dir):
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.slow
def test_two_processes_train_to_the_losses_of_one_device(spec, port, tmp_path):
    arguments = (json.dumps(to_json(spec)), str(tmp_path / "runs" / "together"))
    processes = [start(own, port, *arguments) for own in range(2)]
    outputs = [process.communicate(timeout=500) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    (first, loss, mesh, device), (second, *same) = (json.loads(out.splitlines()[-1]) for out, _ in outputs)
    assert (first, second) == (True, False)
    assert same == [loss, mesh, device]
    assert mesh == {"replica": 1, "fsdp": 4, "sequence": 2, "tensor": 1}
    assert device.startswith("8 ×")
    assert [path for path, _ in find_records(tmp_path / "runs")] == [str(tmp_path / "runs" / "together")]

    alone = train(spec, tmp_path / "alone")
    assert loss == pytest.approx(alone.loss, rel=1e-5)
    together = curve(tmp_path / "runs" / "together")
    assert len(together) == spec.steps
    np.testing.assert_allclose(together, curve(tmp_path / "alone"), rtol=1e-5)

    # What two processes saved, one goes on from.
    record = read_record(tmp_path / "runs" / "together")
    assert record is not None
    assert dataclasses.replace(record, updated_at="") == dataclasses.replace(
        train(spec, tmp_path / "runs" / "together"), updated_at=""
    )


def test_a_process_that_never_joins_is_named_after_the_time_out(spec, port):
    began = time.monotonic()
    process = start(0, port, timeout=5)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "looped: all 2 processes, of which this is 0, at localhost" in error
    assert "did not come together within 5 s" in error
    assert len(error.splitlines()) == 1, "and nothing else"
    assert time.monotonic() - began < 50


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"JAX_NUM_PROCESSES": "2"}, "some are set and some are not"),
        (
            {"JAX_NUM_PROCESSES": "two", "JAX_PROCESS_ID": "0"},
            "JAX_NUM_PROCESSES is 'two'; it must be a whole",
        ),
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"}, "JAX_PROCESS_ID is 2 of JAX_NUM_PROCESSES 2"),
    ],
)
def test_who_the_processes_are_must_be_said_wholly(monkeypatch, variables, words):
    from looped import distributed

    if len(variables) == 2:
        variables["JAX_COORDINATOR_ADDRESS"] = "localhost:1"
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=words):
        distributed.initialize(1)


def test_without_a_cluster_it_says_what_to_set():
    script = "from looped import distributed; distributed.initialize(5)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, text=True, capture_output=True)
    assert "UserError: the other processes are not known" in done.stderr
    assert "set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID" in done.stderr
