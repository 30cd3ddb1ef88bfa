"""Files written whole or not at all, and numbers that are never NaN."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from looped.errors import UserError


def write_files(out_dir: epath.PathLike, files: Mapping[str, bytes | str]) -> list[str]:
    """Writes `files` (name to content) under `out_dir`, each replaced in one step; returns their paths."""
    out = epath.Path(out_dir)
    try:
        out.mkdir(parents=True, exist_ok=True)
        written = []
        for name, content in files.items():
            part = out / f".{name}.{os.getpid()}.part"
            part.write_bytes(content.encode() if isinstance(content, str) else content)
            part.replace(out / name)
            written.append(str(out / name))
    except OSError as error:
        raise UserError(
            f"{out}: cannot be written ({error.strerror or error}); give another output folder."
        ) from None
    return written


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
