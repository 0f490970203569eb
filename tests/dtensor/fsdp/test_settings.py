"""Methods of sharded modules that torch has since 2.11: collectives of the user, resets, more."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

import dtckpt.dtensor.fsdp as our_fsdp
from dtckpt.dtensor import DeviceMesh, DTensor, PlacementError, UnsupportedOp
from dtckpt.dtensor.fsdp import MixedPrecisionPolicy, fully_shard, share_comm_ctx
from dtckpt.dtensor.fsdp.state import states_below
from dtckpt.dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from dtckpt.dtensor.torch_private import gather_into
from tests.dtensor.rank_meshes import groups_over_several_axes, run_on_mesh

X = torch.linspace(-1, 1, 15, dtype=torch.float64).view(3, 5)
_c10d: Any = dist


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7).double(), nn.Linear(7, 5).double()
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.other = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)))


torch.manual_seed(0)
START = Net()  # the ranks are threads, and share torch's generator


def net() -> Net:
    return copy.deepcopy(START)


class Gather:
    """An all-gather with one buffer, which it counts."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []
        self.num_calls = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.buffers.append(torch.full(tuple(size), 7, dtype=dtype, device=device))
        return self.buffers[-1]

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        self.num_calls += 1
        assert output_tensor is self.buffers[-1]
        work = gather_into(group, output_tensor, input_tensor.clone())
        return work if async_op else work.wait()


