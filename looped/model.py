"""LoopedLM: embed → norm → prelude → r passes of the recurrent block → coda → norm → unembed → tanh cap."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from looped.attention import (
    KeyValues,
    Positions,
    causal_attention,
    positions_in_cache,
    rms_normalise,
    rotary_tables,
    rotate,
)
from looped.config import ModelConfig
from looped.errors import UserError
from looped.execution import Remat
from looped.products import look_up, product
from looped.recurrence import injection_class, loop
from looped.sharding import BATCH, RULES, Axes, constrain

Array = jax.Array


def _uniform(key: Array, shape: tuple[int, ...], dtype=jnp.float32, out_sharding=None) -> Array:
    """U(−√3·fan_in^−½, √3·fan_in^−½), a variance of 1 / fan_in."""
    limit = (3 / shape[0]) ** 0.5
    return jax.random.uniform(key, shape, dtype, -limit, limit, out_sharding=out_sharding)


def capped_logits(config: ModelConfig, h: Array, table: Array) -> Array:
    """h [..., D], unembedding [padded V, D] → cap · tanh(h · tableᵀ / cap) [..., V] in float32, without the padding."""
    vocabulary, features = RULES["unembedding"]
    logits = product(h, table.T, (features, vocabulary))
    logits = logits[..., : config.vocab_size].astype(jnp.float32)
    return config.logit_cap * jnp.tanh(logits / config.logit_cap)


class Norm(nnx.Module):
    """RMSNorm with a scale, computed in float32."""

    def __init__(self, config: ModelConfig):
        self.scale = nnx.Param(jnp.ones(config.d_model))
        self.epsilon = config.norm_epsilon

    def __call__(self, x: Array) -> Array:
        normalised = rms_normalise(x.astype(jnp.float32), self.epsilon)
        return (normalised * self.scale.get_value()).astype(x.dtype)


class Linear(nnx.Module):
    """x [..., in] → [..., out], no bias; the kernel is float32, the product in x's dtype."""

    def __init__(self, n_in: int, n_out: int, rngs: nnx.Rngs, kept: Axes):
        self.kernel = nnx.Param(_uniform(rngs.params(), (n_in, n_out)))
        self.kept = kept

    def __call__(self, x: Array) -> Array:
        return product(x, self.kernel.get_value(), self.kept)


