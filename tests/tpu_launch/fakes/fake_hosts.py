"""ssh, which ends with status 255 where it does not reach the host, and uv, which installs nothing."""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile

from cloud import HERE, ROOT, Gone, countdown, orders, parser


def host_home(host):
    home = ROOT / "hosts" / host
    home.mkdir(parents=True, exist_ok=True)
    return home


def host_environment(host):
    keep = {key: value for key, value in os.environ.items() if key.startswith(("FAKE_", "PATH"))}
    return keep | {
        "HOME": str(host_home(host)),
        "GCE_METADATA_IP": "127.0.0.1:1",
        "LOOPED_RETRY_SECONDS": "0.05",
    }


def ssh(argv):
    made = argparse.ArgumentParser(prog="ssh", allow_abbrev=False)
    made.add_argument("-o", action="append")
    made.add_argument("host")
    made.add_argument("command")
    given = made.parse_args(argv)
    rules = orders()
    if given.host not in rules["hosts"]:
        raise Gone(f"ssh: Could not resolve hostname {given.host}: Name or service not known", 255)
    if given.host in rules["unreachable"]:
        raise Gone(f"ssh: connect to host {given.host} port 22: Connection timed out", 255)
    return subprocess.run(
        ["bash", "-c", given.command], env=host_environment(given.host), check=False
    ).returncode


def uv(argv):
    if countdown("uv_fails"):
        raise Gone("error: Failed to fetch: `https://…`", 2)
    if argv[0] == "venv":
        folder = pathlib.Path(argv[-1]) / "bin"
        folder.mkdir(parents=True)
        python = folder / "python"
        python.write_text(
            (HERE / "python.sh").read_text().replace("@PYTHON@", sys.executable).replace("@HERE@", str(HERE))
        )
        python.chmod(0o755)
        return 0
    wanted = argv[-1]
    if "file://" in wanted:
        with tarfile.open(wanted.partition("file://")[2]) as archive:
            archive.extractfile("looped-source/pyproject.toml").read()
    return 0


def tpu_vm(verb, argv):
    made = parser(f"gcloud.compute.tpus.tpu-vm.{verb}", ("project", "zone", "worker", "command"), ())
    made.add_argument("names", nargs="+")
    given = made.parse_args(argv)
    target = given.names[-1].partition(":")
    workers = [host for host in orders()["hosts"] if host.startswith(f"{target[0]}-w")]
    if not workers:
        raise Gone(
            f"ERROR: (gcloud.compute.tpus.tpu-vm.{verb}) NOT_FOUND: Resource '{target[0]}' was not found"
        )
    for worker in workers:
        home = host_home(worker)
        if verb == "scp":
            shutil.copy(given.names[0], home / target[2])
        else:
            subprocess.run(
                ["bash", "-c", given.command],
                env=host_environment(worker),
                cwd=home,
                stdin=subprocess.DEVNULL,
                check=True,
            )
    return 0
