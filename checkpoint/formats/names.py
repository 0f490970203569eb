"""What is looked for before the code that reads it is imported, and how files are called."""

from __future__ import annotations

from dtckpt.errors import Corrupt, ObjectNotFound

from ...storage.base import Store
from ...storage.one_file import OneFile

OF_TORCH = "torch.distributed.checkpoint"
"""The name of its format."""
METADATA = ".metadata"
"""Its file that says what there is."""
OF_TORCH_SAVE = "torch.save"
"""The name of the format of ``torch.save``."""
SAFETENSORS = ".safetensors"
ENDINGS = (SAFETENSORS, ".pt", ".pth", ".bin", ".ckpt")
"""How files end that are opened by themselves."""


def where_of(store: Store, file: str) -> str:
    """Return how messages call a file of a store, which may be that file alone."""
    return store.url if isinstance(store, OneFile) else f"{store.url}/{file}"


def size_of_file(store: Store, file: str) -> int:
    """Return the length of a file of a checkpoint; Corrupt where it is missing."""
    try:
        return store.stat(file).size
    except ObjectNotFound as error:
        where = where_of(store, file)
        raise Corrupt(f"{where}: this file of the checkpoint is missing. Fetch it again") from error
