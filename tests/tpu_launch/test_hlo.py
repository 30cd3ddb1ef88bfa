"""Programs' texts are read rightly: how often what runs, what is sent to whom, what is multiplied and moved."""

import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tpu_launch import hlo
from tpu_launch.hlo_cost import cost, product_flops

HERE = pathlib.Path(__file__).parent

LOOP = (HERE / "hlo" / "loops.txt").read_text(encoding="utf-8")


def test_a_collective_counts_as_often_as_the_loops_around_it_run():
    """1 ≤ i ≤ 5 around 0 ≤ i < 3; 7 as said; and once where nothing tells."""
    module = hlo.parse(LOOP)
    reduced, permuted = hlo.collectives(module)
    assert (reduced.kind, reduced.count, reduced.bytes, reduced.op_name) == (
        "all-reduce",
        15,
        128,
        "inner/psum",
    )
    assert (permuted.kind, permuted.count, permuted.op_name) == ("collective-permute", 8, "s")
    assert module.unknown_loops() == ["while.8"]


ASYNCHRONOUS = (HERE / "hlo" / "asynchronous.txt").read_text(encoding="utf-8")


def test_an_operation_written_in_several_places_is_one():
    """Wrapped, as a pair, spread over fusions, fused with its slice, and handed to the host between slices."""
    found = sorted(hlo.collectives(hlo.parse(ASYNCHRONOUS)), key=lambda c: (c.kind, c.bytes, c.across_slices))
    assert [(c.kind, c.bytes, c.across_slices, c.overlaps, c.groups.shape) for c in found] == [
        ("all-gather", 128, False, True, (1, 4)),
        ("all-gather", 128, False, True, (1, 4)),
        ("all-gather", 128 + 256, False, True, (1, 4)),
        ("all-reduce", 256, True, True, (0, 0)),
        ("all-reduce", 256 + 16, False, True, (1, 4)),
        ("collective-permute", 32, False, True, (2, 2)),
        ("reduce-scatter", 64, False, False, (1, 4)),
    ]  # fmt: skip
    assert {c.count for c in found} == {1}


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,2},{1,3}}", [[0, 2], [1, 3]]),
        ("replica_groups={}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("replica_groups=[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b'}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(2)2}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (
            "replica_groups=mesh['a'=2,'b'=4, device_ids=[4,2]<=[2,4]T(1,0)] {'b'}",
            [[0, 4, 1, 5], [2, 6, 3, 7]],
        ),
    ],
)
def test_groups_in_every_form(text, groups):
    module = hlo.parse(
        f"HloModule m, num_partitions=8\n\nENTRY %main (x: f32[8]) -> f32[8] {{\n  %x = f32[8]{{0}} parameter(0)\n"
        f"  ROOT %r = f32[8]{{0}} all-reduce(%x), channel_id=1, {text}, use_global_device_ids=true, to_apply=%add\n}}\n"
    )
    (found,) = hlo.collectives(module)
    assert found.groups.tolist() == groups


@given(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3), st.data())
def test_groups_along_mesh_axes_are_those_of_the_array(sizes, data):
    """Each group holds what varies along its axes, and all groups every device once."""
    names = "abc"[: len(sizes)]
    chosen = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    mesh = ",".join(f"'{n}'={s}" for n, s in zip(names, sizes, strict=True))
    groups = hlo._mesh_groups(mesh, ",".join(f"'{n}'" for n in names if n in chosen))
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    kept = [i for i, n in enumerate(names) if n not in chosen]
    assert sorted(groups.ravel()) == list(range(ids.size))
    for group in groups:
        places = np.array([np.argwhere(ids == device)[0] for device in group])
        assert all(len(set(places[:, axis])) == 1 for axis in kept)


def test_shapes_have_dimensions_sizes_and_places():
    fast, slow, scalar = hlo.arrays(
        "(bf16[2,<=8]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/f8e4m3fn[3]{0:T(256)}, pred[])"
    )
    assert (fast.dims, fast.bytes, fast.fast) == ((2, 8), 32, True)
    assert (slow.bytes, slow.fast, scalar.dims, scalar.bytes) == (3, False, (), 1)


def _compute(body):
    text = f"HloModule m\n\nENTRY %main (a: f32[1]) -> f32[1] {{\n{body}\n}}\n"
    return hlo.parse(text).computations["main"]


