"""What the model promises whatever its mechanism: causality, the cap, types, stacking, passes at test time."""

import dataclasses
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from random_model import SMALL, forward, random_model, random_tokens

from looped.attention import Positions, rotary_tables
from looped.config import ModelConfig
from looped.errors import UserError
from looped.loss import cross_entropy
from looped.model import LoopedLM, _apply_stack
from looped.products import product
from looped.recurrence import INJECTIONS, PerPass

TOKENS = random_tokens(SMALL)


def of(**changes):
    return dataclasses.replace(SMALL, **changes)


@pytest.mark.parametrize("injection", INJECTIONS)
def test_a_later_token_changes_no_earlier_logit(injection):
    model = random_model(of(injection=injection))
    changed = TOKENS.copy()
    changed[:, 7] = (changed[:, 7] + 1) % SMALL.vocab_size
    before, after = forward(model, TOKENS), forward(model, changed)
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert (jnp.abs(before[:, 7:] - after[:, 7:]).max(axis=-1) > 1e-3).all(), "and all later ones"


def test_rows_that_pad_the_vocabulary_have_no_logit_and_no_gradient():
    model = random_model(SMALL)
    assert model.unembedding.shape == (128, 16), "70 padded to a multiple of 64"
    logits = forward(model, TOKENS)
    assert logits.shape == (2, 12, 70)
    graphdef, params = nnx.split(model, nnx.Param)
    gradient = jax.jit(jax.grad(lambda p: cross_entropy(nnx.merge(graphdef, p)(TOKENS), TOKENS)))(params)
    assert not gradient["unembedding"][...][70:].any()
    assert gradient["unembedding"][...][:70].any(axis=1).all()
    model.unembedding[...] = model.unembedding[...].at[70:].set(1e3)
    np.testing.assert_array_equal(forward(model, TOKENS), logits)


def test_logits_are_capped_softly():
    """cap · tanh(x / cap) of logits far beyond it, near it and far below, computed here in float64."""
    model = random_model(of(logit_cap=4.0))
    h = jax.random.normal(jax.random.key(0), (2, 12, 16))
    for scale in (1e-3, 1.0, 1e3):
        table = np.asarray(model.unembedding[...], np.float64)[:70] * scale
        expected = 4 * np.tanh(np.asarray(h, np.float64) @ table.T / 4)
        scaled = nnx.clone(model)
        scaled.unembedding[...] *= scale
        got = scaled.unembed(h)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
        assert jnp.abs(got).max() <= 4
    assert jnp.abs(got).max() > 3.99


@pytest.mark.parametrize("injection", INJECTIONS)
def test_unrolled_equals_scanned(injection):
    scanned, unrolled = (random_model(of(injection=injection), unroll=u) for u in (False, True))
    np.testing.assert_allclose(forward(scanned, TOKENS), forward(unrolled, TOKENS), atol=2e-5)


@pytest.mark.parametrize("injection", INJECTIONS)
def test_bfloat16_stays_bfloat16_through_the_loop(injection):
    model = random_model(of(injection=injection, compute_dtype="bfloat16"))
    jaxpr = jax.make_jaxpr(lambda tokens: model(tokens))(TOKENS)
    scans = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    assert len(scans) == 3, "prelude, passes, coda"
    for scan in scans:
        carry = scan.outvars[: scan.params["num_carry"]]
        assert {v.aval.dtype for v in carry} == {jnp.dtype(jnp.bfloat16)}
    assert jaxpr.out_avals[0].dtype == jnp.float32, "logits"
    assert {p.dtype for p in jax.tree.leaves(nnx.state(model, nnx.Param))} == {jnp.dtype(jnp.float32)}
    exact = forward(random_model(of(injection=injection)), TOKENS)
    assert jnp.linalg.norm(forward(model, TOKENS) - exact) < 0.1 * jnp.linalg.norm(exact)


