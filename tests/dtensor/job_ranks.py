"""Four ranks of a job: what needs torch's default group, and torch's own DTensors beside ours.

Run by test_interop, one process per rank.
"""

# pyright: reportPrivateImportUsage=false
# torch does not mark what its checkpoint package exports.

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import sys
from datetime import timedelta
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as torch_checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh as torch_init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor import distribute_tensor as torch_distribute
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from dtckpt.dtensor import (
    DeviceMesh,
    Layout,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    from_torch,
    init_device_mesh,
    layout_from_torch,
    rand,
    random,
    to_torch,
)
from dtckpt.dtensor.geometry.placement import Placement
from dtckpt.dtensor.mesh.torch_layouts import placements_to_torch
from dtckpt.dtensor.mesh.torch_mesh import mesh_from_torch
from dtckpt.errors import PlacementError

from ..processes import join_group, leave_group


def all_orders(axes: int, ndim: int) -> list[tuple[Placement, ...]]:
    """Every way to cut dims by some axes, in every order of those that cut one dim."""
    found: list[tuple[Placement, ...]] = []
    for dims in itertools.product([None, *range(ndim)], repeat=axes):
        cuts = [[a for a, d in enumerate(dims) if d == dim] for dim in range(ndim)]
        for orders in itertools.product(*(itertools.permutations(on_dim) for on_dim in cuts)):
            placements: list[Placement] = [Replicate()] * axes
            for dim, order in enumerate(orders):
                for position, axis in enumerate(order):
                    placements[axis] = Shard(dim, position)
            found.append(tuple(placements))
    return found


def check_every_order(mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Torch lays out, and gathers, what we do, by the placements that we translate to."""
    mesh = torch_init_device_mesh("cpu", mesh_shape)
    whole = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    for placements in all_orders(len(mesh_shape), len(shape)):
        layout = Layout(mesh_from_torch(mesh), placements, shape)
        here = mesh.get_coordinate()
        assert here is not None
        mine = whole[layout.box(tuple(here)).slices]
        theirs = torch_distribute(whole, mesh, placements_to_torch(layout), src_data_rank=None)
        assert torch.equal(theirs.to_local(), mine), layout
        ours = from_torch(theirs)
        assert torch.equal(ours.full_tensor(), whole), layout
        back: Any = to_torch(ours)
        assert back.placements == theirs.placements, layout
        assert back.to_local().untyped_storage().data_ptr() == ours.to_local().data_ptr() or (
            not mine.numel()
        )
        assert torch.equal(back.full_tensor(), whole), layout


def check_empty_parts() -> None:
    """FSDP2 leaves parts that are empty along one dim empty along all of them."""
    mesh = torch_init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))
    net = torch.nn.Linear(2, 3, bias=False)
    whole = torch.arange(6.0).view(3, 2)
    with torch.no_grad():
        net.weight.copy_(whole)
    parallelize_module(net, mesh["tp"], RowwiseParallel())
    fully_shard(net, mesh=mesh["dp"])
    weight: Any = net.weight
    ours = from_torch(weight)
    assert ours.to_local().shape == (3, 1 if mesh.get_local_rank("tp") < 2 else 0)
    assert torch.equal(ours.full_tensor(), whole)


class PublicOnly:
    """A torch DTensor of which nothing private can be read."""

    def __init__(self, tensor: TorchDTensor) -> None:
        self.hidden = tensor

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Passes for the class of what it hides."""
        return TorchDTensor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.hidden, name)


def check_adoption() -> None:
    """A gather that is under way is waited for; public names of torch are enough."""
    mesh = torch_init_device_mesh("cpu", (4,))
    whole = torch.arange(10.0).view(5, 2)
    theirs = torch_distribute(whole, mesh, [TorchShard(0)])
    gathered = theirs.redistribute(placements=[TorchReplicate()], async_op=True)
    local = from_torch(gathered).to_local()
    assert type(local) is torch.Tensor
    assert torch.equal(local, whole)
    theirs.requires_grad_()
    public: Any = PublicOnly(theirs)
    ours = from_torch(public)
    assert torch.equal(ours.full_tensor(), whole)
    assert ours.requires_grad
    assert ours.to_local().data_ptr() == theirs.to_local().data_ptr()


