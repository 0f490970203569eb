"""The dispatch frame: plans, writes, refusals, fallbacks, and training with all of it."""

# pyright: reportPrivateUsage=false
# Reads `_spec`, as users of torch do.

from __future__ import annotations

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtckpt.dtensor import (
    DeviceMesh,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    implicit_replication,
    register_sharding,
    strict,
)
from dtckpt.dtensor.ops.engine.table import RULES
from dtckpt.errors import PlacementError, UnsupportedOp
from tests.ranks import RanksFailed

from ..rank_meshes import assert_holds, run_on_mesh, scattered

PAGE = Path(__file__).parents[3] / "docs" / "dtensor.md"


@torch.library.custom_op("dtckpt_test::turned", mutates_args=())
def _turned(tensor: Tensor, shift: int) -> Tensor:
    return tensor.roll(shift, 0)


@_turned.register_fake
def _(tensor: Tensor, shift: int) -> Tensor:
    del shift
    return torch.empty_like(tensor)


turned: Any = torch.ops.dtckpt_test.turned.default
"""An operator that no rule is for."""


def test_partial_scalars_are_reduced_when_read() -> None:
    def body(mesh: DeviceMesh) -> None:
        tensor = scattered(torch.arange(4.0), mesh, [Shard(0)])
        assert tensor.sum().item() == 6
        assert tensor.max().item() == 3
        assert bool((tensor > 2).any())
        assert f"{tensor.sum().full_tensor():.1f}" == "6.0"
        assert float(tensor.mean()) == 1.5

    run_on_mesh((2,), body)


def test_writing_a_constant_into_partial_terms() -> None:
    def body(mesh: DeviceMesh) -> None:
        value = scattered(torch.ones(3), mesh, [Partial()])
        assert value.add_(1) is value
        assert value.placements == (Partial(),)
        assert_holds(value, torch.full((3,), 2.0))
        zero = scattered(torch.ones(3), mesh, [Partial()]).zero_()
        assert zero.placements == (Partial(),)
        assert_holds(torch.empty_like(zero).fill_(4), torch.full((3,), 4.0))

    run_on_mesh((3,), body)


def test_writes_through_views() -> None:
    def body(mesh: DeviceMesh) -> None:
        tensor = scattered(torch.zeros(4, 2), mesh, [Shard(0)])
        tensor[:, 1].fill_(5)
        tensor.t()[0].add_(1)
        assert_holds(tensor, torch.tensor([[1.0, 5.0]] * 4))
        tensor[1].clone().fill_(3)
        tensor[1].fill_(4)
        assert_holds(tensor, torch.tensor([[1.0, 5.0], [4.0, 4.0], [1.0, 5.0], [1.0, 5.0]]))

    run_on_mesh((2,), body)


def test_plain_tensors_that_are_equal_on_all_ranks_are_replicated() -> None:
    def body(mesh: DeviceMesh) -> None:
        tensor = scattered(torch.ones(4, 2), mesh, [Shard(0)])
        assert_holds(tensor * torch.tensor(2.0), torch.full((4, 2), 2.0))
        assert_holds(tensor + torch.arange(2.0), torch.ones(4, 2) + torch.arange(2.0))
        assert_holds(tensor[torch.tensor([3, 0, 0])], torch.ones(3, 2))
        with implicit_replication():
            own = torch.full((2,), float(mesh.get_rank()))
            assert torch.equal((tensor * own).to_local(), torch.ones(2, 1) * own)

    run_on_mesh((2,), body)


@pytest.mark.parametrize("other", [-torch.ones(4), torch.ones(4, dtype=torch.float64), None])
def test_plain_tensors_that_differ_are_refused_on_all_ranks(other: Tensor | None) -> None:
    def body(mesh: DeviceMesh) -> None:
        tensor = scattered(torch.ones(4), mesh, [Shard(0)])
        other_here = torch.ones(1, 4) if other is None else other
        torch.add(tensor, torch.ones(4) if mesh.get_rank() else other_here)

    with pytest.raises(RanksFailed) as failed:
        run_on_mesh((2,), body)
    texts = {str(error) for error in failed.value.errors.values()}
    assert len(failed.value.errors) == 2
    text = texts.pop()
    for part in (
        "aten.add",
        "differs between ranks",
        "tensor 1 is a plain",
        "[4]",
        "distribute_tensor",
        "from_local",
    ):
        assert part in text


