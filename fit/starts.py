"""Starting points by variable projection: given (α, β, φ) the law is linear in (E, A, B): those are solved."""

from __future__ import annotations

import itertools
import math

import numpy as np

from fit.law import Law, Rows

ALPHAS = (0.05, 0.12, 0.2, 0.33, 0.55, 0.9)
BETAS = (0.05, 0.12, 0.2, 0.33, 0.55, 0.9)
PHIS = (-0.5, 0.0, 0.25, 0.5, 0.75, 1.0, 1.5)

_TINY = 1e-6  # of the median loss: where a term that the projection puts at zero starts
_MOST_ROWS = 2000


def nonnegative_solve(gram: np.ndarray, moment: np.ndarray, square: float) -> tuple[np.ndarray, np.ndarray]:
    """Solves min ‖X·c − y‖² over c ≥ 0 for many three-column X at once, exactly, by trying every set of active columns.

    `gram` [m, 3, 3] = XᵀX, `moment` [m, 3] = Xᵀy, `square` = yᵀy.  Returns (c [m, 3], the minimum [m]).
    """
    m = len(moment)
    best, best_value = np.zeros((m, 3)), np.full(m, square)
    for size in (1, 2, 3):
        for active in itertools.combinations(range(3), size):
            index = np.array(active)
            sub = gram[:, index[:, None], index] * (1 + 1e-13 * np.eye(size))
            determinant = np.linalg.det(sub / np.maximum(np.abs(sub).max((1, 2), keepdims=True), 1e-300))
            sub = np.where((np.abs(determinant) > 1e-14)[:, None, None], sub, np.eye(size) * 1e300)
            c = np.linalg.solve(sub, moment[:, index, None])[..., 0]
            value = square - (c * moment[:, index]).sum(-1)
            better = (c >= 0).all(-1) & (value < best_value)
            best[better] = 0
            best[np.ix_(better, index)] = c[better]
            best_value = np.where(better, value, best_value)
    return best, best_value


def project(rows: Rows, weights: np.ndarray) -> list[tuple[float, dict[str, float]]]:
    """Returns (misfit, solver values of E, A, B, alpha, beta, phi) for every point of the grid, best first.

    Residuals are relative to the loss, the first-order form of the log residuals that the fit minimises.
    """
    if len(rows.log_loss) > _MOST_ROWS:  # starts need the shape of the data, not all of it
        keep = np.unique(np.linspace(0, len(rows.log_loss) - 1, _MOST_ROWS).astype(int))
        rows, weights = Rows(*(np.asarray(v)[keep] for v in rows)), weights[keep]
    loss = np.exp(rows.log_loss)
    root = np.sqrt(weights)
    floor = root / loss
    data = np.exp(-np.array(BETAS)[:, None] * rows.log_tokens) * floor  # [β, n]
    grams, moments, points = [], [], []
    for phi in PHIS:
        log_n = np.logaddexp(rows.log_once, phi * rows.log_r + rows.log_rec)
        for alpha in ALPHAS:
            model = np.exp(-alpha * log_n) * floor
            columns = np.stack(
                [np.broadcast_to(floor, data.shape), np.broadcast_to(model, data.shape), data], axis=1
            )
            grams.append(columns @ columns.transpose(0, 2, 1))
            moments.append(columns @ root)
            points += [(alpha, beta, phi) for beta in BETAS]
    solved, misfit = nonnegative_solve(np.concatenate(grams), np.concatenate(moments), float(weights.sum()))
    least = _TINY * float(np.median(loss))
    values = []
    for i in np.argsort(misfit, kind="stable"):
        alpha, beta, phi = points[i]
        e, a, b = (math.log(max(v, least)) for v in solved[i])
        values.append((float(misfit[i]), {"E": e, "A": a, "B": b, "alpha": alpha, "beta": beta, "phi": phi}))
    return values


def starting_points(law: Law, rows: Rows, weights: np.ndarray, count: int) -> np.ndarray:
    """Returns [count, p] solver vectors: half the best of the projected grid, half spread evenly over the rest of it.

    The spread half is there to be asked whether distant starts agree.
    """
    ranked = [values for _, values in project(rows, weights)]
    extras = list(itertools.product(*(p.starts for p in law.extra))) or [()]
    wanted = -(-count // len(extras))
    near = ranked[: wanted - wanted // 2]
    far = [ranked[i] for i in np.linspace(len(near), len(ranked) - 1, wanted // 2).astype(int)]
    vectors = []
    for values in near + far:
        natural = law.loop_start(values["phi"])
        for extra in extras:
            given = natural | dict(zip((p.name for p in law.extra), extra, strict=True))
            vectors.append(
                [
                    values[p.name]
                    if p.name not in given
                    else math.log(given[p.name])
                    if p.positive
                    else given[p.name]
                    for p in law.parameters
                ]
            )
    return np.array(vectors[:count])
