"""Whole sweeps on queued resources, with stand-ins for the cloud: real scripts and processes, no training."""

import pathlib
import time

import pytest

from looped import __main__ as command_line
from tpu_launch import operate
from tpu_launch.names import machine_name
from tpu_launch.watch import Watch

ROOT = pathlib.Path(__file__).parents[2]
SWEEP = "gs://bucket/my sweep's"  # a space and a quote, all the way to the machine
RUNS = 10  # as many as the quickstart has at its lower budget


def launch(*more, sweep=SWEEP, source="git+https://example.org/looped.git@v1"):
    arguments = ["tpu", "launch", "quickstart", "--output", sweep, "--engine", "queued", "--slice", "v5e:2x4"]
    arguments += ["--project", "p", "--zone", "us-west4-a", "--budgets", "8e10", "--pool", "3"]
    return command_line.main([*arguments, "--source", source, *more])


def watch(sweep=SWEEP, rounds=60, meanwhile=lambda round: None):
    """Watches with short rounds; `meanwhile` is called between two of them."""
    said = []
    with operate.outside() as run:
        found = operate.find_launch(run, sweep)
        watching = Watch(found, operate.engine_of(found), run, said.append)
        count = iter(range(rounds + 1))

        def sleep(seconds):
            meanwhile(next(count))
            time.sleep(0.1)

        return watching.run(0.0, rounds=rounds, sleep=sleep), "\n".join(said)


def name(share, shares=3, sweep=SWEEP):
    return machine_name(sweep, share, shares)


def all_done_once(cloud):
    runs = cloud.runs(SWEEP)
    assert len(runs) == RUNS
    for steps, starts in runs.values():
        assert steps == list(range(10))
        assert starts[0] == 0
    return runs


def test_a_sweep_from_launch_to_done_leaves_no_machine(cloud, capsys):
    assert launch("--spot") == 0
    assert "3 of 3 shares were started, for 10 runs" in capsys.readouterr().out
    assert set(cloud.states()) == {name(1), name(2), name(3)}
    seen, said = watch()
    assert seen.over
    assert [seen.ending(share) for share in (1, 2, 3)] == ["done"] * 3
    assert cloud.states() == {}
    assert all(len(starts) == 1 for _, starts in all_done_once(cloud).values())
    assert "ACTIVE" in said
    assert cloud.calls("gcloud", "compute", "tpus", "queued-resources", "create").__len__() == 3
    # Each machine asked for its own end, so that it would have stopped costing with nobody watching.
    assert "queued-resources delete" in cloud.serial(name(1))


def test_launching_twice_creates_nothing_twice(cloud, capsys):
    assert launch() == 0
    assert launch() == 0
    assert "0 of 3 shares were started" in capsys.readouterr().out
    watch()
    assert launch() == 0  # all is done
    assert cloud.states() == {}
    assert len(cloud.calls("gcloud", "compute", "tpus", "queued-resources", "create")) == 3


def test_the_source_that_is_here_is_uploaded_and_installed_and_may_change_between_launches(
    cloud, tmp_path, capsys
):
    copy = tmp_path / "copy"
    for folder in ("looped", "experiments", "fit", "tpu_launch"):
        (copy / folder).mkdir(parents=True)
        (copy / folder / "__init__.py").write_text("")
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        (copy / file).write_text(file)
    for file in ("__init__.py", "source.py"):
        (copy / "tpu_launch" / file).write_bytes((ROOT / "tpu_launch" / file).read_bytes())
    (copy / "looped" / "errors.py").write_bytes((ROOT / "looped" / "errors.py").read_bytes())
    assert launch(source=str(copy)) == 0
    assert launch(source=str(copy)) == 0
    uploaded = sorted(path.name for path in cloud.file(f"{SWEEP}/.launch").glob("source-*.tar.gz"))
    assert len(uploaded) == 1
    assert len([call for call in cloud.calls("gcloud", "storage", "cp") if "source-" in call[-1]]) == 1
    (copy / "looped" / "mended.py").write_text("x = 1")
    capsys.readouterr()
    assert launch(source=str(copy)) == 0
    assert f"those at work go on with {uploaded[0]}" in capsys.readouterr().out
    seen, _ = watch()
    assert [seen.ending(share) for share in (1, 2, 3)] == ["done"] * 3  # the archive was there to install


