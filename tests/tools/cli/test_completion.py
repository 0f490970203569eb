from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dtckpt.tools.cli import completion as module

from .conftest import Run


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory of nobody, and an environment that names no other places."""
    variables = ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "ZDOTDIR", "BASH_COMPLETION_USER_DIR")
    for name in variables:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_shells_that_look_for_it_get_a_file(
    run: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PACKAGES", (str(home),))
    monkeypatch.setenv("SHELL", "/usr/bin/fish")
    result = run("completion", "--install")
    fish = home / ".config/fish/completions/dtckpt.fish"
    assert (result.exit_code, result.stdout) == (
        0,
        f"{fish}: fish completes dtckpt from its next start on\n",
    )
    assert fish.read_text() == run("completion").stdout
    assert run("completion", "bash", "--install", "--quiet").stdout == ""
    bash = home / ".local/share/bash-completion/completions/dtckpt"
    assert "_DTCKPT_COMPLETE=bash_complete" in bash.read_text()
    assert sorted(os.listdir(home)) == [".config", ".local"]


def test_others_are_told_in_their_start_file_once(
    run: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PACKAGES", ())
    (home / "dotfiles").mkdir()
    (home / "dotfiles/zshrc").write_text("mine=1")
    (home / ".zshrc").symlink_to(home / "dotfiles/zshrc")
    for _ in range(2):
        assert run("completion", "zsh", "--install").exit_code == 0
    text = (home / "dotfiles/zshrc").read_text()
    assert text.startswith("mine=1\n# >>> dtckpt")
    assert text.count(">>> dtckpt completion >>>") == 1
    assert (home / ".zshrc").is_symlink()
    (home / ".zshrc").write_text(f"{text}more=2\n")
    monkeypatch.setenv("XDG_DATA_HOME", str(home / "it's here"))
    assert run("completion", "zsh", "--install").exit_code == 0
    text = (home / ".zshrc").read_text()
    assert text.endswith("more=2\n")
    assert f"'{home}/it'\\''s here/dtckpt/completion.zsh'" in text
    assert run("completion", "bash", "--install").exit_code == 0
    assert "completions/dtckpt'" in (home / ".bashrc").read_text()


def test_an_unknown_shell_has_to_be_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    result = run("completion")
    assert result.exit_code == 2
    assert "$SHELL is 'tcsh'" in result.stderr


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_paths_and_names(run: Run, home: Path, saved: Path) -> None:
    script = home / "script"
    script.write_text(run("completion", "bash").stdout)
    (home / "dtckpt").write_text(
        f"#!{sys.executable}\nfrom dtckpt.tools.cli import main\nmain(prog_name='dtckpt')\n"
    )
    (home / "dtckpt").chmod(0o755)
    code = f"""
        compopt() {{ echo "opt $*"; }}
        . {script}
        COMP_WORDS=(dtckpt insp) COMP_CWORD=1 && _dtckpt_completion dtckpt; echo "${{COMPREPLY[@]}}"
        COMPREPLY=()
        COMP_WORDS=(dtckpt cat {saved}/step-100 s) COMP_CWORD=3
        _dtckpt_completion dtckpt; echo "${{COMPREPLY[@]}}"
        COMP_WORDS=(dtckpt inspect ru) COMP_CWORD=2 && _dtckpt_completion dtckpt
    """
    environment = os.environ | {"PATH": f"{home}:{os.environ['PATH']}"}
    told = subprocess.run(
        ["bash", "--norc", "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert told.stdout.splitlines() == ["inspect", "step", "opt -o", "default"]
