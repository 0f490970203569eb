"""The rule that reads what is quantized by blocks as the numbers that it stands for.

Known by names and types, as they are published:

* ``X`` of 8 bits with ``X_scale_inv`` (DeepSeek-V3: blocks of 128 x 128) or ``X_scale`` (one for
  each row, or for all), https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/README_WEIGHTS.md
* ``X_blocks`` and ``X_scales`` of MXFP4 (gpt-oss), which become ``X``: four bits each, the low ones
  first, and a power of two for every 32, https://github.com/openai/gpt-oss
* ``X`` of two four-bit numbers a byte with ``X_scale`` of 8 bits for every 16 and ``X_scale_2`` for
  all (NVFP4, as NVIDIA's ModelOpt writes it)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from dtckpt.errors import LayoutMismatch

from ...dtensor.geometry.layout import Layout
from ...dtensor.geometry.mesh import Mesh
from ...dtensor.geometry.placement import Replicate
from ..files.manifest import Manifest
from ..files.stored_tensor import StoredTensor
from ..state.patterns import pattern
from ..state.tree import below
from ..tensors.dtypes import BY_TORCH_NAME
from .changes import Change, MappingRule, Tensors
from .dequantized import Dequantized, Scale, is_scale_dtype
from .trees import edited

_EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
_PACKED = ("uint8", "int8", "float4_e2m1fn_x2")
_TARGETS = ("float32", "bfloat16", "float16")
_SOMEWHERE = Mesh((1,), (), (0,))


@dataclass(frozen=True, slots=True)
class Dequantize:
    """Codes with scales are seen as tensors of ``dtype``; their scales are seen no more.

    ``names`` is a pattern of what is meant, of names without ``_blocks``; what of it has no scales
    stays as it is. ``block`` is the side of a block where shapes allow several. Comes before all
    other rules, and has no inverse.
    """

    names: str = "{names*}"
    dtype: str = "bfloat16"
    block: int = 128

    kind: ClassVar[str] = "dequantize"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        if self.dtype not in _TARGETS:
            raise ValueError(f"dtype={self.dtype!r}: expected one of {', '.join(_TARGETS)}")
        if self.block < 1:
            raise ValueError(f"block={self.block}: expected 1 or more")
        pattern(self.names)

    def changes(self, tensors: Tensors) -> Iterator[Change]:
        """Raise LayoutMismatch: it changes what is stored, not what other rules have made."""
        del tensors
        raise LayoutMismatch("it has to come before all rules of other kinds")

    def inverse(self) -> MappingRule:
        """Raise LayoutMismatch."""
        raise LayoutMismatch(f"{self} has no inverse: numbers are not quantized again")

    def seen(self, manifest: Manifest, leaves: Mapping[str, str], part: str) -> Manifest:
        """Return a checkpoint as it is seen; ``leaves`` are names of tensors by those in ``part``.

        LayoutMismatch where nothing is quantized, or scales do not fit.
        """
        tensors = {leaf: manifest.tensors[name] for leaf, name in leaves.items()}
        made: dict[str, StoredTensor] = {}
        removed: set[str] = set()
        added: list[str] = []
        for codes, target, scales in _quantized(tensors):
            if not pattern(self.names).match(target):
                continue
            name = below(part, target)
            if target == codes:
                name = leaves[codes]  # where it stands already
            else:
                removed.add(below(part, codes))
                added.append(name)
            made[name] = self._tensor(name, tensors[codes], [tensors[scale] for scale in scales])
            removed.update(below(part, scale) for scale in scales)
        if not made:
            raise LayoutMismatch(f"no tensor that fits {self.names!r} has scales")
        gone = {leaves[leaf] for leaf in leaves if below(part, leaf) in removed}
        kept = {name: tensor for name, tensor in manifest.tensors.items() if name not in gone}
        tree = edited(manifest.tree, removed, added)
        return replace(manifest, tree=tree, tensors=kept | made, stored=manifest)

    def _tensor(self, name: str, codes: StoredTensor, tensors: list[StoredTensor]) -> StoredTensor:
        shape = _shape_of(codes, tensors[0])
        scales = tuple(Scale(tensor, self._block(name, shape, tensor)) for tensor in tensors)
        dtype = BY_TORCH_NAME[self.dtype]
        return StoredTensor(
            name=name,
            dtype=dtype,
            shape=shape,
            layout=Layout(_SOMEWHERE, (Replicate(),), shape),
            recipe=Dequantized(codes, scales, shape, dtype),
        )

    def _block(self, name: str, shape: tuple[int, ...], scale: StoredTensor) -> tuple[int, ...]:
        """Return the sides of the blocks that scales are for."""
        counts = (*scale.shape, *(1 for _ in shape[len(scale.shape) :]))
        if scale.shape == (1,):
            counts = (1,) * len(shape)
        sides = [_side(size, count, self.block) for size, count in zip(shape, counts, strict=False)]
        if not is_scale_dtype(scale.dtype) or len(counts) != len(shape) or None in sides:
            raise LayoutMismatch(
                f"tensor {name!r} of shape {shape}: {scale.name!r} of "
                f"{scale.dtype.torch_name}{list(scale.shape)} does not fit as its scales; blocks "
                f"have a side of {self.block}"
            )
        return tuple(side for side in sides if side is not None)


def _side(size: int, count: int, block: int) -> int | None:
    """Return how many elements share a scale of ``count`` along a dim; None where they do not.

    >>> _side(576, 5, 128), _side(64, 64, 128), _side(64, 1, 128), _side(64, 2, 128)
    (128, 1, 128, 32)
    """
    if size == count:
        return 1
    if -(-size // block) == count:
        return block
    if count and size % count == 0:
        return size // count
    return None


def _shape_of(codes: StoredTensor, scale: StoredTensor) -> tuple[int, ...]:
    """Return the shape of what codes stand for."""
    *lead, last = codes.shape
    if codes.dtype.torch_name in _EIGHT_BITS:
        return codes.shape
    if len(codes.shape) == len(scale.shape) + 1:  # groups are a dim of their own
        return (*lead[:-1], lead[-1] * last * 2)
    return (*lead, last * 2)


def _quantized(
    tensors: Mapping[str, StoredTensor],
) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield names of codes, of what they stand for, and of the scales that are there."""
    for name, tensor in tensors.items():
        kind = tensor.dtype.torch_name
        if not tensor.shape:
            continue
        scales = tuple(s for s in (f"{name}_scale", f"{name}_scale_2") if s in tensors)
        if kind in _EIGHT_BITS:
            found = [s for s in (f"{name}_scale_inv", f"{name}_scale") if s in tensors]
            if found:
                yield name, name, (found[0],)
        elif name.endswith("_blocks") and kind in _PACKED:
            target = name.removesuffix("_blocks")
            if f"{target}_scales" in tensors and len(tensor.shape) > 1:
                yield name, target, (f"{target}_scales",)
        elif kind in _PACKED and len(scales) == 2:
            yield name, name, scales
