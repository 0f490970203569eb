"""Optimizers of torch over distributed parameters, and what goes with them."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# The operators on lists have no public names.

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtckpt.dtensor import DeviceMesh, Partial, Replicate, Shard, strict
from dtckpt.dtensor.dtensor import DTensor
from dtckpt.errors import PlacementError
from tests.ranks import RanksFailed

from ..rank_meshes import assert_holds, collectives, run_on_mesh, scattered

SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {"maximize": True}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
    ("AdamW", {"amsgrad": True, "maximize": True}),
    ("AdamW", {}),
    ("Adadelta", {"weight_decay": 0.1}),
    ("Adagrad", {"lr_decay": 0.1, "weight_decay": 0.1}),
    ("Adamax", {"weight_decay": 0.1}),
    ("ASGD", {"t0": 1}),
    ("NAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("RAdam", {"weight_decay": 0.1}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Rprop", {}),
    ("Adafactor", {"weight_decay": 0.1}),
]
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
LR = 0.05

# Shape, placements of the parameter and of its gradient; None for plain ones. A single placement
# is that on the first axis's own mesh. Some shards are uneven, some are empty.
PARAMETERS: list[tuple[tuple[int, ...], Any, Any]] = [
    ((5, 3), (Shard(0), Replicate()), (Shard(0), Replicate())),
    ((5, 3), (Shard(0), Shard(0)), (Shard(1), Partial())),
    ((3, 2), (Replicate(), Replicate()), (Partial(), Replicate())),
    ((2, 3), (Shard(1),), (Shard(1),)),
    ((1, 3), (Shard(0), Shard(0)), (Shard(0), Shard(0))),
    ((4,), (Replicate(), Shard(0)), (Replicate(), Shard(0))),
    ((), (Replicate(),), (Partial(),)),
    ((3,), None, None),
]


def _values(shape: tuple[int, ...], index: int) -> Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(shape, generator=generator)


def _laid_out(whole: Tensor, mesh: DeviceMesh, placements: Any) -> Tensor:
    if placements is None:
        return whole.clone()
    if len(placements) < mesh.ndim:
        mesh = mesh[mesh.layout_mesh.axis_names[0]]
    return scattered(whole, mesh, placements)


def _parameters(mesh: DeviceMesh | None) -> list[nn.Parameter]:
    """The parameters, on one device without a mesh."""
    wholes = [_values(shape, i) for i, (shape, _, _) in enumerate(PARAMETERS)]
    if mesh is None:
        return [nn.Parameter(whole) for whole in wholes]
    layouts = [placements for _, placements, _ in PARAMETERS]
    return [nn.Parameter(_laid_out(w, mesh, p)) for w, p in zip(wholes, layouts, strict=True)]


def _set_gradients(parameters: list[nn.Parameter], mesh: DeviceMesh | None, step: int) -> None:
    for index, (shape, _, placements) in enumerate(PARAMETERS):
        whole = _values(shape, 100 * step + 50 + index)
        parameters[index].grad = None if mesh is None else _laid_out(whole, mesh, placements)
        if mesh is None:
            parameters[index].grad = whole


def _train(name: str, options: dict[str, Any], mesh: DeviceMesh | None) -> list[nn.Parameter]:
    parameters = _parameters(mesh)
    optimizer = getattr(torch.optim, name)(parameters, lr=LR, **options)
    for step in range(3):
        _set_gradients(parameters, mesh, step)
        optimizer.step()
    for parameter in parameters:
        for key, state in optimizer.state[parameter].items():
            if isinstance(parameter, DTensor) and key.startswith("exp_"):
                assert state.placements == parameter.placements
    return parameters


def _check(found: Sequence[Tensor], expected: Sequence[Tensor], **tolerance: Any) -> None:
    for index, (ours, whole) in enumerate(zip(found, expected, strict=True)):
        assert isinstance(ours, DTensor) == (PARAMETERS[index][1] is not None)
        if isinstance(ours, DTensor):
            assert_holds(ours.detach(), whole.detach(), **tolerance)
        else:
            torch.testing.assert_close(ours, whole, **tolerance)


@pytest.mark.parametrize("way", ["loop", "foreach", "fused"])
def test_every_optimizer_equals_one_device(way: str) -> None:
    settings = [(n, o) for n, o in SETTINGS if way != "fused" or n in FUSED]
    way_option: dict[str, Any] = (
        {"fused": True} if way == "fused" else {"foreach": way == "foreach"}
    )
    expected = [_train(name, {**o, **way_option}, None) for name, o in settings]

    def body(mesh: DeviceMesh) -> None:
        for (name, options), reference in zip(settings, expected, strict=True):
            try:
                with strict():
                    found = _train(name, {**options, **way_option}, mesh)
                _check(found, reference, rtol=1e-4, atol=1e-5)
            except Exception as error:
                raise AssertionError(f"{name} {options} {way}: {error!r}") from error

    run_on_mesh((2, 2), body)


CUT = [0, 4, 5]  # parameters that are sharded on the whole mesh, without Partial gradients


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf, 0.0])
def test_clipping_reduces_once_per_group(norm_type: float) -> None:
    reference = _parameters(None)
    _set_gradients(reference, None, 0)
    chosen = [reference[i] for i in CUT]
    expected = nn.utils.clip_grad_norm_(chosen, 0.5, norm_type)
    with collectives(of_all_ranks=True) as seen:

        def body(mesh: DeviceMesh) -> None:
            parameters = _parameters(mesh)
            _set_gradients(parameters, mesh, 0)
            with strict():
                found = nn.utils.clip_grad_norm_([parameters[i] for i in CUT], 0.5, norm_type)
            assert_holds(found, expected)
            for i, clipped in zip(CUT, chosen, strict=True):
                ours: Any = parameters[i].grad
                assert clipped.grad is not None
                assert_holds(ours, clipped.grad)

        run_on_mesh((2, 2), body)
    # Ranks, groups. So few terms are exchanged, and reduced by every rank.
    assert [collective.kind for collective in seen] == ["all_to_all"] * 4 * 2


@pytest.mark.parametrize("foreach", [None, True, False])
def test_clipping_over_several_meshes(foreach: bool | None) -> None:
    expected: dict[float, tuple[Tensor, list[nn.Parameter]]] = {}
    for norm_type in (2.0, math.inf):
        reference = _parameters(None)
        _set_gradients(reference, None, 0)
        total = nn.utils.clip_grad_norm_(reference, 0.5, norm_type)
        expected[norm_type] = total, reference

    def body(mesh: DeviceMesh) -> None:
        for norm_type, (total, reference) in expected.items():
            parameters = _parameters(mesh)
            _set_gradients(parameters, mesh, 0)
            with strict():
                gradients = [p.grad for p in parameters if p.grad is not None]
                found = nn.utils.get_total_norm(gradients, norm_type, foreach=foreach)
                nn.utils.clip_grads_with_norm_(parameters, 0.5, found, foreach=foreach)
            torch.testing.assert_close(_whole(found), total)
            for ours, whole in zip(parameters, reference, strict=True):
                torch.testing.assert_close(_whole(ours.grad), _whole(whole.grad))
            with strict():
                nn.utils.clip_grad_value_(parameters, 0.05, foreach=foreach)
            for ours, whole in zip(parameters, reference, strict=True):
                assert whole.grad is not None
                torch.testing.assert_close(_whole(ours.grad), whole.grad.clamp(-0.05, 0.05))

    run_on_mesh((2, 2), body)


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def test_norms_of_all_kinds() -> None:
    shapes = ((5, 3), (1, 4), (), (2, 2))
    wholes = [_values(shape, i) for i, shape in enumerate(shapes)]
    wholes[1][0, 1] = float("nan")
    layouts = [(Shard(0),), (Shard(0),), (Replicate(),), (Partial("avg"),)]

    def body(mesh: DeviceMesh) -> None:
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64):
            ours = [scattered(w, mesh, p).to(dtype) for w, p in zip(wholes, layouts, strict=True)]
            plain = [w.to(dtype) for w in wholes]
            for ord in (2, 1, 0.5, -1, math.inf, -math.inf, *([] if dtype.is_complex else [0])):
                with strict():
                    found = torch._foreach_norm(ours, ord)
                expected = torch._foreach_norm(plain, ord)
                low = dtype == torch.bfloat16
                for one, whole in zip(found, expected, strict=True):
                    assert one.dtype == whole.dtype
                    torch.testing.assert_close(
                        _whole(one).double(),
                        whole.double(),
                        rtol=0.02 if low else 1e-5,
                        atol=1e-5,
                        equal_nan=True,
                    )
        empty = scattered(torch.ones(0, 2), mesh, [Shard(0)])
        assert torch._foreach_norm([empty])[0].item() == 0
        with pytest.raises(RuntimeError, match="infinity norm on an empty"):
            torch._foreach_norm([empty], math.inf)

    run_on_mesh((3,), body)


def test_norms_that_are_no_numbers_raise_on_all_ranks() -> None:
    def body(mesh: DeviceMesh) -> None:
        parameter = nn.Parameter(scattered(torch.ones(3), mesh, [Shard(0)]))
        parameter.grad = scattered(torch.tensor([1.0, 1.0, math.inf]), mesh, [Shard(0)])
        nn.utils.clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True)

    with pytest.raises(RanksFailed) as failed:
        run_on_mesh((3,), body)
    assert len(failed.value.errors) == 3
    assert all("non-finite" in str(error) for error in failed.value.errors.values())


def test_numbers_of_other_meshes() -> None:
    def body(mesh: DeviceMesh) -> None:
        line = mesh[mesh.layout_mesh.axis_names[0]]
        number = scattered(torch.ones(3), line, [Shard(0)]).sum()
        assert number.placements == (Partial(),)
        tensor = scattered(torch.ones(4, 2), mesh, [Shard(0), Shard(1)])
        assert_holds(tensor * number, torch.full((4, 2), 3.0))
        assert_holds(number + tensor, torch.full((4, 2), 4.0))
        assert_holds(torch._foreach_mul([tensor], number)[0], torch.full((4, 2), 3.0))
        partial = scattered(torch.ones(2), mesh, [Partial(), Replicate()])
        for made in torch._foreach_add([tensor, partial], number):
            assert_holds(made, torch.full(made.shape, 4.0))
        plain = torch.full((2, 2), float(mesh.get_rank()))
        assert type(plain.mul_(number)) is Tensor
        assert plain[0, 0].item() == 3 * mesh.get_rank()
        with pytest.raises(PlacementError, match="one operator must lie on one mesh"):
            torch.add(
                scattered(torch.ones(3), line, [Shard(0)]),
                scattered(torch.ones(3), mesh, [Replicate()] * 2),
            )
        with pytest.raises(PlacementError, match="would lie on"):
            torch.mul(tensor, number.detach().requires_grad_())
        smaller = DeviceMesh("cpu", [0], rank=mesh.get_rank())
        lonely = DTensor.from_local(torch.tensor(2.0), smaller, [Replicate()], shape=())
        with pytest.raises(PlacementError, match=r"no value on ranks \[1, 2, 3\]"):
            torch.mul(tensor, lonely)

    run_on_mesh((2, 2), body)


@pytest.mark.parametrize("fused", [False, True])
def test_gradient_scaler(fused: bool) -> None:
    def body(mesh: DeviceMesh) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        parameters, reference = _parameters(mesh), _parameters(None)
        optimizers = [
            torch.optim.AdamW(each, lr=LR, fused=fused) for each in (parameters, reference)
        ]
        scales: list[float] = []
        for step in range(4):
            _set_gradients(parameters, mesh, step)
            _set_gradients(reference, None, step)
            for parameter in parameters:
                assert parameter.grad is not None
                parameter.grad.mul_(4.0)
            torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], 1.0)
            if step == 1 and mesh.get_rank() == 3:  # one rank only finds that it is no number
                first: Any = parameters[0].grad
                first.to_local().fill_(math.inf)
            scaler.scale(torch.ones(()))  # makes the scale
            for parameter in parameters:
                assert parameter.grad is not None
                parameter.grad.mul_(scaler.get_scale() / 4.0)
            if not fused:
                scaler.unscale_(optimizers[0])
            scaler.step(optimizers[0])
            scaler.update()
            scales.append(scaler.get_scale())
            if step != 1:
                optimizers[1].step()
        assert scales == [4.0, 2.0, 2.0, 4.0]
        _check(parameters, reference, rtol=1e-4, atol=1e-5)

    run_on_mesh((2, 2), body)


def test_steps_on_tensors_that_lie_otherwise_in_memory() -> None:
    def body(mesh: DeviceMesh) -> None:
        whole, gradient = _values((4, 6), 1), _values((4, 6), 2)
        reference = nn.Parameter(whole.clone())
        parameter = nn.Parameter(scattered(whole, mesh, [Shard(0)]))
        reference.grad = gradient
        parameter.grad = scattered(gradient.t().contiguous(), mesh, [Shard(1)]).t()
        for each in (parameter, reference):
            torch.optim.AdamW([each], lr=LR, fused=True).step()
        assert_holds(parameter.detach(), reference.detach())
        parameter.grad = scattered(gradient, mesh, [Shard(0)])
        with pytest.raises(PlacementError, match="where the parameter is"):
            torch._fused_sgd_(
                [parameter.detach()],
                [gradient],
                [],
                weight_decay=0.0,
                momentum=0.0,
                lr=LR,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,
            )

    run_on_mesh((2,), body)


def test_schedules_closures_and_matrices() -> None:
    wholes = [_values((4, 3), 1), _values((3, 5), 2)]

    def train(parameters: list[nn.Parameter], which: str) -> None:
        def loss() -> Tensor:
            optimizer.zero_grad()
            value = (parameters[0] @ parameters[1] - 1).square().mean()
            value.backward()
            return value

        optimizer: Any
        if which == "LBFGS":
            optimizer = torch.optim.LBFGS(parameters, lr=0.1, max_iter=3, history_size=2)
        elif which == "Muon":  # which computes in bfloat16
            optimizer = torch.optim.Muon(parameters, lr=0.02)
        else:
            optimizer = torch.optim.SGD(parameters, lr=torch.tensor(0.1))
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.1, total_steps=4, cycle_momentum=False
        )
        for _ in range(3):
            optimizer.step(loss)
            schedule.step()

    expected: dict[str, list[nn.Parameter]] = {}
    for which in ("SGD", "Muon", "LBFGS"):
        expected[which] = [nn.Parameter(whole.clone()) for whole in wholes]
        train(expected[which], which)

    def body(mesh: DeviceMesh) -> None:
        for which, reference in expected.items():
            layouts = ([Shard(0)], [Shard(1)])
            found = [
                nn.Parameter(scattered(w, mesh, p)) for w, p in zip(wholes, layouts, strict=True)
            ]
            train(found, which)
            for ours, whole in zip(found, reference, strict=True):
                tolerance = 0.02 if which == "Muon" else 1e-4
                assert_holds(ours.detach(), whole.detach(), rtol=tolerance, atol=tolerance)

    run_on_mesh((2,), body)


def test_lists_are_used_by_default() -> None:
    def body(mesh: DeviceMesh) -> None:
        from torch.utils import _foreach_utils

        parameter = nn.Parameter(scattered(torch.ones(2), mesh, [Shard(0)]))
        assert _foreach_utils._has_foreach_support([parameter], parameter.device)

    run_on_mesh((2,), body)
