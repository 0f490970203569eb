"""The ``dtckpt`` command: its subcommands, and what every error becomes on the command line."""

from __future__ import annotations

import traceback
from typing import Any

import click

from dtckpt.errors import Corrupt, DtckptError, NotCommitted

from .console import BROKEN_PIPE, silence_stdout
from .export import export
from .inspect import inspect
from .options import DAMAGE, DEBUG, debug_option
from .reshard import reshard
from .verify import verify

FAILED = 3
NO_CHECKPOINT = 4
BUG = 70
INTERRUPTED = 130


class Commands(click.Group):
    """A group that ends every error in one readable message on stderr and an exit code."""

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
            _end(ctx, error, _text(error), _code(error))
        except Exception as error:
            text = f"unexpected {type(error).__name__}: {error}\nThis is a bug; --debug shows where"
            _end(ctx, error, text, BUG)


def _end(ctx: click.Context, error: BaseException, text: str, code: int) -> None:
    if ctx.meta.get(DEBUG):
        traceback.print_exception(error)
    click.echo(f"Error: {text}", err=True)
    ctx.exit(code)


def _code(error: Exception) -> int:
    if isinstance(error, NotCommitted):
        return NO_CHECKPOINT
    return DAMAGE if isinstance(error, Corrupt) else FAILED


def _text(error: Exception) -> str:
    """Return the message of an error, without an errno, in words of the command line."""
    text = (isinstance(error, OSError) and error.strerror) or str(error)
    notes: list[str] = getattr(error, "__notes__", [])
    return "\n".join([text, *notes]).replace("overwrite=True", "--overwrite")


@click.group(
    "dtckpt",
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 all is well, 1 damage was found, 2 wrong usage, 3 the storage failed or "
    "the request cannot be met, 4 no checkpoint there, 70 a bug, 130 interrupted. Results go to "
    "stdout, messages and progress to stderr.",
)
@click.version_option(package_name="dtckpt", message="dtckpt %(version)s")
@debug_option
def main() -> None:
    """Look at, check, reshard and export distributed checkpoints.

    CHECKPOINT, SOURCE and TARGET are directories or URLs such as s3://bucket/run/step-1000.
    """


for _command in (inspect, verify, reshard, export):
    main.add_command(_command)
