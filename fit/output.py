"""Files written whole or not at all, and numbers that are never NaN."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from looped.errors import UserError, unwritable

WRITTEN = (
    "losses.csv", "minima.csv", "parameters.csv", "phi.json", "tables.md", "tables.tex", "isoflops.png",
    "residuals.png", "profile.png", "multipliers.png",
)  # fmt: skip
"""Every file that a fit or an export leaves."""


TABLE = "losses.csv"
"""Of these the name that a user's own file may well have."""
COLUMNS = ("arm", "recurrences", "budget_flops", "n_once", "n_rec", "tokens", "loss")
"""How the table that is written begins."""


def check_output(sources: epath.PathLike | Sequence[epath.PathLike], out_dir: epath.PathLike) -> None:
    """Raises `UserError` unless results can be written into `out_dir`, over none of `sources` and no other's table.

    Nothing is made.  Called before a fit, which takes longer.
    """
    out = epath.Path(out_dir)
    paths = [sources] if isinstance(sources, (str, os.PathLike)) else list(sources)
    there = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not there.is_dir():
        raise UserError(f"output is {out}, and {there} is a file; give another output folder.")
    read = {epath.Path(path).resolve() for path in paths}
    for name in WRITTEN:
        if (out / name).is_dir():
            raise UserError(f"output is {out}, where {name} is a folder; give another output folder.")
        if (out / name).resolve() in read:
            raise UserError(
                f"output is {out}, whose {name} is read and would be replaced; give another folder."
            )
    if not (out / TABLE).exists():
        return
    header = (out / TABLE).read_bytes().partition(b"\n")[0].decode(errors="replace").strip()
    if tuple(header.split(",")[: len(COLUMNS)]) != COLUMNS:
        raise UserError(f"output is {out}, whose {TABLE} was not written by a fit; give another folder.")


def write_files(out_dir: epath.PathLike, files: Mapping[str, bytes | str]) -> list[str]:
    """Writes `files` (name to content) under `out_dir`: all are there, and then each replaces in one step what was.

    Returns their paths.  Raises OSError where the disk is full, `UserError` where the folder cannot be written.
    """
    out = epath.Path(out_dir)
    parts = {out / f".{name}.{secrets.token_hex(8)}.part": out / name for name in files}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for part, content in zip(parts, files.values(), strict=True):
            part.write_bytes(content.encode() if isinstance(content, str) else content)
        for part, path in parts.items():
            part.replace(path)
    except OSError as error:
        raise unwritable(error, f"output is {out}", "give another output folder") from None
    finally:
        for part in parts:
            with contextlib.suppress(OSError):  # most have become files
                part.unlink()
    return [str(path) for path in parts.values()]


def plain(value: Any) -> Any:
    """JSON data with NaN and infinities as null, arrays as lists, tuples as lists."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def to_text(data: Any) -> str:
    """`data` as indented JSON that any parser reads."""
    return json.dumps(plain(data), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
