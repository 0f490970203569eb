"""Layers that run on several ranks compute what they compute on one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.tensor.parallel as torch_parallel
from torch import Tensor, nn

from dtckpt.dtensor import (
    DeviceMesh,
    DTensor,
    Mesh,
    Placement,
    PlacementError,
    Replicate,
    Shard,
    distribute_tensor,
    random,
)
from dtckpt.dtensor.debug import CommDebugMode
from dtckpt.dtensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
    placement_rules,
)
from tests.dtensor.rank_meshes import collectives, run_on_mesh, run_on_meshes


class Mlp(nn.Module):
    """Two layers, of which the first may be split by its outputs and the second by its inputs."""

    def __init__(self, width: int = 6, hidden: int = 11) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, dtype=torch.float64)
        self.down = nn.Linear(hidden, width, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))


class Block(nn.Module):
    """A residual block of norms and layers, with an embedding before and a tied head after."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6, dtype=torch.float64)
        self.norms = nn.ModuleList(nn.LayerNorm(6, dtype=torch.float64) for _ in range(2))
        self.mlps = nn.ModuleList(Mlp() for _ in range(2))
        self.head = nn.Linear(6, 13, bias=False, dtype=torch.float64)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for norm, mlp in zip(self.norms, self.mlps, strict=True):
            x = x + mlp(norm(x))
        return self.head(x)


