"""What each engine does, to the last word, against files written and read by hand.

The gcloud lines of the files follow `gcloud compute tpus queued-resources create --help` and the pages on queued
resources, multislice and start-up scripts; `test_the_real_gcloud_takes_every_flag` has the program itself read them
where it is installed.  The manifests are checked against the published field rules in test_manifest_rules.py.
"""

import os
import pathlib
import re
import shlex
import shutil
import subprocess

import pytest

from looped import __main__ as command_line

GOLDEN = pathlib.Path(__file__).parent / "golden"
COMMON = ("quickstart", "--budgets", "8e10", "--source", "git+https://example.org/looped.git@v1", "--dry-run")
BUCKET = ("--output", "gs://bucket/sweeps/my sweep's")
LAUNCHES = {
    "queued-spot.sh": (
        *BUCKET,
        *(
            "--engine",
            "queued",
            "--project",
            "my-project",
            "--zone",
            "us-west4-a",
            "--slice",
            "v5e:4x4",
            "--spot",
        ),
        *("--pool", "2", "--secrets", "WANDB_API_KEY=wandb", "--data", "gs://bucket/data"),
    ),
    "queued-two-slices.sh": (
        *BUCKET,
        *("--engine", "queued", "--project", "my-project", "--zone", "us-east5-b", "--slice", "v4:2x2x4"),
        *("--slices", "2", "--reserved", "--service-account", "looped@my-project.iam.gserviceaccount.com"),
        *("--network", "net", "--subnetwork", "sub"),
    ),
    "gke-spot.sh": (
        *BUCKET,
        *("--engine", "gke", "--slice", "v5e:4x4", "--spot", "--pool", "4", "--context", "my-cluster"),
        *("--namespace", "research", "--secrets", "WANDB_API_KEY=wandb", "--service-account", "looped"),
    ),
    "ssh-two-hosts.sh": (
        *("--output", "/shared/my sweep"),
        *("--engine", "ssh", "--slice", "v4:2x2x2", "--hosts", "worker-0", "me@worker-1"),
    ),
    "ssh-tpu-vms.sh": (
        *BUCKET,
        *(
            "--engine",
            "ssh",
            "--slice",
            "v6e:2x4",
            "--tpu-vms",
            "vm-1",
            "--project",
            "p",
            "--zone",
            "us-east5-b",
        ),
    ),
}


def printed(name, capsys):
    assert command_line.main(["tpu", "launch", *COMMON, *LAUNCHES[name]]) == 0
    return capsys.readouterr().out


def first_share(text, engine):
    """Up to the second share: the others differ by their number alone."""
    if engine != "gke":
        return text
    return text[: text.index("END\n", text.index("kind: JobSet")) + 4]


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_dry_run_prints_the_golden_script_and_touches_nothing(name, capsys, cloud):
    text = printed(name, capsys)
    assert first_share(text, name.split("-")[0]) == (GOLDEN / name).read_text()
    assert not cloud.calls()


@pytest.mark.parametrize("name", LAUNCHES)
def test_what_is_printed_runs_in_a_shell_and_does_what_launching_does(name, capsys, cloud, tmp_path):
    """The printed script, run by a shell, makes the same calls with the same words as the launch."""
    if name == "ssh-two-hosts.sh":
        pytest.skip("writes to /shared")
    cloud.order(accelerators=["v5litepod-16", "v4-32"], hosts=["vm-1-w0", "worker-0", "me@worker-1"])
    text = printed(name, capsys)
    subprocess.run(["bash", "-e", "-c", text], check=True, cwd=tmp_path)
    state = {key: set(cloud.state[key]) for key in ("resources", "jobsets", "objects")}
    assert cloud.calls()
    arguments = [word for word in (*COMMON, *LAUNCHES[name]) if word != "--dry-run"]
    assert command_line.main(["tpu", "launch", *arguments]) == 0  # all is there already
    started = capsys.readouterr().out
    assert "0 of" in started or name.startswith("ssh")
    assert {key: set(cloud.state[key]) for key in state} == state


@pytest.mark.parametrize("name", LAUNCHES)
def test_the_start_up_scripts_are_sound_shell(name, capsys):
    text = printed(name, capsys)
    scripts = [part.split("\nEND")[0] for part in text.split("#!/usr/bin/env bash\n")[1:]]
    assert scripts
    for script in scripts:
        done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LAUNCHES if name != "ssh-two-hosts.sh"])
def test_the_real_gcloud_takes_every_flag(name, capsys, tmp_path):
    """Without credentials gcloud reads its arguments first, and names what it does not know, or asks for a login."""
    if shutil.which("gcloud") is None:
        pytest.skip("gcloud is not installed")
    lines = [line for line in printed(name, capsys).splitlines() if line.startswith("gcloud ")]
    calls = {
        tuple(line.split()[1:5]): shlex.split(line.split(" <<'END'")[0]) for line in lines
    }  # one of each kind
    (tmp_path / "any.sh").write_text("true\n")
    for words in calls.values():
        words = [
            re.sub(r"^(--metadata-from-file=startup-script=)?looped-.*\.sh$", r"\1any.sh", word)
            for word in words
        ]
        done = subprocess.run(
            words,
            cwd=tmp_path,
            input="",
            text=True,
            capture_output=True,
            env=os.environ
            | {"CLOUDSDK_CONFIG": str(tmp_path / "config"), "CLOUDSDK_CORE_DISABLE_PROMPTS": "1"},
        )
        assert "unrecognized arguments" not in done.stderr
        assert "Usage:" not in done.stderr
        assert "active account selected" in done.stderr, done.stderr
