"""Save, load, open, verify and reshard checkpoints of sharded state.

``import dtckpt.checkpoint as dcp`` offers ``dcp.save`` and ``dcp.load`` under the argument names of
``torch.distributed.checkpoint``. Names are imported when they are first used, so that looking at a
checkpoint does not load torch.
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
    from .background import SaveHandle, SaveProgress, async_save
    from .cleaning import clean
    from .deleting import delete
    from .drawing import visualize
    from .handle import Checkpoint, LazyTensor, open
    from .load_report import LoadReport
    from .loader import load
    from .manifest import Manifest, read_manifest
    from .placing import Placed, Rule, parse_rules, place
    from .resharding import reshard
    from .saver import SaveReport, save
    from .stateful import Stateful
    from .steps import Step, committed_steps, latest
    from .tree import PerRank
    from .values import register_enum
    from .verifying import Problem, VerifyReport, verify

__all__ = [
    "AlreadyCommitted",
    "Busy",
    "Cancelled",
    "Checkpoint",
    "CheckpointError",
    "Corrupt",
    "DtckptError",
    "InUse",
    "LayoutMismatch",
    "LazyTensor",
    "LoadReport",
    "Manifest",
    "NotCommitted",
    "PerRank",
    "Placed",
    "Problem",
    "RankFailed",
    "Rule",
    "SaveHandle",
    "SaveProgress",
    "SaveReport",
    "Stateful",
    "Step",
    "StorageError",
    "Timeout",
    "Unsavable",
    "VerifyReport",
    "async_save",
    "clean",
    "committed_steps",
    "delete",
    "latest",
    "load",
    "open",
    "parse_rules",
    "place",
    "read_manifest",
    "register_enum",
    "reshard",
    "save",
    "verify",
    "visualize",
]

if not TYPE_CHECKING:  # else any name would be one of the module's
    __getattr__ = lazy_exports(
        __name__,
        {
            "Checkpoint": ".handle",
            "LazyTensor": ".handle",
            "LoadReport": ".load_report",
            "Manifest": ".manifest",
            "PerRank": ".tree",
            "Placed": ".placing",
            "Problem": ".verifying",
            "Rule": ".placing",
            "SaveHandle": ".background",
            "SaveProgress": ".background",
            "SaveReport": ".saver",
            "Stateful": ".stateful",
            "Step": ".steps",
            "VerifyReport": ".verifying",
            "async_save": ".background",
            "clean": ".cleaning",
            "committed_steps": ".steps",
            "delete": ".deleting",
            "latest": ".steps",
            "load": ".loader",
            "open": ".handle",
            "parse_rules": ".placing",
            "place": ".placing",
            "read_manifest": ".manifest",
            "register_enum": ".values",
            "reshard": ".resharding",
            "save": ".saver",
            "verify": ".verifying",
            "visualize": ".drawing",
        },
    )


def __dir__() -> list[str]:
    return __all__
