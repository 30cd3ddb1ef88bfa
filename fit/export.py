"""Everything about a table in one folder: JSON, CSV, Markdown, LaTeX and pictures."""

from __future__ import annotations

import csv
import dataclasses
import io
from typing import Any

from etils import epath

from fit import plots, words
from fit.compare import Comparison, compare
from fit.consequences import compute_optimal
from fit.diagnose import Diagnosis, diagnose
from fit.losses import Losses
from fit.minima import iso_flop_minima
from fit.output import to_text, write_files
from fit.report import Report
from fit.sensitivity import LawRow, sensitivity
from looped.errors import UserError


def export(report: Report, out_dir: epath.PathLike) -> list[str]:
    """Writes the whole analysis of `report` under `out_dir`; returns the paths."""
    analysis = report.analysis
    diagnoses = {a.arm: diagnose(analysis, a) for a in analysis.identified}
    laws = {a.arm: sensitivity(analysis, a) for a in analysis.identified}
    optima = [o for a in analysis.identified for o in compute_optimal(analysis, a)]
    tables = [words.fits_table(analysis)]
    compared = compared_arms(report)
    if compared is not None:
        tables += words.comparison_tables(compared)
    for arm, rows in laws.items():
        tables.append(words.laws_table(arm, rows))
        tables += words.diagnosis_tables(diagnoses[arm])
    minima = _minima(analysis.losses, analysis.options)
    tables += [words.optima_table(optima)] if optima else []
    tables += [words.minima_table(minima)] if minima else []
    data = report.to_json() | {
        "laws": {arm: [law_json(r) for r in rows] for arm, rows in laws.items()},
        "diagnosis": {arm: diagnosis_json(d) for arm, d in diagnoses.items()},
    }
    files: dict[str, bytes | str] = {
        "losses.csv": analysis.losses.to_csv(),
        "tables.md": "\n".join(t.markdown() for t in tables),
        "tables.tex": "\n".join(t.latex() for t in tables),
        "parameters.csv": parameters_csv(report),
        "isoflops.png": plots.png(plots.isoflops(analysis)),
    }
    if minima:
        files["minima.csv"] = rows_csv([dataclasses.asdict(m) for m in minima])
    if diagnoses:
        files["residuals.png"] = plots.png(plots.residuals(analysis))
        files["profile.png"] = plots.png(plots.profiles(analysis, list(diagnoses.values())))
        files["multipliers.png"] = plots.png(plots.multipliers(list(diagnoses.values()), analysis))
    return write_files(out_dir, files | {"phi.json": to_text(data)})


def compared_arms(report: Report) -> Comparison | None:
    """The comparison of the report's arms, where two of them have a φ."""
    try:
        return (
            compare(report.analysis.losses, report.analysis.options)
            if len(report.analysis.identified) > 1
            else None
        )
    except UserError:
        return None


def _minima(losses: Losses, options):
    try:
        return iso_flop_minima(losses, options.baseline, options.level)
    except UserError:
        return []


def law_json(row: LawRow) -> dict[str, Any]:
    """One row of the sensitivity table; errors in nats."""
    return {
        "law": row.law.name,
        "form": row.law.form,
        "phi": {"estimate": row.phi, "interval": dataclasses.astuple(row.interval) if row.interval else None},
        "misfit": row.misfit,
        "cell_left_out": row.left_out,
        "upper_budgets_predicted": row.extrapolated,
        "phi_of_lower_budgets": row.phi_low_budgets,
        "parameters": row.parameters,
        "status": row.status,
    }


def diagnosis_json(d: Diagnosis) -> dict[str, Any]:
    return dataclasses.asdict(d)


def parameters_csv(report: Report) -> str:
    """One row an arm: φ, its interval, the parameters and what the fit was made with."""
    rows = []
    for name, arm in report.to_json()["arms"].items():
        phi = arm["phi"] or {"estimate": None, "interval": [None, None], "level": None}
        keep = (
            "E",
            "A",
            "alpha",
            "B",
            "beta",
            "r_squared",
            "rows",
            "convention",
            "objective",
            "baseline",
            "status",
        )
        low, high = phi["interval"]
        head = {"arm": name, "phi": phi["estimate"], "phi_low": low, "phi_high": high, "level": phi["level"]}
        rows.append(head | {k: arm[k] for k in keep} | {"warnings": "; ".join(arm["warnings"])})
    return rows_csv(rows)


def rows_csv(rows: list[dict[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: "" if v is None else v for k, v in row.items()} for row in rows)
    return out.getvalue()
