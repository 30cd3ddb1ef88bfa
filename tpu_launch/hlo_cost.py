"""What a compiled program multiplies and moves in a step, loops included: FLOPs of products, bytes of HBM."""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np

from tpu_launch.hlo import COLLECTIVES, Array, Computation, Instruction, Module

_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call",
    "after-all", "partition-id", "replica-id", "opt-barrier", "domain",
}  # fmt: skip
"""What moves nothing itself."""
_FREE_CALLS = ("AllocateBuffer", "ConcatBitcast")
"""Custom calls of a TPU's program that move nothing."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one device, in one step."""

    flops: float
    """Of matrix products and convolutions, what is computed again included; kernels (custom calls) are not."""
    hbm_bytes: float
    """Read and written, as far as the text tells: an array passed on in the chip's own memory does not count."""


def cost(module: Module, once: bool = False) -> Cost:
    """The cost of a step; with `once`, loop bodies count once, as XLA's `cost_analysis` counts them."""
    fused = {
        name
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode == "fusion"
        for name in instruction.called.get("calls", ())
    }
    flops = moved = 0.0
    for computation, times in module.running():
        for instruction in computation.instructions.values():
            n = 1 if once else times
            if instruction.opcode in ("convolution", "dot"):
                flops += n * product_flops(computation, instruction)
            if computation.name not in fused:
                moved += n * _moved(module, computation, instruction)
    return Cost(flops, moved)


def product_flops(where: Computation, instruction: Instruction) -> float:
    """2 FLOPs a multiply-add of a dot or convolution; positions in the padding or between dilated ones are none."""
    operands = [where.instructions[name].arrays[0] for name in instruction.operands[:2]]
    if instruction.opcode == "dot":
        axes = re.findall(r"\d+", instruction.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or "")
        return 2.0 * instruction.arrays[0].size * math.prod(operands[0].dims[int(axis)] for axis in axes)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if labels is None:
        return 0.0
    left, right, out = (dict(zip(text, array.dims, strict=True)) for text, array in
                        zip(labels.groups(), (*operands, instruction.arrays[0]), strict=True))  # fmt: skip
    total = 2.0 * left["b"] * out["f"] * right["i"]
    total /= int(instruction.attribute(r"batch_group_count=(\d+)") or 1)
    window = instruction.attribute(r"window=\{([^}]*)\}") or ""
    for axis in (label for label in out if label.isdigit()):
        total *= _positions(window, int(axis), left[axis], right[axis], out[axis])
    return total


def _positions(window: str, axis: int, n_in: int, n_kernel: int, n_out: int) -> int:
    """How many (output, kernel) pairs along one spatial axis meet an element of the input."""

    def setting(name: str, default: str) -> str:
        found = re.search(rf"\b{name}=([\d_x\-]+)", window)
        return found[1].split("x")[axis] if found else default

    low = int(setting("pad", "0_0").split("_")[0])
    spread = int(setting("lhs_dilate", "1"))
    place = (
        np.arange(n_out)[:, None] * int(setting("stride", "1"))
        + np.arange(n_kernel) * int(setting("rhs_dilate", "1"))
        - low
    )
    return int(np.sum((place >= 0) & (place <= (n_in - 1) * spread) & (place % spread == 0)))


def _slow(arrays: tuple[Array, ...]) -> int:
    return sum(array.bytes for array in arrays if not array.fast)


def _moved(module: Module, where: Computation, instruction: Instruction) -> int:
    """Bytes that one instruction outside fusions reads from HBM and writes to it."""
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith(("-done", "-update")):
        return 0
    if opcode == "custom-call" and instruction.attribute(r'custom_call_target="(\w+)"') in _FREE_CALLS:
        return 0
    if opcode == "copy-start":  # (target, source, context)
        return _slow(instruction.arrays[:2])
    if opcode == "slice-start":  # ((source), slice, context)
        source, part = instruction.arrays[:2]
        return part.bytes * (2 - source.fast - part.fast)
    operands = [
        where.instructions[name].arrays for name in instruction.operands if name in where.instructions
    ]
    if opcode.endswith("-start") and opcode.removesuffix("-start") in COLLECTIVES:
        return _slow(instruction.arrays)
    if opcode in ("dynamic-slice", "gather", "slice"):
        source = operands[0][0]
        return _slow(instruction.arrays) + (0 if source.fast else instruction.bytes)
    if opcode == "dynamic-update-slice":
        return _slow(operands[1]) + (0 if instruction.arrays[0].fast else sum(a.bytes for a in operands[1]))
    if opcode == "fusion":
        inner = module.computations[instruction.called["calls"][0]]
        read = sum(
            _read_of_parameter(inner, i, arrays) for i, arrays in enumerate(operands) if not arrays[0].fast
        )
        return read + _written_by(inner, instruction)
    return sum(map(_slow, operands)) + _slow(instruction.arrays)


def _read_of_parameter(inner: Computation, number: int, arrays: tuple[Array, ...]) -> int:
    """What a fusion reads of one operand: of one that it only slices, the slices; of one written in place, nothing."""
    name = next(
        (i.name for i in inner.instructions.values() if i.opcode == "parameter" and i.literal == str(number)),
        None,
    )
    users = [i for i in inner.instructions.values() if name in i.operands]
    if users and all(u.opcode in ("dynamic-slice", "gather", "dynamic-update-slice") and u.operands[0] == name
                     for u in users):  # fmt: skip
        whole = sum(array.bytes for array in arrays)
        return min(whole, sum(u.bytes for u in users if u.opcode != "dynamic-update-slice"))
    return sum(array.bytes for array in arrays)


def _written_by(inner: Computation, fusion: Instruction) -> int:
    """What a fusion writes: of an array updated in place, the update."""
    root = inner.root
    ends = [inner.instructions[name] for name in root.operands] if root.opcode == "tuple" else [root]
    if len(ends) != len(fusion.arrays):
        return _slow(fusion.arrays)
    total = 0
    for end, array in zip(ends, fusion.arrays, strict=True):
        while end.opcode in ("bitcast", "copy") and end.operands:
            end = inner.instructions[end.operands[0]]
        in_place = end.opcode == "dynamic-update-slice"
        size = inner.instructions[end.operands[1]].bytes if in_place else array.bytes
        total += 0 if array.fast else size
    return total
