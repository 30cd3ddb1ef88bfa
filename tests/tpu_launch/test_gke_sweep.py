"""Whole sweeps as JobSets, with stand-ins for kubectl, JobSet and Kueue that read the manifests."""

import json
import time

import pytest

from looped import __main__ as command_line
from tpu_launch import operate
from tpu_launch.names import machine_name
from tpu_launch.watch import Watch

SWEEP = "gs://bucket/gke"
SHARES = 10  # the runs of the quickstart's lower budget: a JobSet each


def launch(*more):
    arguments = [
        "tpu",
        "launch",
        "quickstart",
        "--output",
        SWEEP,
        "--engine",
        "gke",
        "--slice",
        "v5e:2x4",
        "--pool",
        "4",
    ]
    return command_line.main(
        [*arguments, "--budgets", "8e10", "--source", "git+https://example.org/looped.git@v1", *more]
    )


def watch(rounds=80, meanwhile=lambda: None):
    said = []
    with operate.outside() as run:
        found = operate.find_launch(run, SWEEP)

        def sleep(seconds):
            meanwhile()
            time.sleep(0.1)

        watching = Watch(found, operate.engine_of(found), run, said.append)
        return watching.run(0.0, rounds=rounds, sleep=sleep), "\n".join(said)


def name(share):
    return machine_name(SWEEP, share, SHARES)


def test_every_run_is_a_jobset_and_kueue_lets_as_many_in_as_the_pool(cloud, capsys, monkeypatch):
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.05")
    assert launch() == 0
    assert "10 of 10 shares were started, for 10 runs" in capsys.readouterr().out
    assert len(cloud.state["jobsets"]) == SHARES
    most = 0

    def meanwhile():
        nonlocal most
        jobsets = cloud.state["jobsets"].values()
        at_work = [j for j in jobsets if not j["spec"]["suspend"] and not j["status"].get("terminalState")]
        most = max(most, len(at_work))

    seen, said = watch(rounds=200, meanwhile=meanwhile)
    assert seen.over
    assert {seen.ending(share) for share in range(1, SHARES + 1)} == {"done"}
    assert most == 4
    assert "Suspended" in said
    assert len(cloud.runs(SWEEP)) == SHARES
    assert all(steps == list(range(10)) for steps, _ in cloud.runs(SWEEP).values())
    assert launch() == 0
    assert "0 of 10 shares were started" in capsys.readouterr().out
    assert command_line.main(["tpu", "delete", SWEEP]) == 0
    assert cloud.state["jobsets"] == {}
    assert cloud.state["objects"] == {}


@pytest.mark.slow
def test_preempted_pods_start_again_without_counting_and_failed_ones_three_times(cloud, monkeypatch):
    monkeypatch.setenv("FAKE_FAILS", "run-02")
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.2")
    assert launch("--secrets", "WANDB_API_KEY=wandb") == 0
    lost = []

    def meanwhile():
        runs = cloud.runs(SWEEP)
        if len(lost) < 3 and 0 < len(runs.get("run-00", ([], []))[0]) < 8:
            lost.append(name(1))
            cloud.order(lose=[name(1)])

    seen, said = watch(rounds=300, meanwhile=meanwhile)
    assert seen.over
    assert [seen.ending(share) for share in range(1, 5)] == ["done", "done", "failed", "done"]
    preempted, failed = (cloud.state["jobsets"][name(share)]["status"] for share in (1, 3))
    assert preempted["restarts"] >= 2
    assert "restartsCountTowardsMax" not in preempted
    assert failed["restartsCountTowardsMax"] == 3
    assert len(cloud.runs(SWEEP)["run-00"][1]) >= 2
    assert "share 3/10 failed 3 times and is given up" in said
    assert "a secret: ***" in cloud.serial(name(3))
    assert "the-secret-value" not in json.dumps(cloud.state)

    monkeypatch.delenv("FAKE_FAILS")
    assert launch("--secrets", "WANDB_API_KEY=wandb", "--retry-failed") == 0
    seen, _ = watch(rounds=100)
    assert seen.ending(3) == "done"


def test_a_queue_that_is_there_is_used_and_none_is_made(cloud):
    assert launch("--queue", "team") == 0
    assert cloud.state["objects"] == {}
    labels = [item["metadata"]["labels"] for item in cloud.state["jobsets"].values()]
    assert {label["kueue.x-k8s.io/queue-name"] for label in labels} == {"team"}


def test_a_cluster_without_jobset_or_credentials_is_named(cloud, capsys):
    cloud.order(jobset_installed=False)
    assert launch() == 2
    assert "install JobSet in the cluster" in capsys.readouterr().err
    cloud.order(credentials=False)
    assert launch() == 2
    assert "gcloud auth login" in capsys.readouterr().err
