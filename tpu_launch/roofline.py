"""How long a step takes at least on a slice, from what its compiled program does.

Four times are compared, each at published speeds (`looped.slices`):

- products: their FLOPs, what is computed again included, at `PRODUCT_EFFICIENCY` of the bfloat16 peak;
- memory: bytes to and from HBM at its bandwidth;
- links: bytes of the collectives within a slice, over the links that join the devices of a group;
- network: bytes between slices, over a chip's share of its hosts' network.

A step is max(products, memory, overlapping links and network) + the links and network that do not overlap: the
compiled program says which collectives run while other work does.  Per-operation latency, launch and input are not in
it, so small steps take longer.  Times of collectives are those of rings in both directions ("How to Scale Your Model",
part 3, https://jax-ml.github.io/scaling-book/sharding).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from looped.slices import Slice
from tpu_launch.hlo import Collective
from tpu_launch.hlo_cost import Cost

PRODUCT_EFFICIENCY = 0.75
"""Share of the peak that large products reach, an assumption: whole steps of large dense models reach 0.64 to 0.71 in
MaxText's published table for v5p."""


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds a step; `links` and `network` are in all, overlapping or not."""

    products: float
    memory: float
    links: float
    network: float
    exposed: float
    """Of links and network, what does not overlap."""

    @property
    def step(self) -> float:
        hidden = self.links + self.network - self.exposed
        return max(self.products, self.memory, hidden) + self.exposed

    @property
    def bound(self) -> str:
        """Which of the four is the longest."""
        times = {name: getattr(self, name) for name in ("products", "memory", "links", "network")}
        return max(times, key=times.__getitem__)


def roofline(
    cost: Cost, collectives: Iterable[Collective], slices: Slice, coordinates: np.ndarray
) -> Roofline:
    """The times of a program of this `cost` and these `collectives`.

    `coordinates` [devices of one slice, axes of the torus] are the chips' places, in the program's order of devices.
    """
    generation = slices.generation
    links = network = exposed = 0.0
    for collective in collectives:
        if collective.across_slices:
            seconds = network_seconds(collective, slices)
            network += seconds
        else:
            seconds = link_seconds(collective, slices, coordinates)
            links += seconds
        exposed += 0.0 if collective.overlaps else seconds
    return Roofline(
        products=cost.flops / (slices.peak_flops_per_device * PRODUCT_EFFICIENCY),
        memory=cost.hbm_bytes / (generation.hbm_bandwidth / generation.devices),
        links=links,
        network=network,
        exposed=exposed,
    )


def link_seconds(collective: Collective, slices: Slice, coordinates: np.ndarray) -> float:
    """Seconds of all executions of a collective within a slice."""
    if collective.groups.size == 0 or collective.group_size < 2:
        return 0.0
    places = coordinates[collective.groups]  # [groups, devices of a group, axes]
    extents = [len(np.unique(places[0, :, axis])) for axis in range(places.shape[-1])]
    link = slices.generation.ici_link_bandwidth / slices.generation.devices
    bandwidth = link * sum(_directions(extent, axis, slices) for axis, extent in enumerate(extents))
    if bandwidth == 0.0:  # devices of one chip: never slower than its links
        bandwidth = link * slices.generation.ici_links
    size, n = collective.bytes, collective.group_size
    if collective.kind == "collective-permute":
        seconds = size * max(1 / link, _hops(places, slices) / (link * slices.generation.ici_links))
    elif collective.kind in ("all-to-all", "ragged-all-to-all"):
        seconds = size * max(extents) / (4 * bandwidth)
    elif collective.kind == "all-reduce":
        seconds = 2 * size * (n - 1) / n / bandwidth
    elif collective.kind == "reduce-scatter":
        seconds = size * (n - 1) / bandwidth
    else:
        seconds = size * (n - 1) / n / bandwidth
    return collective.count * seconds


def _directions(extent: int, axis: int, slices: Slice) -> int:
    """Links a chip along one axis that a group uses at once: two where its devices close a ring, one on a line."""
    if extent < 2:
        return 0
    return 2 if extent == slices.shape[axis] and slices.wrapped[axis] else 1


def _hops(places: np.ndarray, slices: Slice) -> float:
    """The mean number of links between the two ends of each pair."""
    away = np.abs(places[:, 0] - places[:, 1])
    for axis, side in enumerate(slices.shape):
        if slices.wrapped[axis]:
            away[:, axis] = np.minimum(away[:, axis], side - away[:, axis])
    return float(away.sum(axis=-1).mean())


def network_seconds(collective: Collective, slices: Slice) -> float:
    """Seconds of all executions of a transfer between slices."""
    n = slices.slices
    size = collective.bytes * {"all-reduce": 2 * (n - 1) / n, "all-gather": n - 1, "one-to-one": 1}.get(
        collective.kind, (n - 1) / n
    )
    return collective.count * size / (slices.generation.dcn_bandwidth / slices.generation.devices)
