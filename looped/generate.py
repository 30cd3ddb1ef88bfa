"""Generation with a cache: batched prompts of differing lengths, greedy or sampled."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from looped.config import LARGEST, at_least
from looped.errors import UserError
from looped.model import LoopedLM

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Decoding:
    """How to continue prompts.

    `recurrences` None is the trained r; `kv_budget` is the number of passes whose keys and values are kept for
    the tokens that follow (`looped.model.Cache`), None all.  A temperature of 0 takes the likeliest token; `top_k`
    samples among so many of the likeliest, None among all.
    """

    new_tokens: int = 100
    recurrences: int | None = None
    kv_budget: int | None = None
    temperature: float = 0.0
    top_k: int | None = None

    def __post_init__(self):
        at_least(self, 1, "new_tokens", "recurrences", "kv_budget", "top_k", high=LARGEST)
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"temperature is {self.temperature}; it must be at least 0 (0 is greedy).")


def generate(
    model: LoopedLM,
    prompts: Sequence[Sequence[int] | np.ndarray],
    how: Decoding | None = None,
    *,
    stop: int | None = None,
    seed: int = 0,
) -> list[np.ndarray]:
    """Returns the new tokens of each prompt, at most `how.new_tokens`, ending before its first `stop`.

    Prompts are token ids, at least one each (BOS first, as in training).  All are decoded as one batch, padded on
    their left; `how` None is `Decoding()`.  Raises `UserError` for an empty prompt, an id outside the vocabulary,
    or a `how` that the model cannot follow.
    """
    how = how or Decoding()
    if not 0 <= seed <= LARGEST:
        raise UserError(f"seed is {seed}; give a whole number from 0 to {LARGEST}.")
    r, vocabulary = model.passes(how.recurrences), model.config.vocab_size
    if how.kv_budget is not None and how.kv_budget > r:
        raise UserError(
            f"kv_budget is {how.kv_budget}; {r} recurrences have {r} to keep at most: leave it out."
        )
    if how.top_k is not None and how.top_k > vocabulary:
        raise UserError(f"top_k is {how.top_k}; the vocabulary has {vocabulary} tokens: leave it out.")
    if not prompts:
        return []
    lengths = np.array([len(prompt) for prompt in prompts])
    tokens = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[len(row) - len(prompt) :] = prompt
    if lengths.min() == 0:
        raise UserError(f"prompt {lengths.argmin() + 1} is empty; give it at least one token, such as BOS.")
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        raise UserError(
            f"a prompt has ids from {tokens.min()} to {tokens.max()}; the vocabulary has {vocabulary}."
        )
    graphdef, state = nnx.split(model)
    how = dataclasses.replace(how, recurrences=r, kv_budget=how.kv_budget or r)
    stop = -1 if stop is None else stop
    padding = tokens.shape[1] - lengths
    new = np.asarray(_decode(graphdef, state, tokens, padding, jax.random.key(seed), how=how, stop=stop))
    return [row[: np.append(np.flatnonzero(row == stop), len(row))[0]] for row in new]


def sample(logits: Array, key: Array, temperature: float, top_k: int | None) -> Array:
    """logits [B, V] → tokens [B]: the likeliest at temperature 0, else drawn, among the `top_k` likeliest if given."""
    if temperature == 0:
        return jnp.argmax(logits, axis=-1)
    if top_k is None:
        return jax.random.categorical(key, logits / temperature)
    values, tokens = jax.lax.top_k(logits, top_k)
    choice = jax.random.categorical(key, values / temperature)
    return jnp.take_along_axis(tokens, choice[:, None], axis=1)[:, 0]


@functools.partial(jax.jit, static_argnames=("graphdef", "how", "stop"))
def _decode(
    graphdef, state, prompts: Array, padding: Array, key: Array, *, how: Decoding, stop: int
) -> Array:
    """Prompts [B, W], padded on the left → new tokens [B, N]; what follows a `stop` means nothing."""
    model = nnx.merge(graphdef, state)
    (rows, width), count, r, budget = prompts.shape, how.new_tokens, how.recurrences, how.kv_budget
    assert budget is not None

    def draw(h, step):
        return sample(model.unembed(h[:, -1]), jax.random.fold_in(key, step), how.temperature, how.top_k)

    def unfinished(carry):
        step, _, done, _ = carry
        return (step < count) & ~jnp.all(done)

    def body(carry):
        step, new, done, cache = carry
        h, cache = model.extend(jax.lax.dynamic_slice_in_dim(new, step - 1, 1, axis=1), cache, r)
        token = draw(h, step)
        return step + 1, new.at[:, step].set(token), done | (token == stop), cache

    # The last new token is not fed back, so it needs no slot.
    h, cache = model.extend(prompts, model.empty_cache(padding, width + count - 1, budget), r)
    token = draw(h, 0)
    new = jnp.zeros((rows, count), token.dtype).at[:, 0].set(token)
    return jax.lax.while_loop(unfinished, body, (1, new, token == stop, cache))[1]
