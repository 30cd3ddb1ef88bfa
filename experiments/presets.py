"""The grids, as data: which runs a preset expands to.

Sources: paper, section 4 (grid), section 5 and appendix G (truncated backprop, hyperconnections), and
appendices C.2 (injection ablation), D.1 (learning-rate sweep) and I (extrapolation beyond the grid).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from etils import epath

from looped.config import DataConfig, ModelConfig, OptimizerConfig, RunSpec
from looped.errors import UserError, first_line, nearest
from looped.jsonable import from_json, read_json
from looped.mechanisms import check_named

Widths = Mapping[float, tuple[int, ...]]
"""Widths d_model to train at each budget in FLOPs."""


@dataclasses.dataclass(frozen=True)
class Arm:
    """One variant of the loop: recurrence counts, mechanism, truncation, and widths beyond the grid's.

    r = 1 is the same model in every arm, so that one arm of a grid trains it for all.
    """

    name: str
    recurrences: tuple[int, ...]
    injection: str = "linear"
    lanes: int | None = None
    truncated: bool = False
    more_widths: Widths = dataclasses.field(default_factory=dict)

    def backprop_recurrences(self, recurrences: int) -> int | None:
        """k = r/2 rounded up where truncated (paper, appendix G.1); None, full backprop, otherwise."""
        return -(-recurrences // 2) if self.truncated and recurrences > 1 else None


@dataclasses.dataclass(frozen=True)
class Family:
    """Models of equal depth: `ends` + r · (looped_layers / r) + `ends` layers, or one such stack at r = 1."""

    ends: int
    looped_layers: int
    head_dim: int
    base: ModelConfig
    """What all its models share."""
    batch_size: int
    validation_sequences: int
    data: DataConfig
    optimizer: OptimizerConfig

    def model(self, width: int, recurrences: int, arm: Arm) -> ModelConfig:
        shape = {"d_model": width, "n_heads": width // self.head_dim, "recurrences": recurrences}
        if recurrences == 1:
            depth = 2 * self.ends + self.looped_layers
            return dataclasses.replace(
                self.base,
                **shape,
                prelude_layers=0,
                recurrent_layers=depth,
                coda_layers=0,
                injection="passthrough",
            )
        return dataclasses.replace(
            self.base,
            **shape,
            prelude_layers=self.ends,
            recurrent_layers=self.looped_layers // recurrences,
            coda_layers=self.ends,
            backprop_recurrences=arm.backprop_recurrences(recurrences),
            injection=arm.injection,
            lanes=arm.lanes,
        )

    def run(self, width: int, recurrences: int, arm: Arm, **fields) -> RunSpec:
        """One run of the family; `fields` are those of `RunSpec`."""
        values = {
            "model": self.model(width, recurrences, arm),
            "optimizer": self.optimizer,
            "data": self.data,
            "arm": arm.name,
            "batch_size": self.batch_size,
            "validation_sequences": self.validation_sequences,
        }
        return RunSpec(**(values | fields))


@dataclasses.dataclass(frozen=True)
class Grid:
    """Every width at every budget, for every recurrence count of every arm."""

    family: Family
    widths: Widths
    arms: tuple[Arm, ...]
    baseline_seeds: tuple[int, ...] = (0,)
    """Seeds of the r = 1 runs; the other runs have seed 0."""

    def specs(self) -> tuple[RunSpec, ...]:
        """The runs, by arm, budget, recurrences, width and seed."""
        return tuple(
            self.family.run(width, recurrences, arm, budget_flops=budget, seed=seed)
            for arm in self.arms
            for budget, own in self.widths.items()
            for recurrences in arm.recurrences
            for width in sorted({*own, *arm.more_widths.get(budget, ())})
            for seed in (self.baseline_seeds if recurrences == 1 else (0,))
        )


@dataclasses.dataclass(frozen=True)
class Preset:
    """A named set of runs: a grid, or whatever a function makes."""

    name: str
    summary: str
    source: Grid | Callable[[], tuple[RunSpec, ...]]

    def specs(self, seeds: Sequence[int] = (), budgets: Sequence[float] = ()) -> tuple[RunSpec, ...]:
        """Its runs: once per seed where `seeds` is given, and of these `budgets` alone where any are.

        Raises `UserError` for a budget that the preset does not have.
        """
        specs = self.source.specs() if isinstance(self.source, Grid) else self.source()
        known = sorted({spec.budget_flops for spec in specs if spec.budget_flops is not None})
        for budget in budgets:
            if budget not in known:
                has = ", ".join(f"{b:g}" for b in known) or "no budgets, but fixed numbers of steps"
                raise UserError(f"budgets has {budget:g}, which preset {self.name!r} lacks; it has {has}.")
        if budgets:
            specs = tuple(spec for spec in specs if spec.budget_flops in budgets)
        if seeds:
            specs = tuple(dataclasses.replace(spec, seed=seed) for seed in seeds for spec in specs)
        return tuple(dict.fromkeys(specs))


# --- On one's own machine: bytes of docstrings, heads of 16 at every width ----------------------------------

_LAPTOP_RATES = OptimizerConfig(
    matrix_lr=0.018,
    embedding_lr=0.04,
    unembedding_lr=0.066,
    norm_lr=0.022,
    per_pass_lr=0.04,
    polar_dtype="float32",
    reference_batch_tokens=512,
    reference_tokens=500_000,
    reference_width=32,
    data_exponent=-0.5,
)
"""Tuned at widths 16 to 64 and 0.1 to 1.5 M tokens, where the matrices' best rate falls faster than published."""

