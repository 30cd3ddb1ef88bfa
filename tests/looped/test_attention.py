"""Attention against a plain loop in float64; what rotary positions and the cache's positions promise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from looped.attention import (
    KeyValues,
    causal_attention,
    positions_in_cache,
    rms_normalise,
    rotary_tables,
    rotate,
)


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def plain_attention(q, k, v):
    """One query at a time, in float64; heads of q share those of k and v in consecutive groups."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    group = q.shape[2] // k.shape[2]
    for b, t, h in np.ndindex(q.shape[:3]):
        scores = k[b, : t + 1, h // group] @ q[b, t, h] / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max())
        out[b, t, h] = weights / weights.sum() @ v[b, : t + 1, h // group]
    return out


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_is_the_plain_loop(kv_heads):
    q, (k, v) = random(2, 7, 4, 6), random(2, 2, 7, kv_heads, 6, seed=1)
    np.testing.assert_allclose(causal_attention(q, k, v), plain_attention(q, k, v), atol=2e-6)


def test_grouped_queries_are_repeated_heads():
    q, (k, v) = random(2, 7, 6, 4), random(2, 2, 7, 2, 4, seed=1)
    repeated = causal_attention(q, k.repeat(3, axis=2), v.repeat(3, axis=2))
    np.testing.assert_allclose(causal_attention(q, k, v), repeated, atol=1e-6)


def test_later_keys_and_values_change_nothing_earlier():
    q, (k, v) = random(1, 8, 2, 4), random(2, 1, 8, 1, 4, seed=1)
    before = causal_attention(q, k, v)
    k[:, 5:], v[:, 5:] = 9.0, -9.0
    after = causal_attention(q, k, v)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert jnp.abs(before[:, 5:] - after[:, 5:]).min() > 0


def test_what_is_visible_can_be_said():
    q, (k, v) = random(2, 6, 4, 4), random(2, 2, 6, 2, 4, seed=1)
    visible = jnp.tril(jnp.ones((6, 6), bool))[None, None].repeat(2, axis=0)
    np.testing.assert_allclose(causal_attention(q, k, v, visible), causal_attention(q, k, v), atol=1e-6)


def test_softmax_is_in_float32():
    """256 equal values in bfloat16: sums of their weights in bfloat16 would stop growing at 2^-8 steps."""
    q, k = jnp.zeros((2, 1, 4096, 1, 8), jnp.bfloat16)
    v = jnp.ones((1, 4096, 1, 8), jnp.bfloat16)
    np.testing.assert_allclose(causal_attention(q, k, v).astype(jnp.float32), 1, atol=0.01)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500))
def test_rotated_products_depend_on_the_distance_alone(m, n, shift):
    cos, sin = rotary_tables(1001, 8, 10000.0)
    q, k = random(1, 1, 1, 8), random(1, 1, 1, 8, seed=1)

    def product(m, n):
        return float(jnp.sum(rotate(q, cos[[m]], sin[[m]]) * rotate(k, cos[[n]], sin[[n]])))

    assert product(m, n) == pytest.approx(product(m + shift, n + shift), abs=1e-4)
    assert product(m, m) == pytest.approx(float(np.sum(q * k)), abs=1e-4)


def test_rotation_turns_pairs_of_the_two_halves():
    """y1 = x1 cos + x2 sin, y2 = x2 cos − x1 sin, with frequencies base^(−2j/K): as complex numbers, x · e^(−iθ)."""
    x = random(1, 5, 1, 6)
    turned = np.asarray(rotate(x, *rotary_tables(5, 6, 100.0)))
    angles = np.arange(5)[:, None] * 100.0 ** (-np.arange(3) / 3)
    expected = (x[0, :, 0, :3] + 1j * x[0, :, 0, 3:]) * np.exp(-1j * angles)
    np.testing.assert_allclose(turned[0, :, 0, :3] + 1j * turned[0, :, 0, 3:], expected, atol=1e-6)


def test_each_row_may_have_positions_of_its_own():
    x, (cos, sin) = random(2, 3, 2, 4), rotary_tables(9, 4, 10000.0)
    at = np.array([[0, 1, 2], [5, 6, 8]])
    rows = [rotate(x[[b]], cos[at[b]], sin[at[b]])[0] for b in range(2)]
    np.testing.assert_array_equal(rotate(x, cos[at], sin[at]), np.stack(rows))


def test_normalised_rows_have_a_mean_square_of_one():
    x = 50 * random(3, 4, 16)
    y = rms_normalise(x, 1e-6)
    np.testing.assert_allclose(jnp.mean(y * y, axis=-1), 1, rtol=1e-5)
    np.testing.assert_allclose(y, rms_normalise(7 * x, 1e-6), rtol=1e-5)
    assert rms_normalise(x.astype(jnp.bfloat16), 1e-6).dtype == jnp.bfloat16
    assert jnp.isfinite(rms_normalise(np.zeros((1, 4), np.float32), 1e-6)).all()


def test_positions_in_a_cache_leave_the_padding_out():
    """Two rows, no padding and three slots of it; two tokens from slot 4 on, in a cache of seven."""
    tables = rotary_tables(7, 4, 10000.0)
    at = jax.jit(lambda padding, slot: positions_in_cache(tables, padding, slot, 2))(jnp.array([0, 3]), 4)
    np.testing.assert_array_equal(at.cos, tables[0][[[4, 5], [1, 2]]])
    np.testing.assert_array_equal(at.sin, tables[1][[[4, 5], [1, 2]]])
    assert at.visible is not None
    seen = [[list(np.flatnonzero(query)) for query in row[0]] for row in np.asarray(at.visible)]
    assert seen == [[[0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]], [[3, 4], [3, 4, 5]]]


def test_writing_touches_its_slots_alone():
    kept = KeyValues(random(2, 6, 1, 4), random(2, 6, 1, 4, seed=1))
    keys, values = random(2, 2, 1, 4, seed=2), random(2, 2, 1, 4, seed=3)
    written = jax.jit(kept.write)(keys, values, 3)
    for old, new, now in zip(kept, (keys, values), written, strict=True):
        np.testing.assert_array_equal(now, np.concatenate([old[:, :3], new, old[:, 5:]], axis=1))
