"""Arrays by name in one file: `.safetensors`, or `.pt` where PyTorch is installed.

The safetensors layout is short enough to be read here without a further dependency: eight bytes with the header's
length, a JSON header, the arrays' bytes without gaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from etils import epath

from looped.errors import UserError, first_line
from looped.files import whole
from looped.jsonable import parse_json

_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
}
"""In the order in which the safetensors library writes them."""
SUFFIXES = (".safetensors", ".pt")


def read_arrays(path: epath.PathLike) -> dict[str, np.ndarray]:
    """Returns the arrays of the file, floating point as they are.  `UserError` where it is none or is damaged."""
    path = _checked(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file.")
    try:
        return _read_pt(path) if path.suffix == ".pt" else _read_safetensors(path.read_bytes())
    except (UserError, OSError):
        raise
    except Exception as error:  # a header of others' making goes wrong in many ways
        raise UserError(f"{path}: damaged, or no {path.suffix} file ({error}).") from error


def write_arrays(path: epath.PathLike, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes `arrays` whole or not at all."""
    path = _checked(path)
    with whole(path) as unfinished:
        if path.suffix == ".pt":
            _write_pt(unfinished, arrays)
        else:
            _write_safetensors(unfinished, arrays)


def _checked(path: epath.PathLike) -> epath.Path:
    path = epath.Path(path)
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path}: its name must end in {' or '.join(SUFFIXES)}.")
    return path


def _read_safetensors(content: bytes) -> dict[str, np.ndarray]:
    size = int.from_bytes(content[:8], "little")
    if len(content) < 8 + size:
        raise ValueError(f"a header of {size} bytes in a file of {len(content)}")
    header: dict[str, Any] = parse_json(content[8 : 8 + size])
    header.pop("__metadata__", None)
    data = memoryview(content)[8 + size :]
    arrays, end = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{name} has dtype {entry['dtype']}; read are {', '.join(_DTYPES)}")
        dtype, shape, (start, stop) = np.dtype(_DTYPES[entry["dtype"]]), entry["shape"], entry["data_offsets"]
        if start != end or stop - start != math.prod(shape) * dtype.itemsize or stop > len(data):
            raise ValueError(
                f"{name} takes bytes {start} to {stop}, which does not fit its shape or its neighbours"
            )
        arrays[name] = np.frombuffer(data[start:stop], dtype).reshape(shape)
        end = stop
    if end != len(data):
        raise ValueError(f"{len(data) - end} bytes belong to no array")
    return arrays


def _write_safetensors(path: epath.Path, arrays: Mapping[str, np.ndarray]) -> None:
    """By type, then by name, padded to eight bytes: the same file as the safetensors library writes."""
    names = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
    ranks = {dtype: rank for rank, dtype in enumerate(names)}
    ordered = sorted(arrays.items(), key=lambda item: (ranks[item[1].dtype], item[0]))
    header, end = {}, 0
    for name, array in ordered:
        offsets = [end, end + array.nbytes]
        header[name] = {"dtype": names[array.dtype], "shape": list(array.shape), "data_offsets": offsets}
        end = offsets[1]
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array in ordered:
            file.write(array.tobytes())


def _torch() -> Any:
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError(
            "a .pt file needs PyTorch, which is not installed: `pip install torch`, or use .safetensors."
        ) from None
    return torch


def _read_pt(path: epath.Path) -> dict[str, np.ndarray]:
    torch = _torch()
    with path.open("rb") as file:
        try:
            tensors = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # of many kinds, by what is wrong
            raise ValueError(first_line(error)) from error
    return {name: _from_torch(torch, tensor) for name, tensor in tensors.items()}


def _from_torch(torch: Any, tensor: Any) -> np.ndarray:
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:  # which NumPy lacks
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _write_pt(path: epath.Path, arrays: Mapping[str, np.ndarray]) -> None:
    torch = _torch()
    tensors = {}
    for name, array in arrays.items():
        own = np.array(array, order="C")  # PyTorch wants to own what it is given
        narrow = own.dtype == ml_dtypes.bfloat16
        tensors[name] = (
            torch.from_numpy(own.view(np.int16)).view(torch.bfloat16) if narrow else torch.from_numpy(own)
        )
    with path.open("wb") as file:
        torch.save(tensors, file)
