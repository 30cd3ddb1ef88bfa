"""Sub-commands that read losses: fit, compare, equivalent, minima, export."""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from looped.errors import UserError, nearest

if TYPE_CHECKING:
    from fit.analysis import ArmFit
    from fit.report import Report

Sources = Annotated[
    tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="LOSSES [LOSSES ...]", help_behavior_hint="")
]


@dataclasses.dataclass
class _Reading:
    """Options that say how a table is read."""

    sources: Sources
    """CSV or Parquet files with the columns recurrences, n_once, n_rec, tokens and loss, or directories of
    runs; local or gs://. Several are read as one table."""
    baseline: Literal["matched", "all"] = "matched"
    """Which r = 1 rows every arm shares: those at the arm's budgets, or all."""
    convention: Annotated[
        str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: as given)")
    ] = None
    """Recount n_once and n_rec from the table's params_ columns: published, injection-recurrent,
    no-injection, unembedding-once or embeddings-once."""
    loss_unit: Literal["nats", "bits"] = "nats"
    """Unit of the loss column, per token."""
    json: bool = False
    """Print one JSON object on standard output, and nothing else."""

    def losses(self):
        from fit.losses import read_losses

        if not self.sources:
            raise UserError("no losses were named; give a CSV or Parquet file, or a directory of runs.")
        return read_losses(self.sources, self.convention, self.loss_unit)

    def say(self, data: Any, text: str) -> None:
        from fit.output import to_text

        print(to_text(data) if self.json else text, end="" if self.json else "\n")


@dataclasses.dataclass
class _Fitting(_Reading):
    """Options that say how the law is fitted and resampled."""

    objective: Literal["huber", "squares"] = "huber"
    """Summed over the log residuals: Huber's loss, or plain squares."""
    delta: float = 1e-3
    """Huber's threshold, in log loss."""
    resample: Literal["cell", "row", "budget"] = "cell"
    """What the bootstrap draws: cells (budget × r), rows or budgets."""
    pair: Literal["baseline", "cells"] = "baseline"
    """Which cells the arms share when they are resampled: those of r = 1, or every budget and r (for arms
    whose runs share seeds and data order)."""
    resamples: int = 1000
    """Bootstrap refits."""
    level: float = 0.95
    """Coverage of the intervals."""
    seed: int = 0
    """Seed of the resampling; the fit itself has none."""

    def options(self):
        from fit.analysis import Options
        from fit.solve import Objective

        return Options(
            Objective(self.objective, self.delta), self.baseline, self.resample, self.pair, self.resamples,
            self.level, self.seed,
        )  # fmt: skip

    def report(self) -> Report:
        from fit.analysis import analyse
        from fit.report import Report

        options = self.options()
        return Report(analyse(self.losses(), options))


@dataclasses.dataclass
class Fit(_Fitting):
    """Fit the joint law to final losses and give φ of every arm with its interval.

    L = E + A·(n_once + r^φ·n_rec)^−α + B·D^−β. Where the rows do not determine φ, none is printed: the
    output says what is missing, and the exit status is 2.
    """

    output: Annotated[str | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: no files)")] = (
        None
    )
    """Write phi.json, losses.csv and isoflops.png into this folder."""
    laws: bool = False
    """Add φ under neighbouring laws, with the error of each on rows it has not seen."""
    diagnose: bool = False
    """Add multipliers by r with a lack-of-fit test, parts of the grid, influence of cells, the profile of φ."""
    optima: bool = False
    """Add the compute-optimal size, tokens and loss for every r and budget."""

    def run(self) -> int:
        _on_cpu()
        if self.output is not None:
            from fit.output import check_output

            check_output(self.sources, self.output)
        report = self.report()
        data, tables = report.to_json(), []
        for arm in report.analysis.identified:
            self._add(report, arm, data["arms"][arm.arm], tables)
        if self.output is not None:
            from fit.report import write

            report = write(report, self.output, data)
        text = "\n\n".join([report.summary(), *(t.text() for t in tables)])
        self.say(data, text + "".join(f"\nWrote {path}" for path in report.files))
        return _status(report)

    def _add(self, report: Report, arm: ArmFit, data: dict[str, Any], tables: list) -> None:
        from fit import export, words
        from fit.consequences import compute_optimal
        from fit.diagnose import diagnose
        from fit.sensitivity import sensitivity

        if self.laws:
            rows = sensitivity(report.analysis, arm)
            data["laws"] = [export.law_json(row) for row in rows]
            tables.append(words.laws_table(arm.arm, rows))
        if self.diagnose:
            found = diagnose(report.analysis, arm)
            data["diagnosis"] = export.diagnosis_json(found)
            tables += words.diagnosis_tables(found)
        if self.optima:
            optima = compute_optimal(report.analysis, arm)
            data["optima"] = [dataclasses.asdict(o) for o in optima]
            tables.append(words.optima_table(optima))


