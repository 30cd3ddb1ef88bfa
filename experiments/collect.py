"""The records of one or many sweeps as one losses table, a row a run, that `looped fit` reads."""

from __future__ import annotations

import csv
import dataclasses
import io
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal

from etils import epath

from looped.errors import UserError, unwritable
from looped.files import forget_listings, write_whole
from looped.record import ParameterGroups, RunRecord, find_records


def _is_one_value(hint: Any) -> bool:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return all(kind in (str, int, float, type(None)) or typing.get_origin(kind) is Literal for kind in kinds)


COLUMNS = (
    *(name for name, hint in typing.get_type_hints(RunRecord).items() if _is_one_value(hint)),
    *(f"params_{field.name}" for field in dataclasses.fields(ParameterGroups)),
)
"""What a record says in one value, and its parameters by group, from which `looped fit` counts anew."""


@dataclasses.dataclass(frozen=True)
class Collected:
    """Each run once, with the folder of the record it was taken from; and what could not be read."""

    records: tuple[tuple[str, RunRecord], ...]
    unreadable: tuple[str, ...]

    def having(self, status: str) -> int:
        return sum(record.status == status for _, record in self.records)

    def to_csv(self) -> str:
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(_row(record) for _, record in self.records)
        return out.getvalue()


def _row(record: RunRecord) -> list[Any]:
    groups = {f"params_{name}": value for name, value in dataclasses.asdict(record.parameters).items()}
    values = [groups[name] if name in groups else getattr(record, name) for name in COLUMNS]
    return ["" if value is None else repr(value) if isinstance(value, float) else value for value in values]


def collect(directories: Sequence[epath.PathLike]) -> Collected:
    """Gathers the runs directly under each of `directories`, local or gs://.

    A run in several places is taken where it is done, or else has got furthest.  Raises `UserError` where there is no
    run at all, and where two records of one finished run differ in their loss, naming both.
    """
    found: dict[str, tuple[str, RunRecord]] = {}
    unreadable = []
    for directory in directories:
        forget_listings(directory)
        for path, record in find_records(directory):
            if isinstance(record, UserError):
                unreadable.append(str(record))
                continue
            place, kept = found.get(record.run_id, (path, record))
            if kept.status == record.status == "done" and kept.loss != record.loss:
                raise UserError(
                    f"run {record.run_id} has loss {kept.loss!r} in {place} and {record.loss!r} in {path}; it is one"
                    " run, so one of them is not what it says (other hardware or versions?): leave one folder out."
                )
            if (record.status == "done", record.step) > (kept.status == "done", kept.step):
                place, kept = path, record
            found[record.run_id] = place, kept
    if not found:
        named = ", ".join(map(str, directories))
        why = f": {unreadable[0]}" if unreadable else "; name folders that `looped sweep run` was given."
        raise UserError(f"no run is in {named}{why}")
    return Collected(tuple(found.values()), tuple(unreadable))


def write_table(path: epath.PathLike, collected: Collected) -> None:
    """Writes the table, over an earlier one of its kind alone; `UserError` where the file holds anything else."""
    path = epath.Path(path)
    if path.is_dir():
        raise UserError(f"output is {path}, which is a folder; name a file, such as {path / 'losses.csv'}.")
    if path.exists():
        header = path.read_bytes().decode(errors="replace").partition("\n")[0].split(",")
        if header[:2] != ["run_id", "status"] or "loss" not in header:
            raise UserError(f"output is {path}, which holds something else; name another file.")
    try:
        write_whole(path, collected.to_csv())
    except OSError as error:
        raise unwritable(error, f"output is {path}", "name another file") from None
