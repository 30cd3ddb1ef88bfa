"""Sources of text, and the default one: docstrings that every installation of this package already has.

`docstrings` needs no network beyond the package's own install.  It is the docstrings, of 200 characters or
more, of the Python standard library and of every package that this one depends on: edited technical English
with formulas, tables and examples in code, by many authors, openly licensed, 15.4 MB of it with the
versions of Python 3.11.  Source code itself would be more, but much of it is generated or repeated.

It varies with the installed versions.  So its SHA-256 is in the data set's metadata, every record carries a
hash of what was trained on, and runs whose hashes differ should not be compared.
"""

from __future__ import annotations

import ast
import functools
import gc
import hashlib
import importlib.metadata
import itertools
import platform
import re
import sys
import sysconfig
import tomllib
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, Protocol

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from looped.errors import UserError, nearest

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")


class Source(Protocol):
    """Documents in a fixed order, split by document."""

    name: str

    def documents(self, split: Split) -> Iterator[str]:
        """Yields the documents of `split`, the same in the same order each time."""
        ...

    def description(self) -> dict:
        """Returns JSON for a data set's metadata, cheaply: it changes whenever the text may have changed."""
        ...


RULES_VERSION = 1
"""Raise it when the rules below change which text comes out: prepared data is then made anew."""
MINIMUM_CHARACTERS = 200
VALIDATION_SHARE = 0.07
"""Share of documents drawn for validation, before those that repeat training text are dropped."""
_LEAK_LINE = 20
_LEAK_SHARE = 0.5
_SKIPPED_FOLDERS = {"test", "tests"}
_SKIPPED_STDLIB = _SKIPPED_FOLDERS | {"site-packages", "dist-packages", "idlelib", "lib2to3", "turtledemo"}
_TRIPLE_QUOTE = re.compile(rb"\"\"\"|'''")


class Docstrings:
    """Docstrings of the standard library and of this package's dependencies; its extras change nothing.

    A document is one docstring, cleaned as `inspect.getdoc` does.  Exact repeats are dropped.  The order, and
    which documents are for validation, follow from each document's SHA-256, so neither depends on paths or
    the order of files.

    Packages copy text from each other (jax.numpy from numpy, one class's parameters from another's).  So a
    validation document is dropped when half of it or more is lines that occur in training documents too, case
    and spaces aside (lines of 20 characters or more).
    """

    name = "docstrings"

    @functools.cached_property
    def packages(self) -> dict[str, str]:
        """Versions of the packages read, by name: every dependency of this package, direct or not."""
        return {name: found.version for name, found in sorted(_dependencies().items())}

    def description(self) -> dict:
        return {
            "source": self.name,
            "rules": RULES_VERSION,
            "python": f"{platform.python_implementation()} {platform.python_version()}",
            "packages": self.packages,
        }

    def documents(self, split: Split) -> Iterator[str]:
        return iter(self._splits[split])

    @functools.cached_property
    def _splits(self) -> dict[Split, list[str]]:
        files = itertools.chain(
            _stdlib_files(), *(_package_files(found) for _, found in sorted(_dependencies().items()))
        )
        return split_documents(extract_all(files))


def extract_all(files: Iterable[Path]) -> set[str]:
    """Returns the distinct docstrings of `files` that are long enough."""
    found: set[str] = set()
    collecting = gc.isenabled()
    gc.disable()  # syntax trees have no cycles, and walking them over and over takes a third of the time
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's files
            for file in files:
                try:
                    source = file.read_bytes()
                except OSError:
                    continue  # named in the package's list of files, but not installed
                found.update(docstrings(source))
    finally:
        if collecting:
            gc.enable()
    return found


