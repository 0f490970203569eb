"""Plans are made without the data of a call: nothing of it is read or written."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from dtckpt.dtensor import DeviceMesh, Replicate
from dtckpt.dtensor.calls.binding import Bound
from dtckpt.dtensor.calls.planning import plan_of
from dtckpt.dtensor.dtensor import DTensor
from dtckpt.dtensor.tensor.wrapper import Wrapper

from ..rank_meshes import assert_holds, run_on_mesh, scattered

aten = torch.ops.aten
dispatching = importlib.import_module("dtckpt.dtensor.calls.dispatch")  # a function has its name


def number(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(value, dtype=dtype)


_IN_PLACE: dict[str, Any] = {
    "add_": lambda t, x: t.add_(x),  # pyright: ignore
    "sub_": lambda t, x: t.sub_(x, alpha=2),  # pyright: ignore
    "mul_": lambda t, x: t.mul_(x),  # pyright: ignore
    "div_": lambda t, x: t.div_(x),  # pyright: ignore
    "lerp_": lambda t, x: t.lerp_(x, 0.5),  # pyright: ignore
    "lerp_tensor": lambda t, x: t.lerp_(x, x),  # pyright: ignore
    "addcmul_": lambda t, x: t.addcmul_(x, x, value=0.5),  # pyright: ignore
    "addcdiv_": lambda t, x: t.addcdiv_(x, x, value=0.5),  # pyright: ignore
    "atan2_": lambda t, x: t.atan2_(x),  # pyright: ignore
    "hypot_": lambda t, x: t.hypot_(x),  # pyright: ignore
    "fmod_": lambda t, x: t.fmod_(x),  # pyright: ignore
    "remainder_": lambda t, x: t.remainder_(x),  # pyright: ignore
    "xlogy_": lambda t, x: t.xlogy_(x),  # pyright: ignore
    "ldexp_": lambda t, x: t.ldexp_(x),  # pyright: ignore
    "igamma_": lambda t, x: t.igamma_(x),  # pyright: ignore
    "pow_": lambda t, x: t.pow_(x),  # pyright: ignore
    "clamp_": lambda t, x: t.clamp_(x, None),  # pyright: ignore
    "copysign_": lambda t, x: t.copysign_(x),  # pyright: ignore
    "floor_divide_": lambda t, x: t.floor_divide_(x),  # pyright: ignore
    "copy_": lambda t, x: t.copy_(x),  # pyright: ignore
    "ge_": lambda t, x: t.ge_(x),  # pyright: ignore
    "fill_": lambda t, x: t.fill_(x),  # pyright: ignore
    "foreach_add_": lambda t, x: torch._foreach_add_([x.clone(), t], 2.0),  # pyright: ignore
    "foreach_add_list_": lambda t, x: torch._foreach_add_([x.clone(), t], [x, x]),  # pyright: ignore
    "foreach_mul_": lambda t, x: torch._foreach_mul_([x.clone(), t], [2.0, 3.0]),  # pyright: ignore
    "foreach_div_": lambda t, x: torch._foreach_div_([x.clone(), t], x),  # pyright: ignore
    "foreach_sqrt_": lambda t, x: torch._foreach_sqrt_([x.clone(), t]),  # pyright: ignore
    "foreach_neg_": lambda t, x: torch._foreach_neg_([x.clone(), t]),  # pyright: ignore
    "foreach_lerp_": lambda t, x: torch._foreach_lerp_([x.clone(), t], [x, x], 0.5),  # pyright: ignore
    "foreach_addcmul_": lambda t, x: torch._foreach_addcmul_([x.clone(), t], [x, x], [x, x]),  # pyright: ignore
    "foreach_addcdiv_": lambda t, x: torch._foreach_addcdiv_([x.clone(), t], [x, x], [x, x], 0.5),  # pyright: ignore
    "foreach_pow_": lambda t, x: torch._foreach_pow_([x.clone(), t], 2.0),  # pyright: ignore
    "foreach_copy_": lambda t, x: torch._foreach_copy_([x.clone(), t], [x, x]),  # pyright: ignore
    "foreach_clamp_": lambda t, x: torch._foreach_clamp_min_([x.clone(), t], 5.0),  # pyright: ignore
}


@pytest.mark.parametrize("name", _IN_PLACE)
def test_a_plain_number_beside_a_distributed_one_is_written_once(name: str) -> None:
    run = _IN_PLACE[name]

    def body(mesh: DeviceMesh) -> None:
        for value in (3.0, 0.75):
            expected, x = number(value), number(2.0)
            run(expected, x)
            for _ in range(2):
                found = number(value)
                before = found._version  # pyright: ignore
                run(found, scattered(x, mesh, [Replicate()]))
                assert torch.equal(found, expected), (name, found, expected)
                assert found._version == before + 1  # pyright: ignore

    run_on_mesh((1,), body)


_OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, foreach=True),  # pyright: ignore
    "AdamW": lambda ps: torch.optim.AdamW(ps, 0.1, foreach=True),  # pyright: ignore
    "RAdam": lambda ps: torch.optim.RAdam(ps, 0.1, foreach=True),  # pyright: ignore
    "NAdam": lambda ps: torch.optim.NAdam(ps, 0.1, foreach=True),  # pyright: ignore
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, 0.1, foreach=True),  # pyright: ignore
    "Adadelta": lambda ps: torch.optim.Adadelta(ps, 0.1, foreach=True),  # pyright: ignore
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, 0.1, foreach=True),  # pyright: ignore
}


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_foreach_optimizers_step_plain_numbers_once(name: str) -> None:
    def stepped(first: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        params = [first.requires_grad_(), scale.requires_grad_()]
        optimizer = _OPTIMIZERS[name](params)
        for step in range(3):
            for param in params:
                param.grad = torch.full_like(param, 0.5 + step)
            optimizer.step()
        return first.detach(), scale.detach()

    def body(mesh: DeviceMesh) -> None:
        x = scattered(torch.ones(4), mesh, [Replicate()])
        found = stepped(x, number(2.0))
        expected = stepped(torch.ones(4), number(2.0))
        assert_holds(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1])

    run_on_mesh((1,), body)


class DataRead(Exception):
    """Planning took data."""


class _Unread(TorchDispatchMode):
    """Fails where an operator takes a tensor of a call, or makes one that has values of some."""

    def __init__(self, bound: Bound) -> None:
        super().__init__()
        self.op = bound.call.op
        self.own = {_memory(t) for t in _locals_of(bound)} - {0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            if not isinstance(value, Tensor) or isinstance(value, Wrapper) or value.is_meta:
                continue
            if _memory(value) in self.own or value.numel() > 1:
                raise DataRead(f"the plan of {self.op} runs {func} on values")
        return func(*args, **(kwargs or {}))


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _locals_of(bound: Bound) -> list[Tensor]:
    return [leaf.local if isinstance(leaf, Wrapper) else leaf for leaf in bound.leaves]


def test_no_plan_of_the_database_of_operators_takes_data(monkeypatch: pytest.MonkeyPatch) -> None:
    database: Any = pytest.importorskip("torch.testing._internal.common_methods_invocations")
    planned: set[str] = set()

    def watched(bound: Bound) -> Any:
        before = [(t, t._version, t.clone()) for t in _locals_of(bound)]  # pyright: ignore
        with _Unread(bound):
            plan = plan_of(bound)
        for tensor, count, values in before:
            same = tensor.numpy(force=True).tobytes() == values.numpy(force=True).tobytes()
            if not same or tensor._version != count:  # pyright: ignore
                raise DataRead(f"the plan of {bound.call.op} writes its tensors")
        planned.add(str(bound.call.op))
        return plan

    monkeypatch.setattr(dispatching, "plan_of", watched)

    def body(mesh: DeviceMesh) -> None:
        def ours(tensor: Tensor) -> DTensor:
            return DTensor.from_local(tensor.detach().clone(), mesh, [Replicate()])

        def mixed(tensor: Tensor) -> Tensor:
            return ours(tensor) if tensor.ndim else tensor.detach().clone()

        for info, sample in _samples(database.op_db):
            for run in (info.op, info.inplace_variant):
                for change in (ours, mixed) if run else ():
                    given = (sample.input, *sample.args), sample.kwargs
                    try:
                        args, kwargs = tree_map_only(Tensor, change, given)
                        run(*args, **kwargs)
                    except DataRead:
                        raise
                    except Exception:
                        continue  # what is refused is not of interest here

    run_on_mesh((1,), body)
    assert len(planned) > 400


def _samples(infos: Any) -> Iterator[tuple[Any, Any]]:
    for info in infos:
        if torch.float32 in info.dtypes:
            try:
                samples = list(islice(info.sample_inputs("cpu", torch.float32), 1))
            except Exception:
                continue  # this machine lacks what it takes
            yield from ((info, sample) for sample in samples)
