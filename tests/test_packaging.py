"""The repository root and the installed package must agree."""

from __future__ import annotations

import ast
import importlib.util
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import pytest

from .import_statements import import_statements

ROOT = Path(__file__).parents[1]
NAMESPACE = ROOT / "tools" / "namespace"  # installed as dtckpt itself
NOT_INSTALLED = tuple(ROOT / "tools" / name for name in ("bench", "demo", "demo_parallel", "gpu"))
RUN_FROM_THE_ROOT = tuple(f"tools.{folder.name}" for folder in NOT_INSTALLED)
FOLDERS = ("dtensor", "checkpoint", "storage", "integrations", "tools")


def modules() -> Iterator[tuple[str, Path]]:
    """Every module on disk, with the name it must have once installed."""
    for path in sorted(NAMESPACE.glob("*.py")):
        yield ".".join(("dtckpt", path.stem)).removesuffix(".__init__"), path
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not {NAMESPACE, *NOT_INSTALLED} & set(path.parents):
                yield f"dtckpt.{_name_of(path)}", path


def modules_of_tools() -> Iterator[str]:
    """Yield the modules that are run from the repository alone, by the name they have there."""
    for folder in NOT_INSTALLED:
        yield from (_name_of(path) for path in sorted(folder.rglob("*.py")))


def _name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


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
        for node in import_statements(path):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif node.level == 0:
                names = [node.module or ""]
            else:
                continue
            named = (name for name in names if not name.startswith(RUN_FROM_THE_ROOT))
            bare = {name.split(".")[0] for name in named} & set(FOLDERS)
            assert not bare, f"{path.relative_to(ROOT)}:{node.lineno} imports {bare}"


def test_the_wheel_holds_the_library_and_the_command_only(tmp_path: Path) -> None:
    source = tmp_path / "source"  # the build leaves files in the tree
    for name in ("pyproject.toml", "README.md", "LICENSE", *FOLDERS):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        source.mkdir(exist_ok=True)
        copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    (wheel,) = tmp_path.glob("*.whl")
    held = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    installed = {
        "/".join((*name.split("."), "__init__.py"))
        if path.name == "__init__.py"
        else name.replace(".", "/") + ".py"
        for name, path in modules()
    }
    pages = ROOT / "tools/cli/report"
    parts = {f"dtckpt/tools/cli/report/{path.name}" for path in pages.iterdir() if path.is_file()}
    assert held == installed | parts | {"dtckpt/py.typed"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_generic_name_is_installed(folder: str, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", f"import {folder}"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    assert run.returncode != 0
