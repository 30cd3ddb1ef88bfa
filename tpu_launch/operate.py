"""What the commands do: launch a sweep, list and delete its machines, watch over it."""

from __future__ import annotations

import dataclasses
import pathlib
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence

from experiments import manifest
from looped.config import RunSpec
from looped.errors import UserError
from looped.jsonable import to_json
from tpu_launch import source, store
from tpu_launch.engine import Engine, Machine, engine_of
from tpu_launch.launch import Launch
from tpu_launch.outside import Call, CallError, Outside, call, is_passing, outside, script
from tpu_launch.watch import Seen, Watch, calls_of, decide, table

Say = Callable[[str], None]
_ARCHIVES = (".tar.gz", ".whl", ".zip")


@dataclasses.dataclass(frozen=True)
class Source:
    """What the machines install, and how it gets into the launch's folder."""

    name: str
    """As `Launch.source`."""
    root: pathlib.Path | None = None
    """A checkout, which is packed."""
    file: pathlib.Path | None = None
    """A file, which is copied."""

    def calls(self, launch: Launch) -> list[Call]:
        target = f"{launch.folder}/{self.name}"
        if self.root is not None:
            pack = ("env", f"PYTHONPATH={self.root}", sys.executable, "-m", "tpu_launch.source")
            return [call(*pack, str(self.root), self.name), store.upload_call(self.name, target)]
        return [] if self.file is None else [store.upload_call(str(self.file), target)]


def find_source(given: str | None) -> Source:
    """Reads --source: a checkout (without it this one), a wheel or archive, or a requirement for uv.

    Raises `UserError` for what is none of them.
    """
    if given is not None and ("://" in given or given.startswith("looped==")):
        return Source(given)  # which a launch takes or refuses
    path = source.checkout() if given is None else pathlib.Path(given).expanduser().resolve()
    if path.is_file() and path.name.endswith(_ARCHIVES):
        return Source(path.name, file=path)
    if not path.is_dir():
        raise UserError(
            f"source is {given!r}; give a checkout of looped, a wheel or archive of it, git+https://….git@REVISION or"
            " looped==VERSION."
        )
    return Source(source.archive_name(source.pack(path)), root=path)


def dry_run(launch: Launch, what: Source) -> str:
    """Everything that a first launch would do, as a shell script; nothing is asked or written."""
    engine = engine_of(launch)
    calls = [
        *what.calls(launch),
        store.write_call(store.launch_path(launch), store.launch_text(launch), new=True),
        *engine.prepare(),
        *(each for share in range(1, launch.shares + 1) for each in engine.create(share)),
    ]
    return script(calls)


def launch_sweep(
    launch: Launch, what: Source, specs: Sequence[RunSpec], say: Say, retry_failed: bool = False
) -> int:
    """Starts every share that is neither done nor under way; returns how many were started.

    Launching again is harmless: what is there is found by name.  Raises `UserError`, naming what is there, where the
    folder has another sweep or another launch, and where machines are refused.
    """
    engine = engine_of(launch)
    with outside() as run:
        _check_sweep(run, launch, specs)
        is_new = _claim(run, launch, what, say)
        try:
            for each in engine.prepare():
                run.run(each)
            if retry_failed:
                _forget_failed(run, launch, engine, say)
            seen = Watch(launch, engine, run, say).see()
            started = _start(run, launch, engine, seen, say)
        except CallError as failed:
            if is_new and not is_passing(failed) and not _left(run, engine):
                run.run_unless(store.remove_call(store.launch_path(launch)), "absent")
            raise
    lost = [machine for machine in seen.machines if machine.state == "unknown" and machine.reason]
    if lost:
        raise UserError(
            f"{lost[0].reason} Share {lost[0].share}/{launch.shares} was left as it is, {started} others were started;"
            " the same command goes on from there."
        )
    return started


def _check_sweep(run: Outside, launch: Launch, specs: Sequence[RunSpec]) -> None:
    """Refuses a folder with another sweep, or one of another version, before anything is begun."""
    if not store.is_bucket(launch.output):
        manifest.settle(launch.output, launch.preset, specs)
        return
    text = store.read(run, f"{launch.output}/{manifest.MANIFEST_FILE}")
    if text is None:
        return
    with tempfile.TemporaryDirectory() as copy:
        (pathlib.Path(copy) / manifest.MANIFEST_FILE).write_text(text)
        try:
            manifest.settle(copy, launch.preset, specs)
        except UserError as error:
            raise UserError(str(error).replace(copy, launch.output)) from None


