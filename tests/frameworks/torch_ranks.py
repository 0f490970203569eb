"""What torch has had before DTensors: FSDP1 and ZeroRedundancyOptimizer, on two and four ranks.

Run by test_torch, one process per rank. All ranks train on the same batches, so that all trainings
have the bits of one on a single device.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import dtckpt.checkpoint as dcp
from dtckpt.errors import LayoutMismatch, Unsavable

from ..processes import join_group, leave_group
from .expected import STEPS, WHOLE, make_model, make_optimizer, train, trained
from .megatron_ranks import check_megatron

sharded_tensor: Any = importlib.import_module("torch.distributed._shard.sharded_tensor")
FSDP: Any = FullyShardedDataParallel  # torch's signatures are partly annotated
Zero: Any = ZeroRedundancyOptimizer
SHARDED, LOCAL, FULL = (
    StateDictType.SHARDED_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
    StateDictType.FULL_STATE_DICT,
)
KINDS: dict[str, tuple[dict[str, Any], StateDictType]] = {
    "sharded tensors": ({}, SHARDED),
    "original parameters": ({"use_orig_params": True}, SHARDED),
    "dtensors": ({"use_orig_params": True, "device_mesh": ()}, SHARDED),
    "flat": ({}, LOCAL),
    "full": ({}, FULL),
}
"""How FSDP1 wraps a module, and what its state dict has."""


def _world() -> Any:
    return dist.group.WORLD


def wrapped(kind: str, seed: int, group: Any, steps: int = STEPS) -> tuple[Any, Any]:
    """A training under FSDP1 on the ranks of a group."""
    options, state_dict_type = dict(KINDS[kind][0]), KINDS[kind][1]
    if "device_mesh" in options:
        ranks = dist.get_process_group_ranks(group)
        options["device_mesh"] = DeviceMesh.from_group(group or _world(), "cpu", ranks)
    else:
        options["process_group"] = group
    model = FSDP(make_model(seed), device_id=torch.device("cpu"), **options)
    FSDP.set_state_dict_type(model, state_dict_type)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, steps)
    return model, optimizer


def state_of(model: Any, optimizer: Any, group: Any = None) -> dict[str, Any]:
    """What FSDP1 users save."""
    optim_state = FSDP.optim_state_dict(model, optimizer, group=group)
    return {"model": model.state_dict(), "optimizer": optim_state}


def take(model: Any, optimizer: Any, state: dict[str, Any]) -> None:
    """Hand over what was loaded, as FSDP1 users do."""
    model.load_state_dict(state["model"])
    taken = FSDP.optim_state_dict_to_load(model, optimizer, state["optimizer"])
    optimizer.load_state_dict(taken)


def contents(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """All that a training under FSDP1 has, whole, on every rank."""
    FSDP.set_state_dict_type(model, FULL)
    found = {name: value.clone() for name, value in model.state_dict().items()}
    for name, entry in FSDP.optim_state_dict(model, optimizer)["state"].items():
        found |= {f"{name} {key}": value for key, value in entry.items()}
    return found


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The same of a state dict with DTensors."""
    found = dict(state["model"])
    for name, entry in state["optimizer"]["state"].items():
        found |= {f"{name} {key}": value for key, value in entry.items()}
    return {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in found.items()}


def spoil(model: Any, optimizer: Any) -> None:
    """Leave no value that a load has to bring."""
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(-1)
    for entry in optimizer.state.values():
        for value in entry.values():
            value.fill_(-1)


def same(given: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], what: str) -> None:
    """Raise unless two trainings have the same bits."""
    assert given.keys() == wanted.keys(), (what, given.keys() ^ wanted.keys())
    for name, value in wanted.items():
        assert given[name].equal(value), f"{what}: {name}"


def refused(
    call: Callable[..., object], state: Any, place: Path, kind: type[Exception], text: str
) -> None:
    """Raise unless a state is refused with these words."""
    with pytest.raises(kind, match=text):
        call(state, place)


def save_on_two(folder: Path, pair: Any) -> None:
    """Save a training of every kind on two ranks; nothing is sent but what the state dict needs."""
    for kind in KINDS:
        state = state_of(*wrapped(kind, 0, pair), pair)
        with CommDebugMode() as sent:
            dcp.save(state, folder / kind, process_group=pair)
        assert sent.get_total_counts() == 0, sent.get_comm_counts()
    model = nn.parallel.DistributedDataParallel(make_model(0), process_group=pair)
    optimizer = make_optimizer(
        model.parameters(), Zero, optimizer_class=torch.optim.AdamW, process_group=pair
    )
    train(model, optimizer)
    with CommDebugMode() as sent:
        state = {"model": model.module, "optimizer": optimizer}
        dcp.save(state, folder / "owners", process_group=pair)
        dcp.save({"optimizer": optimizer}, folder / "numbers", process_group=pair)
    assert sent.get_total_counts() == 0, sent.get_comm_counts()


