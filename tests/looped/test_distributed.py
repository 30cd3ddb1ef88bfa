"""Two processes of four devices train one run: one writer, the losses of one device; and what keeps them apart."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from looped.config import DataConfig, ModelConfig, OptimizerConfig, RunSpec
from looped.errors import UserError
from looped.execution import Execution
from looped.jsonable import to_json
from looped.record import find_records, read_record
from looped.sharding import MeshAxes
from looped.train import train

TRAIN = """
import json, sys
from looped import distributed
from looped.config import RunSpec
from looped.execution import Execution
from looped.jsonable import from_json
from looped.sharding import MeshAxes
timeout, spec, run_dir, mesh = sys.argv[1:]
if int(timeout):
    distributed.initialize(int(timeout))
import jax
from looped.train import train
assert (jax.device_count(), jax.local_device_count()) == (4 * jax.process_count(), 4)
spec = from_json(RunSpec, json.loads(spec))
record = train(spec, run_dir, execution=Execution(mesh=MeshAxes(**json.loads(mesh)), unroll=False))
print(json.dumps([distributed.is_writer(), record.loss, record.execution["mesh"], record.device]))
"""


def start(own, port, spec=None, run_dir="", mesh=None, timeout=120):
    """Process `own` of two, of four devices each."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": str(own),
    }
    arguments = [json.dumps(to_json(spec)), str(run_dir), json.dumps(mesh)]
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
    run_dir = tmp_path / "runs" / "together"
    processes = [start(own, port, spec, run_dir, {"sequence": 2}) for own in range(2)]
    outputs = [process.communicate(timeout=500) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    (first, loss, mesh, device), (second, *same) = (json.loads(out.splitlines()[-1]) for out, _ in outputs)
    assert (first, second) == (True, False)
    assert same == [loss, mesh, device]
    assert mesh == {"replica": 1, "fsdp": 4, "sequence": 2, "tensor": 1}
    assert device.startswith("8 ×")
    assert [path for path, _ in find_records(tmp_path / "runs")] == [str(run_dir)]

    alone = train(spec, tmp_path / "alone")
    assert loss == pytest.approx(alone.loss, rel=1e-5)
    together = curve(run_dir)
    assert len(together) == spec.steps
    np.testing.assert_allclose(together, curve(tmp_path / "alone"), rtol=1e-5)


@pytest.mark.slow
def test_saved_on_eight_devices_it_goes_on_on_one_four_or_two_times_four(spec, port, tmp_path):
    undisturbed = train(spec, tmp_path / "undisturbed")

    def interrupt(step, *_):
        if step == 9:
            os.kill(os.getpid(), signal.SIGINT)

    eight = Execution(mesh=MeshAxes(fsdp=8), unroll=False)
    with pytest.raises(KeyboardInterrupt):
        train(spec, tmp_path / "eight", execution=eight, progress=interrupt)
    for name in ("one", "four", "two"):
        shutil.copytree(tmp_path / "eight", tmp_path / name)
    train(spec, tmp_path / "one")
    four = start(0, port, spec, tmp_path / "four", {"fsdp": 4}, timeout=0)
    assert four.wait(500) == 0, four.communicate()
    two = [start(own, port, spec, tmp_path / "two", {"fsdp": 8}) for own in range(2)]
    assert [process.wait(500) for process in two] == [0, 0], [process.communicate() for process in two]
    for name in ("one", "four", "two"):
        record = read_record(tmp_path / name)
        assert record is not None
        assert record.loss == pytest.approx(undisturbed.loss, rel=1e-5)
        assert len(curve(tmp_path / name)) == spec.steps
        np.testing.assert_allclose(curve(tmp_path / name), curve(tmp_path / "undisturbed"), rtol=1e-5)


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
