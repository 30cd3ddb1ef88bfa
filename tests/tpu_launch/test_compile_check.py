"""What the compiler says is understood, and a real compile for a slice that is not there says it."""

import importlib.metadata
import importlib.util

import pytest

from looped.config import ModelConfig, OptimizerConfig
from looped.errors import UserError
from looped.execution import Execution
from looped.jsonable import to_json
from looped.sharding import MeshAxes
from looped.slices import GIB, slice_of
from tpu_launch import compile_check
from tpu_launch.check_worker import Worker
from tpu_launch.compile_check import (
    Job,
    hbm_needed,
    involuntary_rematerialisations,
    require_libtpu,
    topology_options,
)


@pytest.mark.parametrize(
    ("message", "needed"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (15.80G)"
            " exceeds available HBM (15.75G).",
            15.8 * GIB,
        ),
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 17.50G"
            " of 15.75G hbm. Exceeded hbm capacity by 1.75G.",
            17.5 * GIB,
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 20.0M of 16.0M vmem.",
            None,
        ),
        ("INTERNAL: Mosaic failed to compile", None),
    ],
)
def test_what_a_refused_program_needs(message, needed):
    assert hbm_needed(message) == (None if needed is None else int(needed))


def test_each_operation_that_is_made_whole_is_named_once():
    one = (
        "W1130 23:17:06.690550 2573 spmd_partitioner.cc:654] [SPMD] Involuntary full rematerialization. The compiler"
        " cannot go from sharding {devices=[8,1,1]<=[2,4]T(1,0)} to {devices=[1,4,1,2]<=[2,4]T(1,0)"
        " last_tile_dim_replicate} efficiently for HLO operation %sharding_constraint.392 = bf16[2,128,128]{2,1,0}"
        ' copy(%add.319), metadata={op_name="jit(step)/sharding_constraint" stack_frame_id=504}. As the last resort'
    )
    older = one.replace("HLO operation %", "HLO operation: %").replace("392", "393")
    log = "\n".join(["I other", one, one, older, "W [SPMD] Involuntary full rematerialization. Of what?"])
    assert involuntary_rematerialisations(log) == (
        "jit(step)/sharding_constraint bf16[2,128,128] (sharding_constraint.392)",
        "jit(step)/sharding_constraint bf16[2,128,128] (sharding_constraint.393)",
        "unnamed  (unnamed)",
    )


@pytest.mark.parametrize(
    ("name", "slices", "options"),
    [
        ("v5e:16x16", 1, {}),
        ("v5e:2x4", 1, {"chips_per_host_bounds": [2, 4, 1]}),
        ("v6e:1x1", 1, {"chips_per_host_bounds": [1, 1, 1]}),
        ("v5p:2x2x1", 3, {"num_slices": 3}),
        ("v4:2x2x1", 1, {"chip_config_name": "megacore"}),
    ],
)
def test_libtpu_is_told_what_the_name_does_not_say(name, slices, options):
    assert topology_options(slice_of(name, slices)) == options


def test_a_missing_or_other_compiler_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"libtpu.*not installed; pip install -e '\.\[tpu-check\]'"):
        require_libtpu()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda p: "0.0.1" if p == "libtpu" else real(p))
    with pytest.raises(UserError, match=r"libtpu is 0\.0\.1, and jax .* needs ==0\.0\."):
        require_libtpu()


HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None
needs_libtpu = pytest.mark.skipif(not HAS_LIBTPU, reason=f"the TPU compiler: {compile_check.INSTALL}")


@pytest.fixture(scope="module")
def worker():
    worker = Worker()
    yield worker
    worker.kill()


def tiny(topology, execution=None, **fields):
    shape = {"d_model": 128, "n_heads": 1, "sequence_length": 128, "compute_dtype": "bfloat16"}
    layers = {"prelude_layers": 0, "recurrent_layers": 1, "coda_layers": 0, "injection": "additive"}
    model = ModelConfig(**(shape | layers | fields))
    return Job(topology, 1, model, OptimizerConfig(), 8, to_json(execution or Execution()))


@needs_libtpu
def test_every_generation_has_the_devices_that_its_facts_say(monkeypatch):
    """Also the shapes that libtpu must be told more of."""
    for name, value in compile_check.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    from jax.experimental.topologies import get_topology_desc

    for name in ("v4:2x2x1", "v5e:1x1", "v5e:2x4", "v5e:16x16", "v5p:4x4x8", "v6e:4x8", "tpu7x:2x2x1"):
        for slices in (slice_of(name), slice_of(name, 2)):
            described = get_topology_desc(slices.name, platform="tpu", **topology_options(slices)).devices
            assert len(described) == slices.devices, name
            hosts = {(device.process_index, getattr(device, "slice_index", 0)) for device in described}
            assert len(hosts) == slices.hosts, name


@needs_libtpu
def test_a_real_step_compiles_for_a_slice_that_is_not_here(worker):
    result = worker.compile(tiny("v5e:2x2"))
    assert (result.status, result.reason, result.unknown_loops) == ("compiled", "", 0)
    assert result.mesh == {"replica": 1, "fsdp": 4, "sequence": 1, "tensor": 1}
    assert 0 < result.hbm_bytes < GIB
    assert result.fits(slice_of("v5e:2x2"))
    assert result.involuntary_remat == ()
    kinds = {traffic.kind for traffic in result.traffic}
    assert "all-gather" in kinds  # of parameters
    assert kinds & {"all-reduce", "reduce-scatter"}  # of gradients
    assert 0 < result.times.step < 1
    # the loop is counted, which the compiler's own count does not do
    assert result.flops > result.xla_flops


@needs_libtpu
def test_a_step_that_does_not_fit_or_divide_says_so(worker):
    large = tiny("v5e:1x1", d_model=1024, n_heads=8, sequence_length=32_768)
    result = worker.compile(large)
    assert result.status == "too large"
    assert result.hbm_bytes > 15.75 * GIB
    assert not result.fits(slice_of("v5e:1x1"))
    divided = worker.compile(tiny("v5e:2x2", Execution(mesh=MeshAxes(tensor=4))))
    assert divided.status == "refused"
    assert "n_heads" in divided.reason
