"""Save, load, open, verify and reshard checkpoints of sharded state.

``from dtckpt.checkpoint import dcp`` takes the place of ``torch.distributed.checkpoint``: the same
functions under the same arguments. Names are imported when they are first used, so that looking at
a checkpoint does not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtckpt.errors import (
    AlreadyCommitted,
    Busy,
    Cancelled,
    CheckpointError,
    Corrupt,
    DtckptError,
    InUse,
    LayoutMismatch,
    NotCommitted,
    RankFailed,
    StorageError,
    Timeout,
    Unsavable,
)
from dtckpt.lazy import lazy_exports

if TYPE_CHECKING:
    from .cleaning import clean
    from .deleting import delete
    from .exporting.exporter import ExportReport, export
    from .files.manifest import Manifest
    from .formats.opening import read_manifest
    from .laying_out import with_layouts
    from .loading.loader import load
    from .loading.report import LoadReport
    from .mapping.copies_rule import Copies
    from .mapping.dequantize import Dequantize
    from .mapping.part_rules import Merge, Split, Stack, Unstack
    from .mapping.rules import Crop, Drop, Move, Pad, Permute, Reshape
    from .mapping.table import MappingTable
    from .mapping.tracing import trace_mapping
    from .megatron import megatron_tensors
    from .opening import Checkpoint, LazyTensor, open
    from .placing import Placed, Rule, parse_rules, place
    from .resharding import reshard
    from .saving.background import SaveHandle, SaveProgress, async_save
    from .saving.job import SaveReport
    from .saving.saver import save
    from .state.tree import PerRank, Stateful
    from .state.values import register_enum
    from .steps import Step, committed_steps, latest
    from .verifying import Problem, VerifyReport, verify
    from .visualizing import visualize

__all__ = [
    "AlreadyCommitted",
    "Busy",
    "Cancelled",
    "Checkpoint",
    "CheckpointError",
    "Copies",
    "Corrupt",
    "Crop",
    "Dequantize",
    "Drop",
    "DtckptError",
    "ExportReport",
    "InUse",
    "LayoutMismatch",
    "LazyTensor",
    "LoadReport",
    "Manifest",
    "MappingTable",
    "Merge",
    "Move",
    "NotCommitted",
    "Pad",
    "PerRank",
    "Permute",
    "Placed",
    "Problem",
    "RankFailed",
    "Reshape",
    "Rule",
    "SaveHandle",
    "SaveProgress",
    "SaveReport",
    "Split",
    "Stack",
    "Stateful",
    "Step",
    "StorageError",
    "Timeout",
    "Unsavable",
    "Unstack",
    "VerifyReport",
    "async_save",
    "clean",
    "committed_steps",
    "delete",
    "export",
    "latest",
    "load",
    "megatron_tensors",
    "open",
    "parse_rules",
    "place",
    "read_manifest",
    "register_enum",
    "reshard",
    "save",
    "trace_mapping",
    "verify",
    "visualize",
    "with_layouts",
]

if not TYPE_CHECKING:  # else any name would be one of the module's
    __getattr__ = lazy_exports(
        __name__,
        {
            ".cleaning": "clean",
            ".deleting": "delete",
            ".exporting.exporter": "ExportReport export",
            ".files.manifest": "Manifest",
            ".formats.opening": "read_manifest",
            ".laying_out": "with_layouts",
            ".loading.loader": "load",
            ".loading.report": "LoadReport",
            ".mapping.copies_rule": "Copies",
            ".mapping.dequantize": "Dequantize",
            ".mapping.part_rules": "Merge Split Stack Unstack",
            ".mapping.rules": "Crop Drop Move Pad Permute Reshape",
            ".mapping.table": "MappingTable",
            ".mapping.tracing": "trace_mapping",
            ".megatron": "megatron_tensors",
            ".opening": "Checkpoint LazyTensor open",
            ".placing": "Placed Rule parse_rules place",
            ".resharding": "reshard",
            ".saving.background": "SaveHandle SaveProgress async_save",
            ".saving.job": "SaveReport",
            ".saving.saver": "save",
            ".state.tree": "PerRank Stateful",
            ".state.values": "register_enum",
            ".steps": "Step committed_steps latest",
            ".verifying": "Problem VerifyReport verify",
            ".visualizing": "visualize",
        },
    )


def __dir__() -> list[str]:
    return __all__
