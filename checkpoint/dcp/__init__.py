"""torch.distributed.checkpoint's names over checkpoints of dtckpt: one import line replaces it.

::

    from dtckpt.checkpoint import dcp                 # import torch.distributed.checkpoint as dcp
    from dtckpt.checkpoint.dcp.state_dict import get_state_dict, set_state_dict
    from dtckpt.checkpoint.dcp.stateful import Stateful

``save``, ``async_save`` and ``load`` are dtckpt's, under torch's arguments. What is given a planner
goes through torch's own functions, with dtckpt as their storage: ``CheckpointWriter`` and
``CheckpointReader``, which serve any caller of torch's functions. All other names are torch's, in
modules of the same names. docs/moving-in.md lists them.
"""

from __future__ import annotations

from . import (
    api,
    default_planner,
    filesystem,
    format_utils,
    fsspec_filesystem,
    hf_storage,
    metadata,
    optimizer,
    planner,
    planner_helpers,
    protocol,
    quantized_hf_storage,
    staging,
    state_dict,
    state_dict_loader,
    state_dict_saver,
    stateful,
    storage,
    utils,
)
from .api import CheckpointException
from .default_planner import DefaultLoadPlanner, DefaultSavePlanner
from .filesystem import FileSystemReader, FileSystemWriter
from .fsspec_filesystem import FsspecReader, FsspecWriter
from .hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from .metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from .optimizer import load_sharded_optimizer_state_dict
from .planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from .protocol import CheckpointableTensor
from .quantized_hf_storage import QuantizedHuggingFaceStorageReader
from .state_dict_loader import load, load_state_dict
from .state_dict_saver import async_save, save, save_state_dict
from .storage import StorageReader, StorageWriter
from .storage_reader import CheckpointReader
from .storage_writer import CheckpointWriter

__all__ = [
    "BytesStorageMetadata",
    "CheckpointException",
    "CheckpointReader",
    "CheckpointWriter",
    "CheckpointableTensor",
    "ChunkStorageMetadata",
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "FileSystemReader",
    "FileSystemWriter",
    "FsspecReader",
    "FsspecWriter",
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
    "api",
    "async_save",
    "default_planner",
    "filesystem",
    "format_utils",
    "fsspec_filesystem",
    "hf_storage",
    "load",
    "load_sharded_optimizer_state_dict",
    "load_state_dict",
    "metadata",
    "optimizer",
    "planner",
    "planner_helpers",
    "protocol",
    "quantized_hf_storage",
    "save",
    "save_state_dict",
    "staging",
    "state_dict",
    "state_dict_loader",
    "state_dict_saver",
    "stateful",
    "storage",
    "utils",
]
