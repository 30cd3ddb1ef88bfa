"""Times follow from bytes, FLOPs and the published speeds by the rules that are stated."""

import dataclasses
import itertools

import numpy as np
import pytest

from looped.slices import slice_of
from tpu_launch.hlo import Collective
from tpu_launch.hlo_cost import Cost
from tpu_launch.roofline import PRODUCT_EFFICIENCY, link_seconds, network_seconds, roofline

POD = slice_of("v5e:16x16")
PLACES = np.array(list(itertools.product(range(16), range(16))))
ROWS = np.arange(256).reshape(16, 16)
LINK = 50e9  # bytes a second, one way


def sent(kind, size, groups, count=1, **fields):
    return Collective(kind, count, size, "bf16", np.array(groups), False, False, "", **fields)


@pytest.mark.parametrize(
    ("kind", "groups", "seconds"),
    [
        ("all-gather", ROWS, 15 / 16 / 2),  # a ring: both ways round
        ("all-gather", ROWS.reshape(1, 256), 255 / 256 / 4),  # both axes of the torus
        ("all-gather", ROWS[:, :8], 7 / 8),  # half of a ring is a line
        ("reduce-scatter", ROWS, 15 / 2),  # of sixteen times its result
        ("all-reduce", ROWS, 2 * 15 / 16 / 2),  # as a reduce-scatter and an all-gather
        ("all-to-all", ROWS, 16 / 4 / 2),  # a quarter of an all-gather of everything
        ("collective-permute", [[0, 1]], 1),  # over one link
        ("collective-permute", [[0, 15]], 1),  # which closes the ring
        ("collective-permute", [[0, 8 * 16 + 8]], 16 / 4),  # 16 links of those that 4 a chip give
    ],
)
def test_a_collective_takes_what_its_links_allow(kind, groups, seconds):
    assert link_seconds(sent(kind, int(LINK), groups), POD, PLACES) == pytest.approx(seconds)
    assert link_seconds(sent(kind, int(LINK), groups, count=3), POD, PLACES) == pytest.approx(3 * seconds)


def test_devices_of_one_chip_are_no_slower_than_its_links():
    chip = slice_of("tpu7x:2x2x1")
    places = np.repeat(np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0]]), 2, axis=0)
    assert 0 < link_seconds(sent("all-gather", 10**9, [[0, 1]]), chip, places) < 1e9 / 2 / 100e9


def test_slices_share_out_what_goes_over_the_network():
    two, four = slice_of("v6e:4x4", 2), slice_of("v6e:4x4", 4)
    share = 12.5e9
    one = dataclasses.replace(sent("all-reduce", int(share), np.zeros((0, 0), int)), across_slices=True)
    assert network_seconds(one, two) == pytest.approx(1)
    assert network_seconds(one, four) == pytest.approx(1.5)
    assert network_seconds(dataclasses.replace(one, kind="all-gather"), four) == pytest.approx(3)
    assert network_seconds(dataclasses.replace(one, kind="one-to-one"), four) == pytest.approx(1)


def test_only_what_the_program_waits_for_adds_to_the_longest():
    """Products 2 s, memory 1 s, links 3 s overlapping and 0.5 s not: 3 s of them hide everything else."""
    cost = Cost(flops=2 * 197e12 * PRODUCT_EFFICIENCY, hbm_bytes=819e9)
    waited = sent("collective-permute", int(LINK / 2), [[0, 1]])
    hidden = dataclasses.replace(sent("collective-permute", int(3 * LINK), [[0, 1]]), overlaps=True)
    line = roofline(cost, [waited, hidden], POD, PLACES)
    assert (line.products, line.memory, line.links, line.exposed) == pytest.approx((2, 1, 3.5, 0.5))
    assert line.step == pytest.approx(3.5)
    assert line.bound == "links"
    alone = roofline(cost, [waited], POD, PLACES)
    assert (alone.step, alone.bound) == (pytest.approx(2.5), "products")
