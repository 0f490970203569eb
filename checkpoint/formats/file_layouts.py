"""Layouts of tensors that lie in the files of other programs: whole, in parts, or flattened."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence

from dtckpt.errors import Corrupt, PlacementError

from ...dtensor.geometry.box import Box, run_boxes
from ...dtensor.geometry.irregular import IrregularLayout
from ...dtensor.geometry.layout import Layout
from ...dtensor.geometry.mesh import Mesh
from ...dtensor.geometry.placement import Replicate
from ..state.limits import check_shape


class FileLayouts:
    """Layouts by file, in the place of a rank. Equal ones are one object, for very many tensors."""

    def __init__(self, url: str, files: Sequence[str]) -> None:
        self._url = url
        self._files = files
        self._whole: dict[tuple[int, tuple[int, ...]], Layout] = {}

    def whole(self, file: int, shape: tuple[int, ...]) -> Layout:
        """Return the layout of a tensor that lies in one file, given by its number."""
        known = self._whole.get((file, shape))
        if known is None:
            self._check(shape, "a tensor")
            mesh = Mesh((1,), (), (file,))
            known = self._whole[file, shape] = Layout(mesh, (Replicate(),), shape)
        return known

    def of_parts(
        self, name: str, shape: tuple[int, ...], parts: Sequence[tuple[int, Box]]
    ) -> Layout | IrregularLayout:
        """Return the layout of (file, box) pairs; Corrupt unless they cover the tensor once."""
        self._check(shape, f"tensor {name!r}")
        if len(parts) == 1 and parts[0][1] == Box.whole(shape):
            return self.whole(parts[0][0], shape)
        try:
            layout = IrregularLayout(shape, tuple(parts))
            layout.validate()
        except PlacementError as error:
            names = ", ".join(self._files[file] for file in sorted({file for file, _ in parts}))
            raise Corrupt(
                f"{self._url}: tensor {name!r} in {names or 'no file'}: {error}. Fetch all files"
            ) from error
        return layout

    def _check(self, shape: tuple[int, ...], what: str) -> None:
        try:
            check_shape(shape, what)
        except ValueError as error:
            raise Corrupt(f"{self._url}: {error}") from error


def unflattened(
    shape: tuple[int, ...], written: tuple[int, ...], chunk: Box
) -> Iterator[tuple[Box, int]]:
    """Yield the boxes of a tensor that a chunk of its flattened blocks has.

    Each with the number of its first element in the chunk. ``written`` is the shape that it has
    with blocks: how many there are in every dim, and the elements of one, as the distributed
    optimizer of Megatron had it before 0.14. ValueError where these do not go together.

    >>> whole, written = (4, 6), (2, 1, 12)  # two blocks of two rows each
    >>> for box, start in unflattened(whole, written, Box((1, 0, 4), (1, 1, 8))):
    ...     print(box, start)
    [2:3,4:6] 0
    [3:4,0:6] 2
    """
    counts, ndim = written[:-1], len(shape)
    fits = len(counts) == ndim == len(chunk.sizes) - 1 and min(counts, default=1) > 0
    sizes = tuple(n // c for n, c in zip(shape, counts, strict=True)) if fits else ()
    is_whole = all(size * count == n for size, count, n in zip(sizes, counts, shape, strict=False))
    if not (fits and is_whole) or (math.prod(sizes), (1,) * ndim) != (
        written[-1],
        chunk.sizes[:-1],
    ):
        raise ValueError(f"a tensor of shape {shape} was flattened to {written}, with {chunk}")
    block = Box(tuple(map(operator.mul, chunk.offsets, sizes)), sizes)
    start, done = chunk.offsets[-1], 0
    for box in run_boxes(block, start, start + chunk.sizes[-1]):
        yield box, done
        done += box.numel
