"""A run that gets nowhere is given up after three starts; one that gets on never is, however often it is stopped."""

import fake_training
import pytest
from test_sweep import run, specs

from experiments import attempts, sweep
from experiments.attempts import LIMIT, Attempts, attempt
from experiments.board import load
from looped.errors import UserError
from looped.preemption import Preempted
from looped.record import find_records, read_record

SPEC = specs("full")[0]
TO_FAIL = LIMIT + 1  # starts of the arm `raises-later`, the first of which gets further, to step 7


@pytest.fixture
def run_dir(tmp_path):
    directory = tmp_path / SPEC.run_id
    directory.mkdir()
    return directory


def never(*_, **__):
    raise AssertionError("it must not be trained")


def test_a_run_whose_process_dies_three_times_is_given_up_with_the_reason(run_dir):
    fake_training._write(run_dir, SPEC, status="running", step=5)
    attempts.write(run_dir, Attempts(count=LIMIT, step=5))
    record = attempt(SPEC, run_dir, never, options={})
    assert record == read_record(run_dir)
    assert record.status == "failed"
    assert "3 times without getting further than step 5: its process was killed" in record.reason


def test_a_start_is_counted_before_training_begins(run_dir):
    seen = []

    def train(spec, directory):
        seen.append(attempts.read(directory))
        return fake_training._write(directory, spec, status="done", step=40, loss=3.0)

    attempt(SPEC, run_dir, train, options={})
    assert [a.count for a in seen] == [1]
    assert not (run_dir / attempts.FILE).exists(), "nothing is left of it once the run is done"


def test_a_run_that_gets_further_each_time_is_never_given_up(run_dir):
    def train(spec, directory):
        fake_training._write(directory, spec, status="running", step=attempts.read(directory).step + 1)
        raise RuntimeError("lost again")

    for _ in range(3 * LIMIT):
        with pytest.raises(RuntimeError):
            attempt(SPEC, run_dir, train, options={})
    assert attempts.read(run_dir).count == 1


def test_a_run_that_stays_where_it_is_is_given_up_at_the_third_error(run_dir):
    fake_training._write(run_dir, SPEC, status="running", step=5)
    for _ in range(LIMIT - 1):
        with pytest.raises(RuntimeError):
            attempt(SPEC, run_dir, _raise, options={})
    record = attempt(SPEC, run_dir, _raise, options={})
    assert record.status == "failed"
    assert record.reason.endswith("RuntimeError: device lost")


@pytest.mark.parametrize("stop", [KeyboardInterrupt, Preempted, UserError])
def test_being_told_to_stop_or_bad_input_is_no_attempt(run_dir, stop):
    for _ in range(2 * LIMIT):

        def train(spec, directory):
            raise stop

        with pytest.raises(stop):
            attempt(SPEC, run_dir, train, options={})
    assert attempts.read(run_dir).count == 0


def test_a_run_that_crashes_three_times_has_failed_and_the_others_go_on(tmp_path):
    wanted = specs("raises-later", "full")
    states = [[r.state for r in run(wanted, tmp_path).runs] for _ in range(TO_FAIL + 1)]
    assert states == [["crashed", "done"]] * (TO_FAIL - 1) + [["failed", "done"]] * 2
    record = read_record(tmp_path / wanted[0].run_id)
    assert record.reason.endswith("step 7: RuntimeError: disk on fire")
    assert len((tmp_path / wanted[0].run_id / "calls").read_text().splitlines()) == TO_FAIL


def test_a_run_that_was_given_up_is_retried_from_its_checkpoint(tmp_path):
    wanted = specs("raises-later")
    for _ in range(TO_FAIL):
        run(wanted, tmp_path)
    directory = tmp_path / wanted[0].run_id
    (directory / "checkpoints").mkdir()
    (directory / "mended").touch()
    outcome = run(wanted, tmp_path, retry_failed=True)
    assert [r.state for r in outcome.runs] == ["done"]
    assert (directory / "checkpoints").exists()
    assert (directory / "calls").read_text().splitlines()[-1].split()[1] == "7"
    assert not (directory / attempts.FILE).exists()


def test_asking_for_a_retry_is_remembered_though_nothing_comes_of_it(tmp_path):
    wanted = specs("raises-later")
    for _ in range(TO_FAIL):
        run(wanted, tmp_path)
    attempts.retry(tmp_path / wanted[0].run_id)  # and the process is killed here
    assert [r.state for r in load(wanted, tmp_path)] == ["waiting"]
    assert [r.state for r in run(wanted, tmp_path).runs] == ["crashed"]


def test_a_broken_file_counts_nothing(run_dir):
    (run_dir / attempts.FILE).write_text('{"count": ')
    assert attempts.read(run_dir) == attempts.NONE
    (run_dir / attempts.FILE).write_text('{"counts": 3}')
    assert attempts.read(run_dir) == attempts.NONE


def test_joined_processes_agree_on_a_start_and_one_of_them_writes(run_dir):
    asked = []

    def shared(look):
        asked.append(1)
        return {"count": 1, "step": 0, "reasons": [], "again": False}  # from the process that writes

    with pytest.raises(RuntimeError):
        attempt(SPEC, run_dir, _raise, options={}, shared=shared, writer=False)
    assert asked == [1]
    assert not (run_dir / attempts.FILE).exists()


def _raise(*_):
    raise RuntimeError("device lost")


def test_records_of_given_up_runs_are_found_like_any(tmp_path):
    wanted = specs("raises-later")
    for _ in range(TO_FAIL):
        sweep.run(wanted, tmp_path, preset="t", train="fake_training:train", prepare="fake_training:prepare")
    assert [record.status for _, record in find_records(tmp_path)] == ["failed"]
