"""Layers with a weight that is split by its outputs or by its inputs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from dtckpt.errors import PlacementError

from ..dtensor import DTensor
from ..geometry.placement import Placement, Replicate, Shard
from ..mesh.device_mesh import DeviceMesh
from ..mesh.torch_layouts import AnyPlacement
from .inputs import distributed, on_input, require_placement
from .style import ParallelStyle


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


class _SplitLayer(ParallelStyle):
    """A layer of which each rank has a part of the weight."""

    def __init__(
        self,
        *,
        input_layouts: AnyPlacement | None = None,
        output_layouts: AnyPlacement | None = None,
        use_local_output: bool = True,
    ) -> None:
        given = {"input_layouts": input_layouts, "output_layouts": output_layouts}
        for what, layout in given.items():
            if layout is not None:
                require_placement(layout, f"{what} of {type(self).__name__}")
        self.input_layouts = input_layouts
        self.output_layouts = output_layouts
        self.use_local_output = use_local_output

    @abstractmethod
    def needed(self, kind: _Kind) -> Placement:
        """Return how the input of the layer must lie."""

    @abstractmethod
    def made(self, kind: _Kind) -> Placement:
        """Return how the output goes out where nothing else is asked for."""

    def hook(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Register what moves input and output."""
        kind = _kind_of(module, type(self).__name__)
        needed = self.needed(kind)
        now = needed if self.input_layouts is None else self.input_layouts
        wanted = self.made(kind) if self.output_layouts is None else self.output_layouts
        name = type(module).__name__
        size = self._whole_input(module, kind, now)

        def bring(value: Any) -> DTensor:
            return distributed(value, now, needed, mesh, f"input of {name}", size=size)

        def hand_on(_: nn.Module, __: Any, output: Any) -> Any:
            made = distributed(output, wanted, wanted, mesh, f"output of {name}")
            return made.to_local() if self.use_local_output else made

        on_input(module, bring)
        module.register_forward_hook(hand_on)

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
    """

    def placements(self, module: nn.Module) -> Mapping[str, Placement]:
        """Return how weight and bias lie; PlacementError for other modules."""
        kind = _kind_of(module, type(self).__name__)
        found: dict[str, Placement] = {"weight": Shard(kind.output)}
        if getattr(module, "bias", None) is not None:
            found["bias"] = Shard(0)
        return found

    def needed(self, kind: _Kind) -> Placement:
        """Return Replicate."""
        del kind
        return Replicate()

    def made(self, kind: _Kind) -> Placement:
        """Return a split of the features."""
        return Shard(kind.channel)


class RowwiseParallel(_SplitLayer):
    """Splits a layer by its inputs: ``Linear``, ``Embedding`` and convolutions of one group.

    The weight is sharded along the inputs, for an ``Embedding`` by rows of its table, with parts of
    unequal size where they do not divide; the bias is whole on every rank, and added once. A plain
    input lies as ``input_layouts``, by default sharded along its features as the weight is, indices
    of an ``Embedding`` as ``Replicate()``. The output is added up and ``Replicate()`` unless
    ``output_layouts`` says otherwise: ``Shard(1)`` leaves each rank a part of the sequence. It is a
    local tensor, or with ``use_local_output=False`` a DTensor.
    """

    def placements(self, module: nn.Module) -> Mapping[str, Placement]:
        """Return how weight and bias lie; PlacementError for other modules."""
        kind = _kind_of(module, type(self).__name__)
        found: dict[str, Placement] = {"weight": Shard(kind.input)}
        if getattr(module, "bias", None) is not None:
            found["bias"] = Replicate()
        return found

    def needed(self, kind: _Kind) -> Placement:
        """Return a split of the features; indices are whole."""
        return Replicate() if kind.takes_indices else Shard(kind.channel)

    def made(self, kind: _Kind) -> Placement:
        """Return Replicate."""
        del kind
        return Replicate()
