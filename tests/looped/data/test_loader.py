"""Batches: functions of (data, seed, step, batch size) alone, each row once an epoch, validation masked."""

import itertools

import numpy as np
import pytest
import tensorflow_datasets as tfds
from hypothesis import given, settings
from hypothesis import strategies as st

from looped.data import rows as rows_module
from looped.data.loader import IGNORED, PackedData
from looped.errors import UserError


def stored(data, split):
    """The split's rows as TFDS itself reads them."""
    source = tfds.builder_from_directory(data.directory).as_data_source(split)
    return np.stack([source[i]["tokens"] for i in range(len(source))])


def as_set(rows):
    return {row.tobytes() for row in np.asarray(rows, np.int32)}


def test_tfds_reads_the_rows_by_itself(data):
    rows = stored(data, "train")
    assert rows.dtype == np.uint16
    assert rows.shape == (data.train_rows, 33)
    np.testing.assert_array_equal(data._rows("train").take(range(data.train_rows)), rows)
    assert (rows[:, 0] == data.tokenizer.bos).all()


def test_rows_hold_the_text_of_their_split(data):
    for split, other in [("train", "validation"), ("validation", "train")]:
        text = "".join(data.tokenizer.decode(row) for row in stored(data, split))
        assert f"{split} 0: " in text
        assert f"{other} " not in text


@pytest.mark.parametrize("batch_size", [1, 7, 16])
def test_each_epoch_has_every_row_once_in_an_order_of_its_own(data, batch_size):
    steps = -(-2 * data.train_rows // batch_size)
    samples = np.concatenate([data.train_batch(3, step, batch_size) for step in range(steps)])
    first, second = samples[: data.train_rows], samples[data.train_rows : 2 * data.train_rows]
    assert as_set(first) == as_set(second) == as_set(stored(data, "train"))
    assert (first != second).any()


def test_batches_are_parts_of_one_sequence_whatever_their_size(data):
    by_4 = np.concatenate([data.train_batch(0, step, 4) for step in range(6)])
    np.testing.assert_array_equal(by_4, np.concatenate([data.train_batch(0, step, 8) for step in range(3)]))


def test_seed_chooses_the_order(data):
    assert (data.train_batch(0, 0, 16) != data.train_batch(1, 0, 16)).any()
    again = PackedData(data.directory)
    np.testing.assert_array_equal(data.train_batch(1, 5, 16), again.train_batch(1, 5, 16))


@given(processes=st.sampled_from([1, 2, 4, 8]), seed=st.integers(0, 2**31), step=st.integers(0, 10**9))
@settings(max_examples=30, deadline=None)
def test_processes_parts_make_the_whole_batch(data, processes, seed, step):
    share = 8 // processes
    parts = [data.train_batch(seed, step, 8, slice(p * share, (p + 1) * share)) for p in range(processes)]
    whole = data.train_batch(seed, step, 8)
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    assert whole.dtype == np.int32
    assert whole.shape == (8, 33)


@pytest.mark.parametrize("start", [0, 1, 57])
def test_the_iterator_gives_the_same_batches_from_any_step(data, start):
    for step, batch in zip(range(start, start + 30), data.train_batches(2, start, 8), strict=False):
        np.testing.assert_array_equal(batch, data.train_batch(2, step, 8))


@pytest.mark.parametrize("sequences", [1, 8, 20, 10**6])
def test_validation_is_a_fixed_set_with_its_last_batch_masked(data, sequences):
    batches = list(data.validation_batches(sequences, 8))
    count = min(sequences, data.validation_rows)
    assert all(x.shape == y.shape == (8, 32) and x.dtype == y.dtype == np.int32 for x, y in batches)
    inputs, targets = (np.concatenate(part) for part in zip(*batches, strict=True))
    held = np.concatenate([inputs, targets[:, -1:]], 1)[:count]
    np.testing.assert_array_equal(held[:, 1:], targets[:count])
    assert (targets[count:] == IGNORED).all()
    assert (targets[:count] != IGNORED).all()
    assert len(as_set(held)) == count
    assert as_set(held) <= as_set(stored(data, "validation"))
    larger = np.concatenate([x for x, _ in data.validation_batches(10**6, 4)])
    np.testing.assert_array_equal(held[:, :-1], larger[:count])


def test_validation_parts_make_the_whole_batch(data):
    whole = list(data.validation_batches(20, 8))
    halves = [list(data.validation_batches(20, 8, part)) for part in (slice(0, 4), slice(4, 8))]
    for i, j in itertools.product(range(len(whole)), range(2)):
        np.testing.assert_array_equal(np.concatenate([h[i][j] for h in halves]), whole[i][j])


def test_rows_too_many_for_memory_are_read_as_needed(data, monkeypatch):
    monkeypatch.setattr(rows_module, "IN_MEMORY_BYTES", 0)
    on_disk = PackedData(data.directory)
    np.testing.assert_array_equal(on_disk.train_batch(0, 3, 8), data.train_batch(0, 3, 8))
    assert on_disk._rows("train")._memory is None


def test_epochs(data):
    assert data.epochs(steps=data.train_rows, batch_size=2) == 2.0


def test_model_must_fit(data):
    data.check_model(257, 32)
    with pytest.raises(UserError, match=r"vocab_size is 256; .*'bytes' has 257 ids"):
        data.check_model(256, 32)
    with pytest.raises(UserError, match=r"sequence_length is 64; .* packed for 32"):
        data.check_model(257, 64)
