"""`looped data pack` and `looped data check`, from files to a run's record."""

import json

import pytest
from vocabularies import TEXT, json_tokenizer

from looped.__main__ import main
from looped.config import DataConfig, ModelConfig, RunSpec
from looped.data.loader import PackedData
from looped.train import new_record, prepare_data

MODEL = [
    "--d-model",
    "16",
    "--n-heads",
    "1",
    "--recurrent-layers",
    "1",
    "--prelude-layers",
    "0",
    "--coda-layers",
    "0",
    "--batch-size",
    "4",
    "--steps",
    "3",
]


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setenv("LOOPED_DATA", str(tmp_path / "cache"))
    for part in range(3):
        lines = [json.dumps({"body": text}) for text in TEXT[part * 100 : part * 100 + 100]]
        (tmp_path / f"{part}.jsonl").write_text("\n".join(lines))
    (tmp_path / "tokenizer.json").write_bytes(json_tokenizer())
    return tmp_path


def test_from_files_to_a_record(corpus, capsys):
    folder = str(corpus / "packed")
    pack = [
        "data",
        "pack",
        "--source",
        str(corpus / "*.jsonl"),
        "--column",
        "body",
        "--sequence-length",
        "16",
    ]
    pack += ["--tokenizer", str(corpus / "tokenizer.json"), "--add-token", "<pad>", "--validation-files", "1"]
    assert main([*pack, "--workers", "0", "--output", folder]) == 0
    shown = capsys.readouterr().out
    data = PackedData(folder)
    assert f"T = 16, hash {data.hash}" in shown
    assert "100.00%" in shown
    assert data.metadata.train.cropped_share > 0.2
    assert "--long-documents cut keeps the rest" in shown
    assert f"{data.metadata.train.statistics.document_tokens:,}" in shown

    (corpus / "tokenizer.json").unlink()  # the data set has its own
    spec = RunSpec(
        model=ModelConfig(vocab_size=401, sequence_length=16, d_model=16, n_heads=1),
        data=DataConfig(source=folder),
        steps=3,
        batch_size=4,
    )
    record = new_record(spec, prepare_data(spec))
    assert record.tokenizer_fingerprint == data.tokenizer.fingerprint
    assert record.data_hash == data.hash
    assert record.epochs == pytest.approx(3 * 4 / data.train_rows)
    run = ["train", "--source", folder, "--sequence-length", "16", *MODEL]
    assert main(["data", "check", folder]) == 0
    assert "every row is as it was written" in capsys.readouterr().out

    assert main([*run, "--output", str(corpus / "other"), "--vocab-size", "257"]) == 2
    assert "vocab_size is 257; the data's tokenizer" in capsys.readouterr().err
    assert not (corpus / "other").exists(), "refused before anything was made"


def test_a_vocabulary_that_does_not_fit_is_refused_before_anything_is_packed(corpus, capsys):
    assert main(["train", *MODEL, "--vocab-size", "300", "--output", str(corpus / "run")]) == 2
    assert "vocab_size is 300; the data's tokenizer 'bytes' has 257 ids" in capsys.readouterr().err
    assert not (corpus / "cache").exists()
    assert not (corpus / "run").exists()


def test_errors_are_one_sentence_and_status_2(corpus, capsys):
    assert main(["data", "pack", "--source", str(corpus / "*.jsonl"), "--output", str(corpus / "out")]) == 2
    captured = capsys.readouterr()
    assert "0.jsonl: the line at byte 0 has no 'text' (has 'body')" in captured.err
    assert captured.err.count("\n") == 1
    assert main(["data", "check", str(corpus / "out")]) == 2
    assert "packing is not finished" in capsys.readouterr().err
