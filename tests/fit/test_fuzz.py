"""Whatever the table: one sentence that helps, or a finite result with its stamp; never a traceback, never half a file.

A plain run tries a few tables, always the same; `pytest -m slow tests/fit/test_fuzz.py` some thousand, always others.
"""

import collections
import contextlib
import csv
import io
import json
import math
import re
import warnings

import numpy as np
import pytest
from fuzzed import as_csv, csv_files, parquet_files, record_of, run_folders, sweeps, tables
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tables import published_rows

from fit.analysis import Options, analyse
from fit.compare import evaluate
from fit.consequences import _lowest
from fit.law import worth
from fit.losses import read_losses, table_of
from fit.output import WRITTEN
from fit.plots import isoflops
from fit.reading import RawRow
from fit.report import measure
from fit.words import count, span
from looped.__main__ import main
from looped.errors import UserError

FEW = ("--resamples", "50")
_REMEDY = re.compile(
    r"\b(give|rename|name|remove|add|finish|complete|write|check|keep|move|use|state|resample|vary|train|tell)\b",
    re.I,
)
_NO_NUMBER = re.compile(r"(?<![\w'\"(.])[-+]?(nan|inf)(?![\w'\".)])")


def command(*arguments):
    """(status, standard output, standard error) of `looped …`, written as UTF-8; fails where a warning is shown."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(record=True) as shown,
    ):
        warnings.simplefilter("always")
        status = main([str(a) for a in arguments])
    told = [w for w in shown if not issubclass(w.category, (DeprecationWarning, PendingDeprecationWarning))]
    assert not told, [str(w.message) for w in told]
    return status, *(stream.buffer.getvalue().decode() for stream in (out, err))


def is_helpful(message):
    """One sentence of printable text that says what to do."""
    assert message.isprintable(), message
    assert len(message) < 1000, message
    assert message.endswith("."), message
    assert _REMEDY.search(message), message


def strict(text):
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))


def numbers(value):
    """Every number and null within JSON data."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [n for v in value for n in numbers(v)]
    return [value] if value is None or isinstance(value, float | int) else []


def is_stamped(arm):
    """Whether an arm of phi.json has a φ: then with its interval and no number missing; else it says why."""
    assert all(arm[stamp] for stamp in ("convention", "objective", "baseline", "rows", "status"))
    if arm["phi"] is None:
        assert arm["warnings"]
        assert arm["status"] == "not identified"
        return False
    assert all(n is not None and math.isfinite(n) for n in numbers(arm)), arm
    low, high = arm["phi"]["interval"]
    assert low <= high
    assert arm["phi"]["method"]
    return True


def outcome(data):
    """The outcome of a fit with the JSON `data`, None where the table was refused."""
    if data is None:
        return "refused"
    assert all(n is not None for n in numbers(data["differences"]))
    fitted = [is_stamped(arm) for arm in data["arms"].values()]
    return "fitted" if any(fitted) else "unidentified"


def answered(path, *arguments):
    """Runs a command on the table `path` and returns its JSON; None where the table was refused in one sentence."""
    before = path.read_bytes() if path.is_file() else None
    status, out, err = command(*arguments, "--json")
    assert before is None or path.read_bytes() == before
    if not out:
        assert status == 2
        assert err.startswith("looped: ")
        is_helpful(err.removeprefix("looped: ").removesuffix("\n"))
        return None
    data = strict(out)
    assert data["schema_version"] == 1
    if status == 0:
        assert err == ""
        return data
    assert status == 2
    assert not any(arm["phi"] for arm in data["arms"].values())
    for line in err.splitlines():
        is_helpful(line)
    return data


def written(folder, name, content):
    path = folder / name
    path.write_bytes(content)
    return path


def csv_file(folder, content):
    path = written(folder, "losses.csv", content)
    return outcome(answered(path, "fit", path, *FEW))


def parquet_file(folder, content):
    path = written(folder, "losses.parquet", content)
    return outcome(answered(path, "fit", path, *FEW))


def folder_of_runs(folder, contents):
    for name, content in contents.items():
        record = folder / name / "record"
        record.mkdir(parents=True)
        if content is None:
            (record / "metadata").mkdir()
        else:
            written(record, "metadata", content)
    data = answered(folder, "fit", folder, *FEW)
    if data is not None:
        read_losses(folder).to_csv().encode()
        named = {e["row"] for e in data["excluded"]}
        assert len(named) == len(data["excluded"])
    return outcome(data)


