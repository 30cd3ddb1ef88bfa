"""A sweep of real, very small runs: data, training and records, through the worker processes."""

from experiments import sweep
from looped.config import DataConfig, ModelConfig, RunSpec
from looped.record import find_records


def test_real_runs_of_one_program_leave_records_that_are_found(tmp_path, packed_folder):
    model = ModelConfig(
        d_model=16, n_heads=1, sequence_length=32, prelude_layers=0, coda_layers=0, recurrences=2
    )
    data = DataConfig(source=packed_folder)
    wanted = tuple(
        RunSpec(model=model, data=data, steps=steps, batch_size=4, validation_sequences=8) for steps in (2, 4)
    )
    outcome = sweep.run(wanted, tmp_path / "sweep", preset="mine")
    assert [(run.state, run.step) for run in outcome.runs] == [("done", 2), ("done", 4)]
    records = dict(find_records(tmp_path / "sweep"))
    assert {record.run_id for record in records.values()} == {spec.run_id for spec in wanted}
    losses = {record.steps: record.loss for record in records.values()}
    assert losses == {run.steps: run.loss for run in outcome.runs}
    assert losses[4] < losses[2]
    assert sweep.run(wanted, tmp_path / "sweep", preset="mine").there_before == 2
