"""The command line, `looped COMMAND …`: joins the packages, each imported only when it is asked for."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import os
import pathlib
import sys
from typing import Annotated, Any, TextIO

import tyro

from looped.errors import UserError, causes, first_line, nearest, out_of_room

COMMANDS: dict[str, dict[str, tuple[str, str]]] = {
    "From nothing to φ": {
        "quickstart": (__name__, "Quickstart"),
    },
    "Runs": {
        "grid": ("experiments.commands", "Grid"),
        "plan": ("looped.plan_commands", "Plan"),
        "sweep run": ("experiments.commands", "SweepRun"),
        "sweep status": ("experiments.commands", "SweepStatus"),
        "sweep collect": ("experiments.commands", "SweepCollect"),
        "train": ("looped.commands", "Train"),
        "data prepare": ("looped.commands", "DataPrepare"),
        "data pack": ("looped.data.commands", "DataPack"),
        "data check": ("looped.data.commands", "DataCheck"),
        "parameters": ("looped.model_commands", "Parameters"),
    },
    "On TPU slices": {
        "tpu check": ("tpu_launch.check_commands", "TpuCheck"),
        "tpu launch": ("tpu_launch.commands", "TpuLaunch"),
        "tpu watch": ("tpu_launch.commands", "TpuWatch"),
        "tpu list": ("tpu_launch.commands", "TpuList"),
        "tpu delete": ("tpu_launch.commands", "TpuDelete"),
    },
    "With a trained model": {
        "eval": ("looped.inference_commands", "Eval"),
        "generate": ("looped.inference_commands", "Generate"),
        "convert": ("looped.interop_commands", "Convert"),
    },
    "What their losses say": {
        "fit": ("fit.commands", "Fit"),
        "compare": ("fit.commands", "Compare"),
        "equivalent": ("fit.commands", "Equivalent"),
        "minima": ("fit.commands", "Minima"),
        "export": ("fit.commands", "Export"),
    },
}
"""Where each command is: a dataclass whose fields are its options and docstrings its help, with a `run`."""

_BY_NAME = {name: place for group in COMMANDS.values() for name, place in group.items()}


@dataclasses.dataclass
class Quickstart:
    """Train a small iso-depth grid on real text, fit the joint law and show φ.

    It trains on the CPU, unless the environment variable JAX_PLATFORMS says otherwise. Everything goes
    into one folder: the runs, phi.json, losses.csv and isoflops.png. Interrupted with Ctrl-C or killed,
    the same command goes on from where it was; once every run is there, it only fits again.
    """

    output: Annotated[
        str | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: runs/PRESET)")
    ] = None
    """The folder."""
    preset: Annotated[str, tyro.conf.arg(metavar="PRESET")] = "quickstart"
    """Which runs: quickstart takes minutes, laptop about an hour; `looped grid` lists them all."""
    workers: Annotated[
        int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: 2 where two cores are)")
    ] = None
    """Runs trained at once, each by a process with its share of the cores."""
    retry_failed: bool = False
    """Start runs afresh that ended as failed."""

    def run(self) -> int:
        from experiments.console import run_sweep
        from experiments.presets import preset
        from fit.report import measure
        from looped.machine import available_cores

        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # also in the workers, which inherit it
        result = run_sweep(
            self.preset,
            preset(self.preset).specs(),
            self.output,
            workers=min(2, len(available_cores())) if self.workers is None else self.workers,
            retry_failed=self.retry_failed,
        )
        print()
        print(measure(result.directory, result.directory).summary())
        return result.exit_status


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns its exit status, of the README's table: 2 for bad input, 130 after Ctrl-C, 75
    after SIGTERM where that was waited for (`looped.preemption`), 141 when its output is no longer read, 1 when
    something else went wrong, as a full disk.  Then one line on stderr says what.

    An error that this does not know is a fault of ours, and raised."""
    _open_missing_streams()
    try:
        status, said = _run(sys.argv[1:] if argv is None else argv), ""
        sys.stdout.flush()  # here, so that what goes wrong is dealt with below
    except BaseException as error:
        status, said = _explained(error)
    if said:
        with contextlib.suppress(OSError):
            print(said, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        _flush_or_drop(stream)
    return status


def _open_missing_streams() -> None:
    """Gives a process that was started without standard streams some, lest its files become them."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 -- of the whole process


def _explained(error: BaseException) -> tuple[int, str]:
    """The exit status that `error` leads to, and what to say of it; raises it again where that is not known."""
    if isinstance(error, UserError):
        from looped.credentials import without
        from looped.text import one_line

        return 2, f"looped: {one_line(without(str(error)))}"
    if isinstance(error, KeyboardInterrupt):
        from looped.preemption import REQUEUE, STOPPED, Preempted

        if isinstance(error, Preempted):
            return REQUEUE, f"\nlooped: {STOPPED}."
        return 130, "\nlooped: interrupted; the same command goes on from what is there."
    if any(isinstance(cause, BrokenPipeError) for cause in causes(error)):  # rich makes a SystemExit of it
        return 141, ""
    if (full := out_of_room(error)) is not None:
        where = f" at {full.filename}" if full.filename else ""
        return 1, f"looped: no space is left{where}; make room and start the same command again."
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):  # as XLA says it
        return 1, f"looped: memory does not suffice ({first_line(error)}); take less at a time."
    if isinstance(error, OSError) and error.filename:
        where, why = error.filename2 or error.filename, error.strerror or str(error)
        return 2, f"looped: {where}: {why}; name another place or change its permissions."
    if isinstance(error, OSError):
        return 1, f"looped: {first_line(error)}; the same command goes on from what is there."
    raise error


def _flush_or_drop(stream: TextIO) -> None:
    """Leaves nothing in `stream` for Python to flush at the end, which would fail again and change the exit status."""
    try:
        stream.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def _run(argv: list[str]) -> int:
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the folder in which this was started is gone; change to another.") from None
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if argv[0] == "--version":
        print(f"looped {importlib.metadata.version('looped')}")
        return 0
    words = 2 if any(name.startswith(f"{argv[0]} ") for name in _BY_NAME) else 1
    name = " ".join(argv[:words])
    if name not in _BY_NAME:
        return _explain(argv)
    module, attribute = _BY_NAME[name]
    try:
        command: Any = tyro.cli(
            getattr(importlib.import_module(module), attribute),
            prog=f"looped {name}",
            args=argv[words:],
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
        )
    except SystemExit as done:  # it has shown the help or what is wrong with an option
        return int(done.code or 0)
    return command.run()


def _explain(argv: list[str]) -> int:
    """Shows the commands under a first word alone; raises `UserError` for a name that is none."""
    firsts = {name.split()[0] for name in _BY_NAME}
    if argv[0] not in firsts:
        raise UserError(f"{argv[0]!r} is not a command.{nearest(argv[0], firsts)}")
    if len(argv) == 1 or argv[1] in ("-h", "--help"):
        print(_overview(argv[0]))
        return 0
    seconds = [name.split()[1] for name in _BY_NAME if name.startswith(f"{argv[0]} ")]
    raise UserError(f"{argv[1]!r} is not a command of `looped {argv[0]}`.{nearest(argv[1], seconds)}")


def _overview(first: str | None = None) -> str:
    """The commands with their summaries by group; those beginning with `first` alone where it is given."""
    lines = [f"usage: looped {first or 'COMMAND'} …", ""]
    if first is None:
        lines += ["Pretrain looped language models and measure φ, what one more recurrence is worth.", ""]
    for group, commands in COMMANDS.items():
        shown = [name for name in commands if first is None or name.startswith(f"{first} ")]
        if shown:
            lines += [group, *(f"  {name:<15}{_summary(*commands[name])}" for name in shown), ""]
    lines.append(f"`looped {first + ' ' if first else ''}COMMAND --help` shows a command's options.")
    return "\n".join(lines)


def _summary(module: str, attribute: str) -> str:
    """The first line of a command's docstring, read from its source: importing all would take seconds."""
    spec = importlib.util.find_spec(module) if module != __name__ else None
    source = pathlib.Path(spec.origin if spec and spec.origin else __file__).read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == attribute:
            return (ast.get_docstring(node) or "").partition("\n")[0]
    raise LookupError(f"{module} has no class {attribute}")


if __name__ == "__main__":
    sys.exit(main())
