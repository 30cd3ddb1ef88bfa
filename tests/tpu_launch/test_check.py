"""A check groups runs, compiles each program once, survives its worker and finds what helps."""

import dataclasses
import json
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_compiler import compiled, replace_workers

from experiments.presets import preset
from looped.config import ModelConfig, OptimizerConfig, RunSpec
from looped.errors import UserError
from looped.execution import Execution
from looped.jsonable import from_json, to_json
from looped.sharding import MeshAxes
from looped.slices import GIB, slice_of
from tpu_launch import check_store, check_worker
from tpu_launch.check import Cell, Checker, cells_of, job_of, remedies
from tpu_launch.check_store import Store, key_of
from tpu_launch.check_worker import Worker
from tpu_launch.compile_check import Compiled, Job

SLICE = slice_of("v5e:2x2")
MODEL = ModelConfig(d_model=64, n_heads=2, sequence_length=64, recurrences=2)
RUN = RunSpec(model=MODEL, steps=10, batch_size=8)
TOO_LARGE = Compiled("too large", "Ran out of memory", hbm_bytes=20 * GIB, compile_seconds=1.0)


@pytest.fixture
def fake(monkeypatch):
    return replace_workers(monkeypatch)


# --- Cells ---------------------------------------------------------------------------------------------------


def test_the_published_grid_has_a_program_a_width_and_recurrence():
    """116 runs: widths repeat over budgets, and steps are no part of a program."""
    specs = preset("paper-vanilla").specs()
    cells = cells_of(specs)
    assert len(cells) == len({(s.model.d_model, s.model.recurrences) for s in specs}) < len(specs) == 116
    assert sorted(run.run_id for cell in cells for run in cell.runs) == sorted(s.run_id for s in specs)
    widths = [cell.first.model.d_model for cell in cells]
    assert widths == sorted(widths, reverse=True)


def test_what_a_program_does_not_contain_makes_no_cell():
    other = dataclasses.replace(RUN, seed=3, optimizer=OptimizerConfig(matrix_lr=0.5))
    exact = dataclasses.replace(RUN, optimizer=OptimizerConfig(polar_dtype="float32"))
    cells = cells_of([RUN, other, exact, dataclasses.replace(RUN, batch_size=16)])
    assert sorted(len(cell.runs) for cell in cells) == [1, 1, 2]
    job = job_of(cells[0], SLICE, Execution())
    assert from_json(Job, json.loads(json.dumps(to_json(job)))) == job


# --- Remedies ------------------------------------------------------------------------------------------------


def test_remedies_go_from_cheap_to_dear():
    found = [(e.remat, e.accumulate) for e in remedies(Cell((RUN,)), Execution())]
    assert found == [
        *(("dots", 1), ("layer", 1), ("pass", 1)),
        *((remat, parts) for parts in (2, 4, 8) for remat in ("none", "layer")),
    ]
    unlooped = dataclasses.replace(
        MODEL, recurrences=1, prelude_layers=0, coda_layers=0, injection="passthrough"
    )
    cell = Cell((dataclasses.replace(RUN, model=unlooped),))
    assert "pass" not in {e.remat for e in remedies(cell, Execution())}


def test_remedies_begin_from_what_was_asked():
    asked = Execution(mesh=MeshAxes(tensor=2), remat="layer", accumulate=4)
    first, *rest = remedies(Cell((RUN,)), asked)
    assert first == dataclasses.replace(asked, mesh=MeshAxes())
    assert [(e.remat, e.accumulate) for e in rest] == [("pass", 4), ("layer", 8)]
    assert {e.mesh for e in rest} == {MeshAxes()}


def test_the_first_remedy_that_fits_is_named_and_none_beyond_it_tried(fake, tmp_path, monkeypatch):
    fits = {"layer": compiled(15.7), "dots": compiled(15.8)}  # 15.75 are usable
    monkeypatch.setattr(fake, "answer", staticmethod(lambda job: fits.get(job.execution["remat"], TOO_LARGE)))
    with Checker(SLICE, Store(tmp_path), 1) as checker:
        (found,) = checker.run([Cell((RUN,))], Execution())
    assert not found.fits
    assert (found.remedy[0].remat, found.remedy[0].accumulate, found.tried) == ("layer", 1, 2)
    assert [job.execution["remat"] for job in fake.jobs] == ["none", "dots", "layer"]


