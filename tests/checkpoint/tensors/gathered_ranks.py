"""Two ranks whose FSDP modules have gathered parameters: loads and saves of these are refused.

Run by test_gathered, one process per rank. Every check is made on every rank.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import dtckpt.checkpoint as ckpt
from dtckpt.dtensor import fsdp as ours
from dtckpt.errors import LayoutMismatch

from ...processes import join_group, leave_group

X = torch.ones(2, 6)
NOT_SHARDED = "not sharded now"


def net(seed: int, shard: Callable[..., Any] = fully_shard, **options: Any) -> Any:
    """Two layers, of which the second has an FSDP module of its own."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    shard(model[1], **options)
    shard(model, **options)
    return model


def output(model: nn.Module) -> torch.Tensor:
    """What the model computes, without a graph."""
    with torch.no_grad():
        return model(X)


def reshard(model: nn.Module) -> None:
    """Follow the remedy that the messages name."""
    for part in model.modules():
        if isinstance(part, ours.FSDPModule) or hasattr(part, "reshard"):
            part.reshard()  # pyright: ignore


def parameters_of(model: nn.Module) -> dict[str, Any]:
    """What people pass who do not ask for the state dict."""
    return dict(model.named_parameters())


def refusal(call: Callable[[], object]) -> str:
    """Return the message of a call that has to fail, which is the same on all ranks."""
    try:
        call()
    except LayoutMismatch as error:
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, str(error).rpartition(" failed on rank")[2])
        assert len(set(told)) == 1, told
        return str(error)
    raise AssertionError("nothing was refused")


def check_loads(at: str, want: torch.Tensor, shard: Callable[..., Any]) -> None:
    """Gathered parameters are refused before anything changes; each remedy gives what was saved."""
    for way in ("forward", "unshard"):
        model = net(7, shard, reshard_after_forward=False)
        before = output(model)
        model(X)  # with a graph, for whose backward pass our FSDP keeps them, too
        if way == "unshard":
            reshard(model)
            for part in (model, model[1]):
                part.unshard()
        given = parameters_of(model)
        message = refusal(lambda given=given: ckpt.load({"m": given}, at))
        assert NOT_SHARDED in message, message
        assert "reshard()" in message, message
        assert "m/0.weight" in message, message
        assert output(model).equal(before), "something was overwritten"
        reshard(model)
        assert output(model).equal(before), "something was overwritten"
        # Remedies: the module, its state dict, or parameters once they are sharded.
        for remedy in ("module", "state_dict", "reshard"):
            model = net(7, shard, reshard_after_forward=False)
            model(X)
            if remedy == "reshard":
                reshard(model)
            gives: dict[str, Callable[[nn.Module], Any]] = {
                "module": lambda model: model,
                "state_dict": lambda model: model.state_dict(),
                "reshard": parameters_of,
            }
            ckpt.load({"m": gives[remedy](model)}, at)
            assert output(model).equal(want), remedy
            reshard(model)
            assert output(model).equal(want), remedy


def check_state_dict_of_before(at: str, want: torch.Tensor) -> None:
    """Sharded parameters of which torch's module keeps gathered copies are refused, too."""
    model = net(7, reshard_after_forward=False)
    given = model.state_dict()
    before = output(model)
    message = refusal(lambda: ckpt.load({"m": given}, at))
    assert "still has gathered copies" in message, message
    reshard(model)
    assert output(model).equal(before), "something was overwritten"
    reshard(model)
    ckpt.load({"m": given}, at)
    assert output(model).equal(want)


def check_gathering_under_way(at: str, want: torch.Tensor) -> None:
    """Parameters that are on their way are as if they were there."""
    model = net(7)
    output(model)
    reshard(model)
    given = parameters_of(model)
    handles = [part.unshard(async_op=True) for part in (model, model[1])]
    message = refusal(lambda: ckpt.load({"m": given}, at))
    assert "still has gathered copies" in message, message
    for handle in handles:
        handle.wait()
    reshard(model)
    ckpt.load({"m": given}, at)
    assert output(model).equal(want)


def check_freed(at: str) -> None:
    """Gathered copies that another object of the same state has freed are refused."""
    model = net(7)
    before = output(model)
    given = {"m": parameters_of(model), "n": model}
    assert NOT_SHARDED in refusal(lambda: ckpt.load(given, at, strict=False))
    output(model)
    given = {"m": parameters_of(model), "n": model}
    assert NOT_SHARDED in refusal(lambda: ckpt.save(given, f"{at}-freed"))
    assert output(model).equal(before), "something was overwritten"


def check_copies_of_ours(at: str) -> None:
    """Copies of our FSDP modules are known, too."""
    model = copy.deepcopy(net(7, ours.fully_shard, reshard_after_forward=False))
    model(X)
    assert NOT_SHARDED in refusal(lambda: ckpt.load({"m": parameters_of(model)}, at))


def check_ours_fills_sharded_ones(at: str, want: torch.Tensor) -> None:
    """Our FSDP gathers again what was written, so that sharded parameters may be filled."""
    model = net(7, ours.fully_shard, reshard_after_forward=False)
    given = model.state_dict()
    output(model)
    ckpt.load({"m": given}, at)
    assert output(model).equal(want)


def check_saves(folder: Path, shard: Callable[..., Any], policy: Any, name: str) -> None:
    """Gathered copies, here in another dtype, are not saved; the remedies save the parameters."""
    model = net(3, shard, reshard_after_forward=False, mp_policy=policy)
    model(X)
    message = refusal(lambda: ckpt.save({"m": parameters_of(model)}, folder / name))
    assert NOT_SHARDED in message, message
    reshard(model)
    ckpt.save({"m": parameters_of(model)}, folder / name)
    model(X)
    ckpt.save({"m": model}, folder / f"{name}-module")
    reshard(model)
    for saved in (name, f"{name}-module"):
        for key, parameter in model.named_parameters():
            found = ckpt.open(folder / saved)[f"m/{key}"][...]
            assert found.dtype == torch.float32
            assert torch.equal(found, parameter.full_tensor()), (saved, key)


def main(folder: Path) -> None:
    """Save one model, then look at loads and saves of others."""
    model = net(0)
    want = output(model)
    at = str(folder / "a")
    ckpt.save({"m": model}, at)
    check_loads(at, want, fully_shard)
    check_loads(at, want, ours.fully_shard)
    check_state_dict_of_before(at, want)
    check_gathering_under_way(at, want)
    check_freed(at)
    check_copies_of_ours(at)
    check_ours_fills_sharded_ones(at, want)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    check_saves(folder, fully_shard, policy, "b")
    check_saves(
        folder, ours.fully_shard, ours.MixedPrecisionPolicy(param_dtype=torch.bfloat16), "c"
    )


if __name__ == "__main__":
    join_group()
    main(Path(sys.argv[1]))
    leave_group()
