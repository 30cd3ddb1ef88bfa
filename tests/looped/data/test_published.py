"""The published packed data: read as it is, order kept, and damage named."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from looped.data.loader import IGNORED, PackedData, prepare
from looped.errors import UserError

ROWS, LENGTH = 23, 17


def rows_of(first, count, vocabulary=32_001):
    rows = np.random.default_rng(first).integers(2, vocabulary, (count, LENGTH))
    rows[:, 0] = 1
    return rows


def write(path, rows, **options):
    pq.write_table(pa.table({"tokens": [row.tolist() for row in rows]}), path, row_group_size=5, **options)


@pytest.fixture
def folder(tmp_path):
    """Two shards for training, 23 and 8 rows, and one for validation, 10 rows."""
    write(tmp_path / "train_00000.parquet", rows_of(0, ROWS))
    write(tmp_path / "train_00001.parquet", rows_of(1, 8))
    write(tmp_path / "val_00000.parquet", rows_of(2, 10))
    (tmp_path / "meta_train.json").write_text(json.dumps({"num_rows": 31}))
    (tmp_path / "meta_val.json").write_text("{}")
    return tmp_path


def test_order_of_shards_and_rows_is_kept_epoch_after_epoch(folder):
    data = prepare(str(folder), LENGTH - 1, vocab_size=32_001)
    stored = np.concatenate([rows_of(0, ROWS), rows_of(1, 8)])
    assert (data.train_rows, data.validation_rows, data.vocab_size) == (31, 10, 32_001)
    for seed in (0, 1):
        batches = data.train_batches(seed, 0, 4, workers=0)
        read = np.concatenate([next(batches) for _ in range(7)])
        np.testing.assert_array_equal(read, stored[:28])
    with pytest.warns(UserWarning, match="second epoch"):
        again = list(zip(range(3), data.train_batches(0, 7, 4), strict=False))
    np.testing.assert_array_equal(again[0][1], np.concatenate([stored[28:], stored[:1]]))
    batches = list(data.validation_batches(100, 4))
    inputs, targets = (np.concatenate(part) for part in zip(*batches, strict=True))
    np.testing.assert_array_equal(inputs[:10], rows_of(2, 10)[:, :-1])
    np.testing.assert_array_equal(targets[:10], rows_of(2, 10)[:, 1:])
    assert (targets[10:] == IGNORED).all()


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.uint16()), pa.large_list(pa.int64()), pa.list_(pa.int32(), LENGTH)]
)
def test_any_kind_of_list_reads(folder, kind):
    rows = rows_of(0, 12)
    table = pa.table({"tokens": pa.array([row.tolist() for row in rows], kind)})
    pq.write_table(table, folder / "train_00000.parquet", row_group_size=5)
    data = PackedData(folder)
    np.testing.assert_array_equal(data.train_batch(0, 0, 12), rows)
    assert data._rows("train").dtype == np.uint16


def test_the_hash_follows_the_shards(folder):
    first = PackedData(folder).hash
    assert PackedData(folder).hash == first
    write(folder / "train_00001.parquet", rows_of(7, 8))
    assert PackedData(folder).hash != first


def test_model_must_fit(folder):
    with pytest.raises(UserError, match=r"sequence_length is 32; .* packed for 16"):
        prepare(str(folder), 32)
    with pytest.raises(UserError, match=r"vocab_size is 257; .* has 32001 ids"):
        prepare(str(folder), LENGTH - 1, vocab_size=257)
    with pytest.raises(UserError, match=r"comes without a tokenizer; put its tokenizer\.json"):
        _ = PackedData(folder).tokenizer


def flip(path, where):
    content = bytearray(path.read_bytes())
    content[where] ^= 1
    path.write_bytes(content)


def test_bad_shards_are_named(folder):
    shard = folder / "train_00001.parquet"
    write(shard, rows_of(1, 8, 40_000))
    with pytest.raises(
        UserError, match=r"train_00001\.parquet: the shard cannot be read \(ids outside 0 to 32000\)"
    ):
        PackedData(folder).train_batch(0, 0, 31)
    pq.write_table(pa.table({"tokens": [[1] * LENGTH, [1] * 3]}), shard)
    with pytest.raises(UserError, match=r"train_00001\.parquet: .*a row of 3 tokens among rows of 17"):
        PackedData(folder).train_batch(0, 0, 25)
    pq.write_table(pa.table({"ids": [[1]]}), shard)
    with pytest.raises(UserError, match=r"train_00001\.parquet: no column 'tokens' but 'ids'"):
        PackedData(folder)
    write(shard, rows_of(1, 8), write_page_checksum=True, compression="none", use_dictionary=False)
    flip(shard, 200)
    with pytest.raises(UserError, match=r"train_00001\.parquet: the shard cannot be read .*fetch it again"):
        PackedData(folder).train_batch(0, 0, 31)
    shard.write_bytes(shard.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"train_00001\.parquet: the shard cannot be read .*fetch it again"):
        PackedData(folder)


def test_parts_that_are_missing(folder):
    write(folder / "val_00000.parquet", rows_of(2, 0))
    with pytest.raises(UserError, match=r"val_00000\.parquet: the split is empty"):
        PackedData(folder)
    (folder / "val_00000.parquet").unlink()
    with pytest.raises(UserError, match=r"no Parquet shards of 'val' beside meta_val\.json"):
        PackedData(folder)
    (folder / "meta_val.json").unlink()
    with pytest.raises(UserError, match=r"no meta_validation\.json"):
        PackedData(folder)
    (folder / "meta_train.json").write_text("[")
    with pytest.raises(UserError, match=r"meta_train\.json: not JSON"):
        PackedData(folder)
