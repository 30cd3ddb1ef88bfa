"""Records: written by Orbax, read as plain JSON, found under a directory, refused with a reason."""

import dataclasses
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import orbax.checkpoint as ocp
import pytest

from looped.errors import UserError
from looped.jsonable import from_json, to_json
from looped.record import (
    CONVENTIONS,
    ParameterGroups,
    RunRecord,
    count_parameters,
    find_records,
    read_record,
    write_record,
)

GROUPS = ParameterGroups(
    embed=1000, unembed=1000, prelude=200, recurrent_block=400, coda=100, injection=50, outer_norms=6
)


def record(run_id="abc", **changes):
    values = {
        "run_id": run_id,
        "status": "done",
        "arm": "full",
        "recurrences": 4,
        "backprop_recurrences": 4,
        "d_model": 16,
        "n_once": 350,
        "n_rec": 400,
        "convention": "published",
        "parameters": GROUPS,
        "flops_per_token": 1e6,
        "budget_flops": 1e11,
        "tokens": 100_000,
        "steps": 100,
        "seed": 0,
        "loss": 2.5,
        "validation_tokens": 4096,
        "data_hash": "0" * 64,
        "epochs": 0.5,
        "spec": {"model": {"d_model": 16}, "budget_flops": 1e11, "flag": True},
        "versions": {"jax": "0.10.2"},
        "device": "1 × cpu",
        "started_at": "2026-01-01T00:00:00+00:00",
        "updated_at": "2026-01-01T00:01:00+00:00",
    }
    return RunRecord(**(values | changes))


def test_a_record_is_an_orbax_checkpoint_that_reads_back_equal(tmp_path):
    write_record(tmp_path / "run", record())
    assert read_record(tmp_path / "run") == record()
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as checkpointer:
        assert checkpointer.restore(tmp_path / "run" / "record") == to_json(record())


def test_writing_again_replaces_it(tmp_path):
    write_record(tmp_path / "run", record(status="running", loss=None))
    write_record(tmp_path / "run", record())
    assert read_record(tmp_path / "run") == record()


def test_one_is_there_at_every_moment_of_its_replacement(tmp_path):
    write_record(tmp_path / "run", record())
    done = threading.Event()

    def replace():
        for step in range(100):
            write_record(tmp_path / "run", record(step=step))
        done.set()

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(replace)
        while not done.is_set() and not writing.done():
            assert read_record(tmp_path / "run") is not None
        writing.result()
    assert read_record(tmp_path / "run") == record(step=99)
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as checkpointer:
        assert checkpointer.restore(tmp_path / "run" / "record") == to_json(record(step=99)), "Orbax's still"


def test_no_record_is_none(tmp_path):
    assert read_record(tmp_path) is None
    assert read_record(tmp_path / "missing") is None


def test_records_are_found_in_order_and_unreadable_ones_named(tmp_path):
    for run_id in ("b", "a"):
        write_record(tmp_path / run_id, record(run_id))
    (tmp_path / "notes").mkdir()
    (tmp_path / "sweep.json").write_text("{}")
    broken = tmp_path / "c" / "record"
    broken.mkdir(parents=True)
    (broken / "metadata").write_text("{not json")
    found = dict(find_records(tmp_path))
    assert [r.run_id for r in found.values() if isinstance(r, RunRecord)] == ["a", "b"]
    assert "not JSON" in str(found[str(tmp_path / "c")])


def test_a_single_run_is_found_by_its_own_directory(tmp_path):
    write_record(tmp_path / "a", record("a"))
    assert [r.run_id for _, r in find_records(tmp_path / "a")] == ["a"]


def test_a_missing_directory_is_an_error(tmp_path):
    with pytest.raises(UserError, match="no such directory"):
        list(find_records(tmp_path / "missing"))


def test_another_schema_is_refused(tmp_path):
    data = to_json(record()) | {"schema_version": 99}
    (tmp_path / "record").mkdir()
    (tmp_path / "record" / "metadata").write_text(json.dumps(data))
    with pytest.raises(UserError, match="schema 99"):
        read_record(tmp_path)


@pytest.mark.parametrize("loss", [None, float("nan"), float("inf")])
def test_a_done_run_has_a_finite_loss(loss):
    with pytest.raises(UserError, match="finite loss"):
        record(loss=loss)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokns": 3}, "tokns.*Did you mean 'tokens'"),
        ({"tokens": "many"}, "tokens: expected int, got 'many'"),
        ({"seed": True}, "seed: expected int, got True"),
        ({"status": "lost"}, "status: 'lost' is not one of"),
        ({"parameters": {"embed": 1}}, "parameters.unembed: missing"),
        ({"versions": []}, "versions: expected an object"),
    ],
)
def test_json_of_another_shape_names_the_key(change, message):
    with pytest.raises(UserError, match=message):
        from_json(RunRecord, to_json(record()) | change)


@pytest.mark.parametrize(
    ("convention", "once", "rec"),
    [
        ("published", 350, 400),
        ("injection-recurrent", 300, 450),
        ("no-injection", 300, 400),
        ("unembedding-once", 1350, 400),
        ("embeddings-once", 2350, 400),
    ],
)
def test_conventions_count_what_they_say(convention, once, rec):
    assert count_parameters(GROUPS, 4, convention) == (once, rec)


def test_every_convention_is_tested():
    assert len(CONVENTIONS) == 5
    with pytest.raises(UserError, match="Did you mean 'published'"):
        count_parameters(GROUPS, 4, "publisht")


def test_records_survive_json():
    text = json.dumps(to_json(record()))
    assert from_json(RunRecord, json.loads(text)) == record()
    assert dataclasses.asdict(record())["parameters"]["coda"] == 100
