"""dtckpt under the names of torch.distributed.checkpoint, in one process.

Several are in ``dcp_ranks``.
"""

from __future__ import annotations

import copy
import importlib
import pickle
import pkgutil
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
import torch.distributed.checkpoint.state_dict as torch_state_dict
from torch.distributed.checkpoint import state_dict_loader as torch_loader
from torch.distributed.checkpoint import state_dict_saver as torch_saver
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint import dcp
from dtckpt.checkpoint.dcp import format_utils
from dtckpt.errors import (
    AlreadyCommitted,
    CheckpointError,
    LayoutMismatch,
    NotCommitted,
    StorageError,
    Unsavable,
)
from dtckpt.storage import Fault, FaultyStore, LocalStore, Rule

from ..formats.test_dcp import same, stepped


def public_names(module: Any) -> list[str]:
    """Return what a module of torch declares, or has made itself."""
    own = (n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__)
    return getattr(module, "__all__", None) or [n for n in own if not n.startswith("_")]


def test_every_public_name_is_here() -> None:
    public = {n for n in dir(torch_dcp) if not n.startswith("_")}
    modules = {n for n in public if type(getattr(torch_dcp, n)).__name__ == "module"}
    assert not public - modules - set(dcp.__all__)


@pytest.mark.parametrize(
    "name",
    [name for _, name, _ in pkgutil.iter_modules(torch_dcp.__path__) if not name.startswith("_")],
)
def test_every_public_module_is_here_with_its_names(name: str) -> None:
    theirs = importlib.import_module(f"torch.distributed.checkpoint.{name}")
    public = public_names(theirs)
    if not public:
        return
    ours = importlib.import_module(f"dtckpt.checkpoint.dcp.{name}")
    assert set(public) <= set(ours.__all__)
    assert getattr(dcp, name) is ours
    assert all(hasattr(ours, each) for each in ours.__all__)


def test_names_of_later_versions_of_torch_are_here() -> None:
    """CheckpointableTensor is of torch 2.14, the storages of fsspec are of torch 2.15."""
    assert isinstance(dcp.FsspecWriter("memory://x"), dcp.FileSystemWriter)
    assert isinstance(dcp.FsspecReader("memory://x"), dcp.FileSystemReader)
    plain: Any = torch.zeros(2)
    assert not isinstance(plain, dcp.CheckpointableTensor)
    plain.global_shape, plain.global_offsets = (4,), ((2,),)
    plain.local_offsets, plain.local_sizes = ((0,),), ((2,),)
    assert isinstance(plain, dcp.CheckpointableTensor)


def test_storage_options_are_keywords_of_the_fsspec_storages() -> None:
    url = "memory://fsspec-keywords/step-1"
    writer = dcp.FsspecWriter(url, skip_instance_cache=True)
    dcp.save({"a": torch.ones(2)}, storage_writer=writer)
    into, reader = {"a": torch.zeros(2)}, dcp.FsspecReader(url, skip_instance_cache=True)
    dcp.load(into, storage_reader=reader)
    assert into["a"].equal(torch.ones(2))
    assert writer.storage_options == reader.storage_options == {"skip_instance_cache": True}


@pytest.mark.filterwarnings("ignore")  # torch's own
def test_saves_have_ids_that_their_metadata_has(tmp_path: Path) -> None:
    state, writer = {"a": torch.zeros(4, 4)}, dcp.FileSystemWriter(tmp_path)
    seen: set[str | None] = set()
    for planner in (None, dcp.DefaultSavePlanner()):
        dcp.save(state, storage_writer=writer, planner=planner)
        reader = dcp.FileSystemReader(tmp_path)
        found = reader.read_metadata()
        assert found.storage_meta is not None
        assert str(found.storage_meta.checkpoint_id) == str(tmp_path)
        assert found.storage_meta.save_id == writer.save_id
        assert writer.storage_meta() == StorageMeta(tmp_path, writer.save_id)
        assert found.storage_meta.load_id == reader.load_id
        assert found.version == CURRENT_DCP_VERSION
        seen.add(writer.save_id)
    future: Any = dcp.async_save(state, storage_writer=writer)
    assert future.result().save_id == writer.save_id
    assert len({*seen, writer.save_id}) == 3
    assert None not in seen


