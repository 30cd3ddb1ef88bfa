"""Packing: full rows that begin with BOS, every token accounted for, and the published rule exactly."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from looped.data.packing import Packer

BOS = 2**32 - 1
lengths = st.lists(st.integers(0, 60), max_size=80)


def documents_of(sizes):
    """Documents [n] whose tokens are all different, so that each can be traced to its place."""
    starts = np.cumsum([0, *sizes])
    return [np.arange(a, a + n, dtype=np.uint32) for a, n in zip(starts, sizes, strict=False)]


def pack(sizes, row_length, buffer_size=5, long_documents="cut"):
    packer = Packer(row_length, BOS, np.dtype(np.uint32), buffer_size, long_documents)
    return list(packer.rows(documents_of(sizes))), packer.statistics


def pack_by_the_rule(documents, row_length, buffer_size):
    """The published rule by linear search, as its text says: best fit, or else crop the shortest."""
    waiting, buffer, rows = [[BOS, *d.tolist()] for d in documents if len(d)], [], []
    while True:
        row = []
        while len(row) < row_length:
            while len(buffer) < buffer_size and waiting:
                buffer.append(waiting.pop(0))
            if not buffer:
                return rows
            fitting = [d for d in buffer if len(d) <= row_length - len(row)]
            chosen = max(fitting, key=len) if fitting else min(buffer, key=len)  # the first of equals
            buffer.remove(chosen)
            row += chosen[: row_length - len(row)]
        rows.append(row)


@given(lengths, st.integers(2, 20), st.integers(1, 12))
@settings(max_examples=200, deadline=None)
def test_equals_the_published_rule_by_linear_search(sizes, row_length, buffer_size):
    rows, _ = pack(sizes, row_length, buffer_size, "crop")
    assert [row.tolist() for row in rows] == pack_by_the_rule(documents_of(sizes), row_length, buffer_size)


@given(lengths, st.integers(2, 20), st.integers(1, 12), st.sampled_from(["cut", "crop"]))
@settings(max_examples=200, deadline=None)
def test_every_token_is_in_the_rows_or_counted_as_cropped(sizes, row_length, buffer_size, long_documents):
    rows, stats = pack(sizes, row_length, buffer_size, long_documents)
    tokens = np.concatenate([*rows, []])
    placed = tokens[tokens != BOS]
    assert len(set(placed)) == len(placed), "a token was placed twice"
    assert stats.document_tokens == sum(sizes)
    assert stats.placed_tokens == len(placed)
    assert stats.cropped_tokens == sum(sizes) - len(placed)
    assert stats.bos_tokens == len(tokens) - len(placed)
    assert (stats.documents, stats.empty_documents, stats.rows) == (len(sizes), sizes.count(0), len(rows))
    assert all(len(row) == row_length and row[0] == BOS and row.dtype == np.uint32 for row in rows)


@given(lengths, st.integers(3, 20))
@settings(deadline=None)
def test_a_piece_keeps_its_documents_order(sizes, row_length):
    rows, _ = pack(sizes, row_length)
    for row in rows:
        for piece in np.split(row, np.flatnonzero(row == BOS)):
            assert (np.diff(piece[1:].astype(int)) == 1).all()


def test_long_documents_are_cut_into_full_rows_or_cropped_to_one():
    rows, stats = pack([100], row_length=11)
    assert [row[1:].tolist() for row in rows] == [list(range(i, i + 10)) for i in range(0, 100, 10)]
    assert stats.cropped_tokens == 0
    rows, stats = pack([100], row_length=11, long_documents="crop")
    assert [row[1:].tolist() for row in rows] == [list(range(10))]
    assert stats.cropped_tokens == 90


def test_nothing_gives_no_rows():
    assert pack([], 8)[0] == []
    rows, stats = pack([0, 0], 8)
    assert rows == []
    assert stats.empty_documents == 2


@given(lengths, st.integers(0, 80), st.integers(2, 20), st.integers(1, 12), st.sampled_from(["cut", "crop"]))
@settings(max_examples=100, deadline=None)
def test_going_on_from_a_saved_state_gives_the_same_rows(
    sizes, stop, row_length, buffer_size, long_documents
):
    def packer():
        return Packer(row_length, BOS, np.dtype(np.uint32), buffer_size, long_documents)

    documents, first, second = documents_of(sizes), packer(), packer()
    rows = [row for document in documents[:stop] for row in first.add(document)]
    second.restore(first.state())
    rows += second.rows(documents[stop:])
    whole, statistics = pack(sizes, row_length, buffer_size, long_documents)
    np.testing.assert_array_equal(rows, whole)
    assert second.statistics == statistics


def test_every_token_counts_with_an_empty_document_and_one_of_more_than_ten_rows():
    for long_documents in ("cut", "crop"):
        rows, stats = pack([0, 250, 3, 0, 17, 5], 20, 2, long_documents)
        placed = sum(int((row != BOS).sum()) for row in rows)
        assert stats.placed_tokens == placed
        assert placed + stats.cropped_tokens == stats.document_tokens == 275
        assert stats.empty_documents == 2


def test_equal_input_gives_equal_rows():
    sizes = np.random.default_rng(0).integers(0, 300, 200).tolist()
    first, second = pack(sizes, 33), pack(sizes, 33)
    np.testing.assert_array_equal(first[0], second[0])
    assert dataclasses.astuple(first[1]) == dataclasses.astuple(second[1])


@pytest.mark.parametrize("buffer_size", [100, 1000])
def test_little_is_cropped_when_the_buffer_offers_every_length(buffer_size):
    sizes = np.random.default_rng(0).integers(1, 2000, 2000).tolist()
    _, stats = pack(sizes, 129, buffer_size)
    assert stats.cropped_tokens < 0.02 * stats.document_tokens
