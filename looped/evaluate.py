"""Validation loss against the number of passes at test time."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import math
from collections.abc import Callable, Sequence

import jax
from etils import epath
from flax import nnx

from looped import train
from looped.data.loader import PackedData
from looped.errors import UserError, unwritable
from looped.files import write_whole
from looped.jsonable import to_json
from looped.loss import cross_entropy_sum
from looped.restore import TrainedRun


@dataclasses.dataclass(frozen=True)
class LossAt:
    """Validation loss in nats per token; None where it is not finite."""

    recurrences: int
    loss: float | None


@dataclasses.dataclass(frozen=True)
class RecurrenceCurve:
    """What `looped eval` measures: the losses of one run's model at several numbers of passes.

    `step` is the training step of the model, of `steps` in all; the trained r is `trained_recurrences`.
    """

    run_id: str
    step: int
    steps: int
    trained_recurrences: int
    injection: str
    validation_tokens: int
    data_hash: str
    losses: tuple[LossAt, ...]


def default_recurrences(run: TrainedRun) -> tuple[int, ...]:
    """1, 2, 4, … below the trained r, r itself and 2 r; without 2 r where the model cannot run so many."""
    r = run.spec.model.recurrences
    up_to = {2**i for i in range(r.bit_length()) if 2**i < r} | {r}
    try:
        return (*sorted(up_to), run.model.passes(2 * r))
    except UserError:
        return tuple(sorted(up_to))


def recurrence_curve(
    run: TrainedRun,
    data: PackedData,
    recurrences: Sequence[int],
    sequences: int | None = None,
    report: Callable[[LossAt], None] = lambda point: None,
) -> RecurrenceCurve:
    """Measures the loss at each of `recurrences`, over the validation sequences of the run unless told how many.

    Each is passed to `report` as it is known.  Raises `UserError`, before anything is measured, for a number of
    passes that the model cannot run.
    """
    for r in recurrences:
        run.model.passes(r)
    spec = run.spec
    programs, params = train.compiled(spec.model, spec.optimizer), nnx.state(run.model, nnx.Param)
    graphdef, points, tokens = nnx.graphdef(run.model), [], 0
    for r in recurrences:
        loss_sum = functools.partial(_loss_sum, graphdef, recurrences=r)
        loss, tokens = train.evaluate(
            programs._replace(loss_sum=loss_sum),
            params,
            data,
            sequences or spec.validation_sequences,
            spec.batch_size,
        )
        points.append(LossAt(r, loss if math.isfinite(loss) else None))
        report(points[-1])
    return RecurrenceCurve(
        run_id=spec.run_id,
        step=run.step,
        steps=run.record.steps,
        trained_recurrences=spec.model.recurrences,
        injection=spec.model.injection,
        validation_tokens=tokens,
        data_hash=data.hash,
        losses=tuple(points),
    )


@functools.partial(jax.jit, static_argnums=0, static_argnames="recurrences")
def _loss_sum(graphdef, params, inputs, targets, *, recurrences):
    return cross_entropy_sum(nnx.merge(graphdef, params)(inputs, recurrences), targets)


def write_curve(curve: RecurrenceCurve, directory: epath.PathLike) -> list[str]:
    """Writes eval.json and eval.png into `directory` and returns their paths."""
    folder = epath.Path(directory)
    text = json.dumps(to_json(curve), indent=2, ensure_ascii=False) + "\n"
    try:
        write_whole(folder / "eval.png", plot(curve))
        write_whole(folder / "eval.json", text)
    except OSError as error:
        raise unwritable(error, f"output is {folder}", "give another folder") from None
    return [str(folder / name) for name in ("eval.json", "eval.png")]


def plot(curve: RecurrenceCurve) -> bytes:
    """Loss against recurrences as a PNG, the trained number marked."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    points = sorted((p.recurrences, p.loss) for p in curve.losses if p.loss is not None)
    figure = Figure(figsize=(4.8, 3.4), layout="constrained")
    ax = figure.subplots()
    ax.axvline(curve.trained_recurrences, color="#b0aea6", linewidth=1, linestyle="--", zorder=0)
    ax.annotate("trained", (curve.trained_recurrences, 1), (4, -10), xycoords=ax.get_xaxis_transform(),
                textcoords="offset points", fontsize=8, color="#6b6a64")  # fmt: skip
    ax.plot([r for r, _ in points], [loss for _, loss in points], "o-", color="#2a78d6", markersize=5)
    ax.set_xscale("log", base=2)
    ticks = sorted({r for r, _ in points} | {curve.trained_recurrences})
    ax.set_xticks(ticks, [str(r) for r in ticks])
    ax.set_xticks([], minor=True)
    ax.set_xlabel("recurrences at test time")
    ax.set_ylabel("validation loss, nats per token")
    ax.set_title(f"run {curve.run_id}, {curve.injection}, step {curve.step}", fontsize=9)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(True, color="#e6e5e1", linewidth=0.6)
    buffer = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()
