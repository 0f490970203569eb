"""Arrows between packages point down only, and looking at a checkpoint does not load torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from .import_statements import import_statements

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "storage": set[str](),
    "dtensor": set[str](),
    "checkpoint": {"dtensor", "storage"},
    "integrations": {"checkpoint", "storage"},
    "tools": {"checkpoint", "dtensor", "storage"},
}
FRAMEWORKS = ("lightning", "transformers", "accelerate", "torchtitan", "torchft", "verl")
"""What integrations/ alone may import."""
FLOORS = {
    "checkpoint": (
        "state",
        "ranks",
        "agreement",
        "timing",
        "tensors",
        "compression",
        "files",
        "formats",
        "reading",
        "sharing",
        "copies",
        "mapping",
        "optimizers",
        "staging",
        "saving",
        "loading",
        "job_state",
        "exporting",
        "dcp",
        "resharding",
        "",
        "runs",
        "examining",
        "manager",
    ),
    "dtensor": (
        "torch_private",
        "geometry",
        "comm",
        "mesh",
        "graphs",
        "redistribute",
        "random",
        "tensor",
        "ops",
        "calls",
        "debug",
        "",
        "attention",
        "parallel",
        "fsdp",
        "elastic",
        "experimental",
    ),
    "integrations": ("", "lightning", "torchft"),
    "storage": (
        "names",
        "failures",
        "base",
        "arena",
        "local",
        "peers",
        "remote",
        "testing",
        "",
    ),
}
"""The folders of a package from the lowest one up; "" stands for the modules beside them, which are
what users import. A folder may import those before it."""


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, package of dtckpt) for every import in a file, function-level ones included."""
    depth = len(path.relative_to(ROOT).parts) - 1
    for node in import_statements(path):
        if isinstance(node, ast.ImportFrom):
            parts = (node.module or "").split(".")
            if node.level == depth + 1:
                names = [alias.name for alias in node.names] if not node.module else parts[:1]
                yield from ((node.lineno, name) for name in names)
            elif node.level == 0 and parts[0] == "dtckpt" and len(parts) > 1:
                yield node.lineno, parts[1]
        else:
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] == "dtckpt" and len(parts) > 1:
                    yield node.lineno, parts[1]


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_point_down(package: str) -> None:
    allowed = MAY_IMPORT[package] | {package, "addresses", "errors", "interrupts", "lazy", "logs"}
    for path in (ROOT / package).rglob("*.py"):
        if "namespace" in path.parts:
            continue
        for line, target in imports(path):
            assert target in allowed, f"{path.relative_to(ROOT)}:{line} imports {target}"


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_no_code_imports_tests_or_what_is_not_installed(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        for node in import_statements(path):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for name in names:
                assert name.split(".")[0] not in ("tests", "tools"), f"{path}:{name}"


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_no_code_imports_a_framework_as_it_is_loaded(package: str) -> None:
    """Adapters ask ``frameworks.framework`` for theirs, which says how to install it."""
    for path in (ROOT / package).rglob("*.py"):
        for node in import_statements(path):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            assert not {name.split(".")[0] for name in names} & set(FRAMEWORKS), path


def imported_modules(path: Path, package: Path) -> Iterator[Path]:
    """Yield the files of a package that one of them imports, lazily or for types only, too."""
    for node in import_statements(path):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = path.parents[node.level - 1]
            if folder == package or package in folder.parents:
                module = folder.joinpath(*(node.module or "").split("."))
                names = [module / alias.name for alias in node.names]
                for found in {module, *names}:
                    for file in (found.with_suffix(".py"), found / "__init__.py"):
                        if file.exists() and file != path:
                            yield file


def modules_of(package: str) -> dict[Path, set[Path]]:
    """Return what each file of a package imports of it."""
    folder = ROOT / package
    return {path: set(imported_modules(path, folder)) for path in folder.rglob("*.py")}


def floor_of(path: Path, package: str) -> str:
    """Return the folder that a file lies in, or its own name if it is a floor by itself."""
    name = path.relative_to(ROOT / package).parts[0].removesuffix(".py")
    return name if name in FLOORS[package] else ""


@pytest.mark.parametrize("package", FLOORS)
def test_floors_import_those_below_them(package: str) -> None:
    height = {floor: number for number, floor in enumerate(FLOORS[package])}
    own = ROOT / package / "__init__.py"  # names everything
    up = [
        f"{path.relative_to(ROOT)} imports {target.relative_to(ROOT)}"
        for path, targets in modules_of(package).items()
        for target in targets
        if path != own and height[floor_of(path, package)] < height[floor_of(target, package)]
    ]
    assert not up


@pytest.mark.parametrize("package", FLOORS)
def test_every_folder_is_a_floor(package: str) -> None:
    folders = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
    files = {floor for floor in FLOORS[package] if (ROOT / package / f"{floor}.py").is_file()}
    assert {*folders, *files, ""} == set(FLOORS[package])


@pytest.mark.parametrize("package", [*MAY_IMPORT])
def test_modules_import_each_other_in_one_direction(package: str) -> None:
    own = ROOT / package / "__init__.py"  # names everything, and is loaded before anything
    imported = {
        path: targets - {own} for path, targets in modules_of(package).items() if path != own
    }
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        circle = [str(path.relative_to(ROOT)) for path in error.args[1]]
        pytest.fail(f"these import each other in a circle: {' <- '.join(circle)}")


def loaded_by(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has after running some code."""
    program = f"{code}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT.parent, capture_output=True, text=True, check=True
    )
    return set(run.stdout.split())


def test_geometry_does_not_import_torch() -> None:
    code = "import dtckpt.dtensor as d; d.Layout(d.Mesh((2,)), (d.Shard(0),), (4,)).box((1,))"
    assert not {"torch", "numpy", "fsspec"} & loaded_by(code)
    for path in (ROOT / "dtensor" / "geometry").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        assert "torch" not in loaded_by(f"import dtckpt.{module}")


def test_manifests_are_read_without_torch_and_numpy(tmp_path: Path) -> None:
    import dtckpt.checkpoint as dcp

    dcp.save({"step": 3}, tmp_path)
    code = (
        "import dtckpt.checkpoint as c, dtckpt.storage as s; "
        f"c.read_manifest(s.open_store({str(tmp_path)!r}))"
    )
    assert not {"torch", "numpy", "fsspec"} & loaded_by(code)
    code = f"import dtckpt.checkpoint.manager as m; m.request_save({str(tmp_path)!r})"
    assert not {"torch", "numpy", "fsspec"} & loaded_by(code)
    code = f"import dtckpt.checkpoint as c; c.verify({str(tmp_path)!r})"
    assert not {"torch", "fsspec"} & loaded_by(code)
    code = (
        "import dtckpt.checkpoint as c, dtckpt.dtensor as d; "
        f"c.reshard({str(tmp_path)!r}, {str(tmp_path / 'new')!r}, d.Mesh((2,)), ())"
    )
    assert not {"torch", "fsspec"} & loaded_by(code)


def test_plain_tensors_are_saved_and_loaded_without_the_dtensors_of_torch(tmp_path: Path) -> None:
    """They bring sympy along, half a second."""
    code = (
        "import torch, dtckpt.checkpoint as c; state = {'w': torch.ones(2)}; "
        f"c.save(state, {str(tmp_path / 'one')!r}); c.load(state, {str(tmp_path / 'one')!r}); "
        f"c.CheckpointManager({str(tmp_path / 'run')!r}, when=()).close()"
    )
    assert "sympy" not in loaded_by(code)


@pytest.mark.parametrize(
    "package", ["checkpoint", "checkpoint.manager", "dtensor", "dtensor.debug", "storage"]
)
def test_all_names_everything_public(package: str) -> None:
    import importlib

    module = importlib.import_module(f"dtckpt.{package}")
    assert sorted(set(module.__all__)) == sorted(module.__all__)
    assert dir(module) == sorted(module.__all__), "names that load on first use are listed, too"
    for name in module.__all__:
        value = getattr(module, name)
        assert value is not None
        assert type(value).__name__ != "module", f"{name} is hidden by a module of that name"
    with pytest.raises(AttributeError):
        _ = module.no_such_name