def test_shape_errors_are_the_same_on_every_rank() -> None:
    def body(mesh: DeviceMesh) -> None:
        a = scattered(torch.ones(3, 4), mesh, [Shard(0)])
        torch.mm(a, a)

    with pytest.raises(RanksFailed) as failed:
        run_on_mesh((4,), body)
    assert len(failed.value.errors) == 4
    assert len({str(error) for error in failed.value.errors.values()}) == 1


def test_operators_without_a_rule_fall_back_once_warned() -> None:
    def body(mesh: DeviceMesh) -> None:
        tensor = scattered(torch.arange(6.0).view(3, 2), mesh, [Shard(0)])
        with pytest.raises(UnsupportedOp, match="strict mode"), strict():
            turned(tensor, 1)
        for _ in range(2):
            found = turned(tensor, 1)
            assert found.placements == (Replicate(),)
            assert_holds(found, torch.arange(6.0).view(3, 2).roll(1, 0))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_on_mesh((2,), body)
    texts = [str(w.message) for w in caught]
    assert len([t for t in texts if "turned" in t and "24 bytes" in t]) == 2  # one per rank


def test_decompositions_run_on_distributed_tensors() -> None:
    def body(mesh: DeviceMesh) -> None:
        whole = torch.arange(6.0).view(3, 2)
        tensor = scattered(whole, mesh, [Shard(0)]).detach().requires_grad_()
        loss: Any = nn.functional.mse_loss(tensor, scattered(whole + 1, mesh, [Shard(0)]))
        torch.testing.assert_close(loss.full_tensor(), torch.tensor(1.0))
        loss.backward()
        assert tensor.grad is not None
        assert_holds(tensor.grad, torch.full((3, 2), -1 / 3))

    run_on_mesh((2,), body)


def test_users_rules() -> None:
    @register_sharding(turned)
    def _(tensor: Any, shift: Any) -> Any:  # pyright: ignore[reportUnusedFunction]
        del shift
        return [([Shard(d)], [Shard(d), None]) for d in range(1, tensor.ndim)]

    def body(mesh: DeviceMesh) -> None:
        whole = torch.arange(6.0).view(3, 2)
        with strict():
            found = turned(scattered(whole, mesh, [Shard(1)]), 1)
            assert found.placements == (Shard(1),)
            assert_holds(found, whole.roll(1, 0))
            assert_holds(turned(scattered(whole, mesh, [Shard(0)]), 1), whole.roll(1, 0))

    try:
        run_on_mesh((2,), body)
    finally:
        RULES.pop(turned)


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ([None, None], "1 placements of outputs and 0 of tensor arguments"),
        ([Shard(0)], "1 of tensor arguments in a sharding of 1 arguments, expected 1 and 1 of 2"),
        ([Shard(0), None, None], "in a sharding of 3 arguments"),
        ([None, Shard(0)], "in their order, with None for arguments that are no tensors"),
    ],
)
def test_rules_of_users_that_list_too_little_or_too_much_are_told(
    listed: list[Any], message: str
) -> None:
    @register_sharding(turned)
    def _(tensor: Any, shift: Any) -> Any:  # pyright: ignore[reportUnusedFunction]
        del tensor, shift
        return [([Shard(0)], listed)]

    def body(mesh: DeviceMesh) -> None:
        turned(scattered(torch.ones(2), mesh, [Shard(0)]), 1)

    try:
        with pytest.raises(RanksFailed, match=message):
            run_on_mesh((2,), body)
    finally:
        RULES.pop(turned)


def test_rules_of_users_whose_local_results_do_not_fit_are_told() -> None:
    diagonal = torch.ops.aten.diagonal_copy.default
    before = RULES.get(diagonal)

    @register_sharding(diagonal)
    def _(tensor: Any, *_: Any) -> Any:  # pyright: ignore[reportUnusedFunction]
        return [([Shard(0)], [Shard(0), *[None] * len(_)])]

    def body(mesh: DeviceMesh) -> None:
        tensor = scattered(torch.ones(4, 3), mesh, [Shard(0)])
        with pytest.raises(PlacementError, match=r"at coordinate \(\d,\).*leave this sharding out"):
            diagonal(tensor)

    try:
        run_on_mesh((2,), body)
    finally:
        RULES.by_users.discard(diagonal)
        RULES.generation += 1
        if before is None:
            RULES.pop(diagonal)
        else:
            RULES[diagonal] = before


