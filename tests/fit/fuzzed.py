"""Tables as users have them: sweeps made from the law, then damaged in their values, columns, text and bytes."""

import csv
import decimal
import io
import json
import math

import numpy as np
import pyarrow
import pyarrow.parquet
from hypothesis import strategies as st

MOST_ROWS = 32  # as many as share one compiled program

_NUMBERS = (
    "", " ", "nan", "NaN", "inf", "-inf", "0", "-0.0", "-1", "1", "2.5", "1e-320", "1e-30", "1e30", "1e308", "1e400",
    "9223372036854775808", "1,234,567", "1.234.567", "1 234 567", "1_000_000", "4,2", "0x10", "1e9 tokens", "12B",
    "n/a", "None", "null", "true", "-", "=1+1", "٤", "½", "4.0", "1e18", "0.97", "21", "3.3",
)  # fmt: skip
_WORDS = (
    "", "full", "vanilla", "truncated", "a,b", 'say "k"', "two\nlines", "$x^$", "$_$", "\\frac", "{", "|", "φ−α^β",
    "🙂", "\x1b[31mred", "\u2028", "\u202eright", "-", "--json", "../up", "x" * 300, "NaN", "0", "=cmd()", "a\tb", "\\",
)  # fmt: skip
_STATUSES = ("done", "ok", "DONE", "failed", "running", "", "interrupted", "unreadable")
_RENAMED = {"recurrences": "r", "n_once": "N_once", "n_rec": "n_recurrent", "tokens": "D", "loss": "val_loss"}
_EXTRA = (
    "flops_per_token", "d_model", "backprop_recurrences", "seed", "run_id", "status", "reason", "convention",
    "params_prelude", "data_hash", "comment", "arm", "loss_bits", "",
)  # fmt: skip
_TEXTUAL = ("arm", "reason", "convention", "run_id", "comment", "data_hash", "")


