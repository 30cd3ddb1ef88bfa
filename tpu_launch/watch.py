"""Looks after a launch until its sweep is done: makes again what was taken away, deletes what is over.

`decide` says what to do from what is seen, and nothing else does; `Watch` sees, does it and waits.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Literal

from looped.errors import UserError
from looped.jsonable import parse_json
from looped.machine import process_exists
from looped.text import clock, one_line
from tpu_launch import store
from tpu_launch.engine import Engine, Machine, engine_of
from tpu_launch.launch import Launch
from tpu_launch.marks import Mark
from tpu_launch.names import machine_name
from tpu_launch.outside import Call, CallError, Outside, is_passing

REFUSALS = 3
"""A share whose machines were refused this often in a row is given up, once no other is at work."""
SILENCE_SECONDS = 900.0
"""Without a sign of life after which a share that should be running is pointed at; it is not touched."""
LEASE_FILE = "watch.json"
LEASE_ROUNDS, LEASE_SECONDS = (
    3,
    20.0,
)  # rounds without a sign of it before another may watch, and the shortest of them


@dataclasses.dataclass(frozen=True)
class Action:
    """One thing to do."""

    kind: Literal["create", "delete"]
    name: str
    share: int | None
    why: str


@dataclasses.dataclass(frozen=True)
class Seen:
    """A launch at one moment."""

    shares: int
    machines: tuple[Machine, ...]
    marks: Mapping[int, Mark]
    refusals: Mapping[int, int]
    """Times in a row that a share's machines were refused."""

    def machine(self, share: int) -> Machine | None:
        return next((machine for machine in self.machines if machine.share == share), None)

    def ending(self, share: int) -> Literal["done", "failed"] | None:
        """How the share ended, by its own mark or by the engine's word; None while it has not."""
        mark, machine = self.marks.get(share), self.machine(share)
        if mark is not None and mark.over:
            return "done" if mark.state == "done" else "failed"
        if machine is not None and machine.state in ("done", "failed"):
            return "done" if machine.state == "done" else "failed"
        return None

    def given_up(self, share: int) -> bool:
        """Whether the share gets no machines and nobody is left whose end could free some."""
        if self.ending(share) is not None or self.machine(share) is not None:
            return False
        others = any(machine.state in ("running", "waiting", "deleting") for machine in self.machines)
        return self.refusals.get(share, 0) >= REFUSALS and not others

    @property
    def over(self) -> bool:
        """Whether nothing is left to do: every share has ended or is given up, and no machine is left to delete."""
        ended = all(self.ending(share) or self.given_up(share) for share in range(1, self.shares + 1))
        return ended and all(machine.state in ("done", "failed") for machine in self.machines)


def decide(seen: Seen, output: str) -> list[Action]:
    """What to do now.  A share never has two machines, and one that has ended gets none."""
    actions = []
    for machine in seen.machines:
        why = _why_delete(seen, machine)
        if why is not None and machine.state != "deleting":
            actions.append(Action("delete", machine.name, machine.share, why))
    for share in range(1, seen.shares + 1):
        if seen.ending(share) is None and seen.machine(share) is None and not seen.given_up(share):
            name = machine_name(output, share, seen.shares)
            mark = seen.marks.get(share)
            actions.append(Action("create", name, share, "it goes on" if mark else "it has no machines"))
    return actions


def _why_delete(seen: Seen, machine: Machine) -> str | None:
    if machine.share is None:
        return "it is of an earlier launch of this sweep"
    ending = seen.ending(machine.share)
    if ending is not None and machine.state not in ("done", "failed") and not machine.ends_itself:
        return f"its share is {ending}"
    if machine.state == "lost":
        return "it was taken away"
    if machine.state == "refused":
        return f"it was refused: {machine.reason or machine.said}"
    return None


def calls_of(engine: Engine, action: Action) -> list[Call]:
    """How the action is carried out."""
    if action.kind == "create" and action.share is not None:
        return engine.create(action.share)
    return engine.delete(action.name)


