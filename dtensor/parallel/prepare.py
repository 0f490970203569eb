"""Inputs and outputs of a module: how they lie, and how they must."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from dtckpt.errors import PlacementError

from ..mesh.device_mesh import DeviceMesh
from ..mesh.torch_layouts import AnyPlacement, is_placement
from .base_style import ParallelStyle
from .inputs import Layouts, check_pairs, is_row, prepare


class PrepareModuleInputOutput(ParallelStyle):
    """Brings inputs of a module to where it needs them, and its outputs to where others do.

    ``input_layouts`` say how the positional arguments lie, one each, and ``desired_input_layouts``
    how they must; ``input_kwarg_layouts`` and ``desired_input_kwarg_layouts`` the same by name. A
    layout is a placement along the axis of the mesh, for a tensor; None for what stays as it is;
    or a tuple, list or dict of layouts for an argument that is one. Plain tensors are parts that
    lie as told; a DTensor knows how it lies. The module is given DTensors, or with
    ``use_local_input`` their local tensors.

    ``output_layouts`` and ``desired_output_layouts`` are alike for what ``forward`` returns: one
    layout for one value, a tuple for several; others get local tensors, or with
    ``use_local_output=False`` DTensors.

    Raises PlacementError for layouts that do not go together, at once or when the module is
    treated, and in its call where arguments are not as the layouts say.
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: Mapping[str, Layouts] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Layouts] | None = None,
        use_local_input: bool = False,
        output_layouts: Layouts = None,
        desired_output_layouts: Layouts = None,
        use_local_output: bool = True,
    ) -> None:
        self.input_layouts = _row(input_layouts)
        self.desired_input_layouts = _row(desired_input_layouts)
        self.input_kwarg_layouts = dict(input_kwarg_layouts or {})
        self.desired_input_kwarg_layouts = dict(desired_input_kwarg_layouts or {})
        self.use_local_input = use_local_input
        self.output_layouts = output_layouts
        self.desired_output_layouts = desired_output_layouts
        self.use_local_output = use_local_output
        for what in ("input", "input_kwarg", "output"):
            now, wanted = getattr(self, f"{what}_layouts"), getattr(self, f"desired_{what}_layouts")
            check_pairs(now, wanted, f"{what}_layouts", f"desired_{what}_layouts")

    def placements(self, module: nn.Module, mesh: DeviceMesh) -> Mapping[str, Any]:
        """Return none; PlacementError where ``forward`` has no argument of a name in a layout."""
        del mesh
        parameters = inspect.signature(module.forward).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        unknown = [name for name in self.input_kwarg_layouts if name not in parameters]
        if unknown and not takes_any:
            raise PlacementError(
                f"input_kwarg_layouts name {unknown}, but forward of a {type(module).__name__} "
                f"takes {list(parameters)}"
            )
        return {}

    def hook(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Register what moves inputs and outputs."""
        name = type(module).__name__
        if self.input_layouts is not None or self.input_kwarg_layouts:
            module.register_forward_pre_hook(
                lambda _, args, kwargs: self._inputs(args, kwargs, mesh, name), with_kwargs=True
            )
        if self.output_layouts is not None:
            module.register_forward_hook(lambda _, __, out: self._outputs(out, mesh, name))

    def _inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh, name: str
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        to_local = self.use_local_input
        if self.input_layouts is not None:
            now, wanted = self.input_layouts, self.desired_input_layouts
            where = f"inputs of {name}"
            args = prepare(args, now, wanted, mesh, where, to_local=to_local)
        for key, layout in self.input_kwarg_layouts.items():
            if key in kwargs:
                wanted = self.desired_input_kwarg_layouts[key]
                where = f"input {key!r} of {name}"
                moved = prepare(kwargs[key], layout, wanted, mesh, where, to_local=to_local)
                kwargs = {**kwargs, key: moved}
        return args, kwargs

    def _outputs(self, outputs: Any, mesh: DeviceMesh, name: str) -> Any:
        now, wanted = self.output_layouts, self.desired_output_layouts
        where = f"outputs of {name}"
        if is_row(now) and len(now) == 1 and not is_row(outputs):
            now, wanted = now[0], wanted[0]
        return prepare(outputs, now, wanted, mesh, where, to_local=self.use_local_output)


def _row(layouts: Layouts) -> Layouts:
    """Return a row of layouts, also of a single one."""
    return (layouts,) if is_placement(layouts) else layouts


class PrepareModuleInput(PrepareModuleInputOutput):
    """Brings inputs of a module to where it needs them; see ``PrepareModuleInputOutput``.

    The module gets DTensors, or with ``use_local_output`` their local tensors.
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: Mapping[str, Layouts] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Layouts] | None = None,
        use_local_output: bool = False,
    ) -> None:
        super().__init__(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_input=use_local_output,
        )


class PrepareModuleOutput(PrepareModuleInputOutput):
    """Brings outputs of a module to where others need them; see ``PrepareModuleInputOutput``."""

    def __init__(
        self,
        *,
        output_layouts: AnyPlacement | Layouts,
        desired_output_layouts: AnyPlacement | Layouts,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )
