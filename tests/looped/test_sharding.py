"""The mesh: a run is the same on every one; what does not divide is refused with what would."""

import collections
import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from looped.config import ModelConfig, OptimizerConfig
from looped.errors import UserError
from looped.execution import Execution
from looped.loss import LARGEST_LOGITS
from looped.optimizer import _way
from looped.parameters import parameter_path
from looped.products import look_up, product
from looped.programs import build
from looped.sharding import (
    MeshAxes,
    MeshShape,
    batch_sharding,
    choose_mesh,
    global_batch,
    local_rows,
    make_mesh,
    parameter_spec,
)

MODEL = ModelConfig(sequence_length=16, d_model=16, n_heads=4, recurrences=2, recurrent_layers=1)
OPTIMIZER = OptimizerConfig(polar_dtype="float32", reference_tokens=10_000)
RATES = {"matrix": 0.02, "embedding": 0.1, "unembedding": 0.01, "norm": 0.01, "per_pass": 0.01}
BATCH = 8


def losses_of(shape, model=MODEL, steps=20, **execution):
    mesh = make_mesh(shape, jax.devices()[: shape.devices])
    programs = build(model, OPTIMIZER, Execution(unroll=False, **execution), mesh)
    state, losses = programs.init(0), []
    rates = {group: np.float32(rate) for group, rate in RATES.items()}
    for step in range(steps):
        tokens = np.random.default_rng(step).integers(0, 257, (BATCH, 17), dtype=np.int32)
        state, metrics = programs.step(state, global_batch(tokens, mesh, BATCH), rates)
        losses.append(float(metrics.loss))
    return losses, state


@pytest.fixture(scope="module")
def on_one_device():
    return losses_of(MeshShape())[0]


MESHES = [
    MeshShape(fsdp=8),
    MeshShape(2, 2, 2, 1),
    MeshShape(1, 2, 1, 4),
    MeshShape(8),
    MeshShape(2, 1, 2, 2),
]


@pytest.mark.parametrize(
    "shape",
    [MESHES[1], *(pytest.param(shape, marks=pytest.mark.slow) for shape in MESHES if shape != MESHES[1])],
    ids=str,
)
def test_steps_are_the_same_on_every_mesh(shape, on_one_device):
    losses, state = losses_of(shape)
    np.testing.assert_allclose(losses, on_one_device, rtol=1e-5)
    kernel = state.params["recurrent_block"]["query"]["kernel"].get_value()
    assert kernel.addressable_shards[0].data.size == kernel.size // (shape.fsdp * shape.tensor)
    for momentum in (leaf for leaf in jax.tree.leaves(state.optimizer) if leaf.shape == kernel.shape):
        assert math.prod(momentum.sharding.shard_shape(momentum.shape)) < kernel.size or shape.replica == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [{"remat": "layer"}, {"remat": "dots"}, {"remat": "pass"}, {"accumulate": 4}], ids=str
)
def test_steps_are_the_same_however_they_are_carried_out(how, on_one_device):
    np.testing.assert_allclose(losses_of(MeshShape(fsdp=2, sequence=2), **how)[0], on_one_device, rtol=1e-5)


@pytest.mark.parametrize("kept", [("fsdp", None), (None, "fsdp"), ("tensor", "fsdp")], ids=str)
def test_derivatives_of_parameters_are_summed_in_float32(kept):
    """Of bfloat16 activations, over a device's tokens and over devices: rounded to bfloat16 they would be 4e-3 off."""
    random = np.random.default_rng(0)
    x, gradient = (jnp.asarray(random.standard_normal((8, 4, 16)), jnp.bfloat16) for _ in range(2))
    tokens = random.integers(0, 16, (8, 4))
    wide = [np.asarray(a, np.float64) for a in (x, gradient)]
    by_table = np.zeros((16, 16))
    np.add.at(by_table, tokens, wide[1])

    def derivatives(x, gradient, kernel):
        by_kernel = jax.vjp(lambda kernel: product(x, kernel, kept), kernel)[1](gradient)[0]
        return by_kernel, jax.vjp(lambda t: look_up(t, tokens, jnp.bfloat16, kept), kernel)[1](gradient)[0]

    mesh = make_mesh(MeshShape(fsdp=4, tensor=2))
    rows = batch_sharding(mesh)
    with jax.set_mesh(mesh):
        found = jax.jit(derivatives, in_shardings=(rows, rows, None))(x, gradient, jnp.zeros((16, 16)))
    for one, right in zip(found, (np.einsum("bti,bto->io", *wide), by_table), strict=True):
        assert one.dtype == jnp.float32
        assert one.sharding.is_equivalent_to(NamedSharding(mesh, P(*kept)), 2)
        np.testing.assert_allclose(one, right, rtol=1e-5, atol=1e-5)


def test_accumulated_parts_make_the_same_step(on_one_device):
    np.testing.assert_allclose(losses_of(MeshShape(), accumulate=8, steps=3)[0], on_one_device[:3], rtol=1e-5)


def test_no_matrix_is_iterated_on_every_device():
    """On 8 devices, each product of Muon's iterations is of as few matrices as fall to one."""
    layers = dataclasses.replace(MODEL, recurrent_layers=6)
    matrices, d = 8, MODEL.d_model  # of 4 d × d ones a layer and 2 wide ones
    text = (
        build(layers, OPTIMIZER, Execution(unroll=False), make_mesh(MeshShape(fsdp=8)))
        .lower(BATCH)
        .compile()
        .as_text()
    )
    assert re.search(rf"f32\[{4 * matrices // 8},{d},{d}\]\S* dot\(", text), "4 of 32 on each device"
    assert re.search(rf"f32\[{2 * matrices // 8},{d},{4 * d}\]\S* dot\(", text), "2 of 16 on each device"
    assert not re.search(rf"f32\[{4 * matrices},{d},{d}\]\S* dot\(", text)