@pytest.mark.filterwarnings("ignore")  # torch's own
def test_checkpoints_become_files_of_torch_save_and_back(tmp_path: Path) -> None:
    tied = torch.arange(6.0)
    state: dict[str, Any] = {
        "model": {"w": tied, "again": tied},
        "step": 3,
        "list": [1, torch.ones(2)],
    }
    dcp.save(state, checkpoint_id=tmp_path / "saved")
    torch_saver.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    for name in ("saved", "theirs"):
        format_utils.dcp_to_torch_save(tmp_path / name, tmp_path / f"{name}.pt")
        assert same(torch.load(tmp_path / f"{name}.pt"), state)
    for _ in range(2):  # the second time one is there
        format_utils.torch_save_to_dcp(tmp_path / "saved.pt", tmp_path / "back")
    into = {"model": {"w": 0 * tied, "again": 0 * tied}, "step": 0, "list": [0, torch.zeros(2)]}
    dcp.load(into, checkpoint_id=tmp_path / "back")
    assert same(into, state)


def test_signatures_are_those_of_torch() -> None:
    from inspect import signature

    pairs: list[tuple[Any, Any]] = [
        *((getattr(dcp, name), getattr(torch_dcp, name)) for name in ("save", "load")),
        *((getattr(dcp, n), getattr(torch_dcp, n)) for n in ("async_save", "save_state_dict")),
        (dcp.load_state_dict, getattr(torch_dcp, "load_state_dict")),  # noqa: B009
        (dcp.FileSystemWriter, getattr(torch_dcp, "FileSystemWriter")),  # noqa: B009
        (dcp.FileSystemReader, getattr(torch_dcp, "FileSystemReader")),  # noqa: B009
        *(
            (getattr(dcp.state_dict, name), getattr(torch_state_dict, name))
            for name in ("set_state_dict", "set_optimizer_state_dict")
        ),
    ]
    for ours, theirs in pairs:
        assert list(signature(ours).parameters) == list(signature(theirs).parameters), ours


def test_a_training_goes_on(tmp_path: Path) -> None:
    model, optimizer = stepped(1)
    given = {"model": model, "optimizer": optimizer, "step": 4, "list": [1, {"deep": 2}]}
    report = dcp.save(given, checkpoint_id=tmp_path)
    assert isinstance(report, ckpt.SaveReport)
    again, fresh = stepped(2)
    into = {"model": again, "optimizer": fresh, "step": 0, "list": None}
    dcp.load(into, checkpoint_id=tmp_path)
    assert (into["step"], into["list"]) == (4, [1, {"deep": 2}])
    assert same(dict(again.state_dict()), dict(model.state_dict()))
    assert same(fresh.state_dict(), optimizer.state_dict())


def test_the_checkpoint_may_have_more_and_the_state_may_not(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2), "b": 3}, storage_writer=dcp.FileSystemWriter(tmp_path))
    into: dict[str, Any] = {"a": torch.zeros(2, dtype=torch.float64)}
    dcp.load(into, storage_reader=dcp.FileSystemReader(tmp_path))
    assert same(into, {"a": torch.ones(2, dtype=torch.float64)})
    with pytest.raises(LayoutMismatch, match="Missing in the checkpoint: c"):
        dcp.load({"a": torch.zeros(2), "c": 1}, checkpoint_id=tmp_path)
    wrong: Any = "all"
    with pytest.raises(LayoutMismatch, match="expected True, False or 'state'"):
        ckpt.load(into, tmp_path, strict=wrong)
    with pytest.raises(NotCommitted):
        dcp.load(into, checkpoint_id=tmp_path / "none")


@pytest.mark.filterwarnings("ignore")  # torch's own
@pytest.mark.parametrize("writer", [None, dcp.CheckpointWriter()], ids=["torch's", "ours"])
def test_dicts_of_nothing_are_lost_by_torch_and_not_missed(tmp_path: Path, writer: Any) -> None:
    """Such as the state of SGD without momentum."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    given: dict[str, Any] = {"optimizer": optimizer.state_dict(), "extra": {}, "list": []}
    torch_saver.save(given, checkpoint_id=tmp_path, storage_writer=writer, no_dist=True)
    for fresh in (torch.optim.SGD(model.parameters(), lr=0.1), optimizer.state_dict()):
        into: dict[str, Any] = {"optimizer": fresh, "extra": {}, "list": None}
        dcp.load(into, checkpoint_id=tmp_path)
        loaded: Any = fresh if isinstance(fresh, dict) else fresh.state_dict()
        assert same(loaded, given["optimizer"])
        assert into["list"] == []
    alone = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt.load({"optimizer": alone, "list": None}, tmp_path)
    assert alone.param_groups[0]["lr"] == 0.5


class Counted:
    """An object that counts how often its state is loaded."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state, self.loaded = state, list[Any]()

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded.append(copy.deepcopy(state))


