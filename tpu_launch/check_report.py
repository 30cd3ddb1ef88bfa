"""What a check found, as JSON data and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from looped.counting import flops_per_token, planned_steps
from looped.execution import Execution
from looped.jsonable import to_json
from looped.sharding import AXES
from looped.slices import GIB, Slice
from looped.text import clock
from tpu_launch.check import Checked
from tpu_launch.check_store import version
from tpu_launch.compile_check import Compiled
from tpu_launch.roofline import PRODUCT_EFFICIENCY

SCHEMA_VERSION = 1


def report(checked: Sequence[Checked], slices: Slice) -> dict[str, Any]:
    """The whole check as JSON data.

    `cells` has an object a compiled program: `run_ids`, `fits`, `status` (compiled, too large, refused, failed) with
    `reason`, `hbm_bytes` a device (`hbm` says of what) against `hbm_limit`, `compile_seconds`, `collectives` (bytes of
    results a device and step), `involuntary_remat`, and the estimate: `step_seconds` by its `times`, `mfu` (model
    FLOPs over peak), and by run `steps`, `run_seconds`, `chip_hours`.  Where the cell does not fit, `remedy` has the
    execution that does, with the same fields; the estimate of the runs is then the remedy's.
    """
    cells = [_cell(c, slices) for c in checked]
    hours = [h for cell in cells for h in cell["chip_hours"].values()]
    return {
        "schema_version": SCHEMA_VERSION,
        "topology": slices.name,
        "slices": slices.slices,
        "chips": slices.chips,
        "devices": slices.devices,
        "hbm_limit": slices.usable_hbm_per_device,
        "peak_flops_per_device": slices.peak_flops_per_device,
        "product_efficiency": PRODUCT_EFFICIENCY,
        "versions": {package: version(package) for package in ("looped", "jax", "libtpu")},
        "runs": sum(len(c.cell.runs) for c in checked),
        "fits": all(c.fits for c in checked),
        "chip_hours": sum(hours) if len(hours) == sum(len(c.cell.runs) for c in checked) else None,
        "cells": cells,
    }


def _cell(checked: Checked, slices: Slice) -> dict[str, Any]:
    cell, spec, compiled = checked.cell, checked.cell.first, checked.compiled
    usable = compiled if checked.fits or checked.remedy is None else checked.remedy[1]
    step = usable.times.step if usable.times is not None and usable.fits(slices) else None
    steps = {run.run_id: planned_steps(run) for run in cell.runs}
    seconds = {} if step is None else {run_id: n * step for run_id, n in steps.items()}
    return {
        "run_ids": [run.run_id for run in cell.runs],
        "recurrences": spec.model.recurrences,
        "backprop_recurrences": spec.model.k,
        "d_model": spec.model.d_model,
        "batch_size": spec.batch_size,
        "execution": to_json(checked.execution),
        "fits": checked.fits,
        **_compiled(compiled, spec, slices),
        "steps": steps,
        "run_seconds": seconds,
        "chip_hours": {run_id: s * slices.chips / 3600 for run_id, s in seconds.items()},
        "remedies_tried": checked.tried,
        "remedy": None
        if checked.remedy is None
        else {"execution": to_json(checked.remedy[0]), **_compiled(checked.remedy[1], spec, slices)},
    }


def _compiled(compiled: Compiled, spec: Any, slices: Slice) -> dict[str, Any]:
    flops = flops_per_token(spec.model) * spec.batch_tokens
    step = compiled.times and compiled.times.step
    return {
        "status": compiled.status,
        "reason": compiled.reason,
        "mesh": compiled.mesh,
        "hbm_bytes": compiled.hbm_bytes,
        "hbm_limit": slices.usable_hbm_per_device,
        "hbm": to_json(compiled.memory),
        "trace_seconds": compiled.trace_seconds,
        "compile_seconds": compiled.compile_seconds,
        "collectives": to_json(compiled.traffic),
        "crosses_slices": any(t.across_slices for t in compiled.traffic),
        "model_flops_per_step": flops,
        "compiled_flops_per_step": compiled.flops and compiled.flops * slices.devices,
        "xla_flops_per_device": compiled.xla_flops,
        "hbm_traffic_bytes": compiled.moved_bytes,
        "unknown_loops": compiled.unknown_loops,
        "step_seconds": step,
        "times": to_json(compiled.times),
        "mfu": step and flops / (step * slices.devices * slices.peak_flops_per_device),
        "involuntary_remat": list(compiled.involuntary_remat),
    }


def show(checked: Sequence[Checked], slices: Slice, console: Console | None = None) -> None:
    """Prints the tables, what their numbers are, and a sentence on everything that is not well."""
    console = console or Console()
    if not console.is_terminal:
        console.width = max(console.width, 140)  # where nothing wraps
    data = report(checked, slices)
    console.print(_fit_table(data, slices))
    if any(_shown(cell)["collectives"] for cell in data["cells"]):
        console.print(_traffic_table(data))
    console.print(_LEGEND, style="dim", highlight=False)
    for c in checked:
        for line in trouble(c, slices):
            console.print(Text(line))
    good = sum(c.fits for c in checked)
    hours = "" if data["chip_hours"] is None else f"; about {_number(data['chip_hours'])} chip-hours in all"
    console.print(
        f"{good} of {len(checked)} programs ({data['runs']} runs) compile and fit on {slices}{hours}.",
        highlight=False,
    )


_LEGEND = (
    "mesh: replica · fsdp · sequence · tensor.  step: at published speeds and"
    f" {PRODUCT_EFFICIENCY:.0%} of peak in products, bound by the longest of products, memory, links (within a slice)"
    " and network (between slices); latency and input are not in it.  Sent: MiB of results a device and step, by number"
    " of operations."
)


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for column in columns:
        table.add_column(column, justify="left" if column in ("mesh", "fits", "bound") else "right")
    return table


def _who(cell: dict[str, Any]) -> tuple[str, str]:
    """Recurrences, with k where it is not all of them, and width."""
    r, k = cell["recurrences"], cell["backprop_recurrences"]
    return str(r) if k == r else f"{r} (k {k})", str(cell["d_model"])


def _shown(cell: dict[str, Any]) -> dict[str, Any]:
    """The part of a cell that the estimate is of: its remedy, where it needs one."""
    return cell if cell["fits"] or cell["remedy"] is None else cell["remedy"]


def _fit_table(data: dict[str, Any], slices: Slice) -> Table:
    table = _table(
        f"{slices}: {slices.chips} chip{'' if slices.chips == 1 else 's'},"
        f" {slices.generation.usable_gib:g} GiB usable a device",
        ("r", "width", "runs", "mesh", "fits", "GiB", "compile", "PFLOP/step", "step", "bound", "MFU", "longest run",
         "chip-hours"),
    )  # fmt: skip
    for cell in data["cells"]:
        shown, hours = _shown(cell), sum(cell["chip_hours"].values())
        table.add_row(
            *_who(cell),
            str(len(cell["run_ids"])),
            "·".join(str(shown["mesh"].get(axis, "")) for axis in AXES) if shown["mesh"] else "",
            "[green]yes[/]" if cell["fits"] else "[red]no[/]",
            "" if cell["hbm_bytes"] is None else f"{cell['hbm_bytes'] / GIB:.2f}",
            "" if cell["compile_seconds"] is None else f"{cell['compile_seconds']:.0f} s",
            _number(cell["model_flops_per_step"] / 1e15),
            _duration(shown["step_seconds"]),
            (shown["times"] or {}).get("bound", ""),
            "" if shown["mfu"] is None else f"{shown['mfu']:.0%}",
            clock(max(cell["run_seconds"].values(), default=None)),
            _number(hours) if hours else "",
        )
    return table


def _traffic_table(data: dict[str, Any]) -> Table:
    """A column a kind of collective, those between slices apart."""

    def kind(collective: dict[str, Any]) -> str:
        return collective["kind"] + (" (network)" if collective["across_slices"] else "")

    sums: dict[str, int] = {}
    for cell in data["cells"]:
        for collective in _shown(cell)["collectives"]:
            sums[kind(collective)] = sums.get(kind(collective), 0) + collective["bytes"]
    kinds = sorted(sums, key=lambda k: -sums[k])
    table = _table("Sent in a step", ("r", "width", *kinds))
    for cell in data["cells"]:
        of_kind = {k: [c for c in _shown(cell)["collectives"] if kind(c) == k] for k in kinds}
        table.add_row(
            *_who(cell),
            *(f"{sum(c['bytes'] for c in cs) / 2**20:,.0f} by {sum(c['count'] for c in cs)}" if cs else ""
              for cs in of_kind.values()),
        )  # fmt: skip
    return table


def _number(value: float) -> str:
    """Two or three digits of a number that may be small."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _duration(seconds: float | None) -> str:
    if not seconds:
        return ""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def trouble(checked: Checked, slices: Slice) -> list[str]:
    """Sentences on what is wrong with a cell and what helps; none where nothing is."""
    name, compiled, limit = checked.cell.name, checked.compiled, slices.generation.usable_gib
    lines = []
    if not checked.fits:
        if compiled.status in ("too large", "compiled"):
            need = (compiled.hbm_bytes or 0) / GIB
            lines.append(
                f"{name}: needs {need:.2f} GiB a device and {limit:g} are usable; {_remedy(checked)}."
            )
        else:
            lines.append(f"{name}: {compiled.reason.rstrip('.')}.")
    for operation in compiled.involuntary_remat:
        lines.append(f"{name}: involuntary full rematerialisation of {operation}.")
    if compiled.unknown_loops:
        lines.append(f"{name}: {compiled.unknown_loops} loops of unknown length count once in the estimate.")
    return lines


def _remedy(checked: Checked) -> str:
    if checked.remedy is None:
        return f"none of {checked.tried} remedies fits, so take a larger slice or a smaller batch"
    execution, compiled = checked.remedy
    assert compiled.hbm_bytes is not None
    return f"it fits, at {compiled.hbm_bytes / GIB:.2f}, with {options(execution, checked.execution)}"


def options(execution: Execution, given: Execution) -> str:
    """The options of the command line in which `execution` differs from the `given` one."""
    parts = []
    if execution.mesh != given.mesh:
        parts.append("no mesh axes named")
    parts += [
        f"--{name} {getattr(execution, name)}"
        for name in ("remat", "accumulate")
        if getattr(execution, name) != getattr(given, name)
    ]
    return " and ".join(parts)
