"""Frozen dataclasses to JSON and back, with errors that name the key."""

from __future__ import annotations

import dataclasses
import json
import reprlib
import types
import typing
from typing import Any, TypeVar

from etils import epath

from looped.errors import UserError, first_line, nearest

T = TypeVar("T")


def parse_json(text: str | bytes) -> Any:
    """Returns the JSON data in `text`; ValueError where there is none, whatever it is in place of it."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("lists or objects within one another without end") from None


def read_json(path: epath.PathLike, remedy: str, field: str = "", required: bool = True) -> Any:
    """Returns the JSON data in a file, local or gs://.

    Raises `UserError`, naming `field` and the path, where it cannot be read or is not JSON; for a missing file
    FileNotFoundError or NotADirectoryError unless it is `required`.
    """
    name = f"{field} {path}".lstrip()
    try:
        return parse_json(epath.Path(path).read_text())
    except ValueError as error:
        raise UserError(f"{name}: not JSON ({first_line(error)}); {remedy}.") from None
    except OSError as error:
        if not required and isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise
        raise UserError(f"{name}: cannot be read ({error.strerror or error}); {remedy}.") from None


def to_json(value: Any) -> Any:
    """Returns `value` as plain JSON data: dataclasses become objects, tuples become lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    if isinstance(value, dict):
        return {str(k): to_json(v) for k, v in value.items()}
    return value


def from_json(cls: type[T], data: Any, where: str = "") -> T:
    """Builds dataclass `cls` from the JSON data that `to_json` made of it.

    Raises `UserError` for an unknown or missing key, or a value of another type, naming the key's path.
    """
    if not isinstance(data, dict):
        raise UserError(f"{where or cls.__name__}: expected an object, got {reprlib.repr(data)}.")
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    for key in data:
        if key not in fields:
            raise UserError(f"{where}{key}: not a field of {cls.__name__}.{nearest(key, fields)}")
    values = {}
    for name, field in fields.items():
        if name in data:
            values[name] = _decode(hints[name], data[name], f"{where}{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise UserError(f"{where}{name}: missing; {cls.__name__} needs it.")
    return cls(**values)


def _decode(hint: Any, value: Any, where: str) -> Any:
    if hint is Any:
        return value
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _decode(next(a for a in args if a is not type(None)), value, where)
    if dataclasses.is_dataclass(hint):
        return from_json(typing.cast(type, hint), value, f"{where}.")
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise UserError(f"{where}: expected a list, got {reprlib.repr(value)}.")
        return tuple(_decode(args[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise UserError(f"{where}: expected an object, got {reprlib.repr(value)}.")
        return {k: _decode(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if origin is typing.Literal:
        if value not in args:
            raise UserError(f"{where}: {value!r} is not one of {', '.join(map(repr, args))}.")
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise UserError(
                f"{where}: {reprlib.repr(value)} is beyond any float; give a smaller number."
            ) from None
    if isinstance(hint, type) and (
        not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool)
    ):
        raise UserError(f"{where}: expected {hint.__name__}, got {reprlib.repr(value)}.")
    return value