@pytest.mark.filterwarnings("ignore")  # torch's own
@pytest.mark.parametrize("state", [{}, {"a": {}}, {"a": []}, {"a": 1}], ids=str)
@pytest.mark.parametrize("save", [dcp.save, torch_saver.save], ids=["ours", "theirs"])
def test_objects_are_handed_an_empty_state_too(
    tmp_path: Path, save: Callable[..., Any], state: dict[str, Any]
) -> None:
    save({"foo": Counted(state), "b": 1}, checkpoint_id=tmp_path)
    into: dict[str, Any] = {"foo": Counted(copy.deepcopy(state)), "b": 0}
    foo = into["foo"]
    dcp.load(into, checkpoint_id=tmp_path)
    assert foo.loaded == [state]
    assert into["foo"] is foo
    assert into["b"] == 1
    ckpt.load({"foo": foo}, tmp_path, strict="state", select=["b"])
    assert len(foo.loaded) == 1, "what is not selected is left alone"


ONE, TWO = torch.ones(2), torch.full((2,), 2.0)
VALUES_IN_PLACE: list[tuple[Any, Any]] = [
    ([1, 2, 3], [0]),
    ([1], [0, 5, 6]),
    ((1, 2, 3), (0,)),
    ([1, 2], (0, 0)),
    ([], [1]),
    ([1], []),
    ({"a": 1}, {}),
    ({"a": 1, "b": 2}, {"a": 0}),
    (5, [1]),
    ([1, [2, 3]], [0, [0]]),
    ([ONE, [1, 2, 3]], [0 * ONE, [0]]),
    ([ONE, TWO], [0 * ONE]),
    ([{"a": 1}, {"a": 2}], [{"a": 0}]),
    ((1, {"x": 2, "y": 3}), (0, {"x": 0})),
    ((1, ONE), (0, 0 * ONE)),
    ((ONE, {}, [{"a": {}}]), (0 * ONE, {}, [{"a": {}}])),
]


@pytest.mark.filterwarnings("ignore")  # torch's own
@pytest.mark.parametrize(("saved", "held"), VALUES_IN_PLACE, ids=str)
def test_values_take_the_place_of_others_as_by_torch(tmp_path: Path, saved: Any, held: Any) -> None:
    """What was saved longer than what the state has does not lose its end."""
    found: list[Any] = []
    for name, save, load in (
        ("theirs", torch_saver.save, torch_loader.load),
        ("ours", dcp.save, dcp.load),
    ):
        state = copy.deepcopy({"value": held})
        save({"value": saved}, checkpoint_id=tmp_path / name)
        load(state, checkpoint_id=tmp_path / name)
        found.append(state)
    assert same(*found)


def test_a_tuple_with_tensors_is_filled_in_place_or_refused(tmp_path: Path) -> None:
    dcp.save({"value": (1, ONE, 3)}, checkpoint_id=tmp_path)
    with pytest.raises(LayoutMismatch, match="value: more was saved than this tuple has: value/2"):
        dcp.load({"value": (0, 0 * ONE)}, checkpoint_id=tmp_path)


