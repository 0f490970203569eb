"""dtckpt as the storage of torch.distributed.checkpoint: its writer and its reader.

Several ranks are played by as many planners and writers, one after the other; real ones are in
``dcp_ranks``.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys, load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint.dcp import CheckpointReader, CheckpointWriter, FileSystemWriter
from dtckpt.checkpoint.dcp.chunk_layouts import layout_of_chunks
from dtckpt.dtensor import Layout, Ragged, Shard
from dtckpt.dtensor.geometry.box import Box
from dtckpt.dtensor.geometry.irregular import IrregularLayout
from dtckpt.errors import (
    AlreadyCommitted,
    CheckpointError,
    Corrupt,
    LayoutMismatch,
    StorageError,
    Unsavable,
)
from dtckpt.storage import Fault, FaultyStore, LocalStore, MemoryStore, Rule, Store

from ...ranks import run_ranks
from ..formats.test_dcp import VALUES, same, stepped, whole

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own


def a_state() -> dict[str, Any]:
    model, optimizer = stepped(1)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 7,
        **VALUES,
        "scalar": torch.tensor(2.5),
        "none of it": torch.empty(0, 3),
        "half": torch.randn(4, 6).bfloat16().t(),
        "array": np.arange(6).reshape(2, 3),
        "listed": [torch.ones(2), {"deep": torch.zeros(3)}, 4],
    }


def unlike(state: Any) -> Any:
    """Return a state to load into: of the same form, with nothing in it."""
    if isinstance(state, Tensor):
        return torch.full_like(state, 9)
    if isinstance(state, dict):
        return {key: unlike(value) for key, value in state.items()}
    is_walked = isinstance(state, list) and any(isinstance(v, Tensor | dict) for v in state)
    return [unlike(value) for value in state] if is_walked else None


def causes(error: BaseException) -> list[BaseException]:
    """Return what torch's CheckpointException holds: the error of every rank."""
    assert isinstance(error, CheckpointException)
    return [failure[0] for failure in error.failures.values()]


def raises_in_torch(kind: type[Exception], match: str, call: Callable[[], object]) -> None:
    with pytest.raises(CheckpointException) as caught:
        call()
    error = causes(caught.value)[0]
    assert isinstance(error, kind), repr(error)
    with pytest.raises(kind, match=match):
        raise error


def test_what_torch_saves_is_read_here_and_there(tmp_path: Path) -> None:
    given = a_state()
    save(given, storage_writer=CheckpointWriter(tmp_path), no_dist=True)
    report = ckpt.verify(tmp_path)
    assert report.has_checksums
    assert report.problems == ()
    with ckpt.open(tmp_path) as opened:
        found = whole(opened.state_dict())
    array = found.pop("array")
    assert array.equal(torch.arange(6).view(2, 3))  # a lazy one, indexed, is a tensor
    assert same(found, {name: given[name] for name in found})
    again, fresh = stepped(2)
    ckpt.load({"model": again, "optimizer": fresh}, tmp_path, strict="state", no_dist=True)
    assert same(fresh.state_dict(), given["optimizer"])
    into = unlike(given)
    load(into, storage_reader=CheckpointReader(tmp_path), no_dist=True)
    assert np.array_equal(into.pop("array"), given.pop("array"))
    assert same(into, given)


def test_in_the_background(tmp_path: Path) -> None:
    given = {"w": torch.arange(5.0)}
    future: Any = async_save({**given, "step": 1}, storage_writer=CheckpointWriter(tmp_path))
    given["w"].zero_()
    assert isinstance(future.result(), Metadata)
    assert ckpt.open(tmp_path)["w"][...].equal(torch.arange(5.0))


def test_keys_of_frameworks_are_loaded_without_a_state(tmp_path: Path) -> None:
    given = a_state()
    save(given, storage_writer=CheckpointWriter(tmp_path), no_dist=True)
    reader = CheckpointReader()
    found = _load_state_dict_from_keys({"optimizer"}, checkpoint_id=tmp_path, storage_reader=reader)
    assert list(found) == ["optimizer"]
    assert same(found["optimizer"]["param_groups"], given["optimizer"]["param_groups"])
    moments = found["optimizer"]["state"]["0"]
    assert same(moments, given["optimizer"]["state"][0])
    everything = _load_state_dict_from_keys(storage_reader=CheckpointReader(tmp_path))
    assert same(everything["model"], dict(given["model"]))


