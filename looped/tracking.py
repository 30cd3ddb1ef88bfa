"""A run's curve: lines of JSON in its folder always, and TensorBoard, Weights & Biases or trackio where asked for.

`RUN/metrics.jsonl` has one object a line: `step`, `loss` (training, nats per token), `tokens_per_second` (null until it
is known), `learning_rate_multiplier` (of every group's rate) and `time` (UTC).  Steps only rise: a process that goes on
from a checkpoint drops the lines beyond it, since it trains those steps again, to the same losses.

One process of a run tracks.  Nothing that goes wrong here ends a training: it is said once, and that tracker is left
out.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from etils import epath

from looped.errors import UserError, first_line, nearest
from looped.files import is_remote, write_whole
from looped.jsonable import parse_json

FILE = "metrics.jsonl"
POINTS = 1000  # of a run's curve, about: a fixed number of steps lies between two, so that runs of one length agree
PROJECT = "looped"  # in the trackers that have projects, unless their own environment variables name another


class Tracker(Protocol):
    """Something that takes the curve of one run."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class Tracking:
    """The curve of one run.  `start` is the step of the checkpoint that training goes on from, 0 at the beginning.

    `names` are those of TRACKERS.  `config` is the run's spec as JSON, shown by the trackers that show it.
    """

    def __init__(
        self,
        run_dir: epath.PathLike,
        run_id: str,
        *,
        start: int,
        steps: int,
        config: Mapping[str, Any],
        names: Sequence[str] = (),
        writer: bool = True,
    ):
        self._every = max(1, round(steps / POINTS))
        self._steps, self._last = steps, start
        self._trackers: dict[str, Any] = {}
        if writer:
            self._open("the curve", lambda: Lines(epath.Path(run_dir) / FILE, start))
            for name in names:
                kind = TRACKERS[name][1]
                self._open(name, lambda kind=kind: kind(epath.Path(run_dir), run_id, config))

    def point(
        self, step: int, loss: float, tokens_per_second: float | None, learning_rate_multiplier: float
    ) -> None:
        """Notes the training loss of `step`, where the curve has a point: every so many steps and the last one.

        A step that was noted already is passed over.
        """
        if not self._trackers or step <= self._last or (step % self._every and step != self._steps):
            return
        self._last = step
        values = {
            "loss": float(loss),
            "tokens_per_second": None if tokens_per_second is None else round(float(tokens_per_second), 1),
            "learning_rate_multiplier": float(learning_rate_multiplier),
        }
        self._each(lambda tracker: tracker.log(step, values))

    def flush(self) -> None:
        """Has what was noted on disk or sent; at each checkpoint, so that no point before one is lost."""
        self._each(lambda tracker: tracker.flush())

    def close(self, validation_loss: float | None = None) -> None:
        """Ends the curve, with the final validation loss in nats per token where there is one."""
        if validation_loss is not None:
            final = {"validation_loss": float(validation_loss)}
            self._each(lambda tracker: isinstance(tracker, Lines) or tracker.log(self._steps, final))
        self._each(lambda tracker: tracker.close())
        self._trackers = {}

    def _open(self, name: str, make: Callable[[], Tracker]) -> None:
        try:
            self._trackers[name] = make()
        except Exception as error:
            _warn(name, error)

    def _each(self, do: Callable[[Any], Any]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                do(tracker)
            except Exception as error:
                del self._trackers[name]
                _warn(name, error)


def _warn(name: str, error: Exception) -> None:
    print(
        f"looped: {name} is not tracked any further ({first_line(error)}); training goes on.", file=sys.stderr
    )


class Lines:
    """The file of JSON lines.  On an object store, which cannot append, it is kept here and written whole."""

    def __init__(self, path: epath.Path, start: int):
        self._path = path
        self._kept = [line for line in _lines(path) if line["step"] <= start]
        self._file = None
        self._write()
        if not is_remote(path):
            self._file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 -- closed by `close`
            self._kept = []

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        time = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        finite = {k: v if v is not None and math.isfinite(v) else None for k, v in values.items()}
        line = {"step": step, **finite, "time": time}
        if self._file is None:
            self._kept.append(line)
        else:
            self._file.write(json.dumps(line) + "\n")

    def flush(self) -> None:
        if self._file is None:
            self._write()
        else:
            self._file.flush()

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            self._file.close()

    def _write(self) -> None:
        write_whole(self._path, "".join(json.dumps(line) + "\n" for line in self._kept))


def _lines(path: epath.Path) -> list[dict[str, Any]]:
    """What the file holds, without a last line that a kill cut short."""
    found = []
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    for line in text.splitlines():
        try:
            value = parse_json(line)
        except ValueError:
            continue
        if isinstance(value, dict) and isinstance(value.get("step"), int):
            found.append(value)
    return found


def _known(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}


class TensorBoard:
    """Event files in `RUN/tensorboard`, written by the `tensorboard` package with no TensorFlow."""

    def __init__(self, run_dir: epath.Path, run_id: str, config: Mapping[str, Any]):
        del run_id, config
        from tensorboard.summary import Writer  # pyright: ignore[reportMissingImports]

        self._writer = Writer(os.fspath(run_dir / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        for name, value in _known(values).items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases that goes by the run's id, so that a process that resumes goes on in it.

    Steps that it trains again are dropped there: the first values stay, and they are the same.
    """

    def __init__(self, run_dir: epath.Path, run_id: str, config: Mapping[str, Any]):
        import wandb  # pyright: ignore[reportMissingImports]

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run_id,
            name=_name(config, run_id),
            group=config.get("arm"),
            config=dict(config),
            resume="allow",
            dir=None if is_remote(run_dir) else os.fspath(run_dir),
        )

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        self._run.log(_known(values), step=step)

    def flush(self) -> None:
        """It sends by itself."""

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of trackio, named by the run's id; a process that resumes goes on in it and repeats a few steps."""

    def __init__(self, run_dir: epath.Path, run_id: str, config: Mapping[str, Any]):
        del run_dir
        import trackio  # pyright: ignore[reportMissingImports]

        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=run_id,
            group=config.get("arm"),
            config=dict(config),
            resume="allow",
            embed=False,
        )

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        self._run.log(_known(values), step=step)

    def flush(self) -> None:
        """It sends by itself."""

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, tuple[str, Callable[[epath.Path, str, Mapping[str, Any]], Tracker]]] = {
    "tensorboard": ("tensorboard", TensorBoard),
    "wandb": ("wandb", WeightsAndBiases),
    "trackio": ("trackio", Trackio),
}
"""Each tracker's package, which is also the name of the extra that installs it, and what it makes of a run."""


def _name(config: Mapping[str, Any], run_id: str) -> str:
    model = config.get("model") or {}
    return f"{config.get('arm')} r={model.get('recurrences')} d={model.get('d_model')} {run_id}"


def check_trackers(names: Sequence[str]) -> None:
    """Raises `UserError` for a tracker that is unknown or whose package is not installed."""
    for name in names:
        if name not in TRACKERS:
            raise UserError(f"track has {name!r}, which is unknown.{nearest(name, TRACKERS)}")
        package = TRACKERS[name][0]
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"track has {name}, and its package is not installed: pip install 'looped[{name}]'"
            )
