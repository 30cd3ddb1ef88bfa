"""What the README shows works as it stands there."""

import itertools
import re
import sys
import textwrap
from pathlib import Path

import pytest

from fit.analysis import ArmFit
from fit.report import measure
from looped.config import DataConfig, ModelConfig, OptimizerConfig, RunSpec
from looped.train import train

README = (Path(__file__).parents[1] / "README.md").read_text()
T = 32  # of the prepared data


def spec(folder, width, recurrences, budget):
    layers = 1 if recurrences > 1 else 4
    model = ModelConfig(
        sequence_length=T,
        d_model=width,
        n_heads=1,
        prelude_layers=0,
        recurrent_layers=layers,
        coda_layers=0,
        recurrences=recurrences,
        injection="fade:Fade" if recurrences > 1 else "passthrough",
    )
    return RunSpec(
        model=model,
        optimizer=OptimizerConfig(polar_dtype="float32", reference_batch_tokens=128, reference_tokens=50_000),
        data=DataConfig(source=folder),
        budget_flops=budget,
        batch_size=4,
        validation_sequences=32,
    )


@pytest.mark.slow
def test_the_mechanism_in_it_is_trained_counted_and_measured(tmp_path, monkeypatch, packed_folder):
    """A grid of 18 runs, r = 1 and 4, from the class as printed to φ with an interval."""
    shown = re.search(r"^    # (fade\.py\n.*?)^    looped train", README, re.S | re.M)
    assert shown is not None
    (tmp_path / "fade.py").write_text(textwrap.dedent("    # " + shown[1]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        for width, r, budget in itertools.product((8, 16, 32), (1, 4), (5e8, 1e9, 2e9)):
            run = spec(packed_folder, width, r, budget)
            record = train(run, tmp_path / "runs" / run.run_id)
            assert record.status == "done"
            if r > 1:
                assert record.parameters.injection == width, "one weight a channel"
        arm = measure(tmp_path / "runs", tmp_path / "fit").analysis.arms["full"]
    finally:
        sys.modules.pop("fade", None)
    assert isinstance(arm, ArmFit)
    assert len(arm.index) == 18
    assert arm.interval.low <= arm.phi <= arm.interval.high
