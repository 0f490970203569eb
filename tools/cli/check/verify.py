"""``dtckpt verify``: read every byte of checkpoints and name every fault."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import click

from dtckpt.errors import Corrupt, NotCommitted

from ..common.console import count, iec, printable
from ..common.exit_codes import FINDING
from ..common.options import BOTH, PLACE, debug_option, of_both, store_at, store_option
from ..common.telling import bar, json_option, print_json, quiet_option, say

if TYPE_CHECKING:
    from ....checkpoint import Problem, Verifier, VerifyReport
    from ....storage import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What was found of a checkpoint, and done about it."""

    url: str
    report: VerifyReport | None
    """None where the manifest cannot be used."""
    problems: Sequence[Problem]
    seconds: float
    repaired: Sequence[str] | None = None
    """Names of files; None if nothing was to be repaired."""
    not_repaired: Mapping[str, str] = field(default_factory=dict[str, str])
    """Why not, by their names."""


@click.command()
@click.argument("checkpoints", nargs=-1, required=True, metavar="CHECKPOINT...", type=PLACE)
@click.option(
    "--repair-from",
    metavar="OTHER",
    type=PLACE,
    help="Replace what is damaged by what OTHER has, a copy of the same checkpoint or run.",
)
@json_option
@store_option("--option", BOTH)
@store_option("--other-option", "OTHER alone")
@quiet_option
@debug_option
@click.pass_context
def verify(
    ctx: click.Context,
    checkpoints: Sequence[str],
    repair_from: str | None,
    as_json: bool,
    option: dict[str, Any],
    other_option: dict[str, Any],
) -> None:
    """Check every byte of each CHECKPOINT against its checksums.

    Of the directory of a run all committed checkpoints are verified, and files that several of them
    refer to are read once. Files of other programs, which have no checksums, are only compared with
    what their headers state.

    Exits with 0 if all are intact. Otherwise prints every problem, with file, byte range and
    tensors, and exits with 1. Nothing is changed, unless --repair-from is given: then every block
    that is damaged is taken from OTHER if it has the checksum that the checkpoint states, and each
    file takes the place of the damaged one as a whole or not at all. A damaged manifest is replaced
    only if OTHER is known to have the same one: either may have been edited.

    \b
    Examples:
      dtckpt verify run/step-300
      dtckpt verify run
    """
    if repair_from is not None and len(checkpoints) > 1:
        raise click.UsageError("--repair-from is for one CHECKPOINT, or one run")
    from ....checkpoint import Verifier

    verifier, all_found = Verifier(), list[_Found]()
    is_one = len(checkpoints) == 1
    with ExitStack() as stack:
        copies: dict[str, Store] | None = None
        if repair_from is not None:
            own = (checkpoints[0], {}), (repair_from, other_option)
            option, other_option = of_both(option, *own)
            other = stack.enter_context(store_at(repair_from, other_option, "OTHER"))
            copies = {name: store for store, name in _checkpoints(other)}
        for checkpoint in checkpoints:
            for store, name in _checkpoints(stack.enter_context(store_at(checkpoint, option))):
                is_one = is_one and name == ""
                if copies is not None and (name == "") != ("" in copies):
                    raise click.UsageError(
                        f"{checkpoint} and {repair_from} have to be two checkpoints or two runs"
                    )
                if copies is None:
                    found = _verify(verifier, store)
                elif name in copies:
                    found = _repair(store, copies[name])
                else:
                    found = _without_copy(_verify(verifier, store), f"{repair_from} has no {name}")
                all_found.append(found)
                if not as_json:
                    _print(found)
    if as_json:
        print_json("verification", _document(all_found, is_one=is_one))
    ctx.exit(FINDING if any(found.problems for found in all_found) else 0)


def _checkpoints(place: Store) -> Iterator[tuple[Store, str]]:
    """Yield a checkpoint, or those of a run with their names, in the order of their steps."""
    from ....checkpoint import read_manifest
    from ....checkpoint.runs.overview import look_over

    try:
        read_manifest(place)
    except Corrupt:
        pass
    except NotCommitted:
        steps = [step for step in look_over(place) if step.state != "incomplete"]
        if not steps:
            raise
        yield from ((place.substore(step.name), step.name) for step in steps)
        return
    yield place, ""


def _verify(verifier: Verifier, store: Store) -> _Found:
    began = time.monotonic()
    report, problems = None, ()
    try:
        with bar("verifying") as on_progress:
            report = verifier.verify(store, on_progress)
        problems = report.problems
    except Corrupt as error:
        problems = (_of_manifest(error),)
    return _Found(
        url=store.url,
        report=report,
        problems=problems,
        seconds=time.monotonic() - began,
    )


def _repair(store: Store, other: Store) -> _Found:
    from ....checkpoint import repair

    began = time.monotonic()
    done, problems = None, ()
    try:
        with bar("repairing") as on_progress:
            done = repair(store, other, on_progress=on_progress)
        problems = done.after.problems
    except Corrupt as error:
        problems = (_of_manifest(error),)
    return _Found(
        url=store.url,
        report=done.after if done else None,
        problems=problems,
        seconds=time.monotonic() - began,
        repaired=done.repaired if done else (),
        not_repaired=done.failed if done else {},
    )


def _without_copy(found: _Found, why: str) -> _Found:
    files = [problem.file for problem in found.problems if problem.file is not None]
    return replace(found, repaired=(), not_repaired=dict.fromkeys(files, why))


def _of_manifest(error: Corrupt) -> Problem:
    from ....checkpoint import Problem

    notes: list[str] = getattr(error, "__notes__", [])
    return Problem(message=" ".join([str(error), *notes]), file="manifest.json")


def _document(all_found: Sequence[_Found], *, is_one: bool) -> dict[str, Any]:
    """Return what is told of one checkpoint, or of a run and of several in a list."""
    told = [_told(found) for found in all_found]
    if is_one:
        return told[0]
    intact = not any(found.problems for found in all_found)
    return {"intact": intact, "checkpoints": told}


def _told(found: _Found) -> dict[str, Any]:
    report = found.report
    told: dict[str, Any] = {
        "url": found.url,
        "intact": not found.problems,
        "num_tensors": report.num_tensors if report else None,
        "num_files": report.num_files if report else None,
        "bytes_checked": report.bytes_checked if report else 0,
        "has_checksums": report.has_checksums if report else True,
        "problems": [asdict(problem) for problem in found.problems],
        "notes": list(report.notes) if report else [],
    }
    if found.repaired is not None:
        told["repaired"] = list(found.repaired)
        told["not_repaired"] = dict(found.not_repaired)
    return told


def _print(found: _Found) -> None:
    url, report, problems = found.url, found.report, found.problems
    if report is not None:
        told = (
            f"{count(report.num_tensors, 'tensor')} in {count(report.num_files, 'file')}, "
            f"{iec(report.bytes_checked)} checked in {found.seconds:.1f} s"
        )
    else:
        told = "the manifest cannot be read, so nothing else could be checked"
    verdict = f"damaged, {count(len(problems), 'problem')}" if problems else "intact"
    if not problems and report is not None and not report.has_checksums:
        verdict = "complete, but without checksums: bytes may have changed"
    if found.repaired:
        say(f"{printable(url)}: repaired {', '.join(map(printable, found.repaired))}")
    say(f"{printable(url)}: {verdict} ({told})")
    for problem in problems:
        click.echo(f"  {printable(problem.message.removeprefix(f'{url}/'))}")
    for name, why in found.not_repaired.items():
        click.echo(f"  {printable(name)} was not repaired: {printable(why)}")
