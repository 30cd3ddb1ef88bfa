"""What a share's machine says of itself: one small JSON file, `SWEEP/.launch/shares/3-of-8.json`.

Written on the machine, read where the sweep was launched.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Iterator
from typing import Literal

from etils import epath

from looped.errors import UserError
from looped.files import write_whole
from looped.jsonable import from_json, parse_json, to_json
from looped.text import seconds_since

FOLDER = "shares"


@dataclasses.dataclass(frozen=True)
class Mark:
    """How far one share is."""

    share: int
    shares: int
    state: Literal["running", "stopped", "done", "failed"]
    """`stopped`: told to, it goes on when started again; `failed`: given up."""
    failures: int = 0
    """Times that the sweep ended otherwise than done or told to stop."""
    status: int | None = None
    """Exit status of the last such end."""
    reason: str | None = None
    """The last line of it."""
    host: str = ""
    updated_at: str = ""

    @property
    def silent_seconds(self) -> float:
        """Since it was written; 0 where it does not say when."""
        return seconds_since(self.updated_at) or 0.0

    @property
    def over(self) -> bool:
        return self.state in ("done", "failed")


def file_name(share: int, shares: int) -> str:
    return f"{share}-of-{shares}.json"


def write(folder: epath.PathLike, mark: Mark) -> None:
    """Writes the mark, with the time, into a launch's folder.  One line, so that files can be read joined."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    path = epath.Path(folder) / FOLDER / file_name(mark.share, mark.shares)
    write_whole(path, json.dumps(to_json(dataclasses.replace(mark, updated_at=now))) + "\n")


def read(folder: epath.PathLike, share: int, shares: int) -> Mark | None:
    """The share's mark; None where there is none."""
    path = epath.Path(folder) / FOLDER / file_name(share, shares)
    try:
        text = path.read_bytes().decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
    return next(parse(text), None)


def parse(text: str) -> Iterator[Mark]:
    """The marks in files joined by end; a line that is none, half written, is left out."""
    for line in text.splitlines():
        try:
            yield from_json(Mark, parse_json(line))
        except (ValueError, UserError):
            continue
