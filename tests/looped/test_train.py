"""A run: what its record says, that it resumes to the same numbers, and how it fails."""

import dataclasses
import math
import os
import signal

import jax
import numpy as np
import pytest

from looped import counting
from looped.checkpoint import Checkpoints
from looped.config import DataConfig, ModelConfig, OptimizerConfig, RunSpec
from looped.errors import UserError
from looped.record import read_record
from looped.train import compiled, train

STEPS = 12


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
