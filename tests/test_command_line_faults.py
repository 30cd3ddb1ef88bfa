"""Whatever a command is given: an exit status of the README's table, one line on stderr, and nothing lost."""

import ast
import contextlib
import dataclasses
import errno
import hashlib
import importlib
import inspect
import itertools
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import typing

import command_cases
import pytest
from command_cases import CASES
from corpora import Counting

from looped import __main__ as command_line
from looped.errors import UserError

ROOT = pathlib.Path(__file__).parents[1]
NAMES = [name for group in command_line.COMMANDS.values() for name in group]


def tried(chosen, *, to_the_end=True):
    """The cases that are `chosen`, by name; where they are driven to their end, the long ones only with `-m slow`."""
    return [
        pytest.param(
            case, id=f"{name}-{n}", marks=[pytest.mark.slow] if to_the_end and case.takes_long else []
        )
        for name, cases in CASES.items()
        for n, case in enumerate(cases)
        if chosen(case)
    ]


@pytest.fixture(scope="module")
def built(packed_folder, tmp_path_factory):
    """The folder that every command works in, and the id of its run."""
    folder = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return folder, command_cases.build(folder, packed_folder)


@pytest.fixture
def workspace(built, tmp_path, monkeypatch):
    """A copy of it, with a corpus that takes no time, a compiler that answers at once, and no network."""
    from looped import train
    from looped.data import corpus
    from tpu_launch import check

    folder = tmp_path / "workspace"
    shutil.copytree(built[0], folder)
    launch = folder / command_cases.LAUNCH
    launch.write_text(launch.read_text().replace(str(built[0]), str(folder)))
    monkeypatch.chdir(folder)
    monkeypatch.setenv("LOOPED_DATA", str(folder / "cache"))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # a command that sets it leaves no trace
    monkeypatch.setitem(corpus.SOURCES, "counting", Counting)
    monkeypatch.setattr(check, "Worker", command_cases.CompilesNothing)
    monkeypatch.setattr(check, "require_libtpu", lambda: None)
    train._open_data.cache_clear()
    return folder


@pytest.fixture
def looped(built, workspace, capsys):
    """Calls the command of a case in the workspace: (status, what it said, files new, files changed or gone)."""

    def call(case, *changes):
        argv = [word.replace("{run}", built[1]) for word in case.argv]
        for old, new in changes:
            argv = [new if word == old else word for word in argv]
        before = content(workspace)
        capsys.readouterr()
        status = command_line.main(argv)
        after = content(workspace)
        said = capsys.readouterr().err
        assert "Traceback" not in said
        new = sorted(after.keys() - before.keys())
        return status, said, new, left(case, [name for name in before if after.get(name) != before[name]])

    return call


def content(folder):
    """The SHA-256 of every file by its name in the folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def last_line(said):
    """The one line that says what is wrong, behind the notes and the progress before it."""
    lines = [line for line in said.splitlines() if line.startswith("looped: ")]
    assert len(lines) == 1, said
    assert said.endswith(f"{lines[0]}\n")
    return lines[0]


def left(case, names):
    """Of these files those that are not what a stopped command goes on from."""
    return [name for name in names if not any(re.search(pattern, name) for pattern in case.leaves)]


# --- The table is whole --------------------------------------------------------------------------------------


def fields_of(command):
    """Every option of a command's dataclass, those of the dataclasses in it as well: name → (type, its docstring)."""
    hints, found, words = typing.get_type_hints(command), {}, {}
    for parent in reversed(command.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(parent))).body[0].body
        for field, text in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                words[field.target.id] = text.value.value
    for field in dataclasses.fields(command):
        if dataclasses.is_dataclass(hints[field.name]):
            found |= fields_of(hints[field.name])
        else:
            found[field.name] = hints[field.name], words.get(field.name, "")
    return found


def command_of(name):
    module, attribute = command_line._BY_NAME[name]
    return getattr(importlib.import_module(module), attribute)


def test_every_command_is_in_the_table_and_every_output_is_tried():
    assert list(CASES) == NAMES
    for name, cases in CASES.items():
        assert all(list(case.argv[: len(name.split())]) == name.split() for case in cases)
        if {"output", "target"} & fields_of(
            command_of(name)
        ).keys() and name != "tpu launch":  # others write there
            assert any(case.output for case in cases), name


