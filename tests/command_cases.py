"""What every sub-command is given, reads and leaves: the table from which its faults are tried."""

import dataclasses
import json
import shutil

MODEL = "--d-model 16 --n-heads 1 --recurrent-layers 1 --prelude-layers 0 --coda-layers 0"
RUN = f"{MODEL} --sequence-length 32 --steps 3 --batch-size 4 --validation-sequences 4"


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to call a command that works in the workspace, whose paths are relative to it.

    `reads` are files that it needs: none can be missing, a folder, or rubbish.  `output` is the word of the call that
    names what it makes, a folder unless `file`; `leaves` are patterns of names that a stopped command may leave, to go
    on from.  `works`: it ends within seconds, so that it is driven to its end; `takes_long`, but not soon enough for a
    plain test.  `by_orbax`: threads that are not Python's write.  `silent`: it says nothing on standard output.
    """

    argv: tuple[str, ...]
    reads: tuple[str, ...] = ()
    output: str | None = None
    file: bool = False
    leaves: tuple[str, ...] = ()
    works: bool = True
    takes_long: bool = False
    by_orbax: bool = False
    silent: bool = False
    status: int = 0


def case(line, *reads, **rest):
    return Case(tuple(line.split()), reads, **rest)


LOSSES, OTHER = "losses.csv", "truncated.csv"
RECORD = "sweep/{run}/record/metadata"
LAUNCH = "sweep/.launch/launch.json"
CHECK = "tpu check --topology v5e:4x4 --preset quickstart"
FIT = f"{LOSSES} --resamples 50"

CASES = {
    "quickstart": [case("quickstart --output out", output="out", works=False)],
    "grid": [case("grid"), case("grid quickstart --json")],
    "plan": [
        case("plan quickstart --slice v5e:4x4"),
        case("plan quickstart --law phi.json --json", "phi.json"),
        case("plan quickstart --check check.json", "check.json"),
        case(f"plan quickstart --from {LOSSES}", LOSSES, takes_long=True),
    ],
    "sweep run": [case("sweep run plan.json --output out", "plan.json", output="out", works=False)],
    "sweep status": [
        case("sweep status sweep", "sweep/sweep.json"),
        case("sweep status sweep --json", "sweep/sweep.json"),
    ],
    "sweep collect": [
        case("sweep collect sweep"),
        case("sweep collect sweep --output out.csv", output="out.csv", file=True, silent=True),
    ],
    "train": [
        case(
            f"train --output out --source data {RUN}", "data/metadata.json",
            output="out", leaves=(r"^out/",), takes_long=True, by_orbax=True,
        )
    ],
    "data prepare": [
        case("data prepare data --sequence-length 32", "data/metadata.json"),
        case("data prepare counting --sequence-length 32"),
    ],
    "data pack": [
        case(
            "data pack --source text.jsonl --validation-share 0.2 --tokenizer tokenizer.json --workers 0"
            " --sequence-length 16 --output out",
            "text.jsonl", "tokenizer.json", output="out", leaves=(r"^out/.*unfinished",),
        )
    ],
    "data check": [
        case(
            "data check data",
            "data/metadata.json", "data/dataset_info.json", "data/packed_rows-train.array_record-00000",
        )
    ],
    "parameters": [case("parameters")],
    "tpu check": [
        case(f"{CHECK} --output out", output="out", leaves=(r"^out/compiles\.jsonl$",)),
        case(
            f"{CHECK} --output kept --json out.json",
            output="out.json", file=True, leaves=(r"^kept/compiles\.jsonl$",),
        ),
    ],
    "tpu launch": [
        case("tpu launch quickstart --engine ssh --hosts one --output /sweep --source looped.whl --dry-run")
    ],
    "tpu watch": [case("tpu watch sweep", LAUNCH, works=False)],
    "tpu list": [case("tpu list sweep", LAUNCH, works=False)],
    "tpu delete": [case("tpu delete sweep --dry-run", LAUNCH)],
    "eval": [
        case(
            "eval sweep/{run} --recurrences 1 --sequences 4 --output out", RECORD, "data/metadata.json",
            output="out", takes_long=True,
        )
    ],
    "generate": [case("generate sweep/{run} abc --new-tokens 2", RECORD, takes_long=True)],
    "convert": [
        case(
            "convert model_000003.safetensors out", "model_000003.safetensors", "meta_000003.json",
            output="out", leaves=(r"^\.out\.",), by_orbax=True,
        ),
        case("convert sweep/{run} out.safetensors", RECORD, output="out.safetensors", file=True),
    ],
    "fit": [case(f"fit {FIT} --output out", LOSSES, output="out", takes_long=True)],
    "compare": [case(f"compare {OTHER} {FIT}", LOSSES, OTHER, takes_long=True)],
    "equivalent": [case(f"equivalent {FIT} --n-once 1e5 --n-rec 1e5", LOSSES, takes_long=True)],
    "minima": [case(f"minima {LOSSES}", LOSSES)],
    "export": [case(f"export {FIT} --output out", LOSSES, output="out", takes_long=True, works=False)],
}  # fmt: skip
"""By command, in the order of `looped --help`: a command that is not here fails its test."""


class CompilesNothing:
    """In place of a worker of `looped tpu check`: every program fits."""

    def compile(self, job):
        from tpu_launch.compile_check import Compiled, Memory, Times

        memory, times = Memory(2**30, 0, 0, 0), Times(0.5, 0.5, 0.1, 0.1, 0.0, 0.0, "products")
        mesh = {"replica": 1, "fsdp": 4, "sequence": 1, "tensor": 1}
        return Compiled("compiled", mesh=mesh, hbm_bytes=memory.total, memory=memory, flops=1e12, times=times)

    def kill(self):
        pass


def build(folder, packed_folder):
    """Makes the workspace in `folder` from a prepared data set; returns the id of the run in its sweep."""
    from experiments.manifest import Manifest, write
    from fit.reading import EXAMPLES
    from looped.config import RunSpec
    from looped.convert import import_published
    from looped.jsonable import from_json, to_json
    from tpu_launch.launch import Launch, Ssh
    from tpu_launch.store import launch_text

    shutil.copytree(packed_folder, folder / "data")
    shutil.copy(EXAMPLES / "paper-vanilla.csv", folder / LOSSES)
    shutil.copy(EXAMPLES / "paper-truncated.csv", folder / OTHER)
    arrays, meta = folder / "model_000003.safetensors", folder / "meta_000003.json"
    fields = _published(arrays)
    meta.write_text(json.dumps({"step": 3, "tokens": 3 * 4 * 32, "val_loss": 5.5, "model_config": fields}))
    record = import_published(arrays, meta, folder / "made", data="data")
    sweep = folder / "sweep"
    sweep.mkdir()
    (folder / "made").rename(sweep / record.run_id)
    spec = from_json(RunSpec, record.spec)
    write(sweep, Manifest("quickstart", (spec,)))
    (folder / "plan.json").write_text(json.dumps({"runs": [{"spec": to_json(spec)}]}))
    cells = {"topology": "v5e:4x4", "cells": [{"run_ids": ["x"], "run_seconds": {"x": 1.0}}]}
    (folder / "check.json").write_text(json.dumps(cells))
    law = {"phi": 0.46, "E": 1.7, "A": 400.0, "alpha": 0.34, "B": 410.0, "beta": 0.28}
    (folder / "phi.json").write_text(json.dumps({"schema_version": 1, "arms": {"full": law}}))
    texts = [f"{i}: " + " ".join(map(str, range(i, i + 30))) for i in range(200)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "tokenizer.json").write_text(_word_pieces())
    (folder / "looped.whl").write_bytes(b"a wheel, for all that is looked at")
    (sweep / ".launch").mkdir()
    launch = Launch("quickstart", str(sweep), 1, "looped.whl", ssh=Ssh(("nowhere",)))
    (folder / LAUNCH).write_text(launch_text(launch))
    return record.run_id


def _published(path):
    """Writes an untrained model's arrays under the published names; returns its published configuration."""
    from flax import nnx

    from looped.config import ModelConfig
    from looped.interop import config_to_reference, to_reference
    from looped.model import LoopedLM
    from looped.tensors import write_arrays

    config = ModelConfig(sequence_length=32, d_model=16, n_heads=1, recurrent_layers=1)
    write_arrays(path, to_reference(LoopedLM(config, nnx.Rngs(0))))
    return config_to_reference(config)


def _word_pieces():
    import tokenizers

    bytelevel = tokenizers.pre_tokenizers.ByteLevel
    ids = {"<s>": 0} | {letter: i for i, letter in enumerate(sorted(bytelevel.alphabet()), 1)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(ids, []))
    made.pre_tokenizer, made.decoder = bytelevel(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<s>"])
    return made.to_str()