def docstrings(source: bytes) -> Iterator[str]:
    """Yields the docstrings of at least `MINIMUM_CHARACTERS` in `source`; none where it does not parse."""
    quotes = [match.start() for match in _TRIPLE_QUOTE.finditer(source)]
    if not any(b - a >= MINIMUM_CHARACTERS for a, b in itertools.pairwise(quotes)):
        return  # spares the parser a third of the files; a docstring this long stands between triple quotes
    try:
        pending: list[ast.AST] = [ast.parse(source)]
    except (SyntaxError, ValueError, RecursionError):
        return
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text and len(text) >= MINIMUM_CHARACTERS and _is_unicode(text):
                yield text
        # Definitions stand in statements, never in expressions, which are most of a tree.
        for field in ("body", "orelse", "handlers", "finalbody", "cases"):
            children = getattr(node, field, None)
            if isinstance(children, list):
                pending.extend(c for c in children if hasattr(c, "body") or hasattr(c, "cases"))


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # an escape made half a surrogate pair
        return False
    return True


def split_documents(documents: Iterable[str]) -> dict[Split, list[str]]:
    """Splits distinct documents by hash, in its order; drops validation ones that repeat training."""
    hashed = sorted((hashlib.sha256(text.encode()).digest(), text) for text in documents)
    threshold = int(VALIDATION_SHARE * 2**32).to_bytes(4, "big")
    train = [text for digest, text in hashed if digest[:4] >= threshold]
    seen = {line for text in train for line in _long_lines(text)}
    held_out = [text for digest, text in hashed if digest[:4] < threshold]
    return {"train": train, "validation": [text for text in held_out if _repeated(text, seen) < _LEAK_SHARE]}


def _long_lines(text: str) -> Iterator[str]:
    for line in text.lower().splitlines():
        line = " ".join(line.split())
        if len(line) >= _LEAK_LINE:
            yield line


def _repeated(text: str, seen: set[str]) -> float:
    lines = list(_long_lines(text))
    return sum(len(line) for line in lines if line in seen) / max(1, sum(map(len, lines)))


def _stdlib_files() -> Iterator[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).parts
        module = parts[0].removesuffix(".py")
        if module in sys.stdlib_module_names and not _SKIPPED_STDLIB.intersection(parts):
            yield file


def _package_files(found: importlib.metadata.Distribution) -> Iterator[Path]:
    for file in found.files or ():
        skipped = _SKIPPED_FOLDERS.intersection(file.parts) or file.name.endswith("_test.py")
        if file.suffix == ".py" and not skipped and not file.name.startswith("test_"):
            yield Path(str(file.locate()))


def _requirements() -> list[str]:
    """Requirements of this package, as installed or, run from a checkout, as its pyproject says."""
    try:
        return importlib.metadata.requires("looped") or []
    except importlib.metadata.PackageNotFoundError:
        pyproject = Path(__file__).parents[2] / "pyproject.toml"
        return tomllib.loads(pyproject.read_text())["project"]["dependencies"]


def _dependencies() -> dict[str, importlib.metadata.Distribution]:
    """Installed distributions that this package needs, extras left out, by canonical name."""
    found: dict[str, importlib.metadata.Distribution] = {}
    visited: set[tuple[str, str]] = set()

    def visit(requirements: Iterable[str], extra: str) -> None:
        for text in requirements:
            requirement = Requirement(text)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
                continue
            name = canonicalize_name(requirement.name)
            for wanted in ("", *sorted(requirement.extras)):
                if (name, wanted) in visited:
                    continue
                visited.add((name, wanted))
                try:
                    found[name] = importlib.metadata.distribution(name)
                except importlib.metadata.PackageNotFoundError:
                    continue  # needed on another platform only, or left out on purpose
                visit(found[name].requires or (), wanted)

    visit(_requirements(), "")
    found.pop("looped", None)
    return found


SOURCES = {"docstrings": Docstrings}


def get_source(name: str) -> Source:
    """Returns the source called `name`; `UserError` names the nearest ones."""
    if name not in SOURCES:
        raise UserError(f"source {name!r} is not a known corpus.{nearest(name, SOURCES)}")
    return SOURCES[name]()
