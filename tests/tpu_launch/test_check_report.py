"""A check is told in tables, sentences, JSON and an exit status."""

import dataclasses
import json

import pytest
from fake_compiler import compiled, replace_workers
from rich.console import Console

from looped.config import ModelConfig, RunSpec
from looped.counting import flops_per_token
from looped.errors import UserError
from looped.execution import Execution
from looped.sharding import MeshAxes
from looped.slices import GIB, slice_of
from tpu_launch.check import Cell, Checked
from tpu_launch.check_commands import TpuCheck
from tpu_launch.check_report import options, report, show, trouble
from tpu_launch.compile_check import Compiled, Traffic


@pytest.fixture
def fake(monkeypatch):
    return replace_workers(monkeypatch)


SLICE = slice_of("v5e:2x2", 2)
MODEL = ModelConfig(d_model=64, n_heads=2, sequence_length=64, recurrences=4, backprop_recurrences=2)
RUNS = tuple(RunSpec(model=MODEL, steps=steps, batch_size=8) for steps in (3600, 7200))
SENT = (
    Traffic("all-gather", "bf16", False, True, 3, 3 * 2**20),
    Traffic("all-reduce", "bf16", True, True, 2, 5 * 2**20),
    Traffic("all-gather", "f32", False, False, 1, 4 * 2**20),
)
GOOD = Checked(Cell(RUNS), Execution(), compiled(15, traffic=SENT), True)
HELPED = Checked(
    Cell(RUNS),
    Execution(mesh=MeshAxes(fsdp=4)),
    Compiled("too large", "Ran out of memory", hbm_bytes=20 * GIB, compile_seconds=9.0),
    False,
    remedy=(Execution(remat="layer", accumulate=2), compiled(12.5)),
    tried=3,
)
FAILED = Checked(Cell(RUNS), Execution(), Compiled("failed", "the compiling process was ended."), False)


def shown(*checked):
    console = Console(width=160, record=True, force_terminal=False)
    show(checked, SLICE, console)
    return console.export_text()


def test_the_estimate_of_runs_follows_from_that_of_a_step():
    data = report([GOOD], SLICE)
    (cell,) = data["cells"]
    step = GOOD.compiled.times.step
    first, second = (run.run_id for run in RUNS)
    assert cell["steps"] == {first: 3600, second: 7200}
    assert cell["run_seconds"] == {first: 3600 * step, second: 7200 * step}
    assert cell["chip_hours"][first] == pytest.approx(step * SLICE.chips)  # an hour a second's step
    assert data["chip_hours"] == pytest.approx(3 * step * 8)
    assert cell["model_flops_per_step"] == flops_per_token(MODEL) * 8 * 64
    assert cell["mfu"] == pytest.approx(cell["model_flops_per_step"] / (step * 8 * 197e12))
    assert (cell["fits"], cell["hbm_bytes"], cell["hbm_limit"]) == (True, 15 * GIB, int(15.75 * GIB))
    assert cell["crosses_slices"]
    assert data["fits"]
    assert json.loads(json.dumps(data)) == data


def test_a_cell_that_does_not_fit_is_estimated_with_its_remedy():
    (cell,) = report([HELPED], SLICE)["cells"]
    assert (cell["fits"], cell["status"], cell["step_seconds"]) == (False, "too large", None)
    assert (cell["remedy"]["status"], cell["remedy"]["execution"]["remat"]) == ("compiled", "layer")
    assert set(cell["run_seconds"].values()) == {3600 * 0.5, 7200 * 0.5}
    (line,) = trouble(HELPED, SLICE)
    assert "needs 20.00 GiB a device and 15.75 are usable; it fits, at 12.50, with" in line
    assert line.endswith("no mesh axes named and --remat layer and --accumulate 2.")
    lost = dataclasses.replace(HELPED, remedy=None)
    assert "none of 3 remedies fits" in trouble(lost, SLICE)[0]
    assert report([lost, GOOD], SLICE)["chip_hours"] is None


def test_only_the_options_that_change_are_named():
    assert options(Execution(remat="dots", accumulate=2), Execution(accumulate=2)) == "--remat dots"


