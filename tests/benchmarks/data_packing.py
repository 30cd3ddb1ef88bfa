"""What packing takes: memory against the corpus's size, speed against workers, and the packer against its buffer.

    python tests/benchmarks/data_packing.py memory FOLDER [GB …]      # default 1 2 4
    python tests/benchmarks/data_packing.py workers FOLDER [MB]       # default 40
    python tests/benchmarks/data_packing.py buffer

`memory` makes JSON Lines files of that size in FOLDER (and removes them), packs them with 4 workers and bytes at
T = 8192, as long a text as 2,048 subwords, and samples the resident sets of all processes, shared pages counted in
each.  `workers` packs at T = 2048 with a SentencePiece model of 32,000 pieces (from `mistral-common`, where that is
installed) or a small byte-level BPE.  `buffer` times the packer alone.  Documents are lines of the docstrings corpus,
drawn anew, of log-normal lengths with a median of 2,000 characters.  CPU seconds are of all processes.
"""

import json
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

from looped.data.builder import PackPlan
from looped.data.corpus import get_source
from looped.data.pack import pack
from looped.data.packing import Packer
from looped.data.sources import SourceOptions, make_source
from looped.data.tokenizers import ByteTokenizer, get_tokenizer

FILE_BYTES = 250 * 10**6


def write_corpus(folder, size):
    """Files of `size` bytes in all, those after the first being it again, and one of 1/100 of that for validation."""
    lines = [
        line for text in get_source("docstrings").documents("train") for line in text.splitlines() if line
    ]
    rng, first = random.Random(0), folder / "part-000.jsonl"
    with first.open("w") as file:
        while file.tell() < min(FILE_BYTES, size):
            length, start, text = rng.lognormvariate(7.6, 1), rng.randrange(len(lines)), []
            while length > 0:
                text.append(lines[start % len(lines)])
                length -= len(text[-1])
                start += 1 if rng.random() < 0.9 else rng.randrange(len(lines))
            file.write(json.dumps({"text": "\n".join(text)}, ensure_ascii=False) + "\n")
    for index in range(1, round(size / first.stat().st_size)):
        os.link(first, folder / f"part-{index:03d}.jsonl")
    (folder / "validation.jsonl").write_bytes(
        first.read_bytes()[: int(size) // 100].rpartition(b"\n")[0] + b"\n"
    )


class Memory(threading.Thread):
    """Samples the resident sets of this process and its children, twice a second."""

    def __init__(self):
        super().__init__(daemon=True)
        self.samples, self.done = [], threading.Event()

    def run(self):
        page = os.sysconf("SC_PAGE_SIZE")
        while not self.done.wait(0.5):
            total, pids = 0, [os.getpid()]
            while pids:
                pid = pids.pop()
                try:
                    total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page
                    for task in Path(f"/proc/{pid}/task").iterdir():
                        pids += map(int, (task / "children").read_text().split())
                except OSError:
                    continue
            self.samples.append(total)


def timed_pack(folder, tokenizer, workers, sequence_length):
    source = make_source(
        str(folder / "part-*.jsonl"), SourceOptions(validation=str(folder / "validation.jsonl"))
    )
    output = folder / "packed"
    shutil.rmtree(output, ignore_errors=True)
    memory, began, used = Memory(), time.perf_counter(), cpu_seconds()
    memory.start()
    metadata = pack(PackPlan(source, tokenizer, sequence_length, long_documents="crop"), output, workers)
    seconds, used = time.perf_counter() - began, cpu_seconds() - used
    memory.done.set()
    shutil.rmtree(output)
    return metadata, seconds, used, memory.samples


def cpu_seconds():
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def line_of(metadata, seconds, used, samples):
    train = metadata.train
    counted = train.statistics
    return (
        f"{train.text_bytes / 1e6:>8,.0f} MB {counted.documents:>10,} documents {counted.document_tokens / 1e6:>8,.0f}"
        f" M tokens {seconds:>6.0f} s {used:>6.0f} CPU s {counted.documents / seconds:>8,.0f} documents/s"
        f" {counted.document_tokens / 1e6 / seconds:>6.2f} M tokens/s  fill {train.row_fill:.2%}"
        f"  cropped {train.cropped_share:.2%}  memory peak {max(samples, default=0) / 2**20:,.0f} MiB,"
        f" median {np.median(samples or [0]) / 2**20:,.0f} MiB"
    )


def memory(folder, sizes):
    """Corpus and pack are made by a process each, so that none has memory of the one before."""
    for size in sizes:
        for step in ("corpus", "pack"):
            subprocess.run([sys.executable, __file__, step, str(folder), str(size)], check=True)
        shutil.rmtree(folder / "corpus")


def make_corpus(folder, size):
    shutil.rmtree(folder / "corpus", ignore_errors=True)
    (folder / "corpus").mkdir(parents=True)
    write_corpus(folder / "corpus", int(size * 1e9))


def workers(folder, megabytes):
    corpus = folder / "corpus"
    make_corpus(folder, megabytes / 1000)
    hashes = set()
    for count in (0, 1, 2, 4):
        result = timed_pack(corpus, subword(), count, 2048)
        hashes.add(result[0].hash)
        print(f"{count} workers:", line_of(*result), flush=True)
    print("the same rows" if len(hashes) == 1 else "DIFFERENT ROWS")
    shutil.rmtree(corpus)


def subword():
    try:
        import mistral_common
    except ImportError:
        sys.path.insert(0, str(Path(__file__).parents[1] / "looped" / "data"))
        from vocabularies import json_tokenizer

        from looped.data import subword

        return subword.load("small", "tokenizer.json", json_tokenizer())
    return get_tokenizer(str(next(Path(mistral_common.__file__).parent.rglob("tokenizer.model*"))))


def buffer():
    rng = np.random.default_rng(0)
    for size in (100, 1_000, 10_000, 100_000, 1_000_000):
        lengths = np.minimum(rng.lognormal(6.2, 1, size + 300_000).astype(int) + 1, 20_000)
        document = np.zeros(20_000, np.uint16)
        packer = Packer(2049, 1, np.dtype(np.uint16), size, "crop")
        for length in lengths[:size]:
            packer.add(document[:length])
        before, began = packer.statistics.document_tokens, time.process_time()
        for length in lengths[size:]:
            packer.add(document[:length])
        seconds = time.process_time() - began
        tokens = packer.statistics.document_tokens - before
        print(
            f"buffer {size:>9,}: {seconds / 300_000 * 1e6:5.2f} µs a document, {tokens / 1e6 / seconds:6.0f} M tokens/s"
        )


if __name__ == "__main__":
    kind, rest = sys.argv[1], sys.argv[2:]
    if kind == "memory":
        memory(Path(rest[0]), rest[1:] or ["1", "2", "4"])
    elif kind == "corpus":
        make_corpus(Path(rest[0]), float(rest[1]))
    elif kind == "pack":
        packed = timed_pack(Path(rest[0]) / "corpus", ByteTokenizer(), 4, 8192)
        print(f"{rest[1]} GB, 4 workers:", line_of(*packed), flush=True)
    elif kind == "workers":
        workers(Path(rest[0]), int(rest[1]) if len(rest) > 1 else 40)
    else:
        buffer()
