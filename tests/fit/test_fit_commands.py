"""The command line: one JSON object on standard output, sentences on standard error, exit statuses."""

import json

import pytest
from tables import TRUNCATED, VANILLA, published_rows

from looped.__main__ import main

FEW = ["--resamples", "50"]


def run(capsys, *arguments):
    status = main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_fit_prints_one_json_object_and_nothing_else(capsys):
    status, out, err = run(capsys, "fit", VANILLA, "--json", *FEW)
    assert status == 0
    assert err == ""
    assert abs(json.loads(out)["arms"]["vanilla"]["phi"]["estimate"] - 0.458) < 0.003


def test_fit_in_words_with_files(capsys, tmp_path):
    status, out, _ = run(capsys, "fit", VANILLA, TRUNCATED, "--output", tmp_path / "out", *FEW)
    assert status == 0
    assert "truncated: φ = 0.379" in out
    assert f"Wrote {tmp_path / 'out' / 'phi.json'}" in out


def test_all_baselines_on_request(capsys):
    _, out, _ = run(capsys, "fit", VANILLA, TRUNCATED, "--baseline", "all", "--json", *FEW)
    arm = json.loads(out)["arms"]["truncated"]
    assert (arm["baseline"], arm["rows"]) == ("all", 90)
    assert abs(arm["phi"]["estimate"] - 0.352) < 0.005


def test_where_no_phi_can_be_given_phi_is_null_and_the_status_2(capsys, table):
    path = table([row for row in published_rows() if row["budget_flops"] == "1e+18"])
    status, out, err = run(capsys, "fit", path, "--json")
    arm = json.loads(out)["arms"]["vanilla"]
    assert status == 2
    assert arm["phi"] is None
    assert "one compute budget" in arm["warnings"][0]
    assert err.startswith("vanilla: no φ can be given: all rows have one compute budget")


@pytest.mark.slow
def test_laws_diagnosis_and_optima_join_both_outputs(capsys):
    extra = ["--laws", "--diagnose", "--optima"]
    status, out, _ = run(capsys, "fit", VANILLA, "--json", *extra, *FEW)
    arm = json.loads(out)["arms"]["vanilla"]
    assert status == 0
    assert {row["law"] for row in arm["laws"]} >= {"r^φ", "q-norm", "φ = 0", "φ = 1", "m(r)"}
    assert len(arm["diagnosis"]["lack_of_fit"]["multipliers"]) == 3
    assert len(arm["optima"]) == 24


def test_compare(capsys):
    status, out, _ = run(capsys, "compare", VANILLA, TRUNCATED, "--json", *FEW)
    data = json.loads(out)
    assert status == 0
    assert data["differences"][0]["arm"] == "truncated"
    assert len(data["views"]) == 3
    assert data["splits"][0]["parts"].keys() == {"loop", "tokens", "recipe"}
    status, out, _ = run(capsys, "compare", VANILLA, TRUNCATED, *FEW)
    assert "training-side gain" in out


def test_compare_refuses_two_conventions(capsys, tmp_path):
    other = tmp_path / "truncated.csv"
    other.write_text(TRUNCATED.read_text().replace("published", "unembedding-once"))
    status, out, err = run(capsys, "compare", VANILLA, other)
    assert (status, out) == (2, "")
    assert "'published'" in err
    assert "'unembedding-once'" in err


def test_equivalent(capsys):
    arguments = ["equivalent", VANILLA, "--recurrences", "4", "--width", "2048"]
    status, out, _ = run(capsys, *arguments, "--json", *FEW)
    (row,) = json.loads(out)["equivalents"]
    assert status == 0
    assert 580e6 < row["equal_loss"] < 590e6
    status, out, _ = run(capsys, *arguments, *FEW)
    assert "411 M" in out


def test_minima(capsys):
    status, out, _ = run(capsys, "minima", VANILLA, "--json")
    rows = json.loads(out)["minima"]
    assert status == 0
    assert len(rows) == 24
    assert set(rows[0]) >= {"arm", "recurrences", "budget_flops", "n_optimal", "loss"}
    status, out, _ = run(capsys, "minima", VANILLA)
    assert "67.8 M" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fit", "nowhere.csv"], "no such file or directory"),
        (["fit", VANILLA, "--level", "95"], "level is 95"),
        (["fit", VANILLA, "--delta", "0"], "delta is 0"),
        (["fit", VANILLA, "--convention", "publisched"], "Did you mean 'published'"),
        (["compare", VANILLA], "needs two arms"),
        (["equivalent", VANILLA, "--resamples", "50"], "give --width"),
        (
            ["equivalent", VANILLA, "--width", "512", "--arm", "vanila", "--resamples", "50"],
            "Did you mean 'vanilla'",
        ),
        (["minima", VANILLA, "--level", "2"], "level is 2"),
        (["export", VANILLA], "output is missing"),
        (["fit"], "no losses were named"),
    ],
    ids=lambda v: " ".join(map(str, v[:1] + v[2:])) if isinstance(v, list) else "",
)
def test_bad_input_is_one_sentence_and_status_2(capsys, arguments, said):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
    assert "Traceback" not in err