def test_states_may_be_parts_of_what_is_there(tmp_path: Path) -> None:
    save({"a": torch.ones(2), "b": 3}, storage_writer=CheckpointWriter(tmp_path), no_dist=True)
    into = {"a": torch.zeros(2), "c": 1}
    with pytest.raises(CheckpointException):
        load(dict(into), storage_reader=CheckpointReader(tmp_path), no_dist=True)
    planner = DefaultLoadPlanner(allow_partial_load=True)
    load(into, storage_reader=CheckpointReader(tmp_path), planner=planner, no_dist=True)
    assert into["c"] == 1
    assert same(into["a"], torch.ones(2))


def test_dtypes_are_cast_as_torch_does_unless_told_otherwise(tmp_path: Path) -> None:
    given = torch.randn(50, 3)
    save({"w": given}, storage_writer=CheckpointWriter(tmp_path), no_dist=True)
    into = {"w": torch.zeros(3, 50, dtype=torch.bfloat16).t()}
    load(into, storage_reader=CheckpointReader(tmp_path), no_dist=True)
    assert into["w"].equal(given.bfloat16())
    strict = CheckpointReader(tmp_path, dtype_policy="error")
    raises_in_torch(
        LayoutMismatch,
        "saved as float32 and is to be loaded as bfloat16",
        lambda: load(into, storage_reader=strict, no_dist=True),
    )


def test_what_dtckpt_reads_torch_loads(tmp_path: Path) -> None:
    """Checkpoints of save, with what ranks keep for themselves, and of DCP itself."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    state = {
        "w": torch.arange(6.0),
        "own": ckpt.PerRank({"seed": 5}),
        "in": {3: [1, 2]},
        "t": (1, "x"),
    }
    ckpt.save(state, ours, no_dist=True)
    into: dict[Any, Any] = {"w": torch.zeros(6), "own": {"seed": 0}, "in": {3: None}, "t": None}
    load(into, storage_reader=CheckpointReader(ours), no_dist=True)
    assert same(
        into,
        {"w": torch.arange(6.0), "own": {"seed": 5}, "in": {"3": [1, 2], 3: None}, "t": (1, "x")},
    )
    save({"a": {"b": torch.ones(3)}, "step": 2}, checkpoint_id=theirs, no_dist=True)
    into = {"a": {"b": torch.zeros(3)}, "step": 0}
    load(into, storage_reader=CheckpointReader(theirs), no_dist=True)
    assert same(into, {"a": {"b": torch.ones(3)}, "step": 2})


def test_what_ranks_keep_for_themselves_goes_by_the_rank_in_the_group(tmp_path: Path) -> None:
    kept: dict[int, Any] = {
        rank: {"seed": rank, "noise": torch.full((1 + rank,), float(rank))} for rank in range(3)
    }

    def save_own(rank: int, group: Any) -> None:
        state = {"own": ckpt.PerRank(kept[rank]), "w": torch.ones(2)}
        ckpt.save(state, tmp_path, process_group=group)

    run_ranks(3, save_own)
    for rank in range(3):  # as DCP calls a reader on a rank whose number in the job is 0
        reader, planner = CheckpointReader(tmp_path), DefaultLoadPlanner()
        state: Any = {"own": {"seed": -1, "noise": torch.zeros(1 + rank)}, "w": torch.zeros(2)}
        metadata = reader.read_metadata()
        planner.set_up_planner(state, metadata, rank == 0)
        reader.set_up_storage_reader(metadata, rank == 0, rank=rank, use_collectives=True)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        reader.read_data(planner.finish_plan(plan), planner).wait()
        assert same(state, {"own": kept[rank], "w": torch.ones(2)})


def test_names_that_torch_would_confuse_are_refused(tmp_path: Path) -> None:
    ckpt.save({"a.b": 1, "a": {"b": 2}}, tmp_path, no_dist=True)
    with pytest.raises(LayoutMismatch, match=r"would both be called 'a\.b'"):
        CheckpointReader(tmp_path).read_metadata()


def test_damage_is_found_by_checksum(tmp_path: Path) -> None:
    save({"w": torch.arange(9000.0)}, storage_writer=CheckpointWriter(tmp_path), no_dist=True)
    file = next((tmp_path / "data").rglob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)
    raises_in_torch(
        Corrupt,
        rf"{file.name}: bytes \d+ to \d+ are damaged",
        lambda: load(
            {"w": torch.zeros(9000)}, storage_reader=CheckpointReader(tmp_path), no_dist=True
        ),
    )


class Dead(Exception):
    """What a process that was killed does to its storage: nothing any more."""


class Death(Fault):
    def before(self) -> None:
        raise Dead


class DeadAfter:
    """The plan of a store that answers so many calls, and none after them."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, _: object) -> Fault | None:
        self.left -= 1
        return Death() if self.left < 0 else None


