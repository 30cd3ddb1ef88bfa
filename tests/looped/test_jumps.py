"""A loss that jumps is noted; noise and a steady fall are not; a resumed run notes the same."""

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from looped.jumps import KEPT, WINDOW, JumpWatch


def seen(losses, watch=None, start=0):
    watch = watch or JumpWatch()
    for step, loss in enumerate(losses, start + 1):
        watch.see(step, loss)
    return watch


def falling(steps, seed=0, noise=0.02):
    return 2 + 3 * np.exp(-np.arange(steps) / 50) + noise * np.random.default_rng(seed).normal(size=steps)


def test_a_jump_is_noted_and_nothing_else():
    losses = falling(300)
    assert seen(losses).jumps == []
    losses[200] += 1.5
    assert seen(losses).jumps == [201]


def test_small_steps_of_a_quiet_curve_are_no_jumps():
    losses = [3.0] * (2 * WINDOW)
    losses[-1] = 3.09
    assert seen(losses).jumps == []
    losses[-1] = 3.11
    assert seen(losses).jumps == [2 * WINDOW]


@given(st.integers(1, 299), st.lists(st.integers(0, 299), max_size=5))
def test_a_resumed_run_notes_the_same_jumps(stop, spikes):
    losses = falling(300)
    losses[spikes] += 2
    first = seen(losses[:stop])
    notes = json.loads(json.dumps(first.notes()))
    assert seen(losses[stop:], JumpWatch(notes), stop).notes() == seen(losses).notes()


def test_a_step_seen_again_changes_nothing():
    watch = seen(falling(100))
    before = watch.notes()
    watch.see(100, 1e9)
    assert watch.notes() == before


def test_their_number_is_bounded():
    losses = np.where(np.arange(200 * (WINDOW + 1)) % (WINDOW + 1) == WINDOW, 9.0, 1.0)
    assert 0 < len(seen(losses).jumps) <= KEPT