def test_the_tables_show_the_cell_and_what_it_sends_by_kind():
    text = shown(GOOD, HELPED, FAILED)
    assert "2 slices of v5e:2x2: 8 chips, 15.75 GiB usable a device" in text
    rows = [line.split() for line in text.splitlines() if line.strip().startswith("4 (k 2)")]
    assert rows[0][3:8] == ["64", "2", "1·4·1·1", "yes", "15.00"]
    assert rows[1][6:8] == ["no", "20.00"]
    assert rows[3][4:] == ["7", "by", "4", "5", "by", "2"]  # both all-gathers; all-reduce (network)
    assert "all-reduce (network)" in text
    assert "r = 4, k = 2, width 64: the compiling process was ended." in text
    assert "1 of 3 programs (6 runs) compile and fit on 2 slices of v5e:2x2." in text


def test_one_device_sends_nothing_and_has_no_table_of_it():
    assert "Sent in a step" in shown(GOOD)
    assert "Sent in a step" not in shown(dataclasses.replace(GOOD, compiled=compiled(1, traffic=())))


def test_what_the_partitioner_made_whole_and_what_was_not_counted_is_told():
    bad = dataclasses.replace(
        GOOD, compiled=compiled(1, involuntary_remat=("jit(step)/a bf16[2] (b)",), unknown_loops=1)
    )
    assert [line.partition(": ")[2] for line in trouble(bad, SLICE)] == [
        "involuntary full rematerialisation of jit(step)/a bf16[2] (b).",
        "1 loops of unknown length count once in the estimate.",
    ]


# --- The command ---------------------------------------------------------------------------------------------


def command(tmp_path, **fields):
    values = {"topology": "v5e:2x2", "model": MODEL, "steps": 10, "output": str(tmp_path / "kept")}
    return TpuCheck(**(values | fields))


def test_the_command_prints_json_alone_and_exits_with_what_was_found(
    fake,
    tmp_path,
    capsys,
    monkeypatch,
):
    assert command(tmp_path, json="-").run() == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["topology"], len(data["cells"])) == ("v5e:2x2", 1)
    monkeypatch.setattr(fake, "answer", staticmethod(lambda job: Compiled("refused", "no mesh of 4 devices")))
    target = tmp_path / "check.json"
    assert command(tmp_path, batch_size=3, json=str(target)).run() == 1
    assert json.loads(target.read_text())["cells"][0]["reason"] == "no mesh of 4 devices"
    assert "no mesh of 4 devices." in capsys.readouterr().out


def test_a_preset_is_checked_whole_or_in_part(tmp_path):
    def specs(**fields):
        return TpuCheck(topology="v5e:16x16", preset="paper-vanilla", **fields)._specs()

    assert len(specs()) == 116
    some = specs(budgets=(2.15e19,), recurrences_only=(4, 8))
    assert {(s.budget_flops, s.model.recurrences) for s in some} == {(2.15e19, 4), (2.15e19, 8)}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"topology": "v5e:3x3"}, "topology 'v5e:3x3' is no shape of v5e"),
        ({"topology": "h100:8"}, "no known TPU generation"),
        ({"steps": None}, "give exactly one"),
        ({"preset": "paper-vanilla"}, "preset is 'paper-vanilla' and model, steps is given as well"),
        ({"budgets": (1e18,)}, "name a --preset"),
        ({"preset": "paper-vanila", "model": ModelConfig(), "steps": None}, "Did you mean 'paper-vanilla'"),
        (
            {"preset": "quickstart", "model": ModelConfig(), "steps": None, "recurrences_only": (3,)},
            "recurrences_only has 3, which preset 'quickstart' lacks; it has 1, 2, 4",
        ),
        ({"workers": 0}, "workers is 0"),
        ({"json": "/nowhere/check.json"}, "json is /nowhere/check.json, which cannot be written"),
    ],
)
def test_bad_input_is_named(fake, tmp_path, fields, says):
    with pytest.raises(UserError) as error:
        command(tmp_path, **fields).run()
    assert says in str(error.value)
