"""Compiles the training step for a TPU slice that is not there, and says what the compiler said.

`python -m tpu_launch.compile_check` is the worker of `tpu_launch.check`: it reads a job in JSON a line and answers a
`Compiled` a line.  Its environment is `ENVIRONMENT`, which must be there before libtpu is loaded; what the compiler's
own code prints is on its standard error.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from looped.config import ModelConfig, OptimizerConfig
from looped.errors import UserError, first_line
from looped.jsonable import from_json, to_json
from looped.slices import GIB, Slice, slice_of

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

    from looped.execution import Execution
    from tpu_launch.hlo import Collective

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server to ask
    "TPU_STDERR_LOG_LEVEL": "1",  # warnings to standard error, where involuntary rematerialisation is told
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # the lock is for the chips, which are not here
}
INSTALL = "pip install -e '.[tpu-check]'"

Status = Literal["compiled", "too large", "refused", "failed"]


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of HBM on one device: what the program takes in and does not give back in place, works in, and is."""

    arguments: int
    outputs: int
    temporaries: int
    program: int

    @property
    def total(self) -> int:
        return self.arguments + self.outputs + self.temporaries + self.program


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one kind in a step: executions, and bytes of their results on one device."""

    kind: str
    dtype: str
    across_slices: bool
    overlaps: bool
    count: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds a step, as `tpu_launch.roofline.Roofline` has them."""

    step: float
    products: float
    memory: float
    links: float
    network: float
    exposed: float
    bound: str


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What came of compiling one job; the fields after `reason` are there as far as it got."""

    status: Status
    reason: str = ""
    mesh: dict[str, int] = dataclasses.field(default_factory=dict)
    hbm_bytes: int | None = None
    """A device's, needed: `memory.total`, or what the compiler said where it was too large."""
    memory: Memory | None = None
    trace_seconds: float | None = None
    compile_seconds: float | None = None
    traffic: tuple[Traffic, ...] = ()
    flops: float | None = None
    """Of matrix products a device and step, loops included; those of kernels are not seen."""
    xla_flops: float | None = None
    """The compiler's own count, loop bodies once."""
    moved_bytes: float | None = None
    """To and from HBM, a device and step."""
    times: Times | None = None
    unknown_loops: int = 0
    """Loops whose trip count was not found, so that they count once."""
    involuntary_remat: tuple[str, ...] = ()
    """Operations that the partitioner could only divide otherwise by making the whole array on every device."""

    def fits(self, slices: Slice) -> bool:
        return (
            self.status == "compiled"
            and self.hbm_bytes is not None
            and self.hbm_bytes <= slices.usable_hbm_per_device
        )


@dataclasses.dataclass(frozen=True)
class Job:
    """One program: the step of `model` for batches of `batch_size` sequences on `slices` slices of `topology`."""

    topology: str
    slices: int
    model: ModelConfig
    optimizer: OptimizerConfig
    batch_size: int
    execution: dict[str, Any]
    """`looped.execution.Execution` as JSON data, so that a job can be made without JAX."""


def require_libtpu() -> None:
    """Raises `UserError` unless the libtpu is here that belongs to this jax."""
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            f"libtpu, which has the TPU compiler, is not installed; {INSTALL} installs it (0.7 GB)."
        )
    from packaging.requirements import Requirement

    version, jax_version = importlib.metadata.version("libtpu"), importlib.metadata.version("jax")
    for text in importlib.metadata.requires("jax") or ():
        wanted = Requirement(text)
        if wanted.name == "libtpu" and not wanted.specifier.contains(version, prereleases=True):
            raise UserError(
                f"libtpu is {version}, and jax {jax_version} needs {wanted.specifier}; {INSTALL} installs the one that"
                " belongs to it."
            )


def topology_options(slices: Slice) -> dict[str, Any]:
    """What `get_topology_desc` must be told besides the name for the devices to be those of the slice."""
    options: dict[str, Any] = {}
    if slices.generation.name == "v4":
        options["chip_config_name"] = (
            "megacore"  # as everywhere since; by default libtpu shows v4's cores singly
        )
    if slices.generation.dimensions == 2 and slices.chips_per_host != 4:
        options["chips_per_host_bounds"] = [*slices.shape, 1]
    if slices.slices > 1:
        options["num_slices"] = slices.slices
    return options


def target_mesh(slices: Slice, model: ModelConfig, batch_size: int, execution: Execution) -> Mesh:
    """The mesh of a run on `slices`, of devices that are described and not there."""
    from jax.experimental.topologies import get_topology_desc

    from looped.sharding import choose_mesh, make_mesh

    shape = choose_mesh(
        model, batch_size, slices.devices, slices.slices, execution.mesh, execution.accumulate
    )
    described = get_topology_desc(slices.name, platform="tpu", **topology_options(slices))
    return make_mesh(shape, described.devices)


