from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint.timing.costs import Span

from .conftest import Run, data_file, document, flip


def test_text_shows_structure_tensors_values_and_files(run: Run, saved: Path) -> None:
    result = run("inspect", saved / "step-100")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    for line in (
        f"checkpoint {saved / 'step-100'}",
        "format dtckpt 1",
        "tensors 12, 36.7 KiB",
        'metadata {"loss": 1.5}',
        "\u2502 \u251c\u2500\u2500 embed.weight float32[96, 40] 15.0 KiB R on rank=1",
        "\u2502 \u251c\u2500\u2500 layers list of 3",
        "\u251c\u2500\u2500 betas (0.9, 0.95)",
        "\u251c\u2500\u2500 rng per rank",
        "\u2514\u2500\u2500 seeds (3, [0, 1, 2, ... 50 items])",
        "\u251c\u2500\u2500 loss nan",
        "\u251c\u2500\u2500 blob 4 bytes",
        "\u251c\u2500\u2500 dtype torch.bfloat16",
        "\u2514\u2500\u2500 empty {}",
    ):
        assert any(found.endswith(line) for found in lines), line
    assert data_file(saved / "step-100").name in result.stdout


def test_output_into_a_pipe_is_plain_and_whole(run: Run, saved: Path) -> None:
    text = run("inspect", saved / "step-100").stdout
    assert "\x1b" not in text
    assert "'a\\x1b[31mb'" in text
    assert all(line == line.rstrip() for line in text.splitlines())


@pytest.mark.parametrize("columns", [20, 60, 80, 120])
def test_narrow_output_loses_nothing(run: Run, saved: Path, columns: int) -> None:
    text = run("inspect", saved / "step-100", env={"COLUMNS": str(columns)}).stdout
    for part in ("embed.weight", "float32[96, 40]", "R on rank=1", "param_groups", "bfloat16[17]"):
        assert part in text
    assert ("dtype and shape" in text) == (columns >= 80)


def test_colours_follow_the_environment(run: Run, saved: Path) -> None:
    forced = {"FORCE_COLOR": "1", "TERM": "xterm"}
    assert "\x1b[36m" in run("inspect", saved / "step-100", env=forced).stdout
    assert (
        "\x1b[36m" not in run("inspect", saved / "step-100", env=forced | {"NO_COLOR": "1"}).stdout
    )


def test_json_has_everything(run: Run, saved: Path) -> None:
    found = document(run("inspect", saved / "step-100", "--json"))
    with dcp.open(saved / "step-100") as opened:
        manifest = opened.manifest
        assert found["tensors"].keys() == set(opened)
    assert found["kind"] == "checkpoint"
    assert found["save_id"] == manifest.save_id
    assert found["tree"] == manifest.tree
    assert found["metadata"] == {"loss": 1.5}
    assert found["tensors"]["model/embed.weight"] == {
        "dtype": "float32",
        "shape": [96, 40],
        "bytes": 15360,
        "same_as": None,
        "layout": {"mesh": 0, "placements": ["R"]},
    }
    assert found["meshes"] == [{"shape": [1], "axes": ["rank"]}]
    assert found["values"]["step"] == 12
    assert found["values"]["optim/param_groups/0/betas"] == {"tuple": [0.9, 0.95]}
    size = data_file(saved / "step-100").stat().st_size
    assert [(file["rank"], file["bytes"]) for file in found["files"]] == [(0, size)]
    assert (saved / "step-100" / found["files"][0]["path"]).is_file()


def test_names_and_values_are_selected(run: Run, saved: Path) -> None:
    options = ("model/*/w", "step")
    text = run("inspect", saved / "step-100", *options).stdout
    assert "3 of 12 tensors match" in text
    assert "step" in text
    assert "embed" not in text
    assert "optim" not in text
    found = document(run("inspect", saved / "step-100", "--json", *options))
    assert list(found["tensors"]) == [f"model/layers/{i}/w" for i in range(3)]
    assert found["values"] == {"step": 12}
    assert found["num_tensors"] == 12
    assert "betas" not in run("inspect", saved / "step-100", "--no-values").stdout
    assert "values" not in document(run("inspect", saved / "step-100", "--json", "--no-values"))


def test_a_pattern_that_fits_nothing_is_an_error(run: Run, saved: Path) -> None:
    for options in ((), ("--json",), ("--layout",)):
        result = run("inspect", saved / "step-100", "modle/*", *options)
        assert (result.exit_code, "'modle/*' selects nothing" in result.stderr) == (3, True)


