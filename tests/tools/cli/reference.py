"""Write ``docs/cli.md``: what every command says of itself.

``python -m tests.tools.cli.reference --write docs/cli.md``
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click

from dtckpt.tools.cli import main
from dtckpt.tools.cli.command import SECTIONS

PAGE = Path(__file__).parents[3] / "docs" / "cli.md"
_WIDTH = 80
_HEAD = """# The `dtckpt` command

Made by `make cli-page` from what the commands say of themselves. Each example is run by the tests,
in a folder where `run/` holds the checkpoints of a run, `other/` is one that differs, and `hf/` and
`dcp/` are of other libraries.
"""


def page() -> str:
    """Return the text of the page."""
    root = _root()
    parts = [_HEAD, _block(main.get_help(root))]
    for section, modules in SECTIONS.items():
        parts.append(f"## {section}\n")
        for name in modules:
            command = main.get_command(root, name)
            assert command is not None
            parts += [f"### dtckpt {name}\n", _block(_help(command, name, root))]
    return "\n".join(parts)


def examples() -> Iterator[tuple[str, list[str]]]:
    """Yield (name, arguments) of every example of every command."""
    root = _root()
    for modules in SECTIONS.values():
        for name in modules:
            command = main.get_command(root, name)
            assert command is not None
            told = (command.help or "").rpartition("Example")[2].replace("\\\n", " ")
            for line in re.findall(r"^ *dtckpt (.+)$", told, re.MULTILINE):
                yield name, shlex.split(line, comments=True)


def _root() -> click.Context:
    return click.Context(
        main,
        info_name="dtckpt",
        terminal_width=_WIDTH,
        max_content_width=_WIDTH,
        **main.context_settings,
    )


def _help(command: click.Command, name: str, root: click.Context) -> str:
    ctx = click.Context(command, info_name=name, parent=root)
    ctx.terminal_width = ctx.max_content_width = _WIDTH
    return command.get_help(ctx)


def _block(text: str) -> str:
    return "```text\n" + "\n".join(line.rstrip() for line in text.splitlines()) + "\n```\n"


@click.command()
@click.option("--write", type=click.Path(dir_okay=False, path_type=Path), default=PAGE)
def write(write: Path) -> None:
    """Write the page."""
    write.write_text(page(), "utf-8")


if __name__ == "__main__":
    write()
