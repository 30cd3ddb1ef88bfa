"""The loop, and how the prelude's output and the running state enter each pass.

A mechanism is one class: what the state starts as, what goes into pass i, what the state becomes after it, and what the
coda reads.  Its own parameters are found and grouped by type, so a new mechanism needs no edit elsewhere:

* `PerPass` has a leading axis of passes, of which each pass uses its own slice (AdamW, rate `per_pass_lr`);
* any other `nnx.Param` of two or more dimensions is a matrix, or a stack of them (MuonH), and must not start at zero;
* any other `nnx.Param` is trained like a norm (AdamW, rate `norm_lr`).

In bfloat16 runs, matrices should multiply through `looped.products.product`, and other parameters in float32 before the
result is cast, or their derivatives are summed in bfloat16.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from looped.attention import rms_normalise
from looped.config import ModelConfig
from looped.errors import UserError, nearest
from looped.products import product

Array = jax.Array
State = Any  # a pytree of arrays; for most mechanisms one array [B, T, D]


class PerPass(nnx.Param):
    """A parameter with one slice for every pass, [recurrences, ...]."""


class Injection(nnx.Module):
    """How the prelude's output e [B, T, D] and the loop's state meet (paper, section 2.2); the base of every mechanism.

    A subclass gives at least `enter`.  `counts_as` says whether the mechanism's parameters belong to n_once or n_rec
    under the published convention.  `not_detachable` is the reason, where there is one, why truncated backprop would
    leave parameters without a gradient.  `lanes` is the number of lanes unless the configuration says another, None
    for a mechanism that has none.
    """

    counts_as: ClassVar[Literal["once", "recurrent"]] = "once"
    not_detachable: ClassVar[str | None] = None
    lanes: ClassVar[int | None] = None

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        del config, rngs

    @classmethod
    def validate(cls, config: ModelConfig) -> None:
        """Raises `UserError` where `config` makes no sense with this mechanism."""
        if config.truncated and cls.not_detachable:
            raise UserError(
                f"backprop_recurrences is {config.backprop_recurrences} with injection {config.injection!r} and"
                f" recurrences {config.recurrences}: {cls.not_detachable}; leave backprop_recurrences out."
            )
        if config.lanes is not None and cls.lanes is None:
            raise UserError(
                f"lanes is {config.lanes}, but injection {config.injection!r} has none; leave it out."
            )

    def multiplies_once(self, config: ModelConfig) -> int:
        """Multiply-adds a token in `prepare`."""
        del config
        return 0

    def multiplies_per_pass(self, config: ModelConfig) -> int:
        """Multiply-adds a token in one pass: every entry that the pass uses once, unless a subclass knows better."""
        total = 0
        for _, parameter in nnx.to_flat_state(nnx.state(self, nnx.Param)):
            size = parameter.get_value().size
            total += size // config.recurrences if isinstance(parameter, PerPass) else size
        return total

    def check_passes(self, config: ModelConfig, recurrences: int) -> None:
        """Raises `UserError` where `recurrences` passes at test time would want slices that were never trained."""
        per_pass = nnx.to_flat_state(nnx.state(self, PerPass))
        if recurrences > config.recurrences and len(per_pass):
            raise UserError(
                f"recurrences is {recurrences}, but injection {config.injection!r} has parameters for each of"
                f" {config.recurrences} passes and none for later ones; ask for at most {config.recurrences}."
            )

    def initial(self, e: Array) -> State:
        """The state before the first pass."""
        return e

    def prepare(self, e: Array) -> Array:
        """What of e enters the passes, [B, T, D]: here goes what would be the same in every pass."""
        return e

    def enter(self, state: State, e: Array, i: Array) -> Array:
        """The input [B, T, D] of pass i, counted from 0; e is what `prepare` made of it."""
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
        return product(jnp.concatenate([e, state], axis=-1), self.kernel.get_value())


class Additive(Injection):
    """u = s + e; the state starts at zero."""

    def initial(self, e):
        return jnp.zeros_like(e)

    def enter(self, state, e, i):
        return state + e


class Passthrough(Injection):
    """u = s; the state starts as e, which enters nowhere else."""

    not_detachable = (
        "e enters before the first pass alone, so prelude and embedding would never receive a gradient"
    )

    def enter(self, state, e, i):
        return state


class Hyperconnect(Injection):
    """N lanes with weights of their own in every pass (paper, section 5; arXiv:2409.19606).

    The state is N arrays [B, T, D], all e at first.  Pass i reads u = Σ_n α_in · lane_n and leaves
    lane_n ← Σ_m M_inm · lane_m + β_in · s; the coda reads Σ_n lane_n.  Cyclic start: α_i = e_{i mod N}, M_i = I,
    β_i = 1.
    """

    not_detachable = "the lane weights of a detached pass would never receive a gradient"
    lanes = 2

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        r, n = config.recurrences, config.lanes
        assert n is not None  # the configuration takes the default from this class
        self.alpha = PerPass(jnp.eye(n)[jnp.arange(r) % n])
        self.mixing = PerPass(jnp.tile(jnp.eye(n), (r, 1, 1)))
        self.beta = PerPass(jnp.ones((r, n)))
        self.count = n

    @classmethod
    def validate(cls, config):
        super().validate(config)
        if config.lanes is not None and config.lanes < 2:
            raise UserError(
                f"lanes is {config.lanes}; hyperconnections need at least 2 (with one, use injection 'linear')."
            )

    def multiplies_per_pass(self, config):
        return super().multiplies_per_pass(config) * config.d_model  # a scalar multiplies a whole lane

    def initial(self, e):
        return (e,) * self.count

    def enter(self, state, e, i):
        return _combine(self.alpha.get_value()[i], state)

    def leave(self, state, s, i):
        mixing, beta = self.mixing.get_value()[i], self.beta.get_value()[i]
        return tuple(_combine(jnp.append(mixing[n], beta[n]), (*state, s)) for n in range(self.count))

    def read(self, state):
        return sum(state[1:], start=state[0])


def _combine(weights: Array, lanes: tuple[Array, ...]) -> Array:
    """Σ_n weights[n] · lanes[n], [B, T, D], summed in float32."""
    total = weights[0] * lanes[0].astype(jnp.float32)
    for n in range(1, len(lanes)):
        total = total + weights[n] * lanes[n].astype(jnp.float32)
    return total.astype(lanes[0].dtype)


class Diagonal(Injection):
    """u = a ⊙ s + Δ ⊙ (ê B), 0 < a < 1: a diagonal linear system under the loop, stable by construction.

    The way of Parcae (arXiv:2604.12946): each feature decays at a rate λ > 0 over a step Δ > 0, discretised as
    a = exp(−Δλ), and ê, which is e with a root mean square of 1, is written through B over the same step.  Learned are
    log Δ, log λ [D] and B [D, D]; they start as Δ = λ = 1 and B = I.  The state starts at zero.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        d = config.d_model
        self.log_step = nnx.Param(jnp.zeros(d))
        self.log_rate = nnx.Param(jnp.zeros(d))
        self.write = nnx.Param(jnp.eye(d))
        self.epsilon = config.norm_epsilon

    def decay(self) -> Array:
        """a [D], in float32: the bounds on Δλ are those within which float32 still tells a from 0 and from 1."""
        exponent = self.log_step.get_value() + self.log_rate.get_value()
        return jnp.exp(-jnp.exp(jnp.clip(exponent, -15.0, 4.0)))

    def multiplies_once(self, config):
        return self.write.get_value().size + config.d_model

    def multiplies_per_pass(self, config):
        return config.d_model

    def initial(self, e):
        return jnp.zeros_like(e)

    def prepare(self, e):
        written = product(rms_normalise(e, self.epsilon), self.write.get_value()).astype(jnp.float32)
        return (jnp.exp(self.log_step.get_value()) * written).astype(e.dtype)

    def enter(self, state, e, i):
        kept = self.decay() * state.astype(jnp.float32)  # as bfloat16, a decay of 0.998 would be 1
        return kept.astype(e.dtype) + e


