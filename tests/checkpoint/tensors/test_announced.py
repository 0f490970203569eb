"""Tensors that say themselves which boxes of a global tensor a rank holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Shard as TorchShard
from torch_checkpointing.default_metadata import DefaultShardingMetadata

import dtckpt.checkpoint as dcp
from dtckpt.dtensor import DeviceMesh, DTensor, Mesh, Partial, Shard
from dtckpt.dtensor.torch_private import strided_shard
from dtckpt.errors import LayoutMismatch, Unsavable
from dtckpt.storage import MemoryStore

from ...ranks import RanksFailed, run_ranks

WHOLE = torch.arange(24.0).reshape(8, 3)


def chunk(start: int, size: int) -> Any:
    """Some rows, as torch's protocol names a box."""
    return SimpleNamespace(offsets=torch.Size((start, 0)), sizes=torch.Size((size, 3)))


def hooked(local: Any, chunks: list[Any], hooks: str) -> Any:
    """A tensor with hooks of torch's protocol, as Megatron-FSDP puts them on."""
    if "chunks" in hooks:
        local.__create_chunk_list__ = lambda: chunks
    if "writes" in hooks:
        items = [SimpleNamespace(tensor_data=SimpleNamespace(chunk=c)) for c in chunks]

        def write_items(_name: str, _tensor: Any) -> list[Any]:
            return items

        local.__create_write_items__ = write_items
    if "shards" in hooks:
        places = {c.offsets: sum(d.sizes[0] for d in chunks[:i]) for i, c in enumerate(chunks)}
        sizes = {c.offsets: c.sizes[0] for c in chunks}
        plain = local.detach()

        def shard(index: Any) -> torch.Tensor:
            start = places[index.offset]
            return plain[start : start + sizes[index.offset]]

        local.__get_tensor_shard__ = shard
    return local


def split(rank: int, rows: list[list[tuple[int, int]]], hooks: str, fill: bool = True) -> DTensor:
    """A DTensor whose placements say one thing, and whose local tensor another."""
    pieces = [WHOLE[start : start + size] for start, size in rows[rank]]
    local = torch.cat(pieces) if fill else torch.zeros_like(torch.cat(pieces))
    mesh = DeviceMesh("cpu", Mesh((2,)), rank=rank)
    even = DTensor.from_local(torch.zeros(4, 3), mesh, [Shard(0)], shape=(8, 3))
    told = hooked(local, [chunk(*row) for row in rows[rank]], hooks)
    return DTensor(told, even._spec)  # pyright: ignore[reportPrivateUsage]


ROWS = {
    "even, turned": [[(4, 4)], [(0, 4)]],
    "uneven": [[(0, 5)], [(5, 3)]],
    "several": [[(6, 2), (0, 3)], [(3, 3)]],
    "one rank has none": [[(0, 8)], [(0, 0)]],
    "copies": [[(0, 8)], [(0, 8)]],
}


@pytest.mark.parametrize(
    ("hooks", "rows"),
    [
        pytest.param(hooks, rows, id=f"{name}-{hooks}")
        for hooks in ("chunks", "chunks writes shards", "writes shards")
        for name, rows in ROWS.items()
        if "shards" in hooks or name != "several"  # each of which must be asked for
    ],
)
def test_the_local_tensor_of_a_dtensor_counts_before_its_placements(hooks: str, rows: Any) -> None:
    store = MemoryStore()

    def run(rank: int, group: Any) -> None:
        dcp.save({"w": split(rank, rows, hooks)}, store, process_group=group)
        assert torch.equal(dcp.open(store)["w"][...], WHOLE)
        for other in ROWS.values():
            into = split(rank, other, "chunks shards", fill=False)
            dcp.load({"w": into}, store, process_group=group)
            expected = split(rank, other, "chunks shards")
            assert torch.equal(into.to_local(), expected.to_local())

    run_ranks(2, run)
    into = torch.zeros(8, 3)
    dcp.load({"w": into}, store)
    assert torch.equal(into, WHOLE)


