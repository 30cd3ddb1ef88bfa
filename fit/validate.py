"""Rows one by one: numbers of the right kind, one counting convention, each run once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from fit.reading import GROUP_PREFIX, GROUPS, RawRow
from looped.errors import UserError, nearest
from looped.record import ParameterGroups, count_parameters
from looped.text import one_line

REQUIRED = ("recurrences", "n_once", "n_rec", "tokens", "loss")
UNSTATED = "unstated"
DEFAULT_ARM = "all"
SHARED_BASELINE = "the same r = 1 run as"

_DONE = ("done", "finished", "ok", "complete", "completed")
_SAID = {"running": "still running or interrupted", "failed": "failed"}
_SAME_LOSS = 1e-4  # nats: two readings of one r = 1 run differ by less
_HIGHEST_LOSS = 20.0  # nats: the logarithm of a vocabulary of 485 million
_LOWEST_LOSS = 1e-6
_MOST_RECURRENCES = 1_000_000
_MOST = 1e18  # of parameters and tokens: a hundred thousand times the largest there are
_MOST_FLOPS = 1e36


@dataclasses.dataclass(frozen=True)
class Excluded:
    """A row that was left out, and why."""

    row: str
    reason: str


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

    def text(self, name: str) -> str:
        value = self.raw.values.get(name)
        return "" if value is None else str(value).strip()


def check_columns(raw: Sequence[RawRow]) -> None:
    """Raises `UserError` for the first required column that a source lacks, with the nearest name it has."""
    for source in dict.fromkeys(row.source for row in raw):
        rows = [row for row in raw if row.source == source]
        names = list(dict.fromkeys(name for row in rows for name in row.values))
        if all(row.values.get("status") == "unreadable" for row in rows):
            continue
        for missing in (name for name in REQUIRED if name not in names):
            bits = next((n for n in names if "bit" in n.lower() or n.lower() in ("bpb", "bpt")), None)
            if missing == "loss" and bits is not None:
                raise UserError(
                    f"column 'loss' is missing and {bits!r} seems to be in bits; name it loss and give bits per token"
                    " with --loss-unit bits, or multiply by ln 2 for nats."
                )
            hint = nearest(missing, names).split(" Valid:")[0].replace("Did you mean", "Rename").rstrip("?")
            where = f" in {rows[0].origin}" if rows[0].origin else ""
            raise UserError(
                f"column {missing!r} is missing{where};{hint.lower() + ' to it' if hint else ' add it'}: the table has"
                f" {one_line(', '.join(names), 300)}, and needs {', '.join(REQUIRED)}."
            )


def leave_out(rows: Sequence[RawRow], excluded: list[Excluded]) -> list[RawRow]:
    """Returns the rows of finished runs with a finite loss; the others are listed in `excluded`."""
    kept = []
    for row in rows:
        reason = _why_not(row)
        if reason is None:
            kept.append(row)
        else:
            excluded.append(Excluded(row.label, reason))
    return kept


def _why_not(row: RawRow) -> str | None:
    status = str(row.values.get("status") or "done").strip().lower()
    if status not in _DONE:
        reason = row.values.get("reason")
        said = _SAID.get(status, one_line(status, 60) or "status of no text")
        return f"{said}: {one_line(reason, 300)}" if reason else said
    loss = row.values.get("loss")
    if loss is None or str(loss).strip() == "":
        return "no loss"
    try:
        return None if math.isfinite(float(loss)) else f"the loss is not finite ({loss})"
    except (TypeError, ValueError, OverflowError):
        return None  # text, or a whole number beyond any float: an error of its own


def parse_all(
    rows: Sequence[RawRow], convention: str | None, unit: float, stems: Sequence[str] | None
) -> list[Parsed]:
    """Parses every row; `unit` turns losses into nats.  `UserError` names the first wrong row and how many follow."""
    parsed, wrong = [], []
    for row in rows:
        try:
            parsed.append(_parse(row, convention, unit, stems))
        except UserError as error:
            wrong.append(str(error))
    if wrong:
        if len(wrong) == 1:
            raise UserError(wrong[0])
        following = wrong[1].partition("; ")[0].removesuffix(".")
        raise UserError(
            f"{wrong[0].removesuffix('.')} ({len(wrong) - 1} more rows are wrong; the next, {following})."
        )
    return parsed


def _number(row: RawRow, name: str, ok: Callable[[float], bool], remedy: str) -> float:
    value = row.values.get(name)
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        said = "missing" if value in (None, "") else f"{one_line(repr(value), 60)}, which is no number"
        raise UserError(f"{row.label}: {name} is {said}; {remedy}.") from None
    except OverflowError:
        number = math.inf
    if isinstance(value, bool) or not math.isfinite(number) or not ok(number):
        raise UserError(f"{row.label}: {name} is {one_line(value, 60)}; {remedy}.")
    return number


def _optional(row: RawRow, name: str, ok: Callable[[float], bool], what: str) -> float | None:
    if row.values.get(name) in (None, ""):
        return None
    return _number(row, name, ok, f"give {what}, or leave it empty")


def _parse(row: RawRow, convention: str | None, unit: float, stems: Sequence[str] | None) -> Parsed:
    r = _number(
        row,
        "recurrences",
        lambda v: 1 <= v <= _MOST_RECURRENCES and v.is_integer(),
        f"give a whole number of at least 1 and at most {_MOST_RECURRENCES:,}",
    )
    once = _number(
        row,
        "n_once",
        lambda v: v == 0 or 1 <= v <= _MOST,
        f"give the number of parameters used once a token, 0 or from 1 to {_MOST:g}",
    )
    rec = _number(
        row,
        "n_rec",
        lambda v: 1 <= v <= _MOST,
        f"give the number of parameters of the recurrent block, from 1 to {_MOST:g}",
    )
    tokens = _number(
        row,
        "tokens",
        lambda v: 0 < v <= _MOST,
        f"give the number of tokens trained on, above 0 and to {_MOST:g}",
    )
    loss = _number(
        row,
        "loss",
        lambda v: _LOWEST_LOSS <= v < _HIGHEST_LOSS,
        f"give the final loss in nats per token, from {_LOWEST_LOSS:g} to below {_HIGHEST_LOSS:g}",
    )
    stated = one_line(row.values.get("convention") or "") or UNSTATED
    if convention is not None and stated != convention:
        once, rec = _recount(row, int(r), convention)
        stated = convention
    arm = one_line(row.values.get("arm") or "") or (one_line(stems[row.source]) if stems else DEFAULT_ARM)
    flops, budget = (
        _optional(row, name, lambda v: 1 <= v <= _MOST_FLOPS, f"a number of FLOPs, from 1 to {_MOST_FLOPS:g}")
        for name in ("flops_per_token", "budget_flops")
    )
    # not needed for a fit, but what reads them later reads numbers
    _optional(row, "d_model", lambda v: 1 <= v <= _MOST, f"a width, from 1 to {_MOST:g}")
    _optional(
        row,
        "backprop_recurrences",
        lambda v: 1 <= v <= r and v.is_integer(),
        f"a whole number from 1 to recurrences, {r:.0f}",
    )
    return Parsed(row, arm, int(r), once, rec, tokens, loss * unit, flops, budget, stated)


def _recount(row: RawRow, r: int, convention: str) -> tuple[float, float]:
    counts = {}
    for group in GROUPS:
        name = GROUP_PREFIX + group
        if name not in row.values:
            raise UserError(
                f"{row.label}: convention {convention} recounts n_once and n_rec from the columns"
                f" {', '.join(GROUP_PREFIX + g for g in GROUPS)}, and {name} is missing; add it, or leave the"
                " convention out."
            )
        remedy = f"give a number of parameters, from 0 to {_MOST:g}"
        counts[group] = int(_number(row, name, lambda v: 0 <= v <= _MOST, remedy))
    once, rec = count_parameters(ParameterGroups(**counts), r, convention)
    if rec < 1:
        raise UserError(
            f"{row.label}: params_recurrent_block is 0; give the parameters of the recurrent block."
        )
    return float(once), float(rec)


def one_convention(parsed: Sequence[Parsed]) -> str:
    """The convention that every row was counted under.  Raises `UserError` naming two rows that differ."""
    examples: dict[str, str] = {}
    for row in parsed:
        examples.setdefault(row.convention, row.raw.label)
    if len(examples) > 1:
        listed = " and ".join(
            f"{one_line(repr(name), 60)} ({label})" for name, label in list(examples.items())[:2]
        )
        raise UserError(
            f"the rows count n_once and n_rec under different conventions, {listed}, which moves φ by as much as the"
            " effect under study; give --convention NAME to recount all rows from their params_ columns, or state the"
            " same `convention` in every row."
        )
    return next(iter(examples))


def drop_repeats(parsed: Sequence[Parsed], excluded: list[Excluded]) -> list[Parsed]:
    """Leaves out later rows of one run: the same run_id, or an r = 1 run that each of several arms brought along.

    Rows that repeat another in every value, with nothing to tell them apart, are an error.
    """
    by_id: dict[str, Parsed] = {}
    seen: dict[tuple, list[Parsed]] = {}
    several = len({p.arm for p in parsed if p.recurrences > 1}) > 1 or len({p.raw.source for p in parsed}) > 1
    kept = []
    for row in parsed:
        run_id = row.text("run_id")
        if run_id and run_id in by_id:
            reason = f"repeats run_id {one_line(run_id, 60)} of {by_id[run_id].raw.label}"
            excluded.append(Excluded(row.raw.label, reason))
            continue
        arm = row.arm if row.recurrences > 1 else ""
        k, seed = row.text("backprop_recurrences"), row.text("seed")
        key = (arm, row.recurrences, k, row.n_once, row.n_rec, row.tokens, seed)
        twin = next(
            (o for o in seen.get(key, ()) if not run_id and abs(o.loss - row.loss) <= _SAME_LOSS), None
        )
        if twin is not None and several and row.recurrences == 1:
            reason = f"{SHARED_BASELINE} {twin.raw.label}, which every arm shares"
            excluded.append(Excluded(row.raw.label, reason))
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
