"""torch.distributed.checkpoint's names over checkpoints of dtckpt: one import line replaces it.

::

    from dtckpt.checkpoint import dcp                 # import torch.distributed.checkpoint as dcp
    from dtckpt.checkpoint.dcp.state_dict import get_state_dict, set_state_dict
    from dtckpt.checkpoint.dcp.stateful import Stateful

``save``, ``async_save`` and ``load`` are dtckpt's, under torch's arguments. What is given a planner
goes through torch's own functions, with dtckpt as their storage: ``CheckpointWriter`` and
``CheckpointReader``, which serve any caller of torch's functions. All other names are torch's.
docs/moving-in.md lists them.
"""

from __future__ import annotations

from torch.distributed.checkpoint import (
    default_planner,
    hf_storage,
    metadata,
    planner,
    staging,
    storage,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from . import state_dict, stateful
from .filesystem import FileSystemReader, FileSystemWriter
from .state_dict_loader import load, load_state_dict
from .state_dict_saver import async_save, save, save_state_dict
from .storage_reader import CheckpointReader
from .storage_writer import CheckpointWriter

__all__ = [
    "BytesStorageMetadata",
    "CheckpointException",
    "CheckpointReader",
    "CheckpointWriter",
    "ChunkStorageMetadata",
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "FileSystemReader",
    "FileSystemWriter",
    "HuggingFaceStorageReader",
    "HuggingFaceStorageWriter",
    "LoadPlan",
    "LoadPlanner",
    "Metadata",
    "QuantizedHuggingFaceStorageReader",
    "ReadItem",
    "SavePlan",
    "SavePlanner",
    "StorageReader",
    "StorageWriter",
    "TensorStorageMetadata",
    "WriteItem",
    "async_save",
    "default_planner",
    "hf_storage",
    "load",
    "load_sharded_optimizer_state_dict",
    "load_state_dict",
    "metadata",
    "planner",
    "save",
    "save_state_dict",
    "staging",
    "state_dict",
    "stateful",
    "storage",
]
