"""Settings of blocks: of their own task and thread, and of autograd's threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

from dtckpt.dtensor import DeviceMesh, implicit_replication, strict
from dtckpt.dtensor.mesh import modes

MORE_THAN_NEST_HERE = 64
"""Backward passes within each other, of which autograd runs the innermost in threads of its own."""


def seen() -> tuple[bool, bool, object]:
    """What holds here."""
    return modes.is_strict(), modes.replicates_plain_tensors(), modes.active_mesh()


NOTHING = (False, False, None)


@pytest.fixture
def blocks() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack
    assert seen() == NOTHING


def test_tasks_do_not_see_the_blocks_of_others() -> None:
    mesh = DeviceMesh("cpu", [0], rank=0)

    async def within(block: AbstractContextManager[Any], entered: Any, may_leave: Any) -> Any:
        with block:
            entered.set()
            await may_leave.wait()
            return seen()

    async def main() -> list[Any]:
        kinds: list[AbstractContextManager[Any]] = [strict(), implicit_replication(), mesh]
        entered = [asyncio.Event() for _ in kinds]
        may_leave = [asyncio.Event() for _ in kinds]
        tasks: list[Any] = []
        for block, *events in zip(kinds, entered, may_leave, strict=True):
            tasks.append(asyncio.create_task(within(block, *events)))
            await events[0].wait()
            assert seen() == NOTHING
        for event in may_leave:  # those that were entered first are left first
            event.set()
            await asyncio.sleep(0)
        return [await task for task in tasks]

    assert asyncio.run(main()) == [(True, False, None), (False, True, None), (False, False, mesh)]
    assert seen() == NOTHING
    assert in_threads_of_autograd() == [NOTHING]


def in_threads_of_autograd(*, entering: bool = False) -> list[Any]:
    """What holds in threads of autograd in a backward pass that starts here."""
    here, found = threading.get_ident(), list[Any]()

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, depth: int) -> Tensor:
            ctx.depth = depth
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            if threading.get_ident() != here:
                if entering:
                    with strict(False), implicit_replication():
                        assert seen()[:2] == (False, True)
                found.append(seen())
            elif ctx.depth:
                with torch.enable_grad():
                    run(ctx.depth - 1)
            return grads[0], None

    def run(depth: int) -> None:
        Nested.apply(torch.ones(1, requires_grad=True), depth).backward()  # pyright: ignore

    run(MORE_THAN_NEST_HERE)
    return found


@pytest.mark.parametrize("entering", [False, True])
def test_threads_of_autograd_see_what_holds_where_they_work_for(
    blocks: ExitStack, entering: bool
) -> None:
    mesh = DeviceMesh("cpu", [0], rank=0)
    blocks.enter_context(strict())
    blocks.enter_context(mesh)
    assert in_threads_of_autograd(entering=entering) == [(True, False, mesh)]
    assert seen() == (True, False, mesh)


def test_other_threads_see_nothing(blocks: ExitStack) -> None:
    blocks.enter_context(strict())
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(seen()))
    thread.start()
    thread.join()
    assert found == [NOTHING]
