"""Tokens a second that the loader gives, beside numpy's memmap as the limit, from a warm page cache.

    taskset -c 0 python tests/benchmarks/data_loader.py [ROWS]

Rows of 2,049 tokens of uint16, by default 100,000 (410 MB) in six shards of array_record, shuffled, in batches of 64,
cast to int32 as for training.  On one core; a CPU second is the measure where others use the machine too.  `on disk`
leaves the rows in their files, as with a data set too large for memory; `in memory` is what smaller ones do.
"""

import itertools
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from looped.data import rows as row_sources
from looped.data.builder import PackPlan
from looped.data.loader import PackedData
from looped.data.pack import pack

LENGTH, BATCH, SECONDS = 2049, 64, 5.0


class Noise:
    """Documents of exactly one row, so that packing is quick; their tokens are drawn as Zipf's law has it."""

    name = "noise"

    def __init__(self, rows):
        self.rows = rows

    def description(self):
        return {"rows": self.rows}

    def documents(self, split):
        return ("x" for _ in range(self.rows if split == "train" else 1))


class Ids:
    """A tokenizer of 32,001 ids that draws them."""

    name, vocab_size, bos, fingerprint = "ids", 32_001, 1, "ids"

    def __init__(self):
        rng = np.random.default_rng(0)
        self.drawn = itertools.cycle(np.minimum(rng.zipf(1.2, (997, LENGTH - 1)), 32_000).astype(np.uint16))

    def encode(self, text):
        return next(self.drawn)

    def decode(self, ids):
        return ""


def tokens_a_second(batches):
    next(batches)
    count, began, used = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - began < SECONDS:
        next(batches)
        count += 1
    tokens = count * BATCH * (LENGTH - 1)
    return tokens / (time.process_time() - used), tokens / (time.perf_counter() - began)


def memmap_batches(path):
    rows = np.load(path, mmap_mode="r")
    rng = np.random.default_rng(0)
    while True:
        order = rng.permutation(len(rows))
        for first in range(0, len(rows) - BATCH, BATCH):
            yield rows[order[first : first + BATCH]].astype(np.int32)


def main():
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        pack(PackPlan(Noise(count), Ids(), LENGTH - 1, buffer_size=10), folder)
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
        print(f"{count:,} rows written in {time.perf_counter() - began:.0f} s, {size / 1e6:,.0f} MB on disk")
        memmap = Path(folder) / "rows.npy"
        data = PackedData(folder)
        stored = data._rows("train")
        np.save(memmap, stored.take(range(len(stored))))
        results = {"numpy memmap": tokens_a_second(memmap_batches(memmap))}
        for name, limit in (("in memory", 2**40), ("on disk", 0)):
            row_sources.IN_MEMORY_BYTES = limit
            for workers in (0, 1, 4):
                batches = PackedData(folder).train_batches(0, 0, BATCH, workers=workers)
                results[f"{name}, {workers} workers"] = tokens_a_second(batches)
        for name, (cpu, wall) in results.items():
            print(f"{name:<24}{cpu / 1e6:>8.1f} M tokens a CPU second, {wall / 1e6:>8.1f} M a second")


if __name__ == "__main__":
    main()
