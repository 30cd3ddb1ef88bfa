"""Files as sources: every format reads the same from any position, and what is wrong is named with its file."""

import bz2
import gzip
import json
import lzma

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from looped.data import files
from looped.data.files import File, find, read
from looped.errors import UserError

DOCUMENTS = ["one", "two φ", "three\nlines\n\nhere", "日本語", "five " * 50]


def jsonl(path, documents=DOCUMENTS, opener=open):
    with opener(path, "wb") as file:
        for text in documents:
            file.write(json.dumps({"text": text, "n": 1}).encode() + b"\n")


def parquet(path, documents=DOCUMENTS, **options):
    pq.write_table(pa.table({"text": documents, "n": list(range(len(documents)))}), path, **options)


def separated(path, documents=DOCUMENTS, opener=open):
    with opener(path, "wb") as file:
        file.write("<|end|>".join(documents).encode())


def zst(path, mode):
    return pa.output_stream(str(path), compression="zstd")


def write(folder, name):
    path = folder / name
    opener = {"gz": gzip.open, "bz2": bz2.open, "xz": lzma.open, "zst": zst}.get(
        name.rpartition(".")[2], open
    )
    if ".jsonl" in name:
        jsonl(path, opener=opener)
    elif ".parquet" in name:
        parquet(path, row_group_size=2)
    else:
        separated(path, opener=opener)
    return find(str(path))[0]


NAMES = [
    "a.jsonl",
    "a.jsonl.gz",
    "a.jsonl.bz2",
    "a.jsonl.xz",
    "a.jsonl.zst",
    "a.parquet",
    "a.txt",
    "a.txt.gz",
    "a.txt.zst",
]


@pytest.mark.parametrize("name", NAMES)
def test_every_format_reads_the_same_from_any_position(tmp_path, name):
    file = write(tmp_path, name)
    whole = list(read(file, file.format(), separator="<|end|>"))
    assert [text for text, _ in whole] == DOCUMENTS
    for i, (_, after) in enumerate(whole):
        assert list(read(file, file.format(), after, separator="<|end|>")) == whole[i + 1 :]


@given(
    st.lists(st.text(st.characters(exclude_characters="|", exclude_categories=["Cs"])), min_size=1),
    st.integers(1, 9),
)
@settings(max_examples=60, deadline=None)
def test_separated_text_is_split_whatever_the_blocks(tmp_path_factory, documents, block):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes("|".join(documents).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_BLOCK", block)
        found = [text for text, _ in read(File(str(path), 0), "text", separator="|")]
    assert found == (documents if documents[-1].strip() else documents[:-1])


def test_a_text_file_without_a_separator_is_one_document(tmp_path):
    (tmp_path / "a.md").write_text("# One\n\ntwo\n")
    file = find(str(tmp_path / "*.md"))[0]
    assert list(read(file, "text")) == [("# One\n\ntwo\n", 11)]
    assert list(read(file, "text", 11)) == []


def test_found_files_are_sorted_and_may_be_remote(tmp_path):
    import fsspec

    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        (tmp_path / name).write_text("{}")
    assert [file.name for file in find(str(tmp_path / "*.jsonl"))] == ["a.jsonl", "b.jsonl"]
    memory = fsspec.filesystem("memory")
    memory.pipe("/corpus/a.jsonl", b'{"text": "far"}\n')
    (file,) = find("memory://corpus/*.jsonl")
    assert file.size == 16
    assert [text for text, _ in read(file, file.format())] == ["far"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "ok"}\n{"text": \n', r"a\.jsonl: the line at byte 15 is not JSON .* mend or remove it"),
        (b'{"body": "x"}\n', r"a\.jsonl: the line at byte 0 has no 'text' \(has 'body'\); .*--column"),
        (b"[1]\n", r"a\.jsonl: .* has no 'text' \(is no object\)"),
        (b'{"text": 3}\n', r"a\.jsonl: the line at byte 0 has int in 'text', not text"),
        (b'{"text": "\xff"}\n', r"a\.jsonl: not UTF-8 at byte 10 .*iconv"),
        (b'{"text": "\\ud800"}\n', r"a\.jsonl: the line at byte 0 is not text"),
    ],
)
def test_bad_json_lines_name_file_place_and_remedy(tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(read(find(str(path))[0], "jsonl"))


def test_text_that_is_not_utf8_names_file_and_byte(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"fine|caf\xe9|fine")
    with pytest.raises(UserError, match=r"a\.txt: not UTF-8 at byte 8 .*iconv"):
        list(read(find(str(path))[0], "text", separator="|"))
    parquet = tmp_path / "a.parquet"
    bad = pa.Array.from_buffers(
        pa.utf8(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xe9")]
    )
    pq.write_table(pa.table({"text": bad}), parquet)
    with pytest.raises(UserError, match=r"a\.parquet: text at row 0 or soon after is not UTF-8"):
        list(read(find(str(parquet))[0], "parquet"))


def test_a_parquet_file_without_the_column_says_which_it_has(tmp_path):
    parquet(tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: no column 'body'; it has 'text', 'n'.*--column"):
        list(read(find(str(tmp_path / "a.parquet"))[0], "parquet", column="body"))
    with pytest.raises(UserError, match=r"a\.parquet: row 0 has int in 'n', not text"):
        list(read(find(str(tmp_path / "a.parquet"))[0], "parquet", column="n"))


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.gz", "a.txt.zst", "a.txt.bz2", "a.txt.xz"])
def test_a_truncated_file_is_named(tmp_path, name):
    file = write(tmp_path, name)
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=rf"{name}: cannot be read .*fetch it again"):
        list(read(file, file.format(), separator="<|end|>"))


def test_a_flipped_byte_is_found_where_parquet_has_checksums(tmp_path):
    path = tmp_path / "a.parquet"
    parquet(path, write_page_checksum=True, compression="none", use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[content.index(b"three")] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.parquet: cannot be read .*fetch it again"):
        list(read(find(str(path))[0], "parquet"))


def test_what_is_not_there(tmp_path):
    with pytest.raises(UserError, match=r"no/such/\*\.jsonl': no such file; check the path"):
        find(str(tmp_path / "no/such/*.jsonl"))
    with pytest.raises(UserError, match=r"is a folder; name its files, as in '.*\*\.jsonl'"):
        find(str(tmp_path))
    with pytest.raises(UserError, match=r"nosuch://x/y' cannot be listed"):
        find("nosuch://x/y")
    (tmp_path / "a.bin").write_bytes(b"x")
    with pytest.raises(UserError, match=r"a\.bin: the ending tells no format .*--format"):
        find(str(tmp_path / "a.bin"))[0].format()


def test_a_document_too_long_for_memory_asks_for_the_separator(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_DOCUMENT_BYTES", 100)
    monkeypatch.setattr(files, "_BLOCK", 16)
    (tmp_path / "a.txt").write_text("x" * 200)
    with pytest.raises(UserError, match=r"a\.txt: the document at byte 0 is over .*--separator"):
        list(read(find(str(tmp_path / "a.txt"))[0], "text"))
    jsonl(tmp_path / "a.jsonl", ["x" * 200])
    with pytest.raises(UserError, match=r"a\.jsonl: the line at byte 0 is over"):
        list(read(find(str(tmp_path / "a.jsonl"))[0], "jsonl"))
