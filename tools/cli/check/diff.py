"""``dtckpt diff``: how two checkpoints differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from ..common.exit_codes import FINDING
from ..common.options import BOTH, PLACE, debug_option, key_values, of_both, store_at, store_option
from ..common.telling import bar, json_option, print_json, quiet_option

if TYPE_CHECKING:
    from ....checkpoint import Comparison, TensorComparison


def _names(_ctx: click.Context, _param: click.Parameter, texts: Sequence[str]) -> dict[str, str]:
    return key_values(texts, is_text=True)


def _tolerance(_ctx: click.Context, _param: click.Parameter, value: float | None) -> float | None:
    if value is not None and not 0 <= value < float("inf"):
        raise click.BadParameter(f"{value} is no number that is not negative")
    return value


@click.command()
@click.argument("checkpoint", type=PLACE)
@click.argument("other", type=PLACE)
@click.option(
    "--select",
    multiple=True,
    metavar="PATTERN",
    help="Compare only what matches, and what is below it. Repeatable.",
)
@click.option(
    "--rename",
    multiple=True,
    metavar="OLD=NEW",
    callback=_names,
    help="Give tensors of CHECKPOINT the names that OTHER has; as in dtckpt edit. Repeatable.",
)
@click.option(
    "--rtol",
    default=0.0,
    callback=_tolerance,
    metavar="R",
    help="Tolerate so much of a value's size.",
)
@click.option(
    "--atol",
    default=0.0,
    callback=_tolerance,
    metavar="A",
    help="Tolerate so much more of each value.",
)
@click.option(
    "--tolerance",
    type=float,
    callback=_tolerance,
    metavar="D",
    help="Tolerate tensors whose relative drift is no larger: length of the difference by length.",
)
@click.option(
    "--sort",
    type=click.Choice(["drift", "max", "name"]),
    default="drift",
    show_default=True,
    help="Which tensors come first: by drift, by the largest difference, or by name.",
)
@click.option(
    "--layout/--no-layout",
    default=False,
    help="Whether another layout, or dtype of equal values, is a difference.",
)
@click.option("--values/--no-values", default=True, help="Whether to compare what is no tensor.")
@json_option
@store_option("--option", BOTH)
@store_option("--other-option", "OTHER alone")
@quiet_option
@debug_option
@click.pass_context
def diff(
    ctx: click.Context,
    checkpoint: str,
    other: str,
    select: tuple[str, ...],
    rename: dict[str, str],
    rtol: float,
    atol: float,
    tolerance: float | None,
    sort: str,
    layout: bool,
    values: bool,
    as_json: bool,
    option: dict[str, Any],
    other_option: dict[str, Any],
) -> None:
    """Show how CHECKPOINT and OTHER differ.

    Names, shapes, values, and for each tensor how far it has drifted. Formats, layouts and dtypes
    may be others. Tensors whose checksums are the same are not read. Exits with 1 where there is a
    difference beyond what is tolerated.

    \b
    Examples:
      dtckpt diff run/step-300 other
      dtckpt diff run/step-100 run/step-200 --select 'model/*' --sort max
    """
    from ....checkpoint import compare

    one_options, two_options = of_both(option, (checkpoint, {}), (other, other_option))
    with (
        store_at(checkpoint, one_options) as one,
        store_at(other, two_options, "OTHER") as two,
        bar("comparing") as on_progress,
    ):
        found = compare(
            one,
            two,
            select or None,
            rename=rename,
            rtol=rtol,
            atol=atol,
            on_progress=on_progress,
        )
    if not values:
        found = replace(found, values={}, only_values=((), ()))
    differing = [
        each
        for each in found.tensors.values()
        if not each.is_within(tolerance)
        or (layout and (each.layouts[0] != each.layouts[1] or each.dtypes[0] != each.dtypes[1]))
    ]
    differing.sort(key=lambda each: _order(each, sort))
    if as_json:
        print_json("difference", _document(found, differing))
    else:
        from .diff_text import show_difference

        show_difference(found, differing)
    if differing or found.values or any((*found.only, *found.only_values)):
        ctx.exit(FINDING)


def _order(each: TensorComparison, sort: str) -> tuple[float, str]:
    """Return what to sort by: first of all what could not be compared."""
    if sort == "name":
        return 0, each.name
    if each.drift is None:
        return -float("inf"), each.name
    return -(each.drift.relative_l2 if sort == "drift" else each.drift.max_abs), each.name


def _document(found: Comparison, differing: Sequence[TensorComparison]) -> dict[str, Any]:
    by = [each.by for each in found.tensors.values()]
    return {
        "urls": list(found.urls),
        "only": [list(names) for names in found.only],
        "only_values": [list(names) for names in found.only_values],
        "num_compared": len(by),
        "num_by_checksums": by.count("checksums"),
        "values": {name: list(both) for name, both in found.values.items()},
        "tensors": [_told(each) for each in differing],
    }


def _told(each: TensorComparison) -> dict[str, Any]:
    told = asdict(each)
    if each.drift is not None:
        told["drift"] = {
            **told["drift"],
            "relative_l2": _number(each.drift.relative_l2),
            "max_abs": _number(each.drift.max_abs),
            "cosine": each.drift.cosine,
        }
        for inner in ("squares", "product", "squared_difference"):
            del told["drift"][inner]
    return told


def _number(value: float) -> float | str:
    """Return a number that JSON has, or text."""
    return value if abs(value) < float("inf") else str(value)
