"""RunRecord: what a run says about itself, and how to find every record under a directory.

A record is an Orbax JSON checkpoint, `<run directory>/record/metadata`: written atomically, on a local disk or gs://
alike, readable as plain JSON by anything.  `fit` imports it, so it imports no JAX.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from etils import epath

from looped.errors import UserError, nearest
from looped.files import write_whole
from looped.jsonable import from_json, read_json, to_json

SCHEMA_VERSION = 1
RECORD_FOLDER = "record"
_ORBAX_JSON_FILE = "metadata"

Status = Literal["running", "done", "failed"]


@dataclasses.dataclass(frozen=True)
class ParameterGroups:
    """Numbers of parameters by role, unshared: the recurrent block counts once whatever r.

    `embed` and `unembed` include the rows that pad the vocabulary.
    """

    embed: int
    unembed: int
    prelude: int
    recurrent_block: int
    coda: int
    injection: int
    outer_norms: int

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


CONVENTIONS: dict[str, str] = {
    "published": "blocks with their norms; the injection in n_once (arXiv:2604.21106)",
    "injection-recurrent": "as published, but the injection in n_rec",
    "no-injection": "as published, but without the injection",
    "unembedding-once": "as published, with the unembedding in n_once",
    "embeddings-once": "as published, with embedding and unembedding in n_once",
}
"""Ways to count n_once and n_rec; φ depends on the choice, so every result names it."""


def count_parameters(
    groups: ParameterGroups, recurrences: int, convention: str = "published"
) -> tuple[int, int]:
    """Returns (n_once, n_rec): parameters used once a token, and parameters used once a pass.

    A model that is not looped (r = 1 with neither prelude nor coda) has n_once = 0 under the published convention.
    """
    if convention not in CONVENTIONS:
        raise UserError(f"convention {convention!r} is unknown.{nearest(convention, CONVENTIONS)}")
    once, recurrent = groups.prelude + groups.coda, groups.recurrent_block
    if convention == "injection-recurrent":
        return once, recurrent + groups.injection
    if convention != "no-injection":
        once += groups.injection
    if convention in ("unembedding-once", "embeddings-once"):
        once += groups.unembed
    if convention == "embeddings-once":
        once += groups.embed
    return once, recurrent


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """Everything the fit needs of a run and everything needed to repeat it.

    `loss` is the final validation loss in nats per token (None until the run is done); `tokens` is the number trained
    on; `backprop_recurrences` is the k that ran (equal to `recurrences` for full backprop, never absent).
    `spec` is the run's `RunSpec` as JSON; `epochs` how often the data is gone through, `tokenizer_fingerprint` which
    tokenizer made it; `execution` how the run was carried out (mesh, remat, precision), which is no part of its id;
    `loss_jumps` are the steps whose training loss jumped (`looped.jumps`).
    """

    run_id: str
    status: Status
    arm: str
    recurrences: int
    backprop_recurrences: int
    d_model: int
    n_once: int
    n_rec: int
    convention: str
    parameters: ParameterGroups
    flops_per_token: float
    budget_flops: float | None
    tokens: int
    steps: int
    seed: int
    loss: float | None
    validation_tokens: int | None
    data_hash: str
    epochs: float
    spec: dict[str, Any]
    versions: dict[str, str]
    device: str
    started_at: str
    updated_at: str
    step: int = 0
    train_seconds: float = 0.0
    reason: str | None = None
    tokenizer_fingerprint: str | None = None
    execution: dict[str, Any] = dataclasses.field(default_factory=dict)
    loss_jumps: tuple[int, ...] = ()
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self):
        if self.status == "done" and (self.loss is None or not math.isfinite(self.loss)):
            raise UserError(f"record {self.run_id}: status done needs a finite loss, got {self.loss!r}.")


def write_record(run_dir: epath.PathLike, record: RunRecord) -> None:
    """Replaces the record of `run_dir` in one step: a kill leaves the old one or the new one.

    Of several processes, one calls it.
    """
    folder = epath.Path(run_dir).absolute() / RECORD_FOLDER
    content = to_json(record)
    if (folder / _ORBAX_JSON_FILE).exists():  # which Orbax would first remove
        write_whole(folder / _ORBAX_JSON_FILE, json.dumps(content))
        return
    import jax
    import orbax.checkpoint as ocp

    own = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=own, active_processes={own})
    handler = ocp.JsonCheckpointHandler(multiprocessing_options=alone)
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
        checkpointer.save(folder, args=ocp.args.JsonSave(content), force=True)


def read_record(run_dir: epath.PathLike) -> RunRecord | None:
    """Returns the record of `run_dir`, or None where it has none yet.  `UserError` if it cannot be understood."""
    path = epath.Path(run_dir) / RECORD_FOLDER / _ORBAX_JSON_FILE
    try:
        data = read_json(path, "move the run's folder away and run again", required=False)
    except (FileNotFoundError, NotADirectoryError):
        return None
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise UserError(
            f"{path}: record schema {version!r}, this version reads {SCHEMA_VERSION}; use the `looped` that wrote it."
        )
    return from_json(RunRecord, data, f"{path}: ")


def find_records(directory: epath.PathLike) -> Iterator[tuple[str, RunRecord | UserError]]:
    """Yields (run directory, record or why it is unreadable) for every run directly under `directory`, sorted by name.

    `directory` may itself be a run.  Raises `UserError` when it does not exist.
    """
    root = epath.Path(directory)
    if not root.is_dir():
        raise UserError(f"{root}: no such directory of runs.")

    def read(path: epath.Path) -> RunRecord | UserError | None:
        try:
            return read_record(path)
        except UserError as error:
            return error

    own = read(root)
    if own is not None:
        yield str(root), own
        return
    paths = sorted(p for p in root.iterdir() if p.name != RECORD_FOLDER)
    with ThreadPoolExecutor(16) as pool:
        for path, record in zip(paths, pool.map(read, paths), strict=True):
            if record is not None:
                yield str(path), record
