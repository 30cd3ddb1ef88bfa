"""A plan as a table and in words."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from experiments.plan import Plan, PlannedRun
from looped.text import clock, one_line, short

_PIPE_WIDTH = 200  # where no terminal sets one: as much as the widest table takes


def costs(plan: Plan) -> str:
    """The totals in one sentence or two: `116 runs, 7.258e20 FLOPs; on v5e:16x16 …`."""
    first = f"{len(plan.runs)} runs, {short(plan.flops)} FLOPs"
    machine, hours = plan.machine, plan.chip_hours
    if machine is None or hours is None:
        return f"{first}."
    rest = len(plan.runs) - plan.checked
    how = [f"{plan.checked} of them as checked"] if plan.checked else []
    if rest:
        which = "the others" if plan.checked else "all"
        how.append(f"{which} at an assumed {machine.mfu:.0%} of {short(machine.peak_flops)} FLOP/s")
    text = f"{first}; on {machine.slice} {clock(plan.seconds)} one after another, {hours:,.0f} chip-hours"
    if plan.money is not None:
        text += f", {plan.money:,.0f} in money at {machine.price:g} a chip-hour"
    text = f"{text} ({', '.join(how)})."
    if plan.too_large:
        text += f" {plan.too_large} of the runs do not fit there, as checked: give them a larger slice."
    return text


def runs_table(
    plan: Plan, runs: Sequence[PlannedRun], title: str, extra: Mapping[str, Sequence[str]] | None = None
) -> Table:
    """`runs` of the plan with what each costs, and `extra` columns of text."""
    extra = extra or {}
    timed, seeds = plan.machine is not None, any(run.spec.seed for run in runs)
    columns = [
        "arm",
        "budget",
        "r",
        "k",
        "width",
        *(["seed"] if seeds else []),
        "parameters",
        "tokens",
        "steps",
    ]
    columns += ["FLOPs", *(["time", "chip-hours"] if timed else []), "run", *extra]
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column == "arm" else "right")
    for i, run in enumerate(runs):
        counts = run.counts
        cells = [
            escape(one_line(counts["arm"])),
            "" if counts["budget_flops"] is None else short(counts["budget_flops"]),
        ]
        cells += [str(counts[name]) for name in ("recurrences", "backprop_recurrences", "d_model")]
        cells += [str(run.spec.seed)] if seeds else []
        cells += [f"{counts[name]:,}" for name in ("params_total", "tokens", "steps")]
        cells.append(short(run.flops))
        if plan.machine is not None and run.seconds is not None:
            cells += [clock(run.seconds), f"{plan.machine.chip_hours(run.seconds):,.1f}"]
        table.add_row(*cells, counts["run_id"], *(values[i] for values in extra.values()))
    return table


def show(table: Table) -> None:
    Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(table)
