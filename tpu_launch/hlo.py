"""Reads the text of a compiled program (HLO): what it sends between devices, multiplies and moves, loops included.

XLA's own `cost_analysis` counts the body of a loop once, and its collectives not at all.  Here every instruction counts
as often as it runs: a loop's body by its trip count, which is said (`known_trip_count`) or read off its condition.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator

import numpy as np

_BYTES = {
    "pred": 1,
    "token": 0,
    **{f"{kind}{bits}": max(bits // 8, 1) for kind in "su" for bits in (2, 4, 8, 16, 32, 64)},
    "f16": 2,
    "bf16": 2,
    "f32": 4,
    "f64": 8,
    "c64": 8,
    "c128": 16,
}
COLLECTIVES = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<= ]*)\](\{[^}]*\})?")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|branch_computations|\w+_computation)=(\{[^}]*\}|%?[\w.\-]+)"
)
_NAME = re.compile(r"%?([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a shape.  `fast`: it lies in a memory space of its own (`S(1)`: on the chip, not in HBM)."""

    dtype: str
    dims: tuple[int, ...]
    fast: bool

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        return self.size * _BYTES.get(self.dtype, 1)  # the many kinds of f8 have one byte


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line.  `arrays` are those of its result, a tuple's one after the other."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    literal: str
    """What stands between the parentheses: a constant's value, a parameter's number."""
    attributes: str
    is_root: bool

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.arrays)

    def attribute(self, pattern: str) -> str | None:
        """The first group of `pattern` in the attributes."""
        found = re.search(pattern, self.attributes)
        return found and found[1]

    @functools.cached_property
    def called(self) -> dict[str, tuple[str, ...]]:
        """Computations by the attribute that names them."""
        # Not in strings: the settings of backends in there have a grammar of their own.
        plain = self.attributes.partition("backend_config=")[0]
        return {key: tuple(_NAME.findall(names)) for key, names in _CALLED.findall(plain)}


@dataclasses.dataclass(frozen=True)
class Computation:
    name: str
    instructions: dict[str, Instruction]

    @functools.cached_property
    def root(self) -> Instruction:
        return next(i for i in self.instructions.values() if i.is_root)


@dataclasses.dataclass(frozen=True)
class Module:
    """A program.  Computations stand after those that they call, as in the text."""

    computations: dict[str, Computation]
    entry: str
    devices: int

    @functools.cached_property
    def executions(self) -> dict[str, int]:
        """How often each computation runs; each branch of a conditional counts as run."""
        times = dict.fromkeys(self.computations, 0)
        times[self.entry] = 1
        for computation in reversed(self.computations.values()):
            n = times[computation.name]
            for instruction in computation.instructions.values() if n else ():
                trips = self.trips(computation, instruction) or 1 if instruction.opcode == "while" else 1
                for key, names in instruction.called.items():
                    if key == "to_apply" and instruction.opcode not in ("call", "async-start"):
                        continue  # what a reduction does to two numbers
                    for name in names:
                        if name in times:
                            times[name] += n * (trips if key == "body" else 1)
        return times

    def running(self) -> Iterator[tuple[Computation, int]]:
        """Computations that run at all, with how often."""
        for name, computation in self.computations.items():
            if self.executions[name]:
                yield computation, self.executions[name]

    def trips(self, computation: Computation, loop: Instruction) -> int | None:
        """How often the body of `loop`, a `while` in `computation`, runs; None where the text does not tell."""
        known = loop.attribute(r'known_trip_count"?:?=?\{"?n"?:"?(\d+)')
        if known:
            return int(known)
        condition = self.computations[loop.called["condition"][0]]
        test = condition.root
        if test.opcode == "fusion":  # of the comparison alone
            inner = self.computations[test.called["calls"][0]]
            ends = [self._fused_operand(condition, test, inner, name) for name in inner.root.operands]
            test = inner.root
        else:
            ends = [condition.instructions.get(name) for name in test.operands]
        direction = test.attribute(r"direction=(\w+)")
        values = [self._start_value(computation, loop, end) for end in ends]
        known_values = [value for value in values if value is not None]
        if len(known_values) != 2 or direction not in ("LT", "LE", "GT", "GE"):
            return None
        low, high = known_values if direction in ("LT", "LE") else reversed(known_values)
        return max(high - low + (direction in ("LE", "GE")), 0)

    @staticmethod
    def _fused_operand(
        outer: Computation, fusion: Instruction, inner: Computation, name: str
    ) -> Instruction | None:
        inside = inner.instructions[name]
        if inside.opcode != "parameter":
            return inside
        return outer.instructions.get(fusion.operands[int(inside.literal)])

    @staticmethod
    def _start_value(computation: Computation, loop: Instruction, end: Instruction | None) -> int | None:
        """The value of one side of a loop's comparison when the loop begins."""
        if end is not None and end.opcode == "get-tuple-element":  # carried: what the loop begins with
            first = computation.instructions.get(loop.operands[0])
            if first is None or first.opcode != "tuple":
                return None
            end = computation.instructions.get(first.operands[int(end.attribute(r"index=(\d+)") or 0)])
            while end is not None and end.opcode in ("copy", "bitcast", "convert"):
                end = computation.instructions.get(end.operands[0])
        if end is None or end.opcode != "constant" or not re.fullmatch(r"-?\d+", end.literal):
            return None
        return int(end.literal)

    def unknown_loops(self) -> list[str]:
        """Names of loops whose trip count the text does not tell, so that their bodies count once."""
        return [
            instruction.name
            for computation, _ in self.running()
            for instruction in computation.instructions.values()
            if instruction.opcode == "while" and self.trips(computation, instruction) is None
        ]


