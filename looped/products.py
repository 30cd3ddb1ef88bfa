"""Where parameters meet activations: float32 kept in shares, gathered in the activations' type, derivatives in float32.

The sum over tokens that makes a parameter's derivative is over a device's own and over all devices'; in bfloat16 it
would lose most of what a step is made of.  What multiplies element by element does so in float32 for the same reason.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from looped.sharding import OTHERS, Axes, constrain, constrain_kept, in_use

Array = jax.Array


def product(x: Array, kernel: Array, kept: Axes = OTHERS) -> Array:
    """x [..., in] · kernel [in, out] → [..., out], in x's type.

    The kernel, divided as in `kept`, is gathered along fsdp for it.  Its derivative has its own type, float32, in which
    it is summed over the devices, and is divided as the kernel is.  It is computed with the smaller of its two factors
    transposed, which on CPU is the faster way.
    """
    made: Any = _product(x, kernel, kept)
    return made


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x, kernel, kept):
    return x @ _gathered(kernel, x.dtype, kept)


def _gathered(kernel: Array, dtype: jnp.dtype, kept: Axes) -> Array:
    return constrain(kernel.astype(dtype), *in_use(kept))


def _product_forward(x, kernel, kept):
    return _product(x, kernel, kept), (x, kernel)


def _product_backward(kept, saved, gradient):
    x, kernel = saved
    leading = tuple(range(x.ndim - 1))

    def over_tokens(a, b):
        return jax.lax.dot_general(a, b, ((leading, leading), ((), ())), preferred_element_type=kernel.dtype)

    narrow = kernel.shape[0] <= kernel.shape[1]
    by_kernel = over_tokens(x, gradient) if narrow else over_tokens(gradient, x).T
    return gradient @ _gathered(kernel, x.dtype, kept).T, constrain_kept(by_kernel, kept)


_product.defvjp(_product_forward, _product_backward)


def look_up(table: Array, tokens: Array, dtype: jnp.dtype, kept: Axes) -> Array:
    """table [V, D] float32, tokens [B, T] → [B, T, D] of `dtype`; its derivative as `product`'s.

    The table is gathered first: a look-up in a divided one makes the compiler move whole activations.
    """
    found: Any = _look_up(table, tokens, dtype, kept)
    return found


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _look_up(table, tokens, dtype, kept):
    return _gathered(table, dtype, kept)[tokens]


def _look_up_forward(table, tokens, dtype, kept):
    return _look_up(table, tokens, dtype, kept), (table, tokens)


def _look_up_backward(dtype, kept, saved, gradient):
    del dtype
    table, tokens = saved
    by_table = jnp.zeros_like(table).at[tokens].add(gradient.astype(table.dtype))
    return constrain_kept(by_table, kept), None


_look_up.defvjp(_look_up_forward, _look_up_backward)
