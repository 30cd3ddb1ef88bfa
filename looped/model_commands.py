"""Sub-commands on a model that need not have been trained."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import tyro

from looped.config import ModelConfig


@dataclasses.dataclass
class Parameters:
    """List a model's parameters by name, with the optimizer group that trains each.

    The groups: matrix (MuonH); embedding, unembedding, norm and per_pass (AdamW, each at a rate of its own).
    """

    model: Annotated[ModelConfig, tyro.conf.arg(name="")]

    def run(self) -> int:
        from flax import nnx

        from looped.counting import count, flops_per_token, n_once_n_rec
        from looped.model import LoopedLM
        from looped.optimizer import groups_by_name

        params = nnx.state(nnx.eval_shape(lambda: LoopedLM(self.model, nnx.Rngs(0))), nnx.Param)
        groups = groups_by_name(params)
        width = max(map(len, groups))
        for (name, group), (_, parameter) in zip(groups.items(), nnx.to_flat_state(params), strict=True):
            shape = " × ".join(map(str, parameter.get_value().shape))
            print(f"{name:<{width}}  {group:<11}  {shape}")
        n_once, n_rec = n_once_n_rec(self.model)
        print(
            f"\n{count(self.model).total:,} parameters, n_once {n_once:,}, n_rec {n_rec:,};"
            f" {flops_per_token(self.model):,.0f} FLOPs a token of training."
        )
        return 0
