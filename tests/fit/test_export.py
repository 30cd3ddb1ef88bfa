"""Export: every file is there, whole and readable; tables render in three forms."""

import json
import re

import matplotlib.image
import pytest

from fit.analysis import Options, analyse
from fit.export import export
from fit.report import Report
from fit.words import Table, count


@pytest.fixture(scope="module")
def exported(both_arms, tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    export(Report(analyse(both_arms, Options(resamples=50))), folder)
    return folder


@pytest.mark.slow
def test_every_file_is_written(exported):
    assert sorted(p.name for p in exported.iterdir()) == [
        "isoflops.png", "losses.csv", "minima.csv", "multipliers.png", "parameters.csv", "phi.json", "profile.png",
        "residuals.png", "tables.md", "tables.tex",
    ]  # fmt: skip


@pytest.mark.slow
def test_pictures_are_pictures(exported):
    for path in exported.glob("*.png"):
        pixels = matplotlib.image.imread(path)
        assert min(pixels.shape[:2]) > 300, path
        assert pixels[..., :3].std() > 0.02, path  # not blank


@pytest.mark.slow
def test_json_holds_laws_and_diagnosis(exported):
    data = json.loads((exported / "phi.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert set(data["laws"]) == set(data["diagnosis"]) == {"vanilla", "truncated"}


@pytest.mark.slow
def test_latex_has_balanced_braces_and_no_bare_unicode(exported):
    text = (exported / "tables.tex").read_text()
    assert text.count("\\begin{table}") == text.count("\\end{table}") > 8
    bare = text.replace("\\{", "").replace("\\}", "")
    assert bare.count("{") == bare.count("}")
    assert not re.findall(r"[^\x00-\x7f]", text)
    for body in re.findall(r"\\begin\{tabular\}\{(.*?)\}(.*?)\\end\{tabular\}", text, re.S):
        rows = [line for line in body[1].splitlines() if line.endswith("\\\\")]
        assert all(len(re.findall(r"(?<!\\)&", row)) == len(body[0]) - 1 for row in rows)


@pytest.mark.slow
def test_markdown_tables_are_rectangular(exported):
    text = (exported / "tables.md").read_text()
    block = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            block.append(len(re.findall(r"(?<!\\)\|", line)))
        elif block:
            assert len(set(block)) == 1
            block = []


@pytest.mark.slow
def test_nothing_is_nan(exported):
    for path in (p for p in exported.iterdir() if p.suffix != ".png"):
        assert not re.search(r"\b(nan|inf)\b", path.read_text(), re.I), path


def test_a_table_renders_its_cells():
    table = Table("T", ("law", "φ"), (("r^φ", "0.5"), ("a|b & c", "–")))
    assert table.text().splitlines()[2] == "  r^φ      0.5"
    assert "a\\|b" in table.markdown()
    assert r"a|b \& c & -- \\" in table.latex()
    assert r"$r^\varphi$ & 0.5 \\" in table.latex()


@pytest.mark.parametrize(
    ("value", "text"),
    [(589.4e6, "589 M"), (1.0151e9, "1.02 B"), (999.7e6, "1 B"), (12, "12"), (None, "–"), (35e3, "35 k")],
)
def test_counts_are_short(value, text):
    assert count(value) == text
