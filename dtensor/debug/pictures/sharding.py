"""``visualize_sharding``: which rank holds which part of a tensor, as a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

from dtckpt.errors import PlacementError
from dtckpt.logs import rank_of_job

from ...geometry.integers import ints
from ...geometry.irregular import IrregularLayout
from ...geometry.layout import Layout
from ...geometry.mesh import Mesh
from ...geometry.placement import Placement, parse_placements
from .picture import Limits, Picture, caption, first_and_last, grouped, picture_of, printable
from .rendering import as_rich, as_svg, as_text

AnyLayout = Layout | IrregularLayout
Form = Literal["text", "rich", "svg"]

_MAX_PICTURES = 16
_MAX_NAMES = 3
_FORMS: dict[str, Callable[[Sequence[Picture]], str]] = {
    "text": as_text,
    "rich": as_rich,
    "svg": as_svg,
}


def visualize_sharding(
    dtensor: Any,
    header: str = "",
    use_rich: bool = False,
    *,
    form: Form | None = None,
    show: bool | None = None,
    max_rows: int = 16,
    max_columns: int = 8,
    max_panels: int = 8,
) -> str:
    """Draw which ranks hold which part of a tensor; return the drawing and print it.

    ``dtensor`` is a DTensor of ours or torch's, a layout, what has one as ``layout`` (a tensor of
    an open checkpoint), a tuple ``(shape, mesh, placements)``, in which mesh and placements may be
    texts (``"dp=2,tp=4"``, ``"S(0),R"``), or a mapping from names to any of these. Needs no process
    group and never communicates.

    In a cell, ``0, 1`` are copies, ``0 + 1`` terms of a sum that is still to be reduced, likewise
    ``0 * 1`` and ``max(0, 1)``; ``(empty)`` is a part without elements. Tensors of more than two
    dims are drawn in panels, one for each part of the leading dims. Of more than ``max_rows``,
    ``max_columns`` and ``max_panels`` the first and last are shown; a last line says what is not.

    ``form`` is "text", "rich" (with colours for a terminal, as ``use_rich``) or "svg" (a document).
    Printed is, unless ``show`` says otherwise, text and rich, on the first rank of the mesh only.
    """
    chosen = form or ("rich" if use_rich else "text")
    if chosen not in _FORMS:
        raise ValueError(f"form is 'text', 'rich' or 'svg', got {form!r}")
    limits = Limits(rows=max_rows, columns=max_columns, panels=max_panels)
    pictures = [caption(printable(header))] if header else []
    drawn = _FORMS[chosen]([*pictures, *_pictures(dtensor, limits)])
    if show if show is not None else chosen != "svg" and _is_first(dtensor):
        print(drawn)
    return drawn


def _pictures(what: Any, limits: Limits) -> list[Picture]:
    if not isinstance(what, Mapping):
        return [picture_of(layout_of(what), limits)]
    named = [(str(name), layout_of(item)) for name, item in cast(Mapping[Any, Any], what).items()]
    groups = grouped(named)
    pictures = [
        _titled(picture_of(layout, limits), names) for layout, names in groups[:_MAX_PICTURES]
    ]
    if len(groups) > _MAX_PICTURES:
        rest = groups[_MAX_PICTURES:]
        names = sum(len(names) for _, names in rest)
        pictures.append(caption(f"not shown: {len(rest):,} other layouts, of {names:,} tensors"))
    return pictures


def _titled(picture: Picture, names: Sequence[str]) -> Picture:
    listed = printable(first_and_last(names, _MAX_NAMES))
    return replace(picture, title=f"{listed}: {picture.title}")


def layout_of(what: Any) -> AnyLayout:
    """Return the layout of anything that ``visualize_sharding`` draws, mappings excepted."""
    if isinstance(what, Layout | IrregularLayout):
        return what
    if isinstance(what, tuple):
        return _from_triple(cast(tuple[Any, ...], what))
    for name in ("global_layout", "layout"):  # of our DTensors, and of tensors in a checkpoint
        found = getattr(what, name, None)
        if isinstance(found, Layout | IrregularLayout):
            return found
    if hasattr(what, "device_mesh") and hasattr(what, "placements"):
        from ...mesh.torch_layouts import layout_from_torch

        return layout_from_torch(what)
    raise PlacementError(
        f"{type(what).__name__} has no layout to be drawn: give a DTensor, a layout, a tuple "
        "(shape, mesh, placements), or a mapping from names to those"
    )


def _from_triple(triple: tuple[Any, ...]) -> Layout:
    if len(triple) != 3:
        raise PlacementError(
            f"a layout is drawn from (shape, mesh, placements), got a tuple of {len(triple)}"
        )
    shape, mesh, placements = triple
    sizes = ints(shape, "the shape of a tensor")
    ours = _mesh(mesh)
    return Layout(ours, _placements(placements, ours, len(sizes)), sizes)


def _mesh(mesh: Any) -> Mesh:
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, str):
        return Mesh.parse(mesh)
    found = getattr(mesh, "layout_mesh", None)
    if isinstance(found, Mesh):  # a DeviceMesh of ours
        return found
    if hasattr(mesh, "mesh") and hasattr(mesh, "mesh_dim_names"):
        from ...mesh.torch_mesh import mesh_from_torch

        return mesh_from_torch(mesh)
    return Mesh(ints(mesh, "the shape of a mesh"))


def _placements(placements: Any, mesh: Mesh, ndim: int) -> tuple[Placement, ...]:
    if isinstance(placements, str):
        return parse_placements(placements)
    items = tuple(cast(Sequence[Any], placements))
    given = tuple(parse_placements(p)[0] if isinstance(p, str) else p for p in items)
    if all(isinstance(p, Placement) for p in given):
        return given
    from ...mesh.torch_layouts import placements_from_torch

    return placements_from_torch(given, mesh.shape, ndim)


def _is_first(what: Any) -> bool:
    """Whether this rank is the one that prints."""
    mesh = getattr(what, "device_mesh", None)
    coordinate: Any = None if mesh is None else mesh.get_coordinate()
    if mesh is None:
        return not rank_of_job()
    return coordinate is not None and not any(coordinate)
