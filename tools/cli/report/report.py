"""``dtckpt report``: a page about a checkpoint or a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dtckpt.errors import NotCommitted

from ..common.console import iec
from ..common.options import debug_option, merged, store_at, store_option
from ..common.telling import bar, quiet_option, say

if TYPE_CHECKING:
    from ....storage import Store


@click.command()
@click.argument("checkpoint")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    default="report.html",
    show_default=True,
    help="The page to write, replacing what is there.",
)
@click.option(
    "--statistics/--no-statistics",
    "with_statistics",
    default=True,
    help="Whether to read all tensors: for statistics, and of a run for how they drift from one "
    "checkpoint to the next. Without that manifests are enough.",
)
@click.option("--compare", "other", metavar="OTHER", help="A checkpoint to compare with.")
@click.option(
    "--traces",
    type=click.Path(exists=True, path_type=Path),
    help="Traces of the job that saved, a file or the directory of Tracing: its times are shown.",
)
@store_option("--option", "both stores")
@store_option("--other-option", "OTHER alone")
@quiet_option
@debug_option
def report(
    checkpoint: str,
    output: Path,
    with_statistics: bool,
    other: str | None,
    traces: Path | None,
    option: dict[str, Any],
    other_option: dict[str, Any],
) -> None:
    """Write a page about CHECKPOINT, or about a run.

    It is one HTML file that needs no network: where the bytes are, by module; every tensor with
    its values' statistics and a map of who held which part; balance over ranks and files; what
    differs from another checkpoint. Of a run: sizes, how weights drift, how long saves took.

    \b
    Examples:
      dtckpt report run/step-300
      dtckpt report run/step-300 --compare other -o page.html
      dtckpt report hf --no-statistics
      dtckpt report run -o run.html
    """
    from .page import check_library, page_of

    check_library()
    with store_at(checkpoint, option) as store:
        document = _document(store, with_statistics=with_statistics)
        if other is not None:
            if document["kind"] == "run":
                raise click.UsageError(f"--compare is for a checkpoint, and {checkpoint} is a run")
            from .drift import comparison

            with store_at(other, merged(option, other_option), "OTHER") as there:
                document["comparison"] = comparison(store, there)
    if traces is not None:
        document |= _times(document, traces)
    html = page_of(document["kind"], document)
    _write(output, html)
    say(f"{output}: {iec(len(html.encode()))}")


def _document(store: Store, *, with_statistics: bool) -> dict[str, Any]:
    """Return what the page of a checkpoint shows, or that of a run where there is none."""
    from ....checkpoint import read_manifest
    from ....checkpoint.steps import steps_of_level

    try:
        manifest = read_manifest(store)
    except NotCommitted:
        steps = steps_of_level(store)
        if not steps:
            raise
        from .drift import drifts
        from .run_document import run_document

        document = run_document(store, steps)
        return document | {"drift": drifts(store, steps)} if with_statistics else document
    from .checkpoint_document import checkpoint_document, statistics_document

    document = checkpoint_document(store.url, manifest)
    if with_statistics:
        from ....checkpoint import statistics

        with bar("reading tensors") as on_progress:
            found = statistics(store, on_progress=on_progress)
        document["statistics"] = statistics_document(found)
    return document


def _times(document: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return what traces tell of the checkpoint or the run that the page is of."""
    from ....checkpoint.timing.traced import read_traces
    from .times import stalls, timing

    try:
        calls = read_traces(path)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'--traces'") from error
    found = (
        {"stalls": stalls(calls)} if document["kind"] == "run" else timing(calls, document["url"])
    )
    if not any(found.values()):
        raise click.BadParameter(f"{path}: no save of {document['url']} is in these traces")
    return found


def _write(output: Path, text: str) -> None:
    made = output.with_name(f"{output.name}.part")
    try:
        made.write_text(text, "utf-8")
        made.replace(output)
    except BaseException:
        made.unlink(missing_ok=True)
        raise