@pytest.mark.parametrize(
    ("arrays", "operation", "flops"),
    [
        (
            ("f32[5,7]", "f32[7,3]", "f32[5,3]"),
            "dot({}), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}",
            2 * 105,
        ),
        (("bf16[5,7]", "bf16[7,3]", "bf16[5,3]"), "convolution({}), dim_labels=bf_io->bf", 2 * 105),
        (  # four products, as a TPU writes them: a spatial axis, between whose elements there are none
            ("bf16[4,5,7]", "bf16[4,3,7]", "bf16[4,5,3]"),
            "convolution({}), window={{size=4 stride=3 pad=0_0 lhs_dilate=4}}, dim_labels=0bf_0oi->0bf",
            2 * 4 * 105,
        ),
        (  # 3 taps over 10 elements padded by one at each end: 28 of 30 meet one
            ("f32[1,10,2]", "f32[3,2,4]", "f32[1,10,4]"),
            "convolution({}), window={{size=3 pad=1_1}}, dim_labels=b0f_0io->b0f",
            2 * 28 * 8,
        ),
    ],
)  # fmt: skip
def test_products_cost_two_flops_a_multiply_add(arrays, operation, flops):
    left, right, out = (f"{a}{{0}}" for a in arrays)
    lines = [
        f"  %l = {left} parameter(0)",
        f"  %r = {right} parameter(1)",
        f"  ROOT %p = {out} {operation.format('%l, %r')}",
    ]
    where = _compute("\n".join(lines))
    assert product_flops(where, where.instructions["p"]) == flops


def test_only_what_is_read_or_written_in_hbm_counts():
    """Slices of a stack, an update in place, and nothing of what stays on the chip."""
    module = hlo.parse("""HloModule m

%take (p.1: f32[100,8], i.1: s32[]) -> f32[1,8] {
  %p.1 = f32[100,8]{1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  %zero.1 = s32[] constant(0)
  ROOT %slice = f32[1,8]{1,0} dynamic-slice(%p.1, %i.1, %zero.1), dynamic_slice_sizes={1,8}
}

%give (p.2: f32[100,8], u.2: f32[1,8], i.2: s32[]) -> f32[100,8] {
  %p.2 = f32[100,8]{1,0} parameter(0)
  %u.2 = f32[1,8]{1,0} parameter(1)
  %i.2 = s32[] parameter(2)
  %zero.2 = s32[] constant(0)
  ROOT %update = f32[100,8]{1,0} dynamic-update-slice(%p.2, %u.2, %i.2, %zero.2)
}

ENTRY %main (stack: f32[100,8], i: s32[]) -> f32[100,8] {
  %stack = f32[100,8]{1,0} parameter(0)
  %i = s32[]{:S(6)} parameter(1)
  %row = f32[1,8]{1,0:S(1)} fusion(%stack, %i), kind=kLoop, calls=%take
  %doubled = f32[1,8]{1,0} add(%row, %row)
  %room = f32[100,8]{1,0} custom-call(), custom_call_target="AllocateBuffer"
  %fetch = ((f32[100,8]{1,0}), f32[2,8]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%stack), slice={[0:2], [0:8]}
  %fetched = f32[2,8]{1,0:S(1)} slice-done(%fetch)
  ROOT %out = f32[100,8]{1,0} fusion(%stack, %doubled, %i), kind=kLoop, calls=%give
}
""")
    # a row of 32 bytes read; doubled on the chip and written; read again and written into the stack; two rows fetched
    assert cost(module).hbm_bytes == 32 + 32 + 32 + 32 + 64


def test_a_real_program_costs_what_is_written_down():
    """L layers with divided weights in a scan, compiled for eight devices: gathered L times, multiplied L times."""
    layers, rows, width, devices = 5, 16, 32, 8
    mesh = Mesh(np.array(jax.devices()[:devices]), ("x",))
    stack = jax.ShapeDtypeStruct(
        (layers, width, width), jnp.float32, sharding=NamedSharding(mesh, P(None, "x"))
    )
    x = jax.ShapeDtypeStruct((rows, width), jnp.float32, sharding=NamedSharding(mesh, P("x")))

    def forward(x, stack):
        def layer(x, w):
            return jnp.tanh(x @ jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P()))), None

        return jax.lax.scan(layer, x, stack)[0].sum()

    compiled = jax.jit(forward).lower(x, stack).compile()
    module = hlo.parse(compiled.as_text())
    assert module.unknown_loops() == []
    assert module.devices == devices
    own = cost(module)
    assert own.flops == 2 * layers * (rows // devices) * width * width
    found = hlo.collectives(module)
    gathered = [c for c in found if c.kind == "all-gather"]
    assert sum(c.count * c.bytes for c in gathered) == layers * width * width * 4
    (total,) = [c for c in found if c.kind == "all-reduce"]
    assert (total.count, total.bytes, total.group_size) == (1, 4, devices)
    least = (rows // devices * width + layers * width * width // devices) * 4  # its inputs
    assert own.hbm_bytes > least
