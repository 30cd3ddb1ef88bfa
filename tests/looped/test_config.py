"""What a configuration refuses, what identifies a run, and the published configuration."""

import dataclasses
import json

import hypothesis
import hypothesis.strategies as st
import published
import pytest

from looped.config import ModelConfig, OptimizerConfig, RunSpec
from looped.errors import UserError
from looped.interop import config_to_reference
from looped.jsonable import from_json, to_json

FIELDS = published.Golden("hyperconnect").fields


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": 30, "n_heads": 4}, "d_model is 30 and n_heads 4"),
        ({"d_model": 6, "n_heads": 2}, "rotary heads need d_model divisible"),
        ({"n_heads": 4, "n_kv_heads": 3}, "n_kv_heads is 3; it must divide n_heads 4"),
        ({"recurrences": 0}, "recurrences is 0; it must be at least 1"),
        ({"recurrent_layers": 0}, "recurrent_layers is 0"),
        ({"prelude_layers": -1}, "prelude_layers is -1"),
        ({"recurrences": 2, "backprop_recurrences": 3}, r"3; it must not exceed recurrences 2"),
        ({"backprop_recurrences": 0}, "backprop_recurrences is 0"),
        ({"injection": "passthrough", "backprop_recurrences": 1}, "never receive a gradient"),
    ],
)
def test_models_that_make_no_sense_are_refused_at_construction(changes, message):
    with pytest.raises(UserError, match=message):
        ModelConfig(**changes)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "give exactly one"),
        ({"steps": 1, "budget_flops": 1e12}, "give exactly one"),
        ({"steps": 0}, "steps is 0"),
        ({"budget_flops": float("nan")}, "budget_flops is nan"),
        ({"steps": 1, "batch_size": 0}, "batch_size is 0"),
        ({"steps": 1, "seed": -1}, "seed is -1"),
    ],
)
def test_runs_that_make_no_sense_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        RunSpec(**fields)


def test_momentum_is_a_share():
    with pytest.raises(UserError, match="momentum is 1"):
        OptimizerConfig(momentum=1.0)


@pytest.mark.parametrize("recurrences", [1, 2, 4, 8])
def test_an_unset_k_is_full_backprop_at_every_r(recurrences):
    model = ModelConfig(recurrences=recurrences)
    assert model.k == recurrences
    assert not model.truncated


specs = st.builds(
    RunSpec,
    model=st.builds(
        ModelConfig,
        recurrences=st.integers(2, 8),
        backprop_recurrences=st.sampled_from([None, 1, 2]),
        injection=st.sampled_from(["linear", "additive", "diagonal"]),
        n_kv_heads=st.sampled_from([None, 1, 2]),
    ),
    budget_flops=st.floats(1, 1e22),
    seed=st.integers(0, 9),
)


@hypothesis.given(specs, specs)
def test_a_run_id_is_its_contents(one, other):
    read = from_json(RunSpec, json.loads(json.dumps(to_json(one))))
    assert read == one
    assert read.run_id == one.run_id
    assert (one.run_id == other.run_id) == (one == other)


# --- The published configuration ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", published.FILES)
def test_published_fields_there_and_back(name):
    fields = published.Golden(name).fields
    config = ModelConfig.from_reference(fields)
    assert config_to_reference(config) == fields
    assert ModelConfig.from_reference(config_to_reference(config)) == config


def test_what_the_published_fields_become():
    config = ModelConfig.from_reference(
        FIELDS | {"n_head": 4, "n_kv_head": 2, "logit_softcap": 7.0, "size": 34}
    )
    assert config == ModelConfig(
        vocab_size=97,
        sequence_length=24,
        d_model=32,
        n_heads=4,
        n_kv_heads=2,
        prelude_layers=1,
        recurrent_layers=2,
        coda_layers=1,
        recurrences=3,
        injection="hyperconnect",
        lanes=2,
        logit_cap=7.0,
    )


def test_published_defaults_that_say_nothing_are_read_over():
    """`bptt_k` of no less than r truncates nothing, `num_lanes` without hyperconnections is not used."""
    fields = FIELDS | {"input_injection": "inject_init_prelude", "bptt_k": 4, "num_lanes": 2}
    assert ModelConfig.from_reference(fields).backprop_recurrences is None
    assert ModelConfig.from_reference(fields | {"bptt_k": 2}).backprop_recurrences == 2
    del fields["bptt_k"]
    assert ModelConfig.from_reference(fields) == ModelConfig.from_reference(fields | {"bptt_k": None})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_embed": 32}, r"n_embed: not a field .* Did you mean 'n_embd'"),
        ({"input_injection": "inject_init_random"}, r"'inject_init_random', which is unknown\. Did you mean"),
        ({"bptt_k": 2}, "lane weights of a detached pass"),
        ({"num_lanes": 1}, "at least 2"),
        ({"n_embd": "32"}, "d_model: expected int, got '32'"),
    ],
)
def test_bad_published_fields_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        ModelConfig.from_reference(FIELDS | changes)


def test_a_missing_published_field_is_named():
    fields = {name: value for name, value in FIELDS.items() if name != "num_recur"}
    with pytest.raises(UserError, match="num_recur: missing"):
        ModelConfig.from_reference(fields)


@pytest.mark.parametrize("changes", [{"injection": "diagonal"}, {"mlp_ratio": 2}, {"norm_epsilon": 1e-5}])
def test_models_the_published_code_lacks_are_not_exported(changes):
    with pytest.raises(UserError, match="published code"):
        config_to_reference(dataclasses.replace(ModelConfig(), **changes))