class PassEmbedding(Linear):
    """u = W [e; s] + p_i: as `linear`, with a learned vector that tells the passes apart, zero at first."""

    not_detachable = "the embedding of a detached pass would never receive a gradient"

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.embedding = PerPass(jnp.zeros((config.recurrences, config.d_model)))

    def enter(self, state, e, i):
        return (super().enter(state, e, i).astype(jnp.float32) + self.embedding.get_value()[i]).astype(
            e.dtype
        )


INJECTIONS: dict[str, type[Injection]] = {
    "linear": Linear,
    "additive": Additive,
    "passthrough": Passthrough,
    "hyperconnect": Hyperconnect,
    "diagonal": Diagonal,
    "pass-embedding": PassEmbedding,
}


def injection_class(name: str) -> type[Injection]:
    """Returns the mechanism of that name, or the `Injection` subclass at `module:Class`.

    A module is looked for where Python looks, then in the working directory.
    """
    if name in INJECTIONS:
        return INJECTIONS[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise UserError(
            f"injection is {name!r}, which is not known (nor of the form module:Class).{nearest(name, INJECTIONS)}"
        )
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever a user's module may raise
        raise UserError(
            f"injection is {name!r}, which cannot be imported: {type(error).__name__}: {error}."
        ) from error
    if not (isinstance(found, type) and issubclass(found, Injection)):
        raise UserError(f"injection is {name!r}, which is not a subclass of looped.recurrence.Injection.")
    if found.enter is Injection.enter:
        raise UserError(f"injection is {name!r}, which has no method enter(state, e, i); give it one.")
    return found


def loop(
    one_pass: Callable[[State, Array], State], state: State, recurrences: int, k: int, unroll: bool = False
) -> State:
    """Applies `one_pass(state, i)` for i = 0 … r − 1, backpropagating through the last k passes alone.

    Two scans: a switch inside one would give the same gradients but keep every pass's residuals.  Only the carried
    state is detached; what `one_pass` closes over (shared parameters, e) keeps its gradient through the last k passes.
    """

    def body(state, i):
        return one_pass(state, i), None

    def passes(state, start, stop):
        return jax.lax.scan(body, state, jnp.arange(start, stop), unroll=stop - start if unroll else 1)[0]

    if k < recurrences:
        state = jax.lax.stop_gradient(passes(state, 0, recurrences - k))
    return passes(state, recurrences - k, recurrences)
