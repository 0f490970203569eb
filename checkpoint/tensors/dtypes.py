"""Element types: the ones that torch and safetensors share, under safetensors' codes.

``C128`` is the one of torch alone: its elements lie in files as two numbers of ``F64``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dtckpt.errors import Corrupt


@dataclass(frozen=True, slots=True, kw_only=True)
class DType:
    """An element type of the format."""

    code: str
    """Name in manifests, as safetensors spells it."""
    torch_name: str
    """Name of the torch dtype, without the ``torch.`` prefix."""
    itemsize: int
    """Bytes per torch element."""
    packed: int = 1
    """Values in one torch element; safetensors counts values in the last dim of a shape."""
    parts_code: str = ""
    """Where safetensors has no such type: code of the numbers of which one element has two, which
    are the last dim of a shape in files."""

    @property
    def in_file(self) -> DType:
        """The element type that data files state: another one where safetensors has none."""
        return DTYPES[self.parts_code] if self.parts_code else self

    @property
    def items(self) -> str:
        """Numpy's name of the type in which elements are moved, see ``items_of``."""
        return items_of(self.itemsize)

    def __reduce__(self) -> tuple[Any, ...]:
        return _known, (self.code,)  # there is one of each: they are compared by identity

    def file_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that a safetensors header states for a tensor of ``shape``."""
        if self.parts_code:
            return (*shape, 2)
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
} | {
    "F4": DType(code="F4", torch_name="float4_e2m1fn_x2", itemsize=1, packed=2),
    "C128": DType(code="C128", torch_name="complex128", itemsize=16, parts_code="F64"),
}
"""Every element type by its code."""

IN_FILES: dict[str, DType] = {code: dtype for code, dtype in DTYPES.items() if not dtype.parts_code}
"""The element types that headers of files name, by code: those of safetensors."""

BY_TORCH_NAME: dict[str, DType] = {dtype.torch_name: dtype for dtype in DTYPES.values()}
"""Every element type by the name of its torch dtype."""


def items_of(itemsize: int) -> str:
    """Return numpy's name of the type in which elements of so many bytes are moved.

    Unsigned ints, of which no bit is touched; numpy has none of 16 bytes, but plain bytes.

    >>> items_of(2), items_of(16)
    ('u2', 'V16')
    """
    return f"u{itemsize}" if itemsize <= 8 else f"V{itemsize}"


def torch_items(itemsize: int) -> str:
    """Return numpy's name of a type as wide as ``items_of`` of which torch has tensors."""
    return {1: "u1", 16: "c16"}.get(itemsize, f"i{itemsize}")


def _known(code: str) -> DType:
    return DTYPES[code]


def dtype_of_code(code: object, where: str, *, is_header: bool = False) -> DType:
    """Return the element type that stored metadata names; Corrupt where there is none.

    The header of a file names those of safetensors only.
    """
    known = IN_FILES if is_header else DTYPES
    dtype = known.get(code) if isinstance(code, str) else None
    if dtype is None:
        raise Corrupt(f"{where}: unknown dtype {code!r}; expected one of {', '.join(known)}")
    return dtype
