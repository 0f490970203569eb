"""Placements that nobody knows do all that those of the library do.

``Aligned`` is the one of dtensor/geometry/placements/README.md, which is all there is of it.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed.tensor as torch_tensor

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint import parse_rules
from dtckpt.dtensor import (
    DeviceMesh,
    DTensor,
    HeadTail,
    Layout,
    Mesh,
    Packed,
    Partial,
    Placement,
    Ragged,
    Replicate,
    Shard,
    SplitPlacement,
    distribute_tensor,
    explain,
    parse_placements,
    placements_from_torch,
    strict,
    to_torch,
)
from dtckpt.dtensor.debug import visualize_sharding
from dtckpt.dtensor.geometry.placement import parse_placement
from dtckpt.errors import Corrupt, PlacementError
from dtckpt.storage import LocalStore, MemoryStore

from ..checkpoint.files.forging import manifest_of, objects_of, with_manifest
from ..commands import run_command
from ..ranks import run_ranks
from .ops.some_cases import check_some
from .rank_meshes import assert_holds, collectives, run_on_mesh, scattered

README = Path(__file__).parents[2] / "dtensor" / "geometry" / "placements" / "README.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def worked_example() -> dict[str, Any]:
    """Run the blocks of the page as one module."""
    namespace: dict[str, Any] = {"__name__": "readme_of_placements"}
    for block in BLOCK.findall(README.read_text()):
        exec(compile(block, str(README), "exec", dont_inherit=True), namespace)
    return namespace


Aligned: Any = worked_example()["Aligned"]


@dataclass(frozen=True, slots=True)
class Growing(SplitPlacement):
    """Pieces that grow with the coordinate: 1, 2, 3, ... parts of a dim; the last gets the rest."""

    form: ClassVar[str] = "Growing(dim)"

    def sizes_over(self, size: int, count: int) -> tuple[int, ...]:
        part = size // (count * (count + 1) // 2)
        sizes = [part * (i + 1) for i in range(count)]
        return (*sizes[:-1], size - sum(sizes[:-1]))


NEW: list[Any] = [Aligned(0, 4), Growing(0)]
SIZES = {Aligned(0, 4): (4, 4, 2, 0), Growing(0): (1, 2, 3, 4)}
OTHERS: list[Placement] = [
    Shard(0),
    Shard(1),
    Ragged(0, (0, 7, 1, 2)),
    Replicate(),
    Partial(),
    Partial("max"),
]
WHOLE = torch.arange(60.0).view(10, 6)
each = pytest.mark.parametrize("new", NEW, ids=str)


def parts_of(sizes: tuple[int, ...]) -> list[torch.Tensor]:
    """The rows of every rank, by NumPy."""
    cut = np.split(WHOLE.numpy(), np.cumsum(sizes)[:-1])
    return [torch.from_numpy(part) for part in cut]


@each
def test_tensors_are_cut_as_it_says(new: Any) -> None:
    def body(mesh: DeviceMesh) -> DTensor:
        tensor = distribute_tensor(WHOLE, mesh, [new])
        assert tensor.placements == (new,)
        assert torch.equal(tensor.full_tensor(), WHOLE)
        again = DTensor.from_local(tensor.to_local(), mesh, [new], run_check=True)
        assert again.shape == WHOLE.shape
        return tensor

    for tensor, part in zip(run_on_mesh((4,), body), parts_of(SIZES[new]), strict=True):
        assert torch.equal(tensor.to_local(), part)


@each
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)])
def test_any_placement_to_it_and_back(new: Any, mesh_shape: tuple[int, ...]) -> None:
    one_axis = mesh_shape == (4,)
    others = [p for p in OTHERS if one_axis or not isinstance(p, Ragged)]
    kinds = [new, replace(new, dim=1), *others]
    pairs = [(a, b) for a, b in itertools.product(kinds, repeat=2) if new in (a, b)]

    def body(mesh: DeviceMesh) -> None:
        for source, target in pairs:
            for before, after in _along_axes(source, target, one_axis=one_axis):
                moved = scattered(WHOLE, mesh, before).redistribute(placements=after)
                assert moved.placements == Layout(mesh.layout_mesh, after, (10, 6)).placements
                assert_holds(moved, WHOLE)
        first = distribute_tensor(WHOLE, mesh, [new, *[Shard(0)] * (mesh.ndim - 1)])
        assert str(new) in str(explain(first, [Replicate()] * mesh.ndim))

    run_on_mesh(mesh_shape, body)


def _along_axes(source: Any, target: Any, *, one_axis: bool) -> list[Any]:
    if one_axis:
        return [((source,), (target,))]
    shard, whole = Shard(0), Replicate()
    return [
        ((source, whole), (whole, target)),
        ((source, shard), (target, shard)),
        ((shard, source), (whole, target)),
    ]


def test_pieces_that_are_the_same_stay_where_they_are() -> None:
    def body(mesh: DeviceMesh) -> None:
        tensor = distribute_tensor(WHOLE, mesh, [Aligned(0, 4)])
        with collectives() as seen:
            moved = tensor.redistribute(placements=[Ragged(0, (4, 4, 2, 0))])
            assert_holds(moved, WHOLE)
            moved = moved.redistribute(placements=[Aligned(0, 2)])  # 4, 4, 2, 0 as well
            assert_holds(moved, WHOLE)
        assert seen == []

    run_on_mesh((4,), body)


@pytest.mark.filterwarnings("ignore:index_reduce", "ignore:The reduce argument")
@each
def test_operators_are_right_or_move_it(new: Any) -> None:
    """Values and gradients of every case, on one mesh for one placement and on the other for it."""
    kind, mesh_shape = (Growing(0), (3,)) if new == Growing(0) else (Aligned(0, 2), (2, 2))
    first, step = NEW.index(new), len(NEW)
    check_some(mesh_shape, lambda dim: replace(kind, dim=dim), first=first, step=step)


def test_operators_keep_it() -> None:
    def body(mesh: DeviceMesh) -> None:
        new = Aligned(0, 4)
        tensor: Any = distribute_tensor(WHOLE, mesh, [new])
        weight: Any = distribute_tensor(WHOLE[:6, :4].contiguous(), mesh, [Replicate()])
        with strict(), collectives() as seen:
            assert (tensor * 2 + 1).placements == (new,)
            assert (tensor + scattered(WHOLE, mesh, [new])).placements == (new,)
            assert (tensor @ weight).placements == (new,)
            assert tensor.sum(1).placements == (new,)
            assert tensor.sum(0).placements == (Partial(),)
            assert tensor.t().placements == (Aligned(1, 4),)
            assert tensor.view(1, 10, 6).placements == (Aligned(1, 4),)
            joined = tensor.view(60)  # cut at the same elements
            assert joined.placements == (Ragged(0, (24, 24, 12, 0)),)
            assert tensor[1:].placements == (Ragged(0, (3, 4, 2, 0)),)
            tensor.mul_(1)
            assert tensor.placements == (new,)
        assert seen == []
        assert_holds(joined, WHOLE.view(60))
        assert_holds(tensor[1:], WHOLE[1:])
        assert_holds(tensor @ weight, WHOLE @ WHOLE[:6, :4])

    run_on_mesh((4,), body)


@each
def test_texts_and_json(new: Any) -> None:
    assert parse_placement(str(new)) == new
    assert parse_placements(f"{new}, R, {replace(new, dim=-1)}")[2] == replace(new, dim=-1)
    assert parse_rules(f"model/*={new},S(1)")[0].placements == (new, Shard(1))
    layout = Layout(Mesh((4, 2)), (new, Shard(1)), (10, 6))
    again = Layout.from_json(json.loads(json.dumps(layout.to_json())))
    assert again == layout
    assert hash(again) == hash(layout)
    assert Layout(Mesh((4,)), (replace(new, dim=-2),), (10, 6)).placements == (new,)
    assert new != Shard(0)
    assert new.is_shard(0)
    assert not new.is_shard(1)
    assert not new.is_partial()


def test_pictures() -> None:
    assert visualize_sharding(((10,), "dp=4", "Aligned(0:4)"), show=False) == (
        "[10] (Aligned(0:4)) on dp=4\n"
        "  dp=4  Aligned(0:4): cuts dim 0 into 4, 4, 2, 0\n"
        "+-------+-----+-----+------+-----------+\n"
        "| dim 0 | 0:4 | 4:8 | 8:10 | 10:10     |\n"
        "+-------+-----+-----+------+-----------+\n"
        "| rank  | 0   | 1   | 2    | 3 (empty) |\n"
        "+-------+-----+-----+------+-----------+"
    )


@each
def test_checkpoints_of_it_and_into_it(new: Any) -> None:
    kinds = [new, Shard(0), Shard(1), Ragged(0, (0, 7, 1, 2)), Replicate()]
    pairs = [*((new, kind) for kind in kinds), *((kind, new) for kind in kinds)]
    stores = [MemoryStore() for _ in pairs]

    def body(rank: int, group: Any) -> None:
        for (source, target), store in zip(pairs, stores, strict=True):
            saved = distribute_tensor(WHOLE, _mesh(rank), [source], src_data_rank=None)
            dcp.save({"w": saved}, store, process_group=group)
            zeros = torch.zeros(10, 6)
            loaded = distribute_tensor(zeros, _mesh(rank), [target], src_data_rank=None)
            dcp.load({"w": loaded}, store, process_group=group)
            assert loaded.placements == (target,)
            assert_holds(loaded, WHOLE)

    run_ranks(4, body)
    for store in stores:
        with dcp.open(store) as opened:
            assert torch.equal(opened["w"][...], WHOLE)


def _mesh(rank: int) -> DeviceMesh:
    return DeviceMesh("cpu", Mesh((4,)), rank=rank)


def test_files_are_read_where_nobody_has_the_class(tmp_path: Path) -> None:
    def save(rank: int, group: Any) -> None:
        tensor = distribute_tensor(WHOLE, _mesh(rank), [Aligned(0, 4)], src_data_rank=None)
        dcp.save({"w": tensor}, LocalStore(tmp_path / "a"), process_group=group)

    run_ranks(4, save)
    assert "Ragged(0:4,4,2,0)" in run_command("inspect", tmp_path / "a")
    run_command(
        "reshard",
        tmp_path / "a",
        tmp_path / "b",
        "--mesh",
        "dp=2",
        "--placements",
        "*=Aligned(1:4)",
    )
    assert "Ragged(1:4,2)" in run_command("inspect", tmp_path / "b")
    run_command("verify", tmp_path / "b")


def test_files_that_name_it_are_none_of_the_format() -> None:
    store = MemoryStore()
    dcp.save({"w": WHOLE}, store, no_dist=True)
    objects = objects_of(store)
    manifest = manifest_of(objects)
    manifest["tensors"]["w"]["placements"] = ["Aligned(0:4)"]
    with pytest.raises(Corrupt, match=r"'w' lies by .*Aligned.*, not all of the format"):
        dcp.open(MemoryStore(with_manifest(objects, manifest)))


def test_torch_has_none_of_it() -> None:
    tensor = DTensor.from_local(WHOLE, DeviceMesh("cpu", Mesh((1,)), rank=0), [Aligned(0, 4)])
    with pytest.raises(PlacementError, match=r"torch has no aligned placement: \(Aligned\(0:4\)\)"):
        to_torch(tensor)


def test_what_does_not_say_what_it_cuts_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"Silent needs a form.*and sizes_over"):

        class Silent(SplitPlacement):  # pyright: ignore[reportUnusedClass]
            form: ClassVar[str] = "Silent(dim)"

    with pytest.raises(PlacementError, match="does not say how it splits"):
        SplitPlacement(0).sizes_over(8, 2)
    with pytest.raises(PlacementError, match=r"text form S\(dim\): S is that of .*shard\.Shard"):

        class Other(Growing):  # pyright: ignore[reportUnusedClass]
            form: ClassVar[str] = "S(dim)"

    with pytest.raises(PlacementError, match="dim of a Growing must be an int"):
        Growing("0")  # pyright: ignore[reportArgumentType]
    with pytest.raises(PlacementError, match=r"not a placement: 'Aligned\(0:4,4\)'; expected S"):
        parse_placement("Aligned(0:4,4)")
    with pytest.raises(PlacementError, match=r"If Unheard is a class of yours, import its module"):
        parse_placement("Unheard(0)")


@pytest.mark.parametrize("base", [Shard, Replicate, Partial])
def test_kinds_that_are_known_everywhere_have_no_subclasses(base: type) -> None:
    with pytest.raises(PlacementError, match=rf"Own cannot be derived from {base.__name__}"):
        type("Own", (base,), {"form": "Own(dim)", "sizes_over": lambda *_: (1, 3)})  # pyright: ignore


@pytest.mark.parametrize("base", [Ragged, HeadTail, Packed, Growing])
def test_a_derived_placement_has_a_text_of_its_own(base: type) -> None:
    with pytest.raises(PlacementError, match="Own needs a form of its own"):
        type("Own", (base,), {"sizes_over": lambda *_: (1, 3)})  # pyright: ignore


def test_a_placement_that_is_no_dataclass_is_refused() -> None:
    class Loose(SplitPlacement):
        form: ClassVar[str] = "Loose(dim)"

        def __init__(self, dim: int, first: int) -> None:
            super().__init__(dim)
            object.__setattr__(self, "first", first)

        def sizes_over(self, size: int, count: int) -> tuple[int, ...]:
            first: int = vars(self)["first"]
            return (first, size - first)

    assert Loose(0, 1) == Loose(0, 3)
    with pytest.raises(PlacementError, match="Loose must be a dataclass"):
        Layout(Mesh((2,)), (Loose(0, 3),), (4,))


@pytest.mark.parametrize("name", ["Shard", "Replicate", "Partial"])
def test_classes_derived_from_torchs_are_refused(name: str) -> None:
    base: Any = getattr(torch_tensor, name)
    derived = type("Derived", (base,), {})
    placement = derived(0) if name == "Shard" else derived()
    with pytest.raises(PlacementError, match="Derived does not say what a rank holds"):
        placements_from_torch([placement], (2,), 1)


def test_sizes_that_do_not_add_up_are_refused() -> None:
    @dataclass(frozen=True)
    class Short(SplitPlacement):
        form: ClassVar[str] = "Short(dim)"

        def sizes_over(self, size: int, count: int) -> tuple[int, ...]:
            return (1,) * count

    with pytest.raises(PlacementError, match=r"Short\(0\) on axis .* needs 2 sizes that sum to 5"):
        Layout(Mesh((2,)), (Short(0),), (5,))

    @dataclass(frozen=True)
    class Halved(SplitPlacement):
        form: ClassVar[str] = "Halved(dim)"

        def sizes_over(self, size: int, count: int) -> tuple[int, ...]:
            return (size / 2,) * 2  # pyright: ignore[reportReturnType]

    with pytest.raises(PlacementError, match=r"must be cut into a tuple of ints, got \(2.0, 2.0\)"):
        Layout(Mesh((2,)), (Halved(0),), (4,))
    with pytest.raises(PlacementError, match=r"Aligned\(0:0\) needs a multiple"):
        parse_placement("Aligned(0:0)")
    with pytest.raises(PlacementError, match="only one axis may cut dim 0"):
        Layout(Mesh((2, 2)), (Aligned(0, 2), Growing(0)), (5,))
