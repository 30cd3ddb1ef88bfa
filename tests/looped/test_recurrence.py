"""The loop against an explicit one, what its mechanisms promise, and a mechanism of one's own."""

import dataclasses
import functools
import subprocess
import sys

import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fit.report import measure
from looped import counting
from looped.config import DataConfig, ModelConfig, OptimizerConfig, RunSpec
from looped.errors import UserError
from looped.loss import cross_entropy
from looped.model import LoopedLM
from looped.optimizer import groups_by_name
from looped.recurrence import INJECTIONS, Diagonal, PerPass, injection_class, loop
from looped.train import train

SMALL = ModelConfig(vocab_size=70, sequence_length=8, d_model=16, recurrent_layers=1, recurrences=3)
DETACHABLE = [name for name, mechanism in INJECTIONS.items() if not mechanism.not_detachable]


def mechanism_of(config, noise=0.1):
    """A mechanism whose every parameter is random: none at a starting value that would hide its part."""
    mechanism = injection_class(config.injection)(config, nnx.Rngs(0))
    params = nnx.state(mechanism, nnx.Param)
    random = np.random.default_rng(0)
    noisy = jax.tree.map(lambda p: p + noise * random.standard_normal(p.shape).astype(np.float32), params)
    nnx.update(mechanism, noisy)
    return mechanism


def looped(mechanism, e, r, k):
    """The loop around a block that is a sine, [B, T, D]."""
    entering = mechanism.prepare(e)

    def one_pass(state, i):
        return mechanism.leave(state, jnp.sin(mechanism.enter(state, entering, i)), i)

    return mechanism.read(loop(one_pass, mechanism.initial(e), r, k))


def gradients(config, k):
    """Of e, then of every parameter by its path; a per-pass one's as [passes, …]."""
    mechanism, e = mechanism_of(config), jax.random.normal(jax.random.key(0), (2, 3, config.d_model))
    graphdef, params = nnx.split(mechanism, nnx.Param)

    def loss(params, e):
        return jnp.sum(jnp.cos(looped(nnx.merge(graphdef, params), e, config.recurrences, k)))

    of_params, of_e = jax.grad(loss, argnums=(0, 1))(params, e)
    return {("e",): of_e[None]} | {
        path: g.get_value() if isinstance(g, PerPass) else g.get_value()[None]
        for path, g in nnx.to_flat_state(of_params)
    }


def untrained(gradients):
    """Where a whole gradient, or that of a pass, is zero."""
    return [
        path
        for path, g in gradients.items()
        if not np.abs(np.asarray(g)).reshape(len(g), -1).any(axis=1).all()
    ]


# --- The loop ----------------------------------------------------------------------------------------------


def one_pass(parameters, e, state, i):
    return jnp.tanh(state @ parameters["shared"] + e + parameters["own"][i])


@pytest.mark.parametrize(("r", "unroll"), [(1, False), (2, False), (4, False), (4, True), (8, False)])
def test_scans_equal_an_explicit_loop_at_every_k(r, unroll):
    """Values and gradients, with respect to shared and per-pass parameters, e and the first state; detached as told."""
    keys = jax.random.split(jax.random.key(r), 4)
    parameters = {"shared": jax.random.normal(keys[0], (5, 5)), "own": jax.random.normal(keys[1], (r, 5))}
    arguments = (parameters, jax.random.normal(keys[2], (3, 5)), jax.random.normal(keys[3], (3, 5)))

    def scanned(parameters, e, state, k):
        return jnp.sum(jnp.sin(loop(lambda s, i: one_pass(parameters, e, s, i), state, r, k, unroll)))

    def explicit(parameters, e, state, k):
        for i in range(r):
            if 0 < i == r - k:
                state = jax.lax.stop_gradient(state)
            state = one_pass(parameters, e, state, i)
        return jnp.sum(jnp.sin(state))

    for k in range(1, r + 1):
        expected, got = (
            jax.value_and_grad(functools.partial(f, k=k), argnums=(0, 1, 2))(*arguments)
            for f in (explicit, scanned)
        )
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), got, expected)