def test_layers_are_stacked_and_start_different():
    model = LoopedLM(of(recurrent_layers=3, coda_layers=0), nnx.Rngs(0))
    assert model.coda is None
    leaves = jax.tree.leaves(nnx.state(model.recurrent_block, nnx.Param))
    assert {leaf.shape[0] for leaf in leaves} == {3}
    kernel = model.recurrent_block.query.kernel[...]
    assert kernel.shape == (3, 16, 16)
    assert jnp.abs(kernel[0] - kernel[1]).max() > 0.1


def test_a_stack_is_its_layers_one_after_another():
    model = random_model(SMALL)
    graphdef, layers = nnx.split(model.recurrent_block)
    at = Positions(*rotary_tables(12, SMALL.head_dim, SMALL.rope_base))
    x = expected = jax.random.normal(jax.random.key(0), (2, 12, 16))
    for i in range(SMALL.recurrent_layers):
        layer = jax.tree.map(operator.itemgetter(i), layers)
        expected, _ = nnx.merge(graphdef, layer)(expected, at, None)
    got, _ = _apply_stack(model.recurrent_block, x, at, None, unroll=False)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_the_program_grows_with_neither_depth_nor_recurrences():
    def equations(**changes):
        model = nnx.eval_shape(lambda: LoopedLM(of(**changes), nnx.Rngs(0)))
        graphdef, params = nnx.split(model)
        return str(jax.make_jaxpr(lambda p, tokens: nnx.merge(graphdef, p)(tokens))(params, TOKENS)).count(
            " = "
        )

    few = equations(recurrent_layers=2, recurrences=2)
    assert equations(recurrent_layers=6, recurrences=8) == few


@pytest.mark.parametrize(("injection", "recurrences"), [("linear", 1), ("linear", 5), ("diagonal", 2)])
def test_other_recurrences_at_test_time_are_the_model_of_that_r(injection, recurrences):
    trained = random_model(of(injection=injection, backprop_recurrences=2))
    other = random_model(of(injection=injection, recurrences=recurrences))
    np.testing.assert_allclose(forward(trained, TOKENS, recurrences), forward(other, TOKENS), atol=1e-5)


@pytest.mark.parametrize("injection", ["hyperconnect", "pass-embedding"])
def test_fewer_recurrences_use_the_parameters_of_the_first_passes(injection):
    trained = random_model(of(injection=injection))
    shorter = random_model(of(injection=injection, recurrences=2))
    nnx.update(shorter, nnx.state(trained, nnx.Not(PerPass)))
    first = jax.tree.map(lambda p: p[:2], nnx.state(trained, PerPass))
    assert jax.tree.leaves(first)
    nnx.update(shorter, first)
    np.testing.assert_allclose(forward(trained, TOKENS, 2), forward(shorter, TOKENS), atol=1e-5)


def test_no_passes_at_all_are_refused():
    with pytest.raises(UserError, match="recurrences is 0"):
        random_model(SMALL)(TOKENS, recurrences=0)


def test_a_model_without_a_loop_has_neither_prelude_nor_coda():
    config = ModelConfig(
        vocab_size=70,
        prelude_layers=0,
        coda_layers=0,
        recurrent_layers=4,
        recurrences=1,
        injection="passthrough",
    )
    model = random_model(config)
    assert (model.prelude, model.coda) == (None, None)
    assert jax.eval_shape(model, random_tokens(config)).shape == (2, 128, 70)


@pytest.mark.parametrize(("n_in", "n_out"), [(3, 5), (5, 3), (4, 4)])
def test_a_product_has_the_derivatives_of_one(n_in, n_out):
    random = np.random.default_rng(0)
    x, kernel = random.standard_normal((2, 7, n_in)), random.standard_normal((n_in, n_out))
    weights = random.standard_normal((2, 7, n_out))
    value, pull = jax.vjp(product, jnp.float32(x), jnp.float32(kernel))
    by_x, by_kernel = pull(jnp.float32(weights))
    np.testing.assert_allclose(value, x @ kernel, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(by_x, weights @ kernel.T, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(by_kernel, np.einsum("bti,bto->io", x, weights), rtol=1e-5, atol=1e-5)
