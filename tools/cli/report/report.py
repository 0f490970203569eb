"""``dtckpt report``: a page about a checkpoint or a run."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dtckpt.errors import Corrupt, NotCommitted, StorageError

from ..common.console import iec
from ..common.exit_codes import FINDING
from ..common.options import BOTH, debug_option, of_both, store_at, store_option
from ..common.telling import bar, json_option, print_json, quiet_option, say, warn

if TYPE_CHECKING:
    from ....checkpoint import Manifest
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
    "--timing",
    "traces",
    metavar="TRACES",
    type=click.Path(exists=True, path_type=Path),
    help="Traces of the job that saved, a file or the directory of Tracing: its times are shown.",
)
@click.option(
    "--max-steps",
    type=click.IntRange(min=2),
    default=20,
    show_default=True,
    metavar="N",
    help="Of a run, how many checkpoints are read to tell how weights drift; spread evenly.",
)
@json_option
@store_option("--option", BOTH)
@store_option("--other-option", "OTHER alone")
@quiet_option
@debug_option
@click.pass_context
def report(
    ctx: click.Context,
    checkpoint: str,
    output: Path,
    with_statistics: bool,
    other: str | None,
    traces: Path | None,
    max_steps: int,
    as_json: bool,
    option: dict[str, Any],
    other_option: dict[str, Any],
) -> None:
    """Write a page about CHECKPOINT, or about a run.

    It is one HTML file that needs no network: where the bytes are, by module; every tensor with
    its values' statistics and a map of who held which part; balance over ranks and files; what
    differs from another checkpoint. Of a run: sizes, how far weights moved from one checkpoint to
    the next, module by module, how long saves took.

    Exits with 1 where tensors are damaged: the page says so, and has no statistics.

    \b
    Examples:
      dtckpt report run/step-300
      dtckpt report run/step-300 --compare other -o page.html
      dtckpt report hf --no-statistics
      dtckpt report run -o run.html
    """
    from .page import check_library, page_of

    check_library()
    if not output.parent.is_dir():
        raise click.BadParameter(f"{output.parent} is no folder", param_hint="'--output'")
    with ExitStack() as stores:
        if other is not None:
            option, other_option = of_both(option, (checkpoint, {}), (other, other_option))
        store = stores.enter_context(store_at(checkpoint, option))
        there: Store | None = None
        if other is not None:
            there = stores.enter_context(store_at(other, other_option, "OTHER"))
        document = _document(store, there, traces, max_steps, with_statistics=with_statistics)
    html = page_of(document["kind"], document)
    _write(output, html)
    num_bytes = len(html.encode())
    told = {"url": document["url"], "output": str(output), "num_bytes": num_bytes}
    problem = document.get("problem")
    if as_json:
        print_json(f"{document['kind']}-page", told | {"problem": problem})
    else:
        say(f"{output}: {iec(num_bytes)}")
        if problem:
            warn(problem)
    if problem:
        ctx.exit(FINDING)


def _document(
    store: Store, other: Store | None, traces: Path | None, max_steps: int, *, with_statistics: bool
) -> dict[str, Any]:
    """Return what the page of a checkpoint shows, or that of a run where there is none.

    What can be refused is refused before tensors are read.
    """
    from ....checkpoint import read_manifest
    from ....checkpoint.runs.overview import look_over

    try:
        manifest = read_manifest(store)
    except NotCommitted:
        steps = look_over(store)
        if not steps:
            raise
        if other is not None:
            raise click.UsageError(
                f"--compare is for a checkpoint, and {store.url} is a run"
            ) from None
        from .drift import drifts
        from .run_document import run_document

        document = run_document(store.url, steps)
        if traces is not None:
            document |= _times(document, traces)
        if with_statistics:
            document["drift"] = drifts(store, steps, max_steps)
        return document
    from .checkpoint_document import checkpoint_document

    document = checkpoint_document(store.url, manifest)
    if traces is not None:
        document |= _times(document, traces)
    if other is not None:
        read_manifest(other)
    if with_statistics:
        document |= _statistics(store, manifest)
    if other is not None:
        from .comparison import comparison

        document["comparison"] = comparison(store, other)
    return document


def _statistics(store: Store, manifest: Manifest) -> dict[str, Any]:
    """Return what the values of all tensors are like; what is damaged instead, if something is."""
    from ....checkpoint.examining.statistics import statistics_of
    from .checkpoint_document import statistics_document

    try:
        with bar("reading tensors") as on_progress:
            found = statistics_of(store, manifest, on_progress=on_progress)
    except Corrupt as error:
        return {"problem": f"{error}; dtckpt verify tells all that is damaged"}
    return {"statistics": statistics_document(found)}


def _times(document: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return what traces tell of the checkpoint or the run that the page is of."""
    from ....checkpoint.timing.traced import read_traces
    from .times import stalls, timing

    try:
        calls = read_traces(path)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'--timing'") from error
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
    except OSError as error:
        raise StorageError(None, f"cannot write {output}: {error.strerror}") from error
    finally:
        made.unlink(missing_ok=True)
