"""How compile time and program size grow with recurrences and depth where layers and passes are scanned.

    python tests/benchmarks/compile_growth.py [--topology v5e:2x2] [--repeats 3]

D = 128, T = 256, V = 4096, 8 sequences; for this machine's CPU with scans left as they are, or ahead of time for a TPU
slice (which wants libtpu).  Each ratio is of programs compiled in turns in one process, the best of the repeats, in
processor time as well because compilers use what cores there are.  Size is the number of instructions of the optimised
program, and the bytes of its code.  Aims: r = 8 within 1.2 times of r = 2 at an equal block, and 40 layers within 1.1
times of 20.
"""

import argparse
import os
import re
import time

PAIRS = {
    "r = 2 → 8": ((2, 4, 2, 2), (2, 4, 2, 8)),
    "20 → 40 layers": ((2, 4, 2, 4), (4, 8, 4, 4)),
    "20 → 40 layers, r = 1": ((0, 20, 0, 1), (0, 40, 0, 1)),
}
"""Layers of prelude, recurrent block and coda, and recurrences."""


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--topology", help="a TPU slice, such as v5e:2x2; this machine where left out")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if options.topology:
        os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu"}

    import jax
    from jax.experimental import topologies

    from looped.config import ModelConfig, OptimizerConfig
    from looped.execution import Execution
    from looped.programs import build
    from looped.sharding import MeshShape, make_mesh

    devices = jax.devices()[:1]
    if options.topology:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=options.topology).devices
    mesh = make_mesh(MeshShape(fsdp=len(devices)), devices)

    def measure(layers):
        """(seconds, processor seconds, instructions, bytes of code) of compiling one program."""
        prelude, recurrent, coda, r = layers
        model = ModelConfig(
            vocab_size=4096,
            sequence_length=256,
            d_model=128,
            n_heads=1,
            prelude_layers=prelude,
            recurrent_layers=recurrent,
            coda_layers=coda,
            recurrences=r,
            injection="passthrough" if r == 1 else "linear",
        )
        jax.clear_caches()
        lowered = build(model, OptimizerConfig(), Execution(unroll=False), mesh).lower(8)
        at, used = time.perf_counter(), time.process_time()
        compiled = lowered.compile()
        seconds, processor = time.perf_counter() - at, time.process_time() - used
        instructions = len(re.findall(r"^\s+(?:ROOT )?%?[\w.-]+ = ", compiled.as_text(), re.MULTILINE))
        return seconds, processor, instructions, compiled.memory_analysis().generated_code_size_in_bytes

    units = ("s", "s of processor time", "instructions", "bytes of code")
    for name, pair in PAIRS.items():
        found = [[measure(layers) for layers in pair] for _ in range(options.repeats)]
        print(name)
        for i, unit in enumerate(units):
            small, large = (min(run[side][i] for run in found) for side in (0, 1))
            print(f"  {large / small if small else float('nan'):5.2f}  ({small:,.4g} → {large:,.4g} {unit})")


if __name__ == "__main__":
    main()
