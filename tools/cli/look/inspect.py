"""``dtckpt inspect``: what a checkpoint holds."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from dtckpt.errors import NotCommitted

from ..common.options import NAME, PLACE, debug_option, mapping_option, store_at, store_option
from ..common.telling import bar, json_option, print_json, quiet_option

if TYPE_CHECKING:
    from ....checkpoint import Manifest, MappingTable
    from ....checkpoint.runs.overview import StepOverview
    from ....storage import Store


@click.command()
@click.argument("checkpoint", type=PLACE)
@click.argument("patterns", nargs=-1, metavar="[PATTERN]...", type=NAME)
@json_option
@click.option("--values/--no-values", default=True, help="Whether to show what is not a tensor.")
@click.option(
    "--tensor",
    "names",
    multiple=True,
    type=NAME,
    metavar="NAME",
    help="Read this tensor, or those of a pattern, and show what its values are like: extremes, "
    "mean, deviation, histogram, NaN and infinities. Repeatable.",
)
@click.option("--layout", is_flag=True, help="Draw which rank held which part of a tensor.")
@click.option(
    "--timing",
    "traces",
    metavar="TRACES",
    type=click.Path(exists=True),
    help="Show how long phases of the save took, rank by rank, from a trace of the job or a "
    "directory of them, as Tracing writes it.",
)
@mapping_option
@store_option()
@quiet_option
@debug_option
def inspect(
    checkpoint: str,
    patterns: tuple[str, ...],
    as_json: bool,
    values: bool,
    names: tuple[str, ...],
    layout: bool,
    traces: str | None,
    mapping: MappingTable | None,
    option: dict[str, Any],
) -> None:
    """Show what CHECKPOINT holds, from its manifest alone.

    Structure, shapes, dtypes, bytes, layouts, files and how evenly ranks and files are filled; of
    all, or of what has the name of a PATTERN, or is below it. In patterns * matches any characters,
    / included. Where CHECKPOINT is the directory of a run, its committed checkpoints are listed.

    \b
    Examples:
      dtckpt inspect run/step-300
      dtckpt inspect run/step-300 'model/*' --layout
      dtckpt inspect run/step-300 --tensor 'model/*'
    """
    from ....checkpoint import read_manifest

    if layout and as_json:
        raise click.UsageError("--layout draws for people; --json lists the layouts, too")
    if sum(map(bool, (names, layout, traces))) > 1 or (patterns and (names or traces)):
        raise click.UsageError(
            "--tensor, --layout and --timing stand alone; only --layout draws what fits a PATTERN"
        )

    with store_at(checkpoint, option) as store:
        try:
            manifest = read_manifest(store)
        except NotCommitted:
            steps = _steps(store)
            if not steps or names or layout or traces or patterns:
                raise
            _show_run(store, steps, as_json=as_json)
            return
        if mapping is not None:
            from ....checkpoint.mapping.table import with_stored_names

            manifest = with_stored_names(mapping.applied_to(manifest, store.url))
        _check(manifest, patterns, store.url)
        if traces is not None:
            _show_timing(store.url, traces, as_json=as_json)
        elif layout:
            from .inspect_pictures import show_layouts

            show_layouts(store.url, manifest, patterns)
        elif names:
            _show_statistics(store, manifest, names, as_json=as_json)
        else:
            _show_checkpoint(store, manifest, patterns, values=values, as_json=as_json)


def _check(manifest: Manifest, patterns: tuple[str, ...], url: str) -> None:
    """Raise LayoutMismatch for patterns that nothing fits."""
    from ....checkpoint.state.selecting import Selection
    from ....checkpoint.state.tree import index_tree

    if patterns:
        Selection(patterns).check(index_tree(manifest.tree).leaves, url)


def _show_timing(url: str, traces: str, *, as_json: bool) -> None:
    from ....checkpoint.timing.traced import read_traces, save_of

    try:
        save = save_of(read_traces(traces), url)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'--timing'") from error
    if save is None:
        raise click.BadParameter(f"{traces}: no save of {url} is in it", param_hint="'--timing'")
    if as_json:
        print_json("timing", asdict(save))
        return
    from .inspect_timing import show_timing

    show_timing(save)


def _show_statistics(
    store: Store, manifest: Manifest, names: tuple[str, ...], *, as_json: bool
) -> None:
    from ....checkpoint.examining.statistics import statistics_of

    with bar("reading") as on_progress:
        found = statistics_of(store, manifest, names, on_progress)
    if as_json:
        told = {name: asdict(of) for name, of in found.items()}
        print_json("statistics", {"url": store.url, "tensors": told})
        return
    from .inspect_statistics import show_statistics

    show_statistics(found.values())


def _steps(store: Store) -> list[StepOverview]:
    from ....checkpoint.runs.overview import look_over

    return [step for step in look_over(store) if step.state != "incomplete"]


def _show_run(store: Store, steps: list[StepOverview], *, as_json: bool) -> None:
    if as_json:
        listed = [{"number": s.number, "name": s.name, "url": s.url} for s in steps]
        print_json("run", {"url": store.url, "steps": listed})
        return
    from .inspect_text import show_run

    show_run(store.url, steps)


def _show_checkpoint(
    store: Store, manifest: Manifest, patterns: tuple[str, ...], *, values: bool, as_json: bool
) -> None:
    if as_json:
        from .inspect_json import checkpoint_document

        print_json("checkpoint", checkpoint_document(store.url, manifest, patterns, values=values))
        return
    from .inspect_text import show_checkpoint

    show_checkpoint(store.url, manifest, patterns, values=values)