def save_copies(folder: Path) -> None:
    """Save under HYBRID_SHARD, where two pairs of ranks have the same parts."""
    rank = dist.get_rank()
    pairs = [
        [dist.new_group(list(ranks)) for ranks in way]
        for way in ([(0, 1), (2, 3)], [(0, 2), (1, 3)])
    ]
    strategy = ShardingStrategy.HYBRID_SHARD
    groups = (pairs[0][rank // 2], pairs[1][rank % 2])
    cpu = torch.device("cpu")
    model = FSDP(make_model(0), device_id=cpu, process_group=groups, sharding_strategy=strategy)
    FSDP.set_state_dict_type(model, SHARDED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    dcp.save(state_of(model, optimizer), folder / "copies")


def load_on_four(folder: Path) -> None:
    """Load what two ranks have saved, and what one has, on four."""
    rank = dist.get_rank()
    source, source_optimizer = wrapped("full", 0, None)
    wanted = contents(source, source_optimizer)
    everywhere = ["sharded tensors", "original parameters", "dtensors", "full", "copies"]
    places = {"sharded tensors": everywhere}
    places |= {"dtensors": ["sharded tensors", "original parameters"], "flat": ["flat"]}
    for kind, saved in places.items():
        model, optimizer = wrapped(kind, 1, None, steps=1)
        for place in saved:
            spoil(model, optimizer)
            state = state_of(model, optimizer)
            live = {"model": model} if kind == "sharded tensors" else {}
            dcp.load(state | live, folder / place)
            if live:  # and has its state already
                state["model"] = model.state_dict()
            what = f"{place} as {kind} on {rank}"
            if kind == "dtensors":  # with use_orig_params torch does not hand over the same bits
                same(whole(state), wanted, what)
                continue
            take(model, optimizer, state)
            same(contents(model, optimizer), wanted, what)
            FSDP.set_state_dict_type(model, KINDS[kind][1])
    model, optimizer = wrapped("sharded tensors", 1, None, steps=0)
    parts, optim_parts = get_state_dict(model, optimizer)
    dcp.load({"model": parts, "optimizer": optim_parts}, folder / "copies")
    set_state_dict(model, optimizer, model_state_dict=parts, optim_state_dict=optim_parts)
    same(contents(model, optimizer), wanted, "by get_state_dict")
    for place in ("owners", "one"):
        model = nn.parallel.DistributedDataParallel(make_model(1))
        optimizer = make_optimizer(model.parameters(), Zero, optimizer_class=torch.optim.AdamW)
        dcp.load({"model": model.module, "optimizer": optimizer}, folder / place)
        check_owners(model, optimizer)
    alone = list(make_model(0).parameters())
    optimizer = make_optimizer(alone, Zero, optimizer_class=torch.optim.AdamW)
    dcp.load({"optimizer": optimizer}, folder / "numbers")
    _, known = trained(0)
    for param, entry in zip(alone, known.state.values(), strict=True):
        if param in optimizer.optim.state:
            assert optimizer.optim.state[param]["exp_avg"].equal(entry["exp_avg"])


def sharded(boxes: list[tuple[int, int, int, int]], *, fill: bool = True) -> Any:
    """A ShardedTensor of which this rank has boxes of (row, column, rows, columns)."""
    rank, whole = dist.get_rank(), WHOLE["rows"]
    shards: list[Any] = []
    for row, column, rows, columns in boxes:
        part = whole[row : row + rows, column : column + columns].clone()
        shards.append(
            sharded_tensor.Shard(
                part if fill else torch.zeros_like(part),
                ShardMetadata([row, column], [rows, columns], f"rank:{rank}/cpu"),
            )
        )
    return sharded_tensor.init_from_local_shards(shards, *whole.shape)


def check_shards(folder: Path) -> None:
    """Ranks with two shards and with none, as torchrec deals out its tables."""
    rank = dist.get_rank()
    rows = [[(0, 0, 3, 4), (7, 0, 3, 4)], [(3, 0, 1, 4)], [(4, 0, 3, 4)], []][rank]
    columns = [[], [(0, 0, 10, 1)], [], [(0, 3, 10, 1), (0, 1, 10, 2)]][rank]
    for saved, wanted in ((rows, columns), (columns, rows)):
        place = folder / ("rows" if saved is rows else "columns")
        dcp.save({"table": sharded(saved)}, place)
        into = sharded(wanted, fill=False)
        dcp.load({"table": into}, place)
        for shard, other in zip(into.local_shards(), sharded(wanted).local_shards(), strict=True):
            assert shard.tensor.equal(other.tensor)


def check_owners(model: nn.Module, optimizer: Any) -> None:
    """Raise unless each rank has what it owns of the state, and all go on as one device does."""
    alone, alone_optimizer = trained(0)
    assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.2]
    assert [g["lr"] for g in optimizer.optim.param_groups] == [0.1, 0.2]
    own = [param for group in optimizer.optim.param_groups for param in group["params"]]
    assert set(optimizer.optim.state) == set(own)
    assert not optimizer.state, "nothing is there twice"
    train(model, optimizer)
    train(alone, alone_optimizer)
    for param, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert param.equal(other)


def check_refused(folder: Path) -> None:
    """What does not say of which parameters it is a part is refused, at save and at load."""
    target = folder / "refused"
    for kind in ("sharded tensors", "original parameters"):
        model, optimizer = wrapped(kind, 0, None)
        live = {"model": model, "optimizer": optimizer}
        text = "optimizer: its parameters are those of FullyShardedDataParallel"
        refused(dcp.save, live, target, Unsavable, text)
        refused(dcp.load, live, folder / kind, LayoutMismatch, text)
        if kind == "sharded tensors":
            named = dict(model.named_parameters())
            refused(dcp.save, named, target, Unsavable, "is a FlatParameter of")
        else:
            FSDP.set_state_dict_type(model, LOCAL)
            refused(dcp.save, model.state_dict(), target, LayoutMismatch, "'0.weight' is")


def main(folder: Path) -> None:
    """Save on two ranks, load on four."""
    warnings.simplefilter("ignore")  # FSDP1 is deprecated in many words
    rank = join_group()
    pair = dist.new_group([0, 1])
    if rank == 0:
        model, optimizer = trained(0)
        dcp.save({"model": model, "optimizer": optimizer}, folder / "one", no_dist=True)
        dcp.save({"model": WHOLE}, folder / "megatron one", no_dist=True)
    if rank < 2:
        save_on_two(folder, pair)
    save_copies(folder)
    load_on_four(folder)
    check_refused(folder)
    check_shards(folder)
    check_megatron(folder)
    leave_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