def test_a_checkpoint_is_replaced_as_by_torch(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        dcp.save({"w": torch.full((3,), value)}, checkpoint_id=tmp_path)
    assert ckpt.open(tmp_path)["w"][...].tolist() == [2.0] * 3


@pytest.mark.filterwarnings("ignore")  # torch's own
def test_a_training_that_torch_saved_goes_on_in_its_place(tmp_path: Path) -> None:
    torch_saver.save({"w": torch.ones(3), "step": 1}, checkpoint_id=tmp_path, no_dist=True)
    state = {"w": torch.zeros(3), "step": 0}
    dcp.load(state, checkpoint_id=tmp_path)
    assert same(state, {"w": torch.ones(3), "step": 1})
    dcp.save({**state, "step": 2}, checkpoint_id=tmp_path)
    dcp.load(state, checkpoint_id=tmp_path)
    assert state["step"] == 2
    assert ckpt.verify(tmp_path).has_checksums
    described = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert {name: type(found).__name__ for name, found in described.items()} == {
        "w": "TensorStorageMetadata",
        "step": "BytesStorageMetadata",
    }


@pytest.mark.filterwarnings("ignore")  # torch's own
def test_planners_and_storages_of_others_go_through_torch(tmp_path: Path) -> None:
    given = {"w": torch.arange(4.0)}
    metadata = dcp.save(given, checkpoint_id=tmp_path / "a", planner=dcp.DefaultSavePlanner())
    assert isinstance(metadata, dcp.Metadata)
    assert ckpt.verify(tmp_path / "a").has_checksums
    into = {"w": torch.zeros(4), "x": 1}
    partial = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(into, checkpoint_id=tmp_path / "a", planner=partial)
    assert same(into, {**given, "x": 1})
    dcp.save(given, storage_writer=HuggingFaceStorageWriter(str(tmp_path / "hf")))
    assert ckpt.open(tmp_path / "hf")["w"][...].equal(given["w"])
    reader = HuggingFaceStorageReader(str(tmp_path / "hf"))
    into = {"w": torch.zeros(4)}
    dcp.load(into, storage_reader=reader)
    assert same(into, given)
    dcp.save_state_dict(given, dcp.FileSystemWriter(tmp_path / "old"), no_dist=True)
    into = {"w": torch.zeros(4)}
    dcp.load_state_dict(into, dcp.FileSystemReader(tmp_path / "old"), no_dist=True)
    assert same(into, given)


@pytest.mark.filterwarnings("ignore")  # torch's own
def test_stagers_of_torch_stage(tmp_path: Path) -> None:
    stager = DefaultStager(StagingOptions(False, False, False, False))
    given = {"w": torch.arange(4.0)}
    future: Any = dcp.async_save(given, checkpoint_id=tmp_path, async_stager=stager)
    future.result()
    stager.close()
    assert ckpt.open(tmp_path)["w"][...].equal(given["w"])


class Gate(Fault):
    """Holds a save until it is opened."""

    opened = threading.Event()

    def before(self) -> None:
        self.opened.wait(30)


def test_a_save_in_the_background_is_a_future(tmp_path: Path) -> None:
    gate = Gate()
    store = FaultyStore(LocalStore(tmp_path), [Rule(gate, op="create")])
    given = {"w": torch.arange(4.0)}
    future: Any = dcp.async_save(given, storage_writer=dcp.CheckpointWriter(store))
    given["w"].zero_()
    called: list[object] = []
    future.add_done_callback(called.append)
    assert isinstance(future, Future)
    assert not future.done()
    assert not future.cancel()
    with pytest.raises(TimeoutError):
        future.result(0.01)
    gate.opened.set()
    assert wait([future], 30).done == {future}
    assert future.result().num_tensors == 1
    assert called == [future]
    assert ckpt.open(tmp_path)["w"][...].equal(torch.arange(4.0))


def test_a_save_that_fails_in_the_background_tells_who_asks(tmp_path: Path) -> None:
    class Broken(Fault):
        def before(self) -> None:
            raise StorageError("no room")

    store = FaultyStore(LocalStore(tmp_path), [Rule(Broken(), op="create")])
    future: Any = dcp.async_save({"w": torch.ones(3)}, storage_writer=dcp.CheckpointWriter(store))
    assert isinstance(future.exception(30), CheckpointError)
    with pytest.raises(CheckpointError, match="no room"):
        future.result()
    assert not (tmp_path / "manifest.json").exists()


REFUSED: list[tuple[Callable[[Path], object], str]] = [
    (lambda _: dcp.save({}), "checkpoint_id= or storage_writer="),
    (lambda _: dcp.load({}), "checkpoint_id= or storage_reader="),
    (lambda _: dcp.load({}, storage_reader=dcp.CheckpointReader()), r"CheckpointReader\(path"),
    (lambda _: dcp.save({}, storage_writer=dcp.CheckpointWriter()), r"CheckpointWriter\(path"),
    (lambda p: dcp.save({}, checkpoint_id=p, use_collectives=False), "use_collectives=False"),
    (lambda p: dcp.async_save({}, checkpoint_id=p, use_collectives=False), "use_collectives"),
    (lambda p: dcp.FileSystemWriter(p, _extensions=[1]), "_extensions"),
    (lambda p: dcp.FileSystemReader(p, _extension_registry=1), "_extension_registry"),
]


@pytest.mark.parametrize(("call", "match"), REFUSED)
def test_what_is_not_meant_is_refused(
    tmp_path: Path, call: Callable[[Path], object], match: str
) -> None:
    with pytest.raises(CheckpointError, match=match):
        call(tmp_path)


def test_objects_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(Unsavable, match="odd: a value of type"):
        dcp.save({"odd": object()}, checkpoint_id=tmp_path)


def test_errors_are_those_that_programs_for_torch_catch(tmp_path: Path) -> None:
    state = {"w": torch.ones(3)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    writer = dcp.FileSystemWriter(tmp_path, overwrite=False)
    for kind, match, call in [
        (AlreadyCommitted, "Checkpoint already exists", partial(dcp.save, storage_writer=writer)),
        (LayoutMismatch, "nothing was loaded", partial(dcp.load, checkpoint_id=tmp_path)),
    ]:
        with pytest.raises(dcp.CheckpointException, match=match) as failure:
            call({"w": torch.ones(4), "v": torch.ones(1)}, no_dist=True)
        assert isinstance(failure.value, kind)
        assert [*failure.value.failures] == [0]
        again = pickle.loads(pickle.dumps(failure.value))
        assert (type(again), str(again)) == (kind, str(failure.value))
    with pytest.raises(dcp.CheckpointException, match="already exists"):
        dcp.async_save(state, storage_writer=writer, no_dist=True)