def test_where_nothing_helps_that_is_said_and_what_cannot_be_helped_is_not_tried(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(fake, "answer", staticmethod(lambda job: TOO_LARGE))
    with Checker(SLICE, Store(tmp_path), 1) as checker:
        (found,) = checker.run([Cell((RUN,))], Execution())
        assert (found.remedy, found.tried) == (None, len(list(remedies(Cell((RUN,)), Execution()))))
        monkeypatch.setattr(fake, "answer", staticmethod(lambda job: Compiled("refused", "no mesh")))
        before = len(fake.jobs)
        (found,) = checker.run([Cell((dataclasses.replace(RUN, batch_size=7),))], Execution())
    assert (found.compiled.status, found.remedy, len(fake.jobs) - before) == ("refused", None, 1)


# --- What is kept --------------------------------------------------------------------------------------------


def test_a_result_is_compiled_once_and_half_a_line_hurts_nothing(fake, tmp_path):
    cells = cells_of([RUN, dataclasses.replace(RUN, batch_size=16)])
    with Checker(SLICE, Store(tmp_path), 2) as checker:
        first = checker.run(cells, Execution())
    path = tmp_path / check_store.FILE
    path.write_text(path.read_text() + '{"key": "half')
    third = cells_of([dataclasses.replace(RUN, batch_size=4)])
    with Checker(SLICE, Store(tmp_path), 1) as checker:
        assert checker.run(cells, Execution()) == first
        assert len(fake.jobs) == 2
        checker.run(third, Execution())
    with Checker(SLICE, Store(tmp_path), 1) as checker:
        checker.run([*cells, *third], Execution())
    assert len(fake.jobs) == 3


def test_a_process_that_died_is_not_kept_as_a_result(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(fake, "answer", staticmethod(lambda job: Compiled("failed", "was ended by SIGKILL")))
    with Checker(SLICE, Store(tmp_path), 1) as checker:
        checker.run([Cell((RUN,))], Execution())
        checker.run([Cell((RUN,))], Execution())
    assert len(fake.jobs) == 2


def test_a_key_changes_with_all_that_a_result_follows_from(monkeypatch):
    job = job_of(Cell((RUN,)), SLICE, Execution())
    keys = {
        key_of(job),
        key_of(dataclasses.replace(job, slices=2)),
        key_of(dataclasses.replace(job, execution=to_json(Execution(remat="layer")))),
        key_of(dataclasses.replace(job, model=dataclasses.replace(MODEL, recurrences=3))),
    }
    monkeypatch.setattr(check_store, "version", lambda package: "other")
    check_store._source_hash.cache_clear()
    keys.add(key_of(job))
    monkeypatch.undo()
    check_store._source_hash.cache_clear()
    assert len(keys) == 5
    assert key_of(job) in keys
    sources = {path.name for path in check_store._sources(check_store._ROOTS)}
    assert {"programs.py", "model.py", "optimizer.py", "slices.py", "hlo.py", "roofline.py"} <= sources
    assert "commands.py" not in sources


def test_keys_are_made_in_many_threads_at_once():
    job = job_of(Cell((RUN,)), SLICE, Execution())
    check_store._source_hash.cache_clear()
    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(key_of, [job] * 8))) == 1


def test_a_folder_that_cannot_be_one_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="which cannot be written"):
        Store(tmp_path / "file")


# --- The worker ----------------------------------------------------------------------------------------------

WORKER = """
    import json, os, pathlib, sys
    here = pathlib.Path({here!r})
    for line in sys.stdin:
        batch = json.loads(line)["batch_size"]
        (here / "starts").open("a").write(f"{{os.getpid()}}\\n")
        deaths = len((here / "starts").read_text().split())
        if batch == 4 or (batch == 8 and deaths == 1):
            os.write(2, b"Check failed: something\\n")
            os._exit(3)
        if batch == 2:
            os.kill(os.getpid(), 9)
        os.write(2, b'W [SPMD] Involuntary full rematerialization. The compiler cannot go from sharding {{x}} to {{y}}'
                    b' efficiently for HLO operation %copy.7 = bf16[2,8]{{1,0}} copy(%a), metadata={{op_name='
                    b'"jit(step)/a" stack_frame_id=1}}. As the last resort\\n' * 2)
        print(json.dumps({{"status": "compiled"}}), flush=True)
"""


@pytest.fixture
def worker(tmp_path, monkeypatch):
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(WORKER.format(here=str(tmp_path))))
    monkeypatch.setattr(check_worker, "ARGUMENTS", (str(script),))
    worker = Worker()
    yield worker
    worker.kill()


def job(batch_size):
    return Job("v5e:2x2", 1, MODEL, OptimizerConfig(), batch_size, to_json(Execution()))


def test_a_worker_that_dies_gets_one_more_chance_and_stays_for_the_next_job(worker, tmp_path):
    """And what C++ prints on file descriptor 2 is heard, of this job alone."""
    result = worker.compile(job(8))
    assert result.status == "compiled"
    assert result.involuntary_remat == ("jit(step)/a bf16[2,8] (copy.7)",)
    assert worker.compile(job(16)).status == "compiled"
    pids = (tmp_path / "starts").read_text().split()
    assert pids[0] != pids[1] == pids[2]


@pytest.mark.parametrize(
    ("batch", "says"), [(4, "status 3 twice: Check failed"), (2, "SIGKILL twice; there may")]
)
def test_a_worker_that_dies_twice_is_told_of(worker, batch, says):
    result = worker.compile(job(batch))
    assert result.status == "failed"
    assert says in result.reason


def test_a_killed_worker_stays_so(worker):
    worker.kill()
    assert worker.compile(job(8)).reason == "the compiling process was stopped"


def test_the_worker_is_this_python():
    assert check_worker.sys.executable == sys.executable
    assert check_worker.ARGUMENTS == ("-P", "-m", "tpu_launch.compile_check")


def test_workers_must_be_some(fake, tmp_path):
    with pytest.raises(UserError, match="workers is 0"):
        Checker(SLICE, Store(tmp_path), 0)
