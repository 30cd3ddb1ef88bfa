"""Cross-entropy against its definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from looped.loss import (
    LARGEST_LOGITS,
    chunked_cross_entropy_sum,
    chunks_for,
    cross_entropy,
    cross_entropy_sum,
)


def test_equal_logits_cost_log_of_the_vocabulary():
    assert cross_entropy(jnp.zeros((2, 3, 7)), jnp.zeros((2, 3), jnp.int32)) == pytest.approx(
        np.log(7), abs=1e-6
    )


def test_ignored_targets_count_neither_in_the_sum_nor_in_the_mean():
    logits = jax.random.normal(jax.random.key(0), (2, 4, 5)) * 3
    targets = jnp.array([[0, 1, -1, 2], [-1, -1, 4, 3]])
    p = np.exp(np.asarray(logits, np.float64))
    p /= p.sum(-1, keepdims=True)
    by_hand = [-np.log(p[b, t, targets[b, t]]) for b in range(2) for t in range(4) if targets[b, t] >= 0]
    total, count = cross_entropy_sum(logits, targets)
    assert count == 5
    assert total == pytest.approx(sum(by_hand), rel=1e-5)
    assert cross_entropy(logits, targets) == pytest.approx(np.mean(by_hand), rel=1e-5)


def test_no_gradient_reaches_the_logits_of_ignored_targets():
    logits = jax.random.normal(jax.random.key(0), (1, 3, 5))
    gradient = jax.grad(cross_entropy)(logits, jnp.array([[1, -1, 2]]))
    assert jnp.all(gradient[0, 1] == 0)
    assert jnp.all(jnp.isfinite(gradient))


@given(st.integers(1, 64), st.integers(1, 4096), st.integers(1, 300_000))
def test_as_few_chunks_as_keep_the_logits_small(rows, length, vocabulary):
    def largest(n):
        return rows * (length // n) * vocabulary * 4

    chunks, limit = chunks_for(rows * length, length, vocabulary, "cpu"), LARGEST_LOGITS["cpu"]
    assert length % chunks == 0
    assert largest(chunks) <= limit or chunks == length
    assert not any(largest(n) <= limit for n in range(1, chunks) if length % n == 0)


@pytest.mark.parametrize(("chunks", "divisions"), [(1, 1), (4, 1), (2, 2), (6, 2)])
def test_in_chunks_the_loss_and_its_gradients_are_the_same(chunks, divisions):
    rng = np.random.default_rng(0)
    h, table = rng.normal(size=(2, 12, 5)).astype(np.float32), rng.normal(size=(7, 5)).astype(np.float32)
    targets = rng.integers(-1, 7, (2, 12))

    def whole(h, table):
        return cross_entropy_sum(h @ table.T, targets)

    def chunked(h, table):
        return chunked_cross_entropy_sum(
            lambda h, table: h @ table.T, h, table, jnp.asarray(targets), chunks, divisions
        )

    assert chunked(h, table)[1] == whole(h, table)[1] == np.sum(targets >= 0)
    np.testing.assert_allclose(
        chunked(h, table)[0], whole(h, table)[0], rtol=1e-6, err_msg="undifferentiated"
    )
    (a, ga), (b, gb) = (
        jax.value_and_grad(lambda *x, f=f: 3 * f(*x)[0], argnums=(0, 1))(h, table) for f in (whole, chunked)
    )
    np.testing.assert_allclose(b, a, rtol=1e-6)
    for x, y in zip(ga, gb, strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunks", [1, 4])
def test_logits_are_computed_once_and_one_part_at_a_time(chunks):
    """Three products a part, for logits and two gradients, of V · D · T / chunks multiplications each."""
    h, table = jnp.ones((2, 16, 8)), jnp.ones((32, 8))

    def loss(h, table):
        return chunked_cross_entropy_sum(
            lambda h, table: h @ table.T, h, table, jnp.zeros((2, 16), int), chunks
        )[0]

    text = jax.jit(jax.grad(loss, (0, 1))).lower(h, table).as_text()
    assert text.count("dot_general") == 3
    assert f"tensor<2x{16 // chunks}x32xf32>" in text
    assert chunks == 1 or "tensor<2x16x32xf32>" not in text