def python_api(folder, rows):
    """`measure`: every file whole, words and JSON printable, the table the same when read again; or no file at all."""
    path = written(folder, "losses.csv", as_csv(rows).encode())
    before, out = path.read_bytes(), folder / "out"
    try:
        report = measure(path, out, Options(resamples=50))
    except UserError as error:
        is_helpful(str(error))
        assert not out.exists()
        return "refused"
    finally:
        assert path.read_bytes() == before
    assert sorted(p.name for p in out.iterdir()) == ["isoflops.png", "losses.csv", "phi.json"]
    assert strict((out / "phi.json").read_text()) == report.to_json()
    assert all(line.isprintable() for line in report.summary().splitlines())
    assert not _NO_NUMBER.search(report.summary())
    picture = (out / "isoflops.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert picture.endswith(b"IEND\xaeB`\x82")
    one, again = report.analysis.losses, read_losses(out / "losses.csv")
    assert again.convention == one.convention
    for name in ("recurrences", "n_once", "n_rec", "tokens", "loss", "arm"):
        assert (getattr(again, name) == getattr(one, name)).all(), name
    return outcome(report.to_json())


def other_command(folder, case):
    """A command in JSON and in words: both answer, or both refuse; words have no number that is none."""
    rows, (name, *options) = case
    path = written(folder, "losses.csv", as_csv(rows).encode())
    if name == "export":
        options += ["--output", folder / "out"]
    data = answered(path, name, path, *options)
    status, out, _ = command(name, path, *options)
    assert not _NO_NUMBER.search(out), out
    assert all(line.isprintable() for line in out.splitlines())
    if data is None:
        assert (status, out) == (2, "")
        assert not (folder / "out").exists()
        return f"{name} refused"
    if name == "export":
        files = {p.name: p for p in (folder / "out").iterdir()}
        assert files.keys() <= set(WRITTEN)
        for text in ("phi.json", "parameters.csv", "tables.md", "tables.tex"):
            assert not _NO_NUMBER.search(files[text].read_text()), text
    return f"{name} {'answered' if status == 0 else 'unidentified'}"


CHEAP = (
    ("minima",),
    ("fit", *FEW, "--optima"),
    ("equivalent", *FEW, "--recurrences", "4", "--width", "700"),
    ("equivalent", *FEW, "--recurrences", "8", "--n-once", "1e6", "--n-rec", "2e6", "--tokens", "1e9"),
    ("fit", *FEW, "--resample", "row", "--baseline", "all", "--level", "0.999999"),
    ("fit", *FEW, "--resample", "budget", "--pair", "cells", "--level", "0.5"),
    ("fit", *FEW, "--loss-unit", "bits", "--seed", "9" * 30),
    ("fit", *FEW, "--convention", "no-injection"),
)
DEAR = (  # programs of their own to compile
    ("compare", *FEW),
    ("fit", *FEW, "--objective", "squares"),
    ("fit", *FEW, "--delta", "1e-300"),
)
sound = tables(damages=(0, 1), sound=True)
PROPERTIES = {
    "csv": (csv_file, tables().flatmap(csv_files), 30, 1300),
    "parquet": (parquet_file, tables(damages=(0, 2)).flatmap(parquet_files), 25, 400),
    "runs": (folder_of_runs, run_folders(), 2, 150),
    "api": (python_api, tables(damages=(0, 2)), 3, 100),
    "law": (csv_file, sweeps(sound=True).map(lambda rows: as_csv(rows).encode()), 2, 150),
    "cheap": (other_command, st.tuples(sound, st.sampled_from(CHEAP)), 4, 150),
    "dear": (other_command, st.tuples(sound, st.sampled_from(DEAR)), 0, 15),
    "export": (other_command, st.tuples(sound, st.just(("export", *FEW))), 0, 5),
}
"""What must hold, of what, and in how many cases of a plain and of a slow run."""


FEW_CASES = [pytest.param(name, few, id=f"{name}-few") for name, (_, _, few, _) in PROPERTIES.items() if few]
MANY_CASES = [
    pytest.param(name, many, id=f"{name}-many", marks=pytest.mark.slow)
    for name, (_, _, _, many) in PROPERTIES.items()
]


@pytest.mark.parametrize(("name", "count"), FEW_CASES + MANY_CASES)
def test_a_sentence_that_helps_or_a_finite_stamped_result(name, count, tmp_path_factory):
    property_, strategy, few, _ = PROPERTIES[name]
    outcomes = collections.Counter()

    @settings(
        max_examples=count,
        derandomize=count == few,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def holds(case):
        outcomes[property_(tmp_path_factory.mktemp("case"), case)] += 1

    holds()
    print(name, dict(outcomes))
    # else all tables are too bad, or too good
    assert len(outcomes) > 1 or name == "law" or count < 20, outcomes


def sweep(**columns):
    """The published runs of two r, every second one, with some values replaced."""
    return [row | columns for row in published_rows() if row["recurrences"] in ("1", "4")][::2]


@pytest.mark.parametrize("arm", ["$x^$", '🙂 "k", {or} \\frac|&\nx', "x" * 300])
def test_an_arm_may_be_called_anything(arm, tmp_path):
    """Mathematics that is none, glyphs that no font has: neither stops the picture, nor splits a line of the table."""
    assert python_api(tmp_path, sweep(arm=arm)) == "fitted"


def test_a_picture_has_no_more_panels_than_can_be_drawn():
    rows = sweep(budget_flops="1e18", flops_per_token="", backprop_recurrences="")
    many = [row | {"arm": f"arm {i}", "recurrences": str(i)} for i in range(2, 40) for row in rows[:8]]
    text = as_csv(many)
    losses = table_of([RawRow(f"row {i}", 0, row) for i, row in enumerate(csv.DictReader(io.StringIO(text)))])
    assert len(losses.arms) == 38
    picture = isoflops(analyse(losses))
    assert len(picture.axes) == 12 * 12
    assert picture.get_suptitle() == "the first 12 and 12 of 38 arms and 38 values of r"


def test_a_refit_gone_astray_has_losses_without_end_and_no_warning(tmp_path):
    p = {"E": 1.0, "A": 1.0, "alpha": -0.2, "B": 1.0, "beta": 0.3}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert worth(1e6, 4) == math.inf
        losses = evaluate(p | {"phi": np.array([[0.5], [1e6]])}, 1e6, 1e6, 4.0, np.full((1, 5), 1e9))
        assert np.isfinite(losses[0]).all()
        assert (losses[1] == math.inf).all()
        at, best = _lowest(losses, np.arange(5.0))
    assert np.isfinite(at).all()
    assert best[1] == math.inf
    assert count(math.inf) == "∞"
    assert span((math.nan, math.inf)) == "– to ∞"


def test_damaged_records_are_listed_one_by_one(tmp_path):
    whole = {
        name: json.dumps(record_of(row, i)).encode()
        for i, row in enumerate(sweep())
        for name in [f"run-{i:02}"]
    }
    spoilt = {
        "no-text": (b"\xff", "not JSON"),
        "half": (whole["run-00"][:100], "not JSON"),
        "a-folder": (None, "cannot be read"),
        "nested": (b"[" * 200_000, "not JSON"),
        "beyond": (whole["run-00"].replace(b'"epochs": 0.5', b'"epochs": 1' + b"0" * 400), "epochs: 1"),
        "a-list": (b"[]", "record schema None"),
        "another": (b'{"schema_version": 2}', "record schema 2"),
    }
    assert (
        folder_of_runs(tmp_path, whole | {name: content for name, (content, _) in spoilt.items()}) == "fitted"
    )
    said = {e.row: e.reason for e in read_losses(tmp_path).excluded}
    assert said.keys() == {f"run {name}" for name in spoilt}
    for name, (_, reason) in spoilt.items():
        assert reason in said[f"run {name}"]


def test_the_table_that_is_read_is_never_written_over(tmp_path):
    path = written(tmp_path, "losses.csv", as_csv(sweep()).encode())
    before = path.read_bytes()
    for arguments in (
        ["fit", path, "--output", tmp_path],
        ["export", path, "--output", tmp_path / "x" / ".."],
    ):
        status, out, err = command(*arguments, *FEW)
        assert (status, out) == (2, "")
        assert "losses.csv is read and would be replaced" in err
    with pytest.raises(UserError, match=r"losses\.csv is read and would be replaced"):
        measure(path, tmp_path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["losses.csv"]
