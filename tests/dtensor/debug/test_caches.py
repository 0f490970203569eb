"""What is remembered of calls is bounded, told and forgotten, wherever it is."""

from __future__ import annotations

import importlib
import pkgutil
import threading
from collections.abc import Iterator, Sized
from types import ModuleType
from typing import Any

import torch

from dtckpt.dtensor import DeviceMesh, Replicate, Shard, redistribute_many
from dtckpt.dtensor.comm.caches import BoundedDict, Cache, caches
from dtckpt.dtensor.debug import cache_sizes, clear_caches

from ..rank_meshes import run_on_mesh, scattered

STATE = {
    "dtckpt.dtensor.tensor.leaf_gradients._PLACED",  # hooks, which nobody could find again
    "dtckpt.dtensor.geometry.mesh._index_by_rank",  # on a floor below the caches
    "dtckpt.storage.schemes._installed",  # what is installed, which does not change
    "dtckpt.storage.remote.fsspec.dialects.s3_bodies._body_class",  # one class
    "dtckpt.checkpoint.examining.numbers._table",  # the values of six small types
}
"""What is remembered and yet no cache to clear."""
OPERATORS = {"_known", "by_type", "_by_both"}
"""What grows with the operators that were called, and not with their calls."""


def modules() -> Iterator[ModuleType]:
    """Yield all modules of the library that can be imported here."""
    for package in ("storage", "dtensor", "checkpoint"):
        top = importlib.import_module(f"dtckpt.{package}")
        for found in pkgutil.walk_packages(top.__path__, f"{top.__name__}."):
            try:
                yield importlib.import_module(found.name)
            except ImportError:  # an optional dependency is not installed
                continue


def globals_of_modules() -> Iterator[tuple[str, Any]]:
    """Yield what modules have at their top, by full names, each where it was made."""
    for module in modules():
        for name, value in vars(module).items():
            if getattr(value, "__module__", module.__name__) in (module.__name__, None):
                yield f"{module.__name__}.{name}", value


def test_every_cache_is_known() -> None:
    found = [
        (name, value)
        for name, value in globals_of_modules()
        if isinstance(value, BoundedDict) or hasattr(value, "cache_clear")
    ]
    known = {id(getattr(cache, "function", cache)) for cache in caches()}
    lost = [name for name, value in found if id(value) not in known and name not in STATE]
    assert not lost


def use_many_operators(mesh: DeviceMesh) -> None:
    """Call operators of every way, and redistribute."""
    for size in (4, 6, 8):
        x = scattered(torch.rand(size, 4), mesh, [Shard(0)])
        w = scattered(torch.rand(4, 4), mesh, [Replicate()]).requires_grad_()
        torch.nn.functional.linear(x, w).relu().softmax(-1).sum().backward()
        torch.nn.utils.clip_grad_norm_([w], 1.0)
        torch.ops.aten._foreach_add_.Scalar([x, x], 1.0)
        x.view(-1)[: size // 2].clone().uniform_().masked_fill_(x.view(-1)[: size // 2] > 1, 0)
        x.clamp(0.1, 0.9).sort(0)
        redistribute_many([x, w.detach()], placements=[Replicate()])
        x.full_tensor()


def test_nothing_grows_that_is_no_cache() -> None:
    def counted() -> dict[str, int]:
        return {
            name: len(value)
            for name, value in globals_of_modules()
            if isinstance(value, Sized) and not isinstance(value, type | Cache)
        }

    def body(mesh: DeviceMesh) -> None:
        before = counted()
        use_many_operators(mesh)
        grown = {name for name, size in counted().items() if size > before.get(name, size)}
        assert {name.rpartition(".")[2] for name in grown} <= OPERATORS

    run_on_mesh((1,), body)


def test_all_caches_are_cleared() -> None:
    def body(mesh: DeviceMesh) -> None:
        use_many_operators(mesh)
        found = cache_sizes(mesh)
        names = {"list_norms", "plans", "quick_calls", "redistribute_plans", "specs"}
        assert names <= set(found)
        everywhere = cache_sizes()
        assert everywhere["plans"] >= found["plans"]
        assert everywhere["metas"]
        assert everywhere["callables"]
        clear_caches()
        assert cache_sizes() == {}
        use_many_operators(mesh)
        assert set(cache_sizes(mesh)) == set(found)

    run_on_mesh((1,), body)


def test_a_cache_may_be_cleared_while_it_is_written() -> None:
    cache: Cache[int, int] = Cache("test", 8)
    failed: list[BaseException] = []

    def write() -> None:
        try:
            for number in range(20_000):
                cache.put(number, number)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        cache.clear()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(cache) <= cache.limit


def test_a_cache_is_forgotten_with_its_owner() -> None:
    cache: Cache[int, int] = Cache("soon gone", 8)
    cache.put(1, 1)
    assert cache_sizes()["soon gone"] == 1
    del cache
    assert "soon gone" not in cache_sizes()
