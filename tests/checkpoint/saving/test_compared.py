"""What of the state that ranks hold alike is compared at a save."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint.tensors import local_tensor
from dtckpt.checkpoint.tensors.sampling import PAGE_BYTES, WHOLE_BYTES
from dtckpt.dtensor import DeviceMesh, DTensor, Layout, Mesh, Shard
from dtckpt.errors import LayoutMismatch
from dtckpt.storage import MemoryStore

from ...ranks import RanksFailed, run_ranks

module: Any = local_tensor  # its imports are looked at and replaced
LARGE = 1 << 19
"""Elements of a tensor that is not compared whole."""


def model() -> dict[str, torch.Tensor]:
    """The state of a small model with a running mean, equal on all ranks."""
    return {"weight": torch.arange(LARGE) / 7, "running_mean": torch.arange(1000) / 7}


def named(failure: RanksFailed) -> str:
    """Return the error that all ranks have raised."""
    errors = list(failure.errors.values())
    assert {type(error) for error in errors} == {LayoutMismatch}
    assert len({str(error) for error in errors}) == 1
    return str(errors[0])


@pytest.mark.parametrize("kind", ["statistics", "step", "region"])
def test_replicas_that_have_run_apart_are_found_at_once(kind: str) -> None:
    """Each in its own way: running statistics of a rank's own batches, a step, some rows."""
    store = MemoryStore()

    def body(rank: int, group: Any) -> None:
        state = model()
        if rank == 2:
            if kind == "statistics":
                state["running_mean"][7] += 1e-3
            elif kind == "step":
                state["weight"] *= 1.001
            else:  # two stretches of pages, of which one is looked at in each
                state["weight"][1000 : 1000 + 2 * 16 * PAGE_BYTES // 4] = 0.0
        dcp.save(state, store, process_group=group)

    with pytest.raises(RanksFailed) as failure:
        run_ranks(3, body)
    name = "running_mean" if kind == "statistics" else "weight"
    text = f"plain tensor '{name}' has different values on ranks 0-1 and rank 2"
    assert text in named(failure.value)
    assert list(store.list()) == []


def test_a_difference_that_keeps_to_its_place_is_found_in_time() -> None:
    """One element of a large tensor: other pages are compared at every save."""
    store = MemoryStore()

    def body(rank: int, group: Any) -> int:
        state = model()
        state["weight"][12345] += rank
        for step in range(300):
            try:
                dcp.save(state, store.substore(f"step-{step}"), process_group=group)
            except LayoutMismatch:
                return step
        return -1

    found = set(run_ranks(2, body))
    assert len(found) == 1
    assert found != {-1}


@pytest.mark.parametrize("policy", ["error", "warn"])
def test_all_is_compared_where_that_is_asked(policy: Any) -> None:
    store = MemoryStore()

    def body(rank: int, group: Any) -> None:
        state = model()
        state["weight"][12345] += rank
        dcp.save(state, store, process_group=group, check_replicas=policy)

    with pytest.raises(RanksFailed) as failure:
        run_ranks(2, body)
    assert "plain tensor 'weight' has different values" in named(failure.value)


def test_copies_on_sibling_meshes_are_compared_by_samples_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashed = heard(monkeypatch)

    def body(rank: int, group: Any, *, differs: bool, policy: Any, name: str) -> None:
        mesh = Mesh((2,), ("dp",), (rank % 2, rank % 2 + 2))
        layout = Layout(mesh, (Shard(0),), (2 * LARGE,))
        whole = torch.arange(2.0 * LARGE) + (rank % 2 if differs else 0)
        local = whole[layout.box(layout.mesh.coordinate(rank) or ()).slices].clone()
        device_mesh = DeviceMesh("cpu", mesh, rank=rank)
        state = {"w": DTensor.from_local(local, device_mesh, layout.placements, shape=(2 * LARGE,))}
        dcp.save(state, store.substore(name), process_group=group, check_replicas=policy)

    store = MemoryStore()
    run_ranks(4, lambda r, g: body(r, g, differs=False, policy=None, name="a"))
    assert 0 < sum(hashed) <= 4 * LARGE * 4 / 16
    hashed.clear()
    run_ranks(4, lambda r, g: body(r, g, differs=False, policy="error", name="b"))
    assert sum(hashed) == 4 * LARGE * 4
    with pytest.raises(RanksFailed, match="different values on rank 0 and rank 1"):
        run_ranks(4, lambda r, g: body(r, g, differs=True, policy=None, name="c"))


def heard(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of bytes of all that is hashed for comparisons."""
    hashed: list[int] = []
    source: Any = module.TensorSource

    def listen(tensor: torch.Tensor) -> Any:
        hashed.append(tensor.nbytes)
        return source(tensor)

    monkeypatch.setattr(module, "TensorSource", listen)
    return hashed


def test_a_rank_hashes_a_part_of_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = heard(monkeypatch)
    store = MemoryStore()

    def body(rank: int, group: Any) -> None:
        dcp.save({"w": torch.ones(1 << 20)}, store, process_group=group)

    run_ranks(2, body)
    assert sum(hashed) == 2 * (4 << 20) / 16


def test_names_that_one_rank_has_for_one_tensor_and_another_for_two() -> None:
    """The copies are equal, whatever they are called and whether they are tied."""
    store = MemoryStore()

    def body(rank: int, group: Any) -> None:
        whole = torch.arange(float(LARGE))
        state = {"a": whole, "b": whole if rank else whole.clone()}
        for step in range(4):
            dcp.save(state, store.substore(f"step-{step}"), process_group=group)

    run_ranks(2, body)
    assert torch.equal(dcp.open(store.substore("step-3"))["b"][...], torch.arange(float(LARGE)))


def test_a_tensor_of_just_the_size_that_is_compared_whole() -> None:
    store = MemoryStore()

    def body(rank: int, group: Any) -> None:
        state = {"w": torch.zeros(WHOLE_BYTES // 4)}
        state["w"][777] = rank
        dcp.save(state, store, process_group=group)

    with pytest.raises(RanksFailed, match="different values on rank 0 and rank 1"):
        run_ranks(2, body)