def test_a_run_lists_its_committed_checkpoints(run: Run, saved: Path) -> None:
    text = run("inspect", saved).stdout
    assert "2 checkpoints" in text
    assert text.splitlines()[-1] == f"Look into one: dtckpt inspect {saved / 'step-100'}"
    found = document(run("inspect", saved, "--json"))
    assert found["kind"] == "run"
    assert [(s["number"], s["name"]) for s in found["steps"]] == [
        (20, "step-20"),
        (100, "step-100"),
    ]


def test_what_is_asked_of_a_checkpoint_is_not_answered_of_a_run(run: Run, saved: Path) -> None:
    for asked in (("model",), ("--tensor", "a"), ("--layout",), ("--timing", saved)):
        result = run("inspect", saved, *asked)
        assert (result.exit_code, result.stdout) == (3, "")
        assert "is no checkpoint, but a directory of them" in result.stderr


def test_damaged_manifest(run: Run, checkpoint: Path) -> None:
    flip(checkpoint / "manifest.json", 700)
    result = run("inspect", checkpoint)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"Error: {checkpoint}/manifest.json: ")


def test_no_tensors_at_all(run: Run, tmp_path: Path) -> None:
    dcp.save({"step": 1, "when": {"day": "monday"}}, tmp_path)
    assert "monday" in run("inspect", tmp_path).stdout
    dcp.save({}, tmp_path, overwrite=True)
    assert "tensors" in run("inspect", tmp_path).stdout


def test_many_files_are_summed_up(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    rules = ("--mesh", "dp=20", "--placements", "*=S(0)")
    assert run("reshard", checkpoint, tmp_path / "many", *rules).exit_code == 0
    text = run("inspect", tmp_path / "many").stdout
    assert "balance     20 ranks hold " in text
    assert "            20 files have " in text
    told = document(run("inspect", tmp_path / "many", "--json"))["balance"]
    assert (told["ranks"]["num"], told["files"]["num"]) == (20, 20)
    assert told["ranks"]["most_over_mean"] >= 1
    assert "mesh        dp=20: 20 ranks" in text


def test_sharded_layouts_and_hostile_names(run: Run, tmp_path: Path) -> None:
    dcp.save({"w\x1b[2J": torch.zeros(4, 4), "a[0]": torch.zeros(1)}, tmp_path / "a")
    shared = torch.zeros(3)
    dcp.save({"t\x1b]0;x": shared, "u": shared}, tmp_path / "tied")
    text = run("inspect", tmp_path / "tied").stdout
    assert "tied to t\\x1b]0;x" in text
    assert "\x1b" not in text
    rules = ("--mesh", "dp=2,tp=2", "--placements", "w*=S(0)@1,S(0)@0")
    assert run("reshard", tmp_path / "a", tmp_path / "b", *rules).exit_code == 0
    text = run("inspect", tmp_path / "b").stdout
    assert "w\\x1b%5B2J" in text
    assert "S(0)@1,S(0)@0 on dp=2,tp=2" in text
    assert "R,R on dp=2,tp=2" in text


def test_ties_and_what_an_incremental_checkpoint_needs(run: Run, tmp_path: Path) -> None:
    weight = torch.ones(30, 4)
    state = {"head": weight, "embedding": weight, "step": torch.zeros(2)}
    dcp.save(state, tmp_path / "step-1")
    dcp.save(state | {"step": torch.ones(2)}, tmp_path / "step-2", base=tmp_path / "step-1")
    text = run("inspect", str(tmp_path / "step-2")).stdout
    assert "step-1 beside it, 1 file" in text
    assert "tied to head" in text
    told = document(run("inspect", "--json", str(tmp_path / "step-2")))
    assert told["tensor_bytes"] == 30 * 4 * 4 + 8
    assert told["tensors"]["embedding"]["same_as"] == "head"
    (borrowed,) = told["borrowed"]
    assert borrowed["checkpoint"] == "step-1"
    assert (tmp_path / "step-1" / borrowed["path"]).stat().st_size == borrowed["bytes"]


def test_layout_shows_which_rank_held_what(run: Run, saved: Path) -> None:
    result = run("inspect", saved / "step-100", "optim/*", "--layout")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "[96, 40] (R) on rank=1" in result.stdout
    assert "| 0:96          | 0    |" in result.stdout
    assert "embed" not in result.stdout
    assert "\x1b" not in result.stdout
    coloured = run("inspect", saved / "step-100", "--layout", env={"FORCE_COLOR": "1"}).stdout
    assert "\x1b[30;46m" in coloured
    assert "no tensor of" in run("inspect", saved / "step-100", "--layout", "*/betas").stdout
    refused = run("inspect", saved / "step-100", "--layout", "--json")
    assert refused.exit_code == 2
    assert "--layout draws for people" in refused.stderr


def test_values_of_tensors_are_summed_up(run: Run, tmp_path: Path) -> None:
    values = torch.arange(256.0)
    values[-1] = torch.nan
    dcp.save({"m": {"a": values, "b": torch.ones(2, 3, dtype=torch.int64)}}, tmp_path)
    text = run("inspect", tmp_path, "--tensor", "m", env={"COLUMNS": "80"}).stdout
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for line in (
        "values 256 of float32[256]",
        "range 0 to 254",
        "mean 127, deviation 73.6116",
        "special 1 zero, 1 NaN, 0 +Inf, 0 -Inf",
        "248 7 " + "\u2588" * 35,
        "values 6 of int64[2, 3]",
    ):
        assert line in lines, line
    assert max(map(len, text.splitlines())) <= 80
    found = document(run("inspect", tmp_path, "--tensor", "m/b", "--json"))
    assert found["kind"] == "statistics"
    assert found["tensors"]["m/b"]["mean"] == 1
    assert found["tensors"]["m/b"]["histogram"] == {"edges": [1, 1], "counts": [6]}
    missing = run("inspect", tmp_path, "--tensor", "m/c")
    assert missing.exit_code == 3
    assert "selects nothing; did you mean" in missing.stderr
    assert run("inspect", tmp_path, "m", "--tensor", "m").exit_code == 2


def test_statistics_are_of_what_a_mapping_makes(run: Run, tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2), "b": torch.zeros(2)}, tmp_path / "c")
    table = dcp.MappingTable([dcp.Move("a", "c")])
    (tmp_path / "table").write_bytes(table.to_bytes())
    options = ("--mapping", tmp_path / "table", "--tensor", "c", "--json")
    assert document(run("inspect", tmp_path / "c", *options))["tensors"]["c"]["mean"] == 1
    found = document(run("inspect", tmp_path / "c", *options[:2], "--json"))
    assert (found["tensor_bytes"], found["tensors"]["c"]["same_as"]) == (16, None)


