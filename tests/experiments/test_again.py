"""Where a run goes is a function of its content: however a sweep is submitted, each run is made once."""

import os
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_sweep import calls, run, specs

from experiments import claims, manifest
from experiments.presets import preset
from experiments.shares import Share
from looped.errors import UserError
from looped.record import find_records

WANTED = specs("full", "other", widths=(16, 32), budgets=(1e9, 2e9))


def times_trained(directory):
    return {spec.run_id: len(calls(directory, spec)) for spec in WANTED}


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.permutations(WANTED),
    st.lists(st.lists(st.sampled_from(WANTED), min_size=1, unique=True), max_size=2),
)
def test_again_in_another_order_or_in_part_trains_nothing_twice(tmp_path_factory, order, parts):
    directory = tmp_path_factory.mktemp("sweep")
    run(WANTED, directory)
    before = (directory / "sweep.json").read_bytes()
    for submitted in (order, *parts):
        outcome = run(tuple(submitted), directory)
        assert outcome.log is None, "nothing to train"
        assert [r.run_id for r in outcome.runs] == [spec.run_id for spec in submitted]
    assert times_trained(directory) == {spec.run_id: 1 for spec in WANTED}
    assert (directory / "sweep.json").read_bytes() == before


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 1, 0, 2)])
def test_shares_in_any_order_make_the_whole_once(tmp_path, order):
    for index in order:
        run(WANTED[::-1] if index else WANTED, tmp_path, share=Share(index + 1, 3))
    assert times_trained(tmp_path) == {spec.run_id: 1 for spec in WANTED}
    assert run(WANTED, tmp_path).there_before == len(WANTED)


def test_a_part_takes_its_share_of_the_whole_sweep(tmp_path):
    """Else two machines that were given different parts would share them out differently, and train a run twice."""
    run(WANTED, tmp_path, share=Share(1, 2))
    part = WANTED[:3]
    outcome = run(part, tmp_path, share=Share(2, 2))
    expected = Share(2, 2).run_ids(WANTED) & {spec.run_id for spec in part}
    assert {r.run_id for r in outcome.runs} == expected
    assert manifest.read(tmp_path).specs == WANTED


SCRIPT = """
import sys
from test_again import WANTED
from test_sweep import run
from experiments import claims
from experiments.shares import Share
claims.SETTLE_SECONDS = 0.2
run(WANTED, sys.argv[1], share=Share.parse(sys.argv[2]))
"""


@pytest.mark.parametrize("where", ["local", "remote"])
def test_shares_at_once_in_one_folder_make_the_whole_once(tmp_path, where, request):
    directory = tmp_path / "sweep" if where == "local" else request.getfixturevalue("bucket") / "sweep"
    path = os.pathsep.join(p for p in sys.path if p)
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"import fake_bucket\n{SCRIPT}" if where == "remote" else SCRIPT,
                str(directory),
                share,
            ],
            env=os.environ | {"PYTHONPATH": path},
            stderr=subprocess.PIPE,
            text=True,
        )
        for share in ("1/2", "2/2")
    ]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    there = tmp_path / "gs" / "bucket" / "sweep" if where == "remote" else directory
    assert times_trained(there) == {spec.run_id: 1 for spec in WANTED}
    assert {record.run_id for _, record in find_records(directory)} == {spec.run_id for spec in WANTED}
    assert claims.holders(directory) == []


def test_a_sweep_does_not_grow_while_a_share_of_it_is_at_work(tmp_path):
    """The shares of the larger sweep are others: a run could be in one of each."""
    run(WANTED[:4], tmp_path)
    there = manifest.read(tmp_path)
    with (
        claims.hold(tmp_path, Share(1, 2), there.fingerprint),
        pytest.raises(UserError, match="of other runs than these"),
    ):
        run(WANTED, tmp_path, share=Share(2, 2))
    assert manifest.read(tmp_path) == there
    assert {r.state for r in run(WANTED, tmp_path, share=Share(2, 2)).runs} == {"done"}


def test_a_share_without_runs_has_nothing_to_do(tmp_path):
    outcome = run(WANTED[:2], tmp_path, share=Share(3, 3))
    assert (outcome.runs, outcome.log) == ((), None)


def test_run_ids_and_seeds_do_not_depend_on_how_a_preset_is_asked_for():
    whole = {spec.run_id: spec for spec in preset("laptop").specs()}
    for part in (preset("laptop").specs(budgets=(4e11, 2e12)), preset("laptop").specs(budgets=(2e12, 4e11))):
        assert all(whole[spec.run_id] == spec for spec in part)
