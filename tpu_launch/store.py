"""The launch's files in a sweep's folder, local or gs://, as seen from where it is launched.

gs:// is reached by `gcloud storage`, with the credentials that make the machines.
"""

from __future__ import annotations

import json
import pathlib

from looped.errors import UserError
from looped.jsonable import from_json, parse_json, to_json
from looped.text import has_breaks
from tpu_launch import marks
from tpu_launch.launch import FOLDER, SCHEMA_VERSION, Launch
from tpu_launch.marks import Mark
from tpu_launch.outside import Call, Outside, call

LAUNCH_FILE = "launch.json"


def is_bucket(path: str) -> bool:
    return path.startswith("gs://")


def check_output(output: str, shared: bool) -> str:
    """Returns the folder's name without a closing slash.

    `shared` says that the machines are to come and go, so that only a bucket outlives them.
    """
    output = output.rstrip("/")
    scheme, separator, rest = output.partition("://")
    if separator and (scheme != "gs" or not rest.partition("/")[2]):
        raise UserError(f"output is {output!r}; name a folder in a bucket, as gs://BUCKET/sweeps/one.")
    if not separator and shared:
        raise UserError(
            f"output is {output!r}, which ends with the machines; name a folder in a bucket: gs://BUCKET/…"
        )
    if not output or has_breaks(output):
        raise UserError(f"output is {output!r}; name a folder, without control characters or ends of lines.")
    if is_bucket(output):
        if set("*?[]#") & set(output):
            raise UserError(f"output is {output!r}; a name in a bucket cannot have any of * ? [ ] # here.")
        return output
    if not pathlib.Path(output).is_absolute():
        raise UserError(f"output is {output!r}; give the whole path, which is the same on every machine.")
    return output


def write_call(path: str, text: str, new: bool = False) -> Call:
    """Writes `text` to `path`; with `new` it fails (kind `exists`) where the file is there, whoever made it."""
    if is_bucket(path):
        only_new = ("--if-generation-match=0",) if new else ()
        return call("gcloud", "storage", "cp", *only_new, "-", path, stdin=text)
    no_clobber = "set -C; " if new else ""
    command = f'mkdir -p -- "$(dirname -- "$1")" && {{ {no_clobber}cat > "$1"; }}'
    return call("sh", "-c", command, "sh", path, stdin=text)


def upload_call(name: str, path: str) -> Call:
    """Copies the file `name` of the folder of calls to `path`."""
    if is_bucket(path):
        return call("gcloud", "storage", "cp", name, path, seconds=900)
    return call("sh", "-c", 'mkdir -p -- "$(dirname -- "$2")" && cp -- "$1" "$2"', "sh", name, path)


def remove_call(*paths: str) -> Call:
    if all(map(is_bucket, paths)):
        return call("gcloud", "storage", "rm", *paths)
    return call("rm", "-f", "--", *paths)


def read(outside: Outside, path: str) -> str | None:
    """The file's text; None where there is none."""
    if is_bucket(path):
        return outside.run_unless(call("gcloud", "storage", "cat", path), "absent")
    file = pathlib.Path(path)
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else None


def read_launch(outside: Outside, output: str) -> Launch | None:
    """The launch that lies in the sweep's folder; `UserError` for one of another version."""
    path = f"{output}/{FOLDER}/{LAUNCH_FILE}"
    text = read(outside, path)
    if text is None:
        return None
    try:
        data = parse_json(text)
    except ValueError as error:
        raise UserError(
            f"{path}: not JSON ({error}); see what machines there are and remove the file."
        ) from None
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise UserError(
            f"{path}: launch schema {version!r}, this version reads {SCHEMA_VERSION}; use the `looped` that wrote it."
        )
    found = from_json(Launch, data, f"{path}: ")
    if not _is_same(found.output, output):  # its machines are named after that folder
        raise UserError(
            f"{path}: is of the launch in {found.output}; name that folder, and remove this copy."
        )
    return found


def _is_same(one: str, other: str) -> bool:
    if is_bucket(one) or is_bucket(other):
        return one == other
    return pathlib.Path(one).resolve() == pathlib.Path(other).resolve()


def launch_path(launch: Launch) -> str:
    return f"{launch.folder}/{LAUNCH_FILE}"


def launch_text(launch: Launch) -> str:
    return json.dumps(to_json(launch), indent=1) + "\n"


def read_marks(outside: Outside, launch: Launch) -> dict[int, Mark]:
    """The marks of the launch's shares, by share."""
    folder = f"{launch.folder}/{marks.FOLDER}"
    if is_bucket(folder):
        text = outside.run_unless(call("gcloud", "storage", "cat", f"{folder}/*.json"), "absent") or ""
    else:
        text = "".join(
            file.read_text(encoding="utf-8", errors="replace")
            for file in sorted(pathlib.Path(folder).glob("*.json"))
        )
    return {mark.share: mark for mark in marks.parse(text) if mark.shares == launch.shares}


def mark_path(launch: Launch, share: int) -> str:
    return f"{launch.folder}/{marks.FOLDER}/{marks.file_name(share, launch.shares)}"
