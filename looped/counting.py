"""Parameters by role, FLOPs per token, and what a FLOP budget buys: the one place where anything is counted.

Conventions are the published ones (paper, appendix on counting): the padded unembedding counts, the embedding look-up
does not, attention has no causal discount, a block's norms count and the three outer norms do not.
"""

from __future__ import annotations

import dataclasses
import functools

from flax import nnx

from looped.config import ModelConfig, RunSpec
from looped.errors import UserError
from looped.record import ParameterGroups, count_parameters
from looped.recurrence import injection_class

CONVENTION = "published"


def layer_parameters(config: ModelConfig) -> int:
    """Parameters of one transformer layer with its two norms."""
    d, kv = config.d_model, config.kv_heads * config.head_dim
    return 2 * d * d + 2 * d * kv + 2 * config.mlp_ratio * d * d + 2 * d


@functools.cache
def _injection_counts(config: ModelConfig) -> tuple[int, int, int]:
    """(parameters of the mechanism, multiply-adds a token before the loop, multiply-adds a token in one pass)."""
    module = nnx.eval_shape(lambda: injection_class(config.injection)(config, nnx.Rngs(0)))
    size = sum(p.get_value().size for _, p in nnx.to_flat_state(nnx.state(module, nnx.Param)))
    return size, module.multiplies_once(config), module.multiplies_per_pass(config)


def count(config: ModelConfig) -> ParameterGroups:
    """Returns the parameters of `config`'s model by role.

    Those of a mechanism that counts as recurrent are with the recurrent block, where every convention finds them.
    """
    layer, table = layer_parameters(config), config.padded_vocab * config.d_model
    injection = _injection_counts(config)[0]
    recurrent = injection if injection_class(config.injection).counts_as == "recurrent" else 0
    return ParameterGroups(
        embed=table,
        unembed=table,
        prelude=config.prelude_layers * layer,
        recurrent_block=config.recurrent_layers * layer + recurrent,
        coda=config.coda_layers * layer,
        injection=injection - recurrent,
        outer_norms=3 * config.d_model,
    )


def n_once_n_rec(config: ModelConfig) -> tuple[int, int]:
    """(n_once, n_rec) of the scaling law under the published convention (paper, section 3)."""
    return count_parameters(count(config), config.recurrences, CONVENTION)


def effective_params(config: ModelConfig) -> int:
    """Parameters weighted by use: prelude, coda and outer norms once, recurrent block and injection r times.

    As published: parameters of single passes, hyperconnection lanes, are weighted like the rest.
    """
    groups = count(config)
    per_pass = groups.recurrent_block + groups.injection
    return groups.prelude + groups.coda + groups.outer_norms + config.recurrences * per_pass


def flops_per_token(config: ModelConfig) -> float:
    """Training FLOPs a token: 6 a parameter used with gradient, 2 forward only; attention 12·d·T a layer, or 4·d·T."""
    layer = layer_parameters(config)
    attention = config.d_model * config.sequence_length
    passes, detached = config.k, config.recurrences - config.k
    layers = config.prelude_layers + config.coda_layers + passes * config.recurrent_layers
    _, once, injection = _injection_counts(config)
    once += config.padded_vocab * config.d_model
    with_gradient = 6 * (layers * layer + passes * injection + once) + 12 * attention * layers
    forward_only = detached * (
        2 * (config.recurrent_layers * layer + injection) + 4 * attention * config.recurrent_layers
    )
    return float(with_gradient + forward_only)


def target_tokens(spec: RunSpec) -> float:
    """Tokens the budget buys, before rounding to whole steps."""
    if spec.budget_flops is not None:
        return spec.budget_flops / flops_per_token(spec.model)
    assert spec.steps is not None
    return float(spec.steps * spec.batch_tokens)


def planned_steps(spec: RunSpec) -> int:
    """Optimizer steps: the budget over FLOPs a step, rounded.  `UserError` where that is none."""
    steps = spec.steps or round(target_tokens(spec) / spec.batch_tokens)
    if steps < 1:
        need = flops_per_token(spec.model) * spec.batch_tokens
        raise UserError(
            f"budget_flops is {spec.budget_flops:g}, less than one step of {need:g} FLOPs; raise it or lower batch_size"
            f" {spec.batch_size}."
        )
    return steps


def reference_tokens(model: ModelConfig) -> float:
    """Tokens at which the published matrix rate holds: ten a usage-weighted parameter of the reference model.

    That model has size 10 (width 640, 20 effective layers) and the architecture of `model`: looped (r = 4, 2 + 4 + 2
    layers, linear injection) or, at r = 1, not looped (20 layers).
    """
    if model.recurrences == 1:
        layers = {"prelude_layers": 0, "recurrent_layers": 20, "coda_layers": 0, "recurrences": 1}
    else:
        layers = {"prelude_layers": 2, "recurrent_layers": 4, "coda_layers": 2, "recurrences": 4}
    reference = dataclasses.replace(  # at once: halfway, the mechanism of `model` could refuse the shape
        model,
        **layers,
        injection="passthrough" if model.recurrences == 1 else "linear",
        d_model=640,
        n_heads=5,
        n_kv_heads=None,
        backprop_recurrences=None,
        lanes=None,
        mlp_ratio=4,
    )
    return 10.0 * effective_params(reference)
