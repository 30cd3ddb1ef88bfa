"""Arrays, packed shards and tables of others' making: sizes beyond reason and wrong kinds are one sentence."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fit import reading
from looped.convert import import_published
from looped.data import published
from looped.data.loader import PackedData
from looped.errors import UserError
from looped.tensors import read_arrays, write_arrays


def safetensors(path, header, data=b"", size=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if size is None else size).to_bytes(8, "little") + text + data)
    return path


ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("header", "size"),
    [
        ({"a": ENTRY}, 2**63),
        ({"a": ENTRY}, 2**64 - 1),
        ({"a": ENTRY | {"shape": [0, 10**30]}}, None),
        ({"a": ENTRY | {"shape": [10**400, 0], "data_offsets": [0, 0]}}, None),
        ({"a": ENTRY | {"shape": [0, 10**30], "data_offsets": [0, 0]}}, None),
        ({"a": ENTRY | {"shape": [-1, -1]}}, None),
        ({"a": ENTRY | {"shape": [1e30]}}, None),
        ({"a": ENTRY | {"shape": "1"}}, None),
        ({"a": ENTRY | {"data_offsets": [-4, 0]}}, None),
        ({"a": ENTRY | {"data_offsets": [0, 10**30]}}, None),
        ({"a": ENTRY, "b": ENTRY}, None),
        ({"a": ENTRY | {"dtype": "O"}}, None),
        ({"a": ENTRY | {"dtype": ["F32"]}}, None),
        ({"a": 3}, None),
        ([1], None),
        (b'{"a":' * 100_000, None),
        (b"[" * 100_000, None),
        (b"\xff\xfe", None),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_header_that_cannot_be_is_one_sentence(tmp_path, header, size):
    path = safetensors(tmp_path / "a.safetensors", header, b"\0\0\0\0", size)
    with pytest.raises(UserError, match=r"damaged, or no \.safetensors file"):
        read_arrays(path)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_arrays_with_changed_bytes_are_read_or_refused(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("arrays") / "a.safetensors"
    write_arrays(path, {"a": np.zeros((2, 3), np.float32), "b": np.ones(4, np.float16)})
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        arrays = read_arrays(path)
    except UserError:
        return
    assert sum(array.nbytes for array in arrays.values()) == 32


@pytest.mark.parametrize(
    "meta",
    [{"model_config": [1]}, {"model_config": None}, {"model_config": 7}, {"model_config": "x"}, {}, {"step": 1}],
    ids=str,
)  # fmt: skip
def test_a_published_configuration_of_another_kind_is_one_sentence(tmp_path, meta):
    (tmp_path / "a.json").write_text(json.dumps(meta))
    write_arrays(tmp_path / "a.safetensors", {"a": np.zeros(1, np.float32)})
    with pytest.raises(UserError):
        import_published(tmp_path / "a.safetensors", tmp_path / "a.json", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.fixture
def rows(tmp_path):
    """Makes the published packed data with these rows for training; returns its folder."""

    def make(tokens, **options):
        for split, values in (("train", tokens), ("val", [[1, 2, 3]])):
            (tmp_path / f"meta_{split}.json").write_text('{"vocab_size": 10}')
            pq.write_table(pa.table({"tokens": values}), tmp_path / f"{split}_0.parquet", **options)
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [([[], []], "rows without tokens"), ([None, [1, 2, 3]], "rows without tokens"), ([7], "cannot be read"),
     ([[1, 2, 99]], "ids outside 0 to 9"), ([[1, 2, -3]], "ids outside"), ([[1.5, 2.0, 3.0]], "ids outside"),
     ([["a"]], "ids outside")],
)  # fmt: skip
def test_shards_of_other_things_are_one_sentence(rows, tokens, expected):
    with pytest.raises(UserError, match=expected):
        PackedData(rows(tokens))


def test_a_row_group_that_would_fill_the_memory_is_not_decoded(rows, monkeypatch):
    monkeypatch.setattr(published, "_GROUP_TOKENS", 299)
    with pytest.raises(UserError, match="a row group of 300 tokens, at most 299 are read"):
        PackedData(rows([[1, 2, 3]] * 100))


def test_empty_row_groups_are_passed_over(rows, tmp_path):
    folder = rows([[1, 2, 3]] * 4)
    schema = pa.schema({"tokens": pa.list_(pa.int64())})
    with pq.ParquetWriter(folder / "train_0.parquet", schema) as writer:
        writer.write_table(pa.table({"tokens": []}, schema))
        writer.write_table(pa.table({"tokens": [[1, 2, 3]] * 4}, schema))
    assert PackedData(folder).train_rows == 4


def test_a_losses_table_that_expands_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MAX_BYTES", 100_000)
    table = pa.table({"loss": [1.0] * 2000, "note": ["x" * 1000] * 2000})
    pq.write_table(table, tmp_path / "losses.parquet", compression="zstd")
    assert (tmp_path / "losses.parquet").stat().st_size < 100_000 < table.nbytes
    with pytest.raises(UserError, match="a losses table is small"):
        list(reading.read_source(tmp_path / "losses.parquet"))
    (tmp_path / "losses.csv").write_text("loss,note\n" + "1,x\n" * 50_000)
    with pytest.raises(UserError, match="a losses table is small"):
        list(reading.read_source(tmp_path / "losses.csv"))


FIELDS = {
    "sequence_len": 8, "vocab_size": 64, "n_head": 1, "n_embd": 16, "n_prelude": 1, "n_recur_block": 1, "n_coda": 1,
    "num_recur": 2, "input_injection": "additive",
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [("step", -1), ("step", 2**31), ("step", 1.5), ("step", "9"), ("step", None), ("step", True), ("tokens", "many"),
     ("tokens", 10**30), ("tokens", [1]), ("val_loss", "low"), ("val_loss", {}), ("val_loss", -1.0)],
)  # fmt: skip
def test_a_published_number_of_another_kind_is_named(tmp_path, field, value):
    (tmp_path / "a.json").write_text(json.dumps({"model_config": FIELDS, field: value}))
    write_arrays(tmp_path / "a.safetensors", {"a": np.zeros(1, np.float32)})
    with pytest.raises(UserError, match=f"meta {field} is .*; it must be a number from 0 to"):
        import_published(tmp_path / "a.safetensors", tmp_path / "a.json", tmp_path / "run")
