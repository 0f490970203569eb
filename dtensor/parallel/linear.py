"""Layers with a weight that is split by its outputs or by its inputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import nn

from dtckpt.errors import PlacementError

from ..dtensor import DTensor
from ..geometry.placement import Packed, Placement, Replicate, Shard
from ..mesh.device_mesh import DeviceMesh
from ..mesh.torch_layouts import AnyPlacement
from .base_style import ParallelStyle
from .heads import (
    from_copies,
    has_copies,
    require_heads,
    split_between,
    to_copies,
    with_copies,
)
from .inputs import distributed, on_input, require_placement


@dataclass(frozen=True, slots=True)
class _Kind:
    """Where the weight of a kind of layer has its outputs and inputs, and an activation its own."""

    output: int
    input: int
    channel: int
    """The dim of an activation that a feature is, counted from its end."""
    takes_indices: bool = False


_KINDS: tuple[tuple[type[nn.Module], _Kind], ...] = (
    (nn.Linear, _Kind(0, 1, -1)),
    (nn.Embedding, _Kind(1, 0, -1, takes_indices=True)),
    (nn.Conv1d, _Kind(0, 1, -2)),
    (nn.Conv2d, _Kind(0, 1, -3)),
    (nn.Conv3d, _Kind(0, 1, -4)),
    (nn.ConvTranspose1d, _Kind(1, 0, -2)),
    (nn.ConvTranspose2d, _Kind(1, 0, -3)),
    (nn.ConvTranspose3d, _Kind(1, 0, -4)),
)


def _kind_of(module: nn.Module, style: str) -> _Kind:
    for cls, kind in _KINDS:
        if isinstance(module, cls):
            groups = getattr(module, "groups", 1)
            if groups != 1:
                raise PlacementError(
                    f"{style} is for convolutions of one group, got {groups}, whose channels do "
                    "not meet; split their inputs and outputs alike with distribute_module"
                )
            return kind
    names = ", ".join(cls.__name__ for cls, _ in _KINDS)
    raise PlacementError(
        f"{style} is for {names}, got a {type(module).__name__}; treat the layers in it, or write "
        "a ParallelStyle of your own"
    )


class _SplitLayer(ParallelStyle, ABC):
    """A layer of which each rank has a part of the weight."""

    def __init__(
        self,
        *,
        input_layouts: AnyPlacement | None = None,
        output_layouts: AnyPlacement | None = None,
        use_local_output: bool = True,
        heads: int | None = None,
    ) -> None:
        given = {"input_layouts": input_layouts, "output_layouts": output_layouts}
        for what, layout in given.items():
            if layout is not None:
                require_placement(layout, f"{what} of {type(self).__name__}")
        self.input_layouts = input_layouts
        self.output_layouts = output_layouts
        self.use_local_output = use_local_output
        self.heads = heads

    @abstractmethod
    def needed(self, module: nn.Module, mesh: DeviceMesh) -> Placement:
        """Return how the input of the layer must lie."""

    @abstractmethod
    def made(self, module: nn.Module, mesh: DeviceMesh) -> Placement:
        """Return how the output goes out where nothing else is asked for."""

    def hook(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Register what moves input and output."""
        kind = self._kind_of(module)
        needed = self.needed(module, mesh)
        now = needed if self.input_layouts is None else self.input_layouts
        wanted = self.made(module, mesh) if self.output_layouts is None else self.output_layouts
        name = type(module).__name__
        size = self._whole_input(module, kind, now)

        def bring(value: Any) -> DTensor:
            return distributed(value, now, needed, mesh, f"input of {name}", size=size)

        def hand_on(_: nn.Module, __: Any, output: Any) -> Any:
            made = distributed(output, wanted, wanted, mesh, f"output of {name}")
            return made.to_local() if self.use_local_output else made

        on_input(module, bring)
        module.register_forward_hook(hand_on)

    def _kind_of(self, module: nn.Module) -> _Kind:
        """Return the kind of a layer; PlacementError where the style is not for it."""
        style = type(self).__name__
        kind = _kind_of(module, style)
        if self.heads is not None and not isinstance(module, nn.Linear):
            raise PlacementError(
                f"{style}(heads=...) is for Linear, got a {type(module).__name__}; leave it out"
            )
        return kind

    def _whole_input(
        self, module: nn.Module, kind: _Kind, now: AnyPlacement
    ) -> tuple[int, int] | None:
        """Return the dim and size of a plain input that the weight tells, if it is split there."""
        if kind.takes_indices or not now.is_shard(kind.channel):
            return None
        weight: Any = module.weight
        return kind.channel, weight.shape[kind.input]


