from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint import parse_rules, read_manifest
from dtckpt.dtensor import Mesh
from dtckpt.errors import LayoutMismatch, StorageError
from dtckpt.storage import Call, FaultyStore, LocalStore, MemoryStore, RaiseError

from .conftest import Run, data_file, document, flip, state

RULES = "*embed.weight=R,S(1); model/layers/*/w=S(0),S(1)"
MORE = "*/exp_avg=Ragged(0:90,6),S(0)"
MESH = ("--mesh", "dp=2,tp=2")


def tensors(value: Any, name: str = "") -> dict[str, torch.Tensor]:
    """Every tensor of a nested state, by some path."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    if isinstance(value, dcp.LazyTensor):
        return {name: value[...]}
    if isinstance(value, dcp.PerRank):
        return tensors({0: value.value}, name)
    children: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list | tuple):
        children = list(enumerate(value))
    return {n: t for key, child in children for n, t in tensors(child, f"{name}/{key}").items()}


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*.*")}


def test_every_tensor_survives(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    result = run("reshard", checkpoint, target, *MESH, "--placements", RULES, "--placements", MORE)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "12 tensors" in result.stdout
    assert "dp=2,tp=2" in result.stdout
    assert run("verify", target).exit_code == 0
    with dcp.open(checkpoint) as old, dcp.open(target) as new:
        before, after = tensors(old.state_dict()), tensors(new.state_dict())
        assert new.metadata == {"loss": 1.5}
        assert new.manifest.tree == old.manifest.tree
        layouts = {name: tensor.layout for name, tensor in new.items()}
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name], tensor), name
    assert {n: t.shape for n, t in before.items()} == {
        n: t.shape for n, t in tensors(state()).items()
    }
    placed = {name: str(layout).partition("] ")[2] for name, layout in layouts.items()}
    assert placed["model/embed.weight"] == "(R, S(1)) on dp=2,tp=2"
    assert placed["optim/state/#0/exp_avg"] == "(Ragged(0:90,6), S(0)) on dp=2,tp=2"
    assert placed["model/scale"] == "(R, R) on dp=2,tp=2"
    assert placed["model/layers/0/b"] == "(R, R) on dp=2,tp=2"
    assert placed["rng/@0/torch"] == "(R) on rank=1"


def test_the_target_is_compressed_where_asked_for(
    run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    result = run("reshard", checkpoint, target, *MESH, "--placements", RULES, "--compress")
    assert (result.exit_code, result.stderr) == (0, "")
    assert run("verify", target).exit_code == 0
    text = run("inspect", target).stdout
    assert "dtckpt 2, compressed" in text
    assert " of data (" in text
    found = document(run("inspect", target, "--json"))
    assert found["format_version"] == 2
    for file in found["files"]:
        assert file["path"].endswith(".compressed")
        assert file["stored_bytes"] <= file["data_bytes"]
    assert sum(f["stored_bytes"] for f in found["files"]) < sum(
        f["data_bytes"] for f in found["files"]
    )
    plain = document(run("inspect", checkpoint, "--json"))
    assert plain["format_version"] == 1
    assert [f["stored_bytes"] for f in plain["files"]] == [f["data_bytes"] for f in plain["files"]]
    with dcp.open(checkpoint) as old, dcp.open(target) as new:
        before, after = tensors(old.state_dict()), tensors(new.state_dict())
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_dry_run_tells_what_the_run_does(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    rules = parse_rules(f"{RULES};{MORE}")
    mesh = Mesh.parse("dp=2,tp=2")
    planned = dcp.place(read_manifest(LocalStore(checkpoint)), mesh, rules)
    done = dcp.reshard(checkpoint, target, mesh, rules)
    assert {p.tensor.name: p.layout for p in planned} == {
        name: tensor.layout for name, tensor in done.tensors.items()
    }


def test_dry_run_writes_nothing(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    rules = f"{RULES}; model/scale=S(0),S(0)"
    args = ("reshard", checkpoint, target, *MESH, "--placements", rules, "--dry-run")
    result = run(*args)
    assert (result.exit_code, result.stderr) == (0, "")
    assert not target.exists()
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    embed = "float32[96, 40] 15.0 KiB R on rank=1"
    assert f"model/embed.weight {embed} R,S(1) *embed.weight" in lines
    assert any(line.endswith("R on rank=1 R,R 0-d") for line in lines)
    assert any(line.endswith("R on rank=1 as it is stays with its rank") for line in lines)
    assert lines[-1] == "Dry run: nothing was written."
    narrow = run(*args, env={"COLUMNS": "70"}).stdout
    assert "\nmodel/embed.weight\n  float32[96, 40]  15.0 KiB  R on rank=1 -> R,S(1)" in narrow


def test_dry_run_as_a_document(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    args = ("reshard", checkpoint, tmp_path / "target", *MESH, "--placements", RULES)
    told = document(run(*args, "--dtype", "*/w=bfloat16", "--dry-run", "--json"))
    assert not (tmp_path / "target").exists()
    assert told["kind"] == "reshard-plan"
    made = dcp.reshard(
        checkpoint,
        tmp_path / "target",
        Mesh.parse("dp=2,tp=2"),
        parse_rules(RULES),
        dtypes=[dcp.DTypeRule.parse("*/w=bfloat16")],
    )
    assert told["tensors"].keys() == made.tensors.keys()
    assert told["tensors"]["model/layers/0/w"] == {
        "shape": [33, 17],
        "old": {
            "dtype": "float32",
            "mesh": {"shape": [1], "axes": ["rank"]},
            "placements": ["R"],
        },
        "new": {
            "dtype": "bfloat16",
            "mesh": {"shape": [2, 2], "axes": ["dp", "tp"]},
            "placements": ["S(0)", "S(1)"],
        },
        "rule": "model/layers/*/w",
        "note": "",
    }
    assert told["held_bytes"].keys() == {"0", "1", "2", "3"}


def test_variables_of_a_job_make_no_rank_of_it(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    """Pods have them for whoever looks around in them, who would wait for the others for long."""
    env = {"RANK": "0", "WORLD_SIZE": "16", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    result = run("reshard", checkpoint, tmp_path / "target", "--to-world", 2, env=env)
    assert (result.exit_code, result.stderr) == (0, "")


def test_under_torchrun_one_rank_speaks_for_all(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    args = ["reshard", checkpoint, target, *MESH, "--placements", f"{RULES}; model/embed*=R,R"]
    done = subprocess.run(
        [*launcher, "-m", "dtckpt", *args], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("12 tensors") == done.stdout.count("in 4 files") == 1
    assert done.stderr.count("the rule 'model/embed*' places no tensor") == 1
    assert run("verify", target).exit_code == 0
    with dcp.open(checkpoint) as old, dcp.open(target) as new:
        before, after = tensors(old.state_dict()), tensors(new.state_dict())
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_many_ranks_are_summed_up(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    args = ("reshard", checkpoint, tmp_path / "t", "--mesh", "dp=64", "-n", "--placements")
    assert "(least)" in run(*args, "*=S(0)").stdout
    dcp.save({"w": torch.zeros(64)}, tmp_path / "even")
    result = run("reshard", tmp_path / "even", *args[2:], "*=S(0)")
    assert "each of 64         4 B" in result.stdout


def test_a_rule_that_places_nothing_is_told(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    args = ("reshard", checkpoint, tmp_path / "target", "--mesh", "dp=2")
    result = run(*args, "--placements", "*=R;model/*=S(0)")
    assert result.exit_code == 0
    assert "Warning: the rule 'model/*' places no tensor: others before it do" in result.stderr


def test_a_rule_that_fits_no_name_is_refused(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    """A misspelt one would leave its tensors replicated, and nobody the wiser."""
    args = ("reshard", checkpoint, tmp_path / "target", "--mesh", "dp=2", "--placements")
    for more in ((), ("-n",)):
        result = run(*args, "modle/*=S(0); *=R", *more)
        assert result.exit_code == 3
        assert "no tensor has a name that fits 'modle/*'" in result.stderr
        assert "model/embed.weight" in result.stderr
    assert not (tmp_path / "target").exists()
    with pytest.raises(LayoutMismatch, match="'x'"):
        dcp.reshard(checkpoint, tmp_path / "target", Mesh((2,)), parse_rules("x=S(0)"))


def test_options_go_to_both_stores(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    args = ("reshard", checkpoint, tmp_path / "t", *MESH, "--placements", "*=R,R")
    assert run(*args, "--option", "direct_io=false").exit_code == 0
    for option in ("--option", "--source-option", "--target-option"):
        result = run(*args, "--overwrite", option, "no_such=1")
        assert result.exit_code == 2
        assert "no_such" in result.stderr


@pytest.mark.parametrize(
    ("mesh", "rules", "option"),
    [
        ("dp2", "*=R", "--mesh"),
        ("dp=0", "*=R", "--mesh"),
        ("dp=2,dp=2", "*=R,R", "--mesh"),
        ("dp=2", "*", "--placements"),
        ("dp=2", " ; ", "--placements"),
        ("dp=2", "*=Q", "--placements"),
        ("dp=2", "*=S(0),R", "--placements"),
        ("dp=2", "*=P(sum)", "--placements"),
    ],
)
def test_usage_errors_name_their_option(
    run: Run, checkpoint: Path, tmp_path: Path, mesh: str, rules: str, option: str
) -> None:
    result = run("reshard", checkpoint, tmp_path / "t", "--mesh", mesh, "--placements", rules)
    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.stderr
    assert not (tmp_path / "t").exists()


def test_rules_that_do_not_fit_list_their_tensors(
    run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    args = ("reshard", checkpoint, tmp_path / "t", "--mesh", "dp=2", "--placements")
    result = run(*args, "model/layers/*=S(1)")
    assert result.exit_code == 3
    assert [line for line in result.stderr.splitlines() if "model/layers/" in line] == [
        f"  tensor 'model/layers/{i}/b': S(1) on axis 'dp' names dim 1, "
        "but a tensor of shape (17,) has 1 dims"
        for i in range(3)
    ]
    assert not (tmp_path / "t").exists()


def test_target_that_is_committed_stays(run: Run, checkpoint: Path, saved: Path) -> None:
    before = contents(checkpoint)
    args = ("reshard", saved / "step-20", checkpoint, "--mesh", "dp=2", "--placements", "*=S(0)")
    for extra in ((), ("--dry-run",)):
        result = run(*args, *extra)
        assert result.exit_code == 3
        assert "pass --overwrite" in result.stderr
        assert contents(checkpoint) == before
    assert run(*args, "--overwrite").exit_code == 0
    assert list(document(run("inspect", checkpoint, "--json"))["tensors"]) == ["a"]
    assert len(list(checkpoint.glob("data/*"))) == 1


def test_what_is_there_is_not_mixed_with(run: Run, saved: Path, tmp_path: Path) -> None:
    args = ("reshard", saved / "step-20", saved, "--to-world", 2, "--overwrite")
    result = run(*args)
    assert (result.exit_code, "a directory of checkpoints" in result.stderr) == (3, True)
    hf = tmp_path / "hf"
    assert run("convert", saved / "step-20", hf, "--to", "safetensors").exit_code == 0
    before = contents(hf)
    result = run("convert", hf, hf, "--to", "dtckpt")
    assert (result.exit_code, "a checkpoint of safetensors is here" in result.stderr) == (3, True)
    assert contents(hf) == before


def test_onto_itself(run: Run, checkpoint: Path) -> None:
    with dcp.open(checkpoint) as old:
        before = {name: tensor[...] for name, tensor in old.items()}
    args = ("reshard", checkpoint, checkpoint, "--mesh", "dp=3", "--placements", "*=S(0)")
    assert run(*args, "--overwrite").exit_code == 0
    with dcp.open(checkpoint) as new:
        assert all(torch.equal(new[name][...], tensor) for name, tensor in before.items())
        assert len(new.manifest.files) == 3


def test_damaged_source_leaves_no_checkpoint(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    flip(data_file(checkpoint), 4096 + 100)
    target = tmp_path / "target"
    result = run("reshard", checkpoint, target, *MESH, "--placements", RULES)
    assert (result.exit_code, result.stdout) == (1, "")
    assert data_file(checkpoint).name in result.stderr
    assert "bytes 4096 to " in result.stderr
    assert not (target / "manifest.json").exists()


def test_selected_renamed_converted_and_for_more_ranks(
    run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    args = ("--to-world", "3", "--select", "net", "--dtype", "*w=bf16")
    renames = ("--rename", "model/{rest*}=net/{rest*}")
    shown = run("reshard", checkpoint, target, *args, *renames, "--dry-run")
    assert shown.exit_code == 0
    assert "bfloat16, R" in shown.stdout
    assert not target.exists()
    told = document(run("reshard", checkpoint, target, *args, *renames, "--json"))
    assert told["kind"] == "reshard"
    with dcp.open(checkpoint) as old, dcp.open(target) as new:
        before = {n.replace("model/", "net/", 1): t for n, t in old.items() if n[:6] == "model/"}
        assert before.keys() == new.keys()
        assert told["num_tensors"] == len(before)
        for name, tensor in new.items():
            wanted = before[name][...]
            assert torch.equal(tensor[...], wanted.bfloat16() if name[-2:] == "/w" else wanted)
            assert str(tensor.layout).endswith("on rank=3")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "give --mesh and --placements, or --to-world"),
        (("--to-world", "2", *MESH), "give --mesh and --placements, or --to-world"),
        (MESH, "give --mesh and --placements, or --to-world"),
        (("--to-world", "2", "--dtype", "f32=float"), "not a dtype"),
        (("--to-world", "2", "--rename", "x"), "expected OLD=NEW"),
        (("--to-world", "2", "--processes", "40"), "of memory"),
        (("--to-world", "2", "--memory", "20MiB"), "of memory"),
    ],
)
def test_wrong_options(
    run: Run, checkpoint: Path, tmp_path: Path, args: tuple[str, ...], message: str
) -> None:
    result = run("reshard", checkpoint, tmp_path / "target", *args)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_source_that_is_no_checkpoint(run: Run, saved: Path, tmp_path: Path) -> None:
    args = (tmp_path / "t", "--mesh", "dp=2", "--placements", "*=R")
    assert run("reshard", saved, *args).exit_code == 3


def test_every_failing_storage_call_leaves_no_checkpoint(checkpoint: Path) -> None:
    mesh, rules = Mesh((2,)), parse_rules("*=S(0)")
    calls = FaultyStore(MemoryStore())
    dcp.reshard(checkpoint, calls, mesh, rules)
    assert len(calls.calls) > 8
    # After this one what was committed is read back, which only warns.
    last = max(call.number for call in calls.calls if call.op == "publish")
    for number in range(1, last + 1):
        objects: dict[str, bytes] = {}

        def fail(call: Call, number: int = number) -> RaiseError | None:
            return RaiseError(StorageError("broken")) if call.number == number else None

        with pytest.raises(StorageError, match="broken"):
            dcp.reshard(checkpoint, FaultyStore(MemoryStore(objects), fail), mesh, rules)
        assert "manifest.json" not in objects


_MEASURE = """
import resource, sys
from dtckpt.tools.cli import main

def reshard(source, target):
    args = ["reshard", source, target, "--mesh", "dp=2,tp=2", "--placements", "*=S(1),S(0)"]
    main(args, standalone_mode=False)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

small, large, target = sys.argv[1:]
base = reshard(small, target + "/small")
print(reshard(large, target + "/large") - base, "torch" in sys.modules)
"""


def test_memory_is_bounded(saved: Path, tmp_path: Path) -> None:
    mebi = 1 << 20
    dcp.save({"u": torch.ones(2, 13 * mebi), "v": torch.ones(13 * mebi, 2)}, tmp_path / "large")
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors")) > 200 * mebi
    args = [sys.executable, "-c", _MEASURE, saved / "step-100", tmp_path / "large", tmp_path]
    done = subprocess.run(args, capture_output=True, text=True, check=True, env=dict(os.environ))
    grown, has_torch = done.stdout.splitlines()[-1].split()
    assert int(grown) < 150
    assert has_torch == "False"
