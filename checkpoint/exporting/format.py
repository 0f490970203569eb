"""What a format gives to an export: files to write, and the one that is written last."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ...storage.base import Store
from ..files.stored_data import StoredData


class Format(Protocol):
    """How some tensors and values are laid out in files of another program.

    Made of a manifest, and alike on all ranks that export together.
    """

    @property
    def replaces(self) -> re.Pattern[str]:
        """Names of files that an earlier export may have left, and this one may take away."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors that are written, as they are called in the files."""
        ...

    @property
    def tied(self) -> Mapping[str, str]:
        """Names that stand for the elements of another one, which alone is written."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors that are written."""
        ...

    @property
    def files(self) -> Sequence[str]:
        """Names of the files that hold tensors; each is written by one rank."""
        ...

    def write(
        self, file: str, place: Store, data: StoredData, on_read: Callable[[int], None]
    ) -> str:
        """Write one of the files, and return what ``index`` must know of it.

        Once all files are written the caller asks whether ``data`` is still what it was.

        ``on_read`` is called with the number of bytes of tensors after each read.
        """
        ...

    def index(self, told: Mapping[str, str]) -> tuple[str, bytes] | None:
        """Return name and content of the file that is written last, if there is one.

        ``told`` is what ``write`` returned, by file. Without this file nothing is taken for whole.
        """
        ...
