"""Subword tokenizers, of both kinds: round trips, special tokens that text cannot forge, fingerprints, bad files."""

import pickle
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import json_tokenizer, sentencepiece_model

from looped.data import subword
from looped.data.tokenizers import encode_all, get_tokenizer, token_dtype
from looped.errors import UserError

FILES = {"tokenizer.json": json_tokenizer(), "tokenizer.model": sentencepiece_model()}
KINDS = {name: subword.load("mine", name, content, ("<pad>",)) for name, content in FILES.items()}


@pytest.fixture(params=FILES)
def kind(request):
    return request.param


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0▁")))
@settings(max_examples=100, deadline=None)
@pytest.mark.parametrize("name", FILES)
def test_text_survives_and_never_gives_a_special_id(name, text):
    tokenizer = KINDS[name]
    ids = tokenizer.encode(text + "<s></s><pad>")
    assert tokenizer.decode(np.concatenate([[tokenizer.bos], ids])) == text + "<s></s><pad>"
    assert tokenizer.bos not in ids
    assert tokenizer.vocab_size - 1 not in ids, "the added token"
    assert ids.dtype == np.uint16


def test_by_path_of_file_or_folder(kind, tmp_path):
    (tmp_path / kind).write_bytes(FILES[kind])
    by_folder, by_file = get_tokenizer(str(tmp_path)), get_tokenizer(str(tmp_path / kind))
    assert by_folder.fingerprint == by_file.fingerprint
    assert by_file.vocab_size == 400
    assert by_file.encode("hello").tolist() == KINDS[kind].encode("hello").tolist()


def test_by_name_on_the_hub(kind, tmp_path, monkeypatch):
    import huggingface_hub

    (tmp_path / kind).write_bytes(FILES[kind])

    def download(name, file):
        assert name == "owner/model-7b"
        if file != kind:
            raise FileNotFoundError("404")
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    tokenizer = get_tokenizer("owner/model-7b")
    assert tokenizer.name == "owner/model-7b"
    assert tokenizer.vocab_size == 400
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *a: types.SimpleNamespace().missing)
    with pytest.raises(
        UserError, match=r"'owner/model-7b' cannot be had from the hub .*check the name and the network"
    ):
        get_tokenizer("owner/model-7b")


def test_added_tokens_follow_the_vocabulary_as_the_papers_does(kind):
    plain, added = subword.load("mine", kind, FILES[kind]), KINDS[kind]
    assert added.vocab_size == plain.vocab_size + 1
    assert added.bos == plain.bos
    assert added.encode("the same").tolist() == plain.encode("the same").tolist()
    named = subword.load("mine", kind, FILES[kind], ("<start>",), "<start>")
    assert named.bos == plain.vocab_size


def test_fingerprint_stands_for_what_decides_the_ids(kind):
    def fingerprint(content=FILES[kind], added=(), bos=None, name="mine"):
        return subword.load(name, kind, content, added, bos).fingerprint

    other = json_tokenizer(vocab_size=390) if kind == "tokenizer.json" else sentencepiece_model(390)
    assert fingerprint(name="yours") == fingerprint()
    assert len({fingerprint(), fingerprint(other), fingerprint(added=("<a>",)), fingerprint(bos="</s>")}) == 4


def test_a_worker_gets_the_same_tokenizer(kind):
    copy = pickle.loads(pickle.dumps(KINDS[kind]))
    assert copy.fingerprint == KINDS[kind].fingerprint
    assert copy.encode("hello φ").tolist() == KINDS[kind].encode("hello φ").tolist()


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b'{"model": '])
def test_a_damaged_file_is_named(kind, content, tmp_path):
    (tmp_path / kind).write_bytes(content)
    with pytest.raises(UserError, match=rf"{kind} cannot be read .*; is it a .*, and whole"):
        get_tokenizer(str(tmp_path / kind))


def test_bos_must_be_there(kind):
    with pytest.raises(UserError, match=r"has no token '<x>' for BOS; name one that it has"):
        subword.load("mine", kind, FILES[kind], (), "<x>")
    with pytest.raises(UserError, match=r"has the token '<s>' already; leave it out"):
        subword.load("mine", kind, FILES[kind], ("<s>",))
    with pytest.raises(
        UserError, match=r"no beginning of sequence under a usual name; .*--bos-token.*--add-token"
    ):
        subword.load("mine", "tokenizer.json", json_tokenizer(("<unk>",)))


def test_ids_beyond_the_rows_type_are_refused():
    """A tokenizer that says it has fewer ids than it gives."""

    class Wrong:
        name, vocab_size, bos, fingerprint = "wrong", 300, 0, ""

        def encode(self, text):
            return np.array([70_000])

        def decode(self, ids):
            return ""

    with pytest.raises(
        UserError, match=r"'wrong' gave the id 70000 and says .* 300 ids, which are stored as uint16"
    ):
        encode_all(Wrong(), ["x"])
    with pytest.raises(UserError, match="at most 32 bits"):
        token_dtype(2**32 + 1)


def test_what_is_missing_is_said(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"the folder has neither tokenizer\.json nor tokenizer\.model"):
        get_tokenizer(str(tmp_path))
    with pytest.raises(UserError, match=r"is unknown.*path of a tokenizer\.json"):
        get_tokenizer("no/such/tokenizer.json")
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"needs the library tokenizers: pip install 'looped\[text\]'"):
        subword.load("mine", "tokenizer.json", FILES["tokenizer.json"])
    with pytest.raises(UserError, match="takes neither added tokens nor another BOS"):
        get_tokenizer("bytes", ["<x>"])
