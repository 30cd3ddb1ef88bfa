"""Signals are noted, not raised, inside a training loop; joined processes stop at one and the same step."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from looped.preemption import Preempted, Preemption, raised_on_sigterm


@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGTERM, Preempted), (signal.SIGINT, KeyboardInterrupt)]
)
def test_a_signal_is_noted_until_the_loop_asks(number, kind):
    before = signal.getsignal(number)
    with Preemption() as preemption:
        assert not preemption.requested()
        os.kill(os.getpid(), number)
        assert preemption.requested()
        assert preemption.requested(), "it stays so"
        assert type(preemption.stop()) is kind
    assert signal.getsignal(number) == before


def loop_that_asks_before(number, then=None):
    with Preemption() as preemption:
        assert not preemption.requested()
        os.kill(os.getpid(), number)  # while the final loss is measured
        if then is not None:
            raise then


def test_a_signal_after_the_last_question_is_not_lost():
    with pytest.raises(KeyboardInterrupt):
        loop_that_asks_before(signal.SIGINT)
    with raised_on_sigterm(), pytest.raises(Preempted):
        loop_that_asks_before(signal.SIGTERM)


def test_an_error_on_the_way_is_what_is_raised():
    with pytest.raises(ValueError, match="mine"):
        loop_that_asks_before(signal.SIGINT, ValueError("mine"))


def test_a_second_ctrl_c_acts_at_once():
    with Preemption():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_sigterm_is_raised_once_where_nothing_must_be_saved_first():
    before = signal.getsignal(signal.SIGTERM)
    saved = []
    with raised_on_sigterm():
        with pytest.raises(Preempted):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # while it saves
        saved.append(True)
    assert saved
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_training_loop_inside_notes_the_signal_and_gives_it_back():
    with raised_on_sigterm():
        with Preemption() as preemption:
            os.kill(os.getpid(), signal.SIGTERM)
            assert preemption.requested()
        with pytest.raises(Preempted):
            os.kill(os.getpid(), signal.SIGTERM)


PROCESS = """
import os, signal, sys, time
import jax
jax.distributed.initialize(f"localhost:{sys.argv[2]}", 2, int(sys.argv[1]))
from looped.preemption import Preemption
own = int(sys.argv[1])
with Preemption() as preemption:
    for run in range(2):
        for step in range(100):  # a run of its own, whose steps begin again: the counting must not
            assert not preemption.requested()
    print("polling", flush=True)
    for step in range(5000):
        if preemption.requested():
            print("stopped", step, type(preemption.stop()).__name__, flush=True)
            break
        time.sleep(0.005 * (1 + own))  # one is slower than the other
        if step == 10 and own == 1:
            os.kill(os.getpid(), signal.Signals[sys.argv[3]])
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_joined_processes_stop_at_the_same_step_whoever_was_told(name):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(i), port, name], stdout=subprocess.PIPE, text=True
        )
        for i in range(2)
    ]
    try:
        said = [process.communicate(timeout=120)[0].splitlines()[-1].split() for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [words[0] for words in said] == ["stopped", "stopped"]
    assert said[0][1] == said[1][1]
    assert said[0][2] == "Preempted"
    assert said[1][2] == ("KeyboardInterrupt" if name == "SIGINT" else "Preempted")
