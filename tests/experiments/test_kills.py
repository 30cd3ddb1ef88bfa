"""A sweep under a supervisor whose processes are killed at random moments: see the benchmark, which this runs."""

import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[1] / "benchmarks" / "sweep_kills.py"


@pytest.mark.slow
def test_thirty_kills_change_no_bit_of_any_loss():
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True)
    print(done.stdout, done.stderr)  # with the seed, shown where it fails
    assert done.returncode == 0
    assert "losses equal bit for bit" in done.stdout
