"""The published losses, read and fitted once a session."""

import csv

import pytest
from hypothesis import settings
from tables import TRUNCATED, VANILLA

from fit.analysis import Options, analyse
from fit.losses import read_losses

settings.register_profile("fit", deadline=None)  # the first call of a jitted function compiles
settings.load_profile("fit")


@pytest.fixture(scope="session")
def vanilla():
    return read_losses(VANILLA)


@pytest.fixture(scope="session")
def both_arms():
    return read_losses([VANILLA, TRUNCATED])


@pytest.fixture(scope="session")
def analysis(vanilla):
    """The published vanilla grid, with as many resamples as its interval is held to."""
    return analyse(vanilla, Options(resamples=1000))


@pytest.fixture(scope="session")
def compared(both_arms):
    return analyse(both_arms, Options(resamples=200))


@pytest.fixture
def table(tmp_path):
    """Writes rows (dictionaries) as a CSV file and returns its path."""

    def write(rows, name="losses.csv", columns=None):
        path = tmp_path / name
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, columns or list(rows[0]), extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        return path

    return write