def test_ranks_and_files_alike_are_one_line_however_many(run: Run, tmp_path: Path) -> None:
    dcp.save({"a": torch.zeros(512, 4)}, tmp_path / "a")
    rules = ("--mesh", "dp=128", "--placements", "*=S(0)")
    assert run("reshard", tmp_path / "a", tmp_path / "b", *rules).exit_code == 0
    text = run("inspect", tmp_path / "b", env={"COLUMNS": "80"}).stdout
    assert "balance     128 ranks hold 64 B each" in text
    assert "00000.safetensors to 00127.safetensors  128 x " in text
    assert len(text.splitlines()) < 20
    assert max(map(len, text.splitlines()[1:])) <= 80  # the first one is the path


def test_timing_is_shown_rank_by_rank(run: Run, saved: Path, tmp_path: Path) -> None:
    def cost(rank: int, ranks: int) -> dcp.Costs:
        spans = (
            Span(phase="plan", started_at=1000.0, seconds=0.001 * (rank + 1)),
            Span(phase="write", started_at=1001.0, seconds=2.0 + rank),
        )
        return dcp.Costs(
            kind="save",
            url=str(saved / "step-100"),
            rank=rank,
            host="here",
            num_ranks=ranks,
            started_at=1000.0,
            seconds=4.0 + rank,
            stall_seconds=0.5,
            phases=(),
            spans=spans,
            summary=(),
        )

    dcp.write_trace(tmp_path / "three.json", [cost(rank, 3) for rank in range(3)])
    asked = ("inspect", saved / "step-100", "--timing", tmp_path / "three.json")
    text = run(*asked, env={"COLUMNS": "80"}).stdout
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0].endswith("by 3 ranks: 6.00 s, the training was held up for 500 ms")
    assert "write 3 2.00 s 3.00 s 4.00 s rank 2" in lines
    assert lines[-4:] == [
        "rank in all plan write",
        "2 6.00 s 3.00 ms 4.00 s",
        "1 5.00 s 2.00 ms 3.00 s",
        "0 4.00 s 1.00 ms 2.00 s",
    ]
    assert "rank 2: 6.00 s; plan 3.00 ms, write 4.00 s" in run(*asked, env={"COLUMNS": "20"}).stdout
    told = document(run(*asked, "--json"))
    assert [rank["seconds"] for rank in told["ranks"]] == [4, 5, 6]
    dcp.write_trace(tmp_path / "many.json", [cost(rank, 100) for rank in range(100)])
    many = run("inspect", saved / "step-100", "--timing", tmp_path / "many.json").stdout
    assert "... and 84 that were done before these" in many
    wrong = run("inspect", saved / "step-20", "--timing", tmp_path / "three.json")
    assert wrong.exit_code == 2
    assert "no save of" in wrong.stderr