def test_operators_are_named_with_their_overload() -> None:
    for wrong in ("my::turned", torch.add, torch.ops.aten.add, [torch.ops.aten.add.Tensor, "x"]):
        given: Any = wrong
        with pytest.raises(PlacementError, match="takes operators with their overload"):
            register_sharding(given)
    with pytest.raises(PlacementError, match=r"it has the overloads aten\.add\.Tensor"):
        register_sharding(torch.ops.aten.add)


def test_the_rule_on_the_page_of_distributed_tensors() -> None:
    @torch.library.custom_op("my::smooth", mutates_args=())
    def smooth(x: Tensor, width: int) -> Tensor:
        return nn.functional.avg_pool1d(x.view(1, -1, x.shape[-1]), width, 1).view(
            *x.shape[:-1], -1
        )

    @smooth.register_fake
    def _(x: Tensor, width: int) -> Tensor:
        return x.new_empty(*x.shape[:-1], x.shape[-1] - width + 1)

    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(code, {"torch": torch})
    op: Any = torch.ops.my.smooth.default
    whole = torch.arange(24.0).view(2, 3, 4)

    def body(mesh: DeviceMesh) -> None:
        for dim in range(3):
            with strict():
                found = op(scattered(whole, mesh, [Shard(dim)]), 3)
            assert found.placements[0].is_shard(dim) == (dim < 2)
            assert_holds(found, op(whole, 3))

    try:
        run_on_mesh((2,), body)
    finally:
        RULES.pop(op)


def test_strict_mode_refuses_decompositions_of_torch() -> None:
    def body(mesh: DeviceMesh) -> None:
        tensor = scattered(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])
        chunk_cat: Any = torch.ops.aten._chunk_cat.default
        with pytest.raises(UnsupportedOp, match="strict mode"), strict():
            chunk_cat([tensor, tensor], 0, 2)
        with strict(), strict(False):
            found = chunk_cat([tensor, tensor], 0, 2)
        whole = torch.arange(8.0).view(4, 2)
        assert_holds(found, chunk_cat([whole, whole], 0, 2))

    run_on_mesh((2,), body)


def test_plans_are_reused_and_bounded() -> None:
    def body(mesh: DeviceMesh) -> None:
        cache = mesh.cache("plans", 8)
        tensor = scattered(torch.ones(4, 2), mesh, [Shard(0)])
        for step in range(20):
            tensor = tensor * (1.0 + step)
        assert len(cache) == 1
        for size in range(1, 30):
            scattered(torch.ones(size), mesh, [Replicate()]).neg()
            assert 1 < len(cache) <= 8
        one, two = (scattered(torch.ones(4), mesh, [Shard(0)]) for _ in range(2))
        assert one._spec is two._spec

    run_on_mesh((2,), body)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_training_equals_one_device(optimizer: str, foreach: bool) -> None:
    def model() -> nn.Sequential:
        made = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.LayerNorm(5), nn.Linear(5, 3))
        for index, parameter in enumerate(made.parameters()):
            values = torch.linspace(-1, 1, parameter.numel()).view(parameter.shape)
            parameter.data.copy_(values * (index + 1) / 4)
        return made

    def steps(net: nn.Module, inputs: Tensor) -> None:
        kwargs: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.01, "foreach": foreach}
        if optimizer == "SGD":
            kwargs["momentum"] = 0.9
        stepper = getattr(torch.optim, optimizer)(net.parameters(), **kwargs)
        for _ in range(3):
            net(inputs).square().mean().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            stepper.step()
            stepper.zero_grad()

    inputs = torch.linspace(-2, 2, 42).view(7, 6)
    reference = model()
    steps(reference, inputs)

    def body(mesh: DeviceMesh) -> None:
        layouts = [(Replicate(), Shard(0)), (Shard(0), Shard(0)), (Shard(0), Replicate())]
        net = model()
        for index, module in enumerate(net.modules()):
            for name, parameter in list(module.named_parameters(recurse=False)):
                placements = layouts[index % 3]
                setattr(module, name, nn.Parameter(distribute_tensor(parameter, mesh, placements)))
        with strict():
            steps(net, scattered(inputs, mesh, [Shard(0), Replicate()]))
        for ours, expected in zip(net.parameters(), reference.parameters(), strict=True):
            assert_holds(ours.detach(), expected.detach(), rtol=1e-4, atol=1e-5)

    run_on_mesh((2, 2), body)