def test_matrices_of_one_shape_lie_alike_for_the_iterations():
    """So that they go to their devices together: by rows, for which tall ones and some square ones are turned."""
    mesh = make_mesh(MeshShape(fsdp=8))
    params = build(MODEL, OPTIMIZER, Execution(unroll=False), mesh).abstract.params
    divided = collections.defaultdict(set)
    with jax.set_mesh(mesh):
        for path, leaf in jax.tree_util.tree_leaves_with_path(params["recurrent_block"]):
            if leaf.ndim == 3:
                way = _way(("recurrent_block", *parameter_path(path)), leaf.shape)
                divided[tuple(sorted(leaf.shape[1:]))].add(way.divided)
    d = MODEL.d_model
    assert divided == {(d, d): {("fsdp", None)}, (d, 4 * d): {("fsdp", None)}}


def test_logits_of_a_large_vocabulary_are_never_there_at_once():
    model = dataclasses.replace(MODEL, vocab_size=32001, sequence_length=512)
    programs = build(model, OPTIMIZER, Execution(unroll=False))
    text = programs.lower(BATCH).as_text()
    shapes = [tuple(map(int, found.split("x"))) for found in re.findall(r"tensor<([0-9x]+)xf32>", text)]
    logits = [shape for shape in shapes if {model.vocab_size, model.padded_vocab} & set(shape[-1:])]
    assert logits
    assert max(map(math.prod, logits)) * 4 <= LARGEST_LOGITS["cpu"] < BATCH * 512 * model.vocab_size * 4


# --- Which mesh --------------------------------------------------------------------------------------------

PUBLISHED = ModelConfig(vocab_size=32001, sequence_length=2048, d_model=2176, n_heads=17)


def test_more_devices_than_sequences_divide_the_sequence():
    assert choose_mesh(PUBLISHED, 128, 256) == MeshShape(1, 128, 2, 1)
    assert choose_mesh(PUBLISHED, 128, 64) == MeshShape(1, 64, 1, 1)
    assert choose_mesh(PUBLISHED, 128, 256, slices=2) == MeshShape(2, 64, 2, 1)
    odd = dataclasses.replace(PUBLISHED, d_model=320, n_heads=5)
    assert choose_mesh(odd, 128, 256) == MeshShape(2, 64, 2, 1), "320 = 64 · 5"


@given(
    st.sampled_from([1, 2, 3, 4, 6, 8, 16, 64, 256]),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 200),
    st.fixed_dictionaries(
        {axis: st.sampled_from([None, None, 1, 2, 4]) for axis in ("replica", "fsdp", "sequence", "tensor")}
    ),
)
def test_a_chosen_mesh_uses_every_device_and_divides_everything(devices, slices, batch, wanted):
    try:
        shape = choose_mesh(MODEL, batch, devices, slices, MeshAxes(**wanted))
    except UserError:
        return
    assert shape.devices == devices
    assert shape.replica % slices == 0
    shape.check(MODEL, batch)
    assert all(getattr(shape, axis) == size for axis, size in wanted.items() if size)


@pytest.mark.parametrize(
    ("wanted", "devices", "batch", "words"),
    [
        (MeshAxes(fsdp=3), 8, 24, "mesh axes fsdp 3: no mesh of 8 devices has them"),
        (
            MeshAxes(tensor=8),
            8,
            8,
            "mesh axis tensor is 8, which does not divide n_heads 4; tensor may be one of 1, 2, 4.",
        ),
        (
            MeshAxes(fsdp=8),
            8,
            12,
            "batch_size is 12, which mesh axes replica × fsdp = 8 do not divide; make it a multiple of 8",
        ),
        (MeshAxes(sequence=32), 32, 8, "mesh axis sequence is 32, which does not divide sequence_length 16"),
    ],
)
def test_what_does_not_divide_is_named_with_what_would(wanted, devices, batch, words):
    with pytest.raises(UserError, match=re.escape(words)):
        choose_mesh(MODEL, batch, devices, wanted=wanted)


def test_a_mesh_for_another_number_of_devices_is_refused():
    with pytest.raises(UserError, match=r"is for 4 devices and there are 8; make the product 8"):
        make_mesh(MeshShape(fsdp=4))


def test_an_axis_below_one_is_refused():
    with pytest.raises(UserError, match="mesh axis fsdp is 0; it must be at least 1"):
        MeshAxes(fsdp=0)


# --- What goes where ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "shape", "spec"),
    [
        (("recurrent_block", "query", "kernel"), (4, 16, 16), P(None, "fsdp", "tensor")),
        (("recurrent_block", "mlp_out", "kernel"), (4, 64, 16), P(None, "tensor", "fsdp")),
        (("recurrent_block", "attention_norm", "scale"), (4, 16), P()),
        (("embedding",), (512, 16), P(None, "fsdp")),
        (("injection", "kernel"), (32, 16), P("fsdp", None)),
        (("injection", "mixing"), (3, 2, 2), P(None, None, None)),
        (("injection", "write"), (3, 16), P(None, "fsdp")),
        (("final_norm", "scale"), (16,), P()),
    ],
)
def test_the_table_of_partitions(path, shape, spec):
    assert parameter_spec(path, shape, MeshShape(fsdp=8, tensor=2)) == spec


def test_a_batch_lies_by_rows():
    mesh = make_mesh(MeshShape(2, 2, 2, 1))
    rows = np.arange(24).reshape(8, 3)
    batch = global_batch(rows, mesh, 8)
    assert local_rows(mesh, 8) == slice(0, 8)
    assert np.array_equal(batch, rows)
    assert {shard.data.shape for shard in batch.addressable_shards} == {(2, 3)}
