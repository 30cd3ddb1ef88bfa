"""The default corpus: what is taken for a docstring, how it is split, and what cannot change it."""

import ast
import hashlib
import json
import sys
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looped.data import corpus
from looped.data.corpus import Docstrings, docstrings, extract_all, get_source, split_documents
from looped.errors import UserError

LONG = ("word " * 60).strip()
STDLIB = Path(sysconfig.get_path("stdlib"))


def by_walking(source: bytes) -> list[str]:
    """The same, by visiting every node of the tree."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    return sorted(text for text in found if text and len(text) >= corpus.MINIMUM_CHARACTERS)


@pytest.mark.parametrize(
    "module", ["argparse", "typing", "asyncio/events", "collections/__init__", "statistics"]
)
def test_docstrings_are_those_of_the_whole_tree(module):
    source = (STDLIB / f"{module}.py").read_bytes()
    found = sorted(docstrings(source))
    assert found == by_walking(source)
    assert found


def test_docstrings_are_found_wherever_a_definition_can_stand():
    bodies = [
        "if x:\n {}",
        "if x:\n pass\nelse:\n {}",
        "try:\n {}\nexcept E:\n pass",
        "try:\n pass\nexcept E:\n {}",
    ]
    bodies += [
        "try:\n pass\nfinally:\n {}",
        "with x:\n {}",
        "for x in y:\n {}",
        "while x:\n {}",
        "class C:\n {}",
    ]
    bodies += ["match x:\n case 1:\n  pass\n case _:\n  {}", "async def g():\n {}"]
    for body in bodies:
        source = body.format(f"def f(): '''{LONG}'''").encode()
        assert list(docstrings(source)) == by_walking(source) == [LONG], body


@pytest.mark.parametrize(
    "source",
    [
        b"def f(): '''short'''",
        b"x = '''" + LONG.encode() + b"'''",
        b"def f(:\n '''" + LONG.encode() + b"'''",
        b"def f():\n '''\\ud800 " + LONG.encode() + b"'''",
    ],
    ids=["short", "not a docstring", "does not parse", "not encodable"],
)
def test_what_is_left_out(source):
    assert list(docstrings(source)) == []


def test_missing_files_are_passed_over_and_repeats_kept_once(tmp_path):
    (tmp_path / "a.py").write_text(f"def f(): '''{LONG}'''\ndef g(): '''{LONG}'''")
    assert extract_all([tmp_path / "absent.py", tmp_path / "a.py", tmp_path / "a.py"]) == {LONG}


def text_of(number: int) -> str:
    """A distinct document: every line is its own."""
    return "\n".join(hashlib.sha256(f"{number} {line}".encode()).hexdigest() for line in range(4))


@given(st.permutations(range(40)))
def test_split_does_not_depend_on_the_order_found(order):
    assert split_documents(map(text_of, order)) == split_documents(map(text_of, range(40)))


def test_split_shares_and_separates():
    documents = [text_of(i) for i in range(2000)]
    split = split_documents(documents)
    assert sorted(split["train"] + split["validation"]) == sorted(documents)
    assert len(split["validation"]) / 2000 == pytest.approx(corpus.VALIDATION_SHARE, abs=0.02)


def test_validation_documents_that_repeat_training_text_are_dropped():
    documents = [text_of(i) for i in range(2000)]
    split = split_documents(documents)
    lines = split["train"][0].splitlines()

    def copies(share):
        """400 documents of 4 lines, `share` of them a training document's, in another case and indented."""
        own = [text_of(10_000 * share + i).splitlines()[share:] for i in range(400)]
        return {"\n   ".join([line.upper() for line in lines[:share]] + rest) for rest in own}

    held_out = set(split_documents([*documents, *copies(1), *copies(2)])["validation"])
    assert held_out & copies(1)
    assert not held_out & copies(2)


def test_packages_are_the_dependencies_and_not_the_extras():
    packages = Docstrings().packages
    assert {"jax", "numpy", "flax", "scipy", "tensorflow-datasets", "array-record"} <= packages.keys()
    assert not {"pytest", "hypothesis", "ruff", "pyright", "coverage", "looped"} & packages.keys()


def test_requirements_of_an_installed_package_leave_its_extras_out(monkeypatch):
    installed = ["numpy>=2", 'pytest>=8; extra == "test"', 'absent-package; sys_platform == "none"']
    monkeypatch.setattr(corpus.importlib.metadata, "requires", lambda name: installed)
    assert list(Docstrings().packages) == ["numpy"]


def test_description_is_json_and_names_what_the_text_depends_on():
    description = Docstrings().description()
    assert json.loads(json.dumps(description)) == description
    assert sys.version.split()[0] in description["python"]


def test_standard_library_files_are_its_own():
    files = list(corpus._stdlib_files())
    assert STDLIB / "argparse.py" in files
    assert not [f for f in files if {"site-packages", "test", "tests"} & set(f.relative_to(STDLIB).parts)]


def test_unknown_source_names_the_nearest():
    with pytest.raises(
        UserError, match=r"source 'docstring' is not a known corpus. Did you mean 'docstrings'"
    ):
        get_source("docstring")