_QUICKSTART = Family(
    ends=1,
    looped_layers=4,
    head_dim=16,
    base=ModelConfig(sequence_length=64),
    batch_size=8,
    validation_sequences=2048,
    data=DataConfig(source="docstrings"),
    optimizer=_LAPTOP_RATES,
)
# Additive, because the published linear injection starts as [I | 0]: its loop does nothing until the weights of
# the state have grown, which takes a good part of a few thousand steps (ten layers, width 32, r = 4, 8e11 FLOPs:
# 1.953 nats per token with it, 1.917 with the additive one).
_QUICKSTART_ARMS = (
    Arm("full", recurrences=(1, 2, 4), injection="additive"),
    Arm("truncated", recurrences=(2, 4), injection="additive", truncated=True),
)
_QUICKSTART_WIDTHS: Widths = {8e10: (16, 32), 2.4e11: (16, 32, 48)}

# Ten layers allow r = 8, and r far apart says more about φ than r close together.  Smaller batches are slower for a
# FLOP and give more steps: at 932 of them losses are 10 to 34 mnat below those of 466 of twice the size.
_LAPTOP = dataclasses.replace(_QUICKSTART, looped_layers=8, batch_size=4)
_LAPTOP_ARMS = (
    Arm("full", recurrences=(1, 4, 8), injection="additive"),
    Arm("truncated", recurrences=(4, 8), injection="additive", truncated=True),
)
# Every run has a thousand steps or more.  Many budgets close together, rather than a few with more seeds, because
# cells (budget × r) are what the interval counts.
_LAPTOP_WIDTHS: Widths = {
    2.7e11: (16, 32),
    4e11: (16, 32),
    6e11: (16, 32),
    7.3e11: (16, 32),
    9e11: (16, 32, 48),
    1.1e12: (32, 48),
    1.35e12: (32, 48),
    2e12: (32, 48, 64),
}
# At width 32, ten layers and 2.5e11 FLOPs three seeds gave 2.094, 2.101 and 2.127 for r = 1, and 2.214, 2.215 and
# 2.218 for r = 4: the baseline, on which both arms lean, is the noisy part.
_LAPTOP_BASELINE_SEEDS = (0, 1)

# --- The published grids ------------------------------------------------------------------------------------

PAPER_SIZES: dict[float, tuple[int, ...]] = {
    4.64e17: (6, 8, 10, 12),
    1e18: (6, 8, 10, 12, 14),
    2.15e18: (8, 10, 12, 14, 16),
    4.64e18: (10, 12, 14, 16, 18, 20),
    1e19: (12, 16, 18, 20, 24),
    2.15e19: (18, 24, 28, 34),
}
"""Sizes s by budget in FLOPs: the one size table; each published arm is this and a few sizes more."""

_PAPER = Family(
    ends=2,
    looped_layers=16,
    head_dim=128,
    base=ModelConfig(vocab_size=32001, sequence_length=2048, compute_dtype="bfloat16"),
    batch_size=2**18 // 2048,
    validation_sequences=34_560,
    data=DataConfig(source="fineweb-edu"),
    optimizer=OptimizerConfig(),
)
_REFERENCE_SIZE = 10  # of the learning-rate sweep and the injection ablation