def parse(text: str) -> Module:
    """Reads a module's text as `jax.stages.Compiled.as_text()` gives it."""
    computations: dict[str, Computation] = {}
    current: dict[str, Instruction] | None = None
    entry = ""
    for line in text.splitlines():
        if line.startswith((" ", "\t")):
            found = _INSTRUCTION.match(line)
            if current is not None and found:
                instruction = _instruction(found[2], found[3], bool(found[1]))
                current[instruction.name] = instruction
        elif found := _HEADER.match(line):
            if line.startswith("HloModule"):
                continue
            current = {}
            computations[found[2]] = Computation(found[2], current)
            entry = found[2] if found[1] else entry
    devices = [
        int(n) for n in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", text[: text.find("\n")])
    ]
    return Module(computations, entry, math.prod(devices))


def _instruction(name: str, rest: str, is_root: bool) -> Instruction:
    shape_end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opcode, _, after = rest[shape_end:].strip().partition("(")
    end = _closing(after, -1)
    inside = after[:end]
    return Instruction(
        name=name,
        opcode=opcode,
        arrays=arrays(rest[:shape_end]),
        operands=tuple(re.findall(r"%([\w.\-]+)", inside)),
        literal=inside,
        attributes=after[end + 1 :].lstrip(", "),
        is_root=is_root,
    )


def _closing(text: str, start: int) -> int:
    """Where the parenthesis closes that opens at `start`, or before the text where `start` is −1."""
    depth = 1 if start < 0 else 0
    for match in re.compile(r"[()]").finditer(text, max(start, 0)):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(text)


@functools.lru_cache(maxsize=65_536)
def arrays(shape: str) -> tuple[Array, ...]:
    """The arrays of a shape's text, a tuple's one after the other."""
    shape = re.sub(r"/\*[^*]*\*/", "", shape)
    return tuple(
        Array(
            dtype,
            tuple(int(re.sub(r"\D", "", n)) for n in dims.split(",") if n),
            bool(re.search(r"S\([1-9]", layout)),
        )
        for dtype, dims, layout in _ARRAY.findall(shape)
    )


@dataclasses.dataclass(frozen=True)
class Collective:
    """One operation between devices.  `bytes` are those of one execution's result on one device.

    Across slices they are those of what a device hands to its host, which sends it over the data centre's network.
    """

    kind: str
    count: int
    """Executions a step."""
    bytes: int
    dtype: str
    groups: np.ndarray
    """[groups, devices of a group], as places in the program's order of one slice's devices; across slices none."""
    across_slices: bool
    overlaps: bool
    """Whether it runs while other work does: an asynchronous pair, or spread over the fusions of a product."""
    op_name: str
    """What it belongs to in the traced program."""

    @property
    def group_size(self) -> int:
        return self.groups.shape[1]


def collectives(module: Module) -> list[Collective]:
    """Every collective that runs, each once: an asynchronous pair is one, and so is what a TPU spreads over fusions."""
    apart = {
        name
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode == "async-start"
        for names in instruction.called.values()
        for name in names
    }
    return [
        collective
        for computation, times in module.running()
        for instruction in computation.instructions.values()
        if (collective := _collective(module, computation, instruction, times, computation.name in apart))
    ]


