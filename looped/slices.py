"""TPU generations and slices: the facts about them, each in this one place.

A slice is written `GENERATION:SHAPE`, the shape in chips: `v5e:16x16`, `v5p:4x4x8`.  Several slices of one shape are
joined by the data centre's network (DCN), the chips of one slice by links of their own (ICI).

Sources, read in 2025 copies: Google's page on each generation (https://docs.cloud.google.com/tpu/docs/v4, …/v5e,
…/v5p, …/v6e, …/tpu7x), the last of which has v5p and v6e beside TPU7x ("the table of TPU7x" below); and "How to Scale
Your Model", part 2 (https://jax-ml.github.io/scaling-book/tpus), for bandwidth a link.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

from looped.errors import UserError, nearest

GIB = 2**30

_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
"""The 2-D shapes: the tables of the pages on v5e and v6e."""
_BELOW_A_CUBE = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
"""The 3-D shapes of less than a cube of 4 × 4 × 4 chips; larger ones are made of whole cubes, A ≤ B ≤ C."""


@dataclasses.dataclass(frozen=True)
class Generation:
    """One generation of chips.  Bandwidths are bytes a second; all values are a chip's."""

    name: str
    """As libtpu and this project name it."""
    hbm_bytes: int
    usable_gib: float
    """GiB of HBM that the compiler lets a program use on one device: what libtpu 0.0.42 names when it refuses one that
    is too large.  (Of v5p that is a little more than what the page gives a chip.)"""
    peak_flops: float
    """Of bfloat16 products, FLOP/s."""
    hbm_bandwidth: float
    ici_link_bandwidth: float
    """Of one link, in one direction."""
    dcn_bandwidth: float
    """A chip's share of its host's network, in one direction."""
    dimensions: int
    """Of the torus: 2 has four links a chip, 3 has six."""
    cores: int
    """TensorCores."""
    devices: int
    """Devices that JAX shows: 1 where a chip's cores act as one (megacore), 2 where each is its own."""
    pod_chips: int
    """Chips of the largest slice there is."""
    accelerator_type: str | None
    """First part of Cloud TPU's accelerator type, as of `v5litepod-16`; None: by Kubernetes alone."""
    counts_cores: bool
    """Whether the number in an accelerator type is of cores; otherwise it is of chips."""
    gke_accelerator: str
    """Value of the node label cloud.google.com/gke-tpu-accelerator."""
    gke_machine: str
    """Machine type on Kubernetes, less the number of chips: `ct6e-standard-` of `ct6e-standard-4t`."""

    @property
    def ici_links(self) -> int:
        return 2 * self.dimensions

    @property
    def ici_bandwidth(self) -> float:
        """Over all links, in one direction: half of what the pages call bidirectional bandwidth per chip."""
        return self.ici_links * self.ici_link_bandwidth

    def shapes(self) -> Iterator[tuple[int, ...]]:
        """The shapes that can be had, from small to large."""
        if self.dimensions == 2:
            yield from _FLAT
            return
        yield from _BELOW_A_CUBE
        sides = range(4, self.pod_chips // 16 + 1, 4)
        cubes = [
            (a, b, c)
            for a, b in itertools.combinations_with_replacement(
                itertools.takewhile(lambda s: s <= 32, sides), 2
            )
            for c in range(b, self.pod_chips // (a * b) + 1, 4)
        ]
        yield from sorted(cubes, key=lambda shape: (math.prod(shape), shape[2]))


GENERATIONS: dict[str, Generation] = {
    generation.name: generation
    for generation in (
        Generation(
            name="v4",
            hbm_bytes=32 * GIB,  # this, peak and HBM bandwidth: the page on v4
            usable_gib=30.75,
            peak_flops=275e12,
            hbm_bandwidth=1200e9,
            ici_link_bandwidth=45e9,  # How to Scale Your Model; arXiv:2304.01433 has 50 GB/s
            dcn_bandwidth=6.25e9,  # no page gives one: 25 GB/s a host (How to Scale Your Model), 4 chips
            dimensions=3,
            cores=2,
            devices=1,
            pod_chips=4096,
            accelerator_type="v4",
            counts_cores=True,
            gke_accelerator="tpu-v4-podslice",
            gke_machine="ct4p-hightpu-",
        ),
        Generation(
            name="v5e",
            hbm_bytes=16 * GIB,  # this, peak and HBM bandwidth: the page on v5e
            usable_gib=15.75,
            peak_flops=197e12,
            hbm_bandwidth=819e9,
            ici_link_bandwidth=50e9,  # the page: 400 GB/s in both directions over 4 ports
            dcn_bandwidth=3.125e9,  # the page: 6.4 Tbit/s a pod of 256
            dimensions=2,
            cores=1,
            devices=1,
            pod_chips=256,
            accelerator_type="v5litepod",
            counts_cores=False,
            gke_accelerator="tpu-v5-lite-podslice",
            gke_machine="ct5lp-hightpu-",
        ),
        Generation(
            name="v5p",
            hbm_bytes=95 * GIB,  # all that follows to the bandwidths: the page on v5p
            usable_gib=95.74,
            peak_flops=459e12,
            hbm_bandwidth=2765e9,
            ici_link_bandwidth=100e9,  # 1200 GB/s in both directions over 6 links
            dcn_bandwidth=6.25e9,  # 50 Gbit/s
            dimensions=3,
            cores=2,
            devices=1,
            pod_chips=6144,  # of 8960 in a pod, the largest job
            accelerator_type="v5p",
            counts_cores=True,
            gke_accelerator="tpu-v5p-slice",
            gke_machine="ct5p-hightpu-",
        ),
        Generation(
            name="v6e",
            hbm_bytes=32 * GIB,
            usable_gib=31.25,
            peak_flops=918e12,
            hbm_bandwidth=1638e9,  # the table of TPU7x; the page on v6e has had 1600 and 1640
            ici_link_bandwidth=100e9,  # the page: 800 GB/s in both directions over 4 ports
            dcn_bandwidth=12.5e9,  # the table of TPU7x: 100 Gbit/s; 25.6 Tbit/s a pod of 256 is the same
            dimensions=2,
            cores=1,
            devices=1,
            pod_chips=256,
            accelerator_type="v6e",
            counts_cores=False,
            gke_accelerator="tpu-v6e-slice",
            gke_machine="ct6e-standard-",
        ),
        Generation(
            name="tpu7x",
            hbm_bytes=192 * GIB,  # all values: the table of TPU7x
            usable_gib=94.75,
            peak_flops=2307e12,
            hbm_bandwidth=7380e9,
            ici_link_bandwidth=100e9,  # 1200 GB/s in both directions over 6 links
            dcn_bandwidth=12.5e9,
            dimensions=3,
            cores=2,
            devices=2,  # the same page: two chiplets, each a device with half of the memory
            pod_chips=9216,
            accelerator_type=None,
            counts_cores=False,
            gke_accelerator="tpu7x",
            gke_machine="tpu7x-standard-",
        ),
    )
}


@dataclasses.dataclass(frozen=True)
class Slice:
    """`slices` slices of one shape, used by one run."""

    generation: Generation
    shape: tuple[int, ...]
    """Chips along each axis of the torus."""
    slices: int = 1

    @property
    def topology(self) -> str:
        """`16x16`."""
        return "x".join(map(str, self.shape))

    @property
    def name(self) -> str:
        """`v5e:16x16`, of one slice."""
        return f"{self.generation.name}:{self.topology}"

    def __str__(self) -> str:
        return self.name if self.slices == 1 else f"{self.slices} slices of {self.name}"

    @property
    def chips_per_slice(self) -> int:
        return math.prod(self.shape)

    @property
    def chips(self) -> int:
        """Of all slices, as are `hosts` and `devices`."""
        return self.slices * self.chips_per_slice

    @property
    def devices_per_slice(self) -> int:
        return self.chips_per_slice * self.generation.devices

    @property
    def devices(self) -> int:
        return self.slices * self.devices_per_slice

    @property
    def chips_per_host(self) -> int:
        """Chips of one virtual machine, on which one process runs: 4, or all of a 2-D slice of up to 8."""
        return self.chips_per_slice if self.generation.dimensions == 2 and self.chips_per_slice <= 8 else 4

    @property
    def hosts_per_slice(self) -> int:
        return self.chips_per_slice // self.chips_per_host

    @property
    def hosts(self) -> int:
        """Virtual machines, and so processes."""
        return self.slices * self.hosts_per_slice

    @property
    def wrapped(self) -> tuple[bool, ...]:
        """Axes that close to a ring: 16 chips in 2-D, whole cubes in 3-D (How to Scale Your Model, part 2)."""
        if self.generation.dimensions == 2:
            return tuple(side == 16 for side in self.shape)
        return (all(side % 4 == 0 for side in self.shape),) * 3

    @property
    def accelerator_type(self) -> str | None:
        """Cloud TPU's name of one slice, as `v5litepod-256`; None where there is none."""
        first = self.generation.accelerator_type
        number = self.chips_per_slice * (self.generation.cores if self.generation.counts_cores else 1)
        return first and f"{first}-{number}"

    @property
    def gke_machine_type(self) -> str:
        """Machine type of a node on Kubernetes, as `ct5lp-hightpu-4t`."""
        return f"{self.generation.gke_machine}{self.chips_per_host}t"

    @property
    def usable_hbm_per_device(self) -> int:
        """Bytes of HBM that a program may use on one device."""
        return int(self.generation.usable_gib * GIB)

    @property
    def peak_flops_per_device(self) -> float:
        """bfloat16, FLOP/s."""
        return self.generation.peak_flops / self.generation.devices


def slice_of(name: str, slices: int = 1) -> Slice:
    """Returns `slices` slices of the shape that `name`, as `v5e:16x16`, says; sides in another order are put in order.

    Raises `UserError` for a generation or shape that there is not, with those that there are.
    """
    if slices < 1:
        raise UserError(f"slices is {slices}; it must be at least 1.")
    first, separator, sides = name.strip().lower().partition(":")
    if first not in GENERATIONS:
        raise UserError(
            f"topology {name!r} is of no known TPU generation.{nearest(first, GENERATIONS)} Write one as v5e:16x16."
        )
    generation = GENERATIONS[first]
    shapes = list(generation.shapes())
    by_sides = {tuple(sorted(shape)): shape for shape in shapes}
    wanted = sides.split("x")
    key = tuple(sorted(map(int, wanted))) if separator and all(map(str.isdecimal, wanted)) else ()
    if key not in by_sides:
        shown = ", ".join("x".join(map(str, shape)) for shape in shapes[:12])
        more = "" if len(shapes) <= 12 else (
            f" and others whose sides are multiples of 4, up to {generation.pod_chips:,} chips"
        )  # fmt: skip
        raise UserError(f"topology {name!r} is no shape of {first} slices; there are {shown}{more}.")
    return Slice(generation, by_sides[key], slices)
