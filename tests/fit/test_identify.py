"""Tables that cannot say what φ is: no number is given, and the words say what is missing."""

import numpy as np
import pytest
from tables import TRUTH, law_losses, take, with_losses

from fit.analysis import ArmFit, Options, Unidentified, analyse
from fit.report import Report

FEW = Options(resamples=50)


def looped_rows(losses, **conditions):
    keep = np.ones(len(losses), dtype=bool)
    for name, allowed in conditions.items():
        keep &= np.isin(getattr(losses, name), allowed)
    return take(losses, keep)


def proportional(losses, phi=0.0):
    """Twenty tokens a parameter everywhere, whichever way parameters are counted."""
    tokens = 20 * (losses.n_once + losses.recurrences**phi * losses.n_rec)
    return with_losses(losses, law_losses(losses, TRUTH, tokens=tokens), tokens=tokens)


def one_width(losses):
    width = np.array([int(d) for d in losses.columns["d_model"]])
    return take(losses, width == 1024)


CASES = {
    "one budget": (lambda v: looped_rows(v, budget=[1e18]), "one compute budget"),
    "r = 1 alone": (lambda v: looped_rows(v, recurrences=[1]), "no row has r > 1"),
    "r = 4 alone": (lambda v: looped_rows(v, recurrences=[4]), "every row has r = 4"),
    "three rows": (
        lambda v: take(v, np.isin(np.arange(116), [0, 4, 8])),
        "3 rows are too few for 6 parameters",
    ),
    "D ∝ N, unique": (proportional, "D ∝ N"),
    "D ∝ N, used": (lambda v: proportional(v, 1.0), "D ∝ N"),
    "one size": (one_width, "every r comes in one size"),
    "one token count": (
        lambda v: with_losses(v, v.loss, tokens=np.full(116, 1e9)),
        "the same number of tokens",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_no_phi_is_given_but_what_is_missing(name, vanilla):
    spoil, said = CASES[name]
    report = Report(analyse(spoil(vanilla), FEW))
    (arm,) = report.to_json()["arms"].values()
    assert arm["phi"] is None
    assert arm["E"] is None
    assert any(said in warning for warning in arm["warnings"])
    assert not report.identified
    assert "no φ can be given" in report.summary()
    assert said in report.summary()
    assert "φ =" not in report.summary()


def test_looped_runs_alone_identify_phi_with_a_warning(vanilla):
    arm = analyse(looped_rows(vanilla, recurrences=[2, 4, 8]), FEW).arms["vanilla"]
    assert isinstance(arm, ArmFit)
    assert any("no row has r = 1" in w for w in arm.warnings)


def test_few_cells_are_warned_about(vanilla):
    small = looped_rows(vanilla, budget=[4.64e17, 2.15e18], recurrences=[1, 4])
    arm = analyse(small, FEW).arms["vanilla"]
    assert any("4 cells" in w for w in arm.warnings)
    assert any("drawn again" in w for w in arm.warnings)


def test_two_budgets_are_not_resampled_as_budgets(vanilla):
    """Every draw that keeps both is the table itself: the interval would have no width."""
    small = looped_rows(vanilla, budget=[4.64e17, 2.15e18])
    arm = analyse(small, Options(resamples=50, unit="budget")).arms["vanilla"]
    assert isinstance(arm, Unidentified)
    assert "2 budgets are too few to resample" in arm.reasons[0]


def test_one_arm_may_fail_where_another_does_not(both_arms):
    keep = (both_arms.arm == "vanilla") | (both_arms.budget == 1e18)
    found = analyse(take(both_arms, keep), FEW)
    assert isinstance(found.arms["vanilla"], ArmFit)
    assert isinstance(found.arms["truncated"], Unidentified)
    assert found.differences == ()
