"""Small models in which nothing is at a starting value that would hide its part."""

import functools

import jax
import numpy as np
from flax import nnx

from looped.config import ModelConfig
from looped.model import LoopedLM

SMALL = ModelConfig(
    vocab_size=70,
    sequence_length=12,
    d_model=16,
    n_heads=4,
    n_kv_heads=2,
    recurrences=3,
    prelude_layers=1,
    recurrent_layers=2,
    coda_layers=1,
)


def random_model(config, noise=0.2, seed=0, **options):
    """The model of `config` with noise added to every parameter."""
    model = LoopedLM(config, nnx.Rngs(seed), **options)
    random = np.random.default_rng(seed)
    params = nnx.state(model, nnx.Param)
    nnx.update(
        model,
        jax.tree.map(lambda p: p + np.float32(noise) * random.standard_normal(p.shape, np.float32), params),
    )
    return model


def random_tokens(config, rows=2, length=None, seed=1):
    shape = (rows, length or config.sequence_length)
    return np.random.default_rng(seed).integers(0, config.vocab_size, shape, np.int32)


def forward(model, tokens, recurrences=None):
    """The model's logits without a cache; models of one configuration share one compiled program."""
    return _forward(*nnx.split(model), tokens, recurrences)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _forward(graphdef, state, tokens, recurrences):
    return nnx.merge(graphdef, state)(tokens, recurrences)
