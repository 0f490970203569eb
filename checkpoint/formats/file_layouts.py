"""Layouts of tensors that lie in the files of other programs: whole in one, or in parts."""

from __future__ import annotations

from collections.abc import Sequence

from dtckpt.errors import Corrupt, PlacementError

from ...dtensor.geometry.box import Box
from ...dtensor.geometry.irregular import IrregularLayout
from ...dtensor.geometry.layout import Layout
from ...dtensor.geometry.mesh import Mesh
from ...dtensor.geometry.placement import Replicate


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
            mesh = Mesh((1,), (), (file,))
            known = self._whole[file, shape] = Layout(mesh, (Replicate(),), shape)
        return known

    def of_parts(
        self, name: str, shape: tuple[int, ...], parts: Sequence[tuple[int, Box]]
    ) -> Layout | IrregularLayout:
        """Return the layout of (file, box) pairs; Corrupt unless they cover the tensor once."""
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