class Watch:
    """One supervision of a launch."""

    def __init__(self, launch: Launch, engine: Engine, outside: Outside, say: Callable[[str], None]):
        self.launch, self.engine, self.outside, self.say = launch, engine, outside, say
        self.refusals: collections.Counter[int] = collections.Counter()
        self._there: set[str] = set()
        self._said_failed: set[int] = set()

    def see(self) -> Seen:
        """Asks the engine and reads the marks."""
        machines = tuple(self.engine.machines(self.outside))
        there = {machine.name for machine in machines if machine.state in ("running", "waiting", "deleting")}
        if self._there - there:  # some are gone, and what they held is free
            self.refusals.clear()
        self._there = there
        read = store.read_marks(self.outside, self.launch)
        return Seen(self.launch.shares, machines, read, dict(self.refusals))

    def act(self, seen: Seen) -> None:
        """Does what `decide` says; what fails is said and left to the next round."""
        for action in decide(seen, self.launch.output):
            calls = calls_of(self.engine, action)
            self.say(f"{action.kind} {action.name}: {action.why}")
            machine = next((m for m in seen.machines if m.name == action.name), None)
            if machine is not None and machine.state == "refused" and action.share is not None:
                self.refusals[action.share] += 1
            for each in calls:
                try:
                    self.outside.run_unless(each, "exists", "absent")
                except CallError as failed:
                    if failed.kind in ("missing", "credentials"):
                        raise
                    if action.kind == "create" and action.share is not None and not is_passing(failed):
                        self.refusals[action.share] += 1
                    self.say(str(failed))
                    break

    def report(self, seen: Seen) -> None:
        """Says of every share that has failed, once, what happened and what to do."""
        for share, mark in sorted(seen.marks.items()):
            if mark.state == "failed" and share not in self._said_failed:
                self._said_failed.add(share)
                self.say(failure(self.launch, mark, self._at_work(seen)))

    @staticmethod
    def _at_work(seen: Seen) -> int:
        return sum(seen.ending(share) is None for share in range(1, seen.shares + 1))

    def run(
        self, seconds: float, rounds: int | None = None, sleep: Callable[[float], None] = time.sleep
    ) -> Seen:
        """Goes round until the launch is over, or `rounds` times; `seconds` lie between two rounds."""
        lease = _Lease(self.launch, self.outside, seconds)
        last: list[str] = []
        while True:
            lease.renew()
            self._follow()
            seen = self._patiently(sleep, seconds)
            self.report(seen)
            lines = table(self.launch, seen)
            if lines != last:
                self.say("\n".join(lines))
                last = lines
            if seen.over:
                lease.release()
                return seen
            self.act(seen)
            if rounds is not None:
                rounds -= 1
                if rounds <= 0:
                    return seen
            sleep(seconds)

    def _follow(self) -> None:
        """Takes over a launch that was made again meanwhile with another source: no machine is to get the old one."""
        with contextlib.suppress(CallError):
            now = store.read_launch(self.outside, self.launch.output)
            if now is not None and now != self.launch:
                self.launch, self.engine = now, engine_of(now)

    def _patiently(self, sleep: Callable[[float], None], seconds: float) -> Seen:
        """`see`, tried again where the network is at fault: a watch lasts for days."""
        while True:
            try:
                return self.see()
            except CallError as failed:
                if not is_passing(failed):
                    raise
                self.say(str(failed))
                sleep(seconds)


def failure(launch: Launch, mark: Mark, others: int) -> str:
    """One sentence on a share that was given up: what happened, what is still running, what to do."""
    why = f"status {mark.status}" + (f", {one_line(mark.reason).rstrip('.')}" if mark.reason else "")
    log = f"{launch.folder}/logs/{mark.share}-of-{mark.shares}.log"
    return (
        f"share {mark.share}/{mark.shares} failed {mark.failures} times and is given up ({why}); {others} other shares"
        f" go on; its log is {log}; once mended, `looped tpu launch … --retry-failed` starts it again."
    )


def table(launch: Launch, seen: Seen) -> list[str]:
    """One line a share."""
    lines = []
    for share in range(1, seen.shares + 1):
        mark, machine = seen.marks.get(share), seen.machine(share)
        place = f"{machine.said} {machine.accelerator} {machine.where}".strip() if machine else "no machines"
        told = (
            ""
            if mark is None
            else f"; {mark.state}" + (f" after {mark.failures} failures" if mark.failures else "")
        )
        ended = seen.ending(share)
        if mark is not None and ended is None and machine is not None and machine.state == "running":
            silent = mark.silent_seconds
            told += f", no sign of life for {clock(silent)}: see its log" if silent > SILENCE_SECONDS else ""
        if seen.given_up(share):
            told += "; given up, since its machines were refused"
        elif ended and mark is None:
            told += f"; {ended}"
        lines.append(f"share {share}/{seen.shares}  {place}{told}")
    return lines


class _Lease:
    """Keeps two watches off one launch, by a file that the one at work rewrites."""

    def __init__(self, launch: Launch, outside: Outside, seconds: float):
        self.path, self.outside, self.seconds = f"{launch.folder}/{LEASE_FILE}", outside, seconds
        self.own = {"pid": os.getpid(), "host": socket.gethostname()}
        self._written = float("-inf")

    def renew(self) -> None:
        """Raises `UserError` where another watch has shown itself of late."""
        if time.time() - self._written < max(self.seconds / 2, LEASE_SECONDS / 2):
            return
        other = self._read()
        if other and {key: other.get(key) for key in self.own} != self.own:
            silent = time.time() - _number(other.get("time"))
            if silent < _number(other.get("patience")) and not _has_ended(other):
                raise UserError(
                    f"process {other.get('pid')} on {other.get('host')} watches this launch, last seen {silent:.0f} s"
                    f" ago; leave it to that, or end it and remove {self.path}."
                )
        self._written = time.time()
        text = self.own | {"time": self._written, "patience": LEASE_ROUNDS * max(self.seconds, LEASE_SECONDS)}
        self.outside.run(store.write_call(self.path, json.dumps(text) + "\n"))

    def release(self) -> None:
        self.outside.run_unless(store.remove_call(self.path), "absent")

    def _read(self) -> dict | None:
        try:
            found = parse_json(store.read(self.outside, self.path) or "null")
        except ValueError:
            return None
        return found if isinstance(found, dict) else None


def _number(value: object) -> float:
    """`value`, of a file that anybody may have written, if it is a number; 0 otherwise."""
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e18 else 0.0


def _has_ended(other: dict) -> bool:
    """Whether the other watch was a process of this machine that is gone."""
    here = other.get("host") == socket.gethostname() and isinstance(other.get("pid"), int)
    return here and not process_exists(other["pid"])
