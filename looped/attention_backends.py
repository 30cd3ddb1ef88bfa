"""Causal attention by XLA alone, by TPU's splash kernel and by cuDNN: one result, three speeds.

Each takes q [B, T, H, K] and k, v [B, T, G, K], G dividing H, and returns [B, T, H, K].  The softmax is in float32.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from looped.config import ModelConfig
from looped.errors import UserError
from looped.sharding import BATCH

Array = jax.Array
QUERIES, KEYS = P(BATCH, "sequence", "tensor", None), P(BATCH, None, "tensor", None)
LANES = 128
"""Splash works on tiles of this many positions."""


def choose_backend(platform: str, model: ModelConfig, wanted: str = "auto", sequence: int = 1) -> str:
    """Which of `BACKENDS` computes the attention of `model` on devices of `platform` ("cpu", "tpu", "gpu").

    The platform is that of the devices to compile for, which need not be here; `sequence` is the size of the mesh's
    axis along T.  Auto is splash on TPU and cuDNN on GPU where they can, XLA elsewhere.  Raises `UserError` where
    another one is `wanted` that cannot.
    """
    if wanted == "auto":
        kernel = {"tpu": "splash", "gpu": "cudnn", "cuda": "cudnn"}.get(platform, "xla")
        return "xla" if obstacle(kernel, platform, model, sequence) else kernel
    reason = obstacle(wanted, platform, model, sequence)
    if reason:
        raise UserError(f"attention is {wanted!r}, but {reason}; use 'auto' or 'xla'.")
    return wanted


def obstacle(backend: str, platform: str, model: ModelConfig, sequence: int = 1) -> str | None:
    """Why `backend` cannot compute the attention of `model` there, None where it can."""
    if backend == "splash":
        if platform != "tpu":
            return f"splash is a kernel for TPU and the platform is {platform}"
        if model.sequence_length // sequence % LANES:
            parts = f" in {sequence} parts" if sequence > 1 else ""
            return (
                f"splash wants a multiple of {LANES} positions a device and sequence_length"
                f" {model.sequence_length}{parts} is none"
            )
    if backend == "cudnn":
        if platform not in ("gpu", "cuda"):
            return f"cudnn is for NVIDIA GPUs and the platform is {platform}"
        if model.compute_dtype != "bfloat16":
            return f"cudnn computes in bfloat16 and compute_dtype is {model.compute_dtype}"
        if model.head_dim % 8 or model.head_dim > 128:
            return f"cudnn wants a head size that is a multiple of 8 up to 128 and it is {model.head_dim}"
        if sequence > 1:
            return f"cudnn takes whole sequences and mesh axis sequence is {sequence}"
    return None


# --- XLA ----------------------------------------------------------------------------------------------------


def _blocks(length: int) -> list[tuple[int, int]]:
    """[first, end) of blocks of queries: at most four, of 64 positions or more, for what comes later is left out.

    One block where a mesh divides the sequence.
    """
    if dict(jax.sharding.get_abstract_mesh().shape).get("sequence", 1) > 1:
        return [(0, length)]
    size = max(64, -(-length // 4))
    return [(first, min(first + size, length)) for first in range(0, length, size)]


def _grouped(q: Array, groups: int) -> Array:
    """[B, T, H, K] → [B, G, H / G, T, K]."""
    b, t, h, k = q.shape
    return q.reshape(b, t, groups, h // groups, k).transpose(0, 2, 3, 1, 4)


def _ungrouped(x: Array) -> Array:
    b, g, n, t, k = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(b, t, g * n, k)


def _product(equation: str, x: Array, y: Array, dtype: jnp.dtype) -> Array:
    """Of arrays in `dtype`, summed in float32."""
    return jnp.einsum(equation, x.astype(dtype), y.astype(dtype), preferred_element_type=jnp.float32)


@jax.custom_vjp
def xla_attention(q: Array, k: Array, v: Array) -> Array:
    """By matrix products, a block of queries at a time, each with the keys up to its own end.

    Derivatives are written out: against those of `jax.nn.dot_product_attention` they pass over the weights less
    often, transpose arrays of [T, K] only, and skip what a causal mask would zero.
    """
    return _xla_forward(q, k, v)[0]


def _xla_forward(q, k, v):
    dtype, scale = q.dtype, q.shape[-1] ** -0.5
    q = _grouped(q, k.shape[2])
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    outputs, weights, totals = [], [], []
    for first, end in _blocks(q.shape[3]):
        scores = _product("bgntk,bgsk->bgnts", q[..., first:end, :], k[:, :, :end], dtype)
        visible = np.arange(end) <= np.arange(first, end)[:, None]
        scores = jnp.where(visible, scale * scores, -jnp.inf)
        weight = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))  # not yet divided by its total
        total = 1 / jnp.sum(weight, axis=-1, keepdims=True)
        outputs.append(_product("bgnts,bgsk->bgntk", weight, v[:, :, :end], dtype) * total)
        weights.append(weight)
        totals.append(total)
    output = jnp.concatenate(outputs, axis=3)
    return _ungrouped(output).astype(dtype), (q, k, v, output, weights, totals)


def _xla_backward(kept, gradient):
    q, k, v, output, weights, totals = kept
    dtype, (groups, length) = q.dtype, k.shape[1:3]
    gradient = _grouped(gradient, groups)
    along = jnp.sum(gradient * output, axis=-1, keepdims=True)  # Σ over keys of weight · its gradient
    dq, dk, dv = [], [], []
    for (first, end), weight, total in zip(_blocks(length), weights, totals, strict=True):
        g = gradient[..., first:end, :] * total
        ds = weight * (
            _product("bgntk,bgsk->bgnts", g, v[:, :, :end], dtype) - along[..., first:end, :] * total
        )
        dq.append(_product("bgnts,bgsk->bgntk", ds, k[:, :, :end], dtype))
        rest = [(0, 0)] * 3 + [(0, length - end)]
        dk.append(jnp.pad(_product("bgntk,bgnts->bgks", q[..., first:end, :], ds, dtype), rest))
        dv.append(jnp.pad(_product("bgntk,bgnts->bgks", g, weight, dtype), rest))
    scale = q.shape[-1] ** -0.5
    dq = _ungrouped(scale * jnp.concatenate(dq, axis=3))
    dk, dv = ((by * sum(x[1:], start=x[0])).transpose(0, 3, 1, 2) for by, x in ((scale, dk), (1, dv)))
    return tuple(x.astype(dtype) for x in (dq, dk, dv))


xla_attention.defvjp(_xla_forward, _xla_backward)


# --- Kernels ------------------------------------------------------------------------------------------------


def _in_mesh(
    attend: Callable[..., Array], q: Array, k: Array, v: Array, *extra: tuple[object, object]
) -> Array:
    """attend(q, k, v, *extra) on each device's part of the mesh that is set; `extra` are (value, its partition)."""
    values, parts = [x for x, _ in extra], [part for _, part in extra]
    if jax.sharding.get_abstract_mesh().size <= 1:
        return attend(q, k, v, *values)
    specs = (QUERIES, KEYS, KEYS, *parts)
    return jax.shard_map(attend, in_specs=specs, out_specs=QUERIES, check_vma=False)(q, k, v, *values)