def test_a_save_that_ends_anywhere_leaves_the_old_checkpoint_or_the_new(tmp_path: Path) -> None:
    old, new = {"w": torch.zeros(5), "step": 1}, {"w": torch.ones(7), "step": 2}
    store = LocalStore(tmp_path)
    ends: list[int] = []
    for last in itertools.count():
        ckpt.save(old, store, overwrite=True, no_dist=True)
        dying = FaultyStore(store, DeadAfter(last))
        try:
            save(new, storage_writer=CheckpointWriter(dying, overwrite=True), no_dist=True)
        except CheckpointException:
            pass
        else:
            break
        with ckpt.open(store) as found:
            ends.append(found.state_dict()["step"])
            assert same(whole(found.state_dict()), old if ends[-1] == 1 else new)
        assert ckpt.verify(store).problems == ()
    assert ends[0] == 1
    assert ends == sorted(ends)
    assert len(ends) > 5


def test_a_failed_save_leaves_nothing(tmp_path: Path) -> None:
    store = FaultyStore(LocalStore(tmp_path), [Rule(Death(), op="list", name="data/*")])
    with pytest.raises(CheckpointException):
        save({"w": torch.ones(3)}, storage_writer=CheckpointWriter(store), no_dist=True)
    assert not (tmp_path / "manifest.json").exists()
    assert not list(tmp_path.rglob("*.safetensors"))


def test_what_is_there_is_replaced_only_if_asked(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path)
    save({"w": torch.zeros(3)}, storage_writer=writer, no_dist=True)
    raises_in_torch(
        AlreadyCommitted,
        "Checkpoint already exists",
        lambda: save({"w": torch.ones(3)}, storage_writer=writer, no_dist=True),
    )
    save({"w": torch.ones(3)}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    assert ckpt.open(tmp_path)["w"][...].equal(torch.ones(3))
    assert len(list((tmp_path / "data").iterdir())) == 1


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (object(), "bad: a value of type builtins.object cannot be written"),
        (torch.ones(2).to_sparse(), "bad.*only dense tensors can be stored"),
        ((1, torch.empty(2, device="meta")), "bad/1.*meta device"),
        (
            torch.ones(2, dtype=torch.half).view(torch.complex32),
            "bad.*complex32, which files do not",
        ),
    ],
    ids=["object", "sparse", "meta", "complex32"],
)
def test_what_has_no_form_is_refused_by_name(tmp_path: Path, value: Any, match: str) -> None:
    raises_in_torch(
        Unsavable,
        match,
        lambda: save({"bad": value}, storage_writer=CheckpointWriter(tmp_path), no_dist=True),
    )
    assert not (tmp_path / "manifest.json").exists()


def test_pickles_only_if_both_sides_insist(tmp_path: Path) -> None:
    given = {"odd": Fraction(1, 2)}
    save(given, storage_writer=CheckpointWriter(tmp_path, allow_pickle=True), no_dist=True)
    raises_in_torch(
        CheckpointError,
        "saved as a pickle",
        lambda: load({"odd": None}, storage_reader=CheckpointReader(tmp_path), no_dist=True),
    )
    into: dict[str, Any] = {"odd": None}
    load(into, storage_reader=CheckpointReader(tmp_path, allow_pickle=True), no_dist=True)
    assert into == given


def test_planners_that_cannot_be_served_are_refused(tmp_path: Path) -> None:
    state = {"w": torch.ones(3)}

    def again() -> object:
        return save(
            state,
            storage_writer=FileSystemWriter(tmp_path),
            planner=Caching(enable_plan_caching=True),
            no_dist=True,
        )

    class Caching(DefaultSavePlanner): ...

    again()
    raises_in_torch(CheckpointError, "leave enable_plan_caching out", again)
    with pytest.raises(CheckpointError, match="use_collectives=False makes a checkpoint on each"):
        CheckpointWriter(tmp_path).set_up_storage_writer(True, rank=0, use_collectives=False)

    class Raw(DefaultSavePlanner):
        def transform_object(self, write_item: WriteItem, object: Any) -> Any:
            return io.BytesIO(b"raw") if write_item.type == WriteItemType.BYTE_IO else object

    raises_in_torch(
        Unsavable,
        "s: the planner gives bytes that torch.load does not read",
        lambda: save(
            {"s": 1}, storage_writer=FileSystemWriter(tmp_path), planner=Raw(), no_dist=True
        ),
    )


class Handing(DefaultSavePlanner):
    """Hands on what is pickled already."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return object


class Poison:
    """Makes a directory when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return Path.mkdir, (self.place,)


