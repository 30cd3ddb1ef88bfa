"""From rows as given to a validated losses table: one row a finished run, arms, budgets and the shared r = 1 baseline.

The published ways to go wrong are checked here, row by row, because a fit hides them: wrong units, repeated rows,
unfinished runs, parameters counted in two ways.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import os
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from etils import epath

from fit.budgets import resolve_budgets
from fit.checks import check_table
from fit.reading import RawRow, read_source
from fit.validate import (
    UNSTATED,
    Excluded,
    check_columns,
    drop_repeats,
    leave_out,
    one_convention,
    parse_all,
)
from looped.errors import UserError, nearest
from looped.record import CONVENTIONS

REFERENCE_ARMS = ("full", "vanilla", "baseline")
"""Names under which an arm is the one that others are compared with."""
_NATS = {"nats": 1.0, "bits": math.log(2)}

Baseline = Literal["matched", "all"]
LossUnit = Literal["nats", "bits"]


@dataclasses.dataclass(frozen=True)
class Losses:
    """n finished runs.

    Arrays are [n]: `loss` in nats per token, `budget` in training FLOPs (equal for runs of one budget; NaN where the
    table does not say), `arm` text.  `columns` holds every column as given, [n] each.  `convention` is how n_once and
    n_rec were counted.
    """

    recurrences: np.ndarray
    n_once: np.ndarray
    n_rec: np.ndarray
    tokens: np.ndarray
    loss: np.ndarray
    budget: np.ndarray
    arm: np.ndarray
    labels: tuple[str, ...]
    columns: dict[str, tuple[Any, ...]]
    convention: str
    excluded: tuple[Excluded, ...] = ()
    warnings: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.loss)

    @property
    def looped(self) -> np.ndarray:
        return self.recurrences > 1

    @property
    def arms(self) -> tuple[str, ...]:
        """Names of the arms, those that rows with r > 1 carry: the reference first, the others as they appear."""
        names = dict.fromkeys(self.arm[self.looped].tolist())
        first = next((n for n in REFERENCE_ARMS if n in names), None)
        return tuple(sorted(names, key=lambda n: n != first))

    @property
    def seeds(self) -> np.ndarray:
        """What tells repeats apart [n], as text: a whole number however it was written, "0" where nothing is."""
        return np.array([_seed(v) for v in self.columns.get("seed", (None,) * len(self))], dtype=object)

    @property
    def unnamed_arms(self) -> tuple[str, ...]:
        """The arms, or, where no run is looped, whatever the r = 1 rows are called."""
        return self.arms or tuple(dict.fromkeys(self.arm.tolist()))

    def rows_of(self, arm: str, baseline: Baseline = "matched") -> np.ndarray:
        """Indices of the rows that `arm` is fitted to: its own with r > 1, and the r = 1 rows, whatever arm those name.

        `matched` takes the r = 1 rows at the arm's budgets, `all` every one.
        """
        own = self.looped & (self.arm == arm)
        base = ~self.looped
        if baseline == "matched" and np.isfinite(self.budget).all() and own.any():
            base &= np.isin(self.budget, self.budget[own])
        return np.flatnonzero(own | base)

    def cells(self, unit: str = "cell", paired: bool = False) -> np.ndarray:
        """Resampling unit [n] of every row: `cell` is budget × r, within an arm for r > 1; or `row`, or `budget`.

        Rows with r = 1 belong to every arm, so their cells are shared; `paired` also shares those with r > 1.
        """
        if unit == "row" or not np.isfinite(self.budget).all():
            return np.arange(len(self))
        keys = []
        for budget, r, arm in zip(self.budget, self.recurrences, self.arm, strict=True):
            own = "" if r == 1 or paired else arm
            keys.append((budget,) if unit == "budget" else (budget, int(r), own))
        index = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        return np.array([index[key] for key in keys])

    def to_csv(self) -> str:
        """The table as CSV: the fit's own columns first, then every other column as given."""
        own = {
            "arm": self.arm.tolist(),
            "recurrences": [int(r) for r in self.recurrences],
            "budget_flops": ["" if math.isnan(b) else repr(float(b)) for b in self.budget],
            "n_once": [_plain(v) for v in self.n_once],
            "n_rec": [_plain(v) for v in self.n_rec],
            "tokens": [_plain(v) for v in self.tokens],
            "loss": [repr(float(v)) for v in self.loss],
            "convention": [self.convention] * len(self),
        }
        if self.convention == UNSTATED:
            del own["convention"]
        columns = own | {
            k: ["" if v is None else v for v in vs] for k, vs in self.columns.items() if k not in own
        }
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
        return out.getvalue().replace("\0", "")  # which no table may hold


def _seed(value: Any) -> str:
    text = "" if value is None else str(value).strip()
    try:
        return str(int(float(text or "0")))
    except (ValueError, OverflowError):
        return text


def _plain(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def read_losses(
    sources: epath.PathLike | Sequence[epath.PathLike],
    convention: str | None = None,
    loss_unit: LossUnit = "nats",
) -> Losses:
    """Reads one or several directories of runs, CSV or Parquet files into one validated table.

    `convention` recounts n_once and n_rec from the columns `params_prelude`, `params_recurrent_block`, … where the
    table has them.  Raises `UserError` naming the row, the value and the remedy.
    """
    paths = [sources] if isinstance(sources, (str, os.PathLike)) else list(sources)
    several = len(paths) > 1
    raw = [row for i, path in enumerate(paths) for row in read_source(path, i, several)]
    stems = [epath.Path(p).stem for p in paths]
    return table_of(raw, convention, loss_unit, stems if several else None)


def table_of(
    raw: Sequence[RawRow],
    convention: str | None = None,
    loss_unit: LossUnit = "nats",
    stems: Sequence[str] | None = None,
) -> Losses:
    """Validates rows into a table; `stems` names the arm of a source that has no `arm` column."""
    if not raw:
        raise UserError("the table has no rows below its header; give one row a finished run.")
    if convention is not None and convention not in CONVENTIONS:
        raise UserError(f"convention {convention!r} is unknown.{nearest(convention, CONVENTIONS)}")
    check_columns(raw)
    excluded: list[Excluded] = []
    parsed = parse_all(leave_out(raw, excluded), convention, _NATS[loss_unit], stems)
    parsed = drop_repeats(parsed, excluded)
    if not parsed:
        reasons = "; ".join(f"{e.row}: {e.reason}" for e in excluded[:3])
        raise UserError(
            f"no row is left to fit: all {len(raw)} were left out ({reasons}); finish some runs first."
        )
    names = list(dict.fromkeys(name for row in parsed for name in row.raw.values))
    tokens = np.array([p.tokens for p in parsed])
    effective = np.array([p.n_once + p.recurrences * p.n_rec for p in parsed])
    budget, notes = resolve_budgets(
        [p.budget_flops for p in parsed], [p.flops_per_token for p in parsed], tokens, effective
    )
    losses = Losses(
        recurrences=np.array([p.recurrences for p in parsed], dtype=np.int64),
        n_once=np.array([p.n_once for p in parsed]),
        n_rec=np.array([p.n_rec for p in parsed]),
        tokens=tokens,
        loss=np.array([p.loss for p in parsed]),
        budget=budget,
        arm=np.array([p.arm for p in parsed], dtype=object),
        labels=tuple(p.raw.label for p in parsed),
        columns={name: tuple(p.raw.values.get(name) for p in parsed) for name in names},
        convention=one_convention(parsed),
        excluded=tuple(excluded),
    )
    odd = check_table(losses, units_known=all(p.raw.recorded for p in parsed))
    return dataclasses.replace(losses, warnings=(*notes, *odd))
