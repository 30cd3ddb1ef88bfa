"""`kill -9` during a save, during the evaluation and before the record: the same run in the end, bit for bit.

`tests/benchmarks/run_kills.py` does so at many more moments.
"""

import random

import killing
import pytest


@pytest.mark.slow
def test_a_killed_run_ends_as_one_that_never_was(packed_folder, tmp_path):
    job = killing.Job(packed_folder, steps=150)
    killing.undisturbed(job, tmp_path / "undisturbed", save_every=0.2)
    chance = random.Random(0)
    hits = [
        killing.kill_in(phase, job, tmp_path / "run", save_every=0.2, longest=0.05, chance=chance)
        for phase in ("save", "evaluation", "record")
    ]
    assert hits[0] is not None, "it could be killed during a save"
    assert hits[1] is not None, "and again later"
    killing.finish(job, tmp_path / "run")
    killing.check_equal(job, tmp_path / "undisturbed", tmp_path / "run")
