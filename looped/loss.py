"""Cross-entropy in nats per token."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
LARGEST_LOGITS = {"cpu": 8 * 2**20}
"""Bytes of float32 logits that a device of a platform may hold at once, 64 MiB where it is not named.

On CPU so many stay in the cache.
"""


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


def chunks_for(tokens: int, length: int, vocabulary: int, platform: str) -> int:
    """The fewest equal parts of `length` tokens a row that keep one part's logits within `LARGEST_LOGITS` bytes.

    `tokens` are those that one device holds in all, `length` those of a row that it holds.
    """
    least = -(-tokens * vocabulary * 4 // LARGEST_LOGITS.get(platform, 64 * 2**20))
    return next((n for n in range(min(least, length), length) if length % n == 0), length)


def chunked_cross_entropy_sum(
    logits: Callable[[Array, Array], Array],
    h: Array,
    table: Array,
    targets: Array,
    chunks: int = 1,
    divisions: int = 1,
) -> tuple[Array, Array]:
    """`cross_entropy_sum` of logits(h, table), h [B, T, D], one of `chunks` parts of the tokens at a time.

    Where it is differentiated, a part's gradients are taken while its logits are there, which are neither kept nor
    computed again.  A row lies in `divisions` places, and every part has an equal share of each.  `logits` must not
    close over traced arrays.
    """
    sums: Any = _chunked(logits, h, table, targets, chunks, divisions)
    return sums


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 4, 5))
def _chunked(logits, h, table, targets, chunks, divisions):
    def part(h, targets):
        return cross_entropy_sum(logits(h, table), targets), None

    return _over_parts(part, h, targets, chunks, divisions)[0]


def _chunked_forward(logits, h, table, targets, chunks, divisions):
    def part(h, targets):
        def sums(h, table):
            return cross_entropy_sum(logits(h, table), targets)

        (total, count), (by_h, by_table) = jax.value_and_grad(sums, argnums=(0, 1), has_aux=True)(h, table)
        return (total, count, by_table), by_h

    (total, count, by_table), by_h = _over_parts(part, h, targets, chunks, divisions)
    return (total, count), (by_h, by_table)


def _chunked_backward(logits, chunks, divisions, kept, gradient):
    del logits, chunks, divisions
    return *(gradient[0].astype(x.dtype) * x for x in kept), None


_chunked.defvjp(_chunked_forward, _chunked_backward)


def _over_parts(
    part: Callable[[Array, Array], tuple[Any, Any]], h: Array, targets: Array, chunks: int, divisions: int
) -> tuple[Any, Any]:
    """part(h, targets) → (what is summed over the parts, what is joined along T or None)."""
    if chunks == 1:
        return part(h, targets)
    b, length = targets.shape
    places = (divisions, chunks, length // (divisions * chunks))

    def split(x: Array) -> Array:  # [B, T, ...] → [chunks, B, T / chunks, ...]
        return jnp.moveaxis(x.reshape(b, *places, *x.shape[2:]), 2, 0).reshape(
            chunks, b, length // chunks, *x.shape[2:]
        )

    def join(x: Array) -> Array:
        apart = x.reshape(chunks, b, divisions, places[2], *x.shape[3:])
        return jnp.moveaxis(apart, 0, 2).reshape(b, length, *x.shape[3:])

    def body(sums, arrays):
        summed, joined = part(*arrays)
        return jax.tree.map(jnp.add, sums, summed), joined

    arrays = split(h), split(targets)
    shapes = jax.eval_shape(part, *(x[0] for x in arrays))[0]
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    sums, joined = jax.lax.scan(body, zeros, arrays)
    return sums, jax.tree.map(join, joined)
