"""What runs on a machine: starting again, saving when told to stop, stale locks and variables."""

import http.server
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from looped.preemption import REQUEUE
from tpu_launch import machine, marks
from tpu_launch.machine import Machine


@pytest.fixture(autouse=True)
def nowhere(monkeypatch):
    """No metadata server, and short pauses."""
    monkeypatch.setenv("GCE_METADATA_IP", "127.0.0.1:1")
    monkeypatch.setattr(machine, "PAUSE", 0.01)
    monkeypatch.setattr(machine, "clear_lock", lambda: None)


def ends_with(tmp_path, *statuses):
    """A command that ends with these statuses, one after another."""
    path = tmp_path / "command.py"
    path.write_text(
        textwrap.dedent(f"""
        import pathlib, sys
        calls = pathlib.Path({str(tmp_path / "calls")!r})
        done = len(calls.read_text()) if calls.exists() else 0
        calls.write_text("x" * (done + 1))
        print("call", done)
        sys.exit({list(statuses)!r}[done])
        """)
    )
    return [sys.executable, str(path)]


def work(tmp_path, *statuses, **options):
    own = Machine(str(tmp_path / "launch"), 2, 3)
    status = own.work(ends_with(tmp_path, *statuses), dict(os.environ), **options)
    return status, len((tmp_path / "calls").read_text()), marks.read(tmp_path / "launch", 2, 3)


def test_a_sweep_that_is_done_is_marked_done(tmp_path):
    status, calls, mark = work(tmp_path, 0)
    assert (status, calls, mark.state, mark.failures) == (0, 1, "done", 0)
    assert "call 0" in (tmp_path / "launch/logs/2-of-3.log").read_text()


def test_status_75_starts_again_as_often_as_it_comes_and_counts_as_no_failure(tmp_path):
    status, calls, mark = work(tmp_path, REQUEUE, REQUEUE, REQUEUE, REQUEUE, REQUEUE, 0)
    assert (status, calls, mark.state, mark.failures) == (0, 6, "done", 0)


def test_the_third_failure_gives_up_and_says_why(tmp_path):
    status, calls, mark = work(tmp_path, 1, REQUEUE, 2, 9, 0)
    assert (status, calls, mark.state, mark.failures, mark.status) == (9, 4, "failed", 3, 9)
    assert mark.reason == "call 3"


def test_failures_are_counted_on_after_a_new_start_of_the_machine(tmp_path):
    marks.write(tmp_path / "launch", marks.Mark(2, 3, "stopped", failures=2))
    status, calls, mark = work(tmp_path, 1, 0)
    assert (status, calls, mark.state) == (1, 1, "failed")


@pytest.mark.parametrize(("state", "status"), [("done", 0), ("failed", 1)])
def test_a_share_that_is_over_is_not_begun(tmp_path, state, status):
    marks.write(tmp_path / "launch", marks.Mark(2, 3, state))
    own = Machine(str(tmp_path / "launch"), 2, 3)
    assert own.work(ends_with(tmp_path, 0), dict(os.environ)) == status
    assert not (tmp_path / "calls").exists()


def test_once_leaves_starting_again_to_others(tmp_path):
    status, calls, mark = work(tmp_path, REQUEUE, once=True)
    assert (status, calls, mark.state) == (REQUEUE, 1, "stopped")


