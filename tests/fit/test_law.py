"""The law and its neighbours: what each reduces to, and that its parameters mean what they say."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import TRUTH, law_losses

from fit.analysis import arm_rows
from fit.law import (
    NEIGHBOURS,
    ArmExponents,
    FixedExponent,
    Law,
    LogMultiplier,
    LoopData,
    LoopFloor,
    Multipliers,
    Parameter,
    QNorm,
    make_rows,
    power_law_phi,
)
from fit.solve import fit_law, predict

PLAIN = {name: TRUTH[name] for name in ("E", "A", "B", "alpha", "beta")}


@pytest.fixture(scope="module")
def grid(vanilla):
    return arm_rows(vanilla, np.arange(len(vanilla)))


def losses_of(law, natural, grid):
    rows, scale = grid
    return np.exp(predict(law, law.vector(natural, scale), rows))


def test_the_law_is_the_published_formula(grid, vanilla):
    np.testing.assert_allclose(losses_of(Law(), TRUTH, grid), law_losses(vanilla, TRUTH), rtol=1e-12)


@pytest.mark.parametrize(
    ("law", "natural"),
    [
        (FixedExponent(TRUTH["phi"]), PLAIN),
        (Multipliers((2, 4, 8)), PLAIN | {f"m({r})": r ** TRUTH["phi"] for r in (2, 4, 8)}),
        (ArmExponents(2), PLAIN | {"phi[0]": TRUTH["phi"], "phi[1]": -3.0}),
        (LoopFloor(), TRUTH | {"epsilon": 0.0}),
        (LoopData(), TRUTH | {"psi": 0.0}),
        (QNorm(), TRUTH | {"q": 1.0}),
    ],
    ids=lambda v: v.name if isinstance(v, Law) else "",
)
def test_each_variant_is_the_law_at_its_neutral_parameters(law, natural, grid):
    np.testing.assert_allclose(losses_of(law, natural, grid), losses_of(Law(), TRUTH, grid), rtol=1e-12)


def test_the_neighbours_are_the_formulas_they_print(grid, vanilla):
    r, d = vanilla.recurrences.astype(float), vanilla.tokens
    n = vanilla.n_once + r ** TRUTH["phi"] * vanilla.n_rec
    model, data = TRUTH["A"] * n ** -TRUTH["alpha"], TRUTH["B"] * d ** -TRUTH["beta"]
    floor = TRUTH["E"] + 0.02 * np.log2(r) + model + data
    np.testing.assert_allclose(losses_of(LoopFloor(), TRUTH | {"epsilon": 0.02}, grid), floor, rtol=1e-12)
    worth = TRUTH["E"] + model + TRUTH["B"] * (d * r**0.1) ** -TRUTH["beta"]
    np.testing.assert_allclose(losses_of(LoopData(), TRUTH | {"psi": 0.1}, grid), worth, rtol=1e-12)
    norm = TRUTH["E"] + (model**2.5 + data**2.5) ** (1 / 2.5)
    np.testing.assert_allclose(losses_of(QNorm(), TRUTH | {"q": 2.5}, grid), norm, rtol=1e-12)
    n = vanilla.n_once + (1 + 0.4 * np.log2(r)) * vanilla.n_rec
    logarithm = TRUTH["E"] + TRUTH["A"] * n ** -TRUTH["alpha"] + data
    np.testing.assert_allclose(losses_of(LogMultiplier(), PLAIN | {"c": 0.4}, grid), logarithm, rtol=1e-12)


def test_the_equivalent_phi_is_that_of_the_same_worth_at_r_4():
    phi = power_law_phi(LogMultiplier(), {"c": 0.5})
    assert math.isclose(4**phi, 1 + 0.5 * math.log2(4))
    assert power_law_phi(Multipliers((2, 4)), {"m(2)": 1.0, "m(4)": 1.0}) is None
    assert power_law_phi(FixedExponent(1.0), {}) == 1


positive = st.floats(1e-3, 1e4)


@given(positive, positive, positive, st.floats(0.01, 2), st.floats(0.01, 2), st.floats(-2, 2))
def test_natural_parameters_survive_the_solver_and_back(E, A, B, alpha, beta, phi):
    natural = {"E": E, "A": A, "B": B, "alpha": alpha, "beta": beta, "phi": phi}
    _, scale = make_rows([0.0, 1e6], [1e6, 2e6], [1, 4], [1e8, 2e8], [3.0, 2.0])
    back = Law().natural(Law().vector(natural, scale), scale)
    for name, value in natural.items():
        assert math.isclose(back[name], value, rel_tol=1e-9, abs_tol=1e-12), name


@pytest.mark.parametrize("law", NEIGHBOURS, ids=lambda law: law.name)
def test_every_neighbour_recovers_itself_without_noise(law, grid):
    rows, scale = grid
    extra = {"epsilon": 0.01, "psi": 0.08, "c": 0.5, "q": 2.2}
    natural = {p.name: (TRUTH | extra)[p.name] for p in law.parameters}
    made = rows._replace(log_loss=predict(law, law.vector(natural, scale), rows))
    found = fit_law(law, made, scale, starts=16).parameters
    for name, value in natural.items():
        assert math.isclose(found[name], value, rel_tol=1e-4), name


@dataclasses.dataclass(frozen=True)
class Saturating(Law):
    """Passes beyond the second are worth nothing."""

    name = "saturating"

    @property
    def loop(self):
        return (Parameter("gain", True),)

    def loop_start(self, phi):
        return {"gain": 2.0**phi}

    def log_multiplier(self, p, rows):
        return jnp.where(rows.log_r > 0, p["gain"], 0.0)


def test_a_form_of_ones_own_is_one_class(grid, vanilla):
    rows, scale = grid
    worth = np.where(vanilla.recurrences > 1, 1.4, 1.0)
    n = vanilla.n_once + worth * vanilla.n_rec
    loss = TRUTH["E"] + TRUTH["A"] * n ** -TRUTH["alpha"] + TRUTH["B"] * vanilla.tokens ** -TRUTH["beta"]
    found = fit_law(Saturating(), rows._replace(log_loss=np.log(loss)), scale, starts=16)
    assert math.isclose(found.parameters["gain"], 1.4, rel_tol=1e-4)