@dataclasses.dataclass
class Compare(_Fitting):
    """Compare the arms of one or several tables: each φ, their differences, and what a loss difference is made of.

    All arms are fitted under one counting convention, baseline policy and objective; tables that count parameters
    differently are refused.
    """

    def run(self) -> int:
        _on_cpu()
        from fit import words
        from fit.compare import compare
        from fit.report import Report, difference_json

        options = self.options()
        compared = compare(self.losses(), options)
        report = Report(compared.analysis)
        data = report.to_json() | {
            "differences": [difference_json(d) for d in compared.differences],
            "views": [dataclasses.asdict(v) for v in compared.views],
            "splits": [dataclasses.asdict(s) for s in compared.splits],
            "notes": [*compared.analysis.losses.warnings, *compared.notes],
        }
        tables = [words.fits_table(compared.analysis), *words.comparison_tables(compared)]
        notes = "".join(f"\nNote: {n}" for n in compared.notes)
        self.say(data, "\n\n".join([report.summary(), *(t.text() for t in tables)]) + notes)
        return 0


@dataclasses.dataclass
class Equivalent(_Fitting):
    """Say which unshared models equal a looped one: in loss, and in training cost.

    Sizes are in parameters under the table's convention (the published one leaves embeddings out).
    """

    recurrences: int = 4
    """Passes of the looped model."""
    width: Annotated[int | None, tyro.conf.arg(metavar="D_MODEL", help_behavior_hint="")] = None
    """Its width; parameters follow from the table's own models at this r (needs a d_model column)."""
    n_once: Annotated[float | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """In place of a width: parameters used once a token."""
    n_rec: Annotated[float | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """In place of a width: parameters of the recurrent block."""
    tokens: Annotated[float | None, tyro.conf.arg(metavar="D", help_behavior_hint="")] = None
    """Tokens trained on, for the losses."""
    arm: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: every arm)")] = (
        None
    )
    """Which arm's φ."""

    def run(self) -> int:
        _on_cpu()
        from fit.consequences import equivalent
        from fit.words import equivalent_table

        report = self.report()
        arms = _chosen(report, self.arm)
        found = [
            equivalent(report.analysis, a, self.recurrences, self.width, self.n_once, self.n_rec, self.tokens)
            for a in arms
        ]
        rows = [dataclasses.asdict(e) | {"unique": e.unique} for e in found]
        data = {"schema_version": 1, "convention": report.analysis.losses.convention, "equivalents": rows}
        self.say(data, equivalent_table(found).text())
        return 0


@dataclasses.dataclass
class Minima(_Reading):
    """Find iso-FLOP minima: a parabola in log N for every arm, r and budget (N = n_once + n_rec).

    No law is fitted. A cell without an interior minimum is flagged.
    """

    level: float = 0.95
    """Coverage of the intervals on N."""

    def run(self) -> int:
        _on_cpu()
        from fit.minima import iso_flop_minima
        from fit.words import minima_table

        if not 0.5 <= self.level < 1:
            raise UserError(
                f"level is {self.level}; give the coverage of the interval as a fraction, such as 0.95."
            )
        losses = self.losses()
        found = iso_flop_minima(losses, self.baseline, self.level)
        data = {
            "schema_version": 1,
            "convention": losses.convention,
            "level": self.level,
            "minima": [dataclasses.asdict(m) for m in found],
            "excluded": [dataclasses.asdict(e) for e in losses.excluded],
        }
        self.say(data, minima_table(found).text())
        return 0


@dataclasses.dataclass
class Export(_Fitting):
    """Write the whole analysis into a folder: phi.json, CSV, Markdown and LaTeX tables, pictures.

    Takes a minute or two: it refits parts of the grid and neighbouring laws under the resamples.
    """

    output: Annotated[str, tyro.conf.arg(metavar="DIR", help_behavior_hint="(required)")] = ""
    """The folder."""

    def run(self) -> int:
        _on_cpu()
        from fit.export import export
        from fit.output import check_output

        if not self.output:
            raise UserError("output is missing; say where the files go with --output DIR.")
        check_output(self.sources, self.output)
        report = self.report()
        files = export(report, self.output)
        self.say(
            report.to_json() | {"files": files}, "\n".join([report.summary(), *(f"Wrote {f}" for f in files)])
        )
        return _status(report)


def _on_cpu() -> None:
    """The fit is float64 and small: it never takes an accelerator that a run may be using."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


def _status(report: Report) -> int:
    if report.identified:
        return 0
    for arm, reasons in report.refused().items():
        for reason in reasons:
            print(f"{arm}: no φ can be given: {reason}.", file=sys.stderr)
    return 2


def _chosen(report: Report, arm: str | None) -> list[ArmFit]:
    able = {a.arm: a for a in report.analysis.identified}
    if arm is not None and arm not in report.analysis.arms:
        raise UserError(f"arm {arm!r} is not in the table.{nearest(arm, report.analysis.arms)}")
    if not able or (arm is not None and arm not in able):
        refused = report.refused()
        name = arm or next(iter(refused))
        raise UserError(f"{name}: no φ can be given: {refused[name][0]}.")
    return [able[arm]] if arm else list(able.values())
