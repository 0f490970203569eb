"""Pictures of layouts: what they show, and how much."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.dtensor import (
    Box,
    DeviceMesh,
    IrregularLayout,
    Layout,
    Mesh,
    Partial,
    Ragged,
    Replicate,
    Shard,
)
from dtckpt.dtensor.debug import visualize_sharding
from dtckpt.errors import LayoutMismatch, PlacementError

from ..rank_meshes import run_on_mesh, scattered


def cells(text: str) -> list[list[str]]:
    """The rows of the tables in a drawing, headers included."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def drawn(shape: Any, mesh: Any, placements: Any, **options: Any) -> list[list[str]]:
    return cells(visualize_sharding((shape, mesh, placements), show=False, **options))


def test_two_dims_are_a_table_of_ranks() -> None:
    text = visualize_sharding(((5, 4), "dp=2,tp=2", "S(0),S(1)"), show=False)
    assert text == (
        "[5, 4] (S(0), S(1)) on dp=2,tp=2\n"
        "  dp=2  S(0): cuts dim 0\n"
        "  tp=2  S(1): cuts dim 1\n"
        "+---------------+-----+-----+\n"
        "| dim 0 \\ dim 1 | 0:2 | 2:4 |\n"
        "+---------------+-----+-----+\n"
        "| 0:3           | 0   | 1   |\n"
        "+---------------+-----+-----+\n"
        "| 3:5           | 2   | 3   |\n"
        "+---------------+-----+-----+"
    )


def test_fewer_dims() -> None:
    assert drawn((7,), (3,), "S(0)") == [["dim 0", "0:3", "3:6", "6:7"], ["rank", "0", "1", "2"]]
    assert drawn((), (2, 2), "R,P(sum)") == [["rank", "(0 + 1), (2 + 3)"]]


@pytest.mark.parametrize(
    ("placements", "expected"),
    [
        ("R,R", "(0, 1), (2, 3)"),
        ("P(sum),P(sum)", "(0 + 1) + (2 + 3)"),
        ("P(product),R", "(0, 1) * (2, 3)"),
        ("R,P(max)", "max(0, 1), max(2, 3)"),
    ],
)
def test_copies_and_terms_are_told_apart(placements: str, expected: str) -> None:
    assert drawn((2, 2), (2, 2), placements)[1][1] == expected


def test_partial_and_shards_together() -> None:
    assert drawn((4,), "dp=2,tp=2", "P(avg),S(0)")[1] == ["rank", "avg(0, 2)", "avg(1, 3)"]


def test_empty_parts_are_said_to_be() -> None:
    assert drawn((2,), (4,), "S(0)")[1] == ["rank", "0", "1", "2 (empty)", "3 (empty)"]
    assert drawn((0, 3), (2,), "S(0)")[1:] == [["0:0", "0 (empty)"], ["0:0", "1 (empty)"]]


def test_ragged_parts_have_their_sizes() -> None:
    text = visualize_sharding(((8,), (4,), [Ragged(0, (3, 0, 4, 1))]), show=False)
    assert cells(text)[0] == ["dim 0", "0:3", "3:3", "3:7", "7:8"]
    assert cells(text)[1] == ["rank", "0", "1 (empty)", "2", "3"]
    assert "axis0=4  Ragged(0): cuts dim 0 into 3, 0, 4, 1" in text


def test_orders_of_cuts_are_shown() -> None:
    in_order = drawn((8,), (2, 2), "S(0),S(0)")[1]
    turned = drawn((8,), (2, 2), "S(0)@1,S(0)@0")[1]
    assert in_order == ["rank", "0", "1", "2", "3"]
    assert turned == ["rank", "0", "2", "1", "3"]
    text = visualize_sharding(((8,), (2, 2), "S(0)@1,S(0)@0"), show=False)
    assert "axis0=2  S(0)@1: cuts dim 0, as number 2 of 2" in text


