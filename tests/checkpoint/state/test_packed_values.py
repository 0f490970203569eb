"""Long lists and other containers of many values: saved as one leaf, in a data file."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint.state.packing import MIN_PACKED
from dtckpt.dtensor import Mesh
from dtckpt.errors import LayoutMismatch
from dtckpt.storage import MemoryStore

from ...ranks import run_ranks

N = 4 * MIN_PACKED
FORMS: dict[str, Any] = {
    "flat": list(range(N)),
    "tuple": tuple(range(N)),
    "nested": [[i, [i + 1]] for i in range(N)],
    "few lists": [list(range(N)), [float(i) for i in range(N)]],
    "mixed": [None, 1, 2.5, "a", (True, b"b")] * N,
    "dict": {i: i * i for i in range(N)},
    "dict of text": {f"k{i}": [i] for i in range(N)},
    "many short lists": {f"k{i}": list(range(N // 8)) for i in range(64)},
    "big": [2**70 + i for i in range(N)],
    "dicts": [{"a": i} for i in range(N)],
}


def manifest_of(store: MemoryStore) -> dict[str, Any]:
    return json.loads(store.read("manifest.json"))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("template", ["empty", "same", "none", "other leaves"])
def test_a_long_container_is_one_leaf_and_comes_back(form: str, template: str) -> None:
    store, value = MemoryStore(), FORMS[form]
    ckpt.save({"in": {"seen": value}, "w": torch.ones(2)}, store)
    assert len(store.read("manifest.json")) < 6000
    assert manifest_of(store)["version"] == 3
    others: dict[str, Any] = {
        "empty": type(value)(),
        "same": copy.deepcopy(value),
        "none": None,
        "other leaves": copy.deepcopy(value),
    }
    if template == "other leaves" and isinstance(value, list) and type(value[0]) is int:
        others[template] = [None] * len(value)
    state: dict[str, Any] = {"in": {"seen": others[template]}, "w": torch.zeros(2)}
    report = ckpt.load(state, store)
    assert state["in"]["seen"] == value
    assert type(state["in"]["seen"]) is type(value)
    assert any(name.startswith("in/seen") for name in report.loaded)
    assert "w" in report.loaded
    with ckpt.open(store) as opened:
        assert list(opened) == ["w"]
        assert len(opened) == 1
        assert opened.state_dict()["in"]["seen"] == value


def test_a_checkpoint_without_long_lists_is_of_the_first_version() -> None:
    store = MemoryStore()
    ckpt.save({"a": list(range(MIN_PACKED - 1)), "packed": {"packed": 1}}, store)
    assert manifest_of(store)["version"] == 1


def test_a_list_is_filled_in_place_and_so_are_lists_in_it() -> None:
    store = MemoryStore()
    ckpt.save({"seen": [list(range(N)), [1, 2]]}, store)
    inner: list[Any] = [0, 0]
    outer: list[Any] = [[None] * N, inner]
    ckpt.load({"seen": outer}, store)
    assert outer == [list(range(N)), [1, 2]]
    assert outer[1] is inner


def test_a_list_at_two_places_is_filled_once() -> None:
    store = MemoryStore()
    ckpt.save({"seen": [[i] for i in range(N)]}, store)
    shared = [0]
    state = {"seen": [shared] * N}
    ckpt.load(state, store)
    assert state["seen"] == [[i] for i in range(N)]


@pytest.mark.parametrize("length", [N - 1, N + 1])
def test_a_list_of_another_length_is_told(length: int) -> None:
    store = MemoryStore()
    ckpt.save({"seen": list(range(N))}, store)
    state: dict[str, Any] = {"seen": [-1] * length}
    with pytest.raises(LayoutMismatch, match="seen"):
        ckpt.load(state, store)
    assert state == {"seen": [-1] * length}
    ckpt.load(state, store, strict=False)
    assert state["seen"] == [*range(min(N, length)), *([-1] * (length - N))]


def test_parts_are_selected() -> None:
    store = MemoryStore()
    ckpt.save(
        {"a": [{"x": i, "y": -i} for i in range(N)], "b": {str(i): i for i in range(N)}}, store
    )
    state: dict[str, Any] = {"a": [{"x": -1, "y": -1} for _ in range(N)], "b": {"7": None}}
    ckpt.load(state, store, select=["a/3/x", "b/7"])
    assert state["a"][3] == {"x": 3, "y": -1}
    assert state["a"][4] == {"x": -1, "y": -1}
    assert state["b"] == {"7": 7}
    with pytest.raises(LayoutMismatch, match="selects nothing"):
        ckpt.load(state, store, select="a/3/z")


def test_a_tensor_in_a_list_keeps_the_form_of_the_list() -> None:
    store = MemoryStore()
    ckpt.save({"seen": [*range(N), torch.ones(1)]}, store)
    assert manifest_of(store)["version"] == 1
    state: dict[str, Any] = {"seen": [*([0] * N), torch.zeros(1)]}
    ckpt.load(state, store)
    assert state["seen"][:N] == list(range(N))
    assert state["seen"][N].item() == 1


class Loader:
    """An object whose state is a long list."""

    def __init__(self, seen: Any) -> None:
        self.seen = seen

    def state_dict(self) -> Any:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: Any) -> None:
        self.seen = state_dict["seen"]


@pytest.mark.parametrize("before", [[], None, [1] * N, [1] * 3])
def test_an_object_is_given_its_long_list(before: Any) -> None:
    store = MemoryStore()
    ckpt.save({"loader": Loader(list(range(N))), "own": ckpt.PerRank(list(range(N)))}, store)
    loader = Loader(before)
    state: dict[str, Any] = {"loader": loader, "own": ckpt.PerRank([])}
    ckpt.load(state, store)
    assert loader.seen == list(range(N))
    assert state["own"].value == list(range(N))


def test_groups_of_an_optimizer_stay_nodes() -> None:
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(N)]
    optimizer = torch.optim.SGD(params, lr=0.5)
    store = MemoryStore()
    ckpt.save({"optimizer": optimizer, "dict": {"inner": optimizer.state_dict()}}, store)
    assert manifest_of(store)["version"] == 1
    other = torch.optim.SGD(params, lr=0.1)
    ckpt.load({"optimizer": other}, store, select="optimizer")
    assert other.param_groups[0]["lr"] == 0.5


def test_increments_refer_to_lists_that_have_not_changed(tmp_path: Path) -> None:
    state: dict[str, Any] = {"seen": list(range(100 * N)), "step": 1}
    ckpt.save(state, tmp_path / "a")
    report = ckpt.save(state | {"step": 2}, tmp_path / "b", base=tmp_path / "a")
    assert report.borrowed_bytes > 100 * N
    into: dict[str, Any] = {"seen": [], "step": 0}
    ckpt.load(into, tmp_path / "b")
    assert into == state | {"step": 2}
    assert not ckpt.verify(tmp_path / "b").problems


def test_a_damaged_list_is_found(tmp_path: Path) -> None:
    ckpt.save({"seen": list(range(N))}, tmp_path / "a")
    (file,) = (tmp_path / "a" / "data").glob("*/*.safetensors")
    data = bytearray(file.read_bytes())
    data[4096 + 500] ^= 1
    file.write_bytes(data)
    assert ckpt.verify(tmp_path / "a").problems
    state: dict[str, Any] = {"seen": []}
    with pytest.raises(ckpt.Corrupt):
        ckpt.load(state, tmp_path / "a")
    assert state == {"seen": []}


def test_exports_and_comparisons_have_the_values(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "w": torch.ones(4),
        "in": {"seen": list(range(N)), "dicts": [{"a": i} for i in range(N)]},
    }
    ckpt.save(state, tmp_path / "a")
    ckpt.export(tmp_path / "a", tmp_path / "dcp", format="dcp")
    into: dict[str, Any] = copy.deepcopy(state)
    into["in"] = {"seen": [0] * N, "dicts": [{"a": 0} for _ in range(N)]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells that there is no process group
        torch_dcp.load(  # pyright: ignore[reportPrivateImportUsage]
            into, checkpoint_id=str(tmp_path / "dcp"), no_dist=True
        )
    assert into["in"] == state["in"]
    torch.save(state, tmp_path / "t.pt")
    same = ckpt.compare(tmp_path / "a", tmp_path / "t.pt")
    assert not same.values
    assert not any(same.only_values)
    other = copy.deepcopy(state)
    other["in"]["seen"][5] = -5
    ckpt.save(other, tmp_path / "b")
    found = ckpt.compare(tmp_path / "a", tmp_path / "b")
    assert list(found.values) == ["in/seen"]


def test_resharding_keeps_the_values(tmp_path: Path) -> None:
    state: dict[str, Any] = {"w": torch.ones(4), "seen": list(range(N))}
    ckpt.save(state, tmp_path / "a")
    ckpt.reshard(tmp_path / "a", tmp_path / "b", dtypes=[ckpt.DTypeRule.parse("*=bfloat16")])
    with ckpt.open(tmp_path / "b") as opened:
        assert opened.state_dict()["seen"] == list(range(N))
        assert opened["w"].dtype == torch.bfloat16


def test_ranks_merge_dicts_and_tell_which_item_differs() -> None:
    store = MemoryStore()

    def save(rank: int, group: Any) -> None:
        # Long dicts with other keys are brought together, a long list is the same, and each rank
        # has a long list of its own.
        state: dict[str, Any] = {
            "counts": {f"r{rank}.{i}": i for i in range(N)},
            "seen": list(range(N)),
            "own": ckpt.PerRank([rank] * N),
            f"stage{rank}": [rank * 1000 + i for i in range(N)],
        }
        ckpt.save(state, store, process_group=group)

    run_ranks(2, save)
    assert len(manifest_of(store)["tree"]["dict"]["counts"]["dict"]) == 2 * N
    assert manifest_of(store)["tree"]["dict"]["seen"]["packed"][3] == N

    def load(rank: int, group: Any) -> None:
        state: dict[str, Any] = {
            "counts": {f"r{rank}.{i}": None for i in range(N)},
            "seen": [],
            "own": ckpt.PerRank(None),
            f"stage{rank}": [0] * N,
        }
        ckpt.load(state, store, process_group=group)
        assert state["counts"] == {f"r{rank}.{i}": i for i in range(N)}
        assert state["seen"] == list(range(N))
        assert state["own"].value == [rank] * N
        assert state[f"stage{rank}"] == [rank * 1000 + i for i in range(N)]

    run_ranks(2, load)


@pytest.mark.parametrize("length", [N, N + 1])
def test_lists_that_differ_between_ranks_are_refused(length: int) -> None:
    store = MemoryStore()

    def save(rank: int, group: Any) -> None:
        seen = list(range(N if rank == 0 else length))
        seen[7] += rank
        with pytest.raises(LayoutMismatch, match=r"value 'seen.*differs between ranks"):
            ckpt.save({"seen": seen}, store, process_group=group)

    run_ranks(2, save)


def test_values_of_coordinates_may_be_long() -> None:
    store = MemoryStore()

    def save(rank: int, group: Any) -> None:
        seen = [rank // 2] * N
        value = ckpt.PerCoordinate(seen, Mesh((2, 2), ("dp", "tp")), axes="dp")
        ckpt.save({"seen": value}, store, process_group=group)

    def load(rank: int, group: Any) -> None:
        def all_of(values: Any, dealing: Any) -> list[int]:
            return [item for value in values.values() for item in value]

        value = ckpt.PerCoordinate([], Mesh((2,), ("all",)), axes=(), resize=all_of)
        state: dict[str, Any] = {"seen": value}
        ckpt.load(state, store, process_group=group)
        assert state["seen"].value == [0] * N + [1] * N

    run_ranks(4, save)
    run_ranks(2, load)
