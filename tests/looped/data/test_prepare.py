"""Preparing: once, whole or not at all, the same bytes each time, and clear words where it goes wrong."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from looped.data import builder, loader, pack
from looped.data.loader import PackedData, prepare
from looped.errors import UserError


def folders(root):
    return sorted(p.name for p in Path(root).iterdir() if p.is_dir())


def shards(data):
    return {p.name: p.read_bytes() for p in sorted(Path(data.directory).glob("*array_record*"))}


def test_prepared_once_and_opened_afterwards(small, tmp_path, capfd):
    first = prepare("small", 32)
    made = small.drawn
    second = prepare("small", 32)
    assert small.drawn == made == 2
    assert (first.hash, first.directory) == (second.hash, second.directory)
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 2
    assert f"{first.train_rows} + {first.validation_rows} rows" in err
    assert folders(tmp_path / "cache") == [first.directory.name]


def test_same_text_gives_the_same_bytes_elsewhere(small, tmp_path, monkeypatch):
    first = prepare("small", 32)
    monkeypatch.setenv("LOOPED_DATA", str(tmp_path / "elsewhere"))
    second = prepare("small", 32)
    assert first.directory != second.directory
    assert shards(first) == shards(second)
    assert first.metadata == second.metadata


def test_hashes_tell_text_and_rows_apart(small, monkeypatch):
    at_32, at_16 = prepare("small", 32), prepare("small", 16)
    assert at_32.corpus_hash == at_16.corpus_hash
    assert at_32.hash != at_16.hash
    original = small.documents
    monkeypatch.setattr(small, "description", lambda self: {"source": "small", "version": 2})
    monkeypatch.setattr(
        small, "documents", lambda self, split: (t.replace("a", "b") for t in original(self, split))
    )
    changed = prepare("small", 32)
    assert changed.directory != at_32.directory
    assert changed.corpus_hash != at_32.corpus_hash


def test_metadata_says_what_was_done(small):
    data = prepare("small", 32)
    written = json.loads((data.directory / "metadata.json").read_text())
    assert written["tokenizer"] == {
        "name": "bytes",
        "fingerprint": data.tokenizer.fingerprint,
        "vocab_size": 257,
        "bos": 256,
    }
    assert written["sequence_length"] == 32
    for split in ("train", "validation"):
        text = "".join(small().documents(split)).encode()
        counted = written[split]["statistics"]
        assert written[split]["text_bytes"] == len(text) == counted["document_tokens"]
        assert counted["placed_tokens"] + counted["cropped_tokens"] == len(text)


def test_a_folder_is_a_source_too(small):
    data = prepare("small", 32)
    assert prepare(str(data.directory), 32).hash == data.hash
    with pytest.raises(UserError, match=r"sequence_length is 64; .* packed for 32"):
        prepare(str(data.directory), 64)


def test_an_error_half_way_leaves_nothing(small, tmp_path, monkeypatch):
    original = small.documents

    def failing(self, split):
        yield from original(self, split)
        if split == "validation":
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(small, "documents", failing)
        with pytest.raises(OSError, match=r"No space left"):
            prepare("small", 32)
    assert folders(tmp_path / "cache") == []
    assert prepare("small", 32).train_rows > 0


KILLED = """
import os, signal, sys
from looped.data import corpus
from looped.data.loader import prepare
from tests.looped.data.conftest import SmallSource

class Source(SmallSource):
    def documents(self, split):
        for text in super().documents(split):
            if split == "validation" and text.startswith("validation 9"):
                os.kill(os.getpid(), signal.SIGKILL)
            yield text