def test_boxes_count_before_split_factors_that_tell_nothing() -> None:
    store, strided = MemoryStore(), strided_shard()
    if strided is None:
        pytest.skip("this torch has no split factors")
    placements = [TorchShard(0), strided(0, split_factor=2)]

    def made(rank: int, hooks: str) -> Any:
        local = WHOLE[2 * rank : 2 * rank + 2].clone()
        mesh: Any = DeviceMesh("cpu", Mesh((2, 2)), rank=rank)
        sizes: Any = {"shape": WHOLE.shape, "stride": WHOLE.stride()}
        value: Any = TorchDTensor.from_local(local, mesh, placements, run_check=False, **sizes)
        hooked(value._local_tensor, [chunk(2 * rank, 2)], hooks)
        return value

    def save(rank: int, group: Any) -> None:
        dcp.save({"w": made(rank, "chunks")}, store, process_group=group)

    run_ranks(4, save)
    assert torch.equal(dcp.open(store)["w"][...], WHOLE)
    with pytest.raises(Unsavable, match="split factors of dim 0 are no order of cuts"):
        dcp.load({"w": made(0, "")}, store)


def test_several_boxes_without_a_way_to_ask_for_each_are_refused() -> None:
    rows = ROWS["several"]
    with pytest.raises(RanksFailed) as failed:
        run_ranks(
            2,
            lambda rank, group: dcp.save(
                {"w": split(rank, rows, "chunks")}, MemoryStore(), process_group=group
            ),
        )
    assert "announces 2 boxes ([6:8,0:3], [0:3,0:3]), but has no" in str(failed.value.errors[0])


def test_boxes_that_do_not_fit_are_refused() -> None:
    outside = split(0, [[(6, 4)], []], "chunks")
    with pytest.raises(LayoutMismatch, match="which does not lie in its shape"):
        dcp.save({"w": outside}, MemoryStore())
    lost = split(0, [[(0, 5)], []], "chunks")
    with pytest.raises(LayoutMismatch, match="'w'"):
        dcp.save({"w": lost}, MemoryStore())
    mesh = DeviceMesh("cpu", Mesh((1,)), rank=0)
    partial = DTensor.from_local(torch.zeros(8, 3), mesh, [Partial()])
    hooked(partial.to_local(), [chunk(0, 8)], "chunks")
    with pytest.raises(Unsavable, match="terms of a reduction"):
        dcp.save({"w": partial}, MemoryStore())


def sliced(
    local: Any, shape: tuple[int, ...], boxes: list[tuple[int, int, int]], cls: Any = torch.Tensor
) -> Any:
    """A tensor as torch_checkpointing's protocol has it; boxes of (start, start in it, rows)."""
    told = local.as_subclass(cls)
    told.global_shape = shape
    told.global_offsets = tuple((start, *(0 for _ in shape[1:])) for start, _, _ in boxes)
    told.local_offsets = tuple((inner, *(0 for _ in shape[1:])) for _, inner, _ in boxes)
    told.local_sizes = tuple((rows, *shape[1:]) for _, _, rows in boxes)
    return told


class Told(torch.Tensor):
    """A subclass, as its owner would make it."""


@pytest.mark.parametrize("cls", [torch.Tensor, Told])
def test_slices_of_a_global_tensor(cls: Any) -> None:
    store = MemoryStore()
    boxes = {0: [(6, 3, 2), (0, 0, 3)], 1: [(3, 1, 3)]}
    sizes = {0: 6, 1: 5}  # some rows belong to no box

    def local(rank: int, fill: bool) -> Any:
        rows = torch.full((sizes[rank], 3), -1.0)
        for start, inner, count in boxes[rank] if fill else []:
            rows[inner : inner + count] = WHOLE[start : start + count]
        return sliced(rows, (8, 3), boxes[rank], cls)

    def run(rank: int, group: Any) -> None:
        dcp.save({"w": local(rank, True)}, store, process_group=group)
        assert torch.equal(dcp.open(store)["w"][...], WHOLE)
        into = local(rank, False)
        dcp.load({"w": into}, store, process_group=group)
        expected = local(rank, True)
        assert torch.equal(into.as_subclass(torch.Tensor), expected.as_subclass(torch.Tensor))

    run_ranks(2, run)