def test_more_dims_are_panels() -> None:
    text = visualize_sharding(((2, 4, 6), (2, 2, 2), "S(0),S(1),S(2)"), show=False)
    assert [line for line in text.splitlines() if line.startswith("[")][1:] == [
        "[0:1, :, :]",
        "[1:2, :, :]",
    ]
    rows = cells(text)
    assert [row[1:] for row in rows if row[0] in ("0:2", "2:4")] == [
        ["0", "1"],
        ["2", "3"],
        ["4", "5"],
        ["6", "7"],
    ]


def test_every_part_of_random_layouts_is_where_the_layout_says() -> None:
    mesh = Mesh((2, 3))
    for placements in ("S(0),S(1)", "S(1),S(1)", "R,S(0)", "S(0)@1,S(0)@0", "P(sum),S(1)"):
        triple = ((5, 7), mesh, placements)
        layout = Layout(mesh, tuple(_parsed(placements)), (5, 7))
        rows = drawn(*triple)
        for row in rows[1:]:
            for band, text in zip(rows[0][1:], row[1:], strict=True):
                spans = [tuple(map(int, part.split(":"))) for part in (row[0], band)]
                box = Box(tuple(s for s, _ in spans), tuple(e - s for s, e in spans))
                for rank in map(int, re.findall(r"\d+", text.replace("(empty)", ""))):
                    assert layout.box(mesh.coordinate(rank) or ()) == box


def _parsed(placements: str) -> Any:
    from dtckpt.dtensor import parse_placements

    return parse_placements(placements)


def test_irregular_layouts() -> None:
    boxes = ((0, Box((0, 0), (3, 4))), (1, Box((3, 0), (1, 2))), (2, Box((3, 2), (1, 2))))
    layout = IrregularLayout((4, 4), (*boxes, (5, Box((3, 2), (1, 2)))))
    assert cells(visualize_sharding(layout, show=False)) == [
        ["dim 0 \\ dim 1", "0:2", "2:4"],
        ["0:3", "0", "0"],
        ["3:4", "1", "2, 5"],
    ]


def test_thousands_of_ranks_are_bounded_and_what_is_left_out_is_counted() -> None:
    start = time.process_time()
    layouts: list[Any] = [
        ((1 << 20, 1 << 16), "pp=16,dp=64,tp=16", "R,S(0),S(1)"),
        ((1 << 20, 64, 64), "dp=16384", "S(0)"),
        ((16384,), "dp=16384", "P(sum)"),
        ((16384, 4), "dp=16384", [Ragged(0, (1,) * 16384)]),
    ]
    for layout in layouts:
        for form in ("text", "rich", "svg"):
            assert len(visualize_sharding(layout, form=form, show=False)) < 80_000  # type: ignore[arg-type]
    assert time.process_time() - start < 20
    text = visualize_sharding(layouts[0], show=False)
    assert "not shown: 49 of 64 rows of parts, 9 of 16 columns of parts" in text
    assert cells(text)[-1][0] == f"{63 << 14}:{64 << 14}"
    assert "not shown: 16,377 of 16,384 panels" in visualize_sharding(layouts[1], show=False)
    assert cells(visualize_sharding(layouts[2], show=False))[1][1] == "0 + 1 + ... + 16383"


def test_limits_are_the_callers() -> None:
    rows = drawn((9, 9), "a=9", "S(0)", max_rows=5)
    assert [row[0] for row in rows[1:]] == ["0:1", "1:2", "...", "7:8", "8:9"]
    with pytest.raises(ValueError, match="at least 3"):
        drawn((9, 9), "a=9", "S(0)", max_rows=2)


def test_colours_are_of_ranks() -> None:
    text = visualize_sharding(((4, 4), (2, 2), "S(0),R"), use_rich=True, show=False)
    colours = re.findall(r"\x1b\[30;(\d+)m", text)
    assert len(set(colours)) == 2
    assert text == visualize_sharding(((4, 4), (2, 2), "S(0),R"), form="rich", show=False)


