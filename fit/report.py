"""What is said of a losses table: `phi.json`, plain words, and `measure`, which does it all for a folder of runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from etils import epath

from fit.analysis import DEFAULTS, Analysis, ArmFit, Difference, Options, Unidentified, analyse
from fit.losses import Losses, LossUnit, read_losses
from fit.output import check_output, plain, to_text, write_files
from fit.validate import SHARED_BASELINE, UNSTATED

SCHEMA_VERSION = 1
PARAMETERS = ("E", "A", "alpha", "B", "beta")


@dataclasses.dataclass(frozen=True)
class Report:
    """The result for every arm.  `files` are the paths written."""

    analysis: Analysis
    files: tuple[str, ...] = ()

    @property
    def identified(self) -> bool:
        """Whether any arm has a φ."""
        return bool(self.analysis.identified)

    def refused(self) -> dict[str, tuple[str, ...]]:
        """Why each arm without a φ has none."""
        return {a.arm: a.reasons for a in self.analysis.arms.values() if isinstance(a, Unidentified)}

    def to_json(self) -> dict[str, Any]:
        """The object of `phi.json` and of `looped fit --json`; see `fit/README.md` for the schema."""
        return plain(
            {
                "schema_version": SCHEMA_VERSION,
                "arms": {name: arm_json(arm, self.analysis) for name, arm in self.analysis.arms.items()},
                "differences": [difference_json(d) for d in self.analysis.differences],
                "excluded": [dataclasses.asdict(e) for e in self.analysis.losses.excluded],
                "notes": [*self.analysis.losses.warnings, *self.analysis.notes],
            }
        )

    def summary(self) -> str:
        """The result in plain words, a few lines an arm."""
        lines: list[str] = []
        for arm in self.analysis.arms.values():
            lines += arm_words(arm, self.analysis)
        lines += [difference_words(d, self.analysis.options.level) for d in self.analysis.differences]
        lines += excluded_words(self.analysis.losses)
        lines += [f"Note: {note}" for note in (*self.analysis.losses.warnings, *self.analysis.notes)]
        return "\n".join(lines)


def arm_json(arm: ArmFit | Unidentified, analysis: Analysis) -> dict[str, Any]:
    options = analysis.options
    common = {
        "rows": len(arm.index),
        "convention": analysis.losses.convention,
        "objective": str(options.objective),
        "baseline": options.baseline,
    }
    if isinstance(arm, Unidentified):
        nothing = {"phi": None, **dict.fromkeys(PARAMETERS), "r_squared": None}
        return nothing | common | {"status": "not identified", "warnings": list(arm.reasons)}
    fit, boot, level = arm.fit, arm.boot, options.level
    return {
        "phi": {
            "estimate": arm.phi,
            "interval": [arm.interval.low, arm.interval.high],
            "level": level,
            "method": method(arm),
        },
        **{name: fit.parameters[name] for name in PARAMETERS},
        "r_squared": fit.r_squared,
        **common,
        "status": fit.status,
        "warnings": list(arm.warnings),
        "rmse": fit.rmse,
        "starts": fit.starts,
        "starts_agreeing": fit.agreement,
        "condition_number": fit.condition_number,
        "intervals": {n: dataclasses.astuple(boot.interval(boot.values[n], level)) for n in PARAMETERS},
        "resamples": {
            "unit": boot.unit,
            "units": boot.units,
            "count": len(boot.usable),
            "redrawn": boot.redrawn,
            "failed": boot.failed,
            "at_bound": boot.at_bound,
            "seed": options.seed,
        },
    }


def method(arm: ArmFit) -> str:
    unit = {"cell": "cells (budget × r)", "row": "rows", "budget": "budgets"}[arm.boot.unit]
    return f"expanded percentiles of {len(arm.boot.usable)} bootstrap refits, {unit} resampled"


def difference_json(d: Difference) -> dict[str, Any]:
    return {
        "arm": d.arm,
        "against": d.against,
        "estimate": d.estimate,
        "interval": [d.interval.low, d.interval.high],
    }


def convention_words(name: str) -> str:
    return (
        "parameters counted as the table gives them (no convention stated)"
        if name == UNSTATED
        else f"convention {name}"
    )


def arm_words(arm: ArmFit | Unidentified, analysis: Analysis) -> list[str]:
    if isinstance(arm, Unidentified):
        return [f"{arm.arm}: no φ can be given from these {len(arm.index)} rows."] + [
            f"  Missing: {reason}." for reason in arm.reasons
        ]
    level = f"{analysis.options.level:.0%}".replace("%", " %")
    lines = [
        f"{arm.arm}: φ = {arm.phi:.3f}, {level} interval {arm.interval.low:.3f} to {arm.interval.high:.3f}.",
        f"  {told_apart(arm.interval.low, arm.interval.high)}",
        f"  {len(arm.index)} rows, R² {arm.fit.r_squared:.4f}, misfit {1000 * arm.fit.rmse:.1f} mnat; "
        + ", ".join(f"{n} {arm.fit.parameters[n]:.4g}" for n in PARAMETERS)
        + ".",
        f"  Interval: {method(arm)}; {convention_words(analysis.losses.convention)};"
        f" {analysis.options.baseline} baseline; {analysis.options.objective}; {arm.fit.status}.",
    ]
    return lines + [f"  Warning: {w}." for w in arm.warnings]


def excluded_words(losses: Losses) -> list[str]:
    """The rows left out, a line each up to eight; baseline runs that several arms brought along are one line."""
    shared = [e for e in losses.excluded if SHARED_BASELINE in e.reason]
    others = [e for e in losses.excluded if SHARED_BASELINE not in e.reason]
    lines = [f"{len(shared)} r = 1 runs were given more than once and count once."] if shared else []
    if others:
        lines.append(f"Left out: {len(others)} of {len(losses.excluded) + len(losses)} rows.")
        lines += [f"  {e.row}: {e.reason}" for e in others[:8]]
        lines += [f"  … and {len(others) - 8} more (phi.json lists all)"] if len(others) > 8 else []
    return lines


def told_apart(low: float, high: float) -> str:
    """What an interval of φ says about the two values that mean something by themselves."""
    zero, one = low <= 0 <= high, low <= 1 <= high
    if zero and one:
        return "These runs cannot tell φ from 0 (recurrences worth nothing) nor from 1 (as good as unshared layers)."
    if zero:
        return "φ cannot be told from 0: a recurrence may be worth nothing here; it is worth less than unshared layers."
    if one:
        return "φ cannot be told from 1: a recurrence may be worth as much as unshared layers; it is worth something."
    if high < 0:
        return "φ is below 0: more recurrences make these models worse at equal tokens."
    if low > 1:
        return "φ is above 1: a recurrence is worth more here than unshared layers would be."
    return "A recurrence is worth something (φ > 0) and less than unshared layers (φ < 1)."


def difference_words(d: Difference, level: float) -> str:
    told = (
        "the two cannot be told apart."
        if 0 in d.interval
        else f"a recurrence is worth {'more' if d.estimate > 0 else 'less'} in {d.arm}."
    )
    return (
        f"φ({d.arm}) − φ({d.against}) = {d.estimate:+.3f}, {level * 100:g} % interval {d.interval.low:+.3f} to"
        f" {d.interval.high:+.3f}, r = 1 cells resampled together: {told}"
    )


def measure(
    source: epath.PathLike | Sequence[epath.PathLike],
    out_dir: epath.PathLike,
    options: Options = DEFAULTS,
    convention: str | None = None,
    loss_unit: LossUnit = "nats",
) -> Report:
    """Fits every arm of `source` and writes phi.json, losses.csv and isoflops.png under `out_dir`.

    `source` is a directory of runs, a CSV or Parquet file, or several of them.
    Raises `UserError` when the rows cannot be read or writing would do harm (`fit.output.check_output`); where the
    rows do not identify φ, the report says what is missing.
    """
    check_output(source, out_dir)
    report = Report(analyse(read_losses(source, convention, loss_unit), options))
    return write(report, out_dir, report.to_json())


def write(report: Report, out_dir: epath.PathLike, data: dict[str, Any]) -> Report:
    """Writes the table, its picture and `data` (`report.to_json()`, or more) under `out_dir`."""
    from fit.plots import isoflops, png

    files = write_files(
        out_dir,
        {
            "losses.csv": report.analysis.losses.to_csv(),
            "isoflops.png": png(isoflops(report.analysis)),
            "phi.json": to_text(data),
        },
    )
    return dataclasses.replace(report, files=tuple(files))
