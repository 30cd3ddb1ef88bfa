"""What is launched: a sweep, cut into shares, on machines of one kind.

A `Launch` lies as JSON in the sweep's folder while its machines may exist, so that every later command needs the folder
alone, and a second launch of another kind is refused.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from looped.credentials import check_address
from looped.errors import UserError, nearest
from looped.slices import Slice, slice_of
from looped.text import has_breaks
from looped.tracking import TRACKERS
from tpu_launch.names import cloud_names

SCHEMA_VERSION = 1
FOLDER = ".launch"
"""In the sweep's folder; a name with a dot is no run to the sweep."""
MOST_SHARES = 99_999
_LIKE_A_SECRET = (
    r"(hf_|sk-|ghp_|github_pat_|glpat-|xox[a-z]-|AKIA|AIza|ya29\.|wandb_v\d+_|local-).*"
    r"|(?=.*\d)[A-Za-z0-9+/_=]{32,}"  # letters and digits without a pause: a key, by any maker
)


@dataclasses.dataclass(frozen=True)
class Queued:
    """Where queued resources of Cloud TPU are asked for."""

    project: str
    zone: str
    spot: bool = False
    reserved: bool = False
    service_account: str | None = None
    network: str | None = None
    subnetwork: str | None = None


@dataclasses.dataclass(frozen=True)
class Gke:
    """Where JobSets run."""

    pool: int
    """Slices that the sweep may hold at once, where no queue is given."""
    context: str | None = None
    namespace: str = "default"
    queue: str | None = None
    """A LocalQueue that is there; None: one of the sweep's own."""
    spot: bool = False
    image: str = "python:3.11"
    service_account: str | None = None

    def __post_init__(self):
        if self.pool < 1:
            raise UserError(f"pool is {self.pool}; it must be at least 1.")


@dataclasses.dataclass(frozen=True)
class Ssh:
    """Machines that are there already: hosts, or TPU VMs that gcloud reaches."""

    hosts: tuple[str, ...] = ()
    tpu_vms: tuple[str, ...] = ()
    project: str | None = None
    zone: str | None = None
    hosts_per_share: int = 1
    port: int = 8476
    """Of the coordinator on the first host of a share."""

    def __post_init__(self):
        if self.hosts_per_share < 1:
            raise UserError(f"hosts_per_share is {self.hosts_per_share}; it must be at least 1.")
        if not 1 <= self.port <= 65_535:
            raise UserError(f"port is {self.port}; it must lie between 1 and 65,535.")

    @property
    def most_shares(self) -> int:
        """How many shares the machines make up."""
        return len(self.tpu_vms) or len(self.hosts) // self.hosts_per_share


@dataclasses.dataclass(frozen=True)
class Launch:
    """A sweep on machines.

    Its words end in command lines, scripts, manifests and paths, whether they were typed or lay in a bucket, so what
    could be taken for anything but a word is refused here: `UserError`.
    """

    preset: str
    output: str
    """The sweep's folder, which every machine reaches under this name."""
    shares: int
    source: str
    """What is installed: a file's name in the launch's folder, or a requirement such as `git+https://…`."""
    slice: str | None = None
    """Of one share, as `v5e:4x4`."""
    slices: int = 1
    """Slices that one share trains on together."""
    seeds: tuple[int, ...] = ()
    budgets: tuple[float, ...] = ()
    data: str | None = None
    track: tuple[str, ...] = ()
    secrets: dict[str, str] = dataclasses.field(default_factory=dict)
    """Environment variable → name of the secret that holds its value; never the value."""
    queued: Queued | None = None
    gke: Gke | None = None
    ssh: Ssh | None = None
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self):
        if not 1 <= self.shares <= MOST_SHARES:
            raise UserError(f"shares is {self.shares}; it must lie between 1 and {MOST_SHARES:,}.")
        if sum(place is not None for place in (self.queued, self.gke, self.ssh)) != 1:
            raise UserError("a launch has one engine: queued, gke or ssh.")
        for variable, name in self.secrets.items():
            _check_secret(variable, name)
        for field, text in _texts(self):
            _check_text(field, text)
        _check_source(self.source)
        for name in self.track:
            if name not in TRACKERS:
                raise UserError(f"track has {name!r}, which is unknown.{nearest(name, TRACKERS)}")
        if self.ssh is not None and self.shares > self.ssh.most_shares:
            raise UserError(f"shares is {self.shares}, and the hosts make up {self.ssh.most_shares}.")
        machines = self.machines
        if self.ssh is None and machines is None:
            raise UserError(f"slice is missing; a launch by {self.engine} needs one, as v5e:4x4.")
        if self.queued is not None and machines is not None:
            cloud_names(machines)

    @property
    def engine(self) -> str:
        return next(name for name in ("queued", "gke", "ssh") if getattr(self, name) is not None)

    @property
    def machines(self) -> Slice | None:
        """The slices of one share; None where it is not said what the machines are."""
        return None if self.slice is None else slice_of(self.slice, self.slices)

    @property
    def folder(self) -> str:
        """Where launches and marks are."""
        return f"{self.output}/{FOLDER}"

    @property
    def joined(self) -> bool:
        """Whether the processes of a share are several that find each other."""
        if self.ssh is None:
            return True
        return self.ssh.hosts_per_share > 1 or bool(self.ssh.tpu_vms)

    def sweep_arguments(self, share: int) -> tuple[str, ...]:
        """What comes after `looped`: trains the runs of one share."""
        words = ["sweep", "run", self.preset, "--output", self.output]
        if self.shares > 1:
            words += ["--share", f"{share}/{self.shares}"]
        if self.joined:
            words.append("--distributed")
        if self.seeds:
            words += ["--seeds", *map(str, self.seeds)]
        if self.budgets:
            words += ["--budgets", *(f"{budget:g}" for budget in self.budgets)]
        if self.track:
            words += ["--track", *self.track]
        return tuple(words)