def test_the_protocol_is_that_of_torch_and_torch_checkpointing() -> None:
    corners = [((0, 0), (2, 2)), ((5, 1), (3, 2)), ((2, 0), (3, 1))]
    others = [((0, 2), (2, 1)), ((2, 1), (3, 2)), ((5, 0), (3, 1))]

    def local(boxes: list[Any], fill: bool) -> Any:
        """Boxes of any form, packed one below the other."""
        heights = [rows for _, (rows, _) in boxes]
        told: Any = torch.full((sum(heights), 3), -1.0)
        told.global_shape = (8, 3)
        told.global_offsets = tuple(start for start, _ in boxes)
        told.local_offsets = tuple((sum(heights[:i]), 0) for i in range(len(boxes)))
        told.local_sizes = tuple(sizes for _, sizes in boxes)
        if fill:
            for ((row, column), (rows, columns)), (at, _) in zip(
                boxes, told.local_offsets, strict=True
            ):
                part = WHOLE[row : row + rows, column : column + columns]
                told.data[at : at + rows, :columns] = part
        return told

    told = DefaultShardingMetadata.from_tensor(local(corners, True))  # their reader of it
    assert told.global_offsets == tuple(start for start, _ in corners)
    store = MemoryStore()

    def run(rank: int, group: Any) -> None:
        dcp.save({"w": local([corners, others][rank], True)}, store, process_group=group)
        into = local([others, corners][rank], False)
        dcp.load({"w": into}, store, process_group=group)
        assert torch.equal(into, local([others, corners][rank], True)), "the rest is as it was"

    run_ranks(2, run)
    assert torch.equal(dcp.open(store)["w"][...], WHOLE)


def merged(boxes: list[tuple[int, int]], first: int, *, fill: bool) -> Any:
    """Experts of (experts, rows, columns) whose local tensor has experts and rows as one dim."""
    whole = torch.arange(5 * 4 * 3.0).view(5, 4, 3)
    told: Any = torch.full((first + sum(n for _, n in boxes) * 4 + 1, 3), -1.0)
    starts = [first + 4 * sum(n for _, n in boxes[:i]) for i in range(len(boxes))]
    told.global_shape = (5, 4, 3)
    told.global_offsets = tuple((start, 0, 0) for start, _ in boxes)
    told.local_offsets = tuple((at, 0) for at in starts)
    told.local_sizes = tuple((count, 4, 3) for _, count in boxes)
    for (start, count), at in zip(boxes, starts, strict=True) if fill else ():
        told.data[at : at + 4 * count] = whole[start : start + count].flatten(0, 1)
    return told


def test_local_tensors_may_have_leading_dims_as_one() -> None:
    store = MemoryStore()
    saved = [([(3, 2), (0, 1)], 2), ([(1, 2)], 0)]
    loaded = [([(0, 4)], 1), ([(4, 1)], 3)]

    def run(rank: int, group: Any) -> None:
        dcp.save({"w": merged(*saved[rank], fill=True)}, store, process_group=group)
        assert dcp.open(store)["w"][...].flatten().tolist() == list(range(60))
        into = merged(*loaded[rank], fill=False)
        dcp.load({"w": into}, store, process_group=group)
        assert into.equal(merged(*loaded[rank], fill=True)), "the rest is as it was"

    run_ranks(2, run)


