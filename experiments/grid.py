"""What a grid is made of, run by run, before anything is trained."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from looped.config import RunSpec
from looped.counting import count, effective_params, flops_per_token, n_once_n_rec, planned_steps
from looped.optimizer import learning_rates


def row(spec: RunSpec) -> dict[str, Any]:
    """One run's counts and rates under the published names.

    `size` is the width in units of 64 (None between them), `tokens` are those of whole steps, `matrix_lr` is
    the rate at the first step and `adam_lr_scale` the factor that the width puts on every AdamW rate.
    """
    model, rates = spec.model, learning_rates(spec)
    groups, (n_once, n_rec), steps = count(model), n_once_n_rec(model), planned_steps(spec)
    return {
        "arm": spec.arm,
        "budget_flops": spec.budget_flops,
        "recurrences": model.recurrences,
        "size": None if model.d_model % 64 else model.d_model // 64,
        "d_model": model.d_model,
        "backprop_recurrences": model.k,
        "params_embed": groups.embed,
        "params_unembed": groups.unembed,
        "params_prelude": groups.prelude,
        "params_recurrent_block": groups.recurrent_block,
        "params_coda": groups.coda,
        "params_injection": groups.injection,
        "params_outer_norms": groups.outer_norms,
        "params_total": groups.total,
        "effective_params": effective_params(model),
        "flops_per_token": round(flops_per_token(model)),
        "steps": steps,
        "tokens": steps * spec.batch_tokens,
        "matrix_lr": rates["matrix"],
        "adam_lr_scale": rates["norm"] / spec.optimizer.norm_lr,
        "n_once": n_once,
        "n_rec": n_rec,
        "seed": spec.seed,
        "run_id": spec.run_id,
    }


def rows(specs: Iterable[RunSpec]) -> list[dict[str, Any]]:
    """`row` of every run, in order."""
    return [row(spec) for spec in specs]
