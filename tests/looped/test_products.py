"""Derivatives of parameters in a bfloat16 model are float32 from the first sum on."""

import jax
import numpy as np
import pytest
from flax import nnx

from looped.config import ModelConfig
from looped.model import LoopedLM
from looped.recurrence import INJECTIONS

BATCH, LENGTH = 3, 17


def sums(jaxpr):
    """(primitive, shape, type) of everything that is summed, in loops and functions too."""
    for equation in jaxpr.eqns:
        for inner in jax.tree.leaves(
            equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from sums(getattr(inner, "jaxpr", inner))
        if equation.primitive.name in ("reduce_sum", "dot_general", "scatter-add"):
            made = equation.outvars[0].aval
            yield equation.primitive.name, made.shape, made.dtype.name


@pytest.mark.parametrize("injection", sorted(INJECTIONS))
def test_nothing_but_activations_is_summed_in_bfloat16(injection):
    config = ModelConfig(
        sequence_length=LENGTH,
        d_model=24,
        n_heads=2,
        recurrences=2,
        recurrent_layers=1,
        injection=injection,
        compute_dtype="bfloat16",
    )
    graphdef, params = nnx.split(nnx.eval_shape(lambda: LoopedLM(config, nnx.Rngs(0))), nnx.Param)
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), np.int32)

    def total(params, tokens):
        return nnx.merge(graphdef, params)(tokens).sum()

    found = set(sums(jax.make_jaxpr(jax.grad(total))(params, tokens).jaxpr))
    assert ("dot_general", (24, 96), "float32") in found, "the derivative of mlp_in"
    narrow = {one for one in found if one[2] == "bfloat16"}
    assert narrow, "products of activations"
    assert {shape[:2] for _, shape, _ in narrow} == {(BATCH, LENGTH)}