@pytest.mark.parametrize(
    ("offsets", "sizes"),
    [((0, 1), (1, 4, 3)), ((5, 0), (1, 4, 3)), ((0, 0), (2, 2, 2)), ((0, 0, 0), (1, 4, 3))],
    ids=str,
)
def test_boxes_that_do_not_lie_in_such_rows_are_refused(
    offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    told = merged([(0, 1)], 0, fill=True)[:5]
    told.global_shape, told.global_offsets = (5, 4, 3), ((0, 0, 0),)
    told.local_offsets, told.local_sizes = (offsets,), (sizes,)
    with pytest.raises(LayoutMismatch, match="does not lie in them"):
        dcp.save({"w": told}, MemoryStore())


def test_a_local_tensor_may_list_shards() -> None:
    store = MemoryStore()

    def made(rank: int, rows: list[tuple[int, int]], fill: bool) -> Any:
        told = split(rank, [rows, rows], "", fill)
        local: Any = told._local_tensor  # pyright: ignore[reportPrivateUsage]
        parts = list(local.split([size for _, size in rows]))
        shards = [
            SimpleNamespace(
                tensor=part,
                metadata=SimpleNamespace(shard_offsets=[start, 0], shard_sizes=list(part.shape)),
            )
            for (start, _), part in zip(rows, parts, strict=True)
        ]
        local.local_shards, local.sharding_spec = (lambda: shards), "any"
        return told

    def run(rank: int, group: Any) -> None:
        rows = ROWS["several"][rank]
        dcp.save({"w": made(rank, rows, True)}, store, process_group=group)
        into = made(rank, ROWS["uneven"][rank], False)
        dcp.load({"w": into}, store, process_group=group)
        assert torch.equal(into.to_local(), made(rank, ROWS["uneven"][rank], True).to_local())

    run_ranks(2, run)
    assert torch.equal(dcp.open(store)["w"][...], WHOLE)
    wrong = made(0, [(0, 8)], True)
    wrong._local_tensor.local_shards()[0].metadata.shard_sizes = [7, 3]
    with pytest.raises(LayoutMismatch, match=r"announces float32\[7, 3\] at \[0:7,0:3\], but"):
        dcp.save({"w": wrong}, MemoryStore())


def test_slices_that_do_not_fit_are_refused() -> None:
    for boxes in ([(0, 0, 9)], [(7, 0, 2)], [(0, 5, 3)]):
        with pytest.raises(LayoutMismatch, match="which does not lie in them"):
            dcp.save({"w": sliced(torch.zeros(6, 3), (8, 3), boxes)}, MemoryStore())
    for boxes in ([(-1, 0, 2)], [(0, -1, 2)], [(0, 0, -2)]):
        with pytest.raises(LayoutMismatch, match="'w'"):
            dcp.save({"w": sliced(torch.zeros(6, 3), (8, 3), boxes)}, MemoryStore())
    told = sliced(torch.zeros(8, 3), (8, 3), [(0, 0, 8)])
    told.local_sizes = ()
    with pytest.raises(LayoutMismatch, match=r"have \[1, 1, 0\] entries"):
        dcp.save({"w": told}, MemoryStore())


def test_a_part_of_an_unknown_kind_is_never_taken_for_the_whole() -> None:
    class Slice(torch.Tensor):
        global_offset = (4,)

    class Plain(torch.Tensor):
        """Nothing but a name."""

    store = MemoryStore()
    dcp.save({"w": torch.ones(4).as_subclass(Plain)}, store)
    part = torch.zeros(4).as_subclass(Slice)
    for call in (dcp.save, dcp.load):
        with pytest.raises(Unsavable, match=r"'w' is .*Slice, which has global_offset and so may"):
            call({"w": part}, store if call is dcp.load else MemoryStore())
    noted = torch.nn.Parameter(torch.ones(4))
    noted.placements = "what users note on it"  # pyright: ignore[reportAttributeAccessIssue]
    dcp.save({"w": noted}, MemoryStore())


def test_a_class_of_dtensors_with_a_way_of_its_own() -> None:
    class Turned(DTensor):
        def __create_chunk_list__(self) -> list[Any]:
            return [chunk([4, 0][self.device_mesh.get_coordinate()[0]], 4)]  # pyright: ignore

        def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
            return self.to_local()

    store = MemoryStore()

    def save(rank: int, group: Any) -> None:
        told = split(rank, ROWS["even, turned"], "")
        turned = Turned(told.to_local(), told._spec)  # pyright: ignore[reportPrivateUsage]
        dcp.save({"w": turned}, store, process_group=group)

    run_ranks(2, save)
    assert torch.equal(dcp.open(store)["w"][...], WHOLE)


def test_boxes_of_a_tensor_without_memory_are_refused() -> None:
    store = MemoryStore()
    dcp.save({"w": WHOLE}, store)
    told = hooked(torch.empty(8, 3, device="meta"), [chunk(0, 8)], "chunks")
    with pytest.raises(LayoutMismatch, match="make the module on its device before the load"):
        dcp.load({"w": told}, store)