def paper_width(size: int) -> int:
    """d_model of a published size: 64 · size, rounded up to whole heads of 128."""
    return -(-64 * size // 128) * 128


def _widths(sizes: Mapping[float, Iterable[int]]) -> Widths:
    return {budget: tuple(map(paper_width, own)) for budget, own in sizes.items()}


VANILLA = Arm("vanilla", recurrences=(1, 2, 4, 8))
TRUNCATED = Arm(
    "truncated",
    recurrences=(2, 4, 8),
    truncated=True,
    more_widths=_widths({1e18: (16,), 2.15e18: (18,), 4.64e18: (22,), 1e19: (28,), 2.15e19: (40,)}),
)
HYPERCONNECT = Arm(
    "hyperconnect",
    recurrences=(2, 4, 8),
    injection="hyperconnect",
    lanes=2,
    more_widths=_widths({2.15e18: (18,)}),
)


def _paper(arm: Arm) -> Grid:
    return Grid(_PAPER, _widths(PAPER_SIZES), (arm,))


def _learning_rate_sweep() -> tuple[RunSpec, ...]:
    """Eight rates, ten tokens a usage-weighted parameter; the paper gives their range and the optimum."""
    from looped.counting import effective_params

    specs = []
    for recurrences in (1, 4):
        model = _PAPER.model(paper_width(_REFERENCE_SIZE), recurrences, VANILLA)
        steps = round(10 * effective_params(model) / (_PAPER.batch_size * model.sequence_length))
        for rate in (0.008, 0.010, 0.012, 0.013, 0.014, 0.016, 0.020, 0.024):
            optimizer = dataclasses.replace(_PAPER.optimizer, matrix_lr=rate)
            specs.append(_PAPER.run(model.d_model, recurrences, VANILLA, steps=steps, optimizer=optimizer))
    return tuple(specs)


def _injection_ablation() -> tuple[RunSpec, ...]:
    """Every mechanism at r = 4 and 1e18 FLOPs; each is an arm of its own."""
    width = paper_width(_REFERENCE_SIZE)
    arms = [Arm(name, (4,), name) for name in ("linear", "additive", "passthrough")]
    arms.append(Arm("hyperconnect", (4,), "hyperconnect", lanes=2))
    return tuple(_PAPER.run(width, 4, arm, budget_flops=1e18) for arm in arms)


def _flagship() -> tuple[RunSpec, ...]:
    """s = 34 on 47 B tokens in batches of 2^19, not looped and at r = 4."""
    batch_size = 2**19 // _PAPER.base.sequence_length
    steps = round(47e9 / 2**19)
    return tuple(_PAPER.run(paper_width(34), r, VANILLA, steps=steps, batch_size=batch_size) for r in (1, 4))


_PRESETS = (
    Preset(
        "quickstart",
        "a small iso-depth grid on bytes of docstrings, both arms: minutes on a laptop's CPU",
        Grid(_QUICKSTART, _QUICKSTART_WIDTHS, _QUICKSTART_ARMS),
    ),
    Preset(
        "laptop",
        "the same with more budgets and widths: about an hour on a laptop's CPU",
        Grid(_LAPTOP, _LAPTOP_WIDTHS, _LAPTOP_ARMS, _LAPTOP_BASELINE_SEEDS),
    ),
    Preset(
        "paper-vanilla", "the published grid: r = 1, 2, 4, 8 at six budgets, full backprop", _paper(VANILLA)
    ),
    Preset(
        "paper-truncated",
        "the published grid at r = 2, 4, 8 with backprop through r/2 passes",
        _paper(TRUNCATED),
    ),
    Preset(
        "paper-hyperconnect",
        "the published grid at r = 2, 4, 8 with two hyperconnected lanes",
        _paper(HYPERCONNECT),
    ),
    Preset(
        "paper-learning-rate",
        "the published sweep of the matrix learning rate at s = 10",
        _learning_rate_sweep,
    ),
    Preset(
        "paper-injection", "the published ablation of the injection at s = 10, r = 4", _injection_ablation
    ),
    Preset("paper-flagship", "the published pair beyond the grid: s = 34 on 47 B tokens", _flagship),
)
PRESETS: dict[str, Preset] = {preset.name: preset for preset in _PRESETS}


def preset(name: str) -> Preset:
    """Returns the preset called `name`, or the runs of a plan's file, *.json; `UserError` where there is neither."""
    if name.endswith(".json"):
        return _of_plan(epath.Path(name))
    if name not in PRESETS:
        raise UserError(f"preset {name!r} is unknown.{nearest(name, PRESETS)}")
    return PRESETS[name]


def _of_plan(path: epath.Path) -> Preset:
    """The runs that `looped plan --json` wrote, on a local disk or gs://."""
    remedy = "write one with `looped plan … --json`"
    data = read_json(path, remedy, "preset")
    try:
        found = [run["spec"] for run in data["runs"]]
    except (KeyError, TypeError) as error:
        raise UserError(f"preset {path}: not a plan ({first_line(error)}); {remedy}.") from None
    for spec in found:
        check_named(spec, f"preset {path}")
    try:
        specs = tuple(from_json(RunSpec, spec, f"runs[{i}].spec.") for i, spec in enumerate(found))
    except (ValueError, TypeError) as error:
        raise UserError(f"preset {path}: not a plan ({first_line(error)}); {remedy}.") from None
    return Preset(path.stem, f"the runs of {path}", lambda: specs)
