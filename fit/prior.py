"""Which law a plan starts from: the published coefficients, those of a `phi.json`, or those of losses at hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from etils import epath

from fit.analysis import DEFAULTS, PointFit, fit_point
from fit.law import Law
from fit.losses import Losses
from fit.noise import noise_about
from looped.errors import UserError
from looped.jsonable import read_json

PUBLISHED: Mapping[str, float] = {
    "E": 1.56773,
    "A": 28.027,
    "alpha": 0.19924,
    "B": 915.82,
    "beta": 0.36863,
    "phi": 0.459,
}
"""The law of the published grid as printed (arXiv:2604.21106); `looped fit paper-vanilla` gives its like."""
_PUBLISHED_SIZES = (1e7, 1e9)  # parameters n_once + n_rec of its runs, roughly
_PUBLISHED_TOKENS = (3e8, 2e10)
CONVENTION = "published"
"""How the parameters of planned runs are counted, and so those that a law must be about."""
_FAR = 10.0  # times beyond the runs that a law was fitted to


@dataclasses.dataclass(frozen=True)
class Prior:
    """Natural parameters of the law by arm; an arm that is not there has those of the first.

    `source` says in words where they come from; `sizes` and `tokens` bound the runs they describe, None if unknown.
    """

    arms: Mapping[str, Mapping[str, float]]
    source: str
    sizes: tuple[float, float] | None = None
    tokens: tuple[float, float] | None = None

    def of(self, arm: str) -> Mapping[str, float]:
        return self.arms.get(arm) or next(iter(self.arms.values()))

    def reservations(self, losses: Losses) -> list[str]:
        """What to say of runs far outside those that the law was fitted to."""
        if self.sizes is None or self.tokens is None:
            return []
        told = []
        pairs = (
            ("parameters", losses.n_once + losses.n_rec, self.sizes),
            ("tokens", losses.tokens, self.tokens),
        )
        for name, values, (low, high) in pairs:
            if values.min() < low / _FAR or values.max() > high * _FAR:
                told.append(
                    f"the runs have {values.min():.2g} to {values.max():.2g} {name} and the law ({self.source}) was"
                    f" fitted at {low:.2g} to {high:.2g}: a law of their own, as phi.json, is worth more"
                )
        return told


PUBLISHED_PRIOR = Prior(
    {"published": PUBLISHED}, "published coefficients", _PUBLISHED_SIZES, _PUBLISHED_TOKENS
)


def read_prior(path: epath.PathLike) -> Prior:
    """The laws in a `phi.json` of `looped fit`, of each arm that has a φ.

    Raises `UserError` for a file that is none, has no φ, or counts parameters in another way than plans do.
    """
    path = epath.Path(path)
    data = read_json(path, "give a phi.json of `looped fit`", "law")
    found = data.get("arms") if isinstance(data, dict) else None
    if not isinstance(found, dict):
        raise UserError(f"law {path}: has no arms; give a phi.json of `looped fit`.")
    arms = {name: law for name, arm in found.items() if (law := _law_of(arm, f"law {path}: arm {name!r}"))}
    if not arms:
        raise UserError(f"law {path}: no arm has a φ there; leave it out to plan with the published law.")
    return Prior(arms, f"{', '.join(arms)} of {path}")


def _law_of(arm: object, where: str) -> dict[str, float] | None:
    """The law of one arm of a phi.json; None where it has no φ."""
    if not isinstance(arm, dict):
        raise UserError(f"{where} is {arm!r}; give a phi.json of `looped fit`.")
    phi = arm.get("phi")
    if phi is None:
        return None
    values = {n: arm.get(n) for n in Law().names} | {
        "phi": phi.get("estimate") if isinstance(phi, dict) else phi
    }
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise UserError(f"{where} has {name} {value!r}; give a phi.json of `looped fit`.")
        if name != "phi" and value <= 0:
            raise UserError(f"{where} has {name} {value:g}; the law of a plan needs it above 0.")
    if arm.get("convention", CONVENTION) not in (CONVENTION, "unstated"):
        raise UserError(
            f"{where} counts parameters under convention {arm['convention']!r} and a plan under {CONVENTION!r}; fit"
            f" again with --convention {CONVENTION}."
        )
    return {name: float(value) for name, value in values.items() if value is not None}


def prior_of(losses: Losses) -> tuple[Prior | None, list[str]]:
    """(the laws fitted to the arms of `losses` that determine one, what the noise about each is), or (None, [])."""
    fits = [fit_point(losses, arm, losses.rows_of(arm), DEFAULTS) for arm in losses.arms]
    able = [f for f in fits if isinstance(f, PointFit) and not f.fit.at_bound]
    if not able:
        return None, []
    sizes = losses.n_once + losses.n_rec
    prior = Prior(
        {f.arm: f.fit.parameters for f in able},
        f"fitted to the {len(losses)} losses at hand",
        (float(sizes.min()), float(sizes.max())),
        (float(losses.tokens.min()), float(losses.tokens.max())),
    )
    return prior, [text for f in able if (text := _noise_words(losses, f))]


def _noise_words(losses: Losses, fit: PointFit) -> str:
    noise = noise_about(fit.fit.residuals, losses.cells("cell")[fit.index])
    if noise is None:
        return ""
    return f"the losses of {fit.arm} lie about their law with noise {noise.row:.2g} a run and {noise.cell:.2g} a cell"
