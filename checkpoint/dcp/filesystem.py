"""``FileSystemWriter`` and ``FileSystemReader`` under torch's arguments, for checkpoints of dtckpt.

They take paths and URLs alike. ``FileSystem`` and ``SerializationFormat`` are torch's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    FileSystem,
    FileSystemBase,
    SerializationFormat,
)

from dtckpt.errors import CheckpointError

from .storage_reader import CheckpointReader
from .storage_writer import CheckpointWriter

__all__ = [
    "CURRENT_DCP_VERSION",
    "FileSystem",
    "FileSystemBase",
    "FileSystemReader",
    "FileSystemWriter",
    "SerializationFormat",
]


class FileSystemWriter(CheckpointWriter):
    """``CheckpointWriter`` as torch's ``FileSystemWriter`` is made: by default it may replace.

    Arguments that say how torch writes (files a rank, threads, copies ahead, formats of records)
    are taken and have no meaning here: what is committed is durable and in one safetensors file
    a rank.
    """

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
    ) -> None:
        if _extensions:
            raise CheckpointError(
                "FileSystemWriter(_extensions=...): files of dtckpt are not transformed, since "
                "their bytes have checksums; leave the extensions out, or pass torch's own writer"
            )
        super().__init__(path, overwrite=overwrite)


class FileSystemReader(CheckpointReader):
    """``CheckpointReader`` as torch's ``FileSystemReader`` is made."""

    def __init__(self, path: str | os.PathLike[str], _extension_registry: Any = None) -> None:
        if _extension_registry is not None:
            raise CheckpointError(
                "FileSystemReader(_extension_registry=...): dtckpt reads no transformed files; "
                "pass torch's own reader"
            )
        super().__init__(path)
