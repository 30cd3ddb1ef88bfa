"""A small source of text, prepared in a folder of the test's own."""

import hashlib

import pytest

from looped.data import corpus
from looped.data.loader import prepare


class SmallSource:
    """120 training and 30 validation documents of mixed lengths, all different."""

    name = "small"
    drawn = 0  # how often documents were asked for, over all instances

    def description(self):
        return {"source": self.name}

    def documents(self, split):
        type(self).drawn += 1
        for i in range(120 if split == "train" else 30):
            noise = "".join(hashlib.sha256(f"{split} {i} {j}".encode()).hexdigest() for j in range(7))
            yield f"{split} {i}: {noise}"[: 20 + 13 * (i % 29)]


@pytest.fixture
def small(monkeypatch, tmp_path):
    """The class of a registered source `small`, and an empty LOOPED_DATA."""
    source = type("SmallSource", (SmallSource,), {"drawn": 0})
    monkeypatch.setitem(corpus.SOURCES, "small", source)
    monkeypatch.setenv("LOOPED_DATA", str(tmp_path / "cache"))
    return source


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """`small`, prepared for T = 32 and opened."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(corpus.SOURCES, "small", SmallSource)
        patch.setenv("LOOPED_DATA", str(tmp_path_factory.mktemp("cache")))
        return prepare("small", 32)
