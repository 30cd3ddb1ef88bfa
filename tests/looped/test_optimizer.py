"""MuonH's promises, the groups, and how rates transfer."""

import dataclasses
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from looped.__main__ import main
from looped.config import ModelConfig, OptimizerConfig, RunSpec
from looped.errors import UserError
from looped.model import LoopedLM
from looped.optimizer import (
    GROUPS,
    check_norms,
    decay,
    groups_by_name,
    learning_rates,
    make_optimizer,
    muonh,
    polar_factor,
    smallest_norms,
)
from looped.recurrence import INJECTIONS

RATE = {"matrix": 0.02}


def matrices(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def stepped(w, g, optimizer=None):
    """W after one step."""
    optimizer = optimizer or muonh()
    updates, _ = optimizer.update(g, optimizer.init(w), w, learning_rates=RATE)
    return optax.apply_updates(w, updates)


def norms(x):
    return np.linalg.norm(np.asarray(x, np.float64), axis=(-2, -1))


# --- MuonH -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6, 6), (4, 12), (12, 4)])
def test_polar_factor_evens_out_the_singular_values(shape):
    """Against the exact factor U·Vᵀ; the five published steps leave singular values within about a tenth of 1."""
    g = matrices(*shape)
    u, _, v = np.linalg.svd(np.asarray(g, np.float64), full_matrices=False)
    got = np.asarray(polar_factor(g), np.float64)
    assert abs(np.linalg.svd(got, compute_uv=False) - 1).max() < 0.15
    assert np.sum(got * (u @ v)) / np.linalg.norm(got) / np.linalg.norm(u @ v) > 0.995


def test_weights_stay_on_the_sphere_and_updates_are_rate_times_its_radius():
    w, optimizer = {"a": matrices(3, 8, 5), "b": 0.1 * matrices(4, 4, seed=1)}, muonh()
    state, start = optimizer.init(w), w
    for step in range(5):
        updates, state = optimizer.update(
            jax.tree.map(lambda x, s=step: matrices(*x.shape, seed=s + 7), w), state, w, learning_rates=RATE
        )
        moved = optax.apply_updates(w, updates)
        for name in w:
            np.testing.assert_allclose(norms(moved[name]), norms(start[name]), rtol=1e-6)
            # The tangential part of a step of length rate · radius, to second order in the rate.
            angle = 2 * np.arcsin(norms(moved[name] - w[name]) / norms(start[name]) / 2)
            assert (angle < 1.01 * RATE["matrix"]).all()
            assert (angle > 0.5 * RATE["matrix"]).all()
        w = moved


def test_every_stacked_layer_is_a_matrix_of_its_own():
    w, g = matrices(3, 6, 4), matrices(3, 6, 4, seed=1) * jnp.array([1.0, 100.0, 0.01])[:, None, None]
    together = stepped(w, g)
    for i in range(3):
        np.testing.assert_allclose(together[i], stepped(w[i], g[i]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("size", "tolerance"), [(1e-3, 1e-2), (1e-9, 1e-4), (1e-30, 1e-4)])
def test_the_direction_of_a_gradient_does_not_depend_on_its_size(size, tolerance):
    """Where the published 1e-6 holds, it turns a step by less than a hundredth; where it would do more, it is gone."""
    w, g = matrices(2, 8, 24), matrices(2, 8, 24, seed=1)
    step, of_small = stepped(w, g) - w, stepped(w, size * g) - w
    assert (norms(of_small - step) < tolerance * norms(step)).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_zero_gradient_leaves_the_weights(dtype):
    w = matrices(2, 4, 6)
    after = stepped(w, jnp.zeros_like(w), muonh(dtype=dtype))
    np.testing.assert_allclose(after, w, rtol=1e-6)


@hypothesis.settings(deadline=None, max_examples=20)
@hypothesis.given(st.floats(1e-35, 1e30), st.integers(0, 100))
def test_any_gradient_gives_a_finite_step_on_the_sphere(size, seed):
    w = matrices(4, 6)
    after = stepped(w, size * matrices(4, 6, seed=seed))
    np.testing.assert_allclose(norms(after), norms(w), rtol=1e-5)


def test_bfloat16_iterations_stay_close_to_float32():
    w, g = matrices(32, 64), matrices(32, 64, seed=1)
    exact, rounded = (np.ravel(stepped(w, g, muonh(dtype=t)) - w) for t in (jnp.float32, jnp.bfloat16))
    assert exact @ rounded / np.linalg.norm(exact) / np.linalg.norm(rounded) > 0.99


def test_the_radius_is_state_that_updates_leave():
    w, optimizer = {"a": matrices(2, 3, 3)}, muonh()
    state = optimizer.init(w)
    _, after = optimizer.update({"a": matrices(2, 3, 3, seed=1)}, state, w, learning_rates=RATE)
    assert state[1].radius["a"].shape == (2, 1, 1)
    np.testing.assert_array_equal(after[1].radius["a"], state[1].radius["a"])


def test_sharded_steps_equal_whole_ones():
    """Rows, columns or layers over 8 devices: the same step, sharded as the weights are."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    P = jax.sharding.PartitionSpec
    w, g, optimizer = matrices(4, 16, 24), matrices(4, 16, 24, seed=1), muonh()
    whole = stepped(w, g)
    for spec in (P("b", None, None), P(None, "a", "b"), P("a", "b", None)):
        sharding = jax.sharding.NamedSharding(mesh, spec)
        on_mesh, gradient = (jax.device_put(x, sharding) for x in (w, g))
        state = optimizer.init(on_mesh)
        assert state[0].trace.sharding == sharding
        update = jax.jit(optimizer.update)
        updates, _ = update(gradient, state, on_mesh, learning_rates=RATE)
        assert updates.sharding.is_equivalent_to(sharding, 3)
        np.testing.assert_allclose(optax.apply_updates(on_mesh, updates), whole, rtol=1e-4, atol=1e-5)


def zeroed(config):
    """Parameters of which one layer's value projection is zero."""
    params = nnx.state(LoopedLM(config, nnx.Rngs(0)), nnx.Param)
    kernel = params["recurrent_block"]["value"]["kernel"]
    kernel[...] = kernel.get_value().at[1].set(0.0)
    return params


def test_a_matrix_of_norm_zero_is_an_error_that_names_it():
    params = zeroed(ModelConfig(d_model=8, n_heads=1))
    with pytest.raises(
        UserError, match=r"parameter recurrent_block\.value\.kernel has a matrix of norm zero"
    ):
        make_optimizer(OptimizerConfig(), params).init(params)
    with pytest.raises(UserError, match=r"recurrent_block\.value\.kernel"):
        check_norms(jax.jit(smallest_norms)(params))
    check_norms(
        smallest_norms(nnx.state(LoopedLM(ModelConfig(d_model=8, n_heads=1), nnx.Rngs(0)), nnx.Param))
    )


# --- Groups ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("injection", INJECTIONS)
def test_every_parameter_has_the_group_of_its_kind(injection):
    config = ModelConfig(d_model=8, n_heads=2, n_kv_heads=1, injection=injection)
    params = nnx.state(nnx.eval_shape(lambda: LoopedLM(config, nnx.Rngs(0))), nnx.Param)
    groups = groups_by_name(params)
    assert len(groups) == len(jax.tree.leaves(params))
    assert set(groups.values()) <= set(GROUPS)
    for stage in ("prelude", "recurrent_block", "coda"):
        own = {name: group for name, group in groups.items() if name.startswith(f"{stage}.")}
        assert {name for name, group in own.items() if group == "norm"} == {
            f"{stage}.attention_norm.scale",
            f"{stage}.mlp_norm.scale",
        }
        projections = ("query", "key", "value", "attention_out", "mlp_in", "mlp_out")
        assert {name for name, group in own.items() if group == "matrix"} == {
            f"{stage}.{projection}.kernel" for projection in projections
        }
    assert (groups["embedding"], groups["unembedding"], groups["final_norm.scale"]) == (
        "embedding",
        "unembedding",
        "norm",
    )


def test_the_groups_of_mechanisms():
    def own(injection):
        config = ModelConfig(d_model=8, n_heads=1, injection=injection)
        params = nnx.state(nnx.eval_shape(lambda: LoopedLM(config, nnx.Rngs(0))), nnx.Param)
        return {
            n.removeprefix("injection."): g
            for n, g in groups_by_name(params).items()
            if n.startswith("injection")
        }

    assert own("linear") == {"kernel": "matrix"}
    assert own("hyperconnect") == dict.fromkeys(("alpha", "mixing", "beta"), "per_pass")
    assert own("diagonal") == {"log_step": "norm", "log_rate": "norm", "write": "matrix"}
    assert own("pass-embedding") == {"kernel": "matrix", "embedding": "per_pass"}


def test_the_groups_are_listed_on_the_command_line(capsys):
    assert main(["parameters", "--injection", "hyperconnect", "--d-model", "32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["injection.mixing", "per_pass", "2", "×", "2", "×", "2"] for line in lines)
    assert any(line.split() == ["coda.value.kernel", "matrix", "1", "×", "32", "×", "32"] for line in lines)


def test_each_group_moves_at_its_own_rate():
    """The first AdamW step has the size of the rate wherever there is a gradient; matrices turn by theirs."""
    config = ModelConfig(d_model=8, n_heads=1, injection="pass-embedding")
    params = nnx.state(LoopedLM(config, nnx.Rngs(0)), nnx.Param)
    optimizer = make_optimizer(OptimizerConfig(polar_dtype="float32"), params)
    rates = {group: 0.001 * 2.0**i for i, group in enumerate(GROUPS)}
    random = jax.tree.map(lambda p: jax.random.normal(jax.random.key(p.size), p.shape), params)
    updates, _ = jax.jit(optimizer.update)(random, optimizer.init(params), params, learning_rates=rates)
    for (path, update), group in zip(
        nnx.to_flat_state(updates), groups_by_name(params).values(), strict=True
    ):
        if group != "matrix":
            np.testing.assert_allclose(np.abs(update.get_value()), rates[group], rtol=1e-3, err_msg=str(path))


# --- Rates -------------------------------------------------------------------------------------------------

MODEL = ModelConfig(d_model=64, n_heads=2)


def test_rates_at_the_reference_point_are_those_given():
    optimizer = OptimizerConfig(
        reference_batch_tokens=16 * 128, reference_tokens=16 * 128 * 10, reference_width=64
    )
    spec = RunSpec(model=MODEL, optimizer=optimizer, batch_size=16, steps=10)
    names = {
        "matrix": "matrix_lr",
        "embedding": "embedding_lr",
        "unembedding": "unembedding_lr",
        "norm": "norm_lr",
    }
    names["per_pass"] = "per_pass_lr"
    assert learning_rates(spec) == {group: getattr(optimizer, name) for group, name in names.items()}


def test_rates_transfer_over_batch_tokens_and_width():
    """Batch: matrices and tables, exponent 0.558.  Tokens: matrices alone, −0.32.  Width: AdamW alone, −½."""
    base = RunSpec(model=MODEL, batch_size=16, steps=100)
    rates = learning_rates(base)

    def ratio(spec):
        return {group: rate / rates[group] for group, rate in learning_rates(spec).items()}

    batch = ratio(dataclasses.replace(base, batch_size=64, steps=25))
    tables = pytest.approx(4**0.558)
    assert batch == {"matrix": tables, "embedding": tables, "unembedding": tables, "norm": 1, "per_pass": 1}
    tokens = ratio(dataclasses.replace(base, steps=400))
    assert tokens == {"matrix": pytest.approx(4**-0.32)} | dict.fromkeys(GROUPS[1:], 1)
    width = ratio(dataclasses.replace(base, model=dataclasses.replace(MODEL, d_model=256)))
    assert width == {"matrix": 1} | dict.fromkeys(GROUPS[1:], pytest.approx(0.5))


def test_the_schedule_is_linear_from_the_first_step():
    assert [decay(step, 4, 0.1) for step in range(5)] == pytest.approx([1, 0.775, 0.55, 0.325, 0.1])


@hypothesis.given(st.integers(0, 10**9), st.integers(1, 10**9), st.floats(0, 1))
def test_no_rate_is_ever_negative(step, steps, final):
    assert final <= decay(step, steps, final) <= 1 or math.isclose(
        decay(step, steps, final), final, abs_tol=1e-12
    )
    assert decay(step, steps, final) >= 0


EXPONENT = st.floats(-4, 4)


@hypothesis.given(
    st.builds(
        OptimizerConfig,
        **dict.fromkeys(
            ("matrix_lr", "embedding_lr", "unembedding_lr", "norm_lr", "per_pass_lr"),
            st.floats(0, allow_infinity=False, allow_nan=False),
        ),
        reference_batch_tokens=st.integers(1, 10**18),
        reference_tokens=st.none() | st.integers(1, 10**18),
        reference_width=st.integers(1, 2**31 - 1),
        batch_exponent=EXPONENT,
        data_exponent=EXPONENT,
        width_exponent=EXPONENT,
    ),
    st.integers(1, 2**31 - 1),
    st.integers(1, 2**31 - 1),
)
def test_no_configuration_gives_a_negative_rate_or_none(optimizer, steps, batch_size):
    rates = learning_rates(RunSpec(model=MODEL, optimizer=optimizer, steps=steps, batch_size=batch_size))
    assert set(rates) == set(GROUPS)
    assert all(rate >= 0 for rate in rates.values()), "which NaN is not, either"


@pytest.mark.parametrize("name", ["batch_exponent", "data_exponent", "width_exponent"])
@pytest.mark.parametrize("value", [-1e9, 5, float("nan"), float("inf")])
def test_exponents_that_carry_rates_beyond_all_numbers_are_refused(name, value):
    with pytest.raises(UserError, match=f"{name} is"):
        OptimizerConfig(**{name: value})


@pytest.mark.parametrize("name", ["matrix_lr", "embedding_lr", "unembedding_lr", "norm_lr", "per_pass_lr"])
@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_rates_that_are_none_are_refused(name, value):
    with pytest.raises(UserError, match=f"{name} is"):
        OptimizerConfig(**{name: value})