def test_preempted_machines_are_made_again_and_runs_go_on_from_what_was_saved(cloud, monkeypatch):
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.1")
    assert launch("--spot") == 0
    own = {share: [f"run-{index:02}" for index in range(share - 1, RUNS, 3)] for share in (1, 2, 3)}
    lost = []

    def meanwhile(round):
        for share, ids in own.items():
            counted = [len(steps) for run, (steps, _) in cloud.runs(SWEEP).items() if run in ids]
            if any(0 < steps < 8 for steps in counted) and cloud.states().get(name(share)) == "ACTIVE":
                lost.append(share)
                cloud.order(lose=[name(share)] if len(lost) <= 4 else [])
                return

    seen, said = watch(rounds=300, meanwhile=meanwhile)
    assert seen.over
    assert len(lost) >= 4
    assert said.count("it was taken away") >= 4
    starts = [starts for _, starts in all_done_once(cloud).values()]
    assert any(later > 0 for own in starts for later in own[1:])
    assert cloud.states() == {}


def test_a_connection_lost_in_the_middle_of_a_creation_creates_nothing_twice(cloud, capsys):
    cloud.order(drop_create=1)
    assert launch() == 2
    error = capsys.readouterr().err
    assert "what was begun is found and not begun twice" in error
    assert cloud.states() == {name(1): "WAITING_FOR_RESOURCES"}
    assert launch() == 0
    assert set(cloud.states()) == {name(1), name(2), name(3)}
    created = [call[5] for call in cloud.calls("gcloud", "compute", "tpus", "queued-resources", "create")]
    assert sorted(created) == sorted(cloud.states())


def test_a_refusal_for_quota_names_what_runs_and_the_same_command_goes_on(cloud, capsys):
    cloud.order(quota_chips=16)
    assert launch() == 2
    error = capsys.readouterr().err
    assert "Quota limit 'TPUV5sLitepodPerProjectPerRegionForTPUAPI' has been exceeded" in error
    assert "Share 3/3 was not started; 2 of 3 shares have machines" in error
    assert name(1) in error
    assert "looped tpu delete" in error
    assert error.count("\n") == 1
    # The two that are there free the quota as they end, and the watch gets the third machine.
    seen, _ = watch(rounds=120)
    assert seen.over
    assert seen.ending(3) == "done"
    all_done_once(cloud)


def test_requests_that_fail_in_the_queue_are_deleted_and_given_up_in_the_end(cloud):
    cloud.order(quota_chips=4, refuse_at_once=False)
    assert launch() == 0
    seen, said = watch()
    assert seen.over
    assert [seen.given_up(share) for share in (1, 2, 3)] == [True] * 3
    assert "exhausted" in said
    assert cloud.states() == {}  # what failed holds quota until it is deleted


def test_a_share_that_fails_three_times_is_given_up_and_no_secret_gets_out(cloud, monkeypatch, capsys):
    bad = "run-04"  # of the second share
    monkeypatch.setenv("FAKE_FAILS", bad)
    assert launch("--secrets", "WANDB_API_KEY=wandb") == 0
    seen, said = watch(rounds=120)
    assert seen.over
    assert [seen.ending(share) for share in (1, 2, 3)] == ["done", "failed", "done"]
    assert "share 2/3 failed 3 times and is given up (status 1" in said
    assert "--retry-failed" in said
    assert cloud.states() == {}
    assert cloud.mark(SWEEP, 2, 3)["failures"] == 3
    log = cloud.file(f"{SWEEP}/.launch/logs/2-of-3.log").read_text()
    assert f"the loss of {bad} is a secret: ***" in log  # which the sweep had printed
    assert launch("--secrets", "WANDB_API_KEY=wandb", "--dry-run") == 0
    assert "the-secret-value" not in capsys.readouterr().out
    kept = [path for path in cloud.root.rglob("*") if path.is_file()]
    assert not [path for path in kept if "the-secret-value" in path.read_text(errors="ignore")]
    assert command_line.main(["tpu", "watch", SWEEP, "--seconds", "0.1"]) == 1

    assert launch("--secrets", "WANDB_API_KEY=wandb") == 0  # without being asked it stays given up
    assert cloud.states() == {}
    monkeypatch.delenv("FAKE_FAILS")
    assert launch("--secrets", "WANDB_API_KEY=wandb", "--retry-failed") == 0
    assert "had failed and starts again" in capsys.readouterr().out
    seen, _ = watch(rounds=120)
    assert seen.ending(2) == "done"
    all_done_once(cloud)


def test_an_installation_that_fails_three_times_is_marked_and_ended(cloud, monkeypatch):
    cloud.order(uv_fails=9)
    monkeypatch.setattr("tpu_launch.startup.PAUSE", 0)
    assert launch() == 0
    seen, said = watch(rounds=120)
    assert seen.over
    assert [seen.ending(share) for share in (1, 2, 3)] == ["failed"] * 3
    assert "the project could not be installed" in said
    assert cloud.states() == {}


def test_two_launches_of_different_kinds_on_one_sweep_are_refused(cloud, capsys):
    assert launch() == 0
    assert launch("--spot") == 2
    error = capsys.readouterr().err
    assert "launched already" in error
    assert "looped tpu delete" in error
    assert len(cloud.states()) == 3


