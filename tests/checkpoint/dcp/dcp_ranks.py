"""Four ranks use dtckpt in the place of torch.distributed.checkpoint, and as its storage.

Called by fsdp_ranks, in one process per rank.
"""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as torch_state_dict
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.tensor as torch_tensor
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.checkpoint.state_dict_saver import async_save as torch_async_save
from torch.distributed.checkpoint.state_dict_saver import save as torch_save
from torch.distributed.tensor import placement_types
from torch.utils._pytree import tree_map

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint import dcp
from dtckpt.checkpoint.dcp.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from dtckpt.dtensor import Layout, Packed, Shard, distribute_tensor
from dtckpt.errors import AlreadyCommitted, LayoutMismatch

from ..crossing import OURS, TORCHS, Training

Strided: Any = getattr(placement_types, "_StridedShard", None)  # private
TUTORIAL = Path(__file__).with_name("tutorial.py")
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"full_state_dict": True},
    {"full_state_dict": True, "cpu_offload": True},
    {"flatten_optimizer_state_dict": True},
    {"flatten_optimizer_state_dict": True, "full_state_dict": True},
    {"ignore_frozen_params": True},
)


def program(text: str) -> Any:
    """Return a module of a text."""
    module = types.ModuleType("tutorial")
    sys.modules["tutorial"] = module
    exec(compile(text, str(TUTORIAL), "exec"), vars(module))
    return module


def check_tutorial(folder: str) -> None:
    """The same program by either library comes to the same bits."""
    text = TUTORIAL.read_text()
    replaced = text.replace("torch.distributed.checkpoint", "dtckpt.checkpoint.dcp")
    found = [
        program(text).run(f"{folder}/torch"),
        program(replaced).run(f"{folder}/dtckpt"),
    ]
    assert len(found[0]) == len(found[1]) == 24
    for theirs, ours in zip(*found, strict=True):
        assert torch.equal(theirs, ours)
    assert not Path(f"{folder}/dtckpt/now/.metadata").exists()
    assert ckpt.verify(f"{folder}/dtckpt/background").problems == ()


def whole(value: Any) -> Any:
    """Return values of a state dict with whole tensors, copied."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        some: Any = leaf
        return (some.full_tensor() if hasattr(leaf, "full_tensor") else some).detach().clone()

    return tree_map(one, value)


def assert_same(given: Any, expected: Any, what: str) -> None:
    """Raise AssertionError unless nested values are equal, tensors bit for bit."""
    if isinstance(expected, Tensor):
        assert type(given) is type(expected), what
        assert given.dtype == expected.dtype, what
        assert torch.equal(given, expected), what
    elif isinstance(expected, dict):
        assert given.keys() == expected.keys(), f"{what}: {given.keys() ^ expected.keys()}"
        for key, value in expected.items():
            assert_same(given[key], value, f"{what}: {key}")
    elif isinstance(expected, list | tuple):
        assert len(given) == len(expected), what
        for one, other in zip(given, expected, strict=True):
            assert_same(one, other, what)
    else:
        assert given == expected, what


def prepared(training: Training) -> Training:
    """Freeze a parameter and make an optimizer of two groups."""
    next(training.model.parameters()).requires_grad_(False)
    params = [p for p in training.model.parameters() if p.requires_grad]
    groups = [{"params": params[:3]}, {"params": params[3:], "lr": 0.01}]
    training.optimizer = torch.optim.AdamW(groups, lr=0.02)
    return training


class Trainings:
    """A model of ours after a step, what it holds, and one of each library to load that into."""

    def __init__(self) -> None:
        self.source = prepared(Training(1, OURS, "FSDP x TP"))
        self.source.train(1)
        self.full = states(self.source, full_state_dict=True)
        self.ours = prepared(Training(2, OURS, "HSDP"))
        self.theirs = prepared(Training(2, TORCHS, "FSDP x TP"))


def blank(training: Training) -> Training:
    """Return a training with nothing in its tensors."""
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.zero_()
    training.optimizer.state.clear()
    return training


def states(training: Training, **options: Any) -> Any:
    """Return the state dicts of a training, as these options give them."""
    return get_state_dict(training.model, training.optimizer, options=StateDictOptions(**options))


def set_states(training: Training, given: Any, **options: Any) -> None:
    """Load state dicts, which torch's functions change."""
    model, moments = tree_map(_itself, given)
    set_state_dict(
        training.model,
        training.optimizer,
        model_state_dict=model,
        optim_state_dict=moments,
        options=StateDictOptions(**options),
    )


