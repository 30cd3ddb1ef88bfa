"""Counts against the published ones, and FLOPs against the multiplications that JAX is asked for."""

import csv
import dataclasses
import pathlib

import jax
import jax.extend.core as jex
import numpy as np
import pytest
from flax import nnx

from looped import counting
from looped.config import ModelConfig, OptimizerConfig, RunSpec
from looped.errors import UserError
from looped.execution import Execution
from looped.loss import cross_entropy
from looped.model import LoopedLM
from looped.optimizer import learning_rates
from looped.programs import build
from looped.recurrence import INJECTIONS

COUNTS = pathlib.Path(__file__).parents[1] / "data" / "counts.csv"
PUBLISHED = ModelConfig(vocab_size=32001, sequence_length=2048)


def published_model(width, recurrences):
    layers = (0, 20, 0) if recurrences == 1 else (2, 16 // recurrences, 2)
    return dataclasses.replace(
        PUBLISHED,
        d_model=width,
        n_heads=width // 128,
        prelude_layers=layers[0],
        recurrent_layers=layers[1],
        coda_layers=layers[2],
        recurrences=recurrences,
        injection="passthrough" if recurrences == 1 else "linear",
    )


def test_the_published_counts_and_rates():
    """tests/data/counts.csv: what the published code computes for 58 runs."""
    with COUNTS.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 58
    for row in rows:
        model = published_model(int(row["d_model"]), int(row["recurrences"]))
        spec = RunSpec(model=model, budget_flops=float(row["budget_flops"]), batch_size=128)
        groups = dataclasses.asdict(counting.count(model)) | {"total": counting.count(model).total}
        assert groups == {name: int(row[f"params_{name}"]) for name in groups}
        assert counting.effective_params(model) == int(row["effective_params"])
        assert counting.flops_per_token(model) == int(row["flops_per_token"])
        assert counting.planned_steps(spec) == int(row["steps"])
        rates = learning_rates(spec)
        assert rates["matrix"] == pytest.approx(float(row["matrix_lr"]), abs=1e-9)
        assert rates["norm"] / 0.005 == pytest.approx(float(row["adam_lr_scale"]), abs=1e-9)


def test_hyperconnections_as_the_published_code_counts_them():
    """By hand from its rules: 2N + N² lane weights a pass, all of them r times in the effective parameters."""
    model = dataclasses.replace(published_model(640, 4), injection="hyperconnect")
    linear, lanes = published_model(640, 4), 4 * (2 * 2 + 2**2)
    assert counting.count(model).injection == lanes
    difference = counting.effective_params(linear) - counting.effective_params(model)
    assert difference == 4 * (2 * 640**2 - lanes)
    difference = counting.flops_per_token(linear) - counting.flops_per_token(model)
    assert difference == 6 * 4 * (2 * 640**2 - 8 * 640)


def matmul_flops(jaxpr):
    """FLOPs of every dot_general, a scan's body as often as it runs."""
    total = 0
    for equation in jaxpr.eqns:
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        for parameter in jax.tree.leaves(
            equation.params, is_leaf=lambda x: isinstance(x, (jex.Jaxpr, jex.ClosedJaxpr))
        ):
            if isinstance(parameter, jex.ClosedJaxpr):
                total += times * matmul_flops(parameter.jaxpr)
            elif isinstance(parameter, jex.Jaxpr):
                total += times * matmul_flops(parameter)
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            depth = np.prod([equation.invars[0].aval.shape[axis] for axis in contracted], dtype=int)
            total += 2 * int(depth) * equation.outvars[0].aval.size
    return total


def elementwise(config, layers, passes):
    """Uses of parameters that multiply without a matrix product: norm scales, lane weights, decays."""
    in_a_pass = {"hyperconnect": 8, "diagonal": 1, "pass-embedding": 1}.get(config.injection, 0)
    return (2 * layers + passes * in_a_pass) * config.d_model


CASES = [(name, r, k) for name in INJECTIONS for r, k in ((1, 1), (4, 4))]
CASES += [(name, 4, k) for name in ("linear", "additive", "diagonal") for k in (1, 2, 3)]


@pytest.mark.parametrize(("injection", "r", "k"), CASES)
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_the_formula_is_what_jax_multiplies(injection, r, k, kv_heads):
    config = ModelConfig(
        vocab_size=100,
        sequence_length=16,
        d_model=32,
        n_heads=4,
        n_kv_heads=kv_heads,
        recurrences=r,
        backprop_recurrences=k if k < r else None,
        injection=injection,
    )
    graphdef, params = nnx.split(nnx.eval_shape(lambda: LoopedLM(config, nnx.Rngs(0))), nnx.Param)
    tokens = jax.ShapeDtypeStruct((3, 16), np.int32)

    def loss(params, tokens):
        return cross_entropy(nnx.merge(graphdef, params)(tokens), tokens)

    multiplied = matmul_flops(jax.make_jaxpr(jax.grad(loss))(params, tokens).jaxpr) / (3 * 16)
    layers = config.prelude_layers + config.coda_layers + k * config.recurrent_layers
    before_the_loop = config.d_model if injection == "diagonal" else 0  # its step Δ
    products = counting.flops_per_token(config) - 6 * (elementwise(config, layers, k) + before_the_loop)
    products -= 2 * elementwise(config, (r - k) * config.recurrent_layers, r - k)
    assert multiplied == products


@pytest.mark.parametrize("k", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_xla_counts_within_3_percent_what_is_counted_here(k):
    """Of a whole unrolled step; beside it stand Muon's products: five times 4 m² n + 2 m³ for a matrix [m, n], m ≤ n.

    The rest, norms, softmax and updates, is what the three percent are for.
    """
    config = ModelConfig(
        vocab_size=512,
        sequence_length=64,
        d_model=128,
        n_heads=4,
        prelude_layers=1,
        recurrent_layers=1,
        coda_layers=1,
        recurrences=2,
        backprop_recurrences=k,
    )
    programs = build(config, OptimizerConfig(), Execution(unroll=True))
    longer_sides = 3 * [128, 128, 128, 128, 512, 512] + [256]  # of three layers' matrices and the injection's
    muon = sum(5 * (4 * 128**2 * n + 2 * 128**3) for n in longer_sides)
    found = programs.lower(32).compile().cost_analysis()["flops"]
    assert found - muon == pytest.approx(counting.flops_per_token(config) * 32 * 64, rel=0.03)


def test_truncation_saves_the_backward_pass_of_the_detached_passes():
    full = published_model(640, 8)
    truncated = dataclasses.replace(full, backprop_recurrences=4)
    once = dataclasses.replace(full, recurrences=4)
    forward = counting.flops_per_token(truncated) - counting.flops_per_token(once)
    assert forward == (counting.flops_per_token(full) - counting.flops_per_token(once)) / 3
    assert counting.count(truncated) == counting.count(full)
    explicit = dataclasses.replace(full, backprop_recurrences=8)
    assert counting.flops_per_token(explicit) == counting.flops_per_token(full)


def test_an_unlooped_model_has_nothing_that_runs_once():
    model = published_model(640, 1)
    assert counting.n_once_n_rec(model) == (0, counting.count(model).recurrent_block)


def test_a_budget_below_one_step_is_refused():
    with pytest.raises(UserError, match="budget_flops is 1e"):
        counting.planned_steps(RunSpec(budget_flops=1e6))


@pytest.mark.parametrize("recurrences", [1, 2, 8])
def test_the_reference_model_has_the_architecture_of_the_model(recurrences):
    """Ten tokens a used parameter of width 640: 20 layers, and looped, r = 4 injections besides."""
    layer = 12 * 640**2 + 2 * 640
    used = 20 * layer + 3 * 640 + (4 * 2 * 640**2 if recurrences > 1 else 0)
    assert counting.reference_tokens(published_model(1280, recurrences)) == 10 * used