def test_svg_is_to_scale_and_well_formed() -> None:
    text = visualize_sharding(
        {"a<b>": ((8,), (3,), [Ragged(0, (1, 0, 7))])}, "h & m", form="svg", show=False
    )
    root = ElementTree.fromstring(text)
    rects = [element.attrib for element in root.iter() if element.tag.endswith("rect")][1:]
    widths = [float(rect["width"]) for rect in rects]
    assert widths[2] == pytest.approx(7 / 8 * 640)
    assert widths[1] < widths[0] < widths[2]
    assert rects[1]["fill"] == "none"
    assert len({rects[0]["fill"], rects[2]["fill"]}) == 2
    ends = [float(rect["x"]) + float(rect["width"]) for rect in rects]
    assert ends[:2] == [pytest.approx(float(rect["x"]), abs=0.2) for rect in rects[1:]]
    assert ends[-1] <= float(root.attrib["width"])
    texts = [element.text or "" for element in root.iter() if element.tag.endswith("text")]
    assert "h & m" in texts
    assert any(text.startswith("a<b>: [8] (Ragged(0)) on") for text in texts)


def test_it_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    text = visualize_sharding(((4,), (2,), "S(0)"), "mine")
    assert capsys.readouterr().out == text + "\n"
    assert text.startswith("mine\n\n[4] (S(0))")
    visualize_sharding(((4,), (2,), "S(0)"), form="svg")
    visualize_sharding(((4,), (2,), "S(0)"), show=False)
    assert capsys.readouterr().out == ""


def test_tensors_of_ours_and_of_open_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def body(mesh: DeviceMesh) -> str:
        tensor = scattered(torch.ones(4, 2), mesh, [Shard(0), Partial()])
        state = {"w": tensor.redistribute(placements=[Shard(0), Replicate()])}
        dcp.save(state, tmp_path / "c", process_group=mesh.peers((0, 1)).group)
        return visualize_sharding(tensor)

    texts = run_on_mesh((2, 2), body)
    assert len(set(texts)) == 1
    assert cells(texts[0])[1:] == [["0:2", "0 + 1"], ["2:4", "2 + 3"]]
    assert capsys.readouterr().out == texts[0] + "\n", "only the first rank prints"
    with dcp.open(tmp_path / "c") as opened:
        text = visualize_sharding(opened["w"], show=False)
    assert cells(text)[1:] == [["0:2", "0, 1"], ["2:4", "2, 3"]]


def test_tensors_of_torch() -> None:
    import torch.distributed.tensor as torch_tensor
    from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

    mesh = TorchDeviceMesh("cpu", torch.arange(4).reshape(2, 2), _init_backend=False, _rank=0)
    placements = [torch_tensor.Shard(0), torch_tensor.Replicate()]
    assert drawn((4,), mesh, placements)[1] == ["rank", "0, 1", "2, 3"]


def test_what_has_no_layout_is_refused() -> None:
    for what in (torch.ones(2), 3, "w", ((2,), (2,))):
        with pytest.raises(PlacementError, match="drawn"):
            visualize_sharding(what)
    with pytest.raises(ValueError, match="form is"):
        visualize_sharding(((2,), (2,), "R"), form="html")  # type: ignore[arg-type]


def test_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"model": {"a": torch.ones(4, 2), "b": torch.ones(4, 2)}, "c": torch.ones(3)}
    dcp.save(state, tmp_path / "c")
    text = dcp.visualize(tmp_path / "c")
    assert capsys.readouterr().out == text + "\n"
    assert "model/a, model/b: [4, 2] (R) on" in text
    assert "c: [3] (R) on" in text
    text = dcp.visualize(tmp_path / "c", "model/*", form="svg")
    assert text.startswith("<svg")
    assert "c: [3]" not in text
    assert capsys.readouterr().out == ""
    with pytest.raises(LayoutMismatch, match="select='nothing' selects nothing"):
        dcp.visualize(tmp_path / "c", "nothing")


def test_many_layouts_of_one_checkpoint_are_bounded() -> None:
    layouts = {f"w{i}": ((i + 1,), (2,), "S(0)") for i in range(40)}
    text = visualize_sharding(layouts, show=False)
    assert "not shown: 24 other layouts, of 24 tensors" in text


def test_drawing_needs_no_torch() -> None:
    code = (
        "from dtckpt.dtensor.debug import visualize_sharding as v; "
        "v(((4, 4), 'dp=2', 'S(0)')); "
        "import sys; assert 'torch' not in sys.modules and 'rich' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