@pytest.mark.parametrize("injection", INJECTIONS)
def test_a_mechanism_in_scans_is_the_mechanism_in_a_plain_loop(injection):
    mechanism = mechanism_of(dataclasses.replace(SMALL, injection=injection, recurrences=5))
    e = jax.random.normal(jax.random.key(0), (2, 3, 16))
    entering, state = mechanism.prepare(e), mechanism.initial(e)
    for i in range(5):
        state = mechanism.leave(state, jnp.sin(mechanism.enter(state, entering, i)), i)
    np.testing.assert_allclose(looped(mechanism, e, 5, 5), mechanism.read(state), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("injection", INJECTIONS)
def test_a_mechanism_keeps_the_type_of_activations(injection):
    """In bfloat16 too: a scan's state must not change its type, nor its result differ by more than rounding."""
    mechanism = mechanism_of(dataclasses.replace(SMALL, injection=injection))
    e = jax.random.normal(jax.random.key(0), (2, 3, 16))
    exact, rounded = looped(mechanism, e, 3, 3), looped(mechanism, e.astype(jnp.bfloat16), 3, 3)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_allclose(rounded.astype(jnp.float32), exact, atol=0.1)


@pytest.mark.slow
def test_backprop_through_fewer_passes_takes_less_memory():
    def temporaries(k):
        config = dataclasses.replace(
            SMALL, d_model=32, sequence_length=64, recurrences=8, backprop_recurrences=k
        )
        graphdef, params = nnx.split(LoopedLM(config, nnx.Rngs(0)), nnx.Param)
        tokens = np.random.default_rng(1).integers(0, config.vocab_size, (8, config.sequence_length))
        gradient = jax.jit(
            jax.grad(lambda params: cross_entropy(nnx.merge(graphdef, params)(tokens), tokens))
        )
        return gradient.lower(params).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(4) < 0.75 * temporaries(8)


def test_shared_parameters_exist_once_whatever_r():
    sizes = {
        r: counting.count(dataclasses.replace(SMALL, recurrences=r)).total for r in (1, 2, 8)
    }  # and so many arrays are there:
    for r, size in sizes.items():
        params = nnx.eval_shape(lambda r=r: LoopedLM(dataclasses.replace(SMALL, recurrences=r), nnx.Rngs(0)))
        assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(params, nnx.Param))) == size == sizes[1]


# --- Mechanisms --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("injection", INJECTIONS)
def test_full_backprop_reaches_every_parameter_in_every_pass(injection):
    of = gradients(dataclasses.replace(SMALL, injection=injection), k=3)
    assert all(np.isfinite(g).all() for g in of.values())
    assert untrained(of) == []


@pytest.mark.parametrize("injection", DETACHABLE)
def test_truncated_backprop_reaches_every_parameter_where_it_is_allowed(injection):
    config = dataclasses.replace(SMALL, injection=injection, backprop_recurrences=1)
    assert untrained(gradients(config, k=1)) == []


@pytest.mark.parametrize("injection", sorted(set(INJECTIONS) - set(DETACHABLE)))
def test_truncation_that_would_leave_parameters_untrained_is_refused_with_the_reason(injection):
    config = dataclasses.replace(SMALL, injection=injection)
    assert untrained(gradients(config, k=1)) != [], "the reason is true"
    with pytest.raises(UserError, match=r"backprop_recurrences is 1 .* never receive a gradient"):
        dataclasses.replace(config, backprop_recurrences=1)


def test_hyperconnections_start_cyclic_and_as_a_plain_loop_at_one_pass():
    config = dataclasses.replace(SMALL, injection="hyperconnect", lanes=3, recurrences=5)
    mechanism = injection_class(config.injection)(config, nnx.Rngs(0))
    assert np.argmax(mechanism.alpha.get_value(), axis=1).tolist() == [0, 1, 2, 0, 1]
    assert (np.asarray(mechanism.mixing.get_value()) == np.eye(3)).all()
    e, s = jax.random.normal(jax.random.key(0), (2, 2, 3, 16))
    state = mechanism.initial(e)
    assert (mechanism.enter(state, e, 0) == e).all()
    np.testing.assert_allclose(mechanism.read(mechanism.leave(state, s, 0)), 3 * (e + s), rtol=1e-6)


@hypothesis.settings(deadline=None)
@hypothesis.given(hypothesis.extra.numpy.arrays(np.float32, (2, 16), elements=st.floats(-50, 50, width=32)))
def test_a_decay_stays_between_zero_and_one_whatever_is_learned(logarithms):
    mechanism = Diagonal(dataclasses.replace(SMALL, injection="diagonal"), nnx.Rngs(0))
    mechanism.log_step[...], mechanism.log_rate[...] = logarithms
    decay = np.asarray(mechanism.decay())
    assert (decay > 0).all()
    assert (decay < 1).all()


def test_a_diagonal_forgets_its_first_state():
    """|a| < 1 on every feature: two states that differ come together under the same e."""
    config = dataclasses.replace(SMALL, injection="diagonal")
    mechanism = Diagonal(config, nnx.Rngs(0))
    e, one, other = jax.random.normal(jax.random.key(0), (3, 2, 3, 16))
    apart = [float(jnp.abs(one - other).max())]
    for i in range(8):
        one, other = mechanism.enter(one, e, i), mechanism.enter(other, e, i)
        apart.append(float(jnp.abs(one - other).max()))
    np.testing.assert_allclose(np.array(apart[1:]) / apart[:-1], np.exp(-1), rtol=1e-2)


def test_pass_embeddings_start_as_linear_and_tell_passes_apart():
    linear, embedded = (
        injection_class(name)(dataclasses.replace(SMALL, injection=name), nnx.Rngs(0))
        for name in ("linear", "pass-embedding")
    )
    s, e = jax.random.normal(jax.random.key(0), (2, 2, 3, 16))
    for i in range(3):
        np.testing.assert_array_equal(embedded.enter(s, e, i), linear.enter(s, e, i))
    embedded.embedding[...] = jnp.arange(3.0)[:, None] * jnp.ones(16)
    np.testing.assert_allclose(embedded.enter(s, e, 2), linear.enter(s, e, 2) + 2, rtol=1e-6)


