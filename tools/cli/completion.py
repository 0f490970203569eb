"""``dtckpt completion``: shells complete commands, options and paths."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import click
from click.shell_completion import get_completion_class

from .common.options import debug_option
from .common.telling import quiet_option, say

Shell = Literal["bash", "zsh", "fish"]

_SHELLS = ("bash", "zsh", "fish")
_PACKAGES = (
    "/usr/share/bash-completion/bash_completion",
    "/etc/bash_completion",
    "/usr/local/etc/profile.d/bash_completion.sh",
    "/opt/homebrew/etc/profile.d/bash_completion.sh",
)
"""Where the package lies that lets bash look for what completes a command when it is typed."""
_BEGIN, _END = "# >>> dtckpt completion >>>", "# <<< dtckpt completion <<<"


@click.command()
@click.argument("shell", required=False, type=click.Choice(_SHELLS))
@click.option(
    "--install", is_flag=True, help="Put it where the shell reads it, for this user, and say where."
)
@quiet_option
@debug_option
def completion(shell: Shell | None, install: bool) -> None:
    """Print what makes a shell complete dtckpt, or install it.

    SHELL is the one that $SHELL names, if it is left out. What was installed before is replaced.

    \b
    Examples:
      dtckpt completion bash
    """
    chosen = shell or _own_shell()
    found = get_completion_class(chosen)
    assert found is not None
    script = found(click.Group("dtckpt"), {}, "dtckpt", "_DTCKPT_COMPLETE").source()
    if not install:
        click.echo(script, nl=False)
        return
    path = _place(chosen)
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, script)
    rc = _start_file(chosen)
    if rc is not None:
        _write(rc, _with_block(rc.read_text() if rc.exists() else "", _lines(chosen, path)))
    say(f"{path}: {chosen} completes dtckpt from its next start on")
    if rc is not None:
        say(f"{rc}: reads it, between {_BEGIN!r} and {_END!r}")


def _own_shell() -> Shell:
    name = os.path.basename(os.environ.get("SHELL", ""))
    if name not in _SHELLS:
        raise click.UsageError(
            f"$SHELL is {name!r}; name one of {', '.join(_SHELLS)}: dtckpt completion bash"
        )
    return name


def _folder(variable: str, default: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / default)


def _place(shell: Shell) -> Path:
    """Return the file for the script; bash, with its package, and fish look there by themselves."""
    data = _folder("XDG_DATA_HOME", ".local/share")
    if shell == "fish":
        return _folder("XDG_CONFIG_HOME", ".config") / "fish/completions/dtckpt.fish"
    if shell == "zsh":
        return data / "dtckpt/completion.zsh"
    own = os.environ.get("BASH_COMPLETION_USER_DIR")
    return (Path(own) if own else data / "bash-completion") / "completions/dtckpt"


def _start_file(shell: Shell) -> Path | None:
    """Return the file in which a shell has to be told of the script, if it has to."""
    if shell == "zsh":
        return _folder("ZDOTDIR", "") / ".zshrc"
    if shell == "bash" and not any(map(os.path.exists, _PACKAGES)):
        return Path.home() / ".bashrc"
    return None


def _lines(shell: Shell, path: Path) -> str:
    quoted = "'" + str(path).replace("'", "'\\''") + "'"
    if shell == "zsh":
        return f"(( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit }}\n. {quoted}"
    return f". {quoted}"


def _with_block(text: str, lines: str) -> str:
    """Return the text of a start file with our lines, in the place of those that were there."""
    block = f"{_BEGIN}\n{lines}\n{_END}\n"
    before, begin, rest = text.partition(f"{_BEGIN}\n")
    _, end, after = rest.partition(f"{_END}\n")
    if begin and end:
        return before + block + after
    return f"{text}{'' if not text or text.endswith(chr(10)) else chr(10)}{block}"


def _write(path: Path, text: str) -> None:
    """Write a file at once, or leave the one that is there; links are followed."""
    real = Path(os.path.realpath(path))
    if real.exists() and real.read_text() == text:
        return
    new = real.with_name(f"{real.name}.dtckpt-{os.getpid()}")
    try:
        new.write_text(text)
        if real.exists():
            new.chmod(real.stat().st_mode & 0o7777)
        new.replace(real)
    finally:
        new.unlink(missing_ok=True)
