"""Causal self-attention: rotary positions, then normalised queries and keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array


def rotary_tables(length: int, head_dim: int, base: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns (cos, sin), each [T, head_dim / 2] float32."""
    frequencies = base ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    angles = np.outer(np.arange(length), frequencies)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates pairs (x1, x2) of the two halves of the last axis; x [B, T, H, K], tables [T, K / 2]."""
    x1, x2 = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, None, :].astype(x.dtype), sin[:, None, :].astype(x.dtype)
    return jnp.concatenate([x1 * cos + x2 * sin, x2 * cos - x1 * sin], axis=-1)


def rms_normalise(x: Array, epsilon: float) -> Array:
    """x / √(mean x² + ε) over the last axis, in float32, without a scale."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + epsilon)).astype(x.dtype)


def causal_attention(q: Array, k: Array, v: Array) -> Array:
    """Softmax attention to positions up to one's own.  q [B, T, H, K]; k, v [B, T, G, K], G dividing H; softmax in float32."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)
