"""A run: what its record says, that it resumes to the same numbers, and how it fails."""

import dataclasses
import json
import math
import os
import signal

import jax
import killing
import numpy as np
import pytest

from looped import counting, jumps
from looped.checkpoint import Checkpoints
from looped.config import DataConfig, ModelConfig, OptimizerConfig, RunSpec
from looped.errors import UserError
from looped.record import read_record, write_record
from looped.train import compiled, train

STEPS = 12
REAL_SAVE = Checkpoints.save


@pytest.fixture
def spec(packed_folder):
    model = ModelConfig(sequence_length=32, d_model=16, n_heads=1, recurrent_layers=1, recurrences=3)
    return RunSpec(
        model=model,
        optimizer=OptimizerConfig(polar_dtype="float32"),
        data=DataConfig(source=packed_folder),
        steps=STEPS,
        batch_size=8,
        validation_sequences=20,
    )


def test_a_finished_run_says_what_the_fit_needs(spec, tmp_path):
    record = train(spec, tmp_path / "run")
    assert record.status == "done"
    assert record.loss is not None
    assert record.loss < math.log(257) - 0.1, "it learned something"
    assert record.validation_tokens == 20 * 32
    assert record.tokens == STEPS * 8 * 32
    assert (record.n_once, record.n_rec) == counting.n_once_n_rec(spec.model)
    assert record.flops_per_token == counting.flops_per_token(spec.model)
    assert record.backprop_recurrences == 3, "unset k is full backprop"
    assert record.run_id == spec.run_id
    assert read_record(tmp_path / "run") == record


def test_a_finished_run_is_not_trained_again(spec, tmp_path):
    first = train(spec, tmp_path / "run")
    calls = []
    assert train(spec, tmp_path / "run", progress=lambda *a: calls.append(a)) == first
    assert not calls


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_goes_on_to_the_same_loss(spec, tmp_path, number):
    undisturbed = train(spec, tmp_path / "undisturbed")

    def interrupt(step, *_):
        if step == 5:
            os.kill(os.getpid(), number)

    with pytest.raises(KeyboardInterrupt):
        train(spec, tmp_path / "run", progress=interrupt)
    stopped = read_record(tmp_path / "run")
    assert stopped is not None
    assert stopped.status == "running"
    assert 5 <= stopped.step < STEPS

    seen = []
    resumed = train(spec, tmp_path / "run", progress=lambda step, *_: seen.append(step))
    assert seen[0] > 5, "it did not begin again"
    assert resumed.loss == undisturbed.loss


class Killed(BaseException):
    """Stands in for SIGKILL, at a moment that can be chosen."""


def curve(run_dir):
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines]


@pytest.mark.parametrize(("at", "save_every_seconds"), [(4, 0), (STEPS, 60)])
def test_a_kill_as_soon_as_a_checkpoint_is_whole_loses_no_point_of_the_curve(
    spec, tmp_path, at, save_every_seconds
):
    undisturbed = train(spec, tmp_path / "undisturbed")

    def save(self, step, *arguments, **options):
        REAL_SAVE(self, step, *arguments, **options)
        if step == at:
            self.close()
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", save)
        with pytest.raises(Killed):
            train(spec, tmp_path / "run", save_every_seconds=save_every_seconds)
    assert train(spec, tmp_path / "run").loss == undisturbed.loss
    assert curve(tmp_path / "run") == curve(tmp_path / "undisturbed")
    assert [step for step, _ in curve(tmp_path / "run")] == list(range(1, STEPS + 1))


def test_a_kill_between_the_last_checkpoint_and_the_record_loses_no_jump(spec, tmp_path, monkeypatch):
    for name, value in (("WINDOW", 2), ("DEVIATIONS", -100.0), ("LEAST", -1.0)):  # so that there are some
        monkeypatch.setattr(jumps, name, value)
    undisturbed = train(spec, tmp_path / "undisturbed")
    assert undisturbed.loss_jumps

    def write(run_dir, record):
        if record.status == "done":
            raise Killed
        write_record(run_dir, record)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("looped.train.write_record", write)
        with pytest.raises(Killed):
            train(spec, tmp_path / "run")
    again = train(spec, tmp_path / "run")
    assert (again.loss, again.loss_jumps) == (undisturbed.loss, undisturbed.loss_jumps)


