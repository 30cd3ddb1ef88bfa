"""Cross-entropy in nats per token."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

Array = jax.Array
LARGEST_LOGITS = 64 * 2**20
"""Bytes of float32 logits that a device may hold at once."""


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


def chunks_for(tokens: int, length: int, vocabulary: int) -> int:
    """The fewest equal parts of `length` tokens a row that keep one part's logits within `LARGEST_LOGITS` bytes.

    `tokens` are those that one device holds in all, `length` those of a row that it holds.
    """
    least = -(-tokens * vocabulary * 4 // LARGEST_LOGITS)
    return next((n for n in range(min(least, length), length) if length % n == 0), length)


def chunked_cross_entropy_sum(
    unembed: Callable[[Array], Array], h: Array, targets: Array, chunks: int, divisions: int = 1
) -> tuple[Array, Array]:
    """`cross_entropy_sum` of unembed(h), h [B, T, D], one of `chunks` parts of the tokens at a time.

    The logits of a part are computed again in the backward pass.  A row lies in `divisions` places, and every part
    has an equal share of each.
    """
    if chunks == 1:
        return cross_entropy_sum(unembed(h), targets)

    def parts(x: Array) -> Array:  # [chunks, B, divisions · t, ...]
        b, t = x.shape[0], x.shape[1] // (divisions * chunks)
        split = jnp.moveaxis(x.reshape(b, divisions, chunks, t, *x.shape[2:]), 2, 0)
        return split.reshape(chunks, b, divisions * t, *x.shape[2:])

    @jax.checkpoint
    def body(sums, part):
        total, count = cross_entropy_sum(unembed(part[0]), part[1])
        return (sums[0] + total, sums[1] + count), None

    return jax.lax.scan(body, (jnp.zeros(()), jnp.zeros((), jnp.int32)), (parts(h), parts(targets)))[0]
