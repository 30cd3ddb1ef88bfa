"""A run loaded from its folder, its loss against recurrences, and both commands on it."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from flax import nnx

from looped.__main__ import main
from looped.checkpoint import Checkpoints
from looped.config import DataConfig, ModelConfig, OptimizerConfig, RunSpec
from looped.errors import UserError
from looped.evaluate import default_recurrences, recurrence_curve
from looped.model import LoopedLM
from looped.record import write_record
from looped.restore import load_run
from looped.train import compiled, new_record, prepare_data, train

STEPS = 10


def spec_of(packed_folder, **changes):
    model = {"sequence_length": 32, "d_model": 16, "n_heads": 1, "recurrent_layers": 1, "recurrences": 3}
    return RunSpec(
        model=ModelConfig(**(model | changes)),
        optimizer=OptimizerConfig(polar_dtype="float32"),
        data=DataConfig(source=packed_folder),
        steps=STEPS,
        batch_size=8,
        validation_sequences=20,
    )


@pytest.fixture(scope="module")
def sweep(packed_folder, tmp_path_factory):
    """A folder with a finished run, `done`."""
    folder = tmp_path_factory.mktemp("sweep")
    train(spec_of(packed_folder), folder / "done")
    return folder


@pytest.fixture(scope="module")
def run(sweep):
    return load_run(sweep / "done")


def test_a_loaded_model_is_the_newest_checkpoints(sweep, run):
    programs = compiled(run.spec.model, run.spec.optimizer)
    restored = Checkpoints(sweep / "done").restore(programs.init(1))
    assert restored is not None
    state = restored[1]
    assert run.step == STEPS == run.record.step
    jax.tree.map(np.testing.assert_array_equal, nnx.state(run.model, nnx.Param), state.params)


def test_the_loss_at_the_trained_recurrences_is_the_recorded_one(run):
    reported = []
    curve = recurrence_curve(run, prepare_data(run.spec), (1, 3, 6), report=reported.append)
    assert [point.recurrences for point in curve.losses] == [1, 3, 6]
    assert list(curve.losses) == reported
    losses = [point.loss for point in curve.losses]
    assert losses[1] == pytest.approx(run.record.loss, abs=1e-6)
    assert len(set(losses)) == 3, "the number of passes matters"
    assert curve.validation_tokens == run.record.validation_tokens
    assert curve.data_hash == run.record.data_hash


def test_fewer_sequences_are_fewer_tokens(run):
    assert recurrence_curve(run, prepare_data(run.spec), (3,), sequences=4).validation_tokens == 4 * 32


def test_defaults_reach_to_twice_the_trained_recurrences_where_the_model_can(run, packed_folder):
    assert default_recurrences(run) == (1, 2, 3, 6)
    for r, expected in [(4, (1, 2, 4)), (1, (1,))]:
        spec = spec_of(packed_folder, injection="hyperconnect", recurrences=r)
        model = LoopedLM(spec.model, nnx.Rngs(0))
        assert default_recurrences(dataclasses.replace(run, spec=spec, model=model)) == expected


def test_more_passes_than_have_parameters_are_refused_before_anything_is_measured(run, packed_folder):
    spec = spec_of(packed_folder, injection="pass-embedding")
    other, reported = dataclasses.replace(run, spec=spec, model=LoopedLM(spec.model, nnx.Rngs(0))), []
    with pytest.raises(UserError, match="recurrences is 4"):
        recurrence_curve(other, prepare_data(run.spec), (1, 4), report=reported.append)
    assert reported == []


def test_eval_prints_a_table_and_writes_numbers_and_a_picture(sweep, run, tmp_path, capsys):
    assert main(["eval", str(sweep / "done"), "--recurrences", "6,1,3", "--output", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    saved = json.loads((tmp_path / "eval.json").read_text())
    assert saved["run_id"] == run.spec.run_id
    assert [point["recurrences"] for point in saved["losses"]] == [1, 3, 6]
    for point in saved["losses"]:
        assert f"{point['recurrences']:>11}  {point['loss']:>10.4f}" in shown
    assert "as trained" in shown
    assert (tmp_path / "eval.png").read_bytes().startswith(b"\x89PNG")
    assert main(["eval", str(sweep / "done"), "--recurrences", "3", "--output", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "eval.json").read_text())


def test_generate_continues_each_prompt(sweep, capsys):
    arguments = ["generate", str(sweep / "done"), "1, 2, ", "ü", "--new-tokens", "8", "--kv-budget", "2"]
    assert main(arguments) == 0
    texts = capsys.readouterr().out.split("\n\n")
    assert texts[0].startswith("1, 2, ")
    assert texts[1].startswith("ü")
    assert main([*arguments, "--temperature", "1", "--top-k", "20", "--json"]) == 0
    answers = json.loads(capsys.readouterr().out)
    assert [answer["prompt"] for answer in answers] == ["1, 2, ", "ü"]
    assert all(len(answer["tokens"]) <= 8 for answer in answers)


def test_more_tokens_than_were_trained_on_are_noted(sweep, capsys):
    assert main(["generate", str(sweep / "done"), "--new-tokens", "40"]) == 0
    out, err = capsys.readouterr()
    assert "trained on 32" in err
    assert "Note" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "{sweep}"], "it holds runs: name one"),
        (["eval", "{sweep}/nowhere"], "no such directory"),
        (["eval", "{sweep}/done/checkpoints"], "no run is there"),
        (["eval", "{sweep}/done", "--recurrences", "1,two"], "'1,two'"),
        (["eval", "{sweep}/done", "--recurrences", "0,1"], "'0,1'"),
        (["eval", "{sweep}/done", "--sequences", "0"], "sequences is 0"),
        (["generate", "{sweep}/done", "a", "--top-k", "999"], "top_k is 999"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(sweep, arguments, message, capsys):
    assert main([argument.format(sweep=sweep) for argument in arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_run_without_a_checkpoint_is_refused(packed_folder, tmp_path):
    spec = spec_of(packed_folder)
    write_record(tmp_path / "begun", new_record(spec, prepare_data(spec)))
    with pytest.raises(UserError, match=r"\(running\) has no checkpoint"):
        load_run(tmp_path / "begun")