def train_with(change, spec, run_dir, save_every_seconds):
    """Trains with `change(state, metrics)` after every step."""

    def changed(*arguments):
        programs = compiled(*arguments)
        return programs._replace(step=lambda *arguments: change(*programs.step(*arguments)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("looped.train.compiled", changed)
        return train(spec, run_dir, save_every_seconds=save_every_seconds)


def last_good(run_dir):
    """The step of the newest checkpoint, whose numbers must be finite; None where there is none."""
    checkpoints = Checkpoints(run_dir)
    step = checkpoints.latest_step()
    checkpoints.close()
    assert step is None or all(np.isfinite(x).all() for x in killing.arrays(run_dir, step).values())
    return step


@pytest.mark.parametrize(("at", "save_every_seconds"), [(4, 0), (STEPS, 60)])
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("loss", math.nan, "the training loss at step {} is nan"),
        ("gradient_norm", math.inf, "the gradient's norm at step {} is inf"),
    ],
)
def test_what_is_not_finite_is_named_with_its_step_and_the_checkpoint_before_it_stays(
    spec, tmp_path, at, save_every_seconds, name, value, said
):
    def change(state, metrics):
        return state, metrics._replace(**{name: value}) if int(state.step) == at else metrics

    record = train_with(change, spec, tmp_path / "run", save_every_seconds)
    assert (record.status, record.loss) == ("failed", None)
    assert record.reason == said.format(at)
    assert read_record(tmp_path / "run") == record
    assert last_good(tmp_path / "run") == (None if save_every_seconds else at - 1)


@pytest.mark.parametrize(("at", "save_every_seconds"), [(4, 0), (STEPS, 60)])
def test_a_state_that_is_not_finite_is_never_saved(spec, tmp_path, at, save_every_seconds):
    def change(state, metrics):
        if int(state.step) == at:
            state = state._replace(params=jax.tree.map(lambda x: x * math.inf, state.params))
        return state, metrics

    record = train_with(change, spec, tmp_path / "run", save_every_seconds)
    assert (record.status, record.reason) == ("failed", f"the state after step {at} is not finite")
    assert last_good(tmp_path / "run") == (None if save_every_seconds else at - 1)


def test_a_run_of_other_than_the_planned_steps_is_failed(spec, tmp_path):
    seen = []

    def change(state, metrics):
        seen.append(metrics)
        return (state._replace(step=state.step - 1) if len(seen) == 3 else state), metrics

    record = train_with(change, spec, tmp_path / "run", 60)
    assert record.status == "failed"
    assert record.reason == f"{STEPS - 1} steps were made and {STEPS} were to be"


def test_the_final_state_is_in_an_orbax_checkpoint(spec, tmp_path):
    train(spec, tmp_path / "run")
    checkpoints = Checkpoints(tmp_path / "run")
    restored = checkpoints.restore(compiled(spec.model, spec.optimizer).init(1))
    assert restored is not None
    step, state, _ = restored
    assert step == STEPS
    assert int(state.step) == STEPS
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))
    checkpoints.close()


def test_a_loss_that_is_not_finite_ends_the_run_as_failed(spec, tmp_path):
    bad = dataclasses.replace(
        spec, optimizer=dataclasses.replace(spec.optimizer, embedding_lr=3e38, norm_lr=3e38)
    )
    record = train(bad, tmp_path / "run")
    assert record.status == "failed"
    assert record.loss is None
    assert record.reason is not None
    assert "training loss at step 2 is nan" in record.reason
    assert train(bad, tmp_path / "run") == record, "it is not tried again by itself"


@pytest.mark.parametrize("value", [-1.0, math.nan])
def test_seconds_between_saves_that_are_none_are_refused(spec, tmp_path, value):
    with pytest.raises(UserError, match=f"save_every_seconds is {value}"):
        train(spec, tmp_path / "run", save_every_seconds=value)


def test_another_runs_folder_is_refused_untouched(spec, tmp_path):
    record = train(spec, tmp_path / "run")
    with pytest.raises(UserError, match=rf"holds run {record.run_id}.* \(seed is 0 there and 1 here\)"):
        train(dataclasses.replace(spec, seed=1), tmp_path / "run")
    assert read_record(tmp_path / "run") == record


def test_data_of_another_vocabulary_is_refused(spec, tmp_path):
    bad = dataclasses.replace(spec, model=dataclasses.replace(spec.model, vocab_size=100))
    with pytest.raises(UserError, match="vocab_size is 100"):
        train(bad, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_runs_of_one_model_share_their_programs(spec):
    assert compiled(spec.model, spec.optimizer) is compiled(
        dataclasses.replace(spec, steps=3).model, spec.optimizer
    )
