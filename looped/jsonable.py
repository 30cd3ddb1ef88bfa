"""Frozen dataclasses to JSON and back, with errors that name the key."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, TypeVar

from looped.errors import UserError, nearest

T = TypeVar("T")


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
        raise UserError(f"{where or cls.__name__}: expected an object, got {data!r}.")
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
            raise UserError(f"{where}: expected a list, got {value!r}.")
        return tuple(_decode(args[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise UserError(f"{where}: expected an object, got {value!r}.")
        return {k: _decode(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if origin is typing.Literal:
        if value not in args:
            raise UserError(f"{where}: {value!r} is not one of {', '.join(map(repr, args))}.")
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and (
        not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool)
    ):
        raise UserError(f"{where}: expected {hint.__name__}, got {value!r}.")
    return value
