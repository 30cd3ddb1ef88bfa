"""Fitting a law: the summed Huber loss of log residuals, float64, many starts, ranked by objective.

The solver is jaxopt's Levenberg-Marquardt on the square roots of the Huber terms: it reaches the best objective from
nearly every start, where L-BFGS at its default tolerances stops early and reports success.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="JAXopt is no longer maintained")
    from jaxopt import LevenbergMarquardt

from fit.law import Law, Rows, Scale
from fit.starts import starting_points
from looped.errors import UserError

CHUNK = 8  # a vmapped loop waits for its slowest lane
STARTS = 64
_MOST_ELEMENTS = 4_000_000  # rows × parameters × lanes of one chunk's Jacobian (32 MB)
_FEWEST_ROWS = (
    32  # rows are padded to a power of two of at least this: subsets of a table share a compiled program
)
_AGREE = 1e-6  # relative: objectives this close are the same minimum
_BOUND = 1e-4  # of the smallest loss: a term below this everywhere is at zero


@dataclasses.dataclass(frozen=True)
class Objective:
    """What is minimised: `huber` is Σ Huber_δ(log L̂ − log L), `squares` is Σ (log L̂ − log L)² / 2."""

    kind: Literal["huber", "squares"] = "huber"
    delta: float = 1e-3

    def __post_init__(self):
        if not 0 < self.delta < 1:
            raise UserError(
                f"delta is {self.delta}; the Huber threshold of log residuals must lie in (0, 1), such as 0.001."
            )

    def __str__(self) -> str:
        return (
            f"sum of Huber({self.delta:g}) of log residuals"
            if self.kind == "huber"
            else "sum of squared log residuals"
        )

    def value(self, residuals):
        """The term of each log residual."""
        square = 0.5 * residuals**2
        if self.kind == "squares":
            return square
        size = abs(residuals)
        return jnp.where(size <= self.delta, square, self.delta * (size - 0.5 * self.delta))

    def root(self, residuals):
        """√(2·value) with the residual's sign, in units of δ: what least squares turns back into the objective."""
        if self.kind == "squares":
            return residuals / self.delta
        scaled = residuals / self.delta
        size = jnp.abs(scaled)
        tail = jnp.sqrt(2 * jnp.where(size > 1, size, 1.0) - 1)
        return jnp.where(size <= 1, scaled, jnp.sign(scaled) * tail)


HUBER = Objective()
"""The published objective."""

Status = Literal["converged", "at a bound", "starts disagree"]


@dataclasses.dataclass(frozen=True)
class Fit:
    """A fitted law.

    `parameters` are natural ones; `x` [p] the solver's vector in `scale`; `residuals` [n] are predicted − observed log
    losses; `agreement` is the share of starts that reached the best objective; `condition_number` that of the Jacobian
    of the log losses with columns of unit length.
    """

    law: Law
    objective: Objective
    scale: Scale
    x: np.ndarray
    parameters: dict[str, float]
    value: float
    predicted: np.ndarray
    residuals: np.ndarray
    r_squared: float
    rmse: float
    status: Status
    at_bound: tuple[str, ...]
    starts: int
    agreement: float
    condition_number: float


@functools.partial(jax.jit, static_argnames=("law", "objective", "held"))
def _solve_chunk(law: Law, objective: Objective, held: tuple[int, ...], x0, weights, rows: Rows):
    """Minimises from x0 [c, p] under weights [c, n]; parameters `held` stay.  Returns (x [c, p], objective [c])."""
    free = np.array([i for i in range(len(law.names)) if i not in held])

    def residuals(z, start, weight):
        x = start.at[free].set(z)
        return jnp.sqrt(weight) * objective.root(law.log_loss(x, rows) - rows.log_loss)

    solver = LevenbergMarquardt(
        residuals,
        maxiter=300,
        tol=1e-14,
        xtol=1e-11,
        gtol=1e-9,
        materialize_jac=True,
        solver="cholesky",
        stop_criterion="madsen-nielsen",
        damping_parameter=1e-3,
        implicit_diff=True,  # False would unroll: every lane then runs all 300 iterations
    )

    def one(start, weight):
        z = solver.run(start[free], start, weight).params
        x = start.at[free].set(z)
        value = jnp.sum(weight * objective.value(law.log_loss(x, rows) - rows.log_loss))
        return x, jnp.where(jnp.isfinite(value), value, jnp.inf)

    return jax.vmap(one)(x0, weights)


