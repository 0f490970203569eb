"""The command line, run in this process."""

from __future__ import annotations

from click.testing import CliRunner

from dtckpt.tools.cli import main


def run_command(*args: object) -> str:
    """Return what ``dtckpt`` says on stdout, with arguments for which it has to succeed."""
    result = CliRunner().invoke(main, [*map(str, args)])
    assert result.exit_code == 0, result.output
    return result.stdout
