"""What rules of users promise, checked once for a kind of call, when its plan is made."""

from __future__ import annotations

import torch
from torch import Tensor

from dtckpt.errors import PlacementError

from ..geometry.placement import format_placements
from ..mesh.spec import DTensorSpec
from ..ops.engine.choice import Choice
from ..tensor.schemas import Op
from .call import Call

Shape = tuple[int, ...]


def require_local_shapes(call: Call, choice: Choice) -> None:
    """Raise PlacementError, alike on all ranks, where local results have not the shapes they must.

    The operator runs without data on the local shapes of every coordinate of the mesh, not only of
    this rank's. One that cannot do without data is believed.
    """
    specs: list[DTensorSpec | None] = [*choice.inputs, *choice.outputs]
    seen: set[tuple[Shape | None, ...]] = set()
    for at in choice.inputs[0].mesh.layout_mesh.coordinates():
        shapes = tuple(None if spec is None else spec.layout.box(at).sizes for spec in specs)
        if shapes in seen:
            continue
        seen.add(shapes)
        given, wanted = shapes[: len(choice.inputs)], shapes[len(choice.inputs) :]
        empties = [
            torch.empty(shape or (), dtype=spec.dtype, device="meta")
            for shape, spec in zip(given, choice.inputs, strict=True)
        ]
        local_args, local_kwargs = call.without_data(empties)
        try:
            result = call.op(*local_args, **local_kwargs)
        except NotImplementedError:
            return
        except (RuntimeError, ValueError, IndexError) as error:
            raise _broken(call.op, choice, at, given, f"it raises {error!r}") from error
        listed = result if isinstance(result, list | tuple) else [result]
        found = tuple(tuple(out.shape) if isinstance(out, Tensor) else None for out in listed)
        if any(f is not None and f != w for f, w in zip(found, wanted, strict=False)):
            raise _broken(
                call.op, choice, at, given, f"it gives {list(found)}, expected {list(wanted)}"
            )


def _broken(
    op: Op, choice: Choice, at: tuple[int, ...], given: tuple[Shape | None, ...], told: str
) -> PlacementError:
    inputs = "; ".join(f"({format_placements(spec.placements)})" for spec in choice.inputs)
    outputs = "; ".join(
        f"({format_placements(spec.placements)})" for spec in choice.outputs if spec is not None
    )
    return PlacementError(
        f"the rule registered for {op} says that inputs of placements {inputs} give outputs of "
        f"placements {outputs}, but at coordinate {at}, on local tensors of shapes {list(given)}, "
        f"{told}; leave this sharding out of what the rule returns"
    )