def test_inference_mode() -> None:
    def body(mesh: DeviceMesh) -> None:
        inputs, weight = torch.arange(12.0).view(2, 2, 3), torch.arange(15.0).view(5, 3)
        with torch.inference_mode(), strict():
            found = nn.functional.linear(
                scattered(inputs, mesh, [Shard(0)]), scattered(weight, mesh, [Replicate()])
            )
            assert_holds(found, nn.functional.linear(inputs, weight))
        for placement in (Shard(0), Replicate()):  # made outside, as parameters are
            parameter = nn.Parameter(scattered(weight, mesh, [placement]))
            rows = scattered(inputs, mesh, [Shard(0)])
            with torch.inference_mode():
                found = nn.functional.linear(rows, parameter)
                assert_holds(found, nn.functional.linear(inputs, weight))
                for name in ("t", "detach"):
                    assert_holds(getattr(parameter, name)(), getattr(weight, name)())
                assert_holds(parameter[1], weight[1])
                assert_holds(parameter.view(-1), weight.view(-1))

    run_on_mesh((2,), body)


def test_data_can_be_replaced() -> None:
    def body(mesh: DeviceMesh) -> None:
        module = nn.Linear(4, 4, bias=False)
        module.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
        module.to(torch.float64)
        assert_holds(module.weight.detach(), torch.ones(4, 4, dtype=torch.float64))
        module.weight.data = scattered(torch.zeros(4, 4), mesh, [Shard(1)])
        assert_holds(module.weight.detach(), torch.zeros(4, 4))
        with pytest.raises(PlacementError, match="must be a DTensor"):
            module.weight.data = torch.zeros(4, 4)
        again = copy.deepcopy(module)
        again.load_state_dict({"weight": scattered(torch.ones(4, 4), mesh, [Shard(0)])})
        assert_holds(again.weight.detach(), torch.ones(4, 4))
        assert_holds(module.weight.detach(), torch.zeros(4, 4))

    run_on_mesh((2,), body)


def test_embedding_and_cross_entropy() -> None:
    def forward(weight: Tensor, indices: Tensor, labels: Tensor) -> Tensor:
        hidden = nn.functional.embedding(indices, weight).flatten(0, 1)
        return nn.functional.cross_entropy(hidden, labels)

    weight = torch.linspace(-1, 1, 30).view(10, 3)
    indices, labels = torch.tensor([[1, 2], [3, 9], [1, 0]]), torch.tensor([0, 1, 2, 2, 1, 0])
    plain = weight.clone().requires_grad_()
    expected = forward(plain, indices, labels)
    expected.backward()

    def body(mesh: DeviceMesh) -> None:
        for placement in (Replicate(), Shard(0), Shard(1)):
            ours = scattered(weight, mesh, [placement]).detach().requires_grad_()
            found = forward(
                ours, scattered(indices, mesh, [Shard(0)]), scattered(labels, mesh, [Shard(0)])
            )
            assert_holds(found.detach(), expected.detach())
            found.backward()
            assert plain.grad is not None
            assert_holds(ours.grad, plain.grad)

    run_on_mesh((2,), body)


def test_variants_that_write_elsewhere() -> None:
    def body(mesh: DeviceMesh) -> None:
        tensor = scattered(torch.ones(4, 2), mesh, [Shard(1)])
        out = torch.empty_like(tensor)
        torch.add(tensor, tensor, out=out)
        assert_holds(out, torch.full((4, 2), 2.0))
        tensor[0] = 5.0
        assert tensor.sum().item() == 16
        parameter = nn.Parameter(scattered(torch.ones(4, 2), mesh, [Shard(0)]))
        plain = nn.Parameter(torch.ones(4, 2))
        for each in (parameter, plain):
            stepper = torch.optim.AdamW([each], fused=True)
            each.sum().backward()
            stepper.step()
        assert_holds(parameter.detach(), plain.detach())

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="aten._fused_adamw.default has no sharding rule")
        run_on_mesh((2,), body)