def _itself(leaf: Any) -> Any:
    return leaf


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def check_state_dicts(trainings: Trainings) -> None:
    """Every form is the same of our modules as of torch's, and is loaded into ours."""
    source, theirs = trainings.source, trainings.theirs
    torch_state_dict.set_state_dict(
        theirs.model,
        theirs.optimizer,
        model_state_dict=dict(trainings.full[0]),
        optim_state_dict=tree_map(_itself, trainings.full[1]),
        options=StateDictOptions(full_state_dict=True),
    )
    for options in OPTIONS:
        found = states(source, **options)
        assert_same(whole(found), whole(states(theirs, **options)), str(options))
        if {"full_state_dict", "cpu_offload"} <= options.keys():
            assert bool(found[0]) == (dist.get_rank() == 0)
            continue
        is_full = "full_state_dict" in options
        kept = tree_map(_copied, found)
        target = blank(trainings.ours if is_full else source)
        if "ignore_frozen_params" in options:
            frozen = {k: v for k, v in trainings.full[0].items() if k not in found[0]}
            assert len(frozen) == 1
            some = StateDictOptions(full_state_dict=True, strict=False)
            set_model_state_dict(target.model, frozen, options=some)
        set_states(target, kept, **options, strict="ignore_frozen_params" not in options)
        assert_same(states(target, full_state_dict=True), trainings.full, f"{options}")


def check_sent_from_the_first(trainings: Trainings) -> None:
    """What the first rank has is sent to all, in one call, into modules of either library."""
    sends = {"full_state_dict": True, "broadcast_from_rank0": True}
    is_first = dist.get_rank() == 0
    for target, flat in ((trainings.ours, True), (trainings.theirs, False)):
        moments = get_optimizer_state_dict(
            trainings.source.model,
            trainings.source.optimizer,
            options=StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=flat),
        )
        given = (trainings.full[0], moments) if is_first else ({}, {})
        set_states(blank(target), given, **sends, flatten_optimizer_state_dict=flat)
        assert_same(states(target, full_state_dict=True), trainings.full, target.name)
    target.optimizer.state.clear()
    set_states(target, ({}, trainings.full[1] if is_first else {}), **sends)
    assert_same(states(target, full_state_dict=True), trainings.full, "optimizers alone")


def check_names() -> None:
    """Names of wrapped and of tied parameters, and new optimizers, are as of torch's modules."""
    found: list[Any] = []
    for library in (OURS, TORCHS):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(8, 8), checkpoint_wrapper(nn.Linear(8, 8)))
        model.append(nn.Linear(8, 8, bias=False))
        model[2].weight = model[0].weight
        library.fsdp.fully_shard(model, mesh=library.mesh("cpu", (4,), mesh_dim_names=("dp",)))
        optimizer = torch.optim.AdamW(model.parameters())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            part = get_model_state_dict(
                model,
                submodules={model[1]},
                options=StateDictOptions(keep_submodule_prefixes=False),
            )
        state = get_state_dict(model, optimizer)
        found.append(whole([*state, part]))
        incomplete: Any = {k: v for k, v in state[0].items() if k != "0.bias"}
        told = set_model_state_dict(model, incomplete, options=StateDictOptions(strict=False))
        assert told.missing_keys == ["0.bias"]
    assert_same(found[0], found[1], "names")
    assert "1.weight" in found[0][0]
    assert list(found[0][2]) == ["weight", "bias"]


class Planner(DefaultSavePlanner):
    """As a framework brings one of its own."""


def save_later(state: dict[str, Any], **options: Any) -> None:
    """Save in the background by torch's function, and wait."""
    future: Any = torch_async_save(state, **options)
    future.result()


def check_storage(trainings: Trainings, folder: str) -> None:
    """A framework that calls torch's functions with our storage gets a checkpoint of ours."""
    source, expected = trainings.source, trainings.full
    for save in (torch_save, save_later):
        place = f"{folder}/{save.__name__}"
        model, moments = states(source)
        save(
            {"model": model, "optim": moments, "step": 5},
            checkpoint_id=place,
            storage_writer=dcp.CheckpointWriter(),
            planner=Planner(),
        )
        model, moments = states(blank(trainings.theirs))
        state = {"model": model, "optim": moments, "step": 0}
        torch_load(state, storage_reader=dcp.CheckpointReader(place))
        assert_same(whole((state["model"], state["optim"])), expected, place)
        assert state["step"] == 5
        target = blank(trainings.ours)
        ckpt.load({"model": target.model, "optim": target.optimizer, "step": 0}, place)
        assert_same(states(target, full_state_dict=True), expected, place)
        layout = ckpt.open(place).manifest.tensors["model/blocks.0.up.weight"].layout
        assert isinstance(layout, Layout)
        assert all(isinstance(placement, Shard) for placement in layout.placements)
        if dist.get_rank() == 0:
            assert ckpt.verify(place).problems == ()


