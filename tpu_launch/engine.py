"""What launching, watching and deleting need of an engine; `queued`, `gke` and `ssh` are the ones there are."""

from __future__ import annotations

import dataclasses
import datetime
from typing import Literal, Protocol

from looped.errors import UserError
from tpu_launch.launch import Launch
from tpu_launch.outside import Call, Outside

State = Literal["waiting", "running", "lost", "refused", "deleting", "done", "failed", "unknown"]
"""`lost`: taken away (preempted); `refused`: never came; `done`, `failed`: the engine says how the share ended."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """The machines of one share, as the engine knows them."""

    name: str
    state: State
    said: str
    """The engine's own word for the state, such as WAITING_FOR_RESOURCES."""
    share: int | None = None
    """None for what is not of this launch."""
    where: str = ""
    """Zone, or namespace."""
    accelerator: str = ""
    chips: int = 0
    """0 where it is not known."""
    spot: bool = False
    created_at: datetime.datetime | None = None
    sweep: str = ""
    """Folder of its sweep, where the machine says so."""
    reason: str = ""
    ends_itself: bool = False
    """Whether the engine ends it once its share has ended, and keeps how it ended."""

    @property
    def costs(self) -> bool:
        """Whether it is paid for, as far as can be known."""
        return self.state in ("running", "unknown")


class Engine(Protocol):
    """One way to get machines."""

    def prepare(self) -> list[Call]:
        """What has to be there before the first share; the same whenever it is asked for."""
        ...

    def create(self, share: int) -> list[Call]:
        """Starts one share.  Where its name is taken already, the call fails with kind `exists`, or does nothing."""
        ...

    def machines(self, outside: Outside) -> list[Machine]:
        """The launch's machines in every state; those of the same sweep under another launch have share None."""
        ...

    def delete(self, name: str) -> list[Call]:
        """Takes the machines of this name away, with all that they still hold."""
        ...

    def clean(self) -> list[Call]:
        """Takes away what `prepare` made."""
        ...


def engine_of(launch: Launch) -> Engine:
    """The engine that the launch names."""
    from tpu_launch import gke, queued, ssh

    kinds = {"queued": queued.QueuedEngine, "gke": gke.GkeEngine, "ssh": ssh.SshEngine}
    return kinds[launch.engine](launch)


def parse_time(text: str | None) -> datetime.datetime | None:
    """A time as Google's and Kubernetes' APIs write it: RFC 3339 with up to nanoseconds."""
    if not text:
        return None
    whole, _, fraction = text.removesuffix("Z").partition(".")
    try:
        time = datetime.datetime.fromisoformat(whole)
    except ValueError:
        return None
    if fraction[:6].isdecimal():
        time = time.replace(microsecond=int(fraction[:6].ljust(6, "0")))
    return time if time.tzinfo else time.replace(tzinfo=datetime.UTC)


def age_seconds(machine: Machine) -> float | None:
    if machine.created_at is None:
        return None
    return max(0.0, (datetime.datetime.now(datetime.UTC) - machine.created_at).total_seconds())


def parse_list(text: str, what: str) -> list[dict]:
    """The objects in a program's JSON answer, a list or a Kubernetes list."""
    from looped.jsonable import parse_json

    try:
        data = parse_json(text or "[]")
    except ValueError as error:
        raise UserError(f"{what} answered no JSON ({error}); run it by hand to see what it says.") from None
    items = data.get("items", []) if isinstance(data, dict) else data
    return [item for item in items if isinstance(item, dict)]
