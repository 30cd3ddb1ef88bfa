"""How near the training step on CPU comes to the machine, and where its time goes.

    python tests/benchmarks/train_speed.py [--heads 1] [--repeats 10] [--forget]

D = 128, 2 + 4 · (r = 4) + 2 layers, T = 256, 8 sequences, V = 4096, float32, a whole step with MuonH and AdamW.  The
measure is model FLOPs (`looped.counting`) a second over what a product of two 2048² matrices reaches in the same run,
both the best of several repeats that take turns.  Wall time wants a machine with nothing else to do; the share of
processor seconds, over all cores, is printed as well and holds on a busy one.  Parts are compiled apart, so they do not
add up to the step.  `--forget` leaves out `looped.machine.keep_freed_memory`.
"""

import argparse
import os
import resource
import time

from looped.machine import available_cores, keep_freed_memory


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", type=int, default=1, help="the published head size is 128, which is one")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--forget", action="store_true")
    return parser.parse_args()


def main():
    options = arguments()
    os.environ["JAX_PLATFORMS"] = "cpu"
    if not options.forget:
        keep_freed_memory()

    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    from looped import counting
    from looped.attention import causal_attention
    from looped.config import ModelConfig, OptimizerConfig
    from looped.loss import cross_entropy
    from looped.model import LoopedLM
    from looped.optimizer import GROUPS, make_optimizer
    from looped.programs import build

    model = ModelConfig(
        vocab_size=4096,
        sequence_length=256,
        d_model=128,
        n_heads=options.heads,
        prelude_layers=2,
        recurrent_layers=4,
        coda_layers=2,
        recurrences=4,
    )
    batch, layers = 8, 2 + 4 * 4 + 2
    tokens = np.random.default_rng(0).integers(
        0, model.vocab_size, (batch, model.sequence_length + 1), np.int32
    )
    rates = {group: np.float32(1e-3) for group in GROUPS}

    programs = build(model, OptimizerConfig())
    began = time.perf_counter()
    state = programs.init(0)
    state = jax.block_until_ready(programs.step(state, tokens, rates)[0])
    print(f"compiled and ran once in {time.perf_counter() - began:.1f} s")

    lm = LoopedLM(model, nnx.Rngs(0), unroll=True)
    graphdef, params = nnx.split(lm, nnx.Param)
    optimizer = make_optimizer(OptimizerConfig(), params)
    moments = jax.jit(optimizer.init)(params)
    inputs, targets = tokens[:, :-1], jnp.asarray(tokens[:, 1:])
    h = jax.random.normal(jax.random.key(0), (*inputs.shape, model.d_model))
    q, k, v = jax.random.normal(jax.random.key(1), (3, *inputs.shape, options.heads, model.head_dim))
    square = jax.random.normal(jax.random.key(2), (2048, 2048))

    @jax.jit
    def optimize(params, moments):
        return optimizer.update(params, moments, params, learning_rates=rates)

    @jax.jit
    def attention(q, k, v):
        output, pull = jax.vjp(causal_attention, q, k, v)
        return output, pull(v)

    @jax.jit
    def head(params, h):
        def loss(params, h):
            return cross_entropy(nnx.merge(graphdef, params).unembed(h), targets)

        return jax.value_and_grad(loss, (0, 1))(params, h)

    product = jax.jit(jnp.matmul)

    def step():
        nonlocal state
        state = programs.step(state, tokens, rates)[0]
        return state

    parts = {
        "2048³ product": lambda: product(square, square),
        "step": step,
        "forward": lambda: programs.loss_sum(state.params, inputs, targets),
        "MuonH and AdamW": lambda: optimize(params, moments),
        f"attention, {layers} layers": lambda: [attention(q, k, v) for _ in range(layers)],
        "logits and loss, whole": lambda: head(params, h),
    }
    wall, processor = {}, {}
    for part in parts.values():
        jax.block_until_ready(part())
    for _ in range(options.repeats):
        for name, part in parts.items():
            at, used = time.perf_counter(), time.process_time()
            jax.block_until_ready(part())
            wall[name] = min(wall.get(name, 1e9), time.perf_counter() - at)
            processor[name] = min(processor.get(name, 1e9), time.process_time() - used)

    flops = counting.flops_per_token(model) * batch * model.sequence_length
    floor = 2 * 2048**3
    for name in parts:
        print(f"{name:<24}{1e3 * wall[name]:>8.0f} ms {1e3 * processor[name]:>8.0f} ms of processor time")
    at_rate = wall["2048³ product"] * flops / floor
    print(f"{'its FLOPs at that rate':<24}{1e3 * at_rate:>8.0f} ms")
    speed, product_rate = batch * model.sequence_length / wall["step"], floor / wall["2048³ product"] / 1e9
    print(f"{speed:,.0f} tokens/s, {flops / wall['step'] / 1e9:.0f} GFLOP/s; {len(available_cores())} cores")
    print(f"the product: {product_rate:.0f} GFLOP/s")
    of_processor = flops / processor["step"] / (floor / processor["2048³ product"])
    print(f"share of the product's rate: {at_rate / wall['step']:.2f}, of processor time {of_processor:.2f}")
    pages = resource.getrusage(resource.RUSAGE_SELF)
    print(
        f"largest memory {pages.ru_maxrss / 1e6:.2f} GB, temporaries {temporaries(programs, batch) / 1e9:.2f} GB"
    )


def temporaries(programs, batch):
    return programs.lower(batch).compile().memory_analysis().temp_size_in_bytes


if __name__ == "__main__":
    main()
