"""A cloud of one's own: stand-ins for gcloud, kubectl, ssh and uv on PATH, with their state in a folder."""

import contextlib
import json
import os
import pathlib
import shlex
import signal
import sys

import pytest

RUNS = [f"run-{index:02}" for index in range(10)]
FAKES = pathlib.Path(__file__).parent / "fakes"


class Cloud:
    """What tests see of it and do to it."""

    def __init__(self, root):
        self.root = root

    def order(self, **what):
        """Says what is to go wrong (`DEFAULTS` of fakes/cloud.py)."""
        path = self.root / "orders.json"
        before = json.loads(path.read_text()) if path.exists() else {}
        part = path.with_name("orders.part")
        part.write_text(json.dumps(before | what))
        part.replace(path)  # machines read it at any moment

    @property
    def state(self):
        path = self.root / "state.json"
        return (
            json.loads(path.read_text()) if path.exists() else {"resources": {}, "jobsets": {}, "objects": {}}
        )

    def states(self):
        """State of every queued resource by name."""
        return {name: item["state"]["state"] for name, item in self.state["resources"].items()}

    def calls(self, *first):
        """The calls that began with these words, the program's name first."""
        path = self.root / "calls.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        calls = [json.loads(line) for line in lines]
        return [call for call in calls if call[: len(first)] == list(first)]

    def file(self, url):
        return self.root / "buckets" / url.removeprefix("gs://")

    def mark(self, url, share, shares):
        path = self.file(f"{url}/.launch/shares/{share}-of-{shares}.json")
        return json.loads(path.read_text()) if path.exists() else None

    def runs(self, url):
        """(steps counted, starts) of every run in a sweep's folder."""
        found = {}
        for run in sorted(self.file(url).iterdir()) if self.file(url).exists() else ():
            if (run / "steps").exists():
                steps = [int(line) for line in (run / "steps").read_text().split()]
                starts = [int(line) for line in (run / "starts").read_text().split()]
                found[run.name] = (steps, starts)
        return found

    def serial(self, name):
        """What a machine has printed."""
        return (self.root / "machines" / name / "serial").read_text()

    def end(self):
        on_hosts = [int(pid.read_text()) for pid in (self.root / "hosts").glob("*/.looped/*/pid")]
        for pid in (*self.state.get("processes", {}).values(), *on_hosts):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    root, programs = tmp_path / "cloud", tmp_path / "bin"
    root.mkdir()
    programs.mkdir()
    (root / "runs.json").write_text(json.dumps(RUNS))
    for program in ("gcloud", "kubectl", "ssh", "uv"):
        path = programs / program
        without_packages = [] if program == "kubectl" else ["-S"]  # starts faster
        command = shlex.join([sys.executable, *without_packages, str(FAKES / "program.py"), program])
        path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        path.chmod(0o755)
    monkeypatch.setenv("FAKE_CLOUD", str(root))
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    made = Cloud(root)
    yield made
    made.end()