def made(cls: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return cls()


def fresh(module: nn.Module) -> Any:
    """Return a copy without gradients: ranks that are threads share the generator of torch."""
    model = copy.deepcopy(module)
    model.zero_grad()
    return model


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        grad = parameter.grad
        found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found


def assert_alike(split: nn.Module, whole: nn.Module) -> None:
    wanted = gradients_of(whole)
    for name, grad in gradients_of(split).items():
        torch.testing.assert_close(grad, wanted[name], msg=lambda m, name=name: f"{name}: {m}")


MLP = {"up": ColwiseParallel(), "down": RowwiseParallel()}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_column_layer_feeds_a_row_layer(size: int) -> None:
    x = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole = made(Mlp)
    wanted = whole(x)
    wanted.square().sum().backward()

    def body(mesh: DeviceMesh) -> None:
        model = parallelize_module(fresh(whole), mesh, dict(MLP))
        with CommDebugMode() as comm:
            found = model(x)
        assert comm.get_total_counts() == (1 if size > 1 else 0)
        assert type(found) is Tensor
        torch.testing.assert_close(found, wanted)
        found.square().sum().backward()
        assert_alike(model, whole)
        up: Any = model.get_parameter("up.weight")
        assert up.placements == (Shard(0),)
        assert model.get_parameter("down.bias").grad.placements == (Replicate(),)  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
        assert placement_rules(model) == (
            "model/up.weight=S(0); model/up.bias=S(0); model/down.weight=S(1); model/down.bias=R"
        )

    run_on_mesh((size,), body)


CONVS = {
    "1d": (nn.Conv1d, (2, 3, 9)),
    "2d": (nn.Conv2d, (2, 3, 7, 6)),
    "3d": (nn.Conv3d, (2, 3, 4, 5, 4)),
    "transposed": (nn.ConvTranspose2d, (2, 3, 5, 4)),
}


@pytest.mark.parametrize("kind", CONVS)
def test_convolutions_are_split_by_channels(kind: str) -> None:
    cls, shape = CONVS[kind]
    x = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def model_of() -> nn.Module:
        layers = cls(3, 5, 3, dtype=torch.float64), cls(5, 4, 2, dtype=torch.float64)
        return nn.Sequential(*layers)

    whole = made(model_of)
    wanted = whole(x)
    wanted.square().sum().backward()

    def body(mesh: DeviceMesh) -> None:
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        model = parallelize_module(fresh(whole), mesh, plan)
        found = model(x)
        torch.testing.assert_close(found, wanted)
        found.square().sum().backward()
        assert_alike(model, whole)

    run_on_mesh((2,), body)


@pytest.mark.parametrize("local", [False, True])
def test_norms_run_on_parts_of_the_sequence_and_tied_weights_stay_tied(local: bool) -> None:
    tokens = torch.randint(13, (2, 7), generator=torch.Generator().manual_seed(1))
    whole = made(Block)
    wanted = whole(tokens)
    wanted.square().sum().backward()

    def body(mesh: DeviceMesh) -> None:
        parts: dict[str, Any] = {"use_local_output": local}
        plan = {
            "embed": RowwiseParallel(output_layouts=Shard(1), **parts),
            "norms.*": SequenceParallel(),
            "mlps.*": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            "mlps.*.up": ColwiseParallel(use_local_output=False),
            "mlps.*.down": RowwiseParallel(output_layouts=Shard(1), **parts),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        model = parallelize_module(fresh(whole), mesh, plan)
        assert model.get_parameter("head.weight") is model.get_parameter("embed.weight")
        found = model(tokens)
        torch.testing.assert_close(found, wanted)
        found.square().sum().backward()
        assert_alike(model, whole)

    run_on_mesh((2,), body)
    run_on_mesh((3,), body)


def test_a_star_stands_for_parts_of_a_model_and_not_for_itself() -> None:
    def body(mesh: DeviceMesh) -> None:
        layers = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
        plan = {"[0-9]": ColwiseParallel(), "*.*": RowwiseParallel()}
        with pytest.raises(PlacementError, match="1: ColwiseParallel is for Linear"):
            parallelize_module(layers, mesh, plan)
        parallelize_module(layers[1], mesh, {"*": ColwiseParallel()})
        assert isinstance(layers.get_parameter("1.0.weight"), DTensor)
        assert type(layers.get_parameter("0.weight")) is nn.Parameter

    run_on_mesh((1,), body)


def test_a_name_for_one_of_two_tied_layers_is_for_both() -> None:
    def body(mesh: DeviceMesh) -> None:
        model = parallelize_module(made(Block), mesh, {"embed": RowwiseParallel()})
        assert isinstance(model.get_parameter("head.weight"), DTensor)
        assert model.get_parameter("head.weight") is model.get_parameter("embed.weight")

    run_on_mesh((2,), body)


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        ({"upp": ColwiseParallel()}, "called 'upp'; there are 'up', 'down'"),
        ({"*.up": ColwiseParallel()}, r"called '\*.up'"),
        (ColwiseParallel(), "got a Mlp"),
        ({"up": SequenceParallel()}, "up: SequenceParallel is for norms"),
        ({"up": ColwiseParallel(), "u*": RowwiseParallel()}, "are one tensor"),
        ({"up": torch_parallel.ColwiseParallel()}, "of torch.distributed.tensor.parallel"),
        (
            {
                "": PrepareModuleInput(
                    input_kwarg_layouts={"y": Shard(0)},
                    desired_input_kwarg_layouts={"y": Replicate()},
                )
            },
            r"\['y'\], but forward of a Mlp takes \['x'\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_sent(plan: Any, told: str) -> None:
    def body(mesh: DeviceMesh) -> None:
        model = made(Mlp)
        with CommDebugMode() as comm, pytest.raises(PlacementError, match=told):
            parallelize_module(model, mesh, plan)
        assert comm.get_total_counts() == 0
        assert not any(isinstance(p, DTensor) for p in model.parameters())

    run_on_mesh((2,), body)


def test_tied_layers_with_two_placements_are_refused() -> None:
    def body(mesh: DeviceMesh) -> None:
        plan = {"embed": ColwiseParallel(), "head": ColwiseParallel()}
        with pytest.raises(PlacementError, match=r"'head.weight' and 'embed.weight' are one tens"):
            parallelize_module(made(Block), mesh, plan)

    run_on_mesh((2,), body)


def test_a_mesh_of_several_axes_needs_a_name() -> None:
    def body(mesh: DeviceMesh) -> None:
        with pytest.raises(PlacementError, match=r"mesh_dim= \(one of dp, tp\)"):
            parallelize_module(made(Mlp), mesh, dict(MLP))
        model = parallelize_module(made(Mlp), mesh, dict(MLP), mesh_dim="tp")
        weight: Any = model.get_parameter("up.weight")
        assert weight.device_mesh is mesh["tp"]

    run_on_meshes(4, [Mesh((2, 2), ("dp", "tp"))], body)


def test_meta_parameters_stay_there_and_other_names_may_be_left_out() -> None:
    def body(mesh: DeviceMesh) -> None:
        with torch.device("meta"):
            model = Mlp()
        plan = {**MLP, "nothing": ColwiseParallel()}
        parallelize_module(model, mesh, plan, strict=False, src_data_rank=None)
        weight: Any = model.up.weight
        assert weight.is_meta
        assert weight.to_local().shape == ((6, 6), (5, 6))[mesh.get_local_rank()]

    run_on_mesh((2,), body)


class Nested(nn.Module):
    def forward(self, pair: Any, *, scale: Tensor, more: int = 1) -> Any:
        x, names = pair
        assert isinstance(x, DTensor) or names["local"]
        return {"x": x * scale, "more": more}, x


@pytest.mark.parametrize("local", [False, True])
def test_nested_inputs_and_outputs(local: bool) -> None:
    def body(mesh: DeviceMesh) -> None:
        style = PrepareModuleInputOutput(
            input_layouts=((Shard(0), None),),
            desired_input_layouts=((Replicate(), None),),
            input_kwarg_layouts={"scale": Replicate()},
            desired_input_kwarg_layouts={"scale": Replicate()},
            use_local_input=local,
            output_layouts=({"x": Replicate()}, None),
            desired_output_layouts=({"x": Shard(0)}, None),
            use_local_output=not local,
        )
        model = parallelize_module(Nested(), mesh, style)
        here = mesh.get_local_rank()
        part = torch.arange(5.0)[:3] if here == 0 else torch.arange(5.0)[3:]
        (found, _) = model((part, {"local": local}), scale=torch.tensor(2.0), more=3)
        assert found["more"] == 3
        mine = found["x"].to_local() if local else found["x"]
        assert torch.equal(mine, part * 2)
        with pytest.raises(PlacementError, match=r"inputs of Nested\[0\]: the layouts"):
            model((part,), scale=torch.tensor(2.0))
        with pytest.raises(PlacementError, match="expected a tensor to lie as S"):
            model((3, {}), scale=torch.tensor(2.0))

    run_on_mesh((2,), body)


def test_layouts_of_two_forms_are_refused_at_once() -> None:
    for now, wanted in ((Shard(0), None), ((Shard(0), None), (Shard(0),)), ([], Shard(0))):
        with pytest.raises(PlacementError, match="should have same length"):
            PrepareModuleInput(input_layouts=now, desired_input_layouts=wanted)
    with pytest.raises(PlacementError, match="should have same length"):
        PrepareModuleOutput(output_layouts={"a": Shard(0)}, desired_output_layouts=[Shard(0)])


class Scaled(ParallelStyle):
    """As torch's documentation tells to write one."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters()):
            made = distribute_tensor(parameter.detach(), device_mesh, [Shard(0)])
            setattr(module, name, nn.Parameter(made))
        return module


def test_a_style_of_the_users_own() -> None:
    def body(mesh: DeviceMesh) -> None:
        model = parallelize_module(made(Mlp), mesh, {"up": Scaled()})
        assert isinstance(model.get_parameter("up.weight"), DTensor)

    run_on_mesh((2,), body)


class Wrapped(ParallelStyle):
    """Puts another module in the place of one."""

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return nn.Sequential(super().apply(module, mesh), nn.Tanh())


class Laid(ParallelStyle):
    """Says how parameters lie."""

    def __init__(self, **placements: Placement) -> None:
        self.given = placements

    def placements(self, module: nn.Module, mesh: DeviceMesh) -> dict[str, Placement]:
        return self.given


def test_a_module_that_is_replaced_is_so_under_all_of_its_names() -> None:
    def body(mesh: DeviceMesh) -> None:
        shared = nn.Linear(2, 2)
        model: Any = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.ReLU())})
        parallelize_module(model, mesh, {"a": Wrapped()})
        assert isinstance(model["a"][1], nn.Tanh)
        assert model["b"][0] is model["a"]
        assert isinstance(parallelize_module(nn.ReLU(), mesh, Wrapped()), nn.Sequential)

    run_on_mesh((1,), body)


def test_placements_of_a_style_of_the_users_own() -> None:
    """Dims from the end, and of parameters that only some layers have."""

    def body(mesh: DeviceMesh) -> None:
        style = Laid(weight=Shard(-1), bias=Shard(0))
        tied = nn.ModuleList(nn.Linear(4, 6, bias=False) for _ in range(2))
        tied[1].weight = tied[0].weight
        parallelize_module(tied, mesh, {"*": style})
        weight: Any = tied[1].weight
        assert weight is tied[0].weight
        assert weight.placements == (Shard(1),)
        model: Any = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
        with pytest.raises(PlacementError, match=r"^1: .* names dim 2, but a tensor of shape"):
            parallelize_module(model, mesh, {"0": style, "1": Laid(weight=Shard(2))})
        assert type(model[0].weight) is nn.Parameter

    run_on_mesh((2,), body)


def test_one_plan_warns_that_there_is_none() -> None:
    def body(mesh: DeviceMesh) -> None:
        with pytest.warns(UserWarning, match="nothing is done"):
            parallelize_module(made(Mlp), mesh)

    run_on_mesh((1,), body)


def test_a_module_under_two_names_is_treated_once() -> None:
    def body(mesh: DeviceMesh) -> None:
        shared = nn.Tanh()
        model = nn.ModuleDict({"a": shared, "b": shared})
        style = PrepareModuleInput(
            input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=True
        )
        parallelize_module(model, mesh, {"*": style})
        assert model["b"](torch.ones(2, 3)).shape == (4, 3)

    run_on_mesh((2,), body)


def test_inputs_may_be_given_by_name() -> None:
    whole = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6))

    def body(mesh: DeviceMesh) -> None:
        plan = {"0": SequenceParallel(sequence_dim=0), "1": ColwiseParallel(input_layouts=Shard(0))}
        model: Any = parallelize_module(fresh(whole), mesh, plan)
        x = torch.arange(12.0).view(3, 4)
        mine = x.chunk(2)[mesh.get_local_rank()]
        normed = model[0](input=mine)
        assert normed.placements == (Shard(0),)
        found = model[1](input=normed.to_local())
        wanted = whole(x).chunk(2, dim=1)[mesh.get_local_rank()]
        torch.testing.assert_close(found, wanted)
        with pytest.raises(
            PlacementError, match=r"input of Linear: the call has none, got \['x'\]"
        ):
            model[1](x=mine)

    run_on_mesh((2,), body)


def test_models_made_without_memory_get_it_after_they_are_parallel() -> None:
    """As in the documentation: made on the meta device, parallelized, then given values."""
    plan = {
        "embed": RowwiseParallel(output_layouts=Shard(1)),
        "norms.*": SequenceParallel(),
        "mlps.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "mlps.*.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }

    def model_of(mesh: DeviceMesh) -> Any:
        with torch.device("meta"):
            model = Block()
            model.head = nn.Linear(6, 13, bias=False, dtype=torch.float64)
        return parallelize_module(model, mesh, plan)

    tokens = torch.arange(10).view(2, 5) % 13

    def body(mesh: DeviceMesh) -> tuple[dict[str, Tensor], Tensor]:
        model = model_of(mesh)
        assert all(parameter.is_meta for parameter in model.parameters())
        model.to_empty(device="cpu")
        random.manual_seed(4, mesh)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        x = model.embed(tokens)
        x = DTensor.from_local(x, mesh, [Shard(1)])
        for norm, mlp in zip(model.norms, model.mlps, strict=True):
            x = x + mlp(norm(x))
        found = model.head(x)
        return {name: t.full_tensor() for name, t in model.state_dict().items()}, found

    for size in (2, 3):
        values, found = run_on_mesh((size,), body)[-1]
        model = Block()
        model.head = nn.Linear(6, 13, bias=False, dtype=torch.float64)
        model.load_state_dict(values)
        torch.testing.assert_close(found, model(tokens))


def test_a_given_length_saves_exchanges_and_is_checked() -> None:
    norm, x = nn.LayerNorm(4), torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))

    def body(mesh: DeviceMesh) -> None:
        style = SequenceParallel(use_local_output=True, sequence_length=5)
        ours = parallelize_module(copy.deepcopy(norm), mesh, style)
        here = mesh.get_local_rank()
        part = x.chunk(2, 1)[here]
        with collectives() as seen, torch.no_grad():
            torch.testing.assert_close(ours(part), norm(part))
        assert seen == []
        if here:
            with pytest.raises(PlacementError, match=r"input of LayerNorm.*expected \(2, 2, 4\)"):
                ours(x.chunk(2, 1)[0])

    run_on_mesh((2,), body)
