"""Values that belong to coordinates of a mesh: saved once, loaded by coordinate on another mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dtckpt.checkpoint as ckpt
from dtckpt.dtensor import Mesh
from dtckpt.errors import LayoutMismatch, Unsavable
from dtckpt.storage import open_store
from tests.ranks import RanksFailed, run_ranks


class Loader:
    """A data loader whose state has another form once it has begun."""

    def __init__(self, position: int = 0) -> None:
        self.state: dict[str, Any] = {"position": position}
        self.asked = 0
        if position:
            self.state |= {
                "buffer": [position] * position,
                "order": torch.arange(position),
                "seen": np.arange(position),
            }

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state

    def is_at(self, position: int) -> bool:
        expected = Loader(position).state
        return self.state.keys() == expected.keys() and all(
            type(value) is type(expected[key]) and np.array_equal(value, expected[key])
            for key, value in self.state.items()
        )


def saved(path: Path, mesh: Mesh, make: Callable[[tuple[int, ...]], Any]) -> None:
    """Save what ``make`` returns for each coordinate."""

    def save(rank: int, group: Any) -> None:
        ckpt.save({"x": make(mesh.coordinate(rank) or ())}, path, process_group=group)

    run_ranks(mesh.size, save)


def loaded(
    path: Path, mesh: Mesh, make: Callable[[tuple[int, ...]], Any], **options: Any
) -> list[tuple[Any, ckpt.LoadReport]]:
    """Load into what ``make`` returns for each coordinate; what came of it by rank."""

    def load(rank: int, group: Any) -> tuple[Any, ckpt.LoadReport]:
        state = {"x": make(mesh.coordinate(rank) or ())}
        report = ckpt.load(state, path, process_group=group, **options)
        return state["x"].value, report

    return run_ranks(mesh.size, load)


def test_a_value_is_saved_once_for_ranks_that_share_it(tmp_path: Path) -> None:
    mesh = Mesh((2, 2), ("dp", "tp"))
    path = tmp_path / "step"
    saved(path, mesh, lambda at: ckpt.PerCoordinate({"w": torch.ones(3) * at[0]}, mesh, "dp"))
    with ckpt.open(path) as checkpoint:
        assert sorted(checkpoint) == ["x/values/@0/w", "x/values/@2/w"]
    tree = ckpt.read_manifest(open_store(path)).tree
    assert tree["dict"]["x"]["dict"]["mesh"] == {
        "dict": {"shape": {"list": [2]}, "axes": {"list": ["dp"]}, "ranks": {"list": [0, 2]}}
    }


def test_the_value_goes_by_coordinate_and_not_by_rank(tmp_path: Path) -> None:
    before, after = Mesh((2, 2), ("dp", "tp")), Mesh((3, 2), ("tp", "dp"))
    saved(tmp_path / "a", before, lambda at: ckpt.PerCoordinate([at[0], "text"], before, "dp"))
    found = loaded(tmp_path / "a", after, lambda _: ckpt.PerCoordinate([], after, "dp"))
    assert [value for value, _ in found] == [[0, "text"], [1, "text"]] * 3


def test_tensors_are_filled_in_place(tmp_path: Path) -> None:
    mesh = Mesh((2,), ("dp",))
    saved(tmp_path / "a", mesh, lambda at: ckpt.PerCoordinate({"w": torch.ones(3) * at[0]}, mesh))
    mine: dict[int, torch.Tensor] = {}

    def make(at: tuple[int, ...]) -> ckpt.PerCoordinate:
        mine[at[0]] = torch.full((3,), 7.0)
        return ckpt.PerCoordinate({"w": mine[at[0]]}, mesh)

    loaded(tmp_path / "a", mesh, make)
    assert [mine[i].tolist() for i in range(2)] == [[0.0] * 3, [1.0] * 3]


def test_an_object_is_given_what_was_saved_whatever_form_its_own_state_has(tmp_path: Path) -> None:
    mesh, narrow = Mesh((2, 2), ("dp", "tp")), Mesh((2,), ("dp",))
    saved(tmp_path / "a", mesh, lambda at: ckpt.PerCoordinate(Loader(at[0] + 3), mesh, "dp"))
    found = loaded(tmp_path / "a", narrow, lambda _: ckpt.PerCoordinate(Loader(), narrow))
    for rank, (loader, report) in enumerate(found):
        assert loader.is_at(rank + 3)
        assert loader.asked == 0, "a loader may start workers when it is asked"
        assert not report.missing
        assert not report.unexpected
        assert not report.dealt


def test_axes_may_count_as_one(tmp_path: Path) -> None:
    hybrid, plain = Mesh((2, 3), ("replicate", "shard")), Mesh((6,), ("dp",))
    axes = {"dp": ("replicate", "shard")}
    saved(tmp_path / "a", hybrid, lambda at: ckpt.PerCoordinate(3 * at[0] + at[1], hybrid, axes))
    found = loaded(tmp_path / "a", plain, lambda _: ckpt.PerCoordinate(None, plain))
    assert [value for value, _ in found] == list(range(6))
    saved(tmp_path / "b", plain, lambda at: ckpt.PerCoordinate(at[0], plain))
    found = loaded(tmp_path / "b", hybrid, lambda _: ckpt.PerCoordinate(None, hybrid, axes))
    assert [value for value, _ in found] == list(range(6))


def test_without_a_mesh_ranks_are_a_line(tmp_path: Path) -> None:
    line, mesh = Mesh((3,), ("rank",)), Mesh((3, 2), ("dp", "tp"))
    saved(tmp_path / "a", line, lambda at: ckpt.PerCoordinate(at[0], axes="dp"))
    found = loaded(tmp_path / "a", mesh, lambda _: ckpt.PerCoordinate(None, mesh, "dp"))
    assert [value for value, _ in found] == [0, 0, 1, 1, 2, 2]


def test_all_ranks_may_share_a_value(tmp_path: Path) -> None:
    three, mesh = Mesh((3,), ("rank",)), Mesh((2, 2), ("dp", "tp"))
    saved(tmp_path / "a", three, lambda _: ckpt.PerCoordinate(Loader(2), axes=()))
    with ckpt.open(tmp_path / "a") as checkpoint:
        assert sorted(checkpoint) == ["x/values/@0/order", "x/values/@0/seen"]
    for given in (None, mesh):
        found = loaded(tmp_path / "a", mesh, lambda _, m=given: ckpt.PerCoordinate(Loader(), m, ()))
        assert all(loader.is_at(2) for loader, _ in found)
    with pytest.raises(RanksFailed, match="differs between them"):
        saved(tmp_path / "b", three, lambda at: ckpt.PerCoordinate(at[0] == 2, axes=()))


def test_one_process_is_one_coordinate(tmp_path: Path) -> None:
    ckpt.save({"x": ckpt.PerCoordinate(Loader(4), axes="dp")}, tmp_path / "a")
    mesh = Mesh((1, 2), ("dp", "tp"))
    found = loaded(tmp_path / "a", mesh, lambda _: ckpt.PerCoordinate(Loader(), mesh, "dp"))
    assert all(loader.is_at(4) for loader, _ in found)


def test_values_of_one_coordinate_must_be_equal(tmp_path: Path) -> None:
    mesh = Mesh((2, 2), ("dp", "tp"))
    values: list[Callable[[tuple[int, ...]], Any]] = [
        lambda at: 7 if at == (1, 1) else 8,
        lambda at: {"w": torch.tensor([float(at == (1, 1))])},
        lambda at: {"w": np.array([at == (1, 1)])},
        lambda at: 1 if at == (1, 1) else True,
        lambda at: Loader(3 if at == (1, 1) else 4),
    ]
    for number, make in enumerate(values):
        path = tmp_path / str(number)
        with pytest.raises(RanksFailed) as failed:
            saved(path, mesh, lambda at, make=make: ckpt.PerCoordinate(make(at), mesh, "dp"))
        assert set(failed.value.errors) == {0, 1, 2, 3}
        for error in failed.value.errors.values():
            assert isinstance(error, LayoutMismatch)
            assert "'x' belongs to a coordinate that ranks 2-3 have" in str(error)
        assert not (path / "manifest.json").exists()


def test_the_mesh_has_all_ranks_and_the_axes(tmp_path: Path) -> None:
    part, mesh = Mesh((2,), ("dp",)), Mesh((2, 2), ("dp", "tp"))
    for given, axes, told in [
        (part, None, "has 2 ranks; those that take part are 4"),
        (mesh, "pp", "has no axis 'pp'"),
        (mesh, {"a": "dp", "b": ("tp", "dp")}, "counts at most once"),
        (None, ("dp", "tp"), "without a mesh"),
    ]:
        with pytest.raises(RanksFailed) as failed:
            saved(tmp_path / "a", mesh, lambda _, g=given, a=axes: ckpt.PerCoordinate(1, g, a))
        assert all(isinstance(e, Unsavable) for e in failed.value.errors.values())
        assert told in str(failed.value)


def test_other_sizes_are_refused_unless_something_is_said(tmp_path: Path) -> None:
    four, two = Mesh((4,), ("dp",)), Mesh((2,), ("dp",))
    saved(tmp_path / "a", four, lambda at: ckpt.PerCoordinate(Loader(at[0] + 1), four))
    loader = Loader()
    with pytest.raises(RanksFailed) as failed:
        loaded(tmp_path / "a", two, lambda _: ckpt.PerCoordinate(loader, two))
    assert all(isinstance(error, LayoutMismatch) for error in failed.value.errors.values())
    assert "x: saved for coordinates dp=4, and there are dp=2 now" in str(failed.value)
    assert loader.is_at(0)


def test_keep_takes_what_there_is(tmp_path: Path) -> None:
    two, three = Mesh((2,), ("dp",)), Mesh((3,), ("dp",))

    def keeping(mesh: Mesh) -> Callable[[tuple[int, ...]], ckpt.PerCoordinate]:
        return lambda _: ckpt.PerCoordinate(Loader(9), mesh, resize="keep")

    saved(tmp_path / "a", two, lambda at: ckpt.PerCoordinate(Loader(at[0] + 1), two))
    found = loaded(tmp_path / "a", three, keeping(three))
    assert [loader.state["position"] for loader, _ in found] == [1, 2, 9]
    assert [report.kept for _, report in found] == [(), (), ("x",)]
    saved(tmp_path / "b", three, lambda at: ckpt.PerCoordinate(Loader(at[0] + 1), three))
    found = loaded(tmp_path / "b", two, keeping(two))
    assert [loader.state["position"] for loader, _ in found] == [1, 2]
    assert all(report.dropped == ("x/values/@2",) for _, report in found)
    assert all(not report.unexpected for _, report in found)


def test_a_function_makes_values_of_all_that_were_saved(tmp_path: Path) -> None:
    four, two = Mesh((4, 2), ("dp", "tp")), Mesh((2,), ("dp",))
    saved(tmp_path / "a", four, lambda at: ckpt.PerCoordinate(Loader(at[0] + 1), four, "dp"))
    seen: list[ckpt.Dealing] = []

    def joined(values: Mapping[tuple[int, ...], Any], dealing: ckpt.Dealing) -> Any:
        seen.append(dealing)
        (own,) = dealing.coordinate
        parts = [values[(i,)] for i in range(own, dealing.saved.shape[0], 2)]
        return {"position": sum(p["position"] for p in parts), "order": [p["order"] for p in parts]}

    made = loaded(tmp_path / "a", two, lambda _: ckpt.PerCoordinate(Loader(), two, resize=joined))
    assert [loader.state["position"] for loader, _ in made] == [1 + 3, 2 + 4]
    assert [t.tolist() for t in made[1][0].state["order"]] == [[0, 1], [0, 1, 2, 3]]
    assert {dealing.coordinate for dealing in seen} == {(0,), (1,)}
    assert all(report.dealt == ("x",) for _, report in made)
    # Values that are no objects are replaced, and nobody is asked where the sizes are the same.
    saved(tmp_path / "b", four, lambda at: ckpt.PerCoordinate({"n": at[0]}, four, "dp"))

    def total(values: Mapping[tuple[int, ...], Any], _: ckpt.Dealing) -> Any:
        return {"n": sum(value["n"] for value in values.values())}

    made = loaded(tmp_path / "b", two, lambda _: ckpt.PerCoordinate({}, two, resize=total))
    assert [value for value, _ in made] == [{"n": 6}] * 2
    same = Mesh((4,), ("dp",))
    made = loaded(tmp_path / "b", same, lambda _: ckpt.PerCoordinate({"n": 0}, same, resize=total))
    assert [value for value, _ in made] == [{"n": i} for i in range(4)]


def test_what_was_saved_otherwise_is_refused(tmp_path: Path) -> None:
    mesh = Mesh((2,), ("dp",))
    saved(tmp_path / "ranks", mesh, lambda at: ckpt.PerRank(at[0]))
    saved(tmp_path / "plain", mesh, lambda _: {"a": 1})
    saved(tmp_path / "own", mesh, lambda at: ckpt.PerCoordinate(at[0], mesh))
    for name, told in [
        ("ranks", "one by ranks (PerRank, of 2 ranks) was saved"),
        ("plain", "a dict was saved"),
    ]:
        with pytest.raises(RanksFailed) as failed:
            loaded(tmp_path / name, mesh, lambda _: ckpt.PerCoordinate(0, mesh))
        assert all(isinstance(error, LayoutMismatch) for error in failed.value.errors.values())
        assert told in str(failed.value)
    with pytest.raises(RanksFailed):
        loaded(tmp_path / "own", mesh, lambda _: ckpt.PerRank(0))
    with pytest.raises(RanksFailed) as failed:
        loaded(tmp_path / "own", mesh, lambda _: ckpt.PerCoordinate(0, mesh), select="x/values")
    assert "only a part of it is selected" in str(failed.value)


def test_it_may_be_left_out_and_renamed(tmp_path: Path) -> None:
    mesh = Mesh((2,), ("dp",))
    saved(
        tmp_path / "a", mesh, lambda at: {"y": ckpt.PerCoordinate(Loader(at[0] + 1), mesh), "n": 3}
    )

    def load(rank: int, group: Any) -> None:
        state: dict[str, Any] = {"x": {"y": ckpt.PerCoordinate(Loader(), mesh), "n": 0}}
        ckpt.load(state, tmp_path / "a", process_group=group, select="x/n")
        assert state["x"]["n"] == 3
        assert state["x"]["y"].value.is_at(0)
        other = {"z": ckpt.PerCoordinate(Loader(), mesh)}
        ckpt.load(other, tmp_path / "a", process_group=group, select="x/y", rename={"z": "x/y"})
        assert other["z"].value.is_at(rank + 1)

    run_ranks(2, load)


def test_saves_in_the_background_and_tools_know_it(tmp_path: Path) -> None:
    mesh = Mesh((2, 2), ("dp", "tp"))

    def save(rank: int, group: Any) -> None:
        loader = Loader(rank // 2 + 1)
        state = {"x": ckpt.PerCoordinate(loader, mesh, "dp"), "w": torch.ones(2)}
        handle = ckpt.async_save(state, tmp_path / "a", process_group=group)
        loader.state["order"].fill_(-1)
        handle.result()

    run_ranks(4, save)
    assert ckpt.verify(tmp_path / "a").problems == ()
    ckpt.reshard(tmp_path / "a", tmp_path / "b", Mesh((3,)), [])
    narrow = Mesh((2,), ("dp",))
    for name in ("a", "b"):
        found = loaded(
            tmp_path / name, narrow, lambda _: ckpt.PerCoordinate(Loader(), narrow), select="x"
        )
        assert all(loader.is_at(rank + 1) for rank, (loader, _) in enumerate(found))