@pytest.mark.parametrize("injection", ["hyperconnect", "pass-embedding"])
def test_later_passes_than_were_trained_are_refused_where_each_has_parameters(injection):
    model = nnx.eval_shape(lambda: LoopedLM(dataclasses.replace(SMALL, injection=injection), nnx.Rngs(0)))
    with pytest.raises(UserError, match=r"recurrences is 4, .* each of 3 passes"):
        model(np.zeros((1, 8), int), recurrences=4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"injection": "hyperconect"}, r"Did you mean 'hyperconnect'\?"),
        ({"injection": "hyperconnect", "lanes": 1}, "at least 2"),
        ({"injection": "linear", "lanes": 2}, "has none"),
        ({"injection": "no_such_module:Class"}, "ModuleNotFoundError"),
        ({"injection": "looped.recurrence:NoSuchClass"}, "NoSuchClass"),
        ({"injection": "looped.model:LoopedLM"}, "not a subclass"),
        ({"injection": "looped.recurrence:Injection"}, r"no method enter"),
    ],
)
def test_bad_mechanisms_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(SMALL, **changes)


def test_lanes_unsaid_are_the_mechanisms_own_and_the_same_run():
    unsaid, said = (dataclasses.replace(SMALL, injection="hyperconnect", lanes=lanes) for lanes in (None, 2))
    assert RunSpec(model=unsaid, steps=1).run_id == RunSpec(model=said, steps=1).run_id


# --- A mechanism of one's own ------------------------------------------------------------------------------

PLUG_IN = '''
import jax.numpy as jnp
from flax import nnx
from looped.recurrence import Injection, PerPass

class Gated(Injection):
    """u = g_i e + (1 - g_i) s W, a gate for every pass."""

    counts_as = "recurrent"
    not_detachable = "the gates of detached passes would never receive a gradient"

    def __init__(self, config, rngs):
        self.gate = PerPass(jnp.full((config.recurrences, config.d_model), 0.5))
        self.mix = nnx.Param(jnp.eye(config.d_model))

    def enter(self, state, e, i):
        gate = self.gate.get_value()[i]
        return gate * e + (1 - gate) * (state @ self.mix.get_value())
'''


@pytest.fixture
def plug_in(tmp_path, monkeypatch):
    """The name of a mechanism that lies in the working directory."""
    (tmp_path / "my_mechanism.py").write_text(PLUG_IN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "my_mechanism:Gated"
    sys.modules.pop("my_mechanism", None)


@pytest.mark.slow
def test_a_mechanism_of_ones_own_is_trained_counted_and_recorded(plug_in, packed_folder, tmp_path):
    model = ModelConfig(sequence_length=32, d_model=16, n_heads=1, recurrent_layers=1, injection=plug_in)
    spec = RunSpec(
        model=model,
        optimizer=OptimizerConfig(polar_dtype="float32"),
        data=DataConfig(source=packed_folder),
        steps=5,
        batch_size=8,
        validation_sequences=8,
    )
    record = train(spec, tmp_path / "runs" / "one")
    assert record.status == "done"

    linear, own = counting.count(dataclasses.replace(model, injection="passthrough")), counting.count(model)
    added = 2 * 16 + 16 * 16
    assert own.total - linear.total == added
    assert record.parameters == own
    assert record.n_rec - linear.recurrent_block == added, "it counts as recurrent"
    per_pass = counting.flops_per_token(model) - counting.flops_per_token(
        dataclasses.replace(model, injection="passthrough")
    )
    assert per_pass == 6 * 2 * (16 + 16 * 16), "two passes: a matrix and a gate each"

    fitted = measure(tmp_path / "runs", tmp_path / "fit")
    assert fitted.analysis.losses.n_rec.tolist() == [record.n_rec]
    assert not fitted.identified, "one run is not enough, and the fit says so"

    groups = groups_by_name(nnx.state(LoopedLM(model, nnx.Rngs(0)), nnx.Param))
    assert (groups["injection.gate"], groups["injection.mix"]) == ("per_pass", "matrix")
    with pytest.raises(UserError, match="the gates of detached passes"):
        dataclasses.replace(model, backprop_recurrences=1)


def test_a_mechanism_of_ones_own_is_found_from_the_console_script(plug_in):
    """In the working directory, which is not on the path of an installed script."""
    code = "import sys; sys.path.remove(''); from looped.recurrence import injection_class as c; print(c(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, plug_in], capture_output=True, text=True, check=True)
    assert "my_mechanism.Gated" in done.stdout
    assert injection_class(plug_in).__name__ == "Gated"


def test_what_a_users_module_raises_is_said(plug_in, tmp_path):
    (tmp_path / "broken_mechanism.py").write_text("raise RuntimeError('half done')")
    with pytest.raises(UserError, match="RuntimeError: half done"):
        injection_class("broken_mechanism:Any")
