"""What a run is: frozen configurations, validated at construction, with a stable id hashed from their content."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import reprlib
import sys
from collections.abc import Mapping
from typing import Any, Literal

from looped.errors import UserError
from looped.jsonable import to_json

LARGEST = 2**31 - 1
"""Of a size, a number of steps or a seed: on devices they have 32 bits."""


def at_least(config: object, low: float, *names: str, high: float = sys.float_info.max) -> None:
    """Raises `UserError` for the first of these of its fields that is set and not within `low` and `high`."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not low <= value <= high:  # nor is NaN
            bound = f"most {high:g}" if value > high else f"least {low}"
            raise UserError(f"{name} is {reprlib.repr(value)}; it must be at {bound}.")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A looped transformer: prelude, recurrent block applied `recurrences` times, coda (paper, section 2).

    An unlooped model is prelude 0, coda 0, r = 1, `passthrough`.
    """

    vocab_size: int = 257
    """Ids of the tokenizer; 257 is bytes with a beginning-of-sequence id."""
    sequence_length: int = 128
    """Tokens a sequence, T."""
    d_model: int = 64
    """Width, D."""
    n_heads: int = 2
    """Query heads; D / n_heads is the head size."""
    n_kv_heads: int | None = None
    """Key and value heads (grouped-query attention); None is one for each query head."""
    prelude_layers: int = 1
    """Layers before the loop."""
    recurrent_layers: int = 2
    """Layers of the recurrent block."""
    coda_layers: int = 1
    """Layers after the loop."""
    recurrences: int = 2
    """Passes through the recurrent block, r."""
    backprop_recurrences: int | None = None
    """Backpropagate through the last k passes alone; None is full backprop."""
    injection: str = "linear"
    """How e and the state meet: a name of looped.recurrence.INJECTIONS, or module:Class."""
    lanes: int | None = None
    """Lanes of the state; None is the mechanism's own number."""
    mlp_ratio: int = 4
    """The MLP's hidden width over D."""
    rope_base: float = 10000.0
    """Base of the rotary frequencies."""
    norm_epsilon: float = 1e-6
    """ε of every RMSNorm."""
    logit_cap: float = 15.0
    """c of c · tanh(logits / c)."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of activations and products; parameters and reductions are float32."""

    def __post_init__(self):
        at_least(
            self,
            1,
            "vocab_size",
            "sequence_length",
            "d_model",
            "n_heads",
            "n_kv_heads",
            "mlp_ratio",
            high=LARGEST,
        )
        at_least(self, 1, "recurrent_layers", "recurrences", "backprop_recurrences", high=LARGEST)
        at_least(self, 0, "prelude_layers", "coda_layers", high=LARGEST)
        at_least(self, 0, "norm_epsilon")
        at_least(self, 1, "rope_base")
        at_least(self, 1e-3, "logit_cap")
        if self.d_model % (2 * self.n_heads):
            raise UserError(
                f"d_model is {self.d_model} and n_heads {self.n_heads}; rotary heads need d_model divisible by"
                f" 2·n_heads, such as {2 * self.n_heads * max(1, round(self.d_model / (2 * self.n_heads)))}."
            )
        if self.n_heads % self.kv_heads:
            raise UserError(f"n_kv_heads is {self.kv_heads}; it must divide n_heads {self.n_heads}.")
        if self.backprop_recurrences is not None and self.backprop_recurrences > self.recurrences:
            raise UserError(
                f"backprop_recurrences is {self.backprop_recurrences}; it must not exceed recurrences"
                f" {self.recurrences} (leave it out for full backprop)."
            )
        from looped.recurrence import injection_class

        mechanism = injection_class(self.injection)
        if self.lanes is None:
            object.__setattr__(self, "lanes", mechanism.lanes)  # said or not, it is one run
        mechanism.validate(self)

    @classmethod
    def from_reference(cls, fields: Mapping[str, Any]) -> ModelConfig:
        """Builds the configuration from the published code's fields (`looped.interop.config_from_reference`)."""
        from looped.interop import config_from_reference

        return config_from_reference(fields)

    @property
    def kv_heads(self) -> int:
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding tables: the vocabulary padded to a multiple of 64."""
        return -(-self.vocab_size // 64) * 64

    @property
    def k(self) -> int:
        """Passes that are backpropagated through."""
        return self.recurrences if self.backprop_recurrences is None else self.backprop_recurrences

    @property
    def truncated(self) -> bool:
        return self.k < self.recurrences


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """MuonH on matrices, AdamW on the rest, and how their rates transfer over batch, tokens and width.

    Rates are those at the reference point: `reference_batch_tokens` tokens a step, `reference_tokens` tokens in all
    and width `reference_width`.  `reference_tokens` None is the published rule: ten tokens a usage-weighted parameter
    of the reference model (`looped.counting.reference_tokens`).  Defaults are the published ones (paper, appendix).
    """

    matrix_lr: float = 0.014
    """Rate of matrices (MuonH), as a part of their norm."""
    embedding_lr: float = 0.3
    """Rate of the embedding (AdamW)."""
    unembedding_lr: float = 0.004
    """Rate of the unembedding (AdamW)."""
    norm_lr: float = 0.005
    """Rate of norms and other vectors (AdamW)."""
    per_pass_lr: float = 0.01
    """Rate of parameters that each pass has for itself, such as lanes (AdamW)."""
    momentum: float = 0.95
    """Nesterov momentum of MuonH."""
    adam_b1: float = 0.8
    """β₁ of AdamW."""
    adam_b2: float = 0.95
    """β₂ of AdamW."""
    adam_eps: float = 1e-10
    """ε of AdamW."""
    polar_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the Polar Express iterations."""
    final_lr_fraction: float = 0.1
    """Part of the rate that the linear decay ends on."""
    reference_batch_tokens: int = 2**18
    """Tokens a step at the reference point."""
    reference_tokens: int | None = None
    """Tokens in all at the reference point; None is the published rule."""
    reference_width: int = 640
    """Width at the reference point."""
    batch_exponent: float = 0.558
    """Exponent of batch over reference, for matrices and both tables."""
    data_exponent: float = -0.32
    """Exponent of tokens over reference, for matrices."""
    width_exponent: float = -0.5
    """Exponent of width over reference, for AdamW."""

    def __post_init__(self):
        at_least(self, 0, "matrix_lr", "embedding_lr", "unembedding_lr", "norm_lr", "per_pass_lr", "adam_eps")
        at_least(self, 1, "reference_batch_tokens", "reference_tokens", high=1e18)
        at_least(self, 1, "reference_width", high=LARGEST)
        at_least(self, -4, "batch_exponent", "data_exponent", "width_exponent", high=4)
        for name in ("momentum", "adam_b1", "adam_b2", "final_lr_fraction"):
            value = getattr(self, name)
            if not 0 <= value <= 1 or (name != "final_lr_fraction" and value == 1):
                raise UserError(f"{name} is {value}; it must lie in [0, 1).")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Which tokens: a prepared data set's name or folder.  `docstrings` is made on this machine, with no network."""

    source: str = "docstrings"
    """A known corpus, or the folder of a prepared data set."""
    shuffle_seed: int = 0
    """Added to the run's seed for the order of the data."""

    def __post_init__(self):
        at_least(self, 0, "shuffle_seed", high=LARGEST)


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """One run.  Exactly one of `budget_flops` (training FLOPs, `looped.counting`) and `steps` says how long it is.

    `batch_size` is in sequences; `validation_sequences` is the size of the fixed set the final loss is measured on.
    """

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig = DataConfig()
    arm: str = "full"
    """Which variant of the loop the run belongs to; runs of one arm are fitted together."""
    budget_flops: float | None = None
    """Training FLOPs; gives the number of steps."""
    steps: int | None = None
    """Steps, in place of a budget."""
    batch_size: int = 16
    """Sequences a step."""
    validation_sequences: int = 4096
    """Size of the fixed set that the final loss is measured on."""
    seed: int = 0
    """Of the initial weights and the order of the data."""

    def __post_init__(self):
        if (self.budget_flops is None) == (self.steps is None):
            raise UserError(
                f"budget_flops is {self.budget_flops} and steps {self.steps}; give exactly one: how long is the run?"
            )
        at_least(self, 1, "budget_flops")
        at_least(self, 1, "steps", "batch_size", "validation_sequences", high=LARGEST)
        at_least(self, 0, "seed", high=LARGEST)
        if self.budget_flops is not None:
            object.__setattr__(self, "budget_flops", float(self.budget_flops))  # 10**12 and 1e12 are one run

    @property
    def batch_tokens(self) -> int:
        return self.batch_size * self.model.sequence_length

    @property
    def run_id(self) -> str:
        """Twelve hex digits of the content's SHA-256: equal content, equal id, on any machine."""
        canonical = json.dumps(to_json(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]
