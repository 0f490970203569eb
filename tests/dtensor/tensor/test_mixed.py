"""DTensors of torch beside ours: they work together, or the error names the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.tensor as torch_tensor
from torch import Tensor, nn

from dtckpt.dtensor import (
    DeviceMesh,
    Shard,
    distribute_tensor,
    from_torch,
    redistribute_many,
    to_torch,
)
from dtckpt.dtensor.dtensor import DTensor
from dtckpt.errors import PlacementError

TORCH: Any = torch  # whose stubs leave some operators out
MESH = DeviceMesh("cpu", [0], rank=0)


def ours(*shape: int) -> Any:
    return DTensor.from_local(torch.ones(shape or (4,)), MESH, [Shard(0)], shape=shape or (4,))


def theirs(*shape: int) -> Any:
    local = torch.ones(shape or (4,))
    return torch_tensor.DTensor.from_local(local, MESH.to_torch(), [torch_tensor.Shard(0)])


def stepped(parameter: Tensor, gradient: Tensor, *, foreach: bool) -> None:
    leaf = nn.Parameter(parameter)
    leaf.grad = gradient
    torch.optim.AdamW([leaf], foreach=foreach).step()


def layer(make: Callable[..., Any]) -> nn.Linear:
    made = nn.Linear(4, 4, bias=False)
    made.weight = nn.Parameter(make(4, 4))
    return made


CALLS: dict[str, Callable[[], Any]] = {
    "add": lambda: ours() + theirs(),
    "number": lambda: ours() * theirs(1),
    "in place": lambda: ours().add_(theirs()),
    "copy_": lambda: ours().copy_(theirs()),
    "cat": lambda: torch.cat([ours(), theirs()]),
    "list": lambda: TORCH._foreach_add([ours()], [theirs()]),
    "set": lambda: ours().__setitem__(slice(0, 2), theirs(2)),
    "index": lambda: ours()[theirs().long()],
    "equal": lambda: torch.equal(ours(), theirs()),
    "norm": lambda: nn.utils.get_total_norm([ours(), theirs()]),
    "forward": lambda: layer(theirs)(ours(2, 4)),
    "optimizer": lambda: stepped(ours(), theirs(), foreach=False),
    "optimizer of lists": lambda: stepped(ours(), theirs(), foreach=True),
    "data": lambda: setattr(ours(), "data", theirs()),
    "from_local": lambda: DTensor.from_local(theirs(), MESH),
    "distribute_tensor": lambda: distribute_tensor(theirs(), MESH),
    "redistribute_many": lambda: redistribute_many([theirs()]),
    "from_torch of ours": lambda: from_torch(ours()),
    "from_torch of a tensor": lambda: from_torch(torch.ones(2)),  # pyright: ignore[reportArgumentType]
    "to_torch of torch's": lambda: to_torch(theirs()),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_error_names_the_way(name: str) -> None:
    with pytest.raises(PlacementError, match="from_torch"):
        CALLS[name]()


def test_a_state_dict_of_torchs_dtensors_is_refused_with_the_way() -> None:
    model, state = layer(ours), layer(theirs).state_dict()
    with pytest.raises(RuntimeError, match=r"from_torch\(tensor\)"):
        model.load_state_dict(state)
    model.load_state_dict({name: from_torch(tensor) for name, tensor in state.items()})


def test_torch_itself_refuses_what_begins_with_its_own() -> None:
    with pytest.raises(RuntimeError, match=r"got mixed torch.Tensor and DTensor"):
        _ = theirs() + ours()
    model, other = layer(ours), layer(theirs)
    optimizer, torchs = (torch.optim.SGD(m.parameters(), momentum=0.9) for m in (model, other))
    model.weight.grad, other.weight.grad = ours(4, 4), theirs(4, 4)
    torchs.step()
    optimizer.load_state_dict(torchs.state_dict())
    with pytest.raises(RuntimeError, match=r"got mixed torch.Tensor and DTensor"):
        optimizer.step()


def test_collectives_of_torch_refuse_a_dtensor() -> None:
    functional: Any = torch.ops._c10d_functional
    with pytest.raises(PlacementError, match=r"pass its to_local\(\)"):
        functional.all_reduce(ours(), "sum", "0")
    tensor = ours()
    assert functional.wait_tensor(tensor) is tensor, "it is waited for where it is needed"
