"""From rows as given to a validated losses table: one row a finished run, arms, budgets and the shared r = 1 baseline.

The published ways to go wrong are checked here, row by row, because a fit hides them: wrong units, repeated rows,
unfinished runs, parameters counted in two ways.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np
from etils import epath

from fit.checks import check_table
from fit.reading import GROUP_PREFIX, GROUPS, RawRow, read_source
from looped.errors import UserError, nearest
from looped.record import CONVENTIONS, ParameterGroups, count_parameters

REQUIRED = ("recurrences", "n_once", "n_rec", "tokens", "loss")
OPTIONAL = (
    "arm",
    "budget_flops",
    "run_id",
    "seed",
    "flops_per_token",
    "convention",
    "status",
    "backprop_recurrences",
    "d_model",
)
UNSTATED = "unstated"
DEFAULT_ARM = "all"
LN2 = math.log(2)

Baseline = Literal["matched", "all"]
LossUnit = Literal["nats", "bits"]


@dataclasses.dataclass(frozen=True)
class Excluded:
    """A row that was left out, and why."""

    row: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Losses:
    """n finished runs.

    Arrays are [n]: `loss` in nats per token, `budget` in training FLOPs (equal for the runs of one budget; NaN where the table
    does not say), `arm` and `seed` text.  `columns` holds every column as given, [n] each.  `convention` is how n_once
    and n_rec were counted.
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
        """Names of the arms: those that rows with r > 1 carry, in order of appearance."""
        return tuple(dict.fromkeys(self.arm[self.looped].tolist()))

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
        return out.getvalue()