def test_pickles_from_elsewhere_run_nothing(tmp_path: Path) -> None:
    plain, poisoned, place = io.BytesIO(), io.BytesIO(), tmp_path / "ran"
    torch.save({"deep": [1, torch.ones(2)]}, plain)
    torch.save(Poison(place), poisoned)
    writer = CheckpointWriter(tmp_path / "plain")
    save({"value": plain}, storage_writer=writer, planner=Handing(), no_dist=True)
    found = whole(ckpt.open(tmp_path / "plain").state_dict())
    assert same(found, {"value": {"deep": [1, torch.ones(2)]}})
    writer = CheckpointWriter(tmp_path / "poisoned", allow_pickle=True)
    raises_in_torch(
        Unsavable,
        "value: the planner gives bytes that torch.load does not read as weights only",
        lambda: save({"value": poisoned}, storage_writer=writer, planner=Handing(), no_dist=True),
    )
    assert not place.exists()


def test_planners_that_change_what_is_written(tmp_path: Path) -> None:
    class Halves(DefaultSavePlanner):
        """Writes float16, as torch's documentation has it."""

        def create_local_plan(self) -> SavePlan:
            plan = super().create_local_plan()
            for item in plan.items:
                if item.tensor_data is not None:
                    item.tensor_data.properties.dtype = torch.float16
            return plan

        def resolve_data(self, write_item: WriteItem) -> Any:
            found: Any = super().resolve_data(write_item)
            return found if write_item.type == WriteItemType.BYTE_IO else found.to(torch.float16)

    given = torch.randn(4, 3)
    save({"w": given}, storage_writer=CheckpointWriter(tmp_path), planner=Halves(), no_dist=True)
    assert ckpt.open(tmp_path)["w"][...].equal(given.half())

    class Liar(Halves):
        def resolve_data(self, write_item: WriteItem) -> Any:
            return DefaultSavePlanner.resolve_data(self, write_item)

    raises_in_torch(
        LayoutMismatch,
        r"planned as float16\[4, 3\], but the planner resolves it to float32\[4, 3\]",
        lambda: save(
            {"w": given}, storage_writer=FileSystemWriter(tmp_path), planner=Liar(), no_dist=True
        ),
    )


class Boxes(Tensor):
    """What one rank holds of a tensor, told by torch's protocol."""

    whole: Tensor
    boxes: Sequence[Box]

    @staticmethod
    def of(whole: Tensor, boxes: Sequence[Box]) -> Boxes:
        made = whole.as_subclass(Boxes)
        made.whole, made.boxes = whole, boxes
        return made

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            for box in self.boxes
        ]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties(dtype=self.whole.dtype),
                    size=self.whole.shape,
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        box = next(box for box in self.boxes if torch.Size(box.offsets) == index.offset)
        return self.whole[box.slices]


def save_as_ranks(states: Sequence[dict[str, Any]], store: Store) -> None:
    """Do on all ranks what torch's save does, a step at a time."""
    planners = [DefaultSavePlanner() for _ in states]
    writers = [CheckpointWriter(store) for _ in states]
    plans: list[SavePlan] = []
    for rank, (planner, writer) in enumerate(zip(planners, writers, strict=True)):
        writer.reset()
        planner.set_up_planner(states[rank], writer.storage_meta(), rank == 0)
        writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    results: list[Any] = []
    for plan, planner, writer in zip(plans, planners, writers, strict=True):
        future = writer.write_data(planner.finish_plan(plan), planner)
        results.append(future.wait())
    writers[0].finish(metadata, results)


