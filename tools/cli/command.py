"""The ``dtckpt`` command: its subcommands, and what every error becomes on the command line."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click

from dtckpt.errors import Corrupt, DtckptError

from .common.console import BROKEN_PIPE, printable, silence_stdout
from .common.exit_codes import BUG, FAILED, FINDING, INTERRUPTED
from .common.options import DEBUG, debug_option

SECTIONS: Mapping[str, Mapping[str, str]] = {
    "Look": {
        "ls": "look.ls",
        "inspect": "look.inspect",
        "cat": "look.cat",
        "plan": "look.plan",
        "watch": "look.watch",
        "report": "report.report",
    },
    "Check": {
        "verify": "check.verify",
        "diff": "check.diff",
    },
    "Write": {
        "reshard": "write.reshard",
        "convert": "write.convert",
        "extract": "write.extract",
        "edit": "write.edit",
        "copy": "write.copy",
    },
    "Keep": {
        "pin": "keep.pin",
        "rm": "keep.rm",
        "prune": "keep.prune",
        "gc": "keep.gc",
    },
    "Set up": {
        "completion": "completion",
    },
}
"""Commands in the order in which help lists them: name and module, which has it under that name."""

_LEAD = re.compile(r"^(export: \w+: )?(\[Errno \d+\] )?")
"""What precedes messages of other ranks: the phase, and the number of an error of the system."""
_WORDS = {
    "overwrite=True": "--overwrite",
    "part='model'": "--part model",
    "select=": "",
    "dtckpt.checkpoint.latest finds the newest, ": "",
    "call detach, which writes that into it": "have dtckpt convert --to dtckpt write it whole",
}
"""What the library advises programs to do, and what it is on the command line."""
_MODULES = {name: module for section in SECTIONS.values() for name, module in section.items()}


class Commands(click.Group):
    """A group whose commands are imported when they are called.

    Every error ends in one readable message on stderr and an exit code.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return [*_MODULES]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command; None where there is none of that name."""
        if cmd_name not in _MODULES:
            return None
        module = import_module(f".{_MODULES[cmd_name]}", __package__)
        return module.__dict__[cmd_name.replace("-", "_")]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands of each section with the first sentence of their help."""
        width = formatter.width - max(map(len, _MODULES)) - 6
        for section, modules in SECTIONS.items():
            with formatter.section(section):
                found = {name: self.get_command(ctx, name) for name in modules}
                formatter.write_dl(
                    [(name, of.get_short_help_str(width)) for name, of in found.items() if of]
                )

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit):
            raise
        except (KeyboardInterrupt, click.Abort) as error:
            _end(ctx, error, "interrupted", INTERRUPTED)
        except BrokenPipeError:
            silence_stdout()
            ctx.exit(BROKEN_PIPE)
        except (DtckptError, OSError) as error:
            _end(ctx, error, _text(error), FINDING if isinstance(error, Corrupt) else FAILED)
        except Exception as error:
            text = f"unexpected {type(error).__name__}: {error}\nThis is a bug; --debug shows where"
            _end(ctx, error, text, BUG)


def _end(ctx: click.Context, error: BaseException, text: str, code: int) -> None:
    if ctx.meta.get(DEBUG):
        traceback.print_exception(error)
    click.echo("\n".join(map(printable, f"Error: {text}".splitlines())), err=True)
    ctx.exit(code)


def _text(error: Exception) -> str:
    """Return the message of an error, without an errno, in words of the command line."""
    text = (isinstance(error, OSError) and error.strerror) or str(error)
    notes: list[str] = getattr(error, "__notes__", [])
    told = _LEAD.sub("", "\n".join([text, *notes]))
    for words, ours in _WORDS.items():
        told = told.replace(words, ours)
    return told


@click.group(
    "dtckpt",
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 all is well, 1 something was found (damage, a difference), 2 wrong "
    "usage, 3 the storage failed or the request cannot be met, as where no checkpoint is; 70 a "
    "bug, 130 interrupted. Results go to stdout, messages and progress to stderr.",
)
@click.version_option(package_name="dtckpt", message="dtckpt %(version)s")
@debug_option
def main() -> None:
    """Look at, check, reshard and convert distributed checkpoints.

    CHECKPOINT, SOURCE and TARGET are directories or URLs such as s3://bucket/run/step-1000.
    """
