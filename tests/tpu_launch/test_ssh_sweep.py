"""Whole sweeps on hosts that are there, with a stand-in for ssh that runs the commands in homes of their own."""

import os
import pathlib
import signal
import time

import pytest

from experiments import manifest
from experiments.presets import preset
from looped import __main__ as command_line
from tpu_launch import operate
from tpu_launch.names import machine_name
from tpu_launch.watch import Watch


@pytest.fixture
def sweep(cloud, tmp_path):
    """A folder that all hosts share."""
    return str(tmp_path / "shared folder" / "sweep")


def launch(sweep, *more):
    arguments = ["tpu", "launch", "quickstart", "--output", sweep, "--engine", "ssh", "--budgets", "8e10"]
    return command_line.main([*arguments, "--source", "git+https://example.org/looped.git@v1", *more])


def watch(sweep, rounds=60, meanwhile=lambda: None):
    said = []
    with operate.outside() as run:
        found = operate.find_launch(run, sweep)

        def sleep(seconds):
            meanwhile()
            time.sleep(0.1)

        watching = Watch(found, operate.engine_of(found), run, said.append)
        return watching.run(0.0, rounds=rounds, sleep=sleep), "\n".join(said)


def steps(sweep):
    found = sorted(pathlib.Path(sweep).glob("run-*/steps"))
    return {path.parent.name: [int(line) for line in path.read_text().split()] for path in found}


def home(cloud, host, sweep, share, shares):
    return cloud.root / "hosts" / host / ".looped" / machine_name(sweep, share, shares)


def test_each_host_takes_a_share_and_a_killed_one_is_started_again(cloud, sweep, monkeypatch):
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.1")
    assert launch(sweep, "--hosts", "h1", "h2") == 0
    assert launch(sweep, "--hosts", "h1", "h2") == 0  # at work already: no second start
    killed = []

    def meanwhile():
        if not killed and any(0 < len(own) < 8 for own in steps(sweep).values()):
            killed.append(int((home(cloud, "h1", sweep, 1, 2) / "pid").read_text()))
            os.killpg(killed[0], signal.SIGKILL)

    seen, said = watch(sweep, rounds=150, meanwhile=meanwhile)
    assert seen.over
    assert killed
    assert f"create {machine_name(sweep, 1, 2)}: it goes on" in said
    assert len(steps(sweep)) == 10
    assert all(own == list(range(10)) for own in steps(sweep).values())


def test_delete_lets_the_sweep_save_and_the_next_launch_goes_on(cloud, sweep, monkeypatch):
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.3")
    assert launch(sweep, "--hosts", "h1") == 0
    deadline = time.monotonic() + 60
    while not any(steps(sweep).values()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert command_line.main(["tpu", "delete", sweep]) == 0
    before = steps(sweep)
    log = (home(cloud, "h1", sweep, 1, 1) / "log").read_text()
    assert "sweep run quickstart" in log
    time.sleep(0.7)
    assert steps(sweep) == before
    manifest.write(
        sweep, manifest.Manifest("quickstart", preset("quickstart").specs((), (8e10,)))
    )  # as a sweep does
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0")
    assert launch(sweep, "--hosts", "h1") == 0
    seen, _ = watch(sweep)
    assert seen.over
    assert all(own == list(range(10)) for own in steps(sweep).values())


def test_hosts_of_one_slice_are_told_of_each_other(cloud, sweep):
    assert launch(sweep, "--hosts", "h1", "u@h2", "--slice", "v4:2x2x2", "--dry-run") == 0
    assert not pathlib.Path(sweep).exists()
    cloud.order(hosts=["h1", "u@h2"])
    assert launch(sweep, "--hosts", "h1", "u@h2", "--slice", "v4:2x2x2") == 0
    scripts = [
        (cloud.root / "hosts" / host / ".looped" / machine_name(sweep, 1, 1) / "start.sh").read_text()
        for host in ("h1", "u@h2")
    ]
    for index, script in enumerate(scripts):
        assert "export JAX_COORDINATOR_ADDRESS=h1:8476" in script
        assert "export JAX_NUM_PROCESSES=2" in script
        assert f"export JAX_PROCESS_ID={index}" in script
        assert " --distributed" in script


def test_workers_of_a_tpu_vm_are_reached_by_gcloud(cloud, sweep):
    place = ("--tpu-vms", "vm-1", "--project", "p", "--zone", "us-west4-a")
    assert launch(sweep, *place) == 0
    seen, _ = watch(sweep, rounds=100)
    assert seen.over
    for worker in ("vm-1-w0", "vm-1-w1"):
        assert (home(cloud, worker, sweep, 1, 1) / "log").exists()
    assert set(steps(sweep)) == {f"run-{index:02}" for index in range(10)}


def test_unreachable_and_unknown_hosts_are_named_and_the_others_go_on(cloud, sweep, capsys):
    assert launch(sweep, "--hosts", "h1", "nowhere") == 2
    error = capsys.readouterr().err
    assert "Could not resolve hostname nowhere" in error
    assert "try `ssh HOST true` by hand" in error
    assert command_line.main(["tpu", "delete", sweep]) in (0, 2)

    other = sweep + "-2"
    cloud.order(unreachable=["h2"])
    assert launch(other, "--hosts", "h1", "h2") == 2
    assert "Connection timed out" in capsys.readouterr().err
    cloud.order(unreachable=[])
    assert launch(other, "--hosts", "h1", "h2") == 0
    seen, _ = watch(other)
    assert seen.over


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--hosts", "-oProxyCommand=x"), "hosts has '-oProxyCommand=x'"),
        (("--hosts", "a b"), "hosts has 'a b'"),
        ((), "needs either --hosts or --tpu-vms"),
        (("--hosts", "h1", "--slice", "v4:2x2x2"), "name all hosts of every slice"),
        (("--tpu-vms", "vm-1"), "--project is needed"),
        (("--hosts", "h1", "--spot"), "--spot is of --engine queued and gke"),
        (("--hosts", "h1", "h2", "--pool", "3"), "the hosts make up 2 shares"),
    ],
)
def test_bad_hosts_are_refused(cloud, sweep, capsys, options, expected):
    arguments = (
        [f"{options[0]}={options[1]}", *options[2:]] if options[1:2] == ("-oProxyCommand=x",) else options
    )
    assert launch(sweep, *arguments) == 2
    assert expected in capsys.readouterr().err
    assert not cloud.calls()
