"""The joint scaling law of looped models, and its neighbours.

    L = E + A·(n_once + r^φ·n_rec)^−α + B·D^−β          (arXiv:2604.21106, section 3)

L is the loss in nats per token, D the tokens trained on.  φ = 1: a recurrence is worth as much as unshared layers;
φ = 0: it is worth nothing.  A law works on `Rows`, scaled so that its parameters are of order one whatever the size of
the models; the parameters a reader sees are `natural` ones.  A new form is one subclass of `Law` that overrides a hook.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np


class Rows(NamedTuple):
    """What a law sees of n runs, each field [n]; sizes and tokens are divided by `Scale`'s before the logarithm."""

    log_once: Any
    log_rec: Any
    log_r: Any
    log_tokens: Any
    log_loss: Any
    arm: Any


@dataclasses.dataclass(frozen=True)
class Scale:
    """Typical parameters and tokens of a table: the unit in which the solver counts."""

    parameters: float
    tokens: float


def make_rows(
    n_once, n_rec, recurrences, tokens, loss, arm=None, scale: Scale | None = None
) -> tuple[Rows, Scale]:
    """Returns the rows of n runs and the scale they were divided by (that of the table itself unless given)."""
    n_once, n_rec, r, tokens, loss = (
        np.asarray(v, dtype=np.float64) for v in (n_once, n_rec, recurrences, tokens, loss)
    )
    if scale is None:
        typical = np.log(n_once + np.sqrt(r) * n_rec)
        scale = Scale(float(np.exp(typical.mean())), float(np.exp(np.log(tokens).mean())))
    rows = Rows(
        # a model that is not looped has n_once = 0: e^-690 of the scale keeps every derivative finite
        log_once=np.log(np.maximum(n_once / scale.parameters, 1e-300)),
        log_rec=np.log(n_rec / scale.parameters),
        log_r=np.log(r),
        log_tokens=np.log(tokens / scale.tokens),
        log_loss=np.log(loss),
        arm=np.zeros(len(loss), dtype=np.int32) if arm is None else np.asarray(arm, dtype=np.int32),
    )
    return rows, scale


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One entry of the solver's vector.  A positive parameter is held as its logarithm.

    `starts` are the (natural) values tried for parameters that the grid of (α, β, φ) does not set.
    """

    name: str
    positive: bool = False
    starts: tuple[float, ...] = ()


CORE = (
    Parameter("E", True),
    Parameter("A", True),
    Parameter("B", True),
    Parameter("alpha"),
    Parameter("beta"),
)


@dataclasses.dataclass(frozen=True)
class Law:
    """L = E + A·N^−α + B·D^−β with N = n_once + r^φ·n_rec: six free parameters."""

    name = "r^φ"
    form = "E + A·(n_once + r^φ·n_rec)^−α + B·D^−β"

    @property
    def loop(self) -> tuple[Parameter, ...]:
        """The parameters that say what r passes are worth."""
        return (Parameter("phi"),)

    @property
    def extra(self) -> tuple[Parameter, ...]:
        """Parameters beyond the core and the loop, with the values to start them from."""
        return ()

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return CORE + self.loop + self.extra

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.parameters)

    def loop_start(self, phi: float) -> dict[str, float]:
        """Natural values of the loop's parameters that come closest to r^`phi`."""
        return {"phi": phi}

    def log_multiplier(self, p: Mapping[str, Any], rows: Rows):
        """Log of what multiplies n_rec."""
        return p["phi"] * rows.log_r

    def log_floor(self, p: Mapping[str, Any], rows: Rows):
        return p["E"]

    def log_data(self, p: Mapping[str, Any], rows: Rows):
        return rows.log_tokens

    def combine(self, p: Mapping[str, Any], floor, model, data):
        """Log of the sum of the three terms, given their logs."""
        return jnp.logaddexp(jnp.logaddexp(floor, model), data)

    def terms(self, p: Mapping[str, Any], rows: Rows):
        """Logs of the floor, the model term and the data term, each broadcastable to [n]."""
        log_n = jnp.logaddexp(rows.log_once, self.log_multiplier(p, rows) + rows.log_rec)
        return (
            self.log_floor(p, rows),
            p["A"] - p["alpha"] * log_n,
            p["B"] - p["beta"] * self.log_data(p, rows),
        )

    def log_loss(self, x, rows: Rows):
        """Predicted log loss [n] for the solver's vector `x` [p]."""
        p = dict(zip(self.names, x, strict=True))
        return self.combine(p, *self.terms(p, rows))

    def natural(self, x: np.ndarray, scale: Scale) -> dict[str, np.ndarray]:
        """Parameters as printed, for solver vectors `x` [..., p]: A and B refer to single parameters and tokens."""
        x = np.asarray(x)
        values = {}
        for i, parameter in enumerate(self.parameters):
            values[parameter.name] = x[..., i]
        values["A"] = values["A"] + values["alpha"] * math.log(scale.parameters)
        values["B"] = values["B"] + values["beta"] * math.log(scale.tokens)
        for parameter in self.parameters:
            if parameter.positive:
                with np.errstate(
                    over="ignore"
                ):  # a refit gone astray becomes infinite, and is counted as failed
                    values[parameter.name] = np.exp(values[parameter.name])
        return values

    def vector(self, natural: Mapping[str, float], scale: Scale) -> np.ndarray:
        """The inverse of `natural`, for one set of values; a positive one that is zero becomes the least there is."""
        values = {
            p.name: math.log(max(natural[p.name], 1e-300)) if p.positive else natural[p.name]
            for p in self.parameters
        }
        values["A"] -= values["alpha"] * math.log(scale.parameters)
        values["B"] -= values["beta"] * math.log(scale.tokens)
        return np.array([values[name] for name in self.names])


