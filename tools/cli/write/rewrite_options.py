"""Options of the commands that write a checkpoint anew, and how their text becomes a value."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dtckpt.errors import LayoutMismatch

from ..common.console import count

if TYPE_CHECKING:
    from ....checkpoint import DTypeRule, MappingTable, Rule
    from ....dtensor import Mesh

_Command = TypeVar("_Command", bound=Callable[..., Any])

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]i?)?B?", re.IGNORECASE)
_UNITS = {"k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(_ctx: click.Context, _param: click.Parameter, text: str) -> int:
    """Return the bytes of a text such as 5GB or 500MiB; a usage error where it is none."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise click.BadParameter(f"{text!r} is no size such as 500MB or 2GiB")
    unit = (match[2] or "").lower()
    base = 1024 if unit.endswith("i") else 1000
    return int(float(match[1]) * base ** _UNITS.get(unit[:1], 0))


def _parse_dtypes(
    _ctx: click.Context, _param: click.Parameter, texts: Sequence[str]
) -> tuple[DTypeRule, ...]:
    from ....checkpoint import DTypeRule

    try:
        return tuple(map(DTypeRule.parse, texts))
    except LayoutMismatch as error:
        raise click.BadParameter(str(error)) from error


def _parse_renames(
    _ctx: click.Context, _param: click.Parameter, texts: Sequence[str]
) -> tuple[tuple[str, str], ...]:
    found: list[tuple[str, str]] = []
    for text in texts:
        old, equals, new = text.partition("=")
        if not (old and equals and new):
            raise click.BadParameter(f"expected OLD=NEW, got {text!r}")
        found.append((old, new))
    return tuple(found)


def rewrite_options(command: _Command) -> _Command:
    """Add ``--select``, ``--dtype`` and ``--rename``."""
    for option in (
        click.option(
            "--rename",
            "renames",
            multiple=True,
            callback=_parse_renames,
            metavar="OLD=NEW",
            help="Give tensors another name; {x} stands for what has no . or /, {x*} for "
            "anything, as in 'model.{rest*}={rest*}'. Repeatable.",
        ),
        click.option(
            "--dtype",
            "dtypes",
            multiple=True,
            callback=_parse_dtypes,
            metavar="[PATTERN=]DTYPE",
            help="Convert tensors that match, or all of floating point from 16 bits on. "
            "Repeatable; the first that matches counts.",
        ),
        click.option(
            "--select",
            multiple=True,
            metavar="PATTERN",
            help="Write only what matches, and what is below it. Repeatable.",
        ),
    ):
        command = option(command)
    return command


processes_option = click.option(
    "--processes",
    type=click.IntRange(min=1),
    metavar="N",
    help="How many processes write; by default one per processor as far as --memory goes.",
)
memory_option = click.option(
    "--memory",
    "memory_bytes",
    callback=parse_size,
    default="512MiB",
    show_default=True,
    metavar="SIZE",
    help="What all processes together may take.",
)


def with_renames(
    mapping: MappingTable | None, renames: Sequence[tuple[str, str]]
) -> MappingTable | None:
    """Return a mapping with moves after its rules."""
    if not renames:
        return mapping
    from ....checkpoint import MappingTable, Move

    moves = [Move(old, new) for old, new in renames]
    return MappingTable([*(mapping.rules if mapping else ()), *moves])


def check_rules(mesh: Mesh, rules: Sequence[Rule]) -> None:
    """Raise a usage error for rules that fit no tensor on this mesh."""
    for rule in rules:
        axes = "1 axis" if mesh.ndim == 1 else f"{mesh.ndim} axes"
        num = len(rule.placements)
        if num != mesh.ndim:
            problem = f"has {count(num, 'placement')}, but --mesh {mesh} has {axes}"
        elif any(placement.is_partial() for placement in rule.placements):
            problem = "asks for Partial, which a checkpoint cannot hold"
        else:
            continue
        raise click.BadParameter(
            f"the rule {rule.pattern!r} {problem}", param_hint="'--placements'"
        )