def compile_job(job: Job) -> Compiled:
    """Traces, compiles and reads one program; it says in its `status` what went wrong, and raises nothing."""
    import jax

    from looped.counting import flops_per_token
    from looped.execution import Execution
    from looped.programs import build

    jax.clear_caches()  # of the program before
    slices = slice_of(job.topology, job.slices)
    execution = from_json(Execution, job.execution, "execution.")
    began = time.monotonic()
    try:
        mesh = target_mesh(slices, job.model, job.batch_size, execution)
        lowered = build(job.model, job.optimizer, execution, mesh).lower(job.batch_size)
    except UserError as error:
        return Compiled("refused", str(error))
    traced = time.monotonic()
    so_far = Compiled(
        "failed",
        mesh={axis: int(size) for axis, size in mesh.shape.items()},
        trace_seconds=round(traced - began, 2),
    )
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        so_far = dataclasses.replace(so_far, compile_seconds=round(time.monotonic() - traced, 2))
        needed = hbm_needed(str(error))
        if needed is None:
            return dataclasses.replace(so_far, reason=first_line(error))
        reason = str(error).strip().splitlines()[0]
        return dataclasses.replace(so_far, status="too large", reason=reason, hbm_bytes=needed)
    so_far = dataclasses.replace(so_far, compile_seconds=round(time.monotonic() - traced, 2))
    model_flops = flops_per_token(job.model) * job.batch_size * job.model.sequence_length / slices.devices
    return _read(compiled, mesh, slices, model_flops, so_far)


def _read(
    compiled: jax.stages.Compiled, mesh: Mesh, slices: Slice, model_flops: float, so_far: Compiled
) -> Compiled:
    """Fills in what a compiled program says of itself.  `model_flops` are a device's.

    The estimate takes them where the program's are fewer: those of kernels are not in its text.
    """
    import numpy as np

    from tpu_launch import hlo
    from tpu_launch.hlo_cost import cost
    from tpu_launch.roofline import roofline

    module = hlo.parse(compiled.as_text() or "")
    sent, own_cost = hlo.collectives(module), cost(module)
    devices: list[Any] = list(mesh.devices.flat)
    first = min(getattr(device, "slice_index", 0) for device in devices)
    places = np.array([d.coords for d in devices if getattr(d, "slice_index", 0) == first])
    work = dataclasses.replace(own_cost, flops=max(own_cost.flops, model_flops))
    line = roofline(work, sent, slices, places[:, : slices.generation.dimensions])
    stats: Any = compiled.memory_analysis()
    memory = Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes - stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        program=stats.generated_code_size_in_bytes,
    )
    analysis: Any = compiled.cost_analysis() or {}
    return dataclasses.replace(
        so_far,
        status="compiled",
        hbm_bytes=memory.total,
        memory=memory,
        traffic=traffic(sent),
        flops=own_cost.flops,
        xla_flops=analysis.get("flops"),
        moved_bytes=own_cost.hbm_bytes,
        times=Times(
            step=line.step,
            products=line.products,
            memory=line.memory,
            links=line.links,
            network=line.network,
            exposed=line.exposed,
            bound=line.bound,
        ),
        unknown_loops=len(module.unknown_loops()),
    )


def traffic(collectives: Iterable[Collective]) -> tuple[Traffic, ...]:
    """The collectives added up by kind, largest first."""
    sums: dict[tuple[str, str, bool, bool], tuple[int, int]] = {}
    for c in collectives:
        key = (c.kind, c.dtype, c.across_slices, c.overlaps)
        count, size = sums.get(key, (0, 0))
        sums[key] = count + c.count, size + c.count * c.bytes
    return tuple(Traffic(*key, *sums[key]) for key in sorted(sums, key=lambda key: -sums[key][1]))


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": GIB, "T": 2**40}


def hbm_needed(message: str) -> int | None:
    """Bytes of HBM that a program needs by the compiler's refusal; None where `message` is another error."""
    found = re.search(
        r"\(([\d.]+)([KMGT]?)B?\) exceeds available HBM|Used ([\d.]+)([KMGT]?)B? of [\d.]+[KMGT]?B? hbm",
        message,
    )
    if found is None:
        return None
    number, unit = (found[1], found[2]) if found[1] else (found[3], found[4])
    return int(float(number) * _UNITS[unit])


def involuntary_rematerialisations(log: str) -> tuple[str, ...]:
    """Operations that the partitioner's warnings in `log` name, each once: name in the traced program, shape, name."""
    found = {}
    for line in log.splitlines():
        if "Involuntary full rematerialization" not in line:
            continue
        operation = re.search(r"HLO operation:? %?([\w.\-]+) = ([a-z]\w*\[[\d,]*\])?", line)
        op_name = re.search(r'op_name="([^"]*)"', line)
        name, shape = (operation[1], operation[2] or "") if operation else ("unnamed", "")
        found[f"{op_name[1] if op_name else 'unnamed'} {shape} ({name})"] = None
    return tuple(found)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)  # a compilation cannot be asked to stop


def main() -> int:
    """Serves jobs until the input ends, and ends at once when its parent does."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # so that nothing printed is taken for an answer
    for line in sys.stdin:
        result = compile_job(from_json(Job, json.loads(line)))
        print(json.dumps(to_json(result)), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