def test_training_goes_on_where_marks_cannot_be_written(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(machine.time, "sleep", lambda seconds: None)
    (tmp_path / "launch").write_text("a file")
    own = Machine(str(tmp_path / "launch"), 2, 3)
    assert own.work(ends_with(tmp_path, 0), dict(os.environ)) == 0
    assert "cannot be written" in capfd.readouterr().out


def test_the_other_machines_of_a_share_write_no_mark(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PROCESS_ID", "1")
    status, calls, mark = work(tmp_path, 0)
    assert (status, calls, mark) == (0, 1, None)


def test_sigterm_reaches_the_sweep_which_saves_and_is_not_started_again(tmp_path):
    sweep = tmp_path / "looped_stub.py"
    handler = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
    sweep.write_text(handler + "print('up', flush=True)\ntime.sleep(60)\n")
    code = f"import sys; from tpu_launch.machine import *; own = Machine({str(tmp_path / 'launch')!r}, 1, 1);"
    code += "signal.signal(signal.SIGTERM, own.stop);"
    code += f"sys.exit(own.work([sys.executable, {str(sweep)!r}], dict(os.environ)))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    while process.stdout.readline().strip() != "up":
        pass
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == REQUEUE
    assert marks.read(tmp_path / "launch", 1, 1).state == "stopped"


def test_a_lock_that_no_process_holds_is_removed_and_named(tmp_path, capsys, monkeypatch):
    monkeypatch.undo()
    lock = tmp_path / "libtpu_lockfile"
    lock.touch()
    machine.clear_lock(lock)
    assert not lock.exists()
    assert str(lock) in capsys.readouterr().out


def test_a_lock_that_a_process_holds_is_left_alone_and_its_process_named(tmp_path, capsys, monkeypatch):
    monkeypatch.undo()
    lock = tmp_path / "libtpu_lockfile"
    code = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX);"
    code += "print('held', flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code, str(lock)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline().strip() == "held"
        machine.clear_lock(lock)
        assert lock.exists()
        assert f"held by process {holder.pid}" in capsys.readouterr().out
    finally:
        holder.kill()
        holder.wait()
    machine.clear_lock(lock)
    assert not lock.exists()


def test_variables_of_several_slices_are_dropped_and_named(capsys):
    environment = {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1", "PATH": "/bin"}
    machine.drop_multi_slice(environment)
    assert environment == {"PATH": "/bin"}
    assert "MEGASCALE_NUM_SLICES, MEGASCALE_SLICE_ID" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("variables", "first"),
    [
        ({}, True),
        ({"JAX_PROCESS_ID": "0"}, True),
        ({"JAX_PROCESS_ID": "3"}, False),
        ({"TPU_WORKER_ID": "0"}, True),
        ({"TPU_WORKER_ID": "2"}, False),
        ({"TPU_WORKER_ID": "0", "MEGASCALE_SLICE_ID": "1"}, False),
    ],
)
def test_the_first_machine_is_known_by_its_variables(monkeypatch, variables, first):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert machine.is_first() is first


@pytest.mark.parametrize(
    ("attributes", "first"),
    [
        ({"agent-worker-number": "0"}, True),
        ({"agent-worker-number": "3"}, False),
        ({"agent-worker-number": "0", "tpu-env": "WORKER_ID: '0'\nMEGASCALE_SLICE_ID: '1'"}, False),
        ({"agent-worker-number": "0", "tpu-env": "MEGASCALE_SLICE_ID: '0'\nMEGASCALE_NUM_SLICES: '2'"}, True),
    ],
)
def test_the_first_machine_is_known_by_its_metadata(monkeypatch, attributes, first):
    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            value = attributes.get(self.path.rpartition("/")[2])
            known = value is not None and self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200 if known else 404)
            self.end_headers()
            self.wfile.write((value or "").encode())

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{server.server_port}")
        assert machine.is_first() is first
        server.shutdown()


def test_marks_that_are_half_written_are_left_out():
    whole = json.dumps({"share": 1, "shares": 2, "state": "done"})
    assert [mark.share for mark in marks.parse(f'{whole}\n{{"share": 2, "sha\n')] == [1]


def test_a_running_share_gives_signs_of_life_and_none_after_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "SIGN_SECONDS", 0.05)
    told = []
    write = marks.write
    monkeypatch.setattr(marks, "write", lambda folder, mark: (told.append(mark.state), write(folder, mark)))
    own = Machine(str(tmp_path / "launch"), 1, 1)
    assert own.work([sys.executable, "-c", "import time; time.sleep(0.5)"], dict(os.environ)) == 0
    assert told.count("running") >= 3
    time.sleep(0.2)
    assert told[-1] == "done"
    assert told.count("done") == 1


def test_a_share_that_is_silent_is_pointed_at_and_left_alone():
    from tpu_launch.engine import Machine as Seen
    from tpu_launch.launch import Launch, Queued
    from tpu_launch.watch import Seen as Moment
    from tpu_launch.watch import decide, table

    launch = Launch("quickstart", "gs://b/s", 1, "looped==1", slice="v5e:2x4", queued=Queued("p", "z"))
    mark = marks.Mark(1, 1, "running", updated_at="2020-01-01T00:00:00+00:00")
    moment = Moment(1, (Seen("looped-0123456789-1-of-1", "running", "ACTIVE", 1),), {1: mark}, {})
    assert "no sign of life for" in table(launch, moment)[0]
    assert decide(moment, "gs://b/s") == []
