"""The sub-command that compiles runs for a TPU slice that is not there."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import Annotated, Any

import tyro

from looped.config import ModelConfig, OptimizerConfig
from looped.execution import DEFAULT, Execution  # with JAX, which this command needs in any case


@dataclasses.dataclass
class TpuCheck:
    """Compile runs for a TPU slice, with no TPU attached: do they fit, and how long would they take?

    Takes a preset's runs, or one run given by its model, batch size and --steps or --budget-flops. Every
    distinct program is compiled by the TPU's own compiler on this machine's CPU, a minute or more each.
    Interrupted with Ctrl-C, the same command goes on. Exits with status 1 if a program does not fit.
    """

    topology: Annotated[str, tyro.conf.arg(metavar="SLICE")]
    """The slice: generation and shape in chips, as v5e:16x16, v6e:4x4 or v5p:4x4x8."""
    slices: int = 1
    """Slices of that shape, joined by the data centre's network."""
    preset: Annotated[str | None, tyro.conf.arg(metavar="PRESET", help_behavior_hint="")] = None
    """Check all runs of this preset; `looped grid` lists them."""
    budgets: Annotated[tuple[float, ...], tyro.conf.arg(metavar="FLOPS ...", help_behavior_hint="")] = ()
    """Check the preset's runs of these budgets alone."""
    recurrences_only: Annotated[tuple[int, ...], tyro.conf.arg(metavar="R ...", help_behavior_hint="")] = ()
    """Check the preset's runs of these recurrence counts alone."""
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = OptimizerConfig()  # noqa: RUF009 - frozen
    budget_flops: float | None = None
    """Training FLOPs of the one run; gives the number of steps."""
    steps: int | None = None
    """Steps of the one run, in place of a budget."""
    batch_size: int | None = None
    """Sequences a step of the one run (default: 16)."""
    execution: Annotated[Execution, tyro.conf.arg(name="")] = DEFAULT
    """How the runs are carried out."""
    workers: Annotated[
        int | None,
        tyro.conf.arg(metavar="INT", help_behavior_hint="(default: one a core, by 5 GiB of memory each)"),
    ] = None
    """Programs compiled at once."""
    output: Annotated[str, tyro.conf.arg(metavar="DIR")] = "runs/tpu-check"
    """Folder in which results are kept, so that no program is compiled twice."""
    json: Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Also write everything as JSON to this file; - prints it in place of the table."""

    def run(self) -> int:
        os.environ["JAX_PLATFORMS"] = "cpu"  # shapes are worked out here, and nothing else
        from looped.slices import slice_of
        from tpu_launch.check import Checker, cells_of, default_workers
        from tpu_launch.check_report import report, show
        from tpu_launch.check_store import Store

        if self.json not in (None, "-"):
            _check_json(self.json)
        slices = slice_of(self.topology, self.slices)
        cells = cells_of(self._specs())
        workers = min(default_workers() if self.workers is None else self.workers, len(cells))
        with contextlib.ExitStack() as stack:
            checker = stack.enter_context(Checker(slices, Store(self.output), workers))
            checked = checker.run(cells, self.execution, _Progress(stack))
        data = report(checked, slices)
        if self.json is not None:
            _write(self.json, data)
        if self.json != "-":
            show(checked, slices)
        return 0 if data["fits"] else 1

    def _specs(self) -> tuple[Any, ...]:
        """The runs to check; raises `UserError` for a preset and a run at once, or neither."""
        from looped.config import RunSpec
        from looped.errors import UserError

        one = {
            name: getattr(self, name)
            for name, default in (
                ("model", ModelConfig()),
                ("optimizer", OptimizerConfig()),
                ("budget_flops", None),
                ("steps", None),
                ("batch_size", None),
            )
            if getattr(self, name) != default
        }
        if self.preset is None:
            if self.budgets or self.recurrences_only:
                raise UserError("budgets and recurrences_only choose among a preset's runs; name a --preset.")
            return (RunSpec(**one),)
        if one:
            raise UserError(
                f"preset is {self.preset!r} and {', '.join(one)} is given as well; a preset says all of its runs, so"
                " leave one of the two out."
            )
        from experiments.presets import preset

        specs = preset(self.preset).specs(budgets=self.budgets)
        if self.recurrences_only:
            known = sorted({spec.model.recurrences for spec in specs})
            for r in self.recurrences_only:
                if r not in known:
                    raise UserError(
                        f"recurrences_only has {r}, which preset {self.preset!r} lacks; it has"
                        f" {', '.join(map(str, known))}."
                    )
            specs = tuple(spec for spec in specs if spec.model.recurrences in self.recurrences_only)
        return specs


class _Progress:
    """One line on how far the check is."""

    def __init__(self, stack: contextlib.ExitStack):
        from looped.text import ProgressLine

        self._line = stack.enter_context(contextlib.closing(ProgressLine()))

    def __call__(self, done: int, cells: int, checked: Any) -> None:
        last = "compiling"
        if checked is not None:
            seconds = checked.compiled.compile_seconds
            took = "" if seconds is None else f", compiled in {seconds:.0f} s"
            last = f"{checked.cell.name}: {'fits' if checked.fits else checked.compiled.status}{took}"
        self._line.show(f"{done} of {cells} programs  {last}", last=done == cells)


def _check_json(path: str) -> None:
    """Raises `UserError`, before anything is compiled, for a file that is there and was not written by this command."""
    import pathlib

    from looped.errors import UserError
    from looped.jsonable import read_json

    if pathlib.Path(path).exists():
        there = read_json(path, "name another file", "json")
        if not isinstance(there, dict) or "cells" not in there:
            raise UserError(f"json is {path}, which holds something else than a check; name another file.")


def _write(path: str, data: Any) -> None:
    import json

    from etils import epath

    from looped.errors import unwritable
    from looped.files import whole

    text = json.dumps(data, indent=1)
    if path == "-":
        print(text)
        return
    try:
        with whole(epath.Path(path)) as partial:
            partial.write_text(text + "\n")
    except OSError as error:
        raise unwritable(error, f"json is {path}", "name another file") from None
