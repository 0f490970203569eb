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
    StateChanged,
    StorageError,
    Timeout,
    Unsavable,
)
from dtckpt.lazy import lazy_exports

if TYPE_CHECKING:
    from .cleaning import clean
    from .copying import copy
    from .deleting import delete
    from .detaching import detach
    from .editing import edit
    from .examining.comparing import Comparison, TensorComparison, compare
    from .examining.drift import Drift
    from .examining.extracting import ExtractReport, extract
    from .examining.histogram import Histogram
    from .examining.load_costs import LoadCosts, RankCost, load_costs
    from .examining.repairing import RepairReport, repair
    from .examining.statistics import TensorStatistics, statistics
    from .exporting.exporter import ExportReport, export
    from .files.manifest import Manifest
    from .formats.opening import read_manifest
    from .job_state.counters import Counters
    from .job_state.dealing import deal_samples
    from .job_state.random_numbers import RandomNumbers
    from .laying_out import with_layouts
    from .loading.loader import load
    from .loading.report import LoadReport
    from .manager.demand import request_save
    from .manager.emergency import Emergency
    from .manager.manager import CheckpointManager
    from .manager.requests import OnSignals
    from .manager.when import Continuously, EveryMinutes, EverySteps
    from .mapping.copies_rule import Copies
    from .mapping.dequantize import Dequantize
    from .mapping.part_rules import Merge, Split, Stack, Unstack
    from .mapping.rules import Crop, Drop, Move, Pad, Permute, Reshape
    from .mapping.table import MappingTable
    from .mapping.tracing import trace_mapping
    from .megatron import megatron_tensors
    from .opening import Checkpoint, LazyTensor, open
    from .probing import capabilities
    from .resharding.dtype_rules import DTypeRule
    from .resharding.placing import Placed, Rule, parse_rules, place
    from .resharding.resharding import reshard
    from .runs.keep import Best, Keep
    from .runs.places import Tier
    from .saving.background import async_save
    from .saving.finishing import SaveReport
    from .saving.first_rank_buffers import buffers_of_first_rank
    from .saving.handle import SaveHandle, SaveProgress
    from .saving.saver import save
    from .state.coordinates import Dealing, PerCoordinate
    from .state.tree import PerRank, Stateful
    from .state.values import register_enum
    from .steps import Step, committed_steps, latest
    from .timing.advice import Advice, advise
    from .timing.costs import Costs, PhaseCost, PhaseSummary
    from .timing.observers import Occasion
    from .timing.telemetry import OpenTelemetry
    from .timing.trace import Tracing, write_trace
    from .verifying import Problem, Verifier, VerifyReport, verify
    from .visualizing import visualize

__all__ = [
    "LoadCosts",
    "RankCost",
    "load_costs",
    "Advice",
    "AlreadyCommitted",
    "Best",
    "Busy",
    "Cancelled",
    "Checkpoint",
    "CheckpointError",
    "CheckpointManager",
    "Comparison",
    "Continuously",
    "Copies",
    "Corrupt",
    "Costs",
    "Counters",
    "Crop",
    "DTypeRule",
    "Dealing",
    "Dequantize",
    "Drop",
    "Drift",
    "DtckptError",
    "Emergency",
    "EveryMinutes",
    "EverySteps",
    "ExportReport",
    "ExtractReport",
    "Histogram",
    "InUse",
    "Keep",
    "LayoutMismatch",
    "LazyTensor",
    "LoadReport",
    "Manifest",
    "MappingTable",
    "Merge",
    "Move",
    "NotCommitted",
    "Occasion",
    "OnSignals",
    "OpenTelemetry",
    "Pad",
    "PerCoordinate",
    "PerRank",
    "Permute",
    "PhaseCost",
    "PhaseSummary",
    "Placed",
    "Problem",
    "RandomNumbers",
    "RankFailed",
    "RepairReport",
    "Reshape",
    "Rule",
    "SaveHandle",
    "SaveProgress",
    "SaveReport",
    "Split",
    "Stack",
    "StateChanged",
    "Stateful",
    "Step",
    "StorageError",
    "TensorComparison",
    "TensorStatistics",
    "Tier",
    "Timeout",
    "Tracing",
    "Unsavable",
    "Unstack",
    "Verifier",
    "VerifyReport",
    "advise",
    "async_save",
    "buffers_of_first_rank",
    "capabilities",
    "clean",
    "committed_steps",
    "compare",
    "copy",
    "deal_samples",
    "delete",
    "detach",
    "edit",
    "export",
    "extract",
    "latest",
    "load",
    "megatron_tensors",
    "open",
    "parse_rules",
    "place",
    "read_manifest",
    "register_enum",
    "repair",
    "request_save",
    "reshard",
    "save",
    "statistics",
    "trace_mapping",
    "verify",
    "visualize",
    "with_layouts",
    "write_trace",
]

if not TYPE_CHECKING:  # else any name would be one of the module's
    __getattr__ = lazy_exports(
        __name__,
        {
            ".cleaning": "clean",
            ".probing": "capabilities",
            ".copying": "copy",
            ".deleting": "delete",
            ".detaching": "detach",
            ".examining.comparing": "Comparison TensorComparison compare",
            ".examining.drift": "Drift",
            ".examining.histogram": "Histogram",
            ".examining.repairing": "RepairReport repair",
            ".examining.statistics": "TensorStatistics statistics",
            ".examining.load_costs": "LoadCosts RankCost load_costs",
            ".exporting.exporter": "ExportReport export",
            ".editing": "edit",
            ".examining.extracting": "ExtractReport extract",
            ".files.manifest": "Manifest",
            ".formats.opening": "read_manifest",
            ".job_state.counters": "Counters",
            ".job_state.dealing": "deal_samples",
            ".job_state.random_numbers": "RandomNumbers",
            ".laying_out": "with_layouts",
            ".loading.loader": "load",
            ".loading.report": "LoadReport",
            ".manager.demand": "request_save",
            ".manager.emergency": "Emergency",
            ".manager.manager": "CheckpointManager",
            ".manager.requests": "OnSignals",
            ".manager.when": "Continuously EveryMinutes EverySteps",
            ".mapping.copies_rule": "Copies",
            ".mapping.dequantize": "Dequantize",
            ".mapping.part_rules": "Merge Split Stack Unstack",
            ".mapping.rules": "Crop Drop Move Pad Permute Reshape",
            ".mapping.table": "MappingTable",
            ".mapping.tracing": "trace_mapping",
            ".megatron": "megatron_tensors",
            ".opening": "Checkpoint LazyTensor open",
            ".resharding.dtype_rules": "DTypeRule",
            ".resharding.placing": "Placed Rule parse_rules place",
            ".resharding.resharding": "reshard",
            ".runs.keep": "Best Keep",
            ".runs.places": "Tier",
            ".saving.background": "async_save",
            ".saving.first_rank_buffers": "buffers_of_first_rank",
            ".saving.handle": "SaveHandle SaveProgress",
            ".saving.finishing": "SaveReport",
            ".saving.saver": "save",
            ".state.coordinates": "Dealing PerCoordinate",
            ".state.tree": "PerRank Stateful",
            ".state.values": "register_enum",
            ".steps": "Step committed_steps latest",
            ".timing.advice": "Advice advise",
            ".timing.costs": "Costs PhaseCost PhaseSummary",
            ".timing.observers": "Occasion",
            ".timing.telemetry": "OpenTelemetry",
            ".timing.trace": "Tracing write_trace",
            ".verifying": "Problem Verifier VerifyReport verify",
            ".visualizing": "visualize",
        },
    )


def __dir__() -> list[str]:
    return __all__
