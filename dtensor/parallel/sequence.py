"""Norms and dropout on parts of the sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from dtckpt.errors import PlacementError

from ..dtensor import DTensor
from ..geometry.placement import Placement, Replicate, Shard
from ..mesh.device_mesh import DeviceMesh
from .base_style import ParallelStyle
from .inputs import distributed, on_input


class SequenceParallel(ParallelStyle):
    """Runs a norm or dropout where each rank has a part of the sequence.

    For ``LayerNorm``, ``RMSNorm``, ``Dropout`` and modules of Python that are like them: without
    submodules, and with parameters of one dim. These are whole on every rank, with the values of
    one. A plain input is a part of the sequence already, sharded along ``sequence_dim``; a DTensor
    is redistributed to that. The output is a DTensor, or with ``use_local_output`` a local tensor.

    Of plain inputs the ranks exchange the sizes at every call. Where that is too dear, let the
    layer before hand on DTensors, with ``use_local_output=False``, or give ``sequence_length``,
    the length of the whole sequence: a part that is none of it is an error then, on the rank that
    has it.
    """

    def __init__(
        self,
        *,
        sequence_dim: int = 1,
        use_local_output: bool = False,
        sequence_length: int | None = None,
    ) -> None:
        self.sequence = Shard(sequence_dim)
        self.use_local_output = use_local_output
        self.sequence_length = sequence_length

    def placements(self, module: nn.Module, mesh: DeviceMesh) -> Mapping[str, Placement]:
        """Return Replicate for all parameters; PlacementError for what is no such module."""
        del mesh
        tensors: dict[str, Tensor] = {
            **dict(module.named_parameters()),
            **dict(module.named_buffers()),
        }
        many = [name for name, tensor in tensors.items() if tensor.ndim > 1 or "." in name]
        if many or any(True for _ in module.children()):
            raise PlacementError(
                "SequenceParallel is for norms and dropout, whose parameters have one dim, got a "
                f"{type(module).__name__} with {', '.join(many) or 'submodules'}; treat the norms "
                "in it"
            )
        return dict.fromkeys(tensors, Replicate())

    def hook(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Register what brings the input to its place."""
        sequence, name = self.sequence, type(module).__name__
        length = self.sequence_length
        size = None if length is None else (sequence.dim, length)

        def bring(value: Any) -> DTensor:
            return distributed(value, sequence, sequence, mesh, f"input of {name}", size=size)

        def hand_on(_: nn.Module, __: Any, output: Any) -> Any:
            return output.to_local() if self.use_local_output else output

        on_input(module, bring)
        module.register_forward_hook(hand_on)
