"""Models of the published PyTorch code of arXiv:2604.21106, in and out: configurations and state dicts.

The published names and layouts: matrices [out, in] where ours are [in, out], one entry a layer where ours are stacked,
the embedding tables [padded vocabulary, D] in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from looped.config import ModelConfig
from looped.errors import UserError, nearest
from looped.jsonable import from_json
from looped.model import LoopedLM
from looped.parameters import parameter_path

_FIELDS = {
    "sequence_len": "sequence_length",
    "vocab_size": "vocab_size",
    "n_head": "n_heads",
    "n_kv_head": "n_kv_heads",
    "n_embd": "d_model",
    "n_prelude": "prelude_layers",
    "n_recur_block": "recurrent_layers",
    "n_coda": "coda_layers",
    "num_recur": "recurrences",
    "bptt_k": "backprop_recurrences",
    "input_injection": "injection",
    "num_lanes": "lanes",
    "logit_softcap": "logit_cap",
}
"""From the published configuration to `ModelConfig`; of these, `_OPTIONAL` may be absent."""
_OPTIONAL = {"n_kv_head", "bptt_k", "num_lanes", "logit_softcap"}
_UNUSED = {"size"}  # of which the width is made, and which changes nothing else
_INJECTIONS = {
    "inject_init_prelude": "linear",
    "additive": "additive",
    "passthrough": "passthrough",
    "hyperconnect": "hyperconnect",
}

_WHOLE: dict[tuple[str, ...], str] = {
    ("embedding",): "transformer.wte.weight",
    ("unembedding",): "lm_head.weight",
    ("embedding_norm", "scale"): "norm_emb.weight",
    ("pass_norm", "scale"): "norm_recur.weight",
    ("final_norm", "scale"): "norm_final.weight",
    ("injection", "kernel"): "inject.weight",
    ("injection", "alpha"): "lane_alpha",
    ("injection", "mixing"): "lane_mixing",
    ("injection", "beta"): "lane_beta",
}
_STAGES = {"prelude": "prelude", "recurrent_block": "recur", "coda": "coda"}
_LAYER: dict[tuple[str, ...], str] = {
    ("attention_norm", "scale"): "n1.weight",
    ("query", "kernel"): "attn.c_q.weight",
    ("key", "kernel"): "attn.c_k.weight",
    ("value", "kernel"): "attn.c_v.weight",
    ("attention_out", "kernel"): "attn.c_proj.weight",
    ("mlp_norm", "scale"): "n3.weight",
    ("mlp_in", "kernel"): "mlp.c_fc.weight",
    ("mlp_out", "kernel"): "mlp.c_proj.weight",
}


def config_from_reference(fields: Mapping[str, Any]) -> ModelConfig:
    """Builds a `ModelConfig` from the fields of the published one (`model_config` of a checkpoint's meta JSON).

    `bptt_k` absent, None or not below `num_recur` is full backprop, as the published code runs it; `num_lanes` counts
    with hyperconnections alone.  `UserError` for a field that is missing, unknown or of the wrong type.
    """
    known = set(_FIELDS) | _UNUSED
    for name in fields:
        if name not in known:
            raise UserError(f"{name}: not a field of the published configuration.{nearest(name, known)}")
    for name in _FIELDS:
        if name not in fields and name not in _OPTIONAL:
            raise UserError(f"{name}: missing; the published configuration has it.")
    values = {ours: fields[theirs] for theirs, ours in _FIELDS.items() if theirs in fields}
    injection = values["injection"]
    if injection not in _INJECTIONS:
        raise UserError(
            f"input_injection is {injection!r}, which is unknown.{nearest(str(injection), _INJECTIONS)}"
        )
    values["injection"] = _INJECTIONS[injection]
    if injection != "hyperconnect":
        values.pop("lanes", None)
    if values.get("n_kv_heads") == values["n_heads"]:
        del values["n_kv_heads"]
    config = from_json(ModelConfig, values | {"backprop_recurrences": None})
    k = values.get("backprop_recurrences")
    return from_json(ModelConfig, values) if k is not None and k < config.recurrences else config


def config_to_reference(config: ModelConfig) -> dict[str, Any]:
    """Returns the published code's fields.  `UserError` for a model that the published code cannot express."""
    for name, value in {"mlp_ratio": 4, "rope_base": 10000.0, "norm_epsilon": 1e-6}.items():
        if getattr(config, name) != value:
            raise UserError(f"{name} is {getattr(config, name)}; the published code has {value} alone.")
    names = {ours: theirs for theirs, ours in _INJECTIONS.items()}
    if config.injection not in names:
        raise UserError(f"injection is {config.injection!r}, which the published code does not have.")
    fields = {theirs: getattr(config, ours) for theirs, ours in _FIELDS.items()}
    fields |= {"n_kv_head": config.kv_heads, "bptt_k": config.k, "input_injection": names[config.injection]}
    if config.lanes is None:
        del fields["num_lanes"]
    return fields


def to_reference(model: LoopedLM | Any) -> dict[str, np.ndarray]:
    """Returns the arrays by their published state-dict names, matrices [out, in], each in its own dtype.

    Takes a model, its parameters, their gradient or any other tree of that shape.  `UserError` where a parameter has no
    published counterpart.
    """
    if isinstance(model, LoopedLM):
        config_to_reference(model.config)
        model = nnx.state(model, nnx.Param)
    arrays: dict[str, np.ndarray] = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(model):
        path, value = parameter_path(keys), np.asarray(leaf)
        if path in _WHOLE:
            arrays[_WHOLE[path]] = value.T if path[-1] == "kernel" else value
        elif path[0] in _STAGES and path[1:] in _LAYER:
            for i, layer in enumerate(value):
                name = f"transformer.{_STAGES[path[0]]}.{i}.{_LAYER[path[1:]]}"
                arrays[name] = layer.T if layer.ndim == 2 else layer
        else:
            raise UserError(f"parameter {'.'.join(path)} has no counterpart in the published code.")
    return arrays


def from_reference(config: ModelConfig, arrays: Mapping[str, Any], *, unroll: bool = False) -> LoopedLM:
    """Builds the model of `config` with the published `arrays`, which are by state-dict name, matrices [out, in].

    Parameters become float32 (bfloat16 exactly).  `UserError` that names what is missing, left over or misshapen.
    """
    config_to_reference(config)
    given = {
        name.removeprefix("_orig_mod."): array for name, array in arrays.items()
    }  # of a compiled PyTorch model
    model = nnx.eval_shape(lambda: LoopedLM(config, nnx.Rngs(0), unroll=unroll))
    graphdef, abstract, rest = nnx.split(model, nnx.Param, ...)

    def take(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name not in given:
            raise UserError(f"{name}: missing from the published arrays, of which {len(arrays)} were given.")
        array = np.asarray(given.pop(name))
        if array.shape != shape:
            raise UserError(f"{name} has shape {array.shape}; the configuration wants {shape}.")
        return array.astype(np.float32)

    filled = []
    for path, variable in nnx.to_flat_state(abstract):
        names, shape = tuple(map(str, path)), variable.get_value().shape
        if names in _WHOLE:
            matrix = names[-1] == "kernel"
            value = take(_WHOLE[names], shape[::-1] if matrix else shape)
            value = value.T if matrix else value
        else:
            stage, layer, matrix = _STAGES[names[0]], _LAYER[names[1:]], len(shape) == 3
            each = [
                take(f"transformer.{stage}.{i}.{layer}", shape[:0:-1] if matrix else shape[1:])
                for i in range(shape[0])
            ]
            value = np.stack([a.T if matrix else a for a in each])
        filled.append((path, variable.replace(jnp.asarray(value))))
    if given:
        raise UserError(f"{min(given)}: not a parameter of the configuration ({len(given)} such arrays).")
    return nnx.merge(graphdef, nnx.from_flat_state(filled), rest)