def check_several_boxes(place: str) -> None:
    """Ranks that hold several boxes write and read each of them."""
    mesh = OURS.mesh("cpu", (4,))
    rows = torch.arange(72.0).view(12, 6)
    given = distribute_tensor(rows, mesh, [Packed(0, (8, 4))])
    torch_save({"packed": given}, storage_writer=dcp.CheckpointWriter(place))
    into = distribute_tensor(torch.zeros(12, 6), mesh, [Packed(0, (4, 8))])
    torch_load({"packed": into}, storage_reader=dcp.CheckpointReader(place))
    assert torch.equal(into.full_tensor(), rows)


def check_blocks_sent_from_the_first() -> None:
    """What is dealt out in blocks, and what is cut out of order, gets its own elements."""
    rank, rows = dist.get_rank(), torch.arange(44.0).view(11, 4)
    sends = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    theirs = TORCHS.mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ours = OURS.mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    packed = rows[:8]
    line = TORCHS.mesh("cpu", (4,))
    dealt = torch_tensor.DTensor.from_local(
        torch.cat([packed[rank : rank + 1], packed[4 + rank : 5 + rank]]),
        line,
        [Strided(0, split_factor=2)],
        run_check=False,
        shape=packed.shape,
        stride=packed.stride(),
    )
    uneven = torch_tensor.distribute_tensor(rows, theirs["tp"], [torch_tensor.Shard(0)])
    layer: Any = nn.Linear(4, 11, bias=False)
    layer.weight = nn.Parameter(uneven)
    torch_fsdp.fully_shard(layer, mesh=theirs["dp"])
    cases: list[tuple[Tensor, Any]] = [
        (packed, nn.Parameter(dealt)),
        (rows, layer.weight),
        (rows, nn.Parameter(distribute_tensor(rows, ours["tp"], [Packed(0, (6, 5))]))),
        (rows, nn.Parameter(distribute_tensor(rows, ours, [Shard(0, order=1), Shard(0, order=0)]))),
    ]
    for whole_rows, parameter in cases:
        held = parameter.to_local().detach().clone()
        for device in ("cpu", "meta"):
            target: Any = nn.Linear(4, len(whole_rows), bias=False)
            target.weight = parameter
            if device == "meta":
                target.weight = nn.Parameter(parameter.detach().to("meta"))
            else:
                parameter.to_local().detach().zero_()
            given: Any = {"weight": whole_rows.clone()} if rank == 0 else {}
            set_model_state_dict(target, given, options=sends)
            loaded: Any = target.weight
            assert torch.equal(loaded.to_local(), held), (parameter.placements, device)


def check_refusals(folder: str) -> None:
    """Errors are the same on all ranks, before anything is written, or changed."""
    rank = dist.get_rank()
    writer = dcp.CheckpointWriter(folder)
    dcp.save({"w": torch.ones(3)}, storage_writer=writer)
    caught: list[BaseException] = []
    calls: list[Callable[[], object]] = [
        lambda: dcp.save({"w": torch.ones(3)}, storage_writer=writer),
        lambda: torch_save({"w": torch.ones(3)}, storage_writer=writer),
        lambda: dcp.save({"w": torch.full((3,), rank)}, checkpoint_id=folder),
        lambda: dcp.load({"w": torch.ones(3), "v": 1}, checkpoint_id=folder),
    ]
    for call in calls:
        try:
            call()
        except BaseException as error:
            caught.append(error)
    kinds = [AlreadyCommitted, CheckpointException, LayoutMismatch, LayoutMismatch]
    for error, kind in zip(caught, kinds, strict=True):
        assert isinstance(error, kind)
        assert isinstance(error, CheckpointException), "which programs for torch catch"
        assert [*error.failures] == [rank] if kind is not CheckpointException else error.failures
    texts: list[Any] = [None] * 4
    dist.all_gather_object(texts, [str(caught[0]), str(caught[2]), str(caught[3])])
    assert all(told == texts[0] for told in texts)


def check_dcp(folder: str) -> None:
    """Run all checks on this rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        check_tutorial(f"{folder}/tutorial")
        trainings = Trainings()
        check_state_dicts(trainings)
        check_sent_from_the_first(trainings)
        check_storage(trainings, f"{folder}/storage")
        check_names()
        check_several_boxes(f"{folder}/boxes")
        check_blocks_sent_from_the_first()
        check_refusals(f"{folder}/refusals")
