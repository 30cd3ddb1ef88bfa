"""MuonH for matrices, AdamW groups for the rest, and how their rates transfer (paper, appendix; arXiv:2603.28743).

Rates are given at update time (`learning_rates=`), so that one compiled step serves runs of every length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.core import Tracer

from looped.config import OptimizerConfig, RunSpec
from looped.counting import reference_tokens, target_tokens
from looped.errors import UserError
from looped.parameters import STACKS, parameter_name, parameter_path
from looped.recurrence import PerPass
from looped.sharding import Axes, MeshShape, constrain, parameter_spec, spread_axes

Array = jax.Array
GROUPS = ("matrix", "embedding", "unembedding", "norm", "per_pass")

POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
"""Coefficients (a, b, c) of X ← a·X + (b·A + c·A²)·X, A = X·Xᵀ (arXiv:2505.16932)."""


def _norm(x: Array) -> Array:
    """Frobenius norm of each matrix, [..., 1, 1]; scaled first, so that no square under- or overflows."""
    largest = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True)
    safe = jnp.where(largest > 0, largest, 1)
    return safe * jnp.sqrt(jnp.sum(jnp.square(x / safe), axis=(-2, -1), keepdims=True)) * (largest > 0)


def polar_factor(g: Array, dtype: Any = jnp.float32) -> Array:
    """Five Polar Express steps towards the polar factor of each matrix of g [..., m, n], iterated in `dtype`.

    The first iterate is g / (1.02·n + 1e-6), n = ‖g‖, as published.  A gradient so small that the 1e-6 would swallow it
    would lose its direction; for n below 1e-5 it therefore becomes (1000·n)³, and a gradient and the same times 1e-9
    have one direction.  Zero stays zero.
    """
    tall = g.shape[-2] > g.shape[-1]
    x = _turned(_start(g, dtype), tall)
    for coefficients in POLAR_EXPRESS:
        x = _polar_step(x, *coefficients)
    return _turned(x, tall).astype(g.dtype)


def _start(g: Array, dtype: Any) -> Array:
    """The first iterate of each matrix."""
    n = _norm(g)
    return (g / jnp.where(n > 0, 1.02 * n + jnp.minimum((1e3 * n) ** 3, 1e-6), 1)).astype(dtype)


def _polar_step(x: Array, a: Any, b: Any, c: Any) -> Array:
    A = x @ x.mT
    return a * x + (b * A + c * (A @ A)) @ x


def polar_factors(gradients: Any, dtype: Any = jnp.float32) -> Any:
    """`polar_factor` of every matrix in a tree of [..., m, n].

    On a mesh, matrices of one shape are iterated together, each whole on a device and different ones on different
    devices: divided as parameters are, every one of 15 products would need all of it, and each device would repeat it.
    """
    if jax.sharding.get_abstract_mesh().size <= 1:
        return jax.tree.map(lambda g: polar_factor(g, dtype), gradients)
    paths_and_leaves, tree = jax.tree_util.tree_flatten_with_path(gradients)
    leaves = [g for _, g in paths_and_leaves]
    ways = [_way(parameter_path(path), g.shape) for path, g in paths_and_leaves]
    alike: dict[tuple[Any, ...], list[int]] = {}
    for i, (g, way) in enumerate(zip(leaves, ways, strict=True)):
        alike.setdefault((*sorted(g.shape[-2:]), way.divided), []).append(i)
    for (*_, divided), members in alike.items():
        wide = [_turned(_start(leaves[i], dtype), ways[i].turn) for i in members]
        wide = [x.reshape(-1, *x.shape[-2:]) for x in wide]
        done = _iterate_spread(jnp.concatenate(wide), divided)
        ends = np.cumsum([len(w) for w in wide])[:-1]
        for i, x in zip(members, jnp.split(done, ends), strict=True):
            g = leaves[i]
            leaves[i] = _turned(x, ways[i].turn).reshape(g.shape).astype(g.dtype)
    return jax.tree.unflatten(tree, leaves)


class _Way(NamedTuple):
    """How matrices come to be [m, n], m ≤ n: whether they are turned, and how they then lie divided over fsdp."""

    turn: bool
    divided: Axes


def _way(path: tuple[str, ...], shape: tuple[int, ...]) -> _Way:
    """Square ones are turned where that makes their rows divided, as those of others of their shape are."""
    mesh = MeshShape(**dict(jax.sharding.get_abstract_mesh().shape))
    spec = tuple(parameter_spec(path, shape, mesh))[-2:]
    rows, columns = ("fsdp" if axis == "fsdp" else None for axis in spec)
    m, n = shape[-2:]
    turn = m > n or (m == n and rows is None)
    return _Way(turn, (columns, rows) if turn else (rows, columns))


def _turned(x: Array, turn: bool) -> Array:
    return x.mT if turn else x


def _iterate_spread(x: Array, divided: Axes) -> Array:
    """The five steps from x [matrices, m, n], m ≤ n, spread over the devices, with zeros added to go round.

    Before and after, the matrices lie as `divided` says, so that the way there and back is an all-to-all.  The steps
    are scanned: large products take a TPU's compiler seconds each.
    """
    matrices = len(x)
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    axes = spread_axes(matrices)
    parts = math.prod(sizes[axis] for axis in axes)
    x = constrain(jnp.pad(x, ((0, -matrices % parts), (0, 0), (0, 0))), None, *divided)
    x = constrain(x, axes, None, None)
    coefficients = jnp.asarray(POLAR_EXPRESS, x.dtype)
    x = jax.lax.scan(
        lambda x, abc: (constrain(_polar_step(x, *abc), axes, None, None), None), x, coefficients
    )[0]
    return constrain(x, None, *divided)[:matrices]


def scale_by_polar(momentum: float = 0.95, dtype: Any = jnp.float32) -> optax.GradientTransformation:
    """Nesterov momentum as a running mean, without bias correction, then the polar factor of each matrix."""

    def init(params):
        return optax.TraceState(jax.tree.map(jnp.zeros_like, params))

    def update(updates, state, params=None):
        del params
        trace = jax.tree.map(lambda m, g: momentum * m + (1 - momentum) * g, state.trace, updates)
        ahead = jax.tree.map(lambda m, g: momentum * m + (1 - momentum) * g, trace, updates)
        return polar_factors(ahead, dtype), optax.TraceState(trace)

    return optax.GradientTransformation(init, update)


class SphereState(NamedTuple):
    """Frobenius norms of the initial matrices, [..., 1, 1] each."""

    radius: Any


def hold_sphere(group: str = "matrix") -> optax.GradientTransformationExtraArgs:
    """Steps by rate × radius along the update's direction and returns to the sphere of the initial norm.

    Of each matrix: c = ‖W₀‖, V = W − rate·c·u/‖u‖, W ← c·V/‖V‖.  A zero update leaves W where it is.
    """

    def init(params):
        return SphereState(jax.tree_util.tree_map_with_path(_radius, params))

    def update(updates, state, params=None, **extra):
        rate = extra["learning_rates"][group]

        def step(u, c, w):
            size = _norm(u)
            moved = w - rate * c * u / jnp.where(size > 0, size, 1)
            return c * moved / _norm(moved) - w

        return jax.tree.map(step, updates, state.radius, params), state

    return optax.GradientTransformationExtraArgs(init, update)


def _radius(path, w: Array) -> Array:
    """‖W₀‖ of each matrix, checked unless traced."""
    radius = _norm(w)
    if not isinstance(radius, Tracer):
        check_norms({parameter_name(path): jnp.min(radius)})
    return radius


def smallest_norms(params: nnx.State) -> dict[str, Array]:
    """By name, the least norm of a matrix in each parameter of the group `matrix`: for `check_norms`, out of `jit`."""
    groups = groups_by_name(params)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    named = {parameter_name(path): w for path, w in leaves}
    return {name: jnp.min(_norm(w)) for name, w in named.items() if groups[name] == "matrix"}


def check_norms(norms: Mapping[str, Array]) -> None:
    """Raises `UserError` that names a parameter with a matrix of norm zero."""
    for name, norm in norms.items():
        if not float(norm) > 0:
            raise UserError(
                f"parameter {name} has a matrix of norm zero; MuonH holds the initial norm, so initialise it to"
                " something else."
            )


def muonh(
    momentum: float = 0.95, dtype: Any = jnp.float32, group: str = "matrix"
) -> optax.GradientTransformationExtraArgs:
    """MuonH (arXiv:2603.28743): `update` wants the parameters and `learning_rates`, a dict from `group` to the rate.

    Every matrix of a leaf [..., m, n] is one by itself; ‖W₀‖ of each is part of the state.
    """
    return optax.chain(scale_by_polar(momentum, dtype), hold_sphere(group))


def scale_by_rate(group: str) -> optax.GradientTransformationExtraArgs:
    """Multiplies updates by −learning_rates[group], given at update time."""

    def update(updates, state, params=None, **extra):
        del params
        return jax.tree.map(lambda u: -extra["learning_rates"][group] * u, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def parameter_groups(params: nnx.State) -> nnx.State:
    """Returns the group (one of `GROUPS`) of every parameter, in a tree of the same shape.

    By type and place, never by a list of names: tables by their attribute, `PerPass` by type, anything of two or more
    dimensions once the stacking axis is set aside is a matrix or a stack of them, the rest goes with the norms.
    """

    def group(path, variable):
        name = str(path[0])
        if name in ("embedding", "unembedding"):
            return name
        if isinstance(variable, PerPass):
            return "per_pass"
        stacked = name in STACKS
        return "matrix" if variable.get_value().ndim - stacked >= 2 else "norm"

    flat = nnx.to_flat_state(params)
    return nnx.from_flat_state([(path, variable.replace(group(path, variable))) for path, variable in flat])


def groups_by_name(params: nnx.State) -> dict[str, str]:
    """Returns the group (one of `GROUPS`) of every parameter by its name, `recurrent_block.query.kernel`."""
    groups = nnx.to_flat_state(parameter_groups(params))
    return {parameter_name(path): variable.get_value() for path, variable in groups}


def make_optimizer(config: OptimizerConfig, params: nnx.State) -> optax.GradientTransformationExtraArgs:
    """MuonH and AdamW joined by group; `update` wants `learning_rates`, a dict from group to rate."""
    adam = optax.scale_by_adam(b1=config.adam_b1, b2=config.adam_b2, eps=config.adam_eps)
    transforms: dict[Any, Any] = {g: optax.chain(adam, scale_by_rate(g)) for g in GROUPS}
    transforms["matrix"] = muonh(config.momentum, jnp.dtype(config.polar_dtype))
    return optax.partition(transforms, parameter_groups(params))


def learning_rates(spec: RunSpec) -> dict[str, float]:
    """Initial rate of each group, carried from the reference point to this run's batch, tokens and width."""
    c = spec.optimizer
    batch = (spec.batch_tokens / c.reference_batch_tokens) ** c.batch_exponent
    reference = c.reference_tokens or reference_tokens(spec.model)
    data = (target_tokens(spec) / reference) ** c.data_exponent
    width = (spec.model.d_model / c.reference_width) ** c.width_exponent
    return {
        "matrix": c.matrix_lr * batch * data,
        "embedding": c.embedding_lr * batch * width,
        "unembedding": c.unembedding_lr * batch * width,
        "norm": c.norm_lr * width,
        "per_pass": c.per_pass_lr * width,
    }


def decay(step: int, steps: int, final_fraction: float) -> float:
    """The schedule: 1 at step 0, falling linearly to `final_fraction` at `steps` and staying there, never negative."""
    return 1 - (1 - final_fraction) * min(step / steps, 1.0)
