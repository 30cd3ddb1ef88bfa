"""What runs cost: FLOPs, time on a slice as assumed or as checked, chip-hours and money."""

import io
import json

import pytest
from rich.console import Console

from experiments.plan import ASSUMED_MFU, Machine, machine_of, plan
from experiments.plan_display import costs, runs_table
from experiments.presets import preset
from looped.errors import UserError
from looped.jsonable import from_json
from looped.slices import slice_of

TWO = (4.64e17, 1e18)
V5E = slice_of("v5e:4x4")


@pytest.fixture(scope="module")
def specs():
    return preset("paper-vanilla").specs(budgets=TWO)


def check(tmp_path, specs, **changes):
    """A file as `looped tpu check --json` writes it: the first run takes an hour, the second does not fit."""
    first, second = specs[0].run_id, specs[1].run_id
    cells = [
        {"run_ids": [first], "fits": True, "step_seconds": 1.0, "run_seconds": {first: 3600.0}},
        {"run_ids": [second], "fits": False, "step_seconds": 1.0, "run_seconds": {}},
    ]
    path = tmp_path / "check.json"
    path.write_text(json.dumps({"topology": "v5e:4x4", "slices": 1, "cells": cells} | changes))
    return path


def test_costs_are_those_of_the_counts(specs):
    made = plan(specs, Machine(V5E, price=1.5))
    assert made.flops == pytest.approx(16 * 4.64e17 + 20 * 1e18, rel=0.001)  # budgets, but for whole steps
    peak = 16 * 197e12
    for run in made.runs:
        assert run.flops == run.counts["flops_per_token"] * run.counts["steps"] * 2**18
        assert run.seconds == pytest.approx(run.flops / (peak * ASSUMED_MFU))
    assert made.chip_hours == pytest.approx(made.flops / (197e12 * ASSUMED_MFU) / 3600)
    assert made.money == pytest.approx(1.5 * made.chip_hours)
    assert made.seconds == pytest.approx(made.chip_hours * 3600 / 16)


def test_without_a_slice_there_is_no_time(specs):
    made = plan(specs)
    assert (made.seconds, made.chip_hours, made.money, made.checked) == (None, None, None, 0)
    assert made.to_json()["machine"] is None
    assert costs(made) == "36 runs, 2.742e19 FLOPs."


def test_a_check_gives_its_slice_and_times(specs, tmp_path):
    machine = machine_of(None, check=check(tmp_path, specs))
    assert machine is not None
    assert machine.slice == V5E
    made = plan(specs, machine)
    assert made.runs[0].seconds == 3600
    assert made.runs[1].seconds == pytest.approx(made.runs[1].flops / (16 * 197e12 * ASSUMED_MFU))
    assert (made.checked, made.too_large) == (1, 1)
    said = costs(made)
    assert "1 of them as checked, the others at an assumed 40%" in said
    assert "1 of the runs do not fit there" in said
    assert made.only([0]).chip_hours == pytest.approx(16)
    assert machine_of("v5e:4x4", check=check(tmp_path, specs)) == machine


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"topology": "v9:4x4"}, "'v9:4x4' is of no known TPU generation"),
        ({"topology": None}, "is no check of runs"),
        ({"cells": 3}, "is no check of runs"),
        ({"cells": [{"run_ids": ["a"]}]}, "a cell has no run_seconds"),
        ({"cells": [{"run_seconds": {"a": -1}}]}, "run a takes -1 seconds"),
    ],
)
def test_a_file_that_is_no_check_is_refused(specs, tmp_path, changes, said):
    with pytest.raises(UserError, match=said):
        machine_of(None, check=check(tmp_path, specs, **changes))


def test_machines_that_make_no_sense_are_refused(specs, tmp_path):
    with pytest.raises(UserError, match="price is 2 and no slice is named"):
        machine_of(None, price=2.0)
    with pytest.raises(UserError, match=r"mfu is 0\.5 and no slice is named"):
        machine_of(None, mfu=0.5)
    with pytest.raises(UserError, match=r"mfu is 1\.5"):
        machine_of("v5e:4x4", mfu=1.5)
    with pytest.raises(UserError, match="price is -1"):
        machine_of("v5e:4x4", price=-1.0)
    with pytest.raises(UserError, match="is a check of v5e:4x4"):
        machine_of("v5e:2x4", check=check(tmp_path, specs))
    with pytest.raises(UserError, match="cannot be read"):
        machine_of(None, check=tmp_path / "absent.json")
    (tmp_path / "text").write_text("no")
    with pytest.raises(UserError, match=r"not JSON .*; give a file that"):
        machine_of(None, check=tmp_path / "text")
    (tmp_path / "text").write_text("[]")
    with pytest.raises(UserError, match="is no check"):
        machine_of(None, check=tmp_path / "text")


def test_a_plan_as_json_has_every_run_in_full(specs):
    made = plan(specs, Machine(V5E))
    data = json.loads(json.dumps(made.to_json(), allow_nan=False))
    assert [from_json(type(specs[0]), run["spec"]) for run in data["runs"]] == list(specs)
    assert data["totals"]["chip_hours"] == pytest.approx(sum(run["chip_hours"] for run in data["runs"]))
    assert data["totals"]["money"] is None


def test_the_table_has_a_line_a_run(specs):
    made = plan(specs, Machine(V5E))
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(runs_table(made, made.runs, "runs", {"note": ["here"] * len(made.runs)}))
    lines = console.export_text().splitlines()
    for run in made.runs:
        assert sum(run.spec.run_id in line and "here" in line for line in lines) == 1
