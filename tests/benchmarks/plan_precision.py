"""The sd that a plan predicts for φ beside the sd of fits to simulated sweeps, and what `--next` saves.

    python tests/benchmarks/plan_precision.py [SIMULATIONS]

Losses are made from the published law with the plan's noise, each run's own and that of its cell, and fitted as
`looped fit` does.  Then 36 runs, the two lowest published budgets, are simulated: the FLOPs that the runs named next
take to a predicted sd of 0.03 beside those of whole budgets, and the sd that fits to the designs so reached have.
"""

import json
import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import dataclasses
import pathlib

import numpy as np

from experiments.design import Changes, design
from experiments.plan import plan
from fit.analysis import arm_rows
from fit.choose import cheapest, next_runs
from fit.design import Design, planned_losses, worst
from fit.law import Law
from fit.noise import Noise
from fit.prior import PUBLISHED_PRIOR, prior_of, read_prior
from fit.progress import take
from fit.solve import fit_law

TARGET = 0.03
LAPTOP = pathlib.Path(__file__).parents[2] / "experiments/results/laptop/phi.json"


def planned(names, changes=None, noise=None, prior=PUBLISHED_PRIOR):
    """(the design of presets with changes, the FLOPs [n] of its runs)."""
    costs = plan(design(names, changes))
    table = planned_losses([run.counts for run in costs.runs], prior)
    return Design(table, prior, noise or Noise()), np.array([run.flops for run in costs.runs])


def with_noise(made, rng):
    """The design's losses with one draw of its noise."""
    losses, noise = made.losses, made.noise
    cells = losses.cells("cell")
    error = (
        noise.row * rng.standard_normal(len(losses))
        + noise.cell * rng.standard_normal(cells.max() + 1)[cells]
    )
    return dataclasses.replace(losses, loss=losses.loss * np.exp(error))


def simulated(made, mask, simulations, seed=0):
    """The sds of every quantity of `made` over fits to `simulations` sweeps of the runs in `mask` [n]."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(simulations):
        losses = take(with_noise(made, rng), mask)
        phi = {}
        for arm in made.arms:
            rows, scale = arm_rows(losses, losses.rows_of(arm))
            phi[arm] = fit_law(Law(), rows, scale, starts=8).parameters["phi"]
        found.append([phi[a] - (phi[b] if b else 0.0) for a, b in made.quantities])
    return np.std(found, axis=0, ddof=1)


def compare(name, made, mask, simulations):
    actual = simulated(made, mask, simulations)
    for one, sd in zip(made.predict(mask), actual, strict=True):
        what = one.arm if one.against is None else f"{one.arm} - {one.against}"
        ratio = None if one.sd is None else round(one.sd / sd, 3)
        runs = int(mask.sum())
        line = {
            "design": name,
            "runs": runs,
            "phi": what,
            "predicted": one.sd,
            "simulated": sd,
            "ratio": ratio,
        }
        print(json.dumps(line), flush=True)


def designs():
    """(name, design, mask) of what is compared."""
    whole, flops = planned(["paper-vanilla"])
    everything = np.ones(len(flops), dtype=bool)
    yield "paper-vanilla", whole, everything
    two, _ = planned(["paper-vanilla"], Changes(budgets=(4.64e17, 1e18)))
    yield "two lowest budgets", two, np.ones(len(two.losses), dtype=bool)
    own = Changes(budgets=(1e18, 3e18, 1e19), recurrences=(1, 4), widths=(512, 768, 1024, 1280), seeds=(0, 1))
    spot, _ = planned(["paper-vanilla"], own)
    yield "three budgets, r = 1 and 4, two seeds", spot, np.ones(len(spot.losses), dtype=bool)
    choice = cheapest(whole, flops, 0.04)
    assert choice is not None
    yield "cheapest for 0.04", whole, choice.mask
    arms, _ = planned(["paper-vanilla", "paper-truncated"])
    yield "two arms", arms, np.ones(len(arms.losses), dtype=bool)
    laptop, _ = planned(["laptop"], noise=Noise(0.0088, 0.0), prior=read_prior(LAPTOP))
    yield "laptop", laptop, np.ones(len(laptop.losses), dtype=bool)


def savings(noise, draws, simulations):
    """FLOPs to the target by the runs named next and by whole budgets, for `draws` simulations of the 36 runs."""
    made, flops = planned(["paper-vanilla"], noise=noise)
    budgets = np.unique(made.losses.budget)
    have = made.losses.budget <= budgets[1]
    rng = np.random.default_rng(0)
    for draw in range(draws):
        prior, _ = prior_of(take(with_noise(made, rng), have))
        assert prior is not None
        believed = Design(made.losses, prior, noise)
        steps = next_runs(believed, flops, have, len(flops), target=TARGET)
        chosen = have.copy()
        chosen[[step.index for step in steps]] = True
        wholes = [made.losses.budget <= budget for budget in budgets[1:]]
        whole = next((m for m in wholes if worst(believed.predict(m)) <= TARGET), None)
        extra = None if whole is None else float(flops[whole].sum() - flops[have].sum())
        line = {"noise": dataclasses.astuple(noise), "draw": draw, "phi": prior.of("vanilla")["phi"]}
        line |= {"runs": len(steps), "next": steps[-1].cost if steps else 0.0, "whole": extra}
        line["share"] = round(line["next"] / extra, 3) if extra else None
        line["true_sd"] = worst(made.predict(chosen))
        if draw == 0:
            line["simulated_sd"] = float(simulated(made, chosen, simulations)[0])
        print(json.dumps(line), flush=True)


def main():
    simulations = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    for name, made, mask in designs():
        compare(name, made, mask, simulations)
    for noise in (Noise(0.004, 0.0), Noise()):
        savings(noise, 10, simulations)


if __name__ == "__main__":
    main()