def check_meshes_without_a_common_group() -> None:
    """Groups over two meshes, and over several axes of one, are made where they are needed."""
    rank = dist.get_rank()
    whole = torch.arange(35.0).view(7, 5)
    for source, target in [
        ([0, 1], [2, 3]),
        ([0, 1, 2], [3, 2]),
        ([1, 2], [2, 0]),
        ([0, 1], [2, 3]),
    ]:
        here, there = DeviceMesh("cpu", source), DeviceMesh("cpu", target)
        tensor = distribute_tensor(whole, here, [Shard(0)])
        moved = tensor.redistribute(there, [Shard(1)])
        assert torch.equal(moved.full_tensor(), whole if rank in target else torch.empty(0))
        back = moved.redistribute(here)
        assert torch.equal(back.to_local(), whole if rank in source else torch.empty(0))
    mesh = init_device_mesh("cpu", (2, 2, 1))
    for placements in itertools.product([Shard(0), Shard(1), Replicate(), Partial()], repeat=3):
        tensor = distribute_tensor(whole, mesh, placements)
        for target in ([Replicate()] * 3, [Shard(1), Shard(0), Shard(0)]):
            assert torch.equal(tensor.redistribute(placements=target).full_tensor(), whole)


def check_random_numbers_of_a_torch_mesh() -> None:
    """Seeds and counts last as long as torch's mesh, whatever is collected on some rank."""
    mesh = torch_init_device_mesh("cpu", (4,))
    random.manual_seed(7, mesh)
    assert random.get_rng_state(mesh) == {"seed": 7, "offset": 0}
    drawn: list[list[float]] = []
    for _ in range(2):
        drawn.append(rand(8, device_mesh=mesh).to_local().tolist())
        if dist.get_rank() == 0:
            gc.collect()
    assert drawn[0] != drawn[1]
    assert random.get_rng_state(mesh) == {"seed": 7, "offset": 2}
    ours = ref(DeviceMesh.from_torch(mesh))
    del mesh
    gc.collect()
    assert ours() is None


def a_model(mesh: DeviceMesh, *, meta: bool = False) -> torch.nn.Linear:
    """A layer with a weight in unequal shards; its bias is replicated."""
    weight = torch.arange(18.0, device="meta" if meta else "cpu").view(6, 3)
    layer = torch.nn.Linear(3, 6, device=weight.device)
    layer.weight = torch.nn.Parameter(
        distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None)
    )
    return distribute_module(layer, mesh)  # pyright: ignore[reportReturnType]


