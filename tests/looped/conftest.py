"""A small prepared data set that any test of training can name by its folder."""

import pytest

from looped.data import corpus
from looped.data.loader import prepare


class Counting:
    """Text that a byte model learns within a few steps: numbers counted upwards."""

    name = "counting"

    def description(self):
        return {"source": self.name}

    def documents(self, split):
        first = 0 if split == "train" else 10_000
        for i in range(first, first + (400 if split == "train" else 80)):
            yield ", ".join(str(n) for n in range(i, i + 20))


@pytest.fixture(scope="session")
def packed_folder(tmp_path_factory):
    """Folder of a prepared data set of byte tokens for T = 32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(corpus.SOURCES, "counting", Counting)
        patch.setenv("LOOPED_DATA", str(tmp_path_factory.mktemp("data")))
        return str(prepare("counting", 32).directory)
