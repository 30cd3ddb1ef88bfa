"""The published numbers: golden files, and an oracle held to them for the models of which there is no file."""

import dataclasses

import jax
import numpy as np
import optax
import published
import pytest
from flax import nnx

from looped import counting
from looped.config import ModelConfig, OptimizerConfig
from looped.interop import from_reference, to_reference
from looped.loss import cross_entropy
from looped.model import LoopedLM
from looped.optimizer import make_optimizer

OPTIM = published.Golden("looped_full").optim


def relative(a, b):
    """‖a − b‖ / ‖b‖."""
    return np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(np.asarray(b, np.float64))


class Ours:
    """Our model and optimizer on the published arrays: logits, loss and gradients; one step at a time."""

    def __init__(self, fields, arrays, tokens, targets, optim):
        self.config = ModelConfig.from_reference(fields)
        graphdef, self.params = nnx.split(from_reference(self.config, arrays), nnx.Param)
        self.optimizer = make_optimizer(OptimizerConfig(polar_dtype="float32"), self.params)
        self.state = self.optimizer.init(self.params)
        width = (self.config.d_model / optim["d_ref"]) ** -0.5
        self.rates = {group: optim[f"{group}_lr"] * width for group in ("embedding", "unembedding", "norm")}
        self.rates |= {"matrix": optim["matrix_lr"], "per_pass": optim["lane_lr"] * width}

        def loss(params):
            logits = nnx.merge(graphdef, params)(tokens)
            return cross_entropy(logits, targets), logits

        self.evaluate = jax.jit(jax.value_and_grad(loss, has_aux=True))
        self.update = jax.jit(self.optimizer.update)

    def step(self, multiplier):
        """Returns the loss before the step."""
        (loss, _), gradient = self.evaluate(self.params)
        rates = {group: rate * multiplier for group, rate in self.rates.items()}
        updates, self.state = self.update(gradient, self.state, self.params, learning_rates=rates)
        self.params = optax.apply_updates(self.params, updates)
        return float(loss)


@pytest.fixture(scope="module", params=published.FILES)
def golden(request):
    return published.Golden(request.param)


@pytest.fixture(scope="module")
def ours(golden):
    return Ours(golden.fields, golden.param, golden.tokens, golden.targets, golden.optim)


def test_logits_loss_and_gradients(golden, ours):
    (loss, logits), gradient = ours.evaluate(ours.params)
    assert np.abs(logits - golden.logits).max() < 5e-5
    assert abs(float(loss) - golden.loss) < 1e-5
    gradients = to_reference(gradient)
    assert gradients.keys() == golden.grad.keys()
    assert max(relative(gradients[name], golden.grad[name]) for name in gradients) < 1e-4


def test_three_optimizer_steps(golden, ours):
    losses = [ours.step(multiplier) for multiplier in golden.optim["lr_multipliers"]]
    assert losses == pytest.approx(golden.step_losses, abs=1e-4)
    after = to_reference(ours.params)
    assert max(relative(after[name], golden.after3[name]) for name in after) < 1e-4
    assert max(np.abs(after[name] - golden.after3[name]).max() for name in after) < 1e-4


def test_counts(golden, ours):
    counts = dataclasses.astuple(counting.count(ours.config))
    names = ("wte", "lm_head", "prelude", "recur_block", "coda", "inject", "scalars")
    assert dict(zip(names, counts, strict=True)) | {"total": sum(counts)} == golden.counts
    assert counting.flops_per_token(ours.config) == golden.flops_per_token


@pytest.mark.parametrize("name", ["hyperconnect", "looped_truncated"])
def test_the_oracle_is_the_published_code(name):
    """Logits, gradients and three steps, so that it can stand in where there is no golden file."""
    golden = published.Golden(name)
    evaluate = published.evaluator(golden.fields, golden.tokens, golden.targets)
    optimizer = published.Optimizer(golden.param, golden.optim, golden.fields["n_embd"])
    (_, logits), gradient = evaluate(golden.param)
    assert np.abs(logits - golden.logits).max() < 5e-5
    assert max(relative(gradient[name], golden.grad[name]) for name in gradient) < 1e-4
    arrays = golden.param
    for multiplier in golden.optim["lr_multipliers"]:
        arrays = optimizer.step(arrays, evaluate(arrays)[1], multiplier)
    assert max(relative(arrays[name], golden.after3[name]) for name in arrays) < 1e-4


BASE = {
    "sequence_len": 10,
    "vocab_size": 70,
    "n_embd": 16,
    "n_head": 2,
    "n_kv_head": 2,
    "n_prelude": 1,
    "n_recur_block": 1,
    "n_coda": 1,
    "num_recur": 3,
    "input_injection": "inject_init_prelude",
}
WITHOUT_FILES = {
    "grouped queries, k = 1": {"n_head": 4, "n_kv_head": 2, "num_recur": 4, "bptt_k": 1},
    "one key head, no prelude, additive, k = 2": {
        "n_head": 4,
        "n_kv_head": 1,
        "n_prelude": 0,
        "input_injection": "additive",
        "bptt_k": 2,
    },
    "three lanes, passes no multiple of them": {
        "input_injection": "hyperconnect",
        "num_lanes": 3,
        "num_recur": 5,
        "n_prelude": 0,
    },
    "one pass": {"num_recur": 1, "n_recur_block": 2},
    "no coda, passthrough in a loop": {"n_coda": 0, "input_injection": "passthrough", "logit_softcap": 5.0},
}


QUICK = ("grouped queries, k = 1", "three lanes, passes no multiple of them")


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in WITHOUT_FILES]
)
def test_models_without_a_golden_file(case):
    """Random weights, two steps: loss, logits, gradients and parameters as the oracle has them."""
    fields = BASE | WITHOUT_FILES[case]
    config = ModelConfig.from_reference(fields)
    random = np.random.default_rng(1)
    abstract = nnx.state(nnx.eval_shape(lambda: LoopedLM(config, nnx.Rngs(0))), nnx.Param)
    zeros = to_reference(jax.tree.map(lambda p: np.zeros(p.shape, np.float32), abstract))
    arrays = {
        name: (0.3 * random.standard_normal(a.shape) + (a.ndim == 1)).astype(np.float32)
        for name, a in zeros.items()
    }
    tokens = random.integers(0, 70, (2, 10))
    targets = np.where(random.random((2, 10)) < 0.2, -1, random.integers(0, 70, (2, 10)))
    ours = Ours(fields, arrays, tokens, targets, OPTIM)
    evaluate = published.evaluator(fields, tokens, targets)
    optimizer = published.Optimizer(arrays, OPTIM, config.d_model)

    (_, logits), gradient = ours.evaluate(ours.params)
    (_, expected_logits), expected = evaluate(arrays)
    assert np.abs(logits - expected_logits).max() < 5e-5
    gradients = to_reference(gradient)
    assert gradients.keys() == expected.keys()
    assert max(relative(gradients[name], expected[name]) for name in gradients) < 1e-4
    for multiplier in (1.0, 0.7):
        (expected_loss, _), expected = evaluate(arrays)
        loss = ours.step(multiplier)
        assert loss == pytest.approx(float(expected_loss), abs=1e-5)
        arrays = optimizer.step(arrays, expected, multiplier)
    after = to_reference(ours.params)
    assert max(relative(after[name], arrays[name]) for name in after) < 1e-4
