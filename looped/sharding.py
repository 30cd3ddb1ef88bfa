"""The mesh, and the one table from parameter to partition.

Four axes, outermost first.  `replica`: whole copies, as between slices, whose gradients meet over the data centre's
network.  `fsdp`: the batch is divided and so is every matrix, which is gathered where it is used.  `sequence`: the
tokens of a sequence are divided (queries each, keys and values gathered), for slices with more devices than a batch
has sequences.  `tensor`: heads and the MLP's hidden features are divided.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from looped.config import ModelConfig, RunSpec
from looped.errors import UserError
from looped.execution import AXES, Execution, MeshAxes
from looped.parameters import STACKS, parameter_path

Array = jax.Array
BATCH = ("replica", "fsdp")

Axes = tuple[str | None, str | None]
"""Of the mesh, along which a matrix's two axes are divided."""

RULES: dict[str, Axes] = {
    "query": ("fsdp", "tensor"),
    "key": ("fsdp", "tensor"),
    "value": ("fsdp", "tensor"),
    "attention_out": ("tensor", "fsdp"),
    "mlp_in": ("fsdp", "tensor"),
    "mlp_out": ("tensor", "fsdp"),
    "embedding": (None, "fsdp"),
    "unembedding": (None, "fsdp"),
}
"""How the last two axes [in, out] of a module's matrix are divided; a table's are [vocabulary, D].

Matrices of any other name are divided as `OTHERS`, or along the second axis where fsdp divides that alone; vectors are
whole.
"""
OTHERS: Axes = ("fsdp", None)


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Devices along each axis; their product is the number of devices."""

    replica: int = 1
    fsdp: int = 1
    sequence: int = 1
    tensor: int = 1

    @property
    def devices(self) -> int:
        return math.prod(dataclasses.astuple(self))

    @property
    def batch(self) -> int:
        """Parts that a batch is divided into."""
        return self.replica * self.fsdp

    def __str__(self) -> str:
        return " × ".join(f"{axis} {getattr(self, axis)}" for axis in AXES)

    def check(self, model: ModelConfig, batch_size: int, accumulate: int = 1) -> None:
        """Raises `UserError` where `model`, or `batch_size` sequences in `accumulate` parts, do not divide."""
        divided = (
            ("sequence", "sequence_length", model.sequence_length),
            ("tensor", "n_heads", model.n_heads),
            ("tensor", "n_kv_heads", model.kv_heads),
            ("fsdp", "d_model", model.d_model),
        )
        for axis, field, value in divided:
            if value % (parts := getattr(self, axis)):
                raise UserError(
                    f"mesh axis {axis} is {parts}, which does not divide {field} {value}; {axis} may be one of"
                    f" {', '.join(map(str, _divisors(value)))}."
                )
        if batch_size % accumulate or batch_size // accumulate % self.batch:
            parts = f", in {accumulate} accumulated parts" if accumulate > 1 else ""
            raise UserError(
                f"batch_size is {batch_size}{parts}, which mesh axes replica × fsdp = {self.batch} do not divide;"
                f" make it a multiple of {self.batch * accumulate}, or these axes smaller and sequence larger."
            )


def choose_mesh(
    model: ModelConfig,
    batch_size: int,
    devices: int,
    slices: int = 1,
    wanted: MeshAxes | None = None,
    accumulate: int = 1,
) -> MeshShape:
    """A mesh of `devices` devices for `model`, with the axes of `wanted` as they are.

    Of those that divide everything it takes the one that divides the sequence least, then the one with the most fsdp;
    unless wanted, tensor is 1: slices of a TPU pod have more devices than a small model has heads.  Raises
    `UserError` where there is none.
    """
    wanted = wanted or MeshAxes()
    tensor = wanted.tensor or 1
    refused: UserError | None = None
    for sequence in _sizes(wanted.sequence, devices):
        for fsdp in reversed(_sizes(wanted.fsdp, devices)):
            replica = wanted.replica or max(1, devices // (sequence * fsdp * tensor))
            shape = MeshShape(replica, fsdp, sequence, tensor)
            if shape.devices != devices or replica % slices:
                continue
            try:
                shape.check(model, batch_size, accumulate)
            except UserError as error:
                refused = refused or error
            else:
                return shape
    named = ", ".join(f"{axis} {size}" for axis in AXES if (size := getattr(wanted, axis)))
    if refused is None:
        within = f" in {slices} slices, of which replica is a multiple" if slices > 1 else ""
        raise UserError(
            f"mesh axes {named or 'are free'}: no mesh of {devices} devices{within} has them; make their product divide"
            f" {devices}, or leave some out."
        )
    raise UserError(f"no mesh of {devices} devices{' with ' + named if named else ''} fits: {refused}")


def _sizes(wanted: int | None, devices: int) -> list[int]:
    return [wanted] if wanted else _divisors(devices)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def count_slices(devices: Sequence[Any]) -> int:
    """TPU slices that `devices` are of; 1 for any other kind."""
    return len({getattr(device, "slice_index", 0) for device in devices})


def make_mesh(shape: MeshShape, devices: Sequence[Any] | None = None) -> Mesh:
    """Arranges `devices` (all there are) so that neighbours in the mesh are so in the slice.

    Its axes are of type Auto: the compiler places what is not said here.  Raises `UserError` unless `shape` uses every
    device.
    """
    devices = list(jax.devices() if devices is None else devices)
    if shape.devices != len(devices):
        raise UserError(
            f"the mesh {shape} is for {shape.devices} devices and there are {len(devices)}; make the product"
            f" {len(devices)}."
        )
    sizes, slices = dataclasses.astuple(shape), count_slices(devices)
    if slices > 1:
        if shape.replica % slices:
            raise UserError(
                f"mesh axis replica is {shape.replica} on {slices} slices; make it a multiple of {slices}."
            )
        within = (shape.replica // slices, *sizes[1:])
        return Mesh(mesh_utils.create_hybrid_device_mesh(within, (slices, 1, 1, 1), devices), AXES)
    if devices[0].platform == "tpu":
        return Mesh(mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True), AXES)
    return Mesh(np.array(devices).reshape(sizes), AXES)


def mesh_for(spec: RunSpec, execution: Execution) -> Mesh:
    """The mesh of a run on the devices there are; `UserError` where the run does not divide over them.

    On CPU several devices are faked ones, for trying a mesh: without several processes and without an axis named, the
    run takes the first alone.
    """
    devices = jax.devices()
    asked = execution.mesh != MeshAxes() or jax.process_count() > 1
    if devices[0].platform == "cpu" and not asked:
        devices = devices[:1]
    slices = count_slices(devices)
    shape = choose_mesh(
        spec.model, spec.batch_size, len(devices), slices, execution.mesh, execution.accumulate
    )
    return make_mesh(shape, devices)


def constrain(x: Array, *axes: Any) -> Array:
    """`x` divided along `axes`, one entry a dimension, in the mesh that is set; `x` itself where none is."""
    if jax.sharding.get_abstract_mesh().size <= 1:
        return x
    return jax.lax.with_sharding_constraint(x, P(*axes))


def constrain_kept(x: Array, kept: Axes) -> Array:
    """The matrix x divided as `kept`, as far as the mesh that is set divides it."""
    if jax.sharding.get_abstract_mesh().size <= 1:
        return x
    return constrain(x, *_fitting(kept, x.shape, dict(jax.sharding.get_abstract_mesh().shape)))


def _fitting(axes: Axes, shape: Sequence[int], sizes: Mapping[str, int]) -> Axes:
    rows, columns = (a if a and n % sizes[a] == 0 else None for a, n in zip(axes, shape, strict=True))
    return rows, columns


def in_use(kept: Axes) -> Axes:
    """How a matrix that is `kept` divided so lies while it is used, gathered along fsdp."""
    return (None if kept[0] == "fsdp" else kept[0], None if kept[1] == "fsdp" else kept[1])


def spread_axes(matrices: int) -> tuple[str, ...]:
    """Axes of the mesh that is set over which so many matrices are spread, one or more a device, fsdp first.

    As few axes as give each matrix a device of its own: along others the work would be on padding.
    """
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    axes: tuple[str, ...] = ()
    for axis in ("fsdp", "sequence", "tensor", "replica"):
        if math.prod(sizes[a] for a in axes) < matrices and sizes.get(axis, 1) > 1:
            axes = (*axes, axis)
    return axes


def parameter_spec(path: tuple[str, ...], shape: tuple[int, ...], mesh: MeshShape) -> P:
    """How the parameter called `path` (`looped.parameters.parameter_path`), of `shape`, is divided."""
    if len(shape) < 2 + (path[0] in STACKS):
        return P()
    *_, owner = (name for name in path if name != "kernel")
    size = shape[-2:]
    rule = RULES.get(owner) or (OTHERS if size[0] % mesh.fsdp == 0 else (None, "fsdp"))
    return P(*[None] * (len(shape) - 2), *_fitting(rule, size, dataclasses.asdict(mesh)))


def state_shardings(state: Any, mesh: Mesh) -> Any:
    """NamedShardings of a training state, or of a tree of its shapes: moments go as the parameters they belong to."""
    shape = MeshShape(*(mesh.shape[axis] for axis in AXES))
    own = set(state.params)

    def sharding(path, leaf):
        names = parameter_path(path)
        first = next((i for i, name in enumerate(names) if name in own), None)
        spec = P() if first is None else parameter_spec(names[first:], leaf.shape, shape)
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding, state)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """How [batch, …] arrays of tokens lie: rows divided, each whole."""
    return NamedSharding(mesh, P(BATCH))


def local_rows(mesh: Mesh, batch_size: int) -> slice:
    """The rows of a batch that this process's devices need, from the first to the last of them."""
    bounds = list(_row_bounds(mesh, batch_size))
    return slice(min(b[0] for b in bounds), max(b[1] for b in bounds))


def _row_bounds(mesh: Mesh, batch_size: int) -> Iterator[tuple[int, int]]:
    for place in batch_sharding(mesh).addressable_devices_indices_map((batch_size,)).values():
        assert place is not None
        yield place[0].indices(batch_size)[:2]


def global_batch(rows: np.ndarray, mesh: Mesh, batch_size: int) -> Array:
    """The batch [batch_size, …] of which this process holds `rows` (those of `local_rows`), divided along the batch."""
    first = local_rows(mesh, batch_size).start

    def part(place: Any) -> np.ndarray:
        start, stop, _ = place[0].indices(batch_size)
        return rows[start - first : stop - first]

    return jax.make_array_from_callback((batch_size, *rows.shape[1:]), batch_sharding(mesh), part)
