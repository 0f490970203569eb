"""How the model is spread over a mesh: every axis of it has one meaning."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from dtckpt.dtensor import DeviceMesh, HeadTail, Mesh, Replicate, Shard, distribute_tensor
from dtckpt.dtensor.experimental import context_parallel
from dtckpt.dtensor.fsdp import DataParallelMeshDims, MixedPrecisionPolicy, fully_shard
from dtckpt.dtensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from .gpt import Dropout, Gpt


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Axes of a mesh: "tp" splits layers, "cp" sequences, "dp" and "rep" the rows of a batch.

    Parameters are sharded over "dp" and "cp", and repeated over "rep".
    """

    mesh: str
    """As ``Mesh.parse`` takes it."""
    is_sequence: bool = False
    """Whether norms and dropout run on parts of the sequence along "tp", and the loss on parts of
    the vocabulary: sequence and loss parallel."""

    def __str__(self) -> str:
        return self.mesh + (" with parts of the sequence" if self.is_sequence else "")

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes."""
        return Mesh.parse(self.mesh).axis_names

    @property
    def data(self) -> tuple[str, ...]:
        """The axes that share the rows of a batch."""
        return tuple(name for name in self.axes if name in ("rep", "dp"))

    @property
    def num_parts(self) -> int:
        """Parts of a batch, of rows or of sequences."""
        sizes = dict(zip(self.axes, Mesh.parse(self.mesh).shape, strict=True))
        return prod(sizes[name] for name in (*self.data, "cp") if name in sizes)

    def part(self, whole: Tensor, mesh: DeviceMesh) -> Tensor:
        """Return this rank's part of the inputs or targets of a batch."""
        placements = [Shard(0) if name in self.data else Replicate() for name in self.axes]
        return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()

    @contextmanager
    def sharing(self, mesh: DeviceMesh, *tensors: Tensor) -> Generator[None]:
        """Within it this rank has its part of sequences, along the last dim of ``tensors``."""
        with ExitStack() as stack:
            if "cp" in self.axes:
                dims = [-1] * len(tensors)
                within = context_parallel(mesh["cp"], buffers=tensors, buffer_seq_dims=dims)
                stack.enter_context(within)
            if self.is_sequence:
                stack.enter_context(loss_parallel())
            yield

    def apply(
        self, model: Gpt, mesh: DeviceMesh, precision: MixedPrecisionPolicy, *, repeats: bool
    ) -> None:
        """Spread a model, whose values all ranks have, over a mesh.

        With ``repeats`` all ranks are to have the same batch.
        """
        if "tp" in self.axes:
            styles = _SEQUENCE if self.is_sequence else _LAYERS
            plan = {name: style() for name, style in styles.items()}
            parallelize_module(model, mesh, plan, mesh_dim="tp", src_data_rank=None)
        if self.data:
            shard = tuple(name for name in ("dp", "cp") if name in self.axes)
            dims = DataParallelMeshDims(shard, "rep" if "rep" in self.axes else None)
            for module in (*model.blocks, model):
                fully_shard(module, mesh=mesh, mp_policy=precision, dp_mesh_dims=dims)
        meanings: dict[str, Any] = {
            "rep": Shard(0),
            "dp": Shard(0),
            "cp": HeadTail(1),
            "tp": Shard(1) if self.is_sequence else None,
        }
        if repeats:
            meanings |= {"rep": None, "dp": None}
        for module in model.modules():
            if isinstance(module, Dropout):
                module.mesh = mesh
                module.placements = [meanings.get(name) or Replicate() for name in self.axes]


def _column(**options: Any) -> Any:
    return lambda: ColwiseParallel(**options)


def _row(**options: Any) -> Any:
    return lambda: RowwiseParallel(**options)


_HEADS = ("query", "key", "value")
_LAYERS: dict[str, Any] = {
    "tokens": _row(input_layouts=Replicate(), output_layouts=Replicate()),
    # DTensors, since the heads of a rank may be fewer than those of another.
    **{f"blocks.*.attention.{name}": _column(use_local_output=False) for name in _HEADS},
    "blocks.*.attention.out": _row(),
    "blocks.*.up": _column(),
    "blocks.*.down": _row(),
    "head": _column(output_layouts=Replicate()),
}
_SEQUENCE: dict[str, Any] = {
    "tokens": _row(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
    "positions": _row(input_layouts=Replicate(), output_layouts=Shard(0), use_local_output=False),
    "blocks.*.norm1": SequenceParallel,
    "blocks.*.attention": lambda: PrepareModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Replicate()
    ),
    **{f"blocks.*.attention.{name}": _column(use_local_output=False) for name in _HEADS},
    "blocks.*.attention.out": _row(output_layouts=Shard(1), use_local_output=False),
    "blocks.*.norm2": SequenceParallel,
    "blocks.*.up": _column(input_layouts=Shard(1), use_local_output=False),
    "blocks.*.down": _row(output_layouts=Shard(1), use_local_output=False),
    "norm": SequenceParallel,
    "head": _column(input_layouts=Shard(1), use_local_output=False),
}
