"""The loop, and how the prelude's output and the running state enter each pass.

A mechanism is one class: what the state starts as, what goes into pass i, what the state becomes after it, and what the
coda reads.  Its own parameters are found and grouped by type, so a new mechanism needs no edit elsewhere:

* `nnx.Param` of two dimensions is a matrix, used in every pass (MuonH);
* `PerPass` has a leading axis of passes, of which each pass uses its own slice (AdamW, rate `per_pass_lr`);
* any other `nnx.Param` is trained like a norm.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from looped.config import ModelConfig
from looped.errors import UserError, nearest

Array = jax.Array
State = Any  # a pytree of arrays; for most mechanisms one array [B, T, D]


class PerPass(nnx.Param):
    """A parameter with one slice for every pass, [recurrences, ...]."""


class Injection(nnx.Module):
    """How the prelude's output e [B, T, D] and the loop's state meet (paper, section 2.2).

    `counts_as` says whether the mechanism's parameters belong to n_once or n_rec under the published convention.
    `detachable` is False, with a reason, where truncated backprop would leave parameters without a gradient.
    """

    counts_as: ClassVar[Literal["once", "recurrent"]] = "once"
    not_detachable: ClassVar[str | None] = None

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        del config, rngs

    @classmethod
    def validate(cls, config: ModelConfig) -> None:
        """Raises `UserError` where `config` makes no sense with this mechanism."""
        if config.truncated and cls.not_detachable:
            raise UserError(
                f"backprop_recurrences is {config.backprop_recurrences} with injection {config.injection!r} and recurrences"
                f" {config.recurrences}: {cls.not_detachable}; leave backprop_recurrences out."
            )
        if config.lanes is not None and not cls.uses_lanes:
            raise UserError(f"lanes is {config.lanes}, but injection {config.injection!r} has none; leave it out.")

    uses_lanes: ClassVar[bool] = False

    def multiplies_per_pass(self, config: ModelConfig) -> int:
        """Multiply-adds a token in one pass: every matrix entry once; a per-pass scalar once for each of D features."""
        total = 0
        for _, parameter in nnx.to_flat_state(nnx.state(self, nnx.Param)):
            size = parameter.get_value().size
            total += size // config.recurrences * config.d_model if isinstance(parameter, PerPass) else size
        return total

    def initial(self, e: Array) -> State:
        """The state before the first pass."""
        return e

    def enter(self, state: State, e: Array, i: Array) -> Array:
        """The input [B, T, D] of pass i, counted from 0."""
        raise NotImplementedError

    def leave(self, state: State, s: Array, i: Array) -> State:
        """The state after pass i, whose normalised output is s [B, T, D]."""
        del state, i
        return s

    def read(self, state: State) -> Array:
        """What the coda reads, [B, T, D]."""
        return state


class Linear(Injection):
    """u = W [e; s], W [2 D, D] initialised so that u = e; the state starts as e."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        d = config.d_model
        self.kernel = nnx.Param(jnp.concatenate([jnp.eye(d), jnp.zeros((d, d))], axis=0))

    def enter(self, state, e, i):
        return jnp.concatenate([e, state], axis=-1) @ self.kernel.get_value().astype(e.dtype)


class Additive(Injection):
    """u = s + e; the state starts at zero."""

    def initial(self, e):
        return jnp.zeros_like(e)

    def enter(self, state, e, i):
        return state + e


class Passthrough(Injection):
    """u = s; the state starts as e, which enters nowhere else."""

    not_detachable = "e enters before the first pass alone, so prelude and embedding would never receive a gradient"

    def enter(self, state, e, i):
        return state


INJECTIONS: dict[str, type[Injection]] = {
    "linear": Linear,
    "additive": Additive,
    "passthrough": Passthrough,
}


def injection_class(name: str) -> type[Injection]:
    """Returns the mechanism of that name, or the `Injection` subclass at `module:Class`."""
    if name in INJECTIONS:
        return INJECTIONS[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise UserError(f"injection is {name!r}, which is not known (nor of the form module:Class).{nearest(name, INJECTIONS)}")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"injection is {name!r}, which cannot be imported: {error}.") from None
    if not (isinstance(found, type) and issubclass(found, Injection)):
        raise UserError(f"injection is {name!r}, which is not a subclass of looped.recurrence.Injection.")
    return found


def loop(
    one_pass: Callable[[State, Array], State], state: State, recurrences: int, k: int, unroll: bool = False
) -> State:
    """Applies `one_pass(state, i)` for i = 0 … r − 1, backpropagating through the last k passes alone.

    Two scans: a switch inside one would give the same gradients but keep every pass's residuals.  Only the carried state
    is detached; what `one_pass` closes over (shared parameters, e) keeps its gradient through the last k passes.
    """

    def body(state, i):
        return one_pass(state, i), None

    def passes(state, start, stop):
        return jax.lax.scan(body, state, jnp.arange(start, stop), unroll=stop - start if unroll else 1)[0]

    if k < recurrences:
        state = jax.lax.stop_gradient(passes(state, 0, recurrences - k))
    return passes(state, recurrences - k, recurrences)