def _plain(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def read_losses(
    sources: epath.PathLike | Sequence[epath.PathLike],
    convention: str | None = None,
    loss_unit: LossUnit = "nats",
) -> Losses:
    """Reads one or several directories of runs, CSV or Parquet files into one validated table.

    `convention` recounts n_once and n_rec from the columns `params_prelude`, `params_recurrent_block`, … where the table has
    them.  Raises `UserError` naming the row, the value and the remedy.
    """
    paths = (
        [sources]
        if isinstance(sources, (str, epath.Path)) or not isinstance(sources, Iterable)
        else list(sources)
    )
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
    _check_columns(raw)
    excluded: list[Excluded] = []
    kept = [row for row in raw if not _left_out(row, excluded)]
    parsed = _parse_all(kept, convention, 1.0 if loss_unit == "nats" else LN2, stems)
    parsed = _drop_repeats(parsed, excluded)
    if not parsed:
        reasons = "; ".join(f"{e.row}: {e.reason}" for e in excluded[:3])
        raise UserError(
            f"no row is left to fit: all {len(raw)} were left out ({reasons}); finish some runs first."
        )
    stamp = _one_convention(parsed, convention)
    names = list(dict.fromkeys(name for row in parsed for name in row.raw.values))
    budget, notes = resolve_budgets(parsed)
    losses = Losses(
        recurrences=np.array([p.recurrences for p in parsed], dtype=np.int64),
        n_once=np.array([p.n_once for p in parsed]),
        n_rec=np.array([p.n_rec for p in parsed]),
        tokens=np.array([p.tokens for p in parsed]),
        loss=np.array([p.loss for p in parsed]),
        budget=budget,
        arm=np.array([p.arm for p in parsed], dtype=object),
        labels=tuple(p.raw.label for p in parsed),
        columns={name: tuple(p.raw.values.get(name) for p in parsed) for name in names},
        convention=stamp,
        excluded=tuple(excluded),
        warnings=tuple(notes),
    )
    return dataclasses.replace(losses, warnings=losses.warnings + tuple(check_table(losses)))


@dataclasses.dataclass(frozen=True)
class Parsed:
    """A row whose values are known to be numbers of the right kind."""

    raw: RawRow
    arm: str
    recurrences: int
    n_once: float
    n_rec: float
    tokens: float
    loss: float
    flops_per_token: float | None
    budget_flops: float | None
    convention: str


def _check_columns(raw: Sequence[RawRow]) -> None:
    for source in dict.fromkeys(row.source for row in raw):
        first = next(row for row in raw if row.source == source)
        names = list(dict.fromkeys(n for row in raw if row.source == source for n in row.values))
        if all(row.values.get("status") == "unreadable" for row in raw if row.source == source):
            continue
        for missing in (name for name in REQUIRED if name not in names):
            if missing == "loss" and any("bit" in n.lower() or n.lower() in ("bpb", "bpt") for n in names):
                unit = next(n for n in names if "bit" in n.lower() or n.lower() in ("bpb", "bpt"))
                raise UserError(
                    f"column 'loss' is missing and {unit!r} seems to be in bits; name it loss and give bits per token"
                    " with --loss-unit bits, or multiply by ln 2 for nats."
                )
            where = f" of {first.label.rsplit(' row', 1)[0]}" if " row" in first.label else ""
            raise UserError(f"column {missing!r} is missing{where}.{_rename_hint(missing, names)}")


def _rename_hint(missing: str, names: Sequence[str]) -> str:
    hint = nearest(missing, names)
    near = hint.split(" Valid:")[0].replace("Did you mean", "Rename the nearest one,").rstrip("?")
    near = f"{near}." if near else ""
    return f"{near} The table has: {', '.join(names)}; it needs {', '.join(REQUIRED)}."


def _left_out(row: RawRow, excluded: list[Excluded]) -> bool:
    status = str(row.values.get("status") or "done").strip().lower()
    if status not in ("done", "finished", "ok", "complete", "completed"):
        reason = row.values.get("reason")
        said = {"running": "still running or interrupted", "failed": "failed"}.get(status, status)
        excluded.append(Excluded(row.label, f"{said}: {reason}" if reason else said))
        return True
    loss = row.values.get("loss")
    try:
        finite = loss not in (None, "") and math.isfinite(float(str(loss)))
    except ValueError:
        return False  # text: an error of its own
    if not finite:
        excluded.append(
            Excluded(row.label, f"the loss is not finite ({loss!r})" if loss not in (None, "") else "no loss")
        )
    return not finite


def _parse_all(
    rows: Sequence[RawRow], convention: str | None, unit: float, stems: Sequence[str] | None
) -> list[Parsed]:
    parsed, wrong = [], []
    for row in rows:
        try:
            parsed.append(_parse(row, convention, unit, stems))
        except UserError as error:
            wrong.append(str(error))
    if wrong:
        others = f" ({len(wrong) - 1} more rows are wrong; the next: {wrong[1]})" if len(wrong) > 1 else ""
        raise UserError(wrong[0] + others)
    return parsed


def _number(row: RawRow, name: str, ok: Callable[[float], bool], remedy: str) -> float:
    value = row.values.get(name)
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise UserError(f"{row.label}: {name} is {value!r}, which is no number; {remedy}.") from None
    if isinstance(value, bool) or not math.isfinite(number) or not ok(number):
        raise UserError(f"{row.label}: {name} is {value}; {remedy}.")
    return number


def _optional(row: RawRow, name: str) -> float | None:
    if row.values.get(name) in (None, ""):
        return None
    return _number(row, name, lambda v: v > 0, "give a positive number or leave it empty")


def _parse(row: RawRow, convention: str | None, unit: float, stems: Sequence[str] | None) -> Parsed:
    r = _number(row, "recurrences", lambda v: v >= 1 and v == int(v), "give a whole number of at least 1")
    once = _number(
        row, "n_once", lambda v: v >= 0, "give the number of parameters used once a token, 0 or more"
    )
    rec = _number(
        row, "n_rec", lambda v: v > 0, "give the number of parameters of the recurrent block, above 0"
    )
    tokens = _number(row, "tokens", lambda v: v > 0, "give the number of tokens trained on, above 0")
    loss = _number(
        row, "loss", lambda v: 0 < v < 20, "give the final loss in nats per token, above 0 and below 20"
    )
    stated = str(row.values.get("convention") or "").strip() or UNSTATED
    if convention is not None and stated != convention:
        once, rec = _recount(row, int(r), convention)
        stated = convention
    arm = str(row.values.get("arm") or "").strip() or (stems[row.source] if stems else DEFAULT_ARM)
    return Parsed(
        row,
        arm,
        int(r),
        once,
        rec,
        tokens,
        loss * unit,
        _optional(row, "flops_per_token"),
        _optional(row, "budget_flops"),
        stated,
    )


def _recount(row: RawRow, r: int, convention: str) -> tuple[float, float]:
    counts = {}
    for group in GROUPS:
        name = GROUP_PREFIX + group
        if name not in row.values:
            raise UserError(
                f"{row.label}: --convention {convention} recounts n_once and n_rec from the columns"
                f" {', '.join(GROUP_PREFIX + g for g in GROUPS)}, and {name} is missing; add it or leave --convention out."
            )
        counts[group] = int(_number(row, name, lambda v: v >= 0, "give a number of parameters, 0 or more"))
    once, rec = count_parameters(ParameterGroups(**counts), r, convention)
    if rec <= 0:
        raise UserError(
            f"{row.label}: {GROUP_PREFIX}recurrent_block is 0; give the parameters of the recurrent block."
        )
    return float(once), float(rec)


def _one_convention(parsed: Sequence[Parsed], convention: str | None) -> str:
    if convention is not None:
        return convention
    examples: dict[str, str] = {}
    for row in parsed:
        examples.setdefault(row.convention, row.raw.label)
    if len(examples) > 1:
        listed = " and ".join(f"{name!r} ({label})" for name, label in examples.items())
        raise UserError(
            f"the rows count n_once and n_rec under different conventions, {listed}, which moves φ by as much as the"
            " effect under study; give --convention NAME to recount all rows from their params_ columns, or state the"
            " same `convention` in every row."
        )
    return next(iter(examples))


_SAME_LOSS = 1e-4  # nats: two readings of one r = 1 run differ by less


def _drop_repeats(parsed: Sequence[Parsed], excluded: list[Excluded]) -> list[Parsed]:
    """Leaves out later rows of one run: the same run_id, or an r = 1 row that each of several arms brought along.

    Rows that repeat another in every value, with nothing to tell them apart, are an error.
    """
    by_id: dict[str, Parsed] = {}
    seen: dict[tuple, list[Parsed]] = {}
    several = len({p.arm for p in parsed if p.recurrences > 1}) > 1 or len({p.raw.source for p in parsed}) > 1
    kept = []
    for row in parsed:
        run_id = str(row.raw.values.get("run_id") or "")
        if run_id and run_id in by_id:
            excluded.append(Excluded(row.raw.label, f"repeats run_id {run_id} of {by_id[run_id].raw.label}"))
            continue
        seed = str(row.raw.values.get("seed") or "")
        arm = row.arm if row.recurrences > 1 else ""
        k = str(row.raw.values.get("backprop_recurrences") or "")
        key = (arm, row.recurrences, k, row.n_once, row.n_rec, row.tokens, seed)
        twin = next(
            (o for o in seen.get(key, ()) if not run_id and abs(o.loss - row.loss) <= _SAME_LOSS), None
        )
        if twin is not None and several and row.recurrences == 1:
            excluded.append(
                Excluded(row.raw.label, f"the same r = 1 run as {twin.raw.label}, which every arm shares")
            )
            continue
        if twin is not None and twin.loss == row.loss:
            raise UserError(
                f"{row.raw.label} repeats {twin.raw.label} (r = {row.recurrences}, tokens {row.tokens:.0f}, loss"
                f" {row.loss:g}); remove one, or tell repeats apart by a `seed` or `run_id` column."
            )
        if run_id:
            by_id[run_id] = row
        seen.setdefault(key, []).append(row)
        kept.append(row)
    return kept


def resolve_budgets(parsed: Sequence[Parsed]) -> tuple[np.ndarray, list[str]]:
    """Returns the budget in FLOPs of every row [n] and notes on how it was found.

    `budget_flops` where every row has it; else tokens × flops_per_token, else 6·(n_once + r·n_rec)·tokens, runs within a
    few percent making one budget.  NaN everywhere where neither shows separate budgets.
    """
    if all(p.budget_flops is not None for p in parsed):
        return _group(np.array([p.budget_flops for p in parsed]), 0.005), []
    if all(p.flops_per_token is not None for p in parsed):
        spent = np.array([p.tokens * (p.flops_per_token or 0) for p in parsed])
        grouped, how = _group(spent, 0.05), "tokens × flops_per_token"
    else:
        spent = np.array([6 * (p.n_once + p.recurrences * p.n_rec) * p.tokens for p in parsed])
        grouped, how = _group(spent, 0.05), "6·(n_once + r·n_rec)·tokens"
    budgets = len(np.unique(grouped))
    one_chain = budgets == 1 and spent.max() > 1.5 * spent.min()
    if one_chain or budgets > max(1, len(parsed) // 3):
        note = (
            f"the table has no budget_flops, and {how} shows no separate budgets: resampling takes rows instead of cells"
            " (budget × r), and every r = 1 row is the baseline."
        )
        return np.full(len(parsed), np.nan), [note]
    return grouped, [f"budgets were read from {how}: {budgets} of them."]


def _group(values: np.ndarray, tolerance: float) -> np.ndarray:
    """Replaces values that are linked by relative steps below `tolerance` by their geometric mean (or the value itself)."""
    order = np.argsort(values)
    jumps = np.diff(np.log(values[order])) > tolerance
    group = np.concatenate([[0], np.cumsum(jumps)])
    out = np.empty_like(values, dtype=np.float64)
    for g in range(group[-1] + 1):
        members = order[group == g]
        same = np.unique(values[members])
        out[members] = same[0] if len(same) == 1 else float(f"{np.exp(np.log(values[members]).mean()):.4g}")
    return out