def check_torch_state_dicts() -> None:
    """torch's own functions gather our DTensors, and cut what they load into them."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (4,))
    model = a_model(mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    parameter: Any = model.weight
    weight, moment = parameter.full_tensor(), optimizer.state[parameter]["exp_avg"].full_tensor()
    full = StateDictOptions(full_state_dict=True)
    state: Any = get_model_state_dict(model, options=full)
    moments: Any = get_optimizer_state_dict(model, optimizer, options=full)
    assert type(state["weight"]) is torch.Tensor
    assert torch.equal(state["weight"], weight)
    assert torch.equal(moments["state"]["weight"]["exp_avg"], moment)
    on_cpu = StateDictOptions(full_state_dict=True, cpu_offload=True)
    assert bool(get_model_state_dict(model, options=on_cpu)) == (rank == 0)
    for options in (full, StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)):
        gives = rank == 0 or not options.broadcast_from_rank0
        for meta in (False, True):
            loaded = a_model(mesh, meta=meta)
            set_model_state_dict(loaded, dict(state) if gives else {}, options=options)
            new: Any = loaded.weight
            assert new.placements == (Shard(0),)
            assert torch.equal(new.full_tensor(), weight)
        other = a_model(mesh)
        resumed = torch.optim.AdamW(other.parameters())
        given = copy.deepcopy(moments) if gives else {}
        set_optimizer_state_dict(other, resumed, given, options=options)
        found = resumed.state[other.weight]["exp_avg"]
        assert found.placements == (Shard(0),)
        assert torch.equal(found.full_tensor(), moment)


def check_that_ranks_make_the_same_mesh() -> None:
    """A mesh that differs between ranks is refused on all of them, and so is one that is none."""
    rank = dist.get_rank()
    for ours, others in (([3, 2, 1, 0], [0, 1, 2, 3]), ([[0, 1], [2, 3]], [0, 1]), ([0, 0], [0])):
        given = ours if rank == 0 else others
        with pytest.raises(PlacementError, match=r"ranks disagree about the mesh: \[1, 2, 3\]"):
            DeviceMesh("cpu", given)
    with pytest.raises(PlacementError, match="ranks disagree"):
        DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=["a" if rank else "b"])
    made = DeviceMesh("cpu", [3, 1] if rank % 2 else torch.tensor([3, 1]))
    assert made.get_coordinate() == {3: (0,), 1: (1,)}.get(rank)
    assert made.device == torch.device("cpu")


def check_streams_of_random_numbers() -> None:
    """Meshes that share ranks never draw the same numbers; torch's seeds count."""
    rank = dist.get_rank()
    torch.manual_seed(20 + rank)  # that of the first rank of a mesh counts
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def drawn(of: DeviceMesh) -> tuple[float, ...]:
        return tuple(
            rand(6, device_mesh=of, placements=[Shard(0)] * of.ndim).full_tensor().tolist()
        )

    dp, tp = drawn(mesh["dp"]), drawn(mesh["tp"])
    meshes = (
        mesh,
        mesh.flatten(),
        DeviceMesh("cpu", [0, 1, 2, 3]),
        DeviceMesh("cpu", [3, 2, 1, 0]),
    )
    found = [dp, tp, *map(drawn, meshes)]
    assert len(set(found)) == len(found), "no mesh repeats another one's numbers"
    everywhere: list[Any] = [None] * 4
    dist.all_gather_object(everywhere, found)
    assert all(other[2:] == found[2:] for other in everywhere)
    assert everywhere[0][0] == everywhere[2][0], "what shares a coordinate draws alike"
    seen: dict[int, list[tuple[float, ...]]] = {}
    for seed in (5, 6, 5):
        torch.manual_seed(seed + 10 * rank)
        now = [drawn(mesh), drawn(mesh)]
        assert seen.setdefault(seed, now) == now, "torch.manual_seed begins anew"
    assert seen[5] != seen[6]
    torch.manual_seed(5 + 10 * rank)
    assert [drawn(mesh), drawn(mesh)] == seen[5], "also with the seed that there was"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        drawn(mesh)
    assert drawn(mesh) not in seen[5], "after another seed the draws go on"
    whole: list[Any] = [None] * 4
    dist.all_gather_object(whole, [seen, random.get_rng_state(mesh)])
    assert all(other == whole[0] for other in whole)
    store: Any = dist.group.WORLD.get_group_store()  # pyright: ignore[reportOptionalMemberAccess]
    patience = store.timeout
    if rank == 2:
        store.set_timeout(timedelta(seconds=1))
        torch.manual_seed(1234)
        with pytest.raises(
            PlacementError, match=r"seeded or set back on this rank \(2\), and ranks \[0, 1, 3\]"
        ):
            drawn(mesh)
        store.set_timeout(patience)
    dist.barrier()
    torch.manual_seed(1235)
    with pytest.raises(PlacementError, match=r"none are drawn|gave up"):  # at once
        drawn(mesh)
    random.manual_seed(3, mesh)
    dist.all_gather_object(everywhere, drawn(mesh))
    assert len(set(everywhere)) == 1


