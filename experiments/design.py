"""Designs made on the spot: the grids of presets with other budgets, recurrences, widths, arms or seeds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from experiments.presets import PRESETS, Arm, Family, Grid, Widths, preset
from looped.config import RunSpec
from looped.errors import UserError, nearest


@dataclasses.dataclass(frozen=True)
class Changes:
    """What takes the place of the presets' own; an empty field changes nothing.

    `budgets` are FLOPs; without `widths` (d_model, at every budget) they must be some of the presets'.  `arms` are
    names of arms that any preset of the same models has.
    """

    budgets: tuple[float, ...] = ()
    recurrences: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    arms: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()

    def __post_init__(self):
        for budget in self.budgets:
            if not (math.isfinite(budget) and budget >= 1):
                raise UserError(f"budgets has {budget:g}; give training FLOPs of a run, such as 1e18.")
        for seed in self.seeds:
            if seed < 0:
                raise UserError(f"seeds has {seed}; give whole numbers of at least 0.")


def design(names: Sequence[str], changes: Changes | None = None) -> tuple[RunSpec, ...]:
    """The runs of the presets `names` with `changes`, each run once.

    Raises `UserError` for an unknown preset, and where its models cannot be of the shape that a change asks for.
    """
    changes = changes or Changes()
    if changes.budgets or changes.recurrences or changes.widths or changes.arms:
        specs = list(_changed(names, changes).specs())
        if changes.seeds:
            specs = [dataclasses.replace(spec, seed=seed) for seed in changes.seeds for spec in specs]
    else:
        specs = [spec for name in names for spec in preset(name).specs(changes.seeds)]
    return tuple(dict.fromkeys(specs))


def _changed(names: Sequence[str], changes: Changes) -> Grid:
    grids = [_grid(name) for name in names]
    first = grids[0]
    other = next((n for n, grid in zip(names, grids, strict=True) if grid.family != first.family), None)
    if other is not None:
        raise UserError(
            f"presets {names[0]!r} and {other!r} have different models, so no change can be made to both; plan them one"
            " by one."
        )
    arms = _arms(first.family, grids, changes)
    for arm in arms:
        for recurrences in arm.recurrences:
            _check_recurrences(first.family, recurrences)
    widths = _widths(names, first, changes)
    if changes.widths:
        arms = tuple(dataclasses.replace(arm, more_widths={}) for arm in arms)
    return dataclasses.replace(first, widths=widths, arms=arms)


def _grid(name: str) -> Grid:
    source = preset(name).source
    if not isinstance(source, Grid):
        raise UserError(
            f"preset {name!r} is no grid of budgets and widths; plan it as it is, or name a preset that is one."
        )
    return source


def _widths(names: Sequence[str], grid: Grid, changes: Changes) -> Widths:
    """Widths by budget after `changes`."""
    for width in changes.widths:
        if width < 1 or width % grid.family.head_dim:
            raise UserError(
                f"widths has {width}; the models of {names[0]!r} need multiples of {grid.family.head_dim}, the size of"
                " their heads."
            )
    if changes.widths:
        own = tuple(sorted(set(changes.widths)))
        return dict.fromkeys(changes.budgets or grid.widths, own)
    for budget in changes.budgets:
        if budget not in grid.widths:
            raise UserError(
                f"budgets has {budget:g}, which preset {names[0]!r} lacks; it has"
                f" {', '.join(f'{b:g}' for b in grid.widths)}: add the widths to train at others."
            )
    return {b: own for b, own in grid.widths.items() if not changes.budgets or b in changes.budgets}


def _arms(family: Family, grids: Sequence[Grid], changes: Changes) -> tuple[Arm, ...]:
    arms = {arm.name: arm for grid in grids for arm in grid.arms}
    if changes.arms:
        sources = [p.source for p in PRESETS.values() if isinstance(p.source, Grid)]
        known = {arm.name: arm for grid in sources if grid.family == family for arm in grid.arms} | arms
        for name in changes.arms:
            if name not in known:
                raise UserError(f"arms has {name!r}, which is unknown.{nearest(name, known)}")
        arms = {name: known[name] for name in changes.arms}
    if not changes.recurrences:
        return tuple(arms.values())
    wanted = tuple(sorted(set(changes.recurrences)))
    baseline = next((arm.name for arm in arms.values() if 1 in arm.recurrences), next(iter(arms)))
    looped = tuple(r for r in wanted if r != 1)
    return tuple(
        dataclasses.replace(arm, recurrences=wanted if arm.name == baseline else looped)
        for arm in arms.values()
    )


def _check_recurrences(family: Family, recurrences: int) -> None:
    if recurrences < 1 or family.looped_layers % recurrences:
        valid = [r for r in range(1, family.looped_layers + 1) if family.looped_layers % r == 0]
        raise UserError(
            f"recurrences has {recurrences}; models of equal depth share {family.looped_layers} layers among the"
            f" passes, so give some of {', '.join(map(str, valid))}."
        )
