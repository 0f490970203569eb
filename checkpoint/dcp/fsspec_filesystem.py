"""``FsspecWriter`` and ``FsspecReader`` under torch's arguments, for checkpoints of dtckpt.

torch has the module since 2.15. Keyword arguments are those of the file system of the URL.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from .filesystem import FileSystemReader, FileSystemWriter, SerializationFormat

__all__ = ["FsspecReader", "FsspecWriter"]


class FsspecWriter(FileSystemWriter):
    """``FileSystemWriter`` whose keyword arguments go to the store, as ``storage_options`` of
    ``save`` do."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[Any] | None = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
        **kwargs: Any,
    ) -> None:
        super().__init__(path, overwrite=overwrite, _extensions=_extensions)
        self.storage_options = kwargs


class FsspecReader(FileSystemReader):
    """``FileSystemReader`` whose keyword arguments go to the store, as ``storage_options`` of
    ``load`` do."""

    def __init__(self, path: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__(path)
        self.storage_options = kwargs