def solve(
    law: Law,
    rows: Rows,
    x0: np.ndarray,
    weights: np.ndarray,
    objective: Objective,
    held: tuple[str, ...] = (),
) -> tuple[np.ndarray, np.ndarray]:
    """Minimises the weighted objective from each of x0 [s, p], under weights [s, n] or [n].

    Returns (x [s, p], objective [s]), in chunks, on the CPU, in float64; a start that ends nowhere has objective inf.
    """
    s, n = len(x0), len(rows.log_loss)
    weights = np.broadcast_to(weights, (s, n))
    indices = tuple(law.names.index(name) for name in held)
    padding = max(_FEWEST_ROWS, 1 << (n - 1).bit_length()) - n
    chunk = max(1, min(CHUNK, _MOST_ELEMENTS // ((n + padding) * len(law.names))))
    with _float64():
        padded = Rows(*(jnp.asarray(np.concatenate([v, np.repeat(v[:1], padding)])) for v in rows))

        def run(begin: int):
            x, w = x0[begin : begin + chunk], weights[begin : begin + chunk]
            lanes = np.arange(chunk) % len(x)  # the last chunk repeats lanes, so that one program serves all
            w = np.concatenate([w, np.zeros((len(w), padding))], axis=1)
            with _float64():
                ends, values = _solve_chunk(
                    law, objective, indices, jnp.asarray(x[lanes]), jnp.asarray(w[lanes]), padded
                )
                return np.asarray(ends)[: len(x)], np.asarray(values)[: len(x)]

        begins = range(0, s, chunk)
        first = run(0)
        with ThreadPoolExecutor(2) as pool:
            parts = [first, *pool.map(run, begins[1:])]
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])


def predict(law: Law, x: np.ndarray, rows: Rows) -> np.ndarray:
    """Predicted log losses [n] for x [p], or [s, n] for x [s, p]."""
    with _float64():
        rows = Rows(*map(jnp.asarray, rows))
        return np.asarray(_predict(law, jnp.atleast_2d(jnp.asarray(x)), rows))[
            0 if x.ndim == 1 else slice(None)
        ]


@functools.partial(jax.jit, static_argnames="law")
def _predict(law: Law, x, rows: Rows):
    return jax.vmap(lambda v: law.log_loss(v, rows))(x)


def jacobian(law: Law, x: np.ndarray, rows: Rows) -> np.ndarray:
    """Derivatives [n, p] of the predicted log losses with respect to the solver's vector."""
    with _float64():
        return np.asarray(_jacobian(law, jnp.asarray(x), Rows(*map(jnp.asarray, rows))))


@functools.partial(jax.jit, static_argnames="law")
def _jacobian(law: Law, x, rows: Rows):
    return jax.jacfwd(lambda v: law.log_loss(v, rows))(x)


@contextlib.contextmanager
def _float64() -> Iterator[None]:
    """Double precision on the CPU for what runs inside; both are per thread."""
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield


def fit_law(
    law: Law,
    rows: Rows,
    scale: Scale,
    weights: np.ndarray | None = None,
    objective: Objective = HUBER,
    starts: int = STARTS,
) -> Fit:
    """Fits `law` to `rows` from `starts` deterministic starts and keeps the least objective, whatever the solver says.

    `weights` [n] are multiplicities (0 leaves a row out); R², rmse and residuals refer to rows of weight above 0.
    Raises `UserError` when no start ends at a finite objective.
    """
    weights = np.ones(len(rows.log_loss)) if weights is None else weights
    ends, values = solve(law, rows, starting_points(law, rows, weights, starts), weights, objective)
    best = int(np.argmin(values))
    if not np.isfinite(values[best]):
        raise UserError(
            f"the law {law.form} cannot be fitted to these {len(rows.log_loss)} rows, no start ended anywhere; check"
            " the losses, and add budgets, widths or r."
        )
    # once more from the best end: Levenberg-Marquardt then starts with fresh damping and closes the last digits
    x, again = solve(law, rows, ends[best : best + 1], weights, objective)
    x, value = (x[0], float(again[0])) if again[0] <= values[best] else (ends[best], float(values[best]))
    agreement = float(np.mean(values <= value * (1 + _AGREE) + 1e-18))
    predicted = predict(law, x, rows)
    used = weights > 0
    loss, fitted = np.exp(rows.log_loss[used]), np.exp(predicted[used])
    natural = {k: float(v) for k, v in law.natural(x, scale).items()}
    bounds = at_bound(law, x, rows)
    columns = jacobian(law, x, rows)[used]
    norms = np.linalg.norm(columns, axis=0)
    return Fit(
        law=law,
        objective=objective,
        scale=scale,
        x=x,
        parameters=natural,
        value=value,
        predicted=np.exp(predicted),
        residuals=predicted - rows.log_loss,
        r_squared=float(1 - ((loss - fitted) ** 2).sum() / max(((loss - loss.mean()) ** 2).sum(), 1e-300)),
        rmse=float(np.sqrt(np.mean((loss - fitted) ** 2))),
        status="at a bound" if bounds else "converged" if agreement >= 0.5 else "starts disagree",
        at_bound=bounds,
        starts=len(values),
        agreement=agreement,
        condition_number=float(np.linalg.cond(columns / np.where(norms > 0, norms, 1.0)))
        if norms.all()
        else float("inf"),
    )


def at_bound(law: Law, x: np.ndarray, rows: Rows) -> tuple[str, ...]:
    """Names of the parameters that ended where they say nothing: a term of no size, an exponent not in (0.005, 5)."""
    values = dict(zip(law.names, x, strict=True))
    smallest = float(np.exp(rows.log_loss).min())
    names = [n for n in ("E", "A", "B") if np.exp(min(values[n], 50.0)) < _BOUND * smallest]
    names += [n for n in ("alpha", "beta") if not 0.005 < values[n] < 5]
    return tuple(names)