def _collective(
    module: Module, where: Computation, instruction: Instruction, times: int, apart: bool
) -> Collective | None:
    op_name = instruction.attribute(r'op_name="([^"]*)"') or instruction.name
    # Between slices a TPU's program has transfers to the host; the other half of each pair, recv, says the same.
    transfer = instruction.attribute(r'_xla_megascale_transfer_type="(\w+)"')
    if instruction.opcode == "send" and transfer:
        sent, kind = instruction.arrays[0], transfer.lower().replace("_", "-")
        return Collective(kind, times, sent.bytes, sent.dtype, np.zeros((0, 0), int), True, True, op_name)
    kind = instruction.opcode.removesuffix("-start")
    if kind not in COLLECTIVES:
        return None
    # A TPU hides a collective behind a product by writing it into several fusions; the first starts it.
    spread = "async_collective_fusion_config" in instruction.attributes
    if spread and not _starts_it(where):
        return None
    result = instruction.arrays
    if instruction.opcode.endswith("-start") and kind != "all-reduce":  # (operands, results, …)
        n = len(instruction.operands)
        result = result[n : 2 * n]
    groups = _groups(instruction, module.devices)
    size = sum(array.bytes for array in result)
    if kind == "all-reduce" and where.name.startswith("all-reduce-scatter"):  # as a TPU writes it
        kind, size = "reduce-scatter", size // groups.shape[1]
    return Collective(
        kind=kind,
        count=times,
        bytes=size,
        dtype=max(result, key=lambda array: array.bytes).dtype if result else "",
        groups=groups,
        across_slices=False,
        overlaps=apart or spread or instruction.opcode.endswith("-start"),
        op_name=op_name,
    )


def _starts_it(where: Computation) -> bool:
    return any(
        'custom_call_target="AsyncCollectiveStart"' in i.attributes for i in where.instructions.values()
    )


def _groups(instruction: Instruction, devices: int) -> np.ndarray:
    """The groups in any of the forms that they are written in: lists, an iota, axes of a mesh, or none for all."""
    text = instruction.attributes
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", text):
        return np.array([[int(n) for n in re.findall(r"\d+", pair)] for pair in pairs[1].split("},")])
    if listed := re.search(r"replica_groups=\{\{(.*?)\}\}", text):
        return np.array([[int(n) for n in re.findall(r"\d+", group)] for group in listed[1].split("},")])
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if iota:
        ids = np.arange(math.prod(_ints(iota[3]))).reshape(_ints(iota[3]))
        ids = ids.transpose(_ints(iota[4])) if iota[4] else ids
        return ids.reshape(int(iota[1]), int(iota[2]))
    mesh = re.search(r"replica_groups=mesh\[([^\]]*(?:\[[^\]]*\][^\]]*)*)\]\s*\{([^}]*)\}", text)
    if mesh:
        return _mesh_groups(mesh[1], mesh[2])
    return np.arange(devices).reshape(1, -1)


def _mesh_groups(mesh: str, axes: str) -> np.ndarray:
    """Groups along `axes` of a mesh such as `'x'=4,'y'=2`, with `device_ids=[…]` where they are not in order.

    An axis may be a part of one: `'x':(2)4` is 4 of x's devices, whose neighbours lie 2 apart.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    ids = np.arange(math.prod(sizes.values()))
    if order := re.search(r"device_ids=(?:\((.*?)\)|\[(.*?)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?)?)", mesh):
        if order[3]:
            ids = np.arange(ids.size).reshape(_ints(order[3]))
            ids = (ids.transpose(_ints(order[4])) if order[4] else ids).reshape(-1)
        elif listed := _ints(order[1] or order[2]):
            ids = np.array(listed)
    wanted = [(name, int(before or 1), int(size or 0)) for name, before, size in
              re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", axes)]  # fmt: skip
    shape, kept, inside = [], [], []
    for name, size in sizes.items():
        cuts = sorted({1, size} | {n for own, before, part in wanted if own == name and part
                                   for n in (before, before * part)})  # fmt: skip
        for before, after in itertools.pairwise(cuts):
            is_wanted = any(
                own == name and (not part or before_ <= before < before_ * part)
                for own, before_, part in wanted
            )
            (inside if is_wanted else kept).append(len(shape))
            shape.append(after // before)
    group = math.prod(shape[i] for i in inside)
    return ids.reshape(shape or (1,)).transpose(kept + inside or (0,)).reshape(-1, group)


def _ints(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]
