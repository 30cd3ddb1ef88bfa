"""What is said: the JSON contract, the words, and files that are whole or not there."""

import dataclasses
import json
import math

import numpy as np
import pytest
from tables import CORE, TRUTH, law_losses, published_rows, with_losses

from fit.analysis import Options, analyse
from fit.losses import read_losses
from fit.output import plain, to_text, write_files
from fit.report import Report, measure, told_apart
from looped.errors import UserError

FEW = Options(resamples=50)
ARM_KEYS = {
    "phi", "E", "A", "alpha", "B", "beta", "r_squared", "rows", "convention", "objective", "baseline", "status",
    "warnings",
}  # fmt: skip


def strict(text):
    """JSON as strict parsers read it: no NaN, no Infinity."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in the output"))


def test_the_json_has_what_scripts_rely_on(compared):
    data = strict(to_text(Report(compared).to_json()))
    assert data["schema_version"] == 1
    assert set(data["arms"]) == {"vanilla", "truncated"}
    for arm in data["arms"].values():
        assert set(arm) >= ARM_KEYS
        assert set(arm["phi"]) == {"estimate", "interval", "level", "method"}
        low, high = arm["phi"]["interval"]
        assert low < arm["phi"]["estimate"] < high
        assert arm["phi"]["level"] == 0.95
        assert "cells" in arm["phi"]["method"]
        assert arm["status"] == "converged"
        assert arm["convention"] == "published"
        assert arm["baseline"] == "matched"
        assert arm["objective"] == "sum of Huber(0.001) of log residuals"
    assert (data["arms"]["vanilla"]["rows"], data["arms"]["truncated"]["rows"]) == (116, 81)
    (difference,) = data["differences"]
    assert set(difference) == {"arm", "against", "estimate", "interval"}
    assert len(data["excluded"]) == 20
    assert set(data["excluded"][0]) == {"row", "reason"}


def test_the_natural_parameters_give_back_the_fitted_losses(compared):
    arm = compared.arms["vanilla"]
    p = Report(compared).to_json()["arms"]["vanilla"]
    p["phi"] = p["phi"]["estimate"]
    np.testing.assert_allclose(law_losses(compared.losses, p)[arm.index], arm.fit.predicted, rtol=1e-10)


def test_words_say_phi_with_its_interval_and_the_difference(compared):
    text = Report(compared).summary()
    assert "vanilla: φ = 0.458, 95 % interval 0.4" in text
    assert "truncated: φ = 0.379" in text
    assert "φ(truncated) − φ(vanilla) = -0.079" in text
    assert "20 r = 1 runs were given more than once and count once." in text
    assert "drawn again" in text


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (-0.5, 1.5, "cannot tell φ from 0"),
        (-0.5, 0.5, "cannot be told from 0"),
        (0.5, 1.5, "cannot be told from 1"),
        (0.2, 0.6, "worth something (φ > 0) and less than"),
        (-0.5, -0.1, "below 0"),
        (1.2, 1.6, "above 1"),
    ],
)
def test_an_interval_is_put_in_words(low, high, said):
    assert said in told_apart(low, high)


def test_rows_left_out_are_listed_in_words(table):
    rows = published_rows()
    for i in range(10):
        rows[i]["loss"] = "nan"
    text = Report(analyse(read_losses(table(rows)), FEW)).summary()
    assert "Left out: 10 of 116 rows." in text
    assert "row 8 (line 9): the loss is not finite (nan)" in text
    assert "… and 2 more" in text


def test_noise_that_hides_phi_is_said_to_hide_it(vanilla):
    rng = np.random.default_rng(0)
    drowned = law_losses(vanilla, TRUTH) * np.exp(0.06 * rng.standard_normal(116))
    summary = Report(analyse(with_losses(vanilla, drowned), FEW)).summary()
    assert "cannot" in summary or "rough" in summary


def test_measure_writes_three_files_that_can_be_read_again(tmp_path, table):
    report = measure(table(published_rows()), tmp_path / "out", FEW)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["isoflops.png", "losses.csv", "phi.json"]
    assert strict((tmp_path / "out" / "phi.json").read_text()) == report.to_json()
    assert (tmp_path / "out" / "isoflops.png").read_bytes().startswith(b"\x89PNG")
    again = measure(tmp_path / "out" / "losses.csv", tmp_path / "again", FEW)
    assert again.to_json() == report.to_json()


def test_measure_says_what_is_missing_and_still_leaves_its_files(tmp_path, table):
    rows = [row for row in published_rows() if row["budget_flops"] == "1e+18"]
    report = measure(table(rows), tmp_path / "out", FEW)
    assert not report.identified
    assert "one compute budget" in report.summary()
    assert strict((tmp_path / "out" / "phi.json").read_text())["arms"]["vanilla"]["phi"] is None


def test_a_table_of_five_columns_is_measured_by_rows(tmp_path, table):
    report = measure(table(published_rows(), columns=list(CORE)), tmp_path / "out", FEW)
    (arm,) = report.to_json()["arms"].values()
    assert abs(arm["phi"]["estimate"] - 0.458) < 0.003
    assert "rows resampled" in arm["phi"]["method"]
    assert arm["convention"] == "unstated"


def test_seeds_and_a_tiny_scale_are_measured(tmp_path, vanilla):
    """A laptop's sweep: two seeds, budgets of 1e11 to 1e13 FLOPs, losses of byte tokens, noise of 3 mnat."""
    rng = np.random.default_rng(0)
    shrunk = {name: getattr(vanilla, name) * 1e-3 for name in ("n_once", "n_rec", "tokens")}
    small = with_losses(vanilla, vanilla.loss, **shrunk, budget=vanilla.budget * 1e-6, columns={})
    loss = law_losses(small, {"E": 0.9, "A": 4.0, "alpha": 0.25, "B": 60.0, "beta": 0.35, "phi": 0.6})
    text = ""
    for seed in range(2):
        noisy = with_losses(small, loss + 0.003 * rng.standard_normal(116), columns={"seed": (seed,) * 116})
        text += noisy.to_csv() if not seed else noisy.to_csv().split("\n", 1)[1]
    (tmp_path / "losses.csv").write_text(text)
    report = measure(tmp_path / "losses.csv", tmp_path / "out", Options(resamples=100))
    arm = report.analysis.arms["vanilla"]
    assert len(arm.index) == 232
    assert arm.boot.units == 24
    assert arm.interval.low < 0.6 < arm.interval.high
    assert arm.interval.high - arm.interval.low < 0.1
    assert read_losses(tmp_path / "losses.csv").columns["seed"][-1] == "1"


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    write_files(tmp_path, {"phi.json": "old"})

    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(write_path(tmp_path)), "replace", full)
    with pytest.raises(OSError, match="No space left on device"):
        write_files(tmp_path, {"phi.json": "new"})
    assert [path.name for path in tmp_path.iterdir()] == ["phi.json"]
    assert (tmp_path / "phi.json").read_text() == "old"


def write_path(folder):
    from etils import epath

    return epath.Path(folder) / "phi.json"


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(UserError, match="give another output folder"):
        write_files(tmp_path / "out", {"phi.json": "{}"})
    assert (tmp_path / "out").read_text() == "mine"


def test_no_nan_reaches_json():
    data = plain({"a": math.nan, "b": (np.float64(math.inf), np.array([1.0, -math.inf])), 3: np.int64(2)})
    assert data == {"a": None, "b": [None, [1.0, None]], "3": 2}
    assert strict(to_text(data)) == data


def test_a_report_without_any_arm_still_prints(vanilla):
    empty = dataclasses.replace(analyse(with_losses(vanilla, vanilla.loss), FEW), arms={})
    assert Report(empty).summary() == ""
