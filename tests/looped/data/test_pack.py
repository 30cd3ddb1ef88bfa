"""Packing a corpus: the same bytes whatever the workers and stops, everything counted, bad input named."""

import dataclasses
import errno
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds
from vocabularies import TEXT, json_tokenizer

from looped.data import shards
from looped.data.builder import PackedRows, PackPlan
from looped.data.loader import PackedData
from looped.data.metadata import STATE_FILE
from looped.data.pack import pack
from looped.data.shards import alone_in
from looped.data.sources import SourceOptions, make_source
from looped.data.tokenizers import ByteTokenizer, get_tokenizer
from looped.errors import UserError

SHARD = 5_000
"""Bytes of tokens a shard, so that the small corpus has several."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Three files of JSON Lines, 360 documents, and a tokenizer.json."""
    folder = tmp_path_factory.mktemp("corpus")
    words, rng = [word for line in TEXT for word in line.split()], random.Random(0)
    for part in range(3):
        lines = [" ".join(rng.choices(words, k=1 + int(rng.lognormvariate(3.5, 1)))) for _ in range(120)]
        (folder / f"part-{part}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in lines))
    (folder / "tokenizer.json").write_bytes(json_tokenizer())
    return folder


@pytest.fixture
def plan(corpus):
    source = make_source(str(corpus / "*.jsonl"), SourceOptions(validation_files=1))
    return PackPlan(source, get_tokenizer(str(corpus / "tokenizer.json")), 64, 50, "crop")


@pytest.fixture(scope="module")
def packed(corpus, tmp_path_factory):
    """`plan`, packed without a stop: its folder."""
    source = make_source(str(corpus / "*.jsonl"), SourceOptions(validation_files=1))
    plan = PackPlan(source, get_tokenizer(str(corpus / "tokenizer.json")), 64, 50, "crop")
    folder = tmp_path_factory.mktemp("packed")
    pack(plan, folder, shard_bytes=SHARD)
    return folder


def content(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def test_the_data_set_has_shards_statistics_and_its_tokenizer(packed, plan):
    data = PackedData(packed)
    assert len(list(packed.glob("*train*"))) > 2
    train = data.metadata.train
    counted = train.statistics
    assert counted.documents == 240
    assert counted.placed_tokens + counted.cropped_tokens == counted.document_tokens
    assert train.row_fill == 1.0
    assert train.cropped_share == counted.cropped_tokens / counted.document_tokens > 0
    assert data.tokenizer.fingerprint == plan.tokenizer.fingerprint == data.tokenizer_fingerprint
    assert data.hash != dataclasses.replace(data.metadata, train=data.metadata.validation).hash
    data.check_rows()


def test_tfds_reads_it_without_tensorflow(packed):
    data = PackedData(packed)
    for split, rows in [("train", data.train_rows), ("validation", data.validation_rows)]:
        source = tfds.builder_from_directory(packed).as_data_source(split)
        assert len(source) == rows
        assert source[rows - 1]["tokens"].shape == (65,)
        assert source[0]["tokens"].dtype == np.uint16
    assert "tensorflow" not in sys.modules


def test_tfds_preparing_by_itself_gives_the_same_rows(packed, plan, tmp_path):
    tfds.disable_progress_bar()
    builder = PackedRows(plan, tmp_path)
    builder.download_and_prepare()
    own = PackedData(packed)._rows("train").take(range(5))
    source = builder.as_data_source("train")
    np.testing.assert_array_equal(np.stack([source[i]["tokens"] for i in range(5)]), own)
    assert len(source) == PackedData(packed).train_rows


@pytest.mark.parametrize(
    "workers", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_bytes_do_not_depend_on_the_number_of_workers(packed, plan, tmp_path, workers, monkeypatch):
    monkeypatch.setattr("looped.data.parallel.CHUNK_DOCUMENTS", 7)
    pack(plan, tmp_path / "out", workers, shard_bytes=SHARD)
    assert content(tmp_path / "out") == content(packed)


class StopError(Exception):
    pass


def test_stopped_at_every_shard_it_goes_on_to_the_same_bytes(packed, plan, tmp_path, monkeypatch):
    """Each call is stopped right before, within or right after giving a shard its name."""
    close, stops = shards.ShardWriter.close, 0
    for moment in ("before", "unfinished", "after"):

        def closing(writer, moment=moment):
            if moment == "before":
                writer._writer.close()
                raise StopError
            size = close(writer)
            if moment == "after":
                raise StopError
            return size

        def saving(state, directory, moment=moment, save=shards.PackState.save):
            save(state, directory)
            if moment == "unfinished" and state.shard_rows:
                raise StopError

        folder = tmp_path / moment
        with monkeypatch.context() as patch:
            patch.setattr(shards.ShardWriter, "close", closing)
            patch.setattr(shards.PackState, "save", saving)
            for _ in range(12):
                try:
                    pack(plan, folder, shard_bytes=SHARD)
                    break
                except StopError:
                    stops += 1
                with pytest.raises(UserError, match="packing is not finished; run the same"):
                    PackedData(folder)
        pack(plan, folder, shard_bytes=SHARD)
        assert content(folder) == content(packed), moment
    assert stops > 15


KILLED = """
import sys
from looped.data.pack import pack
from looped.data.builder import PackPlan
from looped.data.sources import SourceOptions, make_source
from looped.data.tokenizers import get_tokenizer

if __name__ == "__main__":
    corpus, folder, workers = sys.argv[1:]
    source = make_source(corpus + "/*.jsonl", SourceOptions(validation_files=1))
    plan = PackPlan(source, get_tokenizer(corpus + "/tokenizer.json"), 64, 50, "crop")
    pack(plan, folder, int(workers), shard_bytes=5_000)
"""


def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(packed, plan, corpus, tmp_path):
    script, folder = tmp_path / "killed.py", tmp_path / "out"
    script.write_text(KILLED)
    root = Path(__file__).parents[3]
    process = subprocess.Popen(
        [sys.executable, str(script), str(corpus), str(folder), "1"],
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    while not list(folder.glob("*train*0001")) and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    if process.returncode == -signal.SIGKILL:  # else it was done before this looked
        assert (folder / STATE_FILE).exists()
    pack(plan, folder, shard_bytes=SHARD)
    assert content(folder) == content(packed)


def test_a_finished_pack_is_left_as_it_is(packed, plan):
    before = {path: path.stat().st_mtime_ns for path in packed.iterdir()}
    assert pack(plan, packed, shard_bytes=SHARD).key == plan.key
    assert {path: path.stat().st_mtime_ns for path in packed.iterdir()} == before


def test_two_packs_into_one_folder(packed, plan, tmp_path):
    with (
        alone_in(packed),
        pytest.raises(
            UserError, match=r"another process is packing into this folder; wait for it, or choose"
        ),
    ):
        pack(plan, packed)
    other = dataclasses.replace(plan, sequence_length=32)
    with pytest.raises(UserError, match=r"holds another finished data set; choose another folder"):
        pack(other, packed)
    shards.PackState(other.key, other.decides, shard_rows=[3], shard_hashes=["0"]).save(tmp_path)
    with pytest.raises(UserError, match=r"unfinished pack of another sequence_length; choose another folder"):
        pack(plan, tmp_path)


def test_a_first_try_that_finished_nothing_does_not_hold_the_folder(packed, plan, tmp_path):
    other = dataclasses.replace(plan, sequence_length=32)
    shards.PackState(other.key, other.decides).save(tmp_path)
    assert pack(plan, tmp_path, shard_bytes=SHARD).hash == PackedData(packed).hash


def test_a_folder_that_holds_something_else(plan, tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UserError, match=r"is not empty \(thesis\.tex\) and no pack; choose another folder"):
        pack(plan, tmp_path)
    with pytest.raises(UserError, match=r"output is gs://bucket/x; .* local folder"):
        pack(plan, "gs://bucket/x")


class Full:
    """A writer whose disk is full after `rows` rows."""

    def __init__(self, writer, rows):
        self.writer, self.rows = writer, rows

    def write(self, record):
        self.rows -= 1
        if self.rows < 0:
            raise RuntimeError(os.strerror(errno.ENOSPC))
        self.writer.write(record)

    def close(self):
        self.writer.close()


def test_a_full_disk_names_the_file_and_finished_shards_stay(packed, plan, tmp_path, monkeypatch):
    begin, begun = shards.ShardWriter.__init__, []

    def on_full_disk(writer, path, features):
        begin(writer, path, features)
        begun.append(path)
        if len(begun) == 3:
            writer._writer = Full(writer._writer, 10)

    with monkeypatch.context() as patch:
        patch.setattr(shards.ShardWriter, "__init__", on_full_disk)
        with pytest.raises(OSError, match=r"No space left .*train.array_record-00002"):
            pack(plan, tmp_path, shard_bytes=SHARD)
    kept = {path.name for path in tmp_path.glob("*array_record-*") if "unfinished" not in path.name}
    assert kept == {"packed_rows-train.array_record-00000", "packed_rows-train.array_record-00001"}
    pack(plan, tmp_path, shard_bytes=SHARD)
    assert content(tmp_path) == content(packed)


def test_a_really_full_device_is_an_error(plan, monkeypatch):
    monkeypatch.setattr(shards, "_UNFINISHED", "")
    writer = shards.ShardWriter(Path("/dev/full"), PackedRows(plan, "/nonexistent").info.features)

    def fill():
        for row in np.random.default_rng(0).integers(0, 400, (4000, 65), np.uint16):
            writer.write(row)
        writer.close()

    with pytest.raises(OSError, match=r"No space left on device.*'/dev/full'"):
        fill()


def test_a_finished_shard_that_is_damaged_is_named_when_packing_goes_on(plan, tmp_path, monkeypatch):
    close = shards.ShardWriter.close

    def stop_at_third(writer):
        if writer.path.name.endswith("00002"):
            raise StopError
        return close(writer)

    with monkeypatch.context() as patch:
        patch.setattr(shards.ShardWriter, "close", stop_at_third)
        with pytest.raises(StopError):
            pack(plan, tmp_path, shard_bytes=SHARD)
    damage(tmp_path / "packed_rows-train.array_record-00001", "flipped")
    with pytest.raises(UserError, match=r"array_record-00001 cannot be read .*; delete .* to pack again"):
        pack(plan, tmp_path, shard_bytes=SHARD)


def damage(path, how):
    data = bytearray(path.read_bytes())
    if how == "flipped":
        data[300] ^= 1
    elif how == "padding":
        data[len(data) // 2 - 1] ^= 1
    else:
        del data[len(data) // 2 :]
    path.write_bytes(data)


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("how", ["flipped", "padding", "truncated"])
def test_a_damaged_shard_is_named(packed, tmp_path, how, in_memory, monkeypatch):
    if not in_memory:
        monkeypatch.setattr("looped.data.rows.IN_MEMORY_BYTES", 0)
    for path in packed.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    damage(tmp_path / "packed_rows-train.array_record-00001", how)
    data = PackedData(tmp_path)
    with pytest.raises(
        UserError, match=r"train rows cannot be read \(packed_rows-train\.array_record-00001: .*restore"
    ):
        data.check_rows()
    if in_memory or how != "padding":  # else a byte that holds nothing, found by the check alone
        with pytest.raises(UserError, match=r"array_record-00001"):
            PackedData(tmp_path).train_batch(0, 0, data.train_rows)


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        (
            ["", "x" * 200],
            r"a\.jsonl, byte 0: a document of no tokens; remove it, or .*--empty-documents skip",
        ),
        ([], r"the train split of '.*' is empty: it has no documents"),
        (["short"], r"sequence_length is 64; the train text of '.*' has 5 tokens, not a full row"),
    ],
)
def test_bad_documents(tmp_path, documents, message):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in documents))
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "y" * 200}) + "\n")
    source = make_source(str(tmp_path / "*.jsonl"), SourceOptions(validation_files=1))
    with pytest.raises(UserError, match=message):
        pack(PackPlan(source, ByteTokenizer(), 64), tmp_path / "out")


