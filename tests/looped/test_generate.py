"""Decoding with a cache equals the model without one; what a budget keeps; what generation draws and refuses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from random_model import SMALL, forward, random_model, random_tokens

from looped.errors import UserError
from looped.generate import Decoding, generate, sample
from looped.recurrence import INJECTIONS

PADDING = jnp.array([0, 3, 1])
TOKENS = random_tokens(SMALL, rows=3)
WIDTH = TOKENS.shape[1]
CHUNKS = (5, 5, 1, 1)
"""A prompt in two parts, then token by token."""


@functools.partial(jax.jit, static_argnums=(0, 4))
def _extend(graphdef, state, tokens, cache, recurrences):
    return nnx.merge(graphdef, state).extend(tokens, cache, recurrences)


def extend(model, tokens, cache, recurrences=None):
    return _extend(*nnx.split(model), tokens, cache, recurrences)


def cached_hidden(model, chunks, kv_budget, recurrences=None):
    """The output for TOKENS, whose first PADDING ones are none, fed in chunks of these lengths."""
    cache, outputs, start = model.empty_cache(PADDING, WIDTH, kv_budget), [], 0
    for length in chunks:
        h, cache = extend(model, TOKENS[:, start : start + length], cache, recurrences)
        outputs.append(h)
        start += length
    assert start == WIDTH == cache.filled
    return jnp.concatenate(outputs, axis=1)


def assert_equals_full_forward(model, recurrences=None):
    """Logits of every token that is no padding, to 1e-4, against rows without padding and a cache."""
    r = model.passes(recurrences)
    logits = model.unembed(cached_hidden(model, CHUNKS, r, recurrences))
    assert jnp.abs(logits).max() > 0.3
    moved = np.stack([np.roll(row, -int(n)) for row, n in zip(TOKENS, PADDING, strict=True)])
    expected = forward(model, moved, recurrences)  # what comes round to the end is seen by nothing before it
    for row, n in enumerate(map(int, PADDING)):
        np.testing.assert_allclose(logits[row, n:], expected[row, : WIDTH - n], atol=1e-4)


@pytest.mark.parametrize("injection", INJECTIONS)
def test_decoding_with_a_full_cache_is_the_forward_pass(injection):
    """Padded on the left, with grouped queries, under every registered mechanism."""
    assert_equals_full_forward(random_model(dataclasses.replace(SMALL, injection=injection)))


@pytest.mark.parametrize(
    "changes",
    [
        {"backprop_recurrences": 1},
        {"prelude_layers": 0, "coda_layers": 0, "recurrences": 1, "injection": "passthrough"},
        {"injection": "hyperconnect", "lanes": 3, "recurrences": 4},
    ],
    ids=["truncated", "not looped", "three lanes"],
)
def test_decoding_is_the_forward_pass_of_other_shapes(changes):
    assert_equals_full_forward(random_model(dataclasses.replace(SMALL, **changes)))


@pytest.mark.parametrize(("injection", "recurrences"), [("linear", 5), ("linear", 1), ("hyperconnect", 2)])
def test_decoding_is_the_forward_pass_at_other_recurrences(injection, recurrences):
    assert_equals_full_forward(random_model(dataclasses.replace(SMALL, injection=injection)), recurrences)


def test_decoding_unrolled_is_decoding_scanned():
    scanned, unrolled = (
        cached_hidden(random_model(SMALL, unroll=unroll), CHUNKS, kv_budget=2) for unroll in (False, True)
    )
    np.testing.assert_allclose(scanned[1, 3:], unrolled[1, 3:], atol=2e-5)


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_a_budget_shares_entries_between_passes_equal_modulo_it(budget):
    """Five passes against a full cache in which, between calls, each pass is given the entries of the last to share."""
    config = dataclasses.replace(SMALL, recurrences=5)
    model = random_model(config)
    shared = [max(j for j in range(5) if j % budget == i % budget) for i in range(5)]
    cache, start, outputs = model.empty_cache(PADDING, WIDTH, 5), 0, []
    for length in CHUNKS:
        h, cache = extend(model, TOKENS[:, start : start + length], cache)
        outputs.append(h)
        start += length
        recurrent = jax.tree.map(lambda x: x[jnp.array(shared)], cache.stages.recurrent)
        cache = cache._replace(stages=cache.stages._replace(recurrent=recurrent))
    expected = jnp.concatenate(outputs, axis=1)
    got = cached_hidden(model, CHUNKS, budget)
    full = cached_hidden(model, CHUNKS, 5)
    for row, padding in enumerate(map(int, PADDING)):
        np.testing.assert_allclose(got[row, padding:], expected[row, padding:], atol=1e-5)
    np.testing.assert_array_equal(got[:, 3:5], full[:, 3:5], "the first chunk finds its own entries")
    assert jnp.abs(got[:, 5:] - full[:, 5:]).max() > 1e-3, "later ones do not"


def test_a_budget_keeps_that_many_passes_and_every_other_layer_once():
    model = random_model(dataclasses.replace(SMALL, recurrences=8, prelude_layers=3))
    stages = jax.eval_shape(lambda: model.empty_cache(PADDING, 20, 2)).stages
    per_layer = (3, 20, SMALL.kv_heads, SMALL.head_dim)
    assert stages.prelude.keys.shape == (3, *per_layer)
    assert stages.recurrent.values.shape == (2, SMALL.recurrent_layers, *per_layer)
    assert stages.coda.keys.shape == (1, *per_layer)
    half = dataclasses.replace(SMALL, compute_dtype="bfloat16")
    assert random_model(half).empty_cache(PADDING, 4, 1).stages.recurrent.keys.dtype == jnp.bfloat16


PROMPTS = ([5], [9, 60, 3, 3, 21], [1, 2, 3])


def naive_greedy(model, prompt, count):
    tokens, end = np.zeros((1, 16), np.int32), len(prompt)
    tokens[0, :end] = prompt
    for i in range(end, end + count):
        tokens[0, i] = forward(model, tokens)[0, i - 1].argmax()
    return list(tokens[0, end : end + count])


def test_greedy_generation_is_the_likeliest_token_each_time_for_every_prompt_of_a_batch():
    model = random_model(SMALL)
    got = generate(model, PROMPTS, Decoding(new_tokens=6))
    assert [list(new) for new in got] == [naive_greedy(model, prompt, 6) for prompt in PROMPTS]
    assert generate(model, [], Decoding()) == []


def test_generation_ends_before_the_stop_token():
    model = random_model(SMALL)
    free = generate(model, PROMPTS, Decoding(new_tokens=6))
    stop = int(free[1][2])
    stopped = generate(model, PROMPTS, Decoding(new_tokens=6), stop=stop)
    for new, all_new in zip(stopped, free, strict=True):
        before = list(all_new).index(stop) if stop in all_new else 6
        assert list(new) == list(all_new[:before])
    assert len(stopped[1]) <= 2


def test_a_seed_decides_what_is_drawn():
    model, how = random_model(SMALL), Decoding(new_tokens=12, temperature=1.0)
    first, again, other = (generate(model, PROMPTS, how, seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (np.array(first) != np.array(other)).any()
    narrow = generate(model, PROMPTS, dataclasses.replace(how, top_k=1))
    np.testing.assert_array_equal(narrow, generate(model, PROMPTS, Decoding(new_tokens=12)))


LOGITS = np.log([0.05, 0.4, 0.1, 0.3, 0.15])


@pytest.mark.parametrize(
    ("temperature", "top_k", "expected"),
    [
        (1.0, None, [0.05, 0.4, 0.1, 0.3, 0.15]),
        (0.5, None, np.square([0.05, 0.4, 0.1, 0.3, 0.15]) / 0.285),
        (1.0, 2, [0, 0.4 / 0.7, 0, 0.3 / 0.7, 0]),
        (0.0, None, [0, 1, 0, 0, 0]),
        (0.0, 3, [0, 1, 0, 0, 0]),
    ],
)
def test_samples_have_the_frequencies_asked_for(temperature, top_k, expected):
    drawn = sample(jnp.tile(LOGITS, (20_000, 1)), jax.random.key(0), temperature, top_k)
    frequencies = np.bincount(drawn, minlength=5) / len(drawn)
    np.testing.assert_allclose(frequencies, expected, atol=0.015)  # four standard errors
    assert not frequencies[np.equal(expected, 0)].any()


@pytest.mark.parametrize(
    ("prompts", "how", "message"),
    [
        (([1], []), {}, "prompt 2 is empty"),
        (([1, 70],), {}, "1 to 70; the vocabulary has 70"),
        (([-1],), {}, "-1"),
        (PROMPTS, {"kv_budget": 4}, "kv_budget is 4; 3 recurrences"),
        (PROMPTS, {"kv_budget": 0}, "kv_budget is 0"),
        (PROMPTS, {"top_k": 71}, "top_k is 71"),
        (PROMPTS, {"temperature": -1.0}, "temperature is -1.0"),
        (PROMPTS, {"temperature": float("nan")}, "temperature is nan"),
        (PROMPTS, {"new_tokens": 0}, "new_tokens is 0"),
    ],
)
def test_what_cannot_be_generated_is_refused(prompts, how, message):
    with pytest.raises(UserError, match=message):
        generate(random_model(SMALL), prompts, Decoding(**how))
