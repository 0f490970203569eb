"""Element types: the ones that torch and safetensors share, under safetensors' codes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dtckpt.errors import Corrupt


@dataclass(frozen=True, slots=True, kw_only=True)
class DType:
    """An element type of the format."""

    code: str
    """Name in manifests and data files, as safetensors spells it."""
    torch_name: str
    """Name of the torch dtype, without the ``torch.`` prefix."""
    itemsize: int
    """Bytes per torch element."""
    packed: int = 1
    """Values in one torch element; safetensors counts values in the last dim of a shape."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _known, (self.code,)  # there is one of each: they are compared by identity

    def file_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that a safetensors header states for a tensor of ``shape``."""
        if self.packed == 1:
            return shape
        return (*shape[:-1], shape[-1] * self.packed) if shape else (self.packed,)

    def shape_of(self, file_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the tensor for which a header states ``file_shape``.

        ValueError where an element would be cut.
        """
        if self.packed == 1:
            return file_shape
        if not file_shape or file_shape[-1] % self.packed:
            raise ValueError(f"{self.code} of shape {file_shape} has half an element in a row")
        return (*file_shape[:-1], file_shape[-1] // self.packed)


_TABLE = (
    ("F64", "float64", 8),
    ("I64", "int64", 8),
    ("U64", "uint64", 8),
    ("C64", "complex64", 8),
    ("F32", "float32", 4),
    ("I32", "int32", 4),
    ("U32", "uint32", 4),
    ("F16", "float16", 2),
    ("BF16", "bfloat16", 2),
    ("I16", "int16", 2),
    ("U16", "uint16", 2),
    ("I8", "int8", 1),
    ("U8", "uint8", 1),
    ("BOOL", "bool", 1),
    ("F8_E4M3", "float8_e4m3fn", 1),
    ("F8_E5M2", "float8_e5m2", 1),
    ("F8_E4M3FNUZ", "float8_e4m3fnuz", 1),
    ("F8_E5M2FNUZ", "float8_e5m2fnuz", 1),
    ("F8_E8M0", "float8_e8m0fnu", 1),
)

DTYPES: dict[str, DType] = {
    code: DType(code=code, torch_name=name, itemsize=size) for code, name, size in _TABLE
} | {"F4": DType(code="F4", torch_name="float4_e2m1fn_x2", itemsize=1, packed=2)}
"""Every element type by its code."""

BY_TORCH_NAME: dict[str, DType] = {dtype.torch_name: dtype for dtype in DTYPES.values()}
"""Every element type by the name of its torch dtype."""


def _known(code: str) -> DType:
    return DTYPES[code]


def dtype_of_code(code: object, where: str) -> DType:
    """Return the element type that stored metadata names; Corrupt where there is none."""
    dtype = DTYPES.get(code) if isinstance(code, str) else None
    if dtype is None:
        raise Corrupt(f"{where}: unknown dtype {code!r}; expected one of {', '.join(DTYPES)}")
    return dtype