def test_ranks_write_what_the_planner_gave_them() -> None:
    rows, grid = torch.randn(10, 3), torch.randn(6, 4)
    columns, odd = torch.randn(3, 7), torch.randn(4, 4)
    states: list[dict[str, Any]] = []
    for rank in range(4):
        row = Box((3 * rank, 0), (min(3, 10 - 3 * rank), 3))
        cell = Box((3 * (rank // 2), 2 * (rank % 2)), (3, 2))
        half = Box((0, 3 * (rank % 2)), (3, 3 + rank % 2))  # ragged, on two replicas
        strips = [Box((0, rank), (2, 1)), Box((2, 3 - rank), (2, 1))]
        states.append(
            {
                "rows": Boxes.of(rows, [row]),
                "grid": Boxes.of(grid, [cell]),
                "columns": Boxes.of(columns, [half]),
                "odd": Boxes.of(odd, strips),
                "few": Boxes.of(rows[:2], [Box((rank, 0), (1, 3))] if rank < 2 else []),
                "plain": torch.ones(3),
                "none": Boxes.of(torch.empty(0, 3), [Box((0, 0), (0, 3))]),
                "step": 3,
                f"of rank {rank}": (rank, torch.full((2,), float(rank))),
            }
        )
    store = MemoryStore()
    save_as_ranks(states, store)
    assert ckpt.verify(store).problems == ()
    opened = ckpt.open(store)
    for name, expected in (("rows", rows), ("grid", grid), ("columns", columns), ("odd", odd)):
        assert opened[name][...].equal(expected), name
    assert opened["few"][...].equal(rows[:2])
    assert opened["none"].shape == (0, 3)
    found = whole(opened.state_dict())
    assert [found[f"of rank {rank}"][0] for rank in range(4)] == [0, 1, 2, 3]
    assert found["of rank 3"][1].tolist() == [3.0, 3.0]
    layouts: dict[str, Any] = {name: opened[name].layout for name in opened}
    assert layouts["rows"].placements == (Shard(0),)
    assert layouts["grid"].placements == (Shard(0), Shard(1))
    assert layouts["grid"].mesh.shape == (2, 2)
    assert layouts["columns"].placements == (Ragged(1, (3, 4)),)
    assert isinstance(layouts["odd"], IrregularLayout)
    assert layouts["few"].mesh.size == 2


@pytest.mark.parametrize(
    ("boxes", "match"),
    [
        ([Box((0,), (3,)), Box((2,), (2,))], "overlap"),
        ([Box((0,), (2,)), Box((3,), (1,))], "hold 3 of the 4 elements"),
    ],
)
def test_plans_that_are_not_the_whole_are_refused(boxes: list[Box], match: str) -> None:
    class Careless(DefaultSavePlanner):
        """Checks nothing, as planners of others may not."""

        def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
            return all_plans, Metadata({})

    planner, writer = Careless(), CheckpointWriter(MemoryStore())
    planner.set_up_planner({"w": Boxes.of(torch.ones(4), boxes)}, None, True)
    with pytest.raises(LayoutMismatch, match=f"chunks of tensor 'w'.*{match}"):
        writer.prepare_global_plan([planner.create_local_plan()])


def test_replicas_that_a_planner_leaves_are_written_once() -> None:
    store = MemoryStore()
    writers = [CheckpointWriter(store) for _ in range(2)]
    planners = [DefaultSavePlanner() for _ in range(2)]
    for planner in planners:
        planner.set_up_planner({"w": Boxes.of(torch.ones(4), [Box((0,), (4,))])}, None, True)
    plans = writers[0].prepare_global_plan([p.create_local_plan() for p in planners])
    results: list[Any] = [
        writer.write_data(plan, planner).wait()
        for writer, plan, planner in zip(writers, plans, planners, strict=True)
    ]
    writers[0].finish(Metadata({}), results)
    assert ckpt.open(store)["w"][...].equal(torch.ones(4))
    assert len([info for info in store.list() if info.name.startswith("data")]) == 1


@pytest.mark.parametrize(
    ("shape", "chunks", "placements"),
    [
        ((), {Box((), ()): 3}, None),
        ((5,), {Box((0,), (3,)): 1, Box((3,), (2,)): 0}, (Shard(0),)),
        ((5,), {Box((0,), (1,)): 1, Box((1,), (4,)): 0}, (Ragged(0, (1, 4)),)),
        ((4,), {Box((0,), (2,)): 0, Box((2,), (2,)): 0}, "irregular"),  # one rank holds both
        ((2, 2), {Box((0, 0), (1, 2)): 0, Box((1, 0), (1, 1)): 1, Box((1, 1), (1, 1)): 2}, ""),
    ],
)
def test_layouts_hold_what_the_chunks_say(
    shape: tuple[int, ...], chunks: dict[Box, int], placements: Any
) -> None:
    layout = layout_of_chunks(shape, chunks)
    held = {box: ranks[0] for ranks, box, _ in layout.pieces_meeting(Box.whole(shape))}
    assert held == chunks
    if isinstance(placements, tuple):
        assert isinstance(layout, Layout)
        assert layout.placements == placements
    assert isinstance(layout, IrregularLayout) == isinstance(placements, str)


def test_a_store_that_fails_is_told(tmp_path: Path) -> None:
    class Broken(Fault):
        def before(self) -> None:
            raise StorageError("no room")

    store = FaultyStore(LocalStore(tmp_path), [Rule(Broken(), op="write")])
    raises_in_torch(
        StorageError,
        "no room",
        lambda: save({"w": torch.ones(3)}, storage_writer=CheckpointWriter(store), no_dist=True),
    )
