"""What every parallel style is: how the parameters of one module lie, and what goes in and out."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from torch import Tensor, nn

from dtckpt.errors import PlacementError

from ..dtensor import distribute_tensor
from ..geometry.layout import Layout
from ..geometry.placement import Placement, Replicate
from ..mesh.device_mesh import DeviceMesh
from ..tensor.wrapper import Wrapper


class ParallelStyle:
    """How a module runs on the ranks of a mesh with one axis.

    A style of your own overrides ``apply``, or ``placements`` and ``hook``. Those of torch's
    documentation that override ``_apply`` work, too.
    """

    src_data_rank: int | None = 0
    """The rank whose values parameters get; None where every rank has them. ``parallelize_module``
    sets it."""

    def placements(self, module: nn.Module, mesh: DeviceMesh) -> Mapping[str, Placement]:
        """Return how the parameters and buffers of ``module`` itself lie; those not named stay.

        Asked of all modules before anything changes or is sent. Raises PlacementError for a module
        that the style is not for.
        """
        del module, mesh
        return {}

    def mesh_of(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return the mesh on which parameters lie: ``mesh``, or its ranks along several axes.

        They lie along the first of these as ``placements`` says, and are copies along the others.
        """
        return mesh

    def hook(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Register what brings inputs and outputs of ``module`` to where they must lie."""

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Treat one module, in place, and return it."""
        for name, placement in self.placements(module, mesh).items():
            if tensor_of(module, name) is not None:
                _distribute(module, name, self.mesh_of(mesh), placement, self.src_data_rank)
        self.hook(module, mesh)
        return module

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self.apply(module, device_mesh)


def tensor_of(module: nn.Module, name: str) -> Tensor | None:
    """Return a parameter or buffer of a module itself; None where it has none under that name.

    Raises PlacementError for what is computed from others.
    """
    own = itertools.chain(
        module.named_parameters(recurse=False, remove_duplicate=False),
        module.named_buffers(recurse=False, remove_duplicate=False),
    )
    found = dict(own).get(name)
    if found is None and getattr(module, name) is not None:
        raise PlacementError(
            f"{name!r} of a {type(module).__name__} is no parameter or buffer, but made from some, "
            "as by a parametrization; apply that after parallelize_module, or remove it before"
        )
    return found


def layout_on(mesh: DeviceMesh, placement: Placement, tensor: Tensor) -> Layout:
    """Return how a tensor lies by a placement along the first axis of a mesh, copied along others.

    Raises PlacementError where it cannot lie so.
    """
    placements = (placement, *[Replicate()] * (mesh.ndim - 1))
    return Layout(mesh.layout_mesh, placements, tuple(tensor.shape))


def lies_already(name: str, tensor: Tensor, mesh: DeviceMesh, layout: Layout) -> bool:
    """Whether a tensor lies so, tied to one that was treated before.

    Raises PlacementError where it is distributed otherwise.
    """
    if not isinstance(tensor, Wrapper):
        return False
    if tensor.spec.mesh.same_ranks_as(mesh) and tensor.spec.layout == layout:
        return True
    raise PlacementError(
        f"{name!r} is distributed already, as {tensor.spec}; apply tensor parallel styles before "
        "fully_shard, and one of them to each module"
    )


def _distribute(
    module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement, source: int | None
) -> None:
    tensor: Tensor = getattr(module, name)
    layout = layout_on(mesh, placement, tensor)
    if lies_already(name, tensor, mesh, layout):
        return
    made = distribute_tensor(tensor.detach(), mesh, layout.placements, src_data_rank=source)
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, requires_grad=tensor.requires_grad)
    setattr(module, name, made)
