"""Random generators go on by coordinate; those of ranks that are new have streams of their own."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint.job_state.streams import process_streams, streams_of
from dtckpt.dtensor import DeviceMesh, Mesh, Shard, rand
from dtckpt.dtensor import random as our_random
from dtckpt.errors import LayoutMismatch, Unsavable
from tests.dtensor.rank_meshes import rank_mesh
from tests.ranks import RanksFailed, run_ranks

HashStore: Any = getattr(torch.distributed, "HashStore")  # noqa: B009  (stubs lack it)

Drawn = list[float]


def draw(generator: torch.Generator) -> Drawn:
    return torch.rand(3, generator=generator).tolist()


def saved(path: Path, mesh: Mesh, axes: Any = None, *, alike: bool = False) -> list[Drawn]:
    """Save generators that stand somewhere; return what each draws next."""

    def save(rank: int, group: Any) -> Drawn:
        at = 0 if alike else rank
        if axes == "dp":
            at = (mesh.coordinate(rank) or ())[mesh.axis("dp")]
        own = torch.Generator().manual_seed(1000 + at)
        draw(own)
        numbers = ckpt.RandomNumbers(mesh, axes=axes, process=False, generators={"own": own})
        ckpt.save({"numbers": numbers}, path, process_group=group)
        return draw(own)

    return run_ranks(mesh.size, save)


def loaded(path: Path, mesh: Mesh | int, axes: Any = None, resize: Any = "begin") -> list[Drawn]:
    """Load them and return what each draws."""

    def load(rank: int, group: Any) -> Drawn:
        own = torch.Generator().manual_seed(99)
        place = None if isinstance(mesh, int) else mesh
        numbers = ckpt.RandomNumbers(
            place, axes=axes, resize=resize, process=False, generators={"own": own}
        )
        state: dict[str, Any] = {"numbers": numbers}
        ckpt.load(state, path, process_group=group)
        assert state["numbers"] is numbers
        return draw(own)

    return run_ranks(mesh if isinstance(mesh, int) else mesh.size, load)


def is_distinct(found: list[Drawn]) -> bool:
    return len({tuple(one) for one in found}) == len(found)


def test_ranks_with_other_numbers_go_on_by_their_coordinates(tmp_path: Path) -> None:
    mesh = Mesh((2, 2), ("dp", "tp"))
    expected = saved(tmp_path, mesh)
    assert is_distinct(expected)
    assert loaded(tmp_path, mesh) == expected
    turned = loaded(tmp_path, Mesh((2, 2), ("tp", "dp")))
    assert turned == [expected[0], expected[2], expected[1], expected[3]]


def test_a_world_that_grew_and_one_that_shrank(tmp_path: Path) -> None:
    two, four = Mesh((2,), ("dp",)), Mesh((4,), ("dp",))
    expected = saved(tmp_path / "a", two)
    grown = loaded(tmp_path / "a", four)
    assert grown[:2] == expected
    assert is_distinct(grown)
    assert loaded(tmp_path / "a", four) == grown, "reproducible"
    expected = saved(tmp_path / "b", four)
    assert loaded(tmp_path / "b", two) == expected[:2]


def test_ranks_that_are_new_repeat_those_before_them_where_that_is_asked_for(
    tmp_path: Path,
) -> None:
    one, two = saved(tmp_path, Mesh((2,), ("rank",)))
    assert loaded(tmp_path, 5, resize="repeat") == [one, two, one, two, one]
    assert loaded(tmp_path, 1, resize="repeat") == [one]
    other = Mesh((2, 2), ("dp", "tp"))
    assert loaded(tmp_path, other, resize="repeat") == [one] * 4, "nothing is known of new axes"
    with pytest.raises(ValueError, match="'begin' or 'repeat', got 'keep'"):
        ckpt.RandomNumbers(resize="keep")  # pyright: ignore


def test_ranks_that_share_a_stream_go_on_sharing_it(tmp_path: Path) -> None:
    mesh, wider = Mesh((2, 2), ("dp", "tp")), Mesh((3, 4), ("dp", "tp"))
    expected = saved(tmp_path, mesh, "dp")
    assert expected[0] == expected[1] != expected[2] == expected[3]
    for axes in ("dp", None):  # that they are the same is known of the checkpoint as well
        found = [loaded(tmp_path, wider, axes)[4 * i : 4 * i + 4] for i in range(3)]
        if axes == "dp":
            assert all(one == row[0] for row in found for one in row)
        assert [row[0] for row in found[:2]] == [expected[0], expected[2]]
        assert is_distinct([row[0] for row in found])


def test_what_was_alike_by_nobodys_word_stays_alike(tmp_path: Path) -> None:
    expected = saved(tmp_path, Mesh((2, 2), ("dp", "tp")), alike=True)
    assert loaded(tmp_path, Mesh((3, 4), ("dp", "tp"))) == [expected[0]] * 12


def test_the_report_tells_which_streams_begin(tmp_path: Path) -> None:
    saved(tmp_path, Mesh((2,), ("dp",)))

    def load(rank: int, group: Any) -> tuple[str, ...]:
        own = {"own": torch.Generator()}
        mesh = Mesh((3,), ("dp",))
        numbers = ckpt.RandomNumbers(mesh, process=False, generators=own)
        return ckpt.load({"numbers": numbers}, tmp_path, process_group=group).dealt

    assert run_ranks(3, load) == [(), (), ("numbers/streams",)]


def test_streams_that_should_be_shared_and_are_not_are_refused(tmp_path: Path) -> None:
    mesh = Mesh((1, 2), ("dp", "tp"))

    def save(rank: int, group: Any) -> None:
        own = {"own": torch.Generator().manual_seed(rank)}
        numbers = ckpt.RandomNumbers(mesh, axes="dp", process=False, generators=own)
        ckpt.save({"numbers": numbers}, tmp_path / "a", process_group=group)

    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, save)
    assert all(isinstance(error, LayoutMismatch) for error in failed.value.errors.values())
    assert "belongs to a coordinate that ranks 0-1 have" in str(failed.value)


def test_every_generator_of_a_process(tmp_path: Path) -> None:
    extra = torch.Generator().manual_seed(3)

    def drawn() -> list[Any]:
        normal = random.gauss(0, 1), np.random.standard_normal(), random.random()
        return [torch.rand(2).tolist(), normal, np.random.rand(2).tolist(), draw(extra)]

    drawn()
    numbers = ckpt.RandomNumbers(numpy=True, python=True, generators={"extra": extra})
    ckpt.save({"numbers": numbers}, tmp_path / "a")
    expected = drawn()
    ckpt.load({"numbers": numbers}, tmp_path / "a")
    assert drawn() == expected
    with ckpt.open(tmp_path / "a") as checkpoint:
        assert {name.rpartition("/")[2] for name in checkpoint} >= {"cpu", "numpy", "python"}


def test_every_kind_of_generator_can_begin_anew() -> None:
    own = torch.Generator()
    streams = streams_of(process=True, numpy=True, python=True, generators={"own": own})
    draws: dict[str, Callable[[], Drawn]] = {
        "cpu": lambda: draw(torch.default_generator),
        "numpy": lambda: [float(one) for one in np.random.rand(2)],
        "python": lambda: [random.random(), random.gauss(0.0, 1.0)],
        "own": lambda: draw(own),
    }
    for name, drawn in draws.items():
        found: list[Drawn] = []
        for seed in (7, 7, 8, 7 + (1 << 63)):
            streams[name].write(streams[name].begun(seed))
            found.append(drawn())
        assert found[0] == found[1] != found[2], name


class Drawing:
    """Draws whenever anybody speaks to it, as a data loader does that begins."""

    def state_dict(self) -> dict[str, Any]:
        torch.rand(5)
        return {"a": 1}

    def load_state_dict(self, state: object) -> None:
        torch.rand(5)


def test_others_that_draw_at_save_and_load_change_nothing(tmp_path: Path) -> None:
    state: dict[str, Any] = {"a": ckpt.RandomNumbers(), "z": {"inside": [Drawing()]}}
    ckpt.save(state, tmp_path / "a")
    expected = torch.rand(2)
    ckpt.load(state, tmp_path / "a")
    assert torch.equal(torch.rand(2), expected)


def on_mesh(shape: tuple[int, ...], names: tuple[str, ...], body: Any) -> list[Any]:
    """Run ``body(mesh, group)`` on the ranks of a mesh."""
    store = HashStore()

    def run(rank: int, group: Any) -> Any:
        return body(rank_mesh(store, shape, rank, group, names), group)

    return run_ranks(math.prod(shape), run)


def test_what_meshes_draw_by_element_goes_on(tmp_path: Path) -> None:
    def save(mesh: DeviceMesh, group: Any) -> list[float]:
        our_random.manual_seed(5, mesh)
        rand(6, device_mesh=mesh, placements=[Shard(0)] * mesh.ndim)
        numbers = ckpt.RandomNumbers(mesh, process=False)
        ckpt.save({"numbers": numbers}, tmp_path / "a", process_group=group)
        return drawn(mesh)

    def load(mesh: DeviceMesh, group: Any) -> list[float]:
        numbers = ckpt.RandomNumbers(mesh, process=False)
        ckpt.load({"numbers": numbers}, tmp_path / "a", process_group=group)
        return drawn(mesh)

    def drawn(mesh: DeviceMesh) -> list[float]:
        made: Any = rand(6, device_mesh=mesh, placements=[Shard(0)] * mesh.ndim)
        return made.full_tensor().tolist()

    expected = on_mesh((4,), ("dp",), save)[0]
    shapes: list[tuple[tuple[int, ...], tuple[str, ...]]] = [
        ((4,), ("dp",)),
        ((3,), ("dp",)),
        ((2, 2), ("dp", "tp")),
    ]
    for shape, names in shapes:
        assert on_mesh(shape, names, load) == [expected] * math.prod(shape)


def test_what_was_not_saved_is_refused_where_it_was_asked_for_by_name(tmp_path: Path) -> None:
    ckpt.save({"numbers": ckpt.RandomNumbers()}, tmp_path / "a")
    before = torch.get_rng_state()
    with pytest.raises(LayoutMismatch, match="no random state 'numpy' was saved"):
        ckpt.load({"numbers": ckpt.RandomNumbers(numpy=True)}, tmp_path / "a")
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ValueError, match="the name is taken"):
        ckpt.RandomNumbers(generators={"cpu": torch.Generator()})


def test_another_generator_of_numpy_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(np.random, "get_state", lambda: ("PCG64", None, 0, 0, 0.0))
    with pytest.raises(Unsavable, match="PCG64"):
        ckpt.save({"numbers": ckpt.RandomNumbers(numpy=True)}, tmp_path / "a")


class Device:
    """What a module of a kind of accelerator gives, with generators that are lists of numbers."""

    def __init__(self, count: int, current: int) -> None:
        self.states = [torch.tensor([number], dtype=torch.uint8) for number in range(count)]
        self.current = current

    def device_count(self) -> int:
        return len(self.states)

    def current_device(self) -> int:
        return self.current

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return self.states[device.index]

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.states[device.index] = state


def test_devices_are_numbered_from_the_one_that_a_rank_uses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = Device(4, current=2)

    def found(check_available: bool) -> torch.device:
        return torch.device("cuda")

    def module_of(kind: str) -> Device:
        return module

    monkeypatch.setattr(torch.accelerator, "current_accelerator", found)
    monkeypatch.setattr(torch, "get_device_module", module_of)
    streams = process_streams()
    assert list(streams) == ["cpu", "cuda", "cuda+1", "cuda+2", "cuda+3"]
    assert [int(streams[name].read()) for name in list(streams)[1:]] == [2, 3, 0, 1]
    streams["cuda+3"].write(torch.tensor([9], dtype=torch.uint8))
    assert [int(state) for state in module.states] == [0, 9, 2, 3]
