"""Sub-commands that move models between this code and the published one."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import tyro


@dataclasses.dataclass
class Convert:
    """Turn a checkpoint of the published code into a run, or a run into such a checkpoint.

    The source says which: a .safetensors or .pt file (for which PyTorch must be installed) becomes a run's folder,
    a run's folder becomes a file. There and back, every array keeps its bits.
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """The published arrays' file, or a run's folder."""
    target: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """The new run's folder, or the arrays' file to write."""
    meta: Annotated[
        str | None,
        tyro.conf.arg(
            metavar="FILE", help_behavior_hint="(default: meta_N.json by model_N.pt, else X.json by X)"
        ),
    ] = None
    """The published meta JSON that belongs to the arrays."""
    data: str = "fineweb-edu"
    """The data set that evaluating and generating with the new run will read."""

    def run(self) -> int:
        from looped.convert import export_published, import_published, meta_path
        from looped.tensors import SUFFIXES

        if self.source.endswith(SUFFIXES):
            meta = self.meta or meta_path(self.source)
            record = import_published(self.source, meta, self.target, self.data)
            total = record.parameters.total
            print(f"{self.target}: run {record.run_id} at step {record.step:,}, {total:,} parameters.")
        else:
            meta = self.meta or meta_path(self.target)
            export_published(self.source, self.target, meta)
            print(f"{self.target}, {meta}: written from {self.source}.")
        return 0
