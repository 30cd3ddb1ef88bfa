"""Cross-entropy in nats per token."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array


def cross_entropy_sum(logits: Array, targets: Array) -> tuple[Array, Array]:
    """logits [B, T, V], targets [B, T] (−1 = ignored) → (sum of −log p in nats, number of targets that count)."""
    counted = targets >= 0
    log_z = jax.nn.logsumexp(logits, axis=-1)
    at_target = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    return jnp.sum(jnp.where(counted, log_z - at_target, 0.0)), jnp.sum(counted)


def cross_entropy(logits: Array, targets: Array) -> Array:
    """Mean cross-entropy in nats over the targets that count."""
    total, count = cross_entropy_sum(logits, targets)
    return total / count
