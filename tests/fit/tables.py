"""Tables to fit: the published losses, and losses made from known parameters on the published grid."""

import csv
import dataclasses

import numpy as np

from fit.reading import EXAMPLES

VANILLA = EXAMPLES / "paper-vanilla.csv"
TRUNCATED = EXAMPLES / "paper-truncated.csv"
TRUTH = {"E": 1.6, "A": 30.0, "alpha": 0.2, "B": 900.0, "beta": 0.37, "phi": 0.45}
CORE = ("recurrences", "n_once", "n_rec", "tokens", "loss")


def law_losses(losses, truth, recurrences=None, tokens=None):
    """Losses [n] of the joint law at the configurations of `losses`, written out independently of the package."""
    r = losses.recurrences if recurrences is None else recurrences
    d = losses.tokens if tokens is None else tokens
    n = losses.n_once + r.astype(float) ** truth["phi"] * losses.n_rec
    return truth["E"] + truth["A"] / n ** truth["alpha"] + truth["B"] / d ** truth["beta"]


def with_losses(losses, loss, **changes):
    return dataclasses.replace(losses, loss=np.asarray(loss), **changes)


def take(losses, keep):
    """The rows of `losses` where `keep` [n] is true."""
    keep = np.flatnonzero(keep)
    arrays = {
        f.name: getattr(losses, f.name)[keep]
        for f in dataclasses.fields(losses)
        if isinstance(getattr(losses, f.name), np.ndarray)
    }
    return dataclasses.replace(
        losses,
        labels=tuple(losses.labels[i] for i in keep),
        columns={name: tuple(values[i] for i in keep) for name, values in losses.columns.items()},
        **arrays,
    )


def published_rows(path=VANILLA):
    """The rows of a published file as dictionaries of text, free to be spoilt."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))
