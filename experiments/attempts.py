"""How often a run was begun without getting anywhere, so that one that cannot be trained does not hold up the others.

`RUN/attempts.json` counts the starts of a run since its record last got further.  A start is counted before training
begins, so that those count whose process was killed or whose machine was lost, and withdrawn when the run ends or is
told to stop.  After LIMIT of them the run's record says failed, and why; its checkpoints stay.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from etils import epath

from looped.config import RunSpec
from looped.credentials import without
from looped.errors import UserError, first_line
from looped.files import write_whole
from looped.jsonable import from_json, read_json, to_json
from looped.record import RunRecord, read_record

LIMIT = 3
FILE = "attempts.json"
_SILENT = "its process was killed or its machine lost"

Shared = Callable[[Callable[[], Any]], Any]
"""Has one process look or write, and returns what it found to all: `looped.distributed.from_writer`."""


@dataclasses.dataclass(frozen=True)
class Attempts:
    """Starts of a run since it got to `step`."""

    count: int = 0
    step: int = -1
    reasons: tuple[str, ...] = ()
    """Why they ended, as far as they could say."""
    again: bool = False
    """The run was given up and is to go on from its last checkpoint."""

    @property
    def why(self) -> str:
        return self.reasons[-1] if self.reasons else _SILENT


NONE = Attempts()


def read(run_dir: epath.PathLike) -> Attempts:
    """The attempts at a run that is not over; none counted where the file is missing or broken."""
    try:
        return from_json(Attempts, read_json(epath.Path(run_dir) / FILE, "", required=False))
    except (FileNotFoundError, NotADirectoryError, UserError):
        return NONE


def write(run_dir: epath.PathLike, attempts: Attempts) -> None:
    """Replaces the file; none is left where there is nothing to say."""
    path = epath.Path(run_dir) / FILE
    if not attempts.count and not attempts.again:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()
        return
    write_whole(path, json.dumps(to_json(attempts)) + "\n")


def retry(run_dir: epath.PathLike) -> None:
    """Starts a failed run again: from its checkpoint if it was given up, else afresh, its folder removed."""
    if read(run_dir).count >= LIMIT:
        write(run_dir, Attempts(again=True))
    else:
        epath.Path(run_dir).rmtree()


def attempt(
    spec: RunSpec,
    run_dir: epath.PathLike,
    train: Callable[..., RunRecord],
    *,
    options: Mapping[str, Any],
    shared: Shared | None = None,
    writer: bool = True,
) -> RunRecord:
    """`train(spec, run_dir, **options)`, counted; returns the run's record, which may say that it was given up.

    Of several processes that train together, all call it with `shared`, and one is the `writer`.  Raises what `train`
    raises; alone, the last error allowed is no error but a failed run.
    """
    found = _begin(spec, run_dir) if shared is None else shared(lambda: to_json(_begin(spec, run_dir)))
    if found is None:
        return _record_in(run_dir)
    before = found if isinstance(found, Attempts) else from_json(Attempts, found)
    after = before
    try:
        record = train(spec, run_dir, **options)
        after = NONE
        return record
    except (KeyboardInterrupt, UserError):  # told to stop, or bad input: no fault of the run
        raise
    except Exception as error:
        after = Attempts(before.count + 1, before.step, (*before.reasons, first_line(error)))
        given_up = writer and after.count >= LIMIT and _give_up(spec, run_dir, after)
        if shared is None and given_up:
            print(without(traceback.format_exc()), file=sys.stderr, flush=True)
            return _record_in(run_dir)
        raise
    finally:
        if writer:
            write(run_dir, after)


def _record_in(run_dir: epath.PathLike) -> RunRecord:
    record = read_record(run_dir)
    if record is None:
        raise LookupError(f"{run_dir} has lost its record")
    return record


def _begin(spec: RunSpec, run_dir: epath.PathLike) -> Attempts | None:
    """Counts a start and returns what was counted before it; None for a run that is over, or given up here."""
    record, found = read_record(run_dir), read(run_dir)
    if found.again and record is not None and record.status == "failed":
        from looped.record import write_record

        record = dataclasses.replace(record, status="running", reason=None)
        write_record(run_dir, record)
    if record is not None and record.status != "running":
        return None
    step = 0 if record is None else record.step
    before = found if step <= found.step and not found.again else Attempts(step=step)
    if before.count >= LIMIT and _give_up(spec, run_dir, before):
        return None
    write(run_dir, dataclasses.replace(before, count=before.count + 1))
    return before


def _give_up(spec: RunSpec, run_dir: epath.PathLike, attempts: Attempts) -> bool:
    """Has the record say that the run failed; False where there is none and none can be made."""
    from looped.record import write_record

    record = read_record(run_dir)
    try:
        record = record or _new_record(spec)
    except Exception:  # the data may be what is wrong
        return False
    reason = (
        f"it ended {attempts.count} times without getting further than step {record.step}: {attempts.why}"
    )
    write_record(run_dir, dataclasses.replace(record, status="failed", reason=reason))
    return True


def _new_record(spec: RunSpec) -> RunRecord:
    from looped.train import new_record, prepare_data

    return new_record(spec, prepare_data(spec))
