"""Results of compilations, kept as JSON lines so that a check goes on where it was stopped."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import pathlib
import threading

from looped.errors import unwritable
from looped.jsonable import from_json, parse_json, to_json
from tpu_launch.compile_check import Compiled, Job

_PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax")
_OURS = ("looped", "tpu_launch")
_ROOTS = ("looped.programs", "tpu_launch.compile_check", "tpu_launch.hlo_cost", "tpu_launch.roofline")
FILE = "compiles.jsonl"
_ONE_AT_A_TIME = threading.Lock()  # Python's parser of 3.11 fails in two threads at once


class Store:
    """The results in `directory`; another version of what makes them never takes them for its own."""

    def __init__(self, directory: str | pathlib.Path):
        self.path = pathlib.Path(directory) / FILE
        self._lock = threading.Lock()
        self._known: dict[str, Compiled] = {}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            text = self.path.read_text(encoding="utf-8", errors="replace") if self.path.exists() else ""
        except OSError as error:
            raise unwritable(error, f"output is {directory}", "name another folder") from None
        for line in text.splitlines():
            try:
                row = parse_json(line)
                self._known[row["key"]] = from_json(Compiled, row["result"])
            except (ValueError, KeyError, TypeError):
                continue  # half a line of a process that was killed, or another version's

    def get(self, job: Job) -> Compiled | None:
        return self._known.get(key_of(job))

    def put(self, job: Job, result: Compiled) -> None:
        key = key_of(job)
        line = json.dumps({"key": key, "job": to_json(job), "result": to_json(result)})
        with self._lock, self.path.open("a", encoding="utf-8") as file:
            # After half a line of a process that was killed, on a new one.
            file.write(line + "\n" if self._ends_well() else "\n" + line + "\n")
            self._known[key] = result

    def _ends_well(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(0, 2)
            if file.tell() == 0:
                return True
            file.seek(-1, 2)
            return file.read() == b"\n"


def key_of(job: Job) -> str:
    """Hash of everything that the result follows from: the job, our sources, the packages' versions."""
    mechanism = job.model.injection.partition(":")[0] if ":" in job.model.injection else None
    with _ONE_AT_A_TIME:
        source = _source_hash(mechanism)
    content = json.dumps([to_json(job), source], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


@functools.cache
def _source_hash(mechanism: str | None) -> str:
    digest = hashlib.sha256()
    for package in _PACKAGES:
        digest.update(f"{package} {version(package)}\n".encode())
    for source in sorted(_sources((*_ROOTS, *((mechanism,) if mechanism else ())))):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def version(package: str) -> str:
    """Of an installed package, `none` without it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _sources(modules: tuple[str, ...]) -> set[pathlib.Path]:
    """The files of `modules` and of all of ours that they import, one through another."""
    found: dict[str, pathlib.Path] = {}
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if module in found:
            continue
        try:
            spec = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            spec = None  # a name of a module, not a module
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            continue
        found[module] = pathlib.Path(spec.origin)
        for node in ast.walk(ast.parse(found[module].read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            waiting += [name for name in names if name.partition(".")[0] in _OURS]
    return set(found.values())
