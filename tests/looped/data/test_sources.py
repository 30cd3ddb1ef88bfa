"""Sources by name: which documents are whose, presets, TFDS and Hugging Face data sets, and what is missing."""

import json
import sys
import types

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow_datasets as tfds
from etils import epath

from looped.data.sources import START, SourceOptions, make_source, read
from looped.errors import UserError


@pytest.fixture
def parts(tmp_path):
    """Four files of 100 documents."""
    for part in range(4):
        lines = [json.dumps({"text": f"{part} {i}"}) for i in range(100)]
        (tmp_path / f"part-{part}.jsonl").write_text("\n".join(lines))
    return tmp_path


def documents(source, split="train"):
    return list(source.documents(split))


def test_documents_go_to_a_split_by_their_text(parts):
    source = make_source(str(parts / "*.jsonl"), SourceOptions(validation_share=0.1))
    train, validation = documents(source), documents(source, "validation")
    assert sorted(train + validation) == sorted(f"{p} {i}" for p in range(4) for i in range(100))
    assert 20 < len(validation) < 65
    one = make_source(str(parts / "part-2.jsonl"), SourceOptions(validation_share=0.1))
    assert documents(one, "validation") == [text for text in validation if text.startswith("2 ")]


def test_files_go_to_a_split(parts):
    source = make_source(str(parts / "*.jsonl"), SourceOptions(validation_files=1))
    assert {text[0] for text in documents(source)} == set("012")
    assert {text[0] for text in documents(source, "validation")} == {"3"}
    named = make_source(str(parts / "part-[01].jsonl"), SourceOptions(validation=str(parts / "part-2.jsonl")))
    assert {text[0] for text in documents(named, "validation")} == {"2"}


@pytest.mark.parametrize("options", [SourceOptions(validation_files=1), SourceOptions(validation_share=0.2)])
def test_reading_goes_on_from_any_cursor(parts, options):
    source = make_source(str(parts / "*.jsonl"), options)
    whole = list(read(source, "train", START))
    for at in (0, 57, 99, 150, len(whole) - 1):
        assert list(read(source, "train", whole[at][1])) == whole[at + 1 :]
    shares = [source.fraction("train", cursor) for _, cursor in whole]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1, abs=0.05)


def test_seed_changes_the_order_of_files_alone(parts):
    def order(seed):
        return documents(make_source(str(parts / "*.jsonl"), SourceOptions(validation_files=1, seed=seed)))

    assert order(1) == order(1) != order(None)
    assert sorted(order(1)) == sorted(order(None))


def test_description_changes_with_the_files_and_not_with_their_folder(parts, tmp_path_factory):
    def description(folder):
        return make_source(str(folder / "*.jsonl"), SourceOptions(validation_files=1)).description()

    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for path in parts.iterdir():
        (elsewhere / path.name).write_bytes(path.read_bytes())
    first = description(parts)
    assert description(elsewhere) == first
    (elsewhere / "part-0.jsonl").write_text('{"text": "other"}')
    assert description(elsewhere) != first


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validation_files": 4}, "validation_files is 4 and .* has 4 files; leave at least one"),
        ({"validation_share": 1.5}, "validation_share is 1.5; it must lie between 0 and 1"),
        (
            {"validation_files": 1, "validation_share": 0.1},
            "validation_files and validation_share are both given",
        ),
        ({"validation": "part-0.jsonl"}, "part-0.jsonl is both in source and in validation"),
        ({"mirror": "/x"}, "mirror is for a preset"),
    ],
)
def test_bad_options(parts, options, message):
    if "validation" in options:
        options = {"validation": str(parts / options["validation"])}
    with pytest.raises(UserError, match=message):
        make_source(str(parts / "*.jsonl"), SourceOptions(**options))


def test_the_presets_split_as_published(tmp_path):
    for shard in range(5):
        pq.write_table(pa.table({"text": [f"shard {shard}"]}), tmp_path / f"shard_{shard:05d}.parquet")
    fineweb = make_source("fineweb-edu", SourceOptions(mirror=str(tmp_path)))
    assert documents(fineweb) == ["shard 0", "shard 1", "shard 2"]
    assert documents(fineweb, "validation") == ["shard 3", "shard 4"]
    import gzip

    for name in ("c4-train.00000-of-01024", "c4-validation.00000-of-00008"):
        with gzip.open(tmp_path / f"{name}.json.gz", "wt") as file:
            file.write(json.dumps({"text": name, "url": "x"}))
    c4 = make_source("c4", SourceOptions(mirror=str(tmp_path)))
    assert documents(c4) == ["c4-train.00000-of-01024"]
    assert documents(c4, "validation") == ["c4-validation.00000-of-00008"]
    with pytest.raises(UserError, match="has its own validation files"):
        make_source("c4", SourceOptions(mirror=str(tmp_path), validation_share=0.1))