def _texts(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Every text of a launch with the field that it is in."""
    if isinstance(value, str):
        yield name, value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _texts(getattr(value, field.name), field.name)
    elif isinstance(value, tuple):
        for item in value:
            yield from _texts(item, name)


_NAMES = {
    "project",
    "zone",
    "service_account",
    "network",
    "subnetwork",
    "context",
    "namespace",
    "queue",
    "image",
}
"""Fields whose values are names, in the letters that Google Cloud and Kubernetes have for them."""
_HOSTS = {"hosts", "tpu_vms"}


def _check_text(field: str, text: str) -> None:
    if not text or has_breaks(text):
        raise UserError(f"{field} is {text!r}; give text without control characters or ends of lines.")
    check_address(field, text)
    if field in _HOSTS and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.@-]*", text):
        raise UserError(f"hosts has {text!r}; write names that ssh knows, as worker-1 or user@10.0.0.2.")
    if text.startswith("-"):
        raise UserError(f"{field} is {text!r}, which would be taken for an option; give it another name.")
    if field in _NAMES and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.:@/+-]*", text):
        raise UserError(f"{field} is {text!r}; write it as Google Cloud or Kubernetes shows it.")


def _check_source(source: str) -> None:
    """The name of a file, or what pip takes for looped and nothing else."""
    if not re.fullmatch(
        r"[A-Za-z0-9_][A-Za-z0-9_.+-]*|looped==[\w.+!-]+|(git\+)?[a-z]+://[^\s;'\"]+", source
    ):
        raise UserError(
            f"source is {source!r}; give a file of plain letters, looped==VERSION, https://… or git+https://….git@REVISION."
        )


def _check_secret(variable: str, name: str) -> None:
    """Refuses what is no name, above all the secret itself, which it does not repeat."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
        raise UserError(
            f"secrets has {variable!r}, which is no name of an environment variable; write VARIABLE=SECRET."
        )
    if re.fullmatch(_LIKE_A_SECRET, name, re.DOTALL):
        raise UserError(
            f"secrets gives {variable} what looks like the secret itself; store that in Secret Manager (for gke as a"
            " Kubernetes secret) and write the name that it has there."
        )
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}", name):
        raise UserError(
            f"secrets gives {variable} no name of a secret; write VARIABLE=SECRET, as WANDB_API_KEY=wandb."
        )


def parse_secrets(given: tuple[str, ...]) -> dict[str, str]:
    """`("WANDB_API_KEY=wandb",)` as a dict; `UserError` for what has no `=`."""
    pairs = {}
    for text in given:
        variable, equals, name = text.partition("=")
        if not equals:
            raise UserError(
                "secrets has an entry without '='; write VARIABLE=SECRET, as WANDB_API_KEY=wandb."
            )
        pairs[variable] = name
    return pairs
