"""Facts about slices agree with each other and with the published tables."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looped.errors import UserError
from looped.slices import GENERATIONS, slice_of

EVERY_NAME = [
    f"{name}:{'x'.join(map(str, shape))}"
    for name, g in GENERATIONS.items()
    for shape in list(g.shapes())[:30]
]


@pytest.mark.parametrize(
    ("name", "chips", "devices", "hosts", "accelerator_type", "machine"),
    [  # from the pages on each generation
        ("v5e:16x16", 256, 256, 64, "v5litepod-256", "ct5lp-hightpu-4t"),
        ("v5e:2x4", 8, 8, 1, "v5litepod-8", "ct5lp-hightpu-8t"),
        ("v5e:1x1", 1, 1, 1, "v5litepod-1", "ct5lp-hightpu-1t"),
        ("v6e:4x8", 32, 32, 8, "v6e-32", "ct6e-standard-4t"),
        ("v4:2x2x1", 4, 4, 1, "v4-8", "ct4p-hightpu-4t"),
        ("v5p:4x4x8", 128, 128, 32, "v5p-256", "ct5p-hightpu-4t"),
        ("v5p:16x16x24", 6144, 6144, 1536, "v5p-12288", "ct5p-hightpu-4t"),
        ("tpu7x:2x2x1", 4, 8, 1, None, "tpu7x-standard-4t"),
    ],
)
def test_counts_are_the_published_ones(name, chips, devices, hosts, accelerator_type, machine):
    s = slice_of(name)
    assert (s.chips, s.devices, s.hosts) == (chips, devices, hosts)
    assert (s.accelerator_type, s.gke_machine_type) == (accelerator_type, machine)


@pytest.mark.parametrize(
    ("generation", "chips", "flops", "reduction"),
    [("v5e", 256, 50.63e15, 51.2e12), ("v6e", 256, 234.9e15, 102.4e12), ("v4", 4096, 1.1e18, 1.1e15)],
)
def test_a_chip_times_its_pod_is_what_the_pages_give_a_pod(generation, chips, flops, reduction):
    """Peak FLOP/s, and the all-reduce bandwidth, which is that of all links in one direction."""
    g = GENERATIONS[generation]
    assert g.peak_flops * chips == pytest.approx(flops, rel=0.03)
    assert g.ici_bandwidth * chips == pytest.approx(reduction, rel=0.01)


@given(st.sampled_from(EVERY_NAME), st.integers(1, 8))
def test_every_shape_reads_back_and_hosts_share_out_its_chips(name, slices):
    s = slice_of(name, slices)
    assert slice_of(s.name, slices) == s
    assert s.hosts * s.chips_per_host == s.chips == slices * s.chips_per_slice
    assert s.devices % s.hosts == 0
    assert len(s.wrapped) == len(s.shape) == s.generation.dimensions


def test_sides_in_another_order_are_the_same_slice():
    assert slice_of("v5p:8x8x4") == slice_of("V5P:4x8x8")
    assert slice_of("v5e:8x4").name == "v5e:4x8"


def test_several_slices_are_counted_together_and_named():
    s = slice_of("v5e:16x16", slices=2)
    assert (s.chips, s.devices, s.hosts) == (512, 512, 128)
    assert (s.name, str(s)) == ("v5e:16x16", "2 slices of v5e:16x16")


@pytest.mark.parametrize(
    ("name", "slices", "says"),
    [
        ("v5x:2x2", 1, "Did you mean 'v5"),
        ("16x16", 1, "Write one as v5e:16x16"),
        ("v5e", 1, "there are 1x1, 2x2, 2x4"),
        ("v5e:", 1, "is no shape of v5e"),
        ("v5e:3x3", 1, "is no shape of v5e"),
        ("v5e:2x-2", 1, "is no shape of v5e"),
        ("v5e:16x32", 1, "16x16"),
        ("v5p:4x4", 1, "multiples of 4"),
        ("v5p:16x20x28", 1, "6,144 chips"),
        ("v5e:2x2", 0, "slices is 0"),
    ],
)
def test_bad_slices_are_named_with_what_there_is(name, slices, says):
    with pytest.raises(UserError) as error:
        slice_of(name, slices)
    assert says in str(error.value)