corpus.SOURCES["small"] = Source
prepare("small", 32)
"""


def test_killed_half_way_then_prepared_whole(small, tmp_path):
    root = Path(__file__).parents[3]
    ended = subprocess.run(
        [sys.executable, "-c", KILLED], cwd=root, env={**os.environ, "PYTHONPATH": str(root)}
    )
    assert ended.returncode == -signal.SIGKILL
    left = folders(tmp_path / "cache")
    assert len(left) == 1
    assert left[0].startswith("incomplete-")
    data = prepare("small", 32)
    assert folders(tmp_path / "cache") == [data.directory.name]
    assert data.metadata.validation.statistics.documents == 30


def test_a_second_preparer_waits_for_the_first(small, capfd, monkeypatch):
    write, results = pack.pack, []

    def slow(*args):
        time.sleep(0.5)
        return write(*args)

    monkeypatch.setattr(pack, "pack", slow)
    threads = [threading.Thread(target=lambda: results.append(prepare("small", 32).hash)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert small.drawn == 2, "made twice"
    assert results[0] == results[1]
    assert "waiting" in capfd.readouterr().err


def test_without_a_lock_the_first_to_finish_stays(small, monkeypatch):
    """Remote storage has no lock: whoever finds the folder there at the end takes it."""
    first = prepare("small", 32)
    plan = builder.PackPlan(small(), loader.get_tokenizer("bytes"), 32)
    loader._prepare(plan, first.directory.parent, first.directory, alone=False)
    assert folders(first.directory.parent) == [first.directory.name]


def test_too_little_text_for_a_row(small):
    with pytest.raises(
        UserError, match=r"sequence_length is 100000; the train text of 'small' has \d+ tokens"
    ):
        prepare("small", 100_000)


@pytest.mark.parametrize("length", [0, -1])
def test_sequence_length_below_one(length):
    with pytest.raises(UserError, match="sequence_length is"):
        prepare("docstrings", length)


def test_unknown_source():
    with pytest.raises(
        UserError, match=r"source '/no/such' is neither a known name nor a folder.*docstrings"
    ):
        prepare("/no/such", 32)


def test_a_presets_corpus_is_found_by_its_name_once_it_is_packed(small, tmp_path, monkeypatch):
    """So that a published grid's runs have one id wherever their data lies."""
    monkeypatch.setenv("LOOPED_DATA", str(tmp_path / "sets"))
    with pytest.raises(
        UserError, match=r"looped data pack --source fineweb-edu --tokenizer … --output .*sets/fineweb-edu`"
    ):
        prepare("fineweb-edu", 32)
    packed = prepare("small", 32)
    packed.directory.rename(tmp_path / "sets" / "fineweb-edu")
    assert prepare("fineweb-edu", 32).hash == packed.hash


def test_cache_that_cannot_be_written(small, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOOPED_DATA", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match=r"LOOPED_DATA is .*cannot be written"):
        prepare("small", 32)


@pytest.mark.parametrize("damage", ["truncated", "missing", "one bit", "another data set's"])
def test_damaged_rows_are_refused(small, damage):
    data, other = prepare("small", 32), prepare("small", 16)
    shard = next(Path(data.directory).glob("*train*"))
    content = bytearray(shard.read_bytes())
    if damage == "truncated":
        shard.write_bytes(content[: len(content) // 2])
    elif damage == "missing":
        shard.unlink()
    elif damage == "one bit":
        content[len(content) // 8] ^= 1
        shard.write_bytes(content)
    else:
        shard.write_bytes(next(Path(other.directory).glob("*train*")).read_bytes())
    with pytest.raises(UserError, match=rf"{data.directory.name}: the train rows cannot be read .*delete it"):
        PackedData(data.directory).train_batch(0, 0, 8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no prepared data"),
        ("{", "not JSON"),
        ('{"format_version": 99}', "format 99"),
        ("[]", "format None"),
    ],
)
def test_bad_metadata_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "metadata.json").write_text(content)
    with pytest.raises(UserError, match=message):
        prepare(str(tmp_path), 32)


def test_tokenizer_that_changed_since(small, monkeypatch):
    data = prepare("small", 32)
    monkeypatch.setattr(loader.get_tokenizer("bytes").__class__, "fingerprint", "0" * 64)
    with pytest.raises(UserError, match="tokenizer 'bytes' is another now"):
        _ = data.tokenizer


@pytest.mark.slow
def test_the_default_corpus(tmp_path, monkeypatch):
    """Made from what is installed here: its size, the share held out, and batches that read as text."""
    monkeypatch.setenv("LOOPED_DATA", str(tmp_path))
    data = prepare("docstrings", 128)
    train, validation = data.metadata.train, data.metadata.validation
    assert train.text_bytes > 8_000_000
    assert validation.text_bytes > 400_000
    assert 0.03 < validation.text_bytes / (train.text_bytes + validation.text_bytes) < 0.08
    assert train.statistics.cropped_tokens < 0.03 * train.text_bytes
    batch = data.train_batch(0, 0, 64)
    assert batch.max() < data.vocab_size
    assert " the " in data.tokenizer.decode(batch.reshape(-1))
