"""The script that a machine runs first: installs the project by uv with a Python of its own, then trains a share.

A plain TPU VM image has Ubuntu's python3 with pip and gcloud, and no Python that JAX still supports.  The script may
run again at every boot: it finds what it installed, and a lock keeps a second one out.
"""

from __future__ import annotations

import json
import shlex

from looped.jsonable import to_json
from tpu_launch import marks
from tpu_launch.launch import Launch
from tpu_launch.marks import Mark
from tpu_launch.store import is_bucket, mark_path

PYTHON = "3.11"
PAUSE = 20
"""Seconds before an installation is tried again, and twice as many before the third time."""

_SCRIPT = """\
#!/usr/bin/env bash
# {title}
# Installs looped and trains; written by `looped tpu launch`. It may run again: what is there is found.
set -u -o pipefail
home={home}
export HOME="${{HOME:-/root}}"
mkdir -p "$home" && cd "$home" || exit 1
exec 9> lock
flock --nonblock 9 || {{ echo "looped: already at work in $home"; exit {busy}; }}
echo "$$" > pid
{log}

install() {{
  export PATH="$home/tool/bin:$PATH"
  command -v uv > /dev/null || python3 -m pip install --quiet --target "$home/tool" uv || return
  [ -x venv/bin/python ] || uv venv --quiet --python {python} venv || return
{fetch}  uv pip install --quiet --python venv/bin/python {requirement}
}}

give_up() {{
  echo "looped: $1"
{tell}  exit 1
}}

for attempt in 1 2 3; do
  install && break
  [ "$attempt" -lt 3 ] || give_up "installation failed three times"
  sleep "$((attempt * {pause}))"
done
{environment}
exec venv/bin/python -m tpu_launch.machine {arguments}
"""
_FETCH = """\
  if [ ! -s {name} ]; then
    uv pip install --quiet --python venv/bin/python gcsfs || return
    venv/bin/python -c 'import sys; from fsspec.core import url_to_fs; fs, path = url_to_fs(sys.argv[1])
fs.get_file(path, "part")' {url} && mv part {name} || return
  fi
"""


def script(
    launch: Launch,
    share: int,
    *,
    home: str,
    release: tuple[str, ...] = (),
    once: bool = False,
    secrets_by_gcloud: bool = True,
    exports: dict[str, str] | None = None,
) -> str:
    """Returns the script of one share's machines.

    `home` is a word of the shell, where everything is put.  `release` is what the first machine runs once the share is
    done or given up, so that it stops costing.  `once` leaves starting again to others, as Kubernetes.  Values of
    secrets are fetched on the machine, unless it gets them otherwise.
    """
    fetch, requirement = _source(launch)
    environment = [f"export {name}={shlex.quote(value)}" for name, value in (exports or {}).items()]
    if launch.data is not None:
        environment.append(f"export LOOPED_DATA={shlex.quote(launch.data)}")
    if secrets_by_gcloud:
        for variable, name in launch.secrets.items():
            environment.append(_secret(launch, variable, name))
    title = f"Share {share} of {launch.shares} of the sweep {launch.preset} in {json.dumps(launch.output)}"
    return _SCRIPT.format(
        title=title,
        home=home,
        python=PYTHON,
        busy=1 if once else 0,
        pause=PAUSE,
        log="" if once else "exec > >(trap '' TERM; exec tee -a log) 2>&1",
        fetch=fetch,
        requirement=requirement,
        tell=("" if once else _tell(launch, share)) + (f"  {shlex.join(release)}\n" if release else ""),
        environment="\n".join(environment),
        arguments=shlex.join(_machine_arguments(launch, share, release, once)),
    )


def _source(launch: Launch) -> tuple[str, str]:
    """How the source is fetched, and the requirement that installs it, both as words of the shell."""
    extra = ",".join(["tpu" if launch.machines is not None else "gcs", *launch.track])
    if "://" in launch.source or "==" in launch.source:
        if "://" in launch.source:
            return "", shlex.quote(f"looped[{extra}] @ {launch.source}")
        return "", shlex.quote(launch.source.replace("looped", f"looped[{extra}]", 1))
    name = shlex.quote(launch.source)
    fetch = _FETCH.format(name=name, url=shlex.quote(f"{launch.folder}/{launch.source}"))
    return fetch, f'"looped[{extra}] @ file://$home/"{name}'


def _tell(launch: Launch, share: int) -> str:
    """Leaves a mark where the project itself could not be installed, with what the machine has."""
    mark = Mark(share, launch.shares, "failed", 3, 1, "the project could not be installed")
    text, path = shlex.quote(json.dumps(to_json(mark))), shlex.quote(mark_path(launch, share))
    if is_bucket(launch.output):
        return f"  printf '%s\\n' {text} | gcloud storage cp - {path}\n"
    return f"  mkdir -p {shlex.quote(f'{launch.folder}/{marks.FOLDER}')}; printf '%s\\n' {text} > {path}\n"


def _secret(launch: Launch, variable: str, name: str) -> str:
    project = launch.queued.project if launch.queued else launch.ssh.project if launch.ssh else None
    words = ["gcloud", "secrets", "versions", "access", "latest", f"--secret={name}"]
    words += [f"--project={project}"] if project else []
    return (
        f"{variable}=$({shlex.join(words)}) || give_up 'the secret {name} cannot be read'\nexport {variable}"
    )


def _machine_arguments(launch: Launch, share: int, release: tuple[str, ...], once: bool) -> list[str]:
    arguments = [
        "--folder",
        launch.folder,
        "--share",
        f"{share}/{launch.shares}",
        "--slices",
        str(launch.slices),
    ]
    if once:
        arguments.append("--once")
    if release:
        arguments += ["--release", shlex.join(release)]
    if launch.secrets:
        arguments += ["--hide", *launch.secrets]
    return [*arguments, "--", *launch.sweep_arguments(share)]
