"""Typed JSON for values that are not tensors.

None, bool, int, finite float and str are JSON scalars. Everything else is an object with one key
that names its type. Nothing is pickled unless the caller insists, at save and again at load.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import io
import math
import pickle
import re
from collections.abc import Callable
from typing import Any, TypeVar, cast

from dtckpt.errors import CheckpointError, Corrupt, Unsavable
from dtckpt.interrupts import raised_by_signal_handler

from .limits import shown
from .standard_types import STANDARD_TAGS, standard_node, standard_value

Node = Any
"""A JSON value of this codec."""

EnumT = TypeVar("EnumT", bound=enum.Enum)

MAX_INT_BITS = 14_000
"""Python reads no longer decimals (4,300 digits) by default."""

_NUMPY_SCALAR = re.compile(r"[<>|=]?[biufcmMSU][0-9]{1,9}(\[[0-9a-zA-Z]{1,20}\])?")

_ENUMS: dict[str, type[enum.Enum]] = {}


def register_enum(cls: type[EnumT]) -> type[EnumT]:
    """Let members of an enum be saved by name; use as a decorator.

    Loading needs the same registration, since a checkpoint never imports code by itself.
    """
    _ENUMS[_qualified_name(cls)] = cls
    return cls


def encode_value(value: object, name: str, *, allow_pickle: bool) -> Node:
    """Return the node of a leaf; Unsavable, with its name, where the format has no form for it."""
    if type(value) is int and value.bit_length() > MAX_INT_BITS:
        raise Unsavable(f"{name}: an int of {value.bit_length()} bits is too long to be written")
    if value is None or type(value) in (bool, int, str):
        return value
    encoder = _ENCODERS.get(type(value)) or _foreign_encoder(value)
    if encoder is not None:
        return encoder(value)
    try:
        node = standard_node(value, lambda item: encode_value(item, name, allow_pickle=False))
    except (ValueError, Unsavable) as error:
        if not allow_pickle:
            told = "" if isinstance(error, Unsavable) else f"{name}: "
            raise Unsavable(f"{told}{error}") from error
        node = None
    if node is not None:
        return node
    if allow_pickle:
        return {"pickle": _to_base64(pickle.dumps(value))}
    raise Unsavable(
        f"{name}: a value of type {_qualified_name(type(value))} cannot be written. The format "
        "holds tensors, numpy arrays and scalars, None, bool, int, float, complex, str, bytes, "
        "BytesIO, list, tuple, dict and other mappings, set, frozenset, deque, dates and times, "
        "paths, torch dtypes, devices and sizes, and enums given to register_enum. "
        f"{_remedy(value)}, or pass allow_pickle=True at save and at load"
    )


def _remedy(value: object) -> str:
    """Return how a value of a class of the user is saved without its class."""
    if isinstance(value, enum.Enum):
        return "Decorate the class with register_enum"
    if isinstance(value, tuple):  # a class of its own, which a checkpoint does not import
        return "Save tuple(value), or value._asdict() of a namedtuple, and make it again at load"
    if dataclasses.is_dataclass(value):
        return (
            "Save dataclasses.asdict(value) and make it again at load, or give the class "
            "state_dict() and load_state_dict()"
        )
    return "Convert the value"


def decode_value(node: Node, name: str, *, allow_pickle: bool) -> Any:
    """Return the value of a leaf node; Corrupt where it is malformed."""
    if not isinstance(node, dict):
        return node
    fields = cast(dict[str, Any], node)
    tag = next(iter(fields), "")
    if tag == "pickle" and not allow_pickle:
        raise CheckpointError(
            f"{name} was saved as a pickle, which can run code when it is read; "
            "pass allow_pickle=True if you trust whoever wrote the checkpoint"
        )
    if len(fields) != 1 or tag not in _DECODERS:
        raise Corrupt(f"{name}: unknown value form {shown(fields)}")
    try:
        return _DECODERS[tag](fields[tag])
    except CheckpointError:
        raise
    except Exception as error:
        if raised_by_signal_handler(error):
            raise
        raise Corrupt(
            f"{name}: malformed {tag} value {shown(fields[tag])} ({shown(error)})"
        ) from error


def _encode_float(value: float) -> Node:
    return value if math.isfinite(value) else {"float": repr(value)}


def _encode_numpy_scalar(value: Any) -> Node:
    return {"numpy": [value.dtype.str, _to_base64(value.tobytes())]}


def _decode_numpy_scalar(value: list[str]) -> Any:
    np = _numpy()
    code, text = value
    if not _NUMPY_SCALAR.fullmatch(code):
        raise ValueError("no dtype of a numpy scalar")
    dtype, data = np.dtype(code), _from_base64(text)
    if dtype.itemsize == 0:  # an empty string, of which numpy gives the bytes of one character
        return dtype.type()
    if len(data) != dtype.itemsize:
        raise ValueError(f"{len(data)} bytes, expected {dtype.itemsize}")
    return np.frombuffer(data, dtype=dtype)[0]


def _foreign_encoder(value: object) -> Callable[[Any], Node] | None:
    """Return the encoder of torch's, numpy's and registered enum types, known by their names."""
    cls = type(value)
    if isinstance(value, enum.Enum):
        if _ENUMS.get(_qualified_name(cls)) is not cls:
            return None
        return lambda member: {"enum": [_qualified_name(cls), member.name]}
    module = cls.__module__.partition(".")[0]
    if module == "torch":
        return _TORCH_ENCODERS.get(cls.__name__)
    if module == "numpy" and isinstance(value, _numpy().generic):
        kind = cast(Any, value).dtype.kind
        return _encode_numpy_scalar if kind in "biufcmMSU" else None
    return None


def _numpy() -> Any:
    import numpy as np

    return np


def _torch() -> Any:
    import torch

    return torch


def _decode_dtype(name: str) -> Any:
    value = getattr(_torch(), name)
    if not isinstance(value, _torch().dtype):
        raise Corrupt(f"torch.{name} is not a dtype")
    return value


def _decode_enum(value: list[str]) -> enum.Enum:
    if value[0] not in _ENUMS:
        raise CheckpointError(f"enum {value[0]} is not known here; call register_enum before load")
    return _ENUMS[value[0]][value[1]]


def _decode_float(text: str) -> float:
    value = float(text)
    if math.isfinite(value):
        raise ValueError("finite floats are plain JSON numbers")
    return value


def _to_base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _from_base64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _qualified_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


_ENCODERS: dict[type, Callable[[Any], Node]] = {
    float: _encode_float,
    complex: lambda value: {"complex": [_encode_float(value.real), _encode_float(value.imag)]},
    bytes: lambda value: {"bytes": _to_base64(value)},
    io.BytesIO: lambda value: {"bytes": _to_base64(value.getvalue())},
}
_TORCH_ENCODERS: dict[str, Callable[[Any], Node]] = {
    "dtype": lambda value: {"dtype": str(value).removeprefix("torch.")},
    "device": lambda value: {"device": str(value)},
    "Size": lambda value: {"size": list(value)},
}
_DECODERS: dict[str, Callable[[Any], Any]] = {
    "float": _decode_float,
    "complex": lambda parts: complex(*(decode_value(p, "", allow_pickle=False) for p in parts)),
    "bytes": _from_base64,
    "numpy": _decode_numpy_scalar,
    "dtype": _decode_dtype,
    "device": lambda text: _torch().device(text),
    "size": lambda sizes: _torch().Size(sizes),
    "enum": _decode_enum,
    "pickle": lambda text: pickle.loads(_from_base64(text)),
}


def _standard_decoder(tag: str) -> Callable[[Any], Any]:
    return lambda told: standard_value(
        tag, told, lambda node: decode_value(node, "", allow_pickle=False)
    )


_DECODERS.update((tag, _standard_decoder(tag)) for tag in STANDARD_TAGS)

VALUE_TAGS = tuple(_DECODERS)
"""Tags of value nodes."""
