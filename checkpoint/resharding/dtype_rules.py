"""Rules that give tensors another element type, by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from dtckpt.errors import LayoutMismatch

from ..files.manifest import Manifest
from ..files.stored_tensor import StoredTensor
from ..state.selecting import near_names
from ..tensors.dtypes import BY_TORCH_NAME, DTYPES, DType
from .placing import is_of_rank

_OF_ALL = ("float64", "float32", "float16", "bfloat16")
"""What a rule without a pattern is about: counters and quantized weights stay as they are."""


@dataclass(frozen=True, slots=True)
class DTypeRule:
    """Tensors whose name matches a shell-style pattern get this element type.

    Without a pattern those of 16 bits and more that are floating point.

    >>> DTypeRule.parse("model/*=bfloat16").pattern
    'model/*'
    >>> DTypeRule.parse("bf16").dtype.torch_name
    'bfloat16'
    """

    pattern: str | None
    dtype: DType

    @classmethod
    def parse(cls, text: str) -> DTypeRule:
        """Return the rule of ``PATTERN=DTYPE`` or ``DTYPE``; LayoutMismatch where it is none."""
        pattern, equals, name = text.rpartition("=")
        name = name.strip().removeprefix("torch.")
        dtype = BY_TORCH_NAME.get(name) or DTYPES.get(name.upper())
        if dtype is None or (equals and not pattern.strip()):
            raise LayoutMismatch(
                f"not a dtype, or a pattern and one: {text!r}; expected a form like 'bfloat16' or "
                f"'model/*=bfloat16'. Dtypes are {', '.join(BY_TORCH_NAME)}"
            )
        return cls(pattern.strip() if equals else None, dtype)

    def fits(self, tensor: StoredTensor) -> bool:
        """Whether the rule is about a tensor; what a rank kept for itself stays as it is."""
        if is_of_rank(tensor):
            return False
        if self.pattern is None:
            return tensor.dtype.torch_name in _OF_ALL
        return fnmatchcase(tensor.name, self.pattern)


def new_dtypes(manifest: Manifest, rules: Sequence[DTypeRule]) -> dict[str, DType]:
    """Return the element types of all tensors; the first rule that fits one decides.

    LayoutMismatch for rules that fit none, and where a conversion does not exist.
    """
    tensors = list(manifest.tensors_of_state.values())
    for rule in rules:
        if not any(map(rule.fits, tensors)):
            what = repr(rule.pattern) if rule.pattern else "floating point"
            hint = near_names(rule.pattern, list(manifest.tensors_of_state)) if rule.pattern else ""
            raise LayoutMismatch(
                f"no tensor is {what}, to become {rule.dtype.torch_name}{hint}. Mend the rule, or "
                "leave it out"
            )
    unchanged = {name: manifest.tensors[name].dtype for name in manifest.packed_names}
    found = unchanged | {
        tensor.name: next((r.dtype for r in rules if r.fits(tensor)), tensor.dtype)
        for tensor in tensors
    }
    _check_conversions((tensor, found[tensor.name]) for tensor in tensors)
    return found


def _check_conversions(changed: Iterable[tuple[StoredTensor, DType]]) -> None:
    for tensor, dtype in changed:
        if dtype == tensor.dtype:
            continue
        from ..loading.casting import may_convert  # which needs torch

        if not may_convert("cast", tensor.dtype, dtype) or dtype.packed != tensor.dtype.packed:
            raise LayoutMismatch(
                f"tensor {tensor.name!r}: there is no conversion of {tensor.dtype.torch_name} to "
                f"{dtype.torch_name}"
            )
