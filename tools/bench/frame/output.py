"""Where the results of a benchmark go: to the console, and into files that are asked for."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from dtckpt.tools.cli.common.console import iec, stdout_console

from .machine import describe
from .table import Grid

_Command = TypeVar("_Command", bound=Callable[..., Any])
_SIZES = ("size", "state_bytes", "memory_bytes", "local_bytes")


def output_options(command: _Command) -> _Command:
    """Add ``--json`` and ``--markdown``."""
    file = click.Path(path_type=Path)
    command = click.option("--markdown", "markdown_file", type=file, help="Write tables.")(command)
    return click.option("--json", "json_file", type=file, help="Write all numbers.")(command)


def publish(
    grids: Sequence[Grid],
    document: dict[str, Any],
    json_file: Path | None,
    markdown_file: Path | None,
) -> None:
    """Print tables; write them and the document, with the machine they were measured on."""
    console = stdout_console()
    for grid in grids:
        console.print(grid.rich())
    document = {"machine": describe(tempfile.gettempdir())} | document
    if json_file is not None:
        json_file.write_text(json.dumps(document, indent=1))
    if markdown_file is not None:
        heads = [f"Machine: {facts_text(document['machine'])}.\n"]
        if "setting" in document:
            setting = {k: v for k, v in document["setting"].items() if k != "directory"}
            heads.append(f"Run: {facts_text(setting)}.\n")
        markdown_file.write_text("\n".join((*heads, *(grid.markdown() for grid in grids))))


def facts_text(facts: dict[str, Any]) -> str:
    """Return facts in one line.

    >>> facts_text({"state_bytes": 2048, "ranks": 2})
    'state 2.0 KiB, ranks 2'
    """
    return ", ".join(
        f"{key.removesuffix('_bytes')} {iec(value) if key in _SIZES else value}"
        for key, value in facts.items()
    )
