"""What runs cost before any is made: FLOPs, time on a slice, chip-hours and money."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from etils import epath

from experiments.grid import row
from looped.config import RunSpec
from looped.errors import UserError
from looped.jsonable import read_json, to_json
from looped.slices import Slice, slice_of

ASSUMED_MFU = 0.4
"""Model FLOPs over peak where nothing better is known: an assumption, which `looped tpu check` replaces."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """What runs are made on, one after another: a slice, and how fast it is.

    `checked` holds seconds by run id, of `looped tpu check`, None where the run does not fit; runs that have none take
    FLOPs / (peak × `mfu`).
    `price` is that of a chip-hour, in any currency.
    """

    slice: Slice
    mfu: float = ASSUMED_MFU
    checked: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    price: float | None = None

    def __post_init__(self):
        if not 0 < self.mfu <= 1:
            raise UserError(f"mfu is {self.mfu:g}; give the share of the peak that runs reach, such as 0.4.")
        if self.price is not None and not (math.isfinite(self.price) and self.price >= 0):
            raise UserError(f"price is {self.price:g}; give the price of a chip-hour, such as 1.2.")

    @property
    def peak_flops(self) -> float:
        """FLOP/s of the whole slice."""
        return self.slice.chips * self.slice.generation.peak_flops

    def seconds(self, run_id: str, flops: float) -> float:
        return self.checked.get(run_id) or flops / (self.peak_flops * self.mfu)

    def chip_hours(self, seconds: float) -> float:
        return seconds * self.slice.chips / 3600


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """A run with its `counts` (`experiments.grid.row`), training FLOPs, and seconds on the machine, if there is one."""

    spec: RunSpec
    counts: Mapping[str, Any]
    flops: float
    seconds: float | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """Runs and what they cost."""

    runs: tuple[PlannedRun, ...]
    machine: Machine | None = None

    @property
    def flops(self) -> float:
        return sum(run.flops for run in self.runs)

    @property
    def seconds(self) -> float | None:
        """One run after another; None without a machine."""
        return None if self.machine is None else sum(run.seconds or 0.0 for run in self.runs)

    @property
    def chip_hours(self) -> float | None:
        return None if self.machine is None else self.machine.chip_hours(self.seconds or 0.0)

    @property
    def money(self) -> float | None:
        if self.machine is None or self.machine.price is None:
            return None
        return self.machine.price * self.machine.chip_hours(self.seconds or 0.0)

    @property
    def checked(self) -> int:
        """Runs whose time comes from a check of their compiled program."""
        return sum(self._check(run) is not None for run in self.runs)

    @property
    def too_large(self) -> int:
        """Runs that a check has found too large for the machine."""
        known = {} if self.machine is None else self.machine.checked
        return sum(run.spec.run_id in known and self._check(run) is None for run in self.runs)

    def _check(self, run: PlannedRun) -> float | None:
        return None if self.machine is None else self.machine.checked.get(run.spec.run_id)

    def only(self, keep: Iterable[int]) -> Plan:
        """The plan of these of its runs."""
        return dataclasses.replace(self, runs=tuple(self.runs[i] for i in keep))

    def to_json(self) -> dict[str, Any]:
        machine = self.machine
        return {
            "runs": [self.run_json(run) for run in self.runs],
            "totals": {
                "runs": len(self.runs),
                "flops": self.flops,
                "seconds": self.seconds,
                "chip_hours": self.chip_hours,
                "money": self.money,
            },
            "machine": None
            if machine is None
            else {
                "slice": machine.slice.name,
                "slices": machine.slice.slices,
                "chips": machine.slice.chips,
                "peak_flops": machine.peak_flops,
                "mfu": machine.mfu,
                "price": machine.price,
                "checked_runs": self.checked,
                "too_large_runs": self.too_large,
            },
        }

    def run_json(self, run: PlannedRun) -> dict[str, Any]:
        hours = None
        if self.machine is not None and run.seconds is not None:
            hours = self.machine.chip_hours(run.seconds)
        cost = {"flops": run.flops, "seconds": run.seconds, "chip_hours": hours}
        return {**run.counts, **cost, "spec": to_json(run.spec)}


def plan(specs: Iterable[RunSpec], machine: Machine | None = None) -> Plan:
    """The costs of `specs`, on `machine` where there is one.  `UserError` for a budget of less than a step."""
    runs = []
    for spec in specs:
        counts = row(spec)
        flops = float(counts["flops_per_token"]) * counts["tokens"]
        seconds = None if machine is None else machine.seconds(counts["run_id"], flops)
        runs.append(PlannedRun(spec, counts, flops, seconds))
    return Plan(tuple(runs), machine)


def machine_of(
    name: str | None,
    mfu: float | None = None,
    check: epath.PathLike | None = None,
    price: float | None = None,
) -> Machine | None:
    """The slice `name`, or that which `check`, the JSON of `looped tpu check`, is about; None where neither is given.

    `mfu` is `ASSUMED_MFU` unless given.

    Raises `UserError` for an unknown slice, a check of another one, a file that is no check, or a price of nothing.
    """
    share = ASSUMED_MFU if mfu is None else mfu
    if check is None:
        if name is None:
            for field, value in (("mfu", mfu), ("price", price)):
                if value is not None:
                    raise UserError(
                        f"{field} is {value:g} and no slice is named; add --slice, such as v5e:16x16."
                    )
            return None
        return Machine(slice_of(name), share, {}, price)
    about, seconds = read_check(check)
    if name is not None and slice_of(name) != about:
        raise UserError(f"slice is {name} and {check} is a check of {about}; leave one of the two out.")
    return Machine(about, share, seconds, price)


def read_check(path: epath.PathLike) -> tuple[Slice, dict[str, float | None]]:
    """(the slice, seconds by run id) of what `looped tpu check --json` wrote; None for runs that do not fit."""
    path = epath.Path(path)
    remedy = "give a file that `looped tpu check --json FILE` wrote"
    try:
        data = read_json(path, remedy, "check")
        about = slice_of(data["topology"], data.get("slices", 1))
        cells = list(data["cells"])
    except (TypeError, KeyError, AttributeError):
        raise UserError(f"check {path}: is no check of runs for a slice; {remedy}.") from None
    seconds: dict[str, float | None] = {}
    for cell in cells:
        times = cell.get("run_seconds") if isinstance(cell, dict) else None
        if not isinstance(times, dict):
            raise UserError(f"check {path}: a cell has no run_seconds; {remedy}.")
        seconds |= dict.fromkeys(map(str, cell.get("run_ids") or ()))
        for run_id, value in times.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise UserError(f"check {path}: run {run_id} takes {value!r} seconds; {remedy}.")
            seconds[run_id] = float(value)
    return about, seconds
