"""What a command says beside its results: a summary, progress, one JSON document instead."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import click

from ....checkpoint.timing.bars import OnProgress, progress

SCHEMA_VERSION = 1
"""Of the documents that ``--json`` prints; grows when a field changes its meaning or goes."""

_QUIET = "dtckpt.quiet"
"""Key in a context's ``meta`` of whether only results and errors are wanted."""

_Command = TypeVar("_Command", bound=Callable[..., Any])


def quiet_option(command: _Command) -> _Command:
    """Add ``--quiet``."""

    def remember(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
        ctx.meta[_QUIET] = value

    return click.option(
        "-q",
        "--quiet",
        is_flag=True,
        expose_value=False,
        callback=remember,
        help="No progress and no summary; results, errors and the exit code remain.",
    )(command)


def json_option(command: _Command) -> _Command:
    """Add ``--json``."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON document with a schema_version."
    )(command)


def is_quiet() -> bool:
    """Whether ``--quiet`` was given to the command that runs."""
    ctx = click.get_current_context(silent=True)
    return ctx is not None and bool(ctx.meta.get(_QUIET))


def say(text: str) -> None:
    """Print a line of a summary, which ``--quiet`` leaves out."""
    if not is_quiet():
        click.echo(text)


def warn(text: str) -> None:
    """Print a warning on stderr."""
    click.echo(f"Warning: {text}", err=True)


def bar(label: str) -> AbstractContextManager[OnProgress | None]:
    """Show progress on a terminal, unless ``--quiet``; see ``timing.bars.progress``."""
    return progress(label, is_shown=not is_quiet())


def print_json(kind: str, document: dict[str, Any], *, is_line: bool = False) -> None:
    """Print the one document of ``--json``; in one line where it is one of many."""
    head = {"schema_version": SCHEMA_VERSION, "kind": kind}
    click.echo(json.dumps(head | document, indent=None if is_line else 2))