def test_unknown_names(tmp_path):
    with pytest.raises(UserError, match=r"source 'finewebedu' is neither .* Did you mean 'fineweb-edu'"):
        make_source("finewebedu")
    with pytest.raises(UserError, match=r"no such file; check the path"):
        make_source(str(tmp_path / "none.jsonl"))
    assert make_source("docstrings").name == "docstrings"


class Poems(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A data set of somebody else's."""

    VERSION = tfds.core.Version("1.0.0")
    code_path = None
    pkg_dir_path = epath.Path(__file__).parent

    def _info(self):
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict({"text": tfds.features.Text(), "id": np.int64}),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples("t", 300), "test": self._generate_examples("v", 5)}

    def _generate_examples(self, letter, count):
        for i in range(count):
            yield i, {"text": f"{letter} φ {i}", "id": i}


@pytest.fixture(scope="module")
def poems(tmp_path_factory):
    tfds.disable_progress_bar()
    builder = Poems(data_dir=tmp_path_factory.mktemp("tfds"), file_format="array_record")
    builder.download_and_prepare()
    return str(builder.data_dir)


def test_any_tfds_data_set_is_a_source(poems):
    options = SourceOptions(train_split="train[10:]", validation_split="test")
    source = make_source(f"tfds:{poems}", options)
    assert documents(source) == [f"t φ {i}" for i in range(10, 300)]
    assert documents(source, "validation") == [f"v φ {i}" for i in range(5)]
    whole = list(read(source, "train", START))
    assert list(read(source, "train", whole[270][1])) == whole[271:]
    assert source.description()["splits"]["train"]["rows"] == 290
    assert "tensorflow" not in sys.modules


def test_a_tfds_data_set_that_is_not_there_says_what_to_build(poems):
    with pytest.raises(
        UserError, match=r"split 'validation' cannot be opened .*tfds build .*may need TensorFlow"
    ):
        make_source(f"tfds:{poems}")
    with pytest.raises(UserError, match=r"source 'tfds:no_such_set': .*tfds build no_such_set"):
        make_source("tfds:no_such_set")
    with pytest.raises(UserError, match=r"no 'body'; it has .*'text'.*--column"):
        documents(make_source(f"tfds:{poems}", SourceOptions(validation_split="test", column="body")))
    with pytest.raises(UserError, match=r"are both 'train'; name different ones"):
        make_source(f"tfds:{poems}", SourceOptions(validation_split="train"))


class FakeDataset:
    """What is used of a `datasets.Dataset`."""

    _fingerprint = "0a1b"

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, rows):
        return {"text": self.rows[rows], "n": list(range(len(self.rows)))[rows]}


def test_any_hugging_face_data_set_is_a_source(monkeypatch):
    def load_dataset(name, config, split):
        assert (name, config) == ("owner/poems", "small")
        if split == "none":
            raise ValueError("Unknown split 'none'")
        return FakeDataset([f"{split} {i}" for i in range(600 if split == "train" else 3)])

    fake = types.SimpleNamespace(load_dataset=load_dataset, DatasetDict=dict)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    source = make_source("hf:owner/poems:small")
    assert documents(source) == [f"train {i}" for i in range(600)]
    assert documents(source, "validation") == ["validation 0", "validation 1", "validation 2"]
    with pytest.raises(
        UserError, match=r"split 'none' cannot be opened \(ValueError: Unknown split 'none'\)"
    ):
        make_source("hf:owner/poems:small", SourceOptions(validation_split="none"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"needs the library datasets: pip install 'looped\[datasets\]'"):
        make_source("hf:owner/poems:small")


@pytest.mark.parametrize("as_dict", [True, False])
def test_a_saved_hugging_face_data_set_is_cut_as_one_from_the_hub_would_be(tmp_path, as_dict):
    datasets = pytest.importorskip("datasets", reason="needs the optional library datasets")
    saved = datasets.Dataset.from_dict({"text": [f"poem {i}" for i in range(500)]})
    (datasets.DatasetDict({"train": saved}) if as_dict else saved).save_to_disk(str(tmp_path / "poems"))
    cut = SourceOptions(train_split="train[:80%]", validation_split="train[80%:90%]")
    source = make_source(f"hf:{tmp_path / 'poems'}", cut)
    assert documents(source) == [f"poem {i}" for i in range(400)]
    assert documents(source, "validation") == [f"poem {i}" for i in range(400, 450)]
    with pytest.raises(UserError, match=r"split 'validation' cannot be opened .*train\[99%:\]"):
        make_source(f"hf:{tmp_path / 'poems'}")
