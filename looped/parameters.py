"""Where a parameter stands in the model, by name."""

from __future__ import annotations

from typing import Any

import jax

STACKS = ("prelude", "recurrent_block", "coda")
"""Stages whose parameters have a leading axis of layers."""


def parameter_path(path: tuple[Any, ...]) -> tuple[str, ...]:
    """The names on the way to a leaf of a parameter tree, as `jax.tree_util` or `nnx` give it."""
    keys = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
    if path and isinstance(path[-1], jax.tree_util.GetAttrKey):  # of an nnx.Variable, into the array it holds
        keys.pop()
    return tuple(keys)


def parameter_name(path: tuple[Any, ...]) -> str:
    """That path with dots: `recurrent_block.query.kernel`."""
    return ".".join(parameter_path(path))