class Block(nnx.Module):
    """One pre-norm transformer layer: attention, then a squared-ReLU MLP."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, attention: str):
        d, kv = config.d_model, config.kv_heads * config.head_dim
        self.attention_norm = Norm(config)
        self.query = Linear(d, d, rngs, RULES["query"])
        self.key = Linear(d, kv, rngs, RULES["key"])
        self.value = Linear(d, kv, rngs, RULES["value"])
        self.attention_out = Linear(d, d, rngs, RULES["attention_out"])
        self.mlp_norm = Norm(config)
        self.mlp_in = Linear(d, config.mlp_ratio * d, rngs, RULES["mlp_in"])
        self.mlp_out = Linear(config.mlp_ratio * d, d, rngs, RULES["mlp_out"])
        self.head_dim, self.epsilon, self.attention = config.head_dim, config.norm_epsilon, attention

    def __call__(self, x: Array, at: Positions, cache: KeyValues | None) -> tuple[Array, KeyValues | None]:
        """x [B, T, D] → (its output, the cache [B, S, G, K] with the new keys and values in)."""
        h = self.attention_norm(x)
        q, k, v = (
            projection(h).reshape(*h.shape[:-1], -1, self.head_dim)
            for projection in (self.query, self.key, self.value)
        )
        q, k = (rms_normalise(rotate(y, at.cos, at.sin), self.epsilon) for y in (q, k))
        if cache is not None:
            k, v = cache = cache.write(k, v, at.slot)
        q = constrain(q, BATCH, "sequence", "tensor", None)
        k, v = (constrain(y, BATCH, None, "tensor", None) for y in (k, v))
        attended = causal_attention(q, k, v, at.visible, backend=self.attention)
        x = x + self.attention_out(attended.reshape(*x.shape[:-1], -1))
        x = constrain(x, BATCH, "sequence", None)
        h = constrain(self.mlp_in(self.mlp_norm(x)), BATCH, "sequence", "tensor")
        return constrain(x + self.mlp_out(jnp.square(jax.nn.relu(h))), BATCH, "sequence", None), cache


def _stack(n: int, config: ModelConfig, rngs: nnx.Rngs, attention: str) -> Block | None:
    """n blocks with every parameter stacked on a leading axis, or None for n = 0."""
    if n == 0:
        return None
    make = nnx.split_rngs(splits=n)(
        nnx.vmap(lambda rngs: Block(config, rngs, attention), in_axes=0, out_axes=0)
    )
    return make(rngs)


_REMAT: dict[str, Callable[[Callable], Callable]] = {
    "layer": jax.checkpoint,
    "dots": functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    ),
}


def _apply_stack(
    stack: Block | None,
    x: Array,
    at: Positions,
    cache: KeyValues | None,
    unroll: bool = False,
    remat: Remat = "none",
) -> tuple[Array, KeyValues | None]:
    """Scans the stacked blocks over x [B, T, D], so that the program's size does not grow with depth.

    `cache` [layers, B, S, G, K] comes back with the new keys and values in.
    """
    if stack is None:
        return x, cache
    graphdef, layers = nnx.split(stack)

    def body(x, layer_and_cache):
        layer, cache = layer_and_cache
        return nnx.merge(graphdef, layer)(x, at, cache)

    body = _REMAT.get(remat, lambda f: f)(body)
    return jax.lax.scan(body, x, (layers, cache), unroll=True if unroll else 1)


class Stages(NamedTuple):
    """Cached keys and values, [layers, B, S, G, K]; the recurrent block's [budget, layers, B, S, G, K]."""

    prelude: KeyValues | None = None
    recurrent: KeyValues | None = None
    coda: KeyValues | None = None


class Cache(NamedTuple):
    """The tokens so far, for decoding; rows begin with `padding` [B] unused slots, `filled` slots are taken.

    Of the recurrent block, the entries of `budget` passes are kept: pass i writes and reads entry i mod
    budget, the rule of Huginn (arXiv:2502.05171, section 6.2), so that those of a token's last passes remain.
    With a budget of r every pass finds its own.  With a smaller one it finds its own for the tokens at hand
    and, for those before, the entries of the last pass that shares its place.
    """

    stages: Stages
    padding: Array
    filled: Array


