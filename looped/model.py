"""LoopedLM: embed → norm → prelude → r passes of the recurrent block → coda → norm → unembed → tanh cap."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from looped.attention import causal_attention, rms_normalise, rotary_tables, rotate
from looped.config import ModelConfig
from looped.recurrence import injection_class, loop

Array = jax.Array


def _uniform(key: Array, shape: tuple[int, ...], dtype=jnp.float32, out_sharding=None) -> Array:
    """U(−√3·fan_in^−½, √3·fan_in^−½), a variance of 1 / fan_in."""
    limit = (3 / shape[0]) ** 0.5
    return jax.random.uniform(key, shape, dtype, -limit, limit, out_sharding=out_sharding)


class Norm(nnx.Module):
    """RMSNorm with a scale, computed in float32."""

    def __init__(self, config: ModelConfig):
        self.scale = nnx.Param(jnp.ones(config.d_model))
        self.epsilon = config.norm_epsilon

    def __call__(self, x: Array) -> Array:
        return rms_normalise(x, self.epsilon) * self.scale.get_value().astype(x.dtype)


class Linear(nnx.Module):
    """x [..., in] → [..., out], no bias; the kernel is float32, the product in x's dtype."""

    def __init__(self, n_in: int, n_out: int, rngs: nnx.Rngs):
        self.kernel = nnx.Param(_uniform(rngs.params(), (n_in, n_out)))

    def __call__(self, x: Array) -> Array:
        return x @ self.kernel.get_value().astype(x.dtype)


class Block(nnx.Module):
    """One pre-norm transformer layer: attention, then a squared-ReLU MLP."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        d, kv = config.d_model, config.kv_heads * config.head_dim
        self.attention_norm = Norm(config)
        self.query = Linear(d, d, rngs)
        self.key = Linear(d, kv, rngs)
        self.value = Linear(d, kv, rngs)
        self.attention_out = Linear(d, d, rngs)
        self.mlp_norm = Norm(config)
        self.mlp_in = Linear(d, config.mlp_ratio * d, rngs)
        self.mlp_out = Linear(config.mlp_ratio * d, d, rngs)
        self.head_dim, self.epsilon = config.head_dim, config.norm_epsilon

    def __call__(self, x: Array, rotary: tuple[Array, Array]) -> Array:
        h = self.attention_norm(x)
        q, k, v = (
            projection(h).reshape(*h.shape[:-1], -1, self.head_dim) for projection in (self.query, self.key, self.value)
        )
        q, k = (rms_normalise(rotate(y, *rotary), self.epsilon) for y in (q, k))
        x = x + self.attention_out(causal_attention(q, k, v).reshape(*x.shape[:-1], -1))
        return x + self.mlp_out(jnp.square(jax.nn.relu(self.mlp_in(self.mlp_norm(x)))))


def _stack(n: int, config: ModelConfig, rngs: nnx.Rngs) -> Block | None:
    """n blocks with every parameter stacked on a leading axis, or None for n = 0."""
    if n == 0:
        return None
    make = nnx.split_rngs(splits=n)(nnx.vmap(lambda rngs: Block(config, rngs), in_axes=0, out_axes=0))
    return make(rngs)


def _apply_stack(stack: Block | None, x: Array, rotary: tuple[Array, Array], unroll: bool) -> Array:
    """Scans the stacked blocks over x [B, T, D], so that the program's size does not grow with depth."""
    if stack is None:
        return x
    graphdef, layers = nnx.split(stack)

    def body(x, layer):
        return nnx.merge(graphdef, layer)(x, rotary), None

    return jax.lax.scan(body, x, layers, unroll=True if unroll else 1)[0]


class LoopedLM(nnx.Module):
    """The looped language model of `config` (paper, section 2).

    `unroll` unrolls the scans over layers and passes: the same function, faster on CPU, larger to compile.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, *, unroll: bool = False):
        self.config, self.unroll = config, unroll
        tables = (config.padded_vocab, config.d_model)
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), tables))
        self.unembedding = nnx.Param(0.001 * jax.random.normal(rngs.params(), tables))
        self.embedding_norm, self.pass_norm, self.final_norm = Norm(config), Norm(config), Norm(config)
        self.prelude = _stack(config.prelude_layers, config, rngs)
        self.recurrent_block = _stack(config.recurrent_layers, config, rngs)
        self.coda = _stack(config.coda_layers, config, rngs)
        self.injection = injection_class(config.injection)(config, rngs)

    def __call__(self, tokens: Array, recurrences: int | None = None) -> Array:
        """tokens [B, T] integers → logits [B, T, V] float32.  `recurrences` other than the trained r is for evaluation."""
        return self.unembed(self.hidden(tokens, recurrences))

    def hidden(self, tokens: Array, recurrences: int | None = None) -> Array:
        """tokens [B, T] → the coda's normalised output [B, T, D]."""
        config = self.config
        r = config.recurrences if recurrences is None else recurrences
        rotary = rotary_tables(tokens.shape[1], config.head_dim, config.rope_base)
        run: Callable = lambda stack, x: _apply_stack(stack, x, rotary, self.unroll)  # noqa: E731

        x = self.embedding.get_value()[tokens].astype(config.compute_dtype)
        e = run(self.prelude, self.embedding_norm(x))

        def one_pass(state, i):
            s = self.pass_norm(run(self.recurrent_block, self.injection.enter(state, e, i)))
            return self.injection.leave(state, s, i)

        state = loop(one_pass, self.injection.initial(e), r, min(config.k, r), self.unroll)
        return self.final_norm(run(self.coda, self.injection.read(state)))

    def unembed(self, h: Array) -> Array:
        """h [..., D] → capped logits [..., V] in float32, the vocabulary's padding cut off."""
        logits = (h @ self.unembedding.get_value().astype(h.dtype).T)[..., : self.config.vocab_size]
        cap = self.config.logit_cap
        return cap * jnp.tanh(logits.astype(jnp.float32) / cap)
