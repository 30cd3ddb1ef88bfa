"""Causal self-attention: rotary positions, then normalised queries and keys; with a cache or without."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
AnyArray = jax.Array | np.ndarray


class Positions(NamedTuple):
    """Where the T tokens at hand stand.

    `cos` and `sin` are rotary tables, [T, K / 2] or [B, T, K / 2].  With a cache, the tokens take its slots
    from `slot` on and see those that `visible` [B, 1, T, S] marks.
    """

    cos: AnyArray
    sin: AnyArray
    slot: AnyArray | int = 0
    visible: Array | None = None


class KeyValues(NamedTuple):
    """Keys and values of S slots, [..., B, S, G, K] each; leading axes are layers and passes."""

    keys: Array
    values: Array

    def write(self, keys: Array, values: Array, slot: AnyArray | int) -> KeyValues:
        """Puts those of T tokens, [B, T, G, K] each, into the slots from `slot` on."""
        return KeyValues(
            *(
                jax.lax.dynamic_update_slice_in_dim(kept, new, slot, axis=-3)
                for kept, new in zip(self, (keys, values), strict=True)
            )
        )


def rotary_tables(length: int, head_dim: int, base: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns (cos, sin), each [T, head_dim / 2] float32."""
    frequencies = base ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    angles = np.outer(np.arange(length), frequencies)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def positions_in_cache(
    tables: tuple[AnyArray, AnyArray], padding: Array, slot: Array | int, length: int
) -> Positions:
    """Positions of `length` tokens a row from `slot` on, where row b's first padding[b] slots hold nothing.

    `tables` are the rotary ones for as many positions, [S, K / 2], as the cache has slots.
    """
    own, slots = slot + jnp.arange(length), jnp.arange(len(tables[0]))
    at = jnp.maximum(own - padding[:, None], 0)
    visible = (slots >= padding[:, None, None]) & (slots <= own[:, None])
    cos, sin = (jnp.asarray(table)[at] for table in tables)
    return Positions(cos, sin, slot, visible[:, None])


def rotate(x: Array, cos: AnyArray, sin: AnyArray) -> Array:
    """Rotates pairs (x1, x2) of the two halves of the last axis; x [B, T, H, K], tables [(B,) T, K / 2]."""
    x1, x2 = jnp.split(x, 2, axis=-1)
    cos, sin = cos[..., None, :].astype(x.dtype), sin[..., None, :].astype(x.dtype)
    return jnp.concatenate([x1 * cos + x2 * sin, x2 * cos - x1 * sin], axis=-1)


def rms_normalise(x: Array, epsilon: float) -> Array:
    """x / √(mean x² + ε) over the last axis, in float32, without a scale."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + epsilon)).astype(x.dtype)


def causal_attention(
    q: Array, k: Array, v: Array, visible: Array | None = None, *, backend: str = "xla"
) -> Array:
    """Attention to positions up to one's own, or to those of `visible` [B, 1, T, S]; softmax in float32.

    q [B, T, H, K]; k, v [B, S, G, K], G dividing H, and S = T without `visible`.  `backend` is what
    `looped.attention_backends.choose_backend` returns; with `visible`, as in decoding, it is always XLA.  In a mesh
    with the axes of `looped.sharding`, rows may be divided over replica and fsdp, heads over tensor, and queries along
    T over sequence, while every device that has queries of a row has all its keys and values.
    """
    from looped import attention_backends  # which imports Pallas only where it is used

    if visible is not None:
        return jax.nn.dot_product_attention(q, k, v, mask=visible)
    return attention_backends.BACKENDS[backend](q, k, v)
