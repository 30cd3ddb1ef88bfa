"""Time and memory of a step with truncated backprop against full, r = 8, k = 4 against k = 8.

    python tests/benchmarks/step_truncation.py [--width 128] [--batch 8] [--repeats 6] [--topology v5e:2x2]

2 + 4 · (r = 8) + 2 layers, T = 256, V = 4096, float32, no remat; steps of both take turns in one process, and the best
of each counts.  Printed is the ratio of step times beside the ratio of FLOPs that `looped.counting` predicts (aim:
within 10 %), in wall time and, for a busy machine, in processor time; and the ratio of the compiled temporaries (aim:
at most 0.6; 20 of 36 layers are differentiated, which is 0.56), scanned as for TPU and unrolled as on CPU.  With
`--topology`, temporaries alone, of compiles for that TPU slice (which want libtpu).
"""

import argparse
import dataclasses
import os
import time

from looped.machine import keep_freed_memory


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=128, help="D, in heads of 128")
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--topology", help="a TPU slice, such as v5e:2x2; this machine where left out")
    return parser.parse_args()


def main():
    options = arguments()
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu"}
    keep_freed_memory()

    from jax.experimental import topologies

    from looped.config import ModelConfig
    from looped.sharding import MeshShape, make_mesh

    full = ModelConfig(
        vocab_size=4096,
        sequence_length=256,
        d_model=options.width,
        n_heads=options.width // 128,
        prelude_layers=2,
        recurrent_layers=4,
        coda_layers=2,
        recurrences=8,
    )
    models = {"full": full, "truncated": dataclasses.replace(full, backprop_recurrences=4)}
    if options.topology:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=options.topology).devices
        show_temporaries(models, options.batch, make_mesh(MeshShape(fsdp=len(devices)), devices))
    else:
        show_times(models, options.batch, options.repeats)
        show_temporaries(models, options.batch, None)


def show_times(models, batch, repeats):
    import jax
    import numpy as np

    from looped import counting
    from looped.config import OptimizerConfig
    from looped.optimizer import GROUPS
    from looped.programs import build

    full, truncated = models["full"], models["truncated"]
    random = np.random.default_rng(0)
    tokens = random.integers(0, full.vocab_size, (batch, full.sequence_length + 1), np.int32)
    rates = {group: np.float32(1e-3) for group in GROUPS}
    programs = {name: build(model, OptimizerConfig()) for name, model in models.items()}
    states = {name: programs[name].init(0) for name in models}
    wall, processor = {}, {}
    for repeat in range(repeats + 1):
        for name in models:
            at, used = time.perf_counter(), time.process_time()
            states[name] = jax.block_until_ready(programs[name].step(states[name], tokens, rates)[0])
            if repeat:  # the first compiles
                wall[name] = min(wall.get(name, 1e9), time.perf_counter() - at)
                processor[name] = min(processor.get(name, 1e9), time.process_time() - used)

    predicted = counting.flops_per_token(truncated) / counting.flops_per_token(full)
    print(f"FLOPs, predicted: {predicted:.3f}")
    for kind, seconds in (("wall", wall), ("processor", processor)):
        ratio = seconds["truncated"] / seconds["full"]
        steps = ", ".join(f"{name} {1e3 * s:,.0f} ms" for name, s in seconds.items())
        print(f"{kind + ' time:':<18}{ratio:.3f}, {ratio / predicted - 1:+.1%} off the prediction ({steps})")


def show_temporaries(models, batch, mesh):
    from looped.config import OptimizerConfig
    from looped.execution import Execution
    from looped.programs import build

    for unroll in (False, True):
        size = {
            name: build(model, OptimizerConfig(), Execution(unroll=unroll), mesh)
            .lower(batch)
            .compile()
            .memory_analysis()
            .temp_size_in_bytes
            for name, model in models.items()
        }
        how = "unrolled" if unroll else "scanned"
        amounts = ", ".join(f"{name} {s / 1e6:,.0f} MB" for name, s in size.items())
        print(f"temporaries, {how}: {size['truncated'] / size['full']:.3f} ({amounts})", flush=True)


if __name__ == "__main__":
    main()
