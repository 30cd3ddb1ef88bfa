"""What the stand-ins for gcloud, kubectl, ssh and uv share: their state in the folder $FAKE_CLOUD, and machines.

A machine is a process with a home of its own that runs the start-up script it was given.  Time passes when somebody
looks: every `list` or `get` takes each machine one state further.  `orders.json` says what goes wrong; tests write it.
"""

import argparse
import contextlib
import fcntl
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(os.environ["FAKE_CLOUD"])
HERE = pathlib.Path(__file__).resolve().parent
DEFAULTS = {
    "credentials": True,
    "zones": ["us-west4-a", "us-east5-b"],
    "accelerators": ["v5litepod-8", "v5litepod-16", "v6e-16"],
    "quota_chips": 1000,
    "refuse_at_once": True,  # else a request over the quota fails later, in the queue
    "lose": [],  # names of machines that are taken away at the next look
    "drop_create": 0,  # creations that succeed while gcloud loses the connection
    "no_bucket": False,
    "read_only": False,
    "uv_fails": 0,
    "unreachable": [],
    "hosts": ["h1", "h2", "vm-1-w0", "vm-1-w1"],
    "jobset_installed": True,
}


class Gone(SystemExit):
    """Ends the program with words on stderr."""

    def __init__(self, text, status=1):
        print(text, file=sys.stderr)
        super().__init__(status)


def write(path, value):
    """Whole or not at all: the machines that write are killed at any moment, and others read at any moment."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(json.dumps(value))
    part.replace(path)


@contextlib.contextmanager
def state():
    """The state, locked and written back."""
    with open(ROOT / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = ROOT / "state.json"
        value = json.loads(path.read_text()) if path.exists() else {}
        for key in ("resources", "jobsets", "objects", "processes"):
            value.setdefault(key, {})
        try:
            yield value
        finally:
            write(path, value)


def orders():
    path = ROOT / "orders.json"
    return DEFAULTS | (json.loads(path.read_text()) if path.exists() else {})


def countdown(name):
    """Whether this is still one of the first `orders[name]` times."""
    given = orders()
    if given[name] > 0:
        write(ROOT / "orders.json", given | {name: given[name] - 1})
        return True
    return False


def boot(value, name, script, environment):
    home = ROOT / "machines" / name
    home.mkdir(parents=True, exist_ok=True)
    (home / "script.sh").write_text(script)
    # A new machine knows nothing of the launcher's environment.
    own = {
        "PATH": os.environ["PATH"],
        "FAKE_CLOUD": str(ROOT),
        "HOME": str(home),
        "LOOPED_HOME": str(home / "looped"),
    }
    own |= {"GCE_METADATA_IP": "127.0.0.1:1", "LOOPED_RETRY_SECONDS": "0.05"} | environment
    for key in ("FAKE_STEP_SECONDS", "FAKE_FAILS"):
        if key in os.environ:
            own[key] = os.environ[key]
    status = home / "status"
    status.unlink(missing_ok=True)
    with open(home / "serial", "ab") as output:
        runner = 'bash "$0"; echo $? > "$1.part"; mv "$1.part" "$1"'
        process = subprocess.Popen(
            ["bash", "-c", runner, str(home / "script.sh"), str(status)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=own,
            start_new_session=True,
        )
    value["processes"][name] = process.pid


def kill(value, name, grace):
    """SIGTERM, and SIGKILL after `grace` seconds."""
    pid = value["processes"].pop(name, None)
    if pid is None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGTERM)
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline:
            os.killpg(pid, 0)
            time.sleep(0.02)
        os.killpg(pid, signal.SIGKILL)


def status_of(name):
    path = ROOT / "machines" / name / "status"
    return int(path.read_text()) if path.exists() else None


def parser(command, flags, switches):
    made = argparse.ArgumentParser(prog=command, allow_abbrev=False)
    for flag in flags:
        made.add_argument(f"--{flag}")
    for flag in ("quiet", "async", *switches):
        made.add_argument(f"--{flag}", action="store_true")
    return made
