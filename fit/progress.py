"""Losses at hand beside runs that are planned: which of these are done already, in one table with those."""

from __future__ import annotations

import dataclasses

import numpy as np
from etils import epath

from fit.budgets import group
from fit.losses import Losses, read_losses
from fit.prior import CONVENTION
from fit.validate import DEFAULT_ARM, UNSTATED
from looped.errors import UserError

_SAME_BUDGET = 0.05  # relative: budgets read from what runs spent differ by whole steps
_SAME_SIZE = 0.01  # relative, of parameters and tokens


def read_done(source: epath.PathLike, planned: Losses) -> Losses:
    """The losses at hand, counted as planned runs are; their arm is the planned one's where they name none.

    Raises `UserError` where they cannot be counted so, or their arm is in doubt.
    """
    done = read_losses(source)
    if done.convention not in (CONVENTION, UNSTATED):
        done = read_losses(source, CONVENTION)
    arms = planned.unnamed_arms
    if DEFAULT_ARM in done.arms and DEFAULT_ARM not in arms:
        if len(arms) != 1:
            raise UserError(
                f"{source}: has no column `arm`, and the plan has the arms {', '.join(arms)}; add the column."
            )
        done = dataclasses.replace(done, arm=np.full(len(done), next(iter(arms)), dtype=object))
    return done


def are_done(planned: Losses, done: Losses) -> np.ndarray:
    """Which of the planned runs [n] are in `done`: by run_id, or by arm, r, sizes, tokens and seed."""
    ids = {run_id for run_id in done.columns.get("run_id", ()) if run_id}
    found = np.array([label in ids for label in planned.labels])
    seeds, own_seeds = done.seeds, planned.seeds
    for i in np.flatnonzero(~found):
        same = (done.recurrences == planned.recurrences[i]) & (seeds == own_seeds[i])
        if planned.recurrences[i] > 1:
            same &= done.arm == planned.arm[i]
        for name in ("n_once", "n_rec", "tokens"):
            value = getattr(planned, name)[i]
            same &= np.abs(getattr(done, name) - value) <= _SAME_SIZE * value
        found[i] = same.any()
    return found


def take(losses: Losses, keep: np.ndarray) -> Losses:
    """The rows of `losses` where `keep` [n] is true."""
    index = np.flatnonzero(keep)
    arrays = {name: getattr(losses, name)[index] for name in _arrays(losses)}
    columns = {name: tuple(values[i] for i in index) for name, values in losses.columns.items()}
    labels = tuple(losses.labels[i] for i in index)
    return dataclasses.replace(losses, labels=labels, columns=columns, **arrays)


def joined(one: Losses, other: Losses) -> Losses:
    """The rows of two tables in one, budgets that are nearly equal made equal."""
    arrays = {n: np.concatenate([getattr(one, n), getattr(other, n)]) for n in _arrays(one)}
    if np.isfinite(arrays["budget"]).all():
        arrays["budget"] = group(arrays["budget"], _SAME_BUDGET)
    nothing = [(None,) * len(one), (None,) * len(other)]
    columns = {
        n: (*one.columns.get(n, nothing[0]), *other.columns.get(n, nothing[1]))
        for n in dict.fromkeys([*one.columns, *other.columns])
    }
    return dataclasses.replace(one, labels=(*one.labels, *other.labels), columns=columns, **arrays)


def _arrays(losses: Losses) -> list[str]:
    fields = [field.name for field in dataclasses.fields(losses)]
    return [name for name in fields if isinstance(getattr(losses, name), np.ndarray)]