class Scatter(Gather):
    """A reduce-scatter that waits by itself."""

    def __call__(  # type: ignore[override]
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        self.num_calls += 1
        assert op == dist.ReduceOp.SUM
        assert (output_tensor is self.buffers[-1], input_tensor is self.buffers[-2]) == (True, True)
        summed = input_tensor.clone()
        group.allreduce([summed], _c10d.AllreduceOptions()).wait()
        output_tensor.copy_(summed.view(group.size(), -1)[group.rank()])


def stepped(model: Any, rank: int) -> list[Tensor]:
    (model(X + rank).square().mean()).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1,), {}),
        ((3,), {}),
        ((2, 2), {}),
        ((4,), {"reshard_after_forward": 2}),
        ((2,), {"mp_policy": MixedPrecisionPolicy(torch.float32, reduce_dtype=torch.float64)}),
    ],
)
def test_collectives_of_the_user_gather_and_reduce(
    shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    def body(mesh: DeviceMesh) -> None:
        usual: Any = fully_shard(net(), mesh=mesh, **options)
        model: Any = fully_shard(net(), mesh=mesh, **options)
        gather, scatter = Gather(), Scatter()
        model.set_custom_all_gather(gather)
        model.set_custom_reduce_scatter(scatter)
        for factor in (None, 3.0):
            if factor is not None:
                usual.set_gradient_divide_factor(factor)
                model.set_gradient_divide_factor(factor)
            gather.num_calls = scatter.num_calls = 0
            wanted, grads = stepped(usual, mesh.get_rank()), stepped(model, mesh.get_rank())
            again = 2 if options.get("reshard_after_forward") else 1
            assert (gather.num_calls, scatter.num_calls) == (again, 1)
            for one, grad in zip(wanted, grads, strict=True):
                assert isinstance(one, DTensor) == isinstance(grad, DTensor)
                if isinstance(one, DTensor) and isinstance(grad, DTensor):
                    torch.testing.assert_close(grad.to_local(), one.to_local())
        twin = copy.deepcopy(model)
        stepped(twin, mesh.get_rank())
        assert gather.num_calls > again

    with groups_over_several_axes():
        run_on_mesh(shape, body)


def test_collectives_of_the_user_beside_tensor_parallelism() -> None:
    def body(mesh: DeviceMesh) -> None:
        models: list[Any] = []
        for _ in range(2):
            model = net()
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(model, mesh["tp"], plan)
            models.append(fully_shard(model, mesh=mesh["dp"]))
        models[1].set_custom_all_gather(Gather())
        models[1].set_custom_reduce_scatter(Scatter())
        wanted, grads = (stepped(model, 0) for model in models)
        for one, grad in zip(wanted, grads, strict=True):
            assert (one is None) == (grad is None)
            if isinstance(one, DTensor) and isinstance(grad, DTensor):
                torch.testing.assert_close(grad.to_local(), one.to_local())

    run_on_mesh((2, 2), body, ("dp", "tp"))


def test_a_group_for_reductions_changes_nothing() -> None:
    def body(mesh: DeviceMesh) -> None:
        gradients: list[list[Tensor]] = []
        for is_set in (False, True):
            model: Any = fully_shard(net(), mesh=mesh)
            if is_set:
                model.set_separate_reduce_scatter_group()
                model.set_separate_reduce_scatter_group(False, recurse=False)
            model(X).sum().backward()
            parts = [p.grad for p in model.parameters() if p.grad is not None]
            gradients.append([grad.full_tensor() for grad in parts])
        assert len(gradients[0]) == len(gradients[1]) == 5
        assert all(map(torch.equal, *gradients))

    run_on_mesh((2,), body)


def test_what_is_no_collective_is_refused() -> None:
    def body(mesh: DeviceMesh) -> None:
        model: Any = fully_shard(net(), mesh=mesh)
        for setter in (model.set_custom_all_gather, model.set_custom_reduce_scatter):
            with pytest.raises(PlacementError, match="allocate"):
                setter(lambda: None)
        with pytest.raises(UnsupportedOp, match="NCCL"):
            model.set_symm_mem_for_comm()
        model.set_custom_all_gather(Gather())
        for setter in (
            model.set_symm_mem_for_comm,
            lambda: model.set_allocate_memory_from_process_group_for_comm(True),
        ):
            with pytest.raises(PlacementError, match="by themselves"):
                setter()
        with pytest.raises(ValueError, match="'NCCL', got 'gloo'"):
            model.set_symm_mem_for_comm("gloo")

    run_on_mesh((1,), body)


@pytest.mark.parametrize("wrong", [True, 1.0, "2", None])
def test_numbers_of_buffers_are_ints(wrong: Any) -> None:
    def body(mesh: DeviceMesh) -> None:
        model: Any = fully_shard(net(), mesh=mesh)
        model.set_reduce_scatter_max_input_buffers(2, recurse=False)
        with pytest.raises(TypeError, match="must be an int"):
            model.set_reduce_scatter_max_input_buffers(wrong)
        with pytest.raises(ValueError, match="must be a positive int"):
            model.set_reduce_scatter_max_input_buffers(0)

    run_on_mesh((1,), body)


@pytest.mark.parametrize("unused", [False, True])
def test_parameters_that_no_rank_used_get_zeros_where_that_is_set(unused: bool) -> None:
    def body(mesh: DeviceMesh) -> None:
        model = net()
        model.add_module("skipped", fully_shard(nn.Linear(2, 2), mesh=mesh))
        sharded: Any = fully_shard(model, mesh=mesh)
        sharded.set_reduce_scatter_unused_params(unused)
        for _ in range(2):
            stepped(sharded, 0)
            for p in (sharded.other, *sharded.skipped.parameters()):
                assert (p.grad is not None) == unused
                assert not unused or not p.grad.full_tensor().any()
            assert sharded.scale.grad is not None
            sharded.zero_grad()
        sharded.set_requires_gradient_sync(False)
        stepped(sharded, 0)
        assert all(p.grad is None for p in sharded.parameters())

    run_on_mesh((2,), body)


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()
        self.wanted = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if self.wanted:
            raise ValueError("on purpose")
        return y


@pytest.mark.parametrize("where", ["forward", "backward", "between"])
def test_reset_iter_state_forgets_a_pass(where: str) -> None:
    whole = net()
    stepped(whole, 0)
    wanted: list[Any] = [p.grad for p in whole.parameters()]

    def body(mesh: DeviceMesh) -> None:
        model: Any = Fails()
        fully_shard(model.inner, mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh)
        model.set_requires_gradient_sync(False)
        model.wanted = False
        stepped(model, 0)  # what waits is dropped
        model.set_requires_gradient_sync(True)
        model.wanted = where == "forward"

        def fail(grad: Tensor) -> None:
            raise ValueError("on purpose")

        def run() -> None:
            y = model(X)
            y.register_hook(fail)
            y.sum().backward()

        if where == "between":
            model(X)
        else:
            with pytest.raises(ValueError, match="on purpose"):
                run()
        model.reset_iter_state()
        model.wanted = False
        for state in states_below(model):
            assert not any((state.unit.is_whole, state.unit.gradients.are_pending, state.saving))
        assert all(isinstance(p, DTensor) for p in model.parameters())
        assert all(p.grad is None for p in model.parameters())
        for one, grad in zip(stepped(model, 0), wanted, strict=True):
            assert (one is None) == (grad is None)
            if isinstance(one, DTensor):
                torch.testing.assert_close(one.full_tensor(), grad)
        with pytest.raises(RuntimeError, match="outermost"):
            model.inner.reset_iter_state()

    run_on_mesh((2,), body)


def test_finalize_backward_reduces_what_waits() -> None:
    whole = net()
    stepped(whole, 0)
    stepped(whole, 1)
    wanted: list[Any] = [p.grad for p in whole.parameters()]

    def body(mesh: DeviceMesh) -> None:
        model: Any = Fails()
        model.wanted = False
        fully_shard(model.inner, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.finalize_backward()  # before the first forward pass
        model.finalize_backward(async_op=True).wait()
        model(X)
        with pytest.raises(RuntimeError, match="was not called"):
            model.finalize_backward()
        model.set_manual_backward_finalization(True)
        for waits in (False, True):
            model.set_requires_gradient_sync(False)
            stepped(model, 0)
            with pytest.raises(RuntimeError, match="has begun"):
                model.set_manual_backward_finalization(False)
            stepped(model, 1)
            model.finalize_backward()  # which does not change what is to wait
            assert all(p.grad is None for p in model.parameters())
            model.set_requires_gradient_sync(True)
            handle = model.finalize_backward(async_op=waits)
            if waits:
                with pytest.raises(RuntimeError, match="was not waited for"):
                    model.finalize_backward()
                handle.wait()
                handle.wait()
            for one, grad in zip(model.parameters(), wanted, strict=True):
                assert (one.grad is None) == (grad is None)
                if one.grad is not None:
                    torch.testing.assert_close(one.grad.full_tensor(), grad)
            model.zero_grad()
        stepped(model, 0)
        handle = model.finalize_backward(async_op=True)
        model.reset_iter_state()
        with pytest.raises(RuntimeError, match="dropped by reset_iter_state"):
            handle.wait()
        model.set_manual_backward_finalization(False)
        for method in (
            model.inner.finalize_backward,
            lambda: model.inner.set_manual_backward_finalization(True),
        ):
            with pytest.raises(RuntimeError, match="outermost"):
                method()

    run_on_mesh((2,), body)


class Either(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})

    def forward(self, x: Tensor, name: str) -> Tensor:
        return self.parts[name](x)


def test_manual_finalization_takes_units_that_the_last_pass_did_not_come_to() -> None:
    """Else what waits in them is reduced as that pass ends."""

    def body(mesh: DeviceMesh) -> None:
        both: Any = Either()
        model = both.parts
        for part in model.values():
            fully_shard(part, mesh=mesh)
        fully_shard(both, mesh=mesh)
        for manual in (False, True):
            both.set_manual_backward_finalization(manual)
            both.set_requires_gradient_sync(False)
            both(torch.ones(1, 3), "a").sum().backward()
            both.set_requires_gradient_sync(True)
            both(torch.ones(1, 3), "b").sum().backward()
            assert (model["a"].weight.grad is None) == manual
            if manual:
                both.finalize_backward()
            assert model["a"].weight.grad.full_tensor().tolist() == [[1.0] * 3] * 3
            both.zero_grad()

    run_on_mesh((2,), body)


def test_sums_over_copies_that_would_be_left_are_refused() -> None:
    def body(mesh: DeviceMesh) -> None:
        model: Any = fully_shard(net(), mesh=mesh)
        model.set_manual_backward_finalization(True)
        model.set_requires_all_reduce(False)
        stepped(model, 0)
        with pytest.raises(RuntimeError, match="set_requires_all_reduce"):
            model.finalize_backward()
        model.set_requires_all_reduce(True)
        model.finalize_backward()
        assert model.scale.grad is not None

    run_on_mesh((2, 2), body)


def test_models_share_the_stream_of_their_gathers() -> None:
    def body(mesh: DeviceMesh) -> None:
        models: list[Any] = [fully_shard(net(), mesh=part) for part in (mesh["a"], mesh["b"])]
        streams = [model._states(recurse=True)[0].unit.side_stream for model in models]
        assert streams[0]() is not streams[1]()
        share_comm_ctx(models)
        assert streams[0]() is streams[1]()
        share_comm_ctx([])
        with pytest.raises(ValueError, match="share_comm_ctx takes modules"):
            share_comm_ctx([nn.Linear(1, 1)])  # pyright: ignore[reportArgumentType]

    run_on_mesh((1, 1), body, ("a", "b"))


@pytest.mark.parametrize("reshard", [True, False])
def test_storage_of_whole_parameters_is_kept_where_that_is_set(reshard: bool) -> None:
    def body(mesh: DeviceMesh) -> None:
        usual: Any = fully_shard(net(), mesh=mesh, reshard_after_forward=reshard)
        model: Any = fully_shard(net(), mesh=mesh, reshard_after_forward=reshard)
        model.set_keep_unsharded_storage(True)
        places: set[int] = set()

        def look(module: nn.Linear, args: Any, output: Tensor) -> None:
            places.add(module.weight.data_ptr())

        model.up.register_forward_hook(look)
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (usual, model)]
        held: list[Tensor] = []
        for _ in range(3):
            wanted, grads = stepped(usual, mesh.get_rank()), stepped(model, mesh.get_rank())
            held.append(torch.empty(7, 5, dtype=torch.float64))  # takes what is free
            for one, grad in zip(wanted, grads, strict=True):
                assert (one is None) == (grad is None)
                if isinstance(one, DTensor) and isinstance(grad, DTensor):
                    torch.testing.assert_close(grad.to_local(), one.to_local())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            model.unshard()
            places.add(model.up.weight.data_ptr())
            model.reshard()
        assert len(places) == 1
        (state,) = states_below(model)
        kept = [one.storage for one in state.unit.held]
        assert None not in kept
        model.set_keep_unsharded_storage(False)
        stepped(model, mesh.get_rank())
        assert all(one.storage is None for one in state.unit.held)

    run_on_mesh((2,), body)


def test_the_old_name_of_the_divisor_is_deprecated() -> None:
    def body(mesh: DeviceMesh) -> None:
        model: Any = fully_shard(net(), mesh=mesh)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            model.set_reduce_scatter_divide_factor(3.0)
        assert any(one.category is DeprecationWarning for one in seen)
        assert model._states(recurse=True)[0].unit.gradients.divide_factor == 3.0

    run_on_mesh((1,), body)


def test_every_method_of_torch_is_there() -> None:
    theirs = {name for name in dir(torch_fsdp.FSDPModule) if not name.startswith("_")}
    since = {"finalize_backward", "set_keep_unsharded_storage", "set_manual_backward_finalization"}
    assert theirs | since <= set(dir(our_fsdp.FSDPModule))
    composable = set(torch_fsdp.__all__[torch_fsdp.__all__.index("CPUOffloadPolicy") :])
    assert composable <= set(our_fsdp.__all__)