def _claim(run: Outside, launch: Launch, what: Source, say: Say) -> bool:
    """Leaves the launch in the sweep's folder and returns True, or finds the same one there."""
    there = store.read_launch(run, launch.output)
    if there is None:
        for each in what.calls(launch):
            run.run(each)
        written = run.run_unless(
            store.write_call(store.launch_path(launch), store.launch_text(launch), new=True), "exists"
        )
        if written is not None:
            return True
        there = store.read_launch(run, launch.output)  # somebody launches at the same moment
    if there is None or there == launch:
        return False
    if dataclasses.replace(there, source=launch.source) == launch:
        for each in [
            *what.calls(launch),
            store.write_call(store.launch_path(launch), store.launch_text(launch)),
        ]:
            run.run(each)
        say(f"machines from now on install {launch.source}; those at work go on with {there.source}")
        return False
    theirs, ours = to_json(there), to_json(launch)
    field = next(name for name in ours if theirs[name] != ours[name] and name != "source")
    raise UserError(
        f"output is {launch.output}, which is launched already, where {field} is {theirs[field]!r} and not"
        f" {ours[field]!r}; `looped tpu list {shlex.quote(launch.output)}` shows its machines, and `looped tpu delete"
        f" {shlex.quote(launch.output)}` takes them away so that it can be launched otherwise."
    )


def _forget_failed(run: Outside, launch: Launch, engine: Engine, say: Say) -> None:
    for machine in engine.machines(run):
        if machine.state == "failed":
            for each in engine.delete(machine.name):
                run.run_unless(each, "absent")
    for share, mark in store.read_marks(run, launch).items():
        if mark.state == "failed":
            run.run_unless(store.remove_call(store.mark_path(launch, share)), "absent")
            say(f"share {share}/{launch.shares} had failed and starts again")


def _start(run: Outside, launch: Launch, engine: Engine, seen: Seen, say: Say) -> int:
    started: list[str] = []
    for action in decide(seen, launch.output):
        calls = calls_of(engine, action)
        try:
            for each in calls:
                run.run_unless(each, "exists", "absent")
        except CallError as failed:
            there = [machine.name for machine in seen.machines] + started
            state = (
                f"{len(there)} of {launch.shares} shares have machines ({', '.join(there)})"
                if there
                else "no share has machines"
            )
            raise CallError(
                f"{failed} Share {action.share}/{launch.shares} was not started; {state}. The same command goes on from"
                f" there; `looped tpu delete {shlex.quote(launch.output)}` takes all away.",
                failed.kind,
                failed.stderr,
            ) from None
        say(f"{action.kind} {action.name}: {action.why}")
        if action.kind == "create":
            started.append(action.name)
    return len(started)


def _left(run: Outside, engine: Engine) -> bool:
    try:
        return bool(engine.machines(run))
    except CallError as failed:
        return failed.kind not in ("zone", "accelerator", "missing", "credentials", "jobset", "context")


def find_launch(run: Outside, output: str) -> Launch:
    """The launch in a sweep's folder; `UserError` where there is none."""
    found = store.read_launch(run, output)
    if found is None:
        raise UserError(
            f"{output} holds no launch; name the folder that `looped tpu launch` was given, or see all machines with"
            " `looped tpu list --project PROJECT`."
        )
    return found


def watch_sweep(output: str, seconds: float, say: Say) -> tuple[int, int]:
    """Watches until the sweep is over; returns how many shares are done, and how many there are."""
    with outside() as run:
        launch = find_launch(run, output)
        seen = Watch(launch, engine_of(launch), run, say).run(seconds)
    done = sum(seen.ending(share) == "done" for share in range(1, seen.shares + 1))
    return done, seen.shares


def sweep_machines(output: str) -> tuple[list[Machine], list[str]]:
    """The machines of a launch in every state, and a line on each of its shares."""
    with outside() as run:
        launch = find_launch(run, output)
        engine = engine_of(launch)
        seen = Watch(launch, engine, run, lambda text: None).see()
        return list(seen.machines), table(launch, seen)


def project_machines(project: str, zone: str) -> list[Machine]:
    """Every queued resource of a project, whoever made it."""
    from tpu_launch.queued import list_machines

    with outside() as run:
        return list_machines(run, project, zone)


def delete_sweep(output: str, only_over: bool, say: Say, dry: bool = False) -> int:
    """Takes the launch's machines away and forgets the launch, or with `only_over` just what is over.

    Runs and their records stay.  Returns how many machines were deleted.
    """
    with outside() as run:
        launch = find_launch(run, output)
        engine = engine_of(launch)
        seen = Watch(launch, engine, run, say).see()
        if only_over:
            gone = [action.name for action in decide(seen, output) if action.kind == "delete"]
        else:
            gone = [machine.name for machine in seen.machines if machine.state != "deleting"]
        calls = [each for name in gone for each in engine.delete(name)]
        if not only_over:
            marks = [store.mark_path(launch, share) for share in sorted(seen.marks)]
            calls += [*engine.clean(), store.remove_call(store.launch_path(launch), *marks)]
        if dry:
            say(script(calls).rstrip())
            return len(gone)
        for each in calls:
            run.run_unless(each, "absent")
        for name in gone:
            say(f"deleted {name}")
        return len(gone)
