"""How often the 95 % interval of φ holds the truth, on the published grid and on smaller ones.

    python tests/benchmarks/fit_coverage.py [SIMULATIONS] [RESAMPLES]

Losses are made from the law fitted to the published grid, with independent normal noise of 0.002 and 0.01 nats.
"""

import json
import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

from fit.analysis import Options, arm_rows, draw_table, fit_point
from fit.law import Law
from fit.losses import read_losses
from fit.solve import fit_law, predict
from fit.uncertainty import bootstrap


def coverage(losses, noise, simulations, resamples, seed=0):
    """Share of `simulations` whose percentile interval holds φ, with the mean error and the spread of the estimates."""
    options = Options(resamples=resamples)
    arm = fit_point(losses, "vanilla", losses.rows_of("vanilla"), options)
    rows, scale = arm_rows(losses, arm.index)
    clean = np.exp(predict(Law(), arm.fit.x, rows))
    draws = draw_table(losses, [arm.index], options)
    rng = np.random.default_rng(seed)
    held, estimates = [], []
    for _ in range(simulations):
        noisy = rows._replace(log_loss=np.log(clean + noise * rng.standard_normal(len(clean))))
        fit = fit_law(Law(), noisy, scale, starts=8)
        boot = bootstrap(fit, noisy, draws, arm.index)
        held.append(arm.fit.parameters["phi"] in boot.interval(boot.values["phi"]))
        estimates.append(fit.parameters["phi"])
    return {
        "noise": noise,
        "simulations": simulations,
        "resamples": resamples,
        "coverage": float(np.mean(held)),
        "mean_error": float(np.mean(estimates) - arm.fit.parameters["phi"]),
        "spread": float(np.std(estimates)),
    }


def main():
    simulations, resamples = (int(v) for v in (sys.argv[1:] + ["200", "400"][len(sys.argv) - 1 :])[:2])
    losses = read_losses("paper-vanilla")
    for noise in (0.002, 0.01):
        print(json.dumps(coverage(losses, noise, simulations, resamples)), flush=True)


if __name__ == "__main__":
    main()
