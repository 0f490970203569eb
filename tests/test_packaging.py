"""The repository root and the installed package must agree."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMESPACE = ROOT / "tools" / "namespace"  # installed as dtckpt itself
FOLDERS = ("dtensor", "checkpoint", "storage", "tools")


def modules() -> Iterator[tuple[str, Path]]:
    """Every module on disk, with the name it must have once installed."""
    for path in sorted(NAMESPACE.glob("*.py")):
        yield ".".join(("dtckpt", path.stem)).removesuffix(".__init__"), path
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if NAMESPACE not in path.parents:
                parts = ("dtckpt", *path.relative_to(ROOT).with_suffix("").parts)
                yield ".".join(parts).removesuffix(".__init__"), path


def test_every_package_is_listed() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    on_disk = {name for name, path in modules() if path.name == "__init__.py"}
    assert set(config["packages"]) == on_disk


@pytest.mark.parametrize("name", [name for name, _ in modules()])
def test_every_module_is_installed(name: str) -> None:
    assert importlib.util.find_spec(name), "new module? run the editable install again"


@pytest.mark.parametrize("folder", [*FOLDERS, "tests"])
def test_no_module_imports_a_folder_by_its_bare_name(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            else:
                continue
            bare = {name.split(".")[0] for name in names} & set(FOLDERS)
            assert not bare, f"{path.relative_to(ROOT)}:{node.lineno} imports {bare}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_generic_name_is_installed(folder: str, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", f"import {folder}"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    assert run.returncode != 0