class ColwiseParallel(_SplitLayer):
    """Splits a layer by its outputs: ``Linear``, ``Embedding`` and convolutions of one group.

    Weight and bias are sharded along the outputs, with parts of unequal size where they do not
    divide. The input must be whole on every rank; a plain one lies as ``input_layouts``,
    ``Replicate()`` by default. The output is sharded along the features (the channels of a
    convolution) unless ``output_layouts`` says otherwise. It is a local tensor, or with
    ``use_local_output=False`` a DTensor.

    Of a ``Linear`` whose outputs are several in one, such as queries, keys and values, ``parts``
    are their sizes: each is sharded by itself (``Packed``). A local output has this rank's share
    of the first, then of the second, and so on; of a DTensor ``torch.split`` gives them without
    communication.

    With ``heads``, so many of equal size that the outputs of a ``Linear`` consist of, no head is
    split. Where there are fewer than ranks, as of grouped keys and values, each is on several
    neighbouring ranks: the weight is replicated among these, and its gradient summed. The output
    is then a local tensor. With ``parts``, ``heads`` has a number for each. Layers of one module
    whose heads are a multiple of others', as queries of keys, are refused where ranks would not
    have the same groups: the number of ranks must divide the queries' heads, or both get the number
    of groups.
    """

    def __init__(
        self,
        *,
        input_layouts: AnyPlacement | None = None,
        output_layouts: AnyPlacement | None = None,
        use_local_output: bool = True,
        parts: Sequence[int] | None = None,
        heads: int | Sequence[int] | None = None,
    ) -> None:
        of_parts = () if heads is None or isinstance(heads, int) else tuple(heads)
        if of_parts and (parts is None or len(of_parts) != len(parts)):
            raise PlacementError(
                f"ColwiseParallel: heads={heads!r} has a number for each of parts, got {parts!r}"
            )
        if parts is not None and isinstance(heads, int):
            raise PlacementError(
                f"ColwiseParallel: parts={parts!r} need a number of heads each, got {heads!r}"
            )
        super().__init__(
            input_layouts=input_layouts,
            output_layouts=output_layouts,
            use_local_output=use_local_output,
            heads=heads if isinstance(heads, int) else None,
        )
        self.parts = None if parts is None else Packed(0, tuple(parts))
        self.heads_of_parts = of_parts

    def placements(self, module: nn.Module, mesh: DeviceMesh) -> Mapping[str, Placement]:
        """Return how weight and bias lie; PlacementError for other modules."""
        kind = self._kind_of(module)
        found: dict[str, Placement] = {"weight": self._split(module, kind.output, mesh)}
        if getattr(module, "bias", None) is not None:
            found["bias"] = self._split(module, 0, mesh)
        if has_copies(self.heads, mesh) and (
            self.output_layouts is not None or not self.use_local_output
        ):
            raise PlacementError(
                f"ColwiseParallel: {self.heads} heads on {mesh.size()} ranks are copied, so that "
                "the output has no placement on the mesh; leave output_layouts and "
                "use_local_output=False out"
            )
        return found

    def mesh_of(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return the mesh, with an axis of copies where there are fewer heads than ranks."""
        if self.heads is None or not has_copies(self.heads, mesh):
            return mesh
        return with_copies(self.heads, mesh)

    def needed(self, module: nn.Module, mesh: DeviceMesh) -> Placement:
        """Return Replicate."""
        del module, mesh
        return Replicate()

    def made(self, module: nn.Module, mesh: DeviceMesh) -> Placement:
        """Return a split of the features."""
        return self._split(module, self._kind_of(module).channel, mesh)

    def hook(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Register what moves input and output."""
        if not has_copies(self.heads, mesh):
            super().hook(module, mesh)
            return
        lies, name = self.mesh_of(mesh), type(module).__name__
        now = Replicate() if self.input_layouts is None else self.input_layouts
        on_input(module, lambda value: to_copies(value, now, mesh, lies, f"input of {name}"))
        module.register_forward_hook(lambda _, __, output: from_copies(output))

    def _kind_of(self, module: nn.Module) -> _Kind:
        kind = super()._kind_of(module)
        if self.parts is not None and not isinstance(module, nn.Linear):
            raise PlacementError(
                f"ColwiseParallel(parts=...) is for Linear, got a {type(module).__name__}; give "
                "the parts layers of their own"
            )
        return kind

    def _split(self, module: nn.Module, dim: int, mesh: DeviceMesh) -> Placement:
        if self.parts is None and self.heads is None:
            return Shard(dim)
        layer = cast(nn.Linear, module)
        size = layer.out_features
        if self.parts is None:
            require_heads(self.heads, size, "a Linear")
            return split_between(dim, size, self.heads, mesh)
        problem = self.parts.misfit(size, mesh.size())
        if problem:
            raise PlacementError(f"ColwiseParallel: {self.parts} for {layer} {problem}")
        for part, heads in zip(self.parts.sizes, self.heads_of_parts, strict=False):
            require_heads(heads, part, "a part")
            if heads % mesh.size():
                raise PlacementError(
                    f"ColwiseParallel: a part of {heads} heads cannot be dealt out to "
                    f"{mesh.size()} ranks without splitting one; give it a Linear of its own, with "
                    f"ColwiseParallel(heads={heads}), or use ranks that divide {heads}"
                )
        return replace(self.parts, dim=dim)


class RowwiseParallel(_SplitLayer):
    """Splits a layer by its inputs: ``Linear``, ``Embedding`` and convolutions of one group.

    The weight is sharded along the inputs, for an ``Embedding`` by rows of its table, with parts of
    unequal size where they do not divide; the bias is whole on every rank, and added once. A plain
    input lies as ``input_layouts``, by default sharded along its features as the weight is, indices
    of an ``Embedding`` as ``Replicate()``. The output is added up and ``Replicate()`` unless
    ``output_layouts`` says otherwise: ``Shard(1)`` leaves each rank a part of the sequence. It is a
    local tensor, or with ``use_local_output=False`` a DTensor.

    With ``heads``, so many of equal size that the inputs of a ``Linear`` consist of, no head is
    split.
    """

    def placements(self, module: nn.Module, mesh: DeviceMesh) -> Mapping[str, Placement]:
        """Return how weight and bias lie; PlacementError for other modules."""
        kind = self._kind_of(module)
        found: dict[str, Placement] = {"weight": self._split(module, kind.input, mesh)}
        if getattr(module, "bias", None) is not None:
            found["bias"] = Replicate()
        return found

    def needed(self, module: nn.Module, mesh: DeviceMesh) -> Placement:
        """Return a split of the features; indices are whole."""
        kind = self._kind_of(module)
        return Replicate() if kind.takes_indices else self._split(module, kind.channel, mesh)

    def made(self, module: nn.Module, mesh: DeviceMesh) -> Placement:
        """Return Replicate."""
        del module, mesh
        return Replicate()

    def _split(self, module: nn.Module, dim: int, mesh: DeviceMesh) -> Placement:
        if self.heads is None:
            return Shard(dim)
        size = cast(nn.Linear, module).in_features
        require_heads(self.heads, size, "the input of a Linear")
        if has_copies(self.heads, mesh):
            raise PlacementError(
                f"RowwiseParallel: {self.heads} heads on {mesh.size()} ranks would be added up "
                f"several times; use no more ranks than heads"
            )
        return split_between(dim, size, self.heads, mesh)