class LoopedLM(nnx.Module):
    """The looped language model of `config` (paper, section 2).

    `unroll` unrolls the scans over layers and passes: the same function, faster on CPU, larger to compile.  `remat` and
    `attention` are as in `looped.execution.Execution`, the latter without `auto`.
    """

    def __init__(
        self,
        config: ModelConfig,
        rngs: nnx.Rngs,
        *,
        unroll: bool = False,
        remat: Remat = "none",
        attention: str = "xla",
    ):
        self.config, self.unroll = config, unroll
        self.remat: Remat = remat
        tables = (config.padded_vocab, config.d_model)
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), tables))
        self.unembedding = nnx.Param(0.001 * jax.random.normal(rngs.params(), tables))
        self.embedding_norm, self.pass_norm, self.final_norm = Norm(config), Norm(config), Norm(config)
        self.prelude = _stack(config.prelude_layers, config, rngs, attention)
        self.recurrent_block = _stack(config.recurrent_layers, config, rngs, attention)
        self.coda = _stack(config.coda_layers, config, rngs, attention)
        self.injection = injection_class(config.injection)(config, rngs)

    def __call__(self, tokens: Array, recurrences: int | None = None) -> Array:
        """tokens [B, T] integers → logits [B, T, V] float32.

        `recurrences` other than the trained r is for evaluation.  Where the mechanism has parameters for
        every pass, fewer recurrences use those of the first passes, and more are refused with `UserError`.
        """
        return self.unembed(self.hidden(tokens, recurrences))

    def hidden(self, tokens: Array, recurrences: int | None = None) -> Array:
        """tokens [B, T] → the coda's normalised output [B, T, D]."""
        at = Positions(*rotary_tables(tokens.shape[1], self.config.head_dim, self.config.rope_base))
        return self._run(tokens, at, Stages(), self.passes(recurrences))[0]

    def extend(self, tokens: Array, cache: Cache, recurrences: int | None = None) -> tuple[Array, Cache]:
        """Appends tokens [B, T] to those in `cache` → (the coda's normalised output [B, T, D], new cache).

        At a full budget that output equals `hidden`'s, given a mechanism that treats every token by itself,
        as all here do.  More tokens than the cache has room for give undefined results.
        """
        assert cache.stages.recurrent is not None
        capacity = cache.stages.recurrent.keys.shape[-3]
        tables = rotary_tables(capacity, self.config.head_dim, self.config.rope_base)
        at = positions_in_cache(tables, cache.padding, cache.filled, tokens.shape[1])
        h, stages = self._run(tokens, at, cache.stages, self.passes(recurrences))
        return h, Cache(stages, cache.padding, cache.filled + tokens.shape[1])

    def empty_cache(self, padding: Array, capacity: int, kv_budget: int) -> Cache:
        """A cache of `capacity` slots for rows that begin with padding [B] unused ones."""
        c = self.config

        def stage(*leading: int) -> KeyValues | None:
            shape = (*leading, len(padding), capacity, c.kv_heads, c.head_dim)
            return KeyValues(*(jnp.zeros(shape, c.compute_dtype) for _ in range(2))) if all(leading) else None

        stages = Stages(stage(c.prelude_layers), stage(kv_budget, c.recurrent_layers), stage(c.coda_layers))
        return Cache(stages, padding, jnp.zeros((), jnp.int32))

    def passes(self, recurrences: int | None) -> int:
        """How many passes to run, the trained r for None; `UserError` where the model cannot run so many."""
        if recurrences is None:
            return self.config.recurrences
        if recurrences < 1:
            raise UserError(f"recurrences is {recurrences}; it must be at least 1.")
        self.injection.check_passes(self.config, recurrences)
        return recurrences

    def _run(self, tokens: Array, at: Positions, caches: Stages, r: int) -> tuple[Array, Stages]:
        """The one path of training, where nothing is cached, and of decoding."""
        config = self.config

        def run(stack: Block | None, x: Array, cache: KeyValues | None):
            return _apply_stack(stack, x, at, cache, self.unroll, self.remat)

        x = look_up(self.embedding.get_value(), tokens, jnp.dtype(config.compute_dtype), RULES["embedding"])
        x = constrain(x, BATCH, "sequence", None)
        e, prelude_cache = run(self.prelude, self.embedding_norm(x), caches.prelude)

        entering = self.injection.prepare(e)

        def one_pass(carry, i):
            state, kept = carry
            own = jax.tree.map(lambda x: x[i % len(x)], kept)
            s, own = run(self.recurrent_block, self.injection.enter(state, entering, i), own)
            kept = jax.tree.map(lambda x, new: x.at[i % len(x)].set(new), kept, own)
            return self.injection.leave(state, self.pass_norm(s), i), kept

        if self.remat == "pass":
            one_pass = jax.checkpoint(one_pass)
        carry = (self.injection.initial(e), caches.recurrent)
        state, recurrent_cache = loop(one_pass, carry, r, min(config.k, r), self.unroll)
        h, coda_cache = run(self.coda, self.injection.read(state), caches.coda)
        return self.final_norm(h), Stages(prelude_cache, recurrent_cache, coda_cache)

    def unembed(self, h: Array) -> Array:
        """h [..., D] → capped logits [..., V] in float32, the vocabulary's padding cut off."""
        return capped_logits(self.config, h, self.unembedding.get_value())
