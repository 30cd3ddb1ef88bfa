"""What is asked of a folder before TFDS opens it, which imports whatever modules its `features.json` names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from etils import epath

from looped.errors import UserError
from looped.jsonable import read_json

_FILES = ("features.json", "dataset_info.json")
_CLASS_KEYS = ("pythonClassName", "python_class_name", "type")  # the last is that of TFDS before 4.3
_OURS = "tensorflow_datasets.core.features."


def check_folder(directory: epath.PathLike) -> None:
    """Raises `UserError` where the data set in `directory` needs code that is not TFDS's, or has files elsewhere."""
    for name in _FILES:
        path = epath.Path(directory) / name
        try:
            data = read_json(path, "fetch the data set again", required=False)
        except (FileNotFoundError, NotADirectoryError):
            continue  # TFDS says what is missing
        for key, value in _strings(data):
            if name == _FILES[0] and key in _CLASS_KEYS and not value.startswith(_OURS):
                raise UserError(
                    f"{path}: has a feature of class {value!r}, which is not TFDS's own and would be imported, and so"
                    " run; convert the data set to plain features."
                )
            if key in ("filepathTemplate", "filepath_template") and ("/" in value or "\\" in value):
                raise UserError(
                    f"{path}: names files {value!r}, outside its folder; fetch the data set again."
                )


def _strings(data: Any) -> Iterator[tuple[str, str]]:
    """Every key with a text as its value, at any depth."""
    waiting = [data]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.values()
            yield from ((key, text) for key, text in value.items() if isinstance(text, str))
        elif isinstance(value, list):
            waiting += value
