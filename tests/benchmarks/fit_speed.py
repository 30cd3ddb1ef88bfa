"""How long the fit takes, beside a scipy L-BFGS-B multi-start of the same quality.

    OPENBLAS_NUM_THREADS=1 python tests/benchmarks/fit_speed.py

Both sides get the same starts (the projected grid), the same centred parameters and the same objective with its exact
gradient; scipy's tolerances are set so that it reaches the same minimum to 1e-9. Prints wall and CPU seconds.
"""

import json
import os
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
import scipy.optimize

from fit.analysis import Options, arm_rows, draw_table, fit_point
from fit.law import Law
from fit.losses import read_losses
from fit.solve import STARTS
from fit.starts import starting_points
from fit.uncertainty import bootstrap

DELTA = 1e-3


def seconds(run, repeats=1):
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        result = run()
    return result, (time.perf_counter() - wall) / repeats, (time.process_time() - cpu) / repeats


def scipy_objective(rows, weights):
    """Value and gradient of the summed Huber objective for (E, A, B, alpha, beta, phi) of the centred rows."""
    once, rec, log_r = np.exp(rows.log_once), rows.log_rec, rows.log_r

    def at(x):
        e, a, b, alpha, beta, phi = x
        looped = np.exp(phi * log_r + rec)
        n = once + looped
        model, data, floor = np.exp(a - alpha * np.log(n)), np.exp(b - beta * rows.log_tokens), np.exp(e)
        loss = floor + model + data
        residual = np.log(loss) - rows.log_loss
        size = np.abs(residual)
        value = (weights * np.where(size <= DELTA, 0.5 * residual**2, DELTA * (size - 0.5 * DELTA))).sum()
        slope = weights * np.clip(residual, -DELTA, DELTA) / loss
        gradient = np.array([
            (slope * floor).sum(), (slope * model).sum(), (slope * data).sum(), (slope * model * -np.log(n)).sum(),
            (slope * data * -rows.log_tokens).sum(), (slope * model * -alpha * looped / n * log_r).sum(),
        ])  # fmt: skip
        return value * 1e4, gradient * 1e4

    return at


def scipy_fit(rows, weights, starts):
    objective = scipy_objective(rows, weights)
    options = {"maxiter": 5000, "maxfun": 20000, "ftol": 1e-15, "gtol": 1e-10, "maxcor": 20}
    ends = [
        scipy.optimize.minimize(objective, x, jac=True, method="L-BFGS-B", options=options) for x in starts
    ]
    return min(ends, key=lambda end: end.fun), np.array([end.fun for end in ends]) / 1e4


def main():
    losses = read_losses("paper-vanilla")
    options = Options()
    index = losses.rows_of("vanilla")
    _, cold, cold_cpu = seconds(lambda: fit_point(losses, "vanilla", index, options))
    arm, warm, warm_cpu = seconds(lambda: fit_point(losses, "vanilla", index, options), 5)
    draws = draw_table(losses, [index], options)
    weights = draws.weights[:, arm.index]
    boot, boots, boots_cpu = seconds(lambda: bootstrap(arm.fit, arm.rows, draws, arm.index))
    rows, _ = arm_rows(losses, index)
    points = starting_points(Law(), rows, np.ones(len(index)), STARTS)
    (best, ends), theirs, theirs_cpu = seconds(lambda: scipy_fit(rows, np.ones(len(index)), points))
    few = 50
    refits, their_boots, their_boots_cpu = seconds(
        lambda: [scipy_fit(rows, w, [arm.fit.x])[0].x[5] for w in weights[:few]]
    )
    result = {
        "fit_cold": cold, "fit_warm": warm, "fit_warm_cpu": warm_cpu, "fit_cold_cpu": cold_cpu,
        "resamples_1000": boots, "resamples_1000_cpu": boots_cpu,
        "scipy_fit": theirs, "scipy_fit_cpu": theirs_cpu, "scipy_resamples_1000": their_boots * 1000 / few,
        "ratio_fit": theirs / warm, "ratio_resamples": their_boots * 1000 / few / boots,
        "ratio_fit_cpu": theirs_cpu / warm_cpu, "ratio_resamples_cpu": their_boots_cpu * 1000 / few / boots_cpu,
        "objective": arm.fit.value, "scipy_objective": best.fun / 1e4,
        "share_of_starts_at_best": arm.fit.agreement,
        "scipy_share_of_starts_at_best": float(np.mean(ends <= arm.fit.value * (1 + 1e-6))),
        "largest_difference_of_phi": float(np.abs(np.array(refits) - boot.values["phi"][:few]).max()),
    }  # fmt: skip
    json.dump(result, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