def test_two_watches_on_one_launch_are_refused(cloud, capsys):
    assert launch() == 0
    with operate.outside() as run:
        found = operate.find_launch(run, SWEEP)
        other = '{"pid": 1, "host": "elsewhere", "time": 1e12, "patience": 60}'
        run.run(operate.store.write_call(f"{found.folder}/watch.json", other))
    assert command_line.main(["tpu", "watch", SWEEP]) == 2
    assert "process 1 on elsewhere watches this launch" in capsys.readouterr().err


def test_delete_takes_all_machines_away_and_the_sweep_can_be_launched_otherwise(cloud, capsys):
    assert launch() == 0
    assert command_line.main(["tpu", "delete", SWEEP, "--dry-run"]) == 0
    assert len(cloud.states()) == 3
    assert f"queued-resources delete {name(1)}" in capsys.readouterr().out
    assert command_line.main(["tpu", "delete", SWEEP]) == 0
    assert set(cloud.states().values()) == {"DELETING"}
    assert command_line.main(["tpu", "list", SWEEP]) == 2
    assert "holds no launch" in capsys.readouterr().err
    assert launch("--spot", "--pool", "2") == 0
    seen, _ = watch(rounds=120)
    assert seen.over
    all_done_once(cloud)


def test_delete_finished_leaves_what_is_at_work(cloud, monkeypatch):
    monkeypatch.setenv("FAKE_STEP_SECONDS", "5")
    assert launch("--spot") == 0
    for _ in range(2):
        operate.project_machines("p", "-")
    cloud.order(lose=[name(2)])
    for _ in range(2):
        operate.project_machines("p", "-")
    assert cloud.states()[name(2)] == "SUSPENDED"
    assert command_line.main(["tpu", "delete", SWEEP, "--finished"]) == 0
    assert {own: state for own, state in cloud.states().items() if state != "DELETING"} == {
        name(1): "ACTIVE",
        name(3): "ACTIVE",
    }


def test_list_shows_every_machine_of_the_project_with_what_it_costs(cloud, capsys):
    import json

    assert launch("--spot") == 0
    capsys.readouterr()
    assert command_line.main(["tpu", "list", "--project", "p", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [name(1), name(2), name(3)]
    assert {row["sweep"] for row in rows} == {SWEEP}
    assert {row["accelerator"] for row in rows} == {"v5litepod-8"}
    assert not any(row["costs"] for row in rows)
    command_line.main(["tpu", "list", "--project", "p"])
    capsys.readouterr()
    assert command_line.main(["tpu", "list", SWEEP]) == 0
    text = capsys.readouterr().out
    assert "ACTIVE" in text
    assert "yes" in text
    assert "share 1/3" in text


@pytest.mark.parametrize(
    ("orders", "expected"),
    [
        ({"credentials": False}, "gcloud auth login"),
        ({"zones": ["elsewhere"]}, "gcloud compute tpus locations list"),
        ({"accelerators": []}, "gcloud compute tpus accelerator-types list"),
        ({"no_bucket": True}, "gcloud storage buckets create"),
        ({"read_only": True}, "tpu_launch/README.md"),
        ({"quota_chips": 0}, "looped tpu list"),
    ],
)
def test_what_the_cloud_refuses_is_one_sentence_with_a_remedy_and_leaves_nothing(
    cloud, capsys, orders, expected
):
    cloud.order(**orders)
    assert launch() == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert captured.err.count("\n") == 1
    assert cloud.states() == {}
    cloud.order(
        **{"credentials": True, "zones": ["us-west4-a"], "accelerators": ["v5litepod-8"], "no_bucket": False}
    )
    cloud.order(read_only=False, quota_chips=1000)
    assert launch("--spot") == 0  # nothing was claimed by the failed one


def test_without_gcloud_the_remedy_is_named(cloud, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert launch() == 2
    assert "gcloud is not on PATH; install the Google Cloud CLI" in capsys.readouterr().err


def test_a_sweep_of_another_version_or_kind_is_refused_before_anything_is_asked_for(cloud, capsys):
    manifest = cloud.file(f"{SWEEP}/sweep.json")
    manifest.parent.mkdir(parents=True)
    manifest.write_text('{"schema_version": 99}')
    assert launch() == 2
    error = capsys.readouterr().err
    assert "sweep schema 99" in error
    assert SWEEP in error
    assert manifest.read_text() == '{"schema_version": 99}'
    assert not cloud.file(f"{SWEEP}/.launch").exists()


def test_a_launch_of_another_version_is_refused(cloud, capsys):
    assert launch() == 0
    path = cloud.file(f"{SWEEP}/.launch/launch.json")
    text = path.read_text().replace('"schema_version": 1', '"schema_version": 7')
    path.write_text(text)
    assert launch() == 2
    assert "launch schema 7" in capsys.readouterr().err
    assert path.read_text() == text