@dataclasses.dataclass(frozen=True)
class FixedExponent(Law):
    """φ held at a value: 1 is full worth, 0 none.  Five free parameters."""

    phi: float = 1.0

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"φ = {self.phi:g}"

    @property
    def loop(self):
        return ()

    def loop_start(self, phi):
        return {}

    def log_multiplier(self, p, rows):
        return self.phi * rows.log_r


@dataclasses.dataclass(frozen=True)
class Multipliers(Law):
    """A free multiplier m(r) of n_rec for each r above 1, in place of r^φ."""

    recurrences: tuple[int, ...] = ()
    name = "m(r)"
    form = "E + A·(n_once + m(r)·n_rec)^−α + B·D^−β"

    @property
    def loop(self):
        return tuple(Parameter(f"m({r})", True) for r in self.recurrences)

    def loop_start(self, phi):
        return {f"m({r})": float(r) ** phi for r in self.recurrences}

    def log_multiplier(self, p, rows):
        total = jnp.zeros_like(rows.log_r)
        for r in self.recurrences:
            total = total + jnp.where(jnp.abs(rows.log_r - math.log(r)) < 1e-9, p[f"m({r})"], 0.0)
        return total


@dataclasses.dataclass(frozen=True)
class ArmExponents(Law):
    """One law for several arms, each with its own φ: `Rows.arm` says whose row it is."""

    arms: int = 2
    name = "φ own, the rest shared"

    @property
    def loop(self):
        return tuple(Parameter(f"phi[{i}]") for i in range(self.arms))

    def loop_start(self, phi):
        return {f"phi[{i}]": phi for i in range(self.arms)}

    def log_multiplier(self, p, rows):
        phis = jnp.stack([jnp.asarray(p[f"phi[{i}]"]) for i in range(self.arms)])
        return phis[rows.arm] * rows.log_r


@dataclasses.dataclass(frozen=True)
class LogMultiplier(Law):
    """1 + c·log₂ r in place of r^φ.  `phi` is that of the power law through its value at r = 4."""

    name = "1 + c·log₂ r"
    form = "E + A·(n_once + (1 + c·log₂ r)·n_rec)^−α + B·D^−β"

    @property
    def loop(self):
        return (Parameter("c", True),)

    def loop_start(self, phi):
        return {"c": max((4.0**phi - 1) / 2, 0.05)}

    def log_multiplier(self, p, rows):
        return jnp.log1p(jnp.exp(p["c"]) * rows.log_r / math.log(2))


@dataclasses.dataclass(frozen=True)
class LoopFloor(Law):
    """A floor that depends on r: E + ε·log₂ r."""

    name = "floor E + ε·log₂ r"
    form = "E + ε·log₂ r + A·(n_once + r^φ·n_rec)^−α + B·D^−β"

    @property
    def extra(self):
        return (Parameter("epsilon", starts=(0.0,)),)

    def log_floor(self, p, rows):
        floor = jnp.exp(p["E"]) + p["epsilon"] * rows.log_r / math.log(2)
        return jnp.log(jnp.maximum(floor, 1e-9))


@dataclasses.dataclass(frozen=True)
class LoopData(Law):
    """Tokens whose worth depends on r: D·r^ψ."""

    name = "data D·r^ψ"
    form = "E + A·(n_once + r^φ·n_rec)^−α + B·(D·r^ψ)^−β"

    @property
    def extra(self):
        return (Parameter("psi", starts=(0.0,)),)

    def log_data(self, p, rows):
        return rows.log_tokens + p["psi"] * rows.log_r


@dataclasses.dataclass(frozen=True)
class QNorm(Law):
    """A q-norm in place of the sum of the model and the data term; q = 1 is the sum."""

    name = "q-norm"
    form = "E + ((A·N^−α)^q + (B·D^−β)^q)^(1/q)"

    @property
    def extra(self):
        return (Parameter("q", True, starts=(1.0, 2.5)),)

    def combine(self, p, floor, model, data):
        q = jnp.exp(jnp.clip(p["q"], -3.0, 5.0))
        return jnp.logaddexp(floor, jnp.logaddexp(q * model, q * data) / q)


NEIGHBOURS: tuple[Law, ...] = (Law(), LoopFloor(), LoopData(), LogMultiplier(), QNorm())
"""The law and the forms a reviewer would put beside it."""


def worth(phi, recurrences):
    """r^φ, what `recurrences` passes are worth; infinite for the φ of a refit gone astray."""
    with np.errstate(over="ignore"):
        return np.exp(phi * np.log(recurrences))


def power_law_phi(law: Law, natural: Mapping[str, Any]) -> Any:
    """φ under `law`, or of the power of r with the same worth at r = 4; None where the law has several or none."""
    if "phi" in natural:
        return natural["phi"]
    if isinstance(law, FixedExponent):
        return law.phi
    if isinstance(law, LogMultiplier):
        return np.log1p(2 * natural["c"]) / math.log(4)
    return None