@pytest.mark.parametrize("name", NAMES)
def test_help_says_something_of_every_option(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    assert command_line.main([*name.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    for field, (_, text) in fields_of(command_of(name)).items():
        assert len(text) > 5, field
        assert " ".join(text.split()[:3]) in shown, field


# --- What a command is given ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_an_option_that_is_not_known_or_of_another_type_is_named(name, capsys, workspace):
    before = content(workspace)
    arguments = next(case.argv for case in CASES[name])
    wrong = [["--no-such-option", "1"]]
    for field, (hint, _) in fields_of(command_of(name)).items():
        kinds = {hint, *typing.get_args(hint)}
        kinds |= {kind for one in kinds for kind in typing.get_args(one)}
        if {int, float} & kinds and not {str} & kinds:
            wrong.append([f"--{field.replace('_', '-')}", "many"])
    for option in wrong:
        assert command_line.main([*arguments, *option]) == 2
        said = capsys.readouterr()
        assert option[0] in said.err
        assert "Traceback" not in said.err
        assert said.out == ""
    assert content(workspace) == before


@pytest.mark.parametrize("case", tried(lambda case: case.reads, to_the_end=False))
def test_a_file_that_is_not_what_its_name_says_is_named(case, built, looped, workspace):
    for name in case.reads:
        path = workspace / name.replace("{run}", built[1])
        good = path.read_bytes()
        for bad in (
            None,
            "folder",
            b"",
            good[: len(good) // 2],
            bytes(range(256)) * 4,
            b"null",
            b"[" * 200_000,
        ):
            path.unlink()
            if bad == "folder":
                path.mkdir()
            elif bad is not None:
                path.write_bytes(bad)
            status, said, new, changed = looped(case)
            assert (status, changed, left(case, new)) == (2, [], []), bad
            assert any(part in last_line(said) for part in path.relative_to(workspace).parts)
            path.rmdir() if bad == "folder" else path.unlink(missing_ok=True)
            path.write_bytes(good)


@pytest.mark.parametrize("case", tried(lambda case: case.output, to_the_end=False))
def test_a_place_that_cannot_be_written_is_named(case, looped):
    for there in ("losses.csv", "/dev/null"):  # root may write into any folder, and no one below a file
        status, said, new, changed = looped(case, (case.output, f"{there}/{case.output}"))
        assert (status, changed, left(case, new)) == (2, [], [])
        assert there in last_line(said)


@pytest.mark.parametrize("case", tried(lambda case: case.output))
def test_what_is_there_and_something_else_is_kept(case, looped, workspace):
    place = workspace / case.output
    if case.file:
        place.mkdir()
    else:
        place.write_text("mine")
    status, said, new, changed = looped(case)
    assert (status, changed, left(case, new)) == (2, [], [])
    assert case.output in last_line(said)
    place.rmdir() if case.file else place.unlink()
    if case.file:
        place.write_text("mine")
    else:
        place.mkdir()
        for name in ("losses.csv", "record", "checkpoints", "metrics.jsonl"):
            (place / name).write_text("mine")
    status, said, _, changed = looped(case)
    assert changed == []
    if status != case.status:  # else it has put its own beside
        assert status == 2
        assert case.output in last_line(said)


# --- What goes wrong while it works --------------------------------------------------------------------------


@contextlib.contextmanager
def largest_file(size):
    """The kernel lets no file of this process grow beyond `size` bytes: as on a full disk, whoever writes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("case", tried(lambda case: case.output and case.works and not case.by_orbax))
def test_a_full_disk_loses_nothing_and_the_same_command_goes_on(case, looped, workspace):
    for size in (0, 100):
        with largest_file(size):
            status, said, new, changed = looped(case)
        assert (status, changed, left(case, new)) == (1, [], [])
        assert "no space is left" in last_line(said)
    status, _, _, changed = looped(case)
    assert (status, changed) == (case.status, [])
    assert (workspace / case.output).exists()


LIMITED = """
import resource, sys
from looped.__main__ import main
sys.dont_write_bytecode = True
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("case", tried(lambda case: case.by_orbax))
@pytest.mark.parametrize("size", [0, 3_000, 12_000])
def test_a_full_disk_is_one_line_from_a_process_with_threads_too(case, size, built, workspace):
    argv = [word.replace("{run}", built[1]) for word in case.argv]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    before = content(workspace)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(size), *argv], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    assert "no space is left" in last_line(done.stderr)
    assert "Traceback" not in done.stderr
    after = content(workspace)
    assert all(after[name] == before[name] for name in before)
    assert left(case, after.keys() - before.keys()) == []
    again = subprocess.run(
        [sys.executable, "-m", "looped", *argv], env=environment, capture_output=True, text=True
    )
    assert again.returncode == case.status, again.stderr


@pytest.fixture
def standard_output(monkeypatch):
    """Replaces standard output by a file descriptor's, as a shell would."""
    opened = []

    def replace(descriptor):
        opened.append(os.fdopen(descriptor, "w"))
        monkeypatch.setattr(sys, "stdout", opened[-1])

    yield replace
    for file in opened:
        with contextlib.suppress(OSError):
            file.close()


@pytest.mark.parametrize("case", tried(lambda case: case.works))
def test_an_output_that_nobody_reads_or_that_is_full_loses_nothing(case, looped, standard_output):
    reader, writer = os.pipe()
    os.close(reader)
    standard_output(writer)
    status, said, _, changed = looped(case)
    assert (status, changed) == (case.status if case.silent else 141, [])
    assert "looped: " not in said
    if case.silent or case.output:
        return  # it is there now, and would be kept
    standard_output(os.open("/dev/full", os.O_WRONLY))
    status, said, _, changed = looped(case)
    assert (status, changed) == (1, [])
    assert "no space is left" in last_line(said)


class Interruption:
    """Ctrl-C, a real signal, at the n-th time that Python opens a file to write, makes a folder or renames."""

    def __init__(self):
        self.countdown = 0
        sys.addaudithook(self._see)  # for ever, so it does nothing unless told

    def _see(self, event, arguments):
        if not self.countdown:
            return
        writes = (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if (writes and arguments[0] != os.devnull) or event in ("os.rename", "os.mkdir"):
            self.countdown -= 1
            if not self.countdown:
                os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(scope="session")
def interruption():
    return Interruption()


@pytest.mark.parametrize("case", tried(lambda case: case.output and case.works and not case.by_orbax))
def test_ctrl_c_loses_nothing_and_the_same_command_goes_on(case, looped, interruption, workspace):
    for count in range(1, 100):
        interruption.countdown = count
        try:
            status, said, _, changed = looped(case)
        finally:
            reached, interruption.countdown = not interruption.countdown, 0
        assert changed == []
        if not reached:
            break
        assert status == 130
        assert "interrupted" in last_line(said)
    assert status == case.status
    assert count > 1
    assert (workspace / case.output).exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda error: error,
        lambda error: ValueError(f"OUT_OF_RANGE: Failed to write 9 bytes: {os.strerror(error.errno)}"),
        lambda error: RuntimeError("saving failed"),
    ],
)
def test_a_full_disk_is_known_in_whatever_error_it_comes(number, wrap, capsys, monkeypatch):
    def print_presets(*_):
        error = OSError(number, os.strerror(number))
        raise wrap(error) from error

    monkeypatch.setattr("experiments.console.print_presets", print_presets)
    assert command_line.main(["grid"]) == 1
    assert "no space is left" in last_line(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (UserError("n is 0;\ngive 1."), 2, "looped: n is 0; give 1."),
        (PermissionError(13, "Permission denied", "/x"), 2, "/x: Permission denied"),
        (OSError(5, "Input/output error"), 1, "Input/output error"),
        (MemoryError("3 GiB"), 1, "memory does not suffice"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_every_kind_of_error_has_its_status_and_one_line(error, status, said, capsys, monkeypatch):
    def print_presets(*_):
        raise error

    monkeypatch.setattr("experiments.console.print_presets", print_presets)
    assert command_line.main(["grid"]) == status
    assert said in last_line(capsys.readouterr().err)


def test_an_error_of_ours_is_not_hidden(monkeypatch):
    monkeypatch.setattr("experiments.console.print_presets", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        command_line.main(["grid"])


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("--version >&-", 0),
        ("--version >&- 2>&- <&-", 0),
        ("quickstrat 2>/dev/full", 2),
        ("quickstrat 2>&-", 2),
    ],
)
def test_without_standard_streams_a_command_ends_as_it_would(line, status):
    done = subprocess.run(
        ["sh", "-c", f'"$0" -m looped {line}', sys.executable],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (status, "")


def test_a_folder_that_is_gone_is_said(tmp_path):
    done = subprocess.run(
        ["sh", "-c", 'mkdir gone && cd gone && rmdir ../gone && "$0" -m looped grid', sys.executable],
        cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 2
    assert "is gone" in done.stderr
    assert "Traceback" not in done.stderr


INTERRUPTED = """
import os, signal, sys
from looped.__main__ import main
left = int(sys.argv[1])
def see(event, arguments):
    global left
    if event == "import":
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(see)
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 200, 1000])
@pytest.mark.parametrize("line", [["minima", command_cases.LOSSES], ["data", "check", "data"]])
def test_ctrl_c_while_packages_are_imported_is_one_line(line, count, workspace):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(count), *line],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 130
    assert last_line(done.stderr).startswith("looped: interrupted")
    assert "Traceback" not in done.stderr