@st.composite
def sweeps(draw, sound=False):
    """Rows (dictionaries of text) of a small sweep whose losses follow the law with noise; `sound`: φ can be found."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    names = draw(st.sampled_from([("full", "truncated"), ("a", "b"), ("$x^$", "two\nlines"), ("", "🙂")]))
    count = draw(st.sampled_from([1, 2]))
    designs = [(1, 4), (1, 2, 4), *([] if sound else [(1, 4), (1, 4), (2, 4), (4,), (1,)])]
    recurrences = draw(st.sampled_from(designs))
    budgets = np.geomspace(1e17, 1e19, draw(st.sampled_from([3, 2] if sound else [4, 3, 3, 2, 1])))
    noise = draw(st.sampled_from([0.003, 0.0, 0.03] if sound else [0.003, 0.03, 0.0, 0.3]))
    phi = draw(st.sampled_from([0.5, 0.0, 1.0] if sound else [0.5, 0.0, 1.0, -1.0, 3.0]))
    rows = []
    for name in names[:count]:
        for budget in budgets:
            for r in recurrences:
                if r == 1 and name != names[0]:
                    continue
                for width in (512, 768, 1024, 1536)[: MOST_ROWS // (count * len(budgets) * len(recurrences))]:
                    once, rec = 4 * 12 * width**2, 12 * width**2 * 16 // r
                    flops = 6 * (once + r * rec)
                    tokens = float(budget / flops)
                    loss = 1.6 + 30 * (once + r**phi * rec) ** -0.2 + 900 * tokens**-0.37
                    loss *= math.exp(noise * rng.standard_normal())
                    rows.append(
                        {"arm": name, "recurrences": str(r), "n_once": str(once), "n_rec": str(rec),
                         "tokens": repr(tokens), "loss": repr(float(loss)), "budget_flops": repr(float(budget)),
                         "flops_per_token": str(flops), "d_model": str(width)}
                    )  # fmt: skip
    wanted = draw(st.sampled_from([None, None, ("arm", "recurrences", "n_once", "n_rec", "tokens", "loss")]))
    return [{k: row[k] for k in wanted} if wanted else row for row in rows[:MOST_ROWS]]


def _values(column):
    if column == "status":
        return st.sampled_from(_STATUSES)
    if column in _TEXTUAL:
        return st.sampled_from(_WORDS) | st.text(max_size=8)
    return (
        st.sampled_from(_NUMBERS)
        | st.floats().map(repr)
        | st.integers(-3, 10**25).map(str)
        | st.text(max_size=4)
    )


@st.composite
def _cells(draw, rows):
    """Some cells of a column, or all of them, get another value."""
    column = draw(st.sampled_from([*rows[0], *_EXTRA]))
    values = _values(column)
    if draw(st.integers(0, 3)) == 0:
        value = draw(values)
        return [row | {column: value} for row in rows]
    changed = {draw(st.integers(0, len(rows) - 1)): draw(values) for _ in range(draw(st.integers(1, 3)))}
    return [row | {column: changed.get(i, row.get(column, ""))} for i, row in enumerate(rows)]


@st.composite
def _scaled(draw, rows):
    """Numbers in another unit, in every row or in some; all of one value; or written in another way."""
    column = draw(
        st.sampled_from(["tokens", "loss", "n_once", "n_rec", "budget_flops", "d_model", "recurrences"])
    )
    form = draw(
        st.sampled_from([
            lambda v: repr(v / math.log(2)), lambda v: repr(v * math.log(2)), lambda v: repr(v / 1e9),
            lambda v: f"{v:,.0f}", lambda v: f"{v:.1f}", lambda v: f"{v:.3e}", lambda v: repr(v * 1e12),
            lambda v: repr(v).replace(".", ","), lambda v: "2", lambda v: repr(math.exp(v) if v < 700 else v),
            lambda v: repr(-v), lambda v: repr(v * 1e-9),
        ])
    )  # fmt: skip
    every = draw(st.sampled_from([1, 1, 2, 5]))

    def other(text):
        try:
            return form(float(text))
        except (TypeError, ValueError):
            return text

    return [
        row | {column: other(row.get(column, ""))} if i % every == 0 else row for i, row in enumerate(rows)
    ]


@st.composite
def _columns(draw, rows):
    """A column missing, renamed, in another case, or the columns in another order."""
    names = list(rows[0])
    how = draw(st.sampled_from(["drop", "rename", "case", "order", "spaces"]))
    name = draw(st.sampled_from(names))
    if how == "drop":
        names.remove(name)
        return [{k: row.get(k, "") for k in names} for row in rows]
    if how == "order":
        names = draw(st.permutations(names))
        return [{k: row.get(k, "") for k in names} for row in rows]
    other = {"rename": _RENAMED.get(name, name + "s"), "case": name.upper(), "spaces": f" {name}\n"}[how]
    return [{(other if k == name else k): v for k, v in row.items()} for row in rows]


@st.composite
def _rows(draw, rows):
    """Fewer rows, one, none, some of them twice, one r or one budget alone, or in another order."""
    how = draw(
        st.sampled_from(["some", "one", "none", "twice", "all twice", "one r", "one budget", "reversed"])
    )
    if how == "none":
        return []
    if how == "one":
        return rows[:1]
    if how == "reversed":
        return rows[::-1]
    if how == "all twice":
        return [*rows, *rows]
    if how == "twice":
        return [*rows, draw(st.sampled_from(rows))]
    if how == "some":
        keep = draw(st.integers(1, len(rows)))
        return rows[-keep:]
    column = {"one r": "recurrences", "one budget": "budget_flops"}[how]
    return [row for row in rows if row.get(column) == rows[-1].get(column)]


@st.composite
def tables(draw, damages=(0, 4), sound=False):
    """Rows of a sweep after some damage to values, columns and rows; perhaps none are left."""
    rows = draw(sweeps(sound))
    for _ in range(draw(st.integers(*damages))):
        if rows:
            rows = draw(draw(st.sampled_from([_cells, _cells, _scaled, _columns, _rows]))(rows))
    return rows


def as_csv(rows, delimiter=",", quoting=csv.QUOTE_MINIMAL, end="\n") -> str:
    out = io.StringIO()
    writer = csv.writer(out, delimiter=delimiter, quoting=quoting, lineterminator=end)
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer.writerow(names or ["recurrences", "n_once", "n_rec", "tokens", "loss"])
    writer.writerows([row.get(name, "") for name in names] for row in rows)
    return out.getvalue()


@st.composite
def csv_files(draw, rows):
    """Bytes of `rows` as a CSV file of some program."""
    text = as_csv(
        rows,
        draw(st.sampled_from([",", ",", ";", "\t", "|"])),
        draw(st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC])),
        draw(st.sampled_from(["\n", "\r\n", "\r"])),
    )
    encoding = draw(st.sampled_from(["utf-8", "utf-8", "utf-8-sig", "utf-16", "cp1252"]))
    content = text.encode(encoding, errors="replace" if encoding == "cp1252" else "strict")
    return draw(damaged(content))


@st.composite
def damaged(draw, content):
    """`content` whole (mostly), cut short, or with other bytes in it."""
    how = draw(st.sampled_from(["whole", "whole", "whole", "cut", "put", "flip", "title", "empty"]))
    if how == "whole" or not content:
        return content
    at = draw(st.integers(0, len(content) - 1))
    if how == "cut":
        return content[:at]
    if how == "put":
        pieces = [
            b"\x00",
            b"\xff",
            b'"',
            b",",
            b"\n",
            b"\r",
            b"\n\n",
            b"\xe2\x80\xa8",
            b"\x1c",
            b"\xef\xbb\xbf",
            b"#",
        ]
        return content[:at] + draw(st.sampled_from(pieces)) + content[at:]
    if how == "flip":
        return content[:at] + bytes([content[at] ^ 1 << draw(st.integers(0, 7))]) + content[at + 1 :]
    return b"" if how == "empty" else b"# losses, exported\n" + content


@st.composite
def parquet_files(draw, rows):
    """Bytes of `rows` as a Parquet file, its columns of some type."""
    names = list(dict.fromkeys(name for row in rows for name in row)) or ["loss"]
    makers = {
        "text": str, "float": float, "int": lambda v: int(float(v)), "decimal": decimal.Decimal,
        "bytes": lambda v: v.encode(), "list": lambda v: [float(v)], "bool": bool, "dict": lambda v: {"v": v},
        "null": lambda v: None,
    }  # fmt: skip
    columns = {}
    for name in names:
        kind = draw(st.sampled_from(["float"] * 12 + list(makers)))
        values = []
        for row in rows:
            try:
                values.append(makers[kind](row.get(name, "")))
            except (ValueError, OverflowError, decimal.InvalidOperation):
                values.append(None)
        try:
            columns[name] = pyarrow.array(values)
        except (pyarrow.ArrowException, OverflowError):
            columns[name] = pyarrow.array([str(v) for v in values])
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), out)
    return draw(damaged(out.getvalue()))


_JSON_VALUES = (
    None, True, 0, -1, 1.5, math.nan, math.inf, 10**30, 10**400, "", "text", "two\nlines", "\ud800", "a\0b",
    "x" * 100_000, [], [1], {}, {"a": 1}, "done", "failed", "running",
)  # fmt: skip


def record_of(row, number):
    """The record of a run, as JSON data, with the values of `row` where these are numbers."""
    groups = {
        "embed": 1,
        "unembed": 1,
        "prelude": 3,
        "recurrent_block": 4,
        "coda": 3,
        "injection": 1,
        "outer_norms": 1,
    }

    def given(name, kind, otherwise):
        try:
            return kind(float(row[name]))
        except (KeyError, TypeError, ValueError, OverflowError):
            return otherwise

    r = given("recurrences", int, 4)
    return {
        "schema_version": 1, "run_id": f"run-{number}", "status": "done", "arm": row.get("arm", "full"),
        "recurrences": r, "backprop_recurrences": r, "d_model": given("d_model", int, 64),
        "n_once": given("n_once", int, 10**6),
        "n_rec": given("n_rec", int, 10**6), "convention": "published", "parameters": groups, "steps": 10,
        "flops_per_token": given("flops_per_token", float, 1e7), "budget_flops": given("budget_flops", float, None),
        "tokens": given("tokens", int, 10**8), "seed": number, "loss": given("loss", float, None), "device": "cpu",
        "validation_tokens": 1000, "data_hash": "abc", "epochs": 0.5, "spec": {}, "versions": {},
        "started_at": "2026-01-01T00:00:00+00:00", "updated_at": "2026-01-01T00:10:00+00:00",
    }  # fmt: skip


@st.composite
def records(draw, row, number):
    """Bytes of the record of a run with the values of `row`, perhaps damaged."""
    data = record_of(row, number)
    how = draw(st.sampled_from(["whole"] * 12 + ["value", "value", "key", "bytes", "nested", "other"]))
    if how == "value":
        data[draw(st.sampled_from(list(data)))] = draw(st.sampled_from(_JSON_VALUES))
    elif how == "key":
        name = draw(st.sampled_from(list(data)))
        data[draw(st.sampled_from(["", "other", "new\nline", "\ud800"]))] = data.pop(name)
    elif how == "nested":
        return b"[" * 200_000
    elif how == "other":
        return draw(
            st.sampled_from([b"", b"null", b"[]", b'"text"', b"{}", b'{"schema_version": 2}', b"1" * 5000])
        )
    content = json.dumps(data).encode()
    return draw(damaged(content)) if how == "bytes" else content


@st.composite
def run_folders(draw):
    """Contents of the record of each run of a sweep by the run's name; None where a folder lies in the file's place."""
    rows = draw(sweeps())
    contents = {f"run-{i}": draw(records(row, i)) for i, row in enumerate(rows)}
    for name in draw(st.sets(st.sampled_from(list(contents)), max_size=1)):
        contents[name] = draw(st.sampled_from([None, b"", b"\xff"]))
    return contents