def test_empty_documents_may_be_skipped_and_are_counted(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": null}\n' + json.dumps({"text": "x" * 200}) + "\n")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "y" * 200}) + "\n")
    source = make_source(str(tmp_path / "*.jsonl"), SourceOptions(validation_files=1))
    metadata = pack(PackPlan(source, ByteTokenizer(), 64, empty_documents="skip"), tmp_path / "out")
    assert metadata.train.statistics.empty_documents == 1
    assert metadata.train.statistics.documents == 2


def test_progress_says_how_fast_and_how_long(plan, tmp_path, monkeypatch):
    monkeypatch.setattr("looped.data.parallel.CHUNK_DOCUMENTS", 7)
    ticks = iter(range(10_000))
    monkeypatch.setattr("looped.data.pack.time.monotonic", lambda: float(next(ticks)))
    seen = []
    pack(plan, tmp_path, progress=seen.append, shard_bytes=SHARD)
    train = [at for at in seen if at.split == "train"]
    assert [at.documents for at in train] == sorted(at.documents for at in train)
    assert train[-1].documents == 240
    assert all(0 < a.fraction < b.fraction <= 1 for a, b in itertools.pairwise(train))
    middle = train[len(train) // 2]
    assert middle.seconds_left == pytest.approx(middle.seconds * (1 - middle.fraction) / middle.fraction)