def cudnn_attention(q: Array, k: Array, v: Array) -> Array:
    """cuDNN's fused attention."""
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    return _in_mesh(attend, q, k, v)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def splash_attention(q: Array, k: Array, v: Array, interpret: bool = False) -> Array:
    """The Pallas kernel that ships with JAX; `interpret` runs it on any platform, slowly.

    Along a divided sequence each device has its own part of the mask, so blocks in the future cost it nothing.
    """
    return _splash_forward(q, k, v, interpret)[0]


def _splash_forward(q, k, v, interpret):
    with _precision_for(q.dtype):
        return jax.vjp(functools.partial(_splash, interpret=interpret), q, k, v)


def _splash_backward(interpret, pull, gradient):
    del interpret
    with _precision_for(gradient.dtype):
        return pull(gradient)


splash_attention.defvjp(_splash_forward, _splash_backward)


def _precision_for(dtype: jnp.dtype) -> contextlib.AbstractContextManager[object]:
    """Products of bfloat16 have one precision, and Mosaic refuses to compile them at another that may be set."""
    return jax.default_matmul_precision("default") if dtype == jnp.bfloat16 else contextlib.nullcontext()


BLOCK_SIZES = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")


def _splash(q: Array, k: Array, v: Array, interpret: bool) -> Array:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    mesh, length = jax.sharding.get_abstract_mesh(), q.shape[1]
    parts = dict(mesh.shape).get("sequence", 1)
    block = next((size for size in (512, 384, 256, LANES) if length // parts % size == 0), None)
    if block is None:
        raise UserError(
            f"attention is 'splash' and a device has {length // parts} positions, no multiple of {LANES}; use 'xla'."
        )
    made = kernel.make_splash_mha(
        masks.MultiHeadMask([masks.CausalMask((length, length))]),  # one for all heads
        block_sizes=kernel.BlockSizes(**dict.fromkeys(BLOCK_SIZES, block)),
        head_shards=1,
        q_seq_shards=parts,
        interpret=interpret,
    )

    def attend(q, k, v, made):
        heads_first = (x.swapaxes(1, 2) for x in (q * q.shape[-1] ** -0.5, k, v))
        return jax.vmap(made)(*heads_first).swapaxes(1, 2)

    part = made.manual_sharding_spec(NamedSharding(mesh, P(None, "sequence"))) if mesh.size > 1 else None
    return _in_mesh(attend, q, k, v, (made, part))


BACKENDS: dict[str, Callable[..., Any]] = {
    "xla": xla_attention,
    "splash": splash_attention,
    "cudnn": cudnn_attention,
}
"""How attention can be computed, by name."""