def check_our_mesh_in_torchs_code() -> None:
    """torch's code takes our mesh for one of its own, whole and in parts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(33.0).view(11, 3)
    inputs = torch.ones(2, 3)

    def trained(dp: Any, tp: Any) -> Any:
        net = torch.nn.Linear(3, 11, bias=False)
        with torch.no_grad():
            net.weight.copy_(whole)
        parallelize_module(net, tp, ColwiseParallel())
        fully_shard(net, mesh=dp)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        net(inputs).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        return net.weight

    theirs = torch_init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    wanted = trained(theirs["dp"], theirs["tp"])
    found = trained(mesh["dp"], mesh["tp"])
    assert found.placements == wanted.placements
    assert torch.equal(found.full_tensor(), wanted.full_tensor())
    assert torch.equal(from_torch(found).full_tensor(), wanted.full_tensor())
    hybrid = torch.nn.Linear(3, 11, bias=False)
    fully_shard(hybrid, mesh=mesh)
    assert from_torch(hybrid.weight).device_mesh is mesh  # pyright: ignore[reportArgumentType]
    rank = torch.tensor(float(dist.get_rank()))
    assert functional.all_reduce(rank, "sum", mesh["tp"]) == mesh["tp"].mesh.sum()
    assert functional.all_reduce(rank, "sum", (mesh, 0)) == mesh["dp"].mesh.sum()
    made = torch_distribute(whole, mesh, [TorchShard(0), TorchShard(1)])
    moved = made.redistribute(placements=[TorchReplicate(), TorchShard(0)])
    assert torch.equal(moved.full_tensor(), whole)
    assert mesh.to_torch() is mesh.to_torch()
    assert mesh["tp"].to_torch() == mesh.to_torch()["tp"]
    assert DeviceMesh.from_torch(mesh.to_torch()) is mesh
    assert DeviceMesh.from_torch(theirs).to_torch() is theirs
    reversed_mesh = DeviceMesh("cpu", [3, 2, 1, 0])
    with pytest.raises(PlacementError, match="in their order"):
        reversed_mesh.to_torch()


def check_parts_of_a_mesh() -> None:
    """Axes become one or several; meshes may have fewer ranks than the job."""
    rank, whole = dist.get_rank(), torch.arange(35.0).view(7, 5)
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "pp"))
    split = mesh.unflatten("dp", (2, 2), ("dp", "tp"))
    assert split.mesh_dim_names == ("dp", "tp", "pp")
    assert split.get_group("pp") is mesh.get_group("pp")
    assert split["dp", "tp"].flatten("fsdp").get_group() is mesh.get_group("dp")
    assert split["fsdp"] is split["dp", "tp"].flatten("fsdp")
    assert split["fsdp", "pp"].shape == (4, 1)
    both = DeviceMesh.concat([split["tp"], split["dp"]])
    assert both is split["tp", "dp"]
    again = pickle.loads(pickle.dumps(both))
    assert again == both
    assert again.mesh_dim_names == ("tp", "dp")
    for other in (split["dp"], split["tp"], both, again, split):
        tensor = distribute_tensor(whole, other, [Shard(0)] + [Shard(1)] * (other.ndim - 1))
        assert torch.equal(tensor.full_tensor(), whole)
    loaded = pickle.loads(pickle.dumps(tensor))
    assert torch.equal(loaded.full_tensor(), whole)
    small = init_device_mesh("cpu", (3,), backend_override={0: "gloo"})
    tensor = distribute_tensor(whole, small, [Shard(0)])
    assert torch.equal(tensor.full_tensor(), whole if rank < 3 else torch.empty(0))
    special = init_device_mesh("cpu", (4,), mesh_dim_names=("x",), backend_override={"x": "gloo"})
    assert special.get_group() is not dist.group.WORLD
    assert torch.equal(distribute_tensor(whole, special, [Shard(0)]).full_tensor(), whole)
    line = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    own = line.flatten("all", backend_override="gloo").get_group()
    assert own is not dist.group.WORLD
    assert line["all"].get_group() is own
    with pytest.raises(PlacementError, match="comes too late"):
        mesh["dp"].flatten("other", backend_override="gloo")
    with pytest.raises(PlacementError, match="the job has 4"):
        init_device_mesh("cpu", (5,))


def main(folder: str) -> None:
    """Run all checks on this rank."""
    join_group()
    check_meshes_without_a_common_group()
    check_every_order((2, 2), (5, 3))
    check_every_order((2, 1, 2), (7,))
    check_empty_parts()
    check_adoption()
    check_random_numbers_of_a_torch_mesh()
    check_torch_state_dicts()
    check_that_ranks_make_the_same_mesh()
    check_streams_of_random_numbers()
    check_our_mesh_in_torchs_code()
    check_parts_of_a_mesh()
    torch_mesh = torch_init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = torch.nn.Linear(3, 11, bias=False)
    whole = torch.arange(33.0).view(11, 3)
    with torch.no_grad():
        net.weight.copy_(whole)
    parallelize_module(net, torch_mesh["tp"], ColwiseParallel())
    fully_shard(net, mesh=torch_mesh["dp"])
    weight: Any = net.weight
    assert layout_from_torch(weight).placements == (Shard(0, 1), Shard(0, 0))
    ours = from_torch(weight)
    assert torch.equal(ours.full_tensor(), whole)
    assert to_torch(ours).placements == weight.placements
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    reversed_mesh = DeviceMesh("cpu", [[3, 1], [2, 0]])
    for other in (mesh, reversed_mesh, mesh["tp", "dp"]):
        moved = distribute_tensor(whole, other, [Shard(0), Shard(1)])
        assert torch.equal(moved.redistribute(placements=[Shard(1), Shard(0)]).full_tensor(), whole)
        assert moved.sum().item() == whole.sum().item()
    torch_checkpoint.save({"w": ours.detach(), "m": moved}, checkpoint_id=f"{folder}/saved")
    target = {"w": distribute_tensor(torch.zeros(11, 3), mesh, [Replicate(), Shard(1)])}
    torch_checkpoint.load(target, checkpoint_id=f"{folder}/saved")
    assert torch.equal(target["w"].full_tensor(), whole)
    leave_group()


if __name__ == "__main__":
    main(sys.argv[1])
