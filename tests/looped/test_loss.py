"""Cross-entropy against its definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from looped.loss import cross_entropy, cross_entropy_sum


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
