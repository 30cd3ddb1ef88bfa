"""A sweep's folder: which runs belong to it.

`sweep.json` lists the runs of the whole sweep, whichever share or part of it a command trains; each has a folder of its
own, named by its run id.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence

from etils import epath

from looped.config import RunSpec
from looped.errors import UserError, first_line
from looped.files import write_whole
from looped.jsonable import from_json, read_json, to_json
from looped.mechanisms import check_named

SCHEMA_VERSION = 1
MANIFEST_FILE = "sweep.json"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a sweep trains."""

    preset: str
    specs: tuple[RunSpec, ...]
    schema_version: int = SCHEMA_VERSION

    @property
    def run_ids(self) -> frozenset[str]:
        return frozenset(spec.run_id for spec in self.specs)

    @property
    def fingerprint(self) -> str:
        """Of which runs there are, whatever their order."""
        return hashlib.sha256(" ".join(sorted(self.run_ids)).encode()).hexdigest()[:12]


def read(directory: epath.PathLike) -> Manifest | None:
    """Returns the manifest in `directory`, or None; raises `UserError` if it cannot be read or understood."""
    path = epath.Path(directory) / MANIFEST_FILE
    try:
        data = read_json(path, "name another folder", required=False)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UserError:
        raise
    except Exception as error:
        raise _unreachable(directory, error) from None
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise UserError(
            f"{path}: sweep schema {version!r}, this version reads {SCHEMA_VERSION};"
            " use the `looped` that wrote it."
        )
    for spec in data["specs"] if isinstance(data.get("specs"), list) else ():
        check_named(spec, str(path))
    return from_json(Manifest, data, f"{path}: ")


def settle(directory: epath.PathLike, preset: str, specs: Sequence[RunSpec]) -> Manifest:
    """Returns what `directory` is to hold once `specs` are trained there; touches nothing.

    In a folder that is absent or empty that is `specs`.  Where a sweep is there, `specs` may be a part of it, in any
    order, which leaves it as it is, or have all of its runs and more, so that it grows.  Anything else raises
    `UserError`: no run in a sweep's folder may be another's.
    """
    root = epath.Path(directory)
    wanted = Manifest(preset, tuple(specs))
    if not _exists(root):
        return wanted
    if not root.is_dir():
        raise UserError(f"output is {root}, which is a file; name a folder.")
    there = read(root)
    if there is None:
        found = sorted(p.name for p in root.iterdir() if not p.name.startswith("."))
        if found:
            raise UserError(
                f"output is {root}, which holds {found[0]!r} and no sweep; name a new or empty folder."
            )
        return wanted
    if wanted.run_ids <= there.run_ids:
        return there
    foreign = there.run_ids - wanted.run_ids
    if foreign:
        raise UserError(
            f"output is {root}, which holds another sweep ({there.preset!r}, {len(foreign)} of whose"
            f" {len(there.specs)} runs are not among these {len(specs)}); name another folder."
        )
    return wanted


def _exists(root: epath.Path) -> bool:
    try:
        return root.exists()
    except Exception as error:
        raise _unreachable(root, error) from None


def _unreachable(root: epath.PathLike, error: Exception) -> UserError:
    if isinstance(error, ImportError):  # gs:// needs a package of its own
        remedy = "pip install 'looped[gcs]'"
    else:
        remedy = "see that it exists and that this account may read it"
    return UserError(f"{root} cannot be reached ({first_line(error)}); {remedy}")


def write(directory: epath.PathLike, manifest: Manifest) -> None:
    """Replaces the manifest of `directory` atomically."""
    write_whole(epath.Path(directory) / MANIFEST_FILE, json.dumps(to_json(manifest), indent=1) + "\n")
