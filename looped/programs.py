"""The compiled functions of a model and its optimizer on a mesh."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from looped.attention_backends import choose_backend
from looped.config import ModelConfig, OptimizerConfig
from looped.execution import DEFAULT, Execution
from looped.jsonable import to_json
from looped.loss import chunked_cross_entropy_sum, chunks_for
from looped.model import LoopedLM, capped_logits
from looped.optimizer import GROUPS, check_norms, make_optimizer, smallest_norms
from looped.sharding import MeshShape, batch_sharding, make_mesh, state_shardings

Array = jax.Array


class TrainState(NamedTuple):
    params: nnx.State
    optimizer: Any
    step: Array


class Metrics(NamedTuple):
    """Of one step, on every process: loss in nats per token, norm of the gradients of all parameters."""

    loss: Array
    gradient_norm: Array


class Programs(NamedTuple):
    """The jitted functions of a model and optimizer on a mesh; rates and data are arguments, so that
    runs of every length share them.
    """

    init: Callable[[int], TrainState]
    step: Callable[[TrainState, Array, dict[str, np.float32]], tuple[TrainState, Metrics]]
    """The state is donated; tokens are [batch, T + 1]."""
    loss_sum: Callable[[nnx.State, Array, Array], tuple[Array, Array]]
    """Parameters, inputs and targets [batch, T] → (sum of losses in nats, targets that count)."""
    lower: Callable[[int], jax.stages.Lowered]
    """`step` for so many sequences, to be compiled for the mesh's devices, which need not be here."""
    abstract: TrainState
    """Shapes, types and shardings of the state."""
    mesh: Mesh


def build(
    model: ModelConfig,
    optimizer_config: OptimizerConfig,
    execution: Execution = DEFAULT,
    mesh: Mesh | None = None,
) -> Programs:
    """Builds the programs of `model`, on the first device unless a `mesh` is given; they compile when first called."""
    mesh = mesh or make_mesh(MeshShape(), jax.devices()[:1])
    platform = mesh.devices.flat[0].platform
    unroll = platform == "cpu" if execution.unroll is None else execution.unroll
    parts = mesh.shape["sequence"]
    attention = choose_backend(platform, model, execution.attention, parts)
    devices_with_tokens = mesh.size // mesh.shape["tensor"]  # the others of a tensor group have the same ones

    def make(key):
        return LoopedLM(model, nnx.Rngs(key), unroll=unroll, remat=execution.remat, attention=attention)

    graphdef, abstract_params = nnx.split(nnx.eval_shape(lambda: make(0)), nnx.Param)
    optimizer = make_optimizer(optimizer_config, abstract_params)

    def first_state(seed):
        params = nnx.split(make(jax.random.key(seed)), nnx.Param)[1]
        state = TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))
        return state, smallest_norms(params)

    def loss_sums(params, inputs, targets):
        lm = nnx.merge(graphdef, params)
        chunks = chunks_for(
            inputs.size // devices_with_tokens, inputs.shape[1] // parts, model.padded_vocab, platform
        )
        h = lm.hidden(inputs)
        return chunked_cross_entropy_sum(
            functools.partial(capped_logits, model), h, lm.unembedding.get_value(), targets, chunks, parts
        )

    def mean_loss(params, tokens):
        total, count = loss_sums(params, tokens[:, :-1], tokens[:, 1:])
        return total / count

    def step(state, tokens, rates):
        loss, gradients = _accumulated(mean_loss, state.params, tokens, execution.accumulate)
        updates, optimizer_state = optimizer.update(
            gradients, state.optimizer, state.params, learning_rates=rates
        )
        params: Any = optax.apply_updates(state.params, updates)
        return TrainState(params, optimizer_state, state.step + 1), Metrics(loss, optax.tree.norm(gradients))

    shapes = jax.eval_shape(first_state, 0)[0]
    shardings = state_shardings(shapes, mesh)
    whole, rows = NamedSharding(mesh, P()), batch_sharding(mesh)

    @contextlib.contextmanager
    def settings() -> Iterator[None]:
        with jax.set_mesh(mesh), jax.default_matmul_precision(execution.matmul_precision):
            yield

    def in_settings(jitted):
        @functools.wraps(jitted)
        def call(*arguments):
            with settings():
                return jitted(*arguments)

        return call

    init = in_settings(jax.jit(first_state, out_shardings=(shardings, whole)))
    jitted_step = jax.jit(
        step,
        in_shardings=(shardings, rows, whole),
        out_shardings=(shardings, whole),
        donate_argnums=0,
    )
    loss_sum = jax.jit(loss_sums, in_shardings=(shardings.params, rows, rows), out_shardings=whole)
    abstract = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )

    def checked_init(seed):
        state, norms = init(seed)
        check_norms(norms)
        return state

    def lower(batch_size):
        tokens = jax.ShapeDtypeStruct((batch_size, model.sequence_length + 1), jnp.int32, sharding=rows)
        rates = {group: jax.ShapeDtypeStruct((), jnp.float32, sharding=whole) for group in GROUPS}
        with settings():
            return jitted_step.lower(abstract, tokens, rates)

    return Programs(checked_init, in_settings(jitted_step), in_settings(loss_sum), lower, abstract, mesh)


def _accumulated(
    mean_loss: Callable[[Any, Array], Array], params: Any, tokens: Array, parts: int
) -> tuple[Array, Any]:
    """(loss, gradients) of tokens [batch, …] in equal parts, one after the other, each with rows of every device."""
    if parts == 1:
        return jax.value_and_grad(mean_loss)(params, tokens)
    split = tokens.reshape(-1, parts, tokens.shape[-1]).swapaxes(0, 1)
    zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))

    def body(sums, part):
        return jax.tree.map(jnp.add, sums, jax.value_and_grad(mean_loss)(params, part)), None

    sums = jax.lax.scan(body, zero, split)[0]
    return jax.tree.map(lambda x: x / parts, sums)


def describe(execution: Execution, mesh: Mesh, model: ModelConfig) -> dict[str, Any]:
    """What the record says of it: the options, with the mesh and the attention that were used."""
    chosen = choose_backend(mesh.devices.flat[0].platform, model, execution.attention, mesh.shape["sequence"])
    return to_json(execution) | {
        "mesh": {axis: int(size) for axis, size in mesh.shape.items()},
        "attention": chosen,
    }
