"""What a program is drawn with: a random source, and the values that it has so far."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from dtckpt.errors import PlacementError

from .executors import Helpers
from .program import BY_PARTS, UNTOLD, Input, code_of
from .values import layout_of, plain_input

T = TypeVar("T")

FLOATS = ("float32", "float64", "bfloat16", "float16")
INTEGERS = ("int32", "int64", "uint8", "int16")
DTYPES = (*FLOATS, *INTEGERS, "bool", "complex64")
_DTYPE_WEIGHTS = (10, 2, 3, 2, 2, 4, 1, 1, 2, 1)
_SIZES = (0, 1, 2, 3, 4, 5, 6, 7, 8)
_SIZE_WEIGHTS = (1, 3, 3, 4, 6, 4, 4, 1, 2)
MAX_NUMEL = 200


class Refused(Exception):
    """A producer finds nothing that it could do here."""


class Draw:
    """One program while it is drawn: each line runs on one device as soon as it is chosen."""

    def __init__(self, source: random.Random, mesh: tuple[int, ...], profile: frozenset[str]):
        self.source, self.mesh, self.profile = source, mesh, profile
        self.inputs: dict[str, Input] = {}
        self.lines: list[str] = []
        self.runs: list[dict[str, Any]] = [{}, {}]
        self.env: dict[str, Any] = Helpers().namespace()
        self.values: dict[str, Tensor] = {}
        """Tensors that lines may use, by name; written when they change."""
        self.sealed: set[int] = set()
        """Memory that ranks may share with the result of a redistribute, or not: not written."""
        self.untold: set[int] = set()
        """Memory of which ranks have told each other no strides: ``contiguous()`` copies it."""
        self.kept: list[Tensor] = []
        """What has that memory: no other tensor may get it."""
        self.plain_names: set[str] = set()
        """Names of plain tensors."""
        self.number_count = 0
        self.error: Exception | None = None
        self.dtype = source.choices(DTYPES, _DTYPE_WEIGHTS)[0]
        """What most inputs have."""
        self.wants_grad = source.random() < 0.5

    # Random choices

    def chance(self, share: float) -> bool:
        """Return True in a share of the cases."""
        return self.source.random() < share

    def one(self, items: Sequence[T]) -> T:
        """Return one of some items; Refused for none."""
        if not items:
            raise Refused
        return self.source.choice(items)

    def weighted(self, items: dict[T, float]) -> T:
        """Return one of some items by weight."""
        return self.source.choices(list(items), list(items.values()))[0]

    def size(self) -> int:
        """Return the size of a dim."""
        return self.source.choices(_SIZES, _SIZE_WEIGHTS)[0]

    def shape(self, ndim: int | None = None) -> tuple[int, ...]:
        """Return a small shape."""
        if ndim is None:
            ndim = self.weighted({0: 1, 1: 2, 2: 5, 3: 4, 4: 1})
        while True:
            found = tuple(self.size() for _ in range(ndim))
            if torch.Size(found).numel() <= MAX_NUMEL:
                return found

    # Inputs and values

    def input(
        self,
        shape: tuple[int, ...] | None = None,
        dtype: str | None = None,
        *,
        plain: bool = False,
        values: str | None = None,
        grad: bool | None = None,
        strides: str | None = None,
        written: bool = False,
    ) -> str:
        """Add an input and return its name; ``written`` where a line is to write to all of it."""
        if len(self.inputs) >= 6:
            raise Refused
        if shape is None:
            shape = self.shape()
        if dtype is None:
            dtype = (
                self.dtype if self.chance(0.75) else self.source.choices(DTYPES, _DTYPE_WEIGHTS)[0]
            )
        if values is None:
            values = self.weighted({"mixed": 12, "positive": 2, "special": 1, "ones": 1})
        can_grad = getattr(torch, dtype).is_floating_point or dtype == "complex64"
        if grad is None:
            grad = self.wants_grad and self.chance(0.7)
        if strides is None and written:
            strides = self.one(["rows", "rows", "rows", "transposed", "stepped"])
        elif strides is None:
            strides = "rows"
            if self.chance(0.5 if "strides" in self.profile else 0.12):
                strides = self.weighted(
                    {"transposed": 4, "stepped": 3, "stepped_rows": 1, "offset": 1, "expanded": 1}
                )
        name = "abcdefghij"[len(self.inputs)]
        made = Input(
            shape=shape,
            dtype=dtype,
            placements="" if plain else self.placements(shape, dtype),
            values=values,
            seed=self.source.randrange(100),
            strides=strides,
            grad=bool(grad and can_grad),
            made_by="" if plain else self._made_by(strides, written),
        )
        self.inputs[name] = made
        if plain:
            self.plain_names.add(name)
        self.env[name] = self.values[name] = plain_input(made)[0]
        # Elements of one memory on one device may be of several on ranks, and contiguous() a copy.
        if strides == "expanded" or made.made_by == UNTOLD:
            self.seal(name)
        if made.made_by == BY_PARTS and set(made.placements) <= set("R, "):
            self.note_untold(name)  # a replica needs no exchange
        return name

    def _made_by(self, strides: str, written: bool) -> str:
        if strides != "rows":
            # Writes to parts that overlap themselves are refused, to rows they are not.
            may_be_untold = "strides" in self.profile and not written and strides != "expanded"
            return UNTOLD if may_be_untold and self.chance(0.5) else ""
        return self.weighted({"": 8, "distribute_tensor": 1, BY_PARTS: 1})

    def placements(self, shape: tuple[int, ...], dtype: str | None = None) -> str:
        """Return placements that a tensor of this shape may have; Partial only with a dtype."""
        for _ in range(20):
            text = ", ".join(self._placement(shape, dtype, size) for size in self.mesh)
            if len(self.mesh) == 2 and shape and self.chance(0.08):
                dim = self.source.randrange(len(shape))
                text = f"S({dim})@1, S({dim})@0"
            if len(set(re.findall(r"P\(\w+\)", text))) > 1:
                continue  # reductions that do not commute
            try:
                layout_of(self.mesh, text, shape)
            except PlacementError:
                continue
            return text
        return ", ".join("R" for _ in self.mesh)

    def _placement(self, shape: tuple[int, ...], dtype: str | None, count: int) -> str:
        kinds: dict[str, float] = {"R": 5}
        if dtype is not None:
            kinds["P"] = 3 if dtype != "bool" else 1
        if shape:
            kinds |= {"S": 12, "Ragged": 2, "Packed": 0.7, "HeadTail": 1}
        kind = self.weighted(kinds)
        dim = self.source.randrange(len(shape)) if shape else 0
        if kind == "R":
            return kind
        if kind == "P":
            ops: dict[str, float] = {"sum": 6.0, "max": 1, "min": 1, "avg": 1.5, "product": 0.5}
            if dtype not in FLOATS:
                del ops["avg"]
            if dtype == "complex64":
                ops = {"sum": 1}
            if dtype == "bool":
                ops = {"sum": 1, "max": 1, "min": 1}
            return f"P({self.weighted(ops)})"
        if kind == "Ragged":
            return f"Ragged({dim}:{self._parts(shape[dim], count)})"
        if kind == "Packed":
            return f"Packed({dim}:{self._parts(shape[dim], self.one([1, 2, 3]))})"
        return f"{kind}({dim})"

    def _parts(self, size: int, count: int) -> str:
        bounds = sorted(self.source.randint(0, size) for _ in range(count - 1))
        ends = [*bounds, size]
        return ",".join(str(end - start) for start, end in zip([0, *bounds], ends, strict=True))

    def pick(self, *tests: Callable[[Tensor], bool], distributed: bool = True) -> str:
        """Return the name of a tensor that passes all tests; Refused where there is none."""
        found = [
            name
            for name, value in self.values.items()
            if all(test(value) for test in tests) and not (distributed and name in self.plain_names)
        ]
        if not found:
            raise Refused
        weights = [2 if name not in self.inputs else 1 for name in found]
        return self.source.choices(found, weights)[0]

    def tensor(self, *tests: Callable[[Tensor], bool], **given: Any) -> str:
        """Return a tensor that passes all tests, now and then a new input."""
        if not self.chance(0.25):
            try:
                return self.pick(*tests)
            except Refused:
                pass
        if len(self.inputs) < 6:
            for _ in range(8):
                name = self.input(**given)
                if all(test(self.values[name]) for test in tests):
                    return name
                del self.inputs[name], self.values[name], self.env[name]
        return self.pick(*tests)

    def beside(self, name: str, dtype: str | None = None) -> str:
        """Return a tensor of a shape that goes with another one's by broadcasting."""
        value = self.values[name]
        if self.chance(0.3):
            try:
                return self.pick(lambda t: _broadcasts(t, value))
            except Refused:
                pass
        shape = tuple(value.shape)
        if self.chance(0.4):
            shape = tuple(1 if self.chance(0.3) else size for size in shape)
        if self.chance(0.2):
            shape = shape[self.source.randint(0, len(shape)) :]
        if dtype is None:
            dtype = dtype_name(value) if self.chance(0.8) else None
        return self.input(shape, dtype)

    def number(self, kinds: str = "ifb", *, finite: bool = False) -> str:
        """Return the name of a number, with another value and mostly another type in each run."""
        name = f"s{self.number_count}"
        self.number_count += 1
        first = self._value(kinds, finite=finite)
        second = self._value(kinds, finite=finite)
        if self.chance(0.4) and first == first and abs(first) < 100 and first == int(first):
            # Equal numbers of another type: 2, 2.0, True.
            kind = self.one([k for k in kinds if k in "ifb"])
            second = {"i": int, "f": float, "b": bool}[kind](first)
        self.runs[0][name], self.runs[1][name] = first, second
        self.env[name] = first
        return name

    def _value(self, kinds: str, *, finite: bool) -> Any:
        kind = self.weighted({k: {"i": 5, "f": 5, "b": 1}[k] for k in kinds})
        if kind == "i":
            return self.one([2, 3, 1, 0, -1, -2, 5])
        if kind == "b":
            return self.chance(0.7)
        special = [0.0, float("nan"), float("inf"), -float("inf"), -0.0]
        is_special = self.chance(0.12) and not finite
        return self.one(special) if is_special else self.one([2.0, 0.5, 1.0, 3.0, -1.5, 2.5])

    # Lines

    def add(self, line: str) -> bool:
        """Run a line on one device, and keep it; whether it ran."""
        try:
            exec(code_of(line), self.env)
        except Exception as error:
            self.error = error
            return False
        self.lines.append(line)
        self._refresh()
        shared = re.fullmatch(r"(\w+) = redistribute\(([^,]+), '[^']*'\)", line)
        if shared:
            for name in shared.groups():
                self.seal(name)
        return True

    def seal(self, name: str) -> None:
        """Let no line write to a tensor, or to what shares its memory."""
        self.sealed.add(self.values[name].untyped_storage().data_ptr())
        self.kept.append(self.values[name])

    def note_untold(self, name: str) -> None:
        """Note that ranks tell each other no strides of a tensor."""
        self.untold.add(self.values[name].untyped_storage().data_ptr())
        self.kept.append(self.values[name])

    def seal_if_untold(self, name: str) -> None:
        """Let no line write to what ``contiguous()`` of a tensor may share memory with, or not."""
        if self.values[name].untyped_storage().data_ptr() in self.untold:
            self.seal(name)

    def name(self) -> str:
        """Return a new name."""
        return f"x{len(self.lines)}"

    def _refresh(self) -> None:
        for name, value in self.env.items():
            if name.startswith("x") and name[1:].split("_")[0].isdigit():
                if isinstance(value, Tensor):
                    self.values[name] = value
                elif isinstance(value, list | tuple):
                    for index, item in enumerate(value):
                        if isinstance(item, Tensor):
                            self.values[f"{name}[{index}]"] = item


def dtype_name(value: Tensor) -> str:
    """Return the name that an input takes for a tensor's dtype."""
    return str(value.dtype).removeprefix("torch.")


def _broadcasts(value: Tensor, other: Tensor) -> bool:
    try:
        return torch.broadcast_shapes(value.shape, other.shape) == other.shape
    except RuntimeError:
        return False


def is_float(value: Tensor) -> bool:
    """Whether a tensor has real floats."""
    return value.dtype.is_floating_point


def is_integer(value: Tensor) -> bool:
    """Whether a tensor has whole numbers."""
    return not (
        value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool
    )


def is_small(value: Tensor) -> bool:
    """Whether a tensor is small enough to be multiplied by another one."""
    return value.numel() <= MAX_NUMEL


def has_dims(*numbers: int) -> Callable[[Tensor], bool]:
    """Return a test of the number of dims."""
    return lambda value: value.ndim in numbers


def is_any(value: Tensor) -> bool:
    """Accept any tensor that is not too large."""
    return value.numel() <= 4 * MAX_NUMEL
