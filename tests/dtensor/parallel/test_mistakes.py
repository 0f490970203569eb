"""Typical mistakes: one clear error, alike on all ranks, before anything is sent."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed.tensor.parallel as torch_parallel
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from dtckpt.dtensor import (
    DeviceMesh,
    DTensor,
    Mesh,
    Partial,
    Placement,
    PlacementError,
    Replicate,
    Shard,
    distribute_tensor,
)
from dtckpt.dtensor.experimental import context_parallel, local_map
from dtckpt.dtensor.fsdp import (
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from dtckpt.dtensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallel_cross_entropy,
    parallelize_module,
    placement_rules,
)
from tests.dtensor.rank_meshes import collectives, run_on_mesh

Try = Callable[[], object]
Prepare = Callable[[DeviceMesh], Try]
OnMesh = Callable[[DeviceMesh], Any]


@dataclass(frozen=True, slots=True)
class Mistake:
    """What a user got wrong, and what is to be said of it."""

    name: str
    prepare: Prepare
    """Does what is right, and returns what is not; the mesh has the axes "dp" and "tp"."""
    told: str
    sends: int = 0
    """Collectives of a few numbers by which ranks find that it is wrong."""
    error: type[Exception] = PlacementError

    def __str__(self) -> str:
        return self.name


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 7), nn.GELU(), nn.Linear(7, 4), nn.LayerNorm(4))


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight


def planned(plan: Any, model: Callable[[], nn.Module] = mlp, **options: Any) -> Prepare:
    """Parallelise along "tp"."""
    return lambda mesh: lambda: parallelize_module(model(), mesh["tp"], plan, **options)


def called(style: Any, *inputs: Tensor | list[float] | OnMesh) -> Prepare:
    """Call a parallel module; an input may be made on the mesh."""

    def prepare(mesh: DeviceMesh) -> Try:
        module = parallelize_module(nn.Linear(4, 6), mesh["tp"], style, src_data_rank=None)
        given = [x if isinstance(x, list | Tensor) else x(mesh) for x in inputs]
        return lambda: module(*given)

    return prepare


def sharded(model: Callable[[], Any] = mlp, **options: Any) -> Prepare:
    """Shard along "dp"."""
    return lambda mesh: lambda: fully_shard(model(), mesh=mesh["dp"], **options)


def laid_out(whole: Tensor, mesh: DeviceMesh, *placements: Any) -> DTensor:
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


X, LOGITS, TARGET = torch.ones(2, 4), torch.randn(4, 6), torch.randint(6, (4,))


def entropy(
    target: Tensor | OnMesh = TARGET, lies: Placement | None = None, **options: Any
) -> Prepare:
    """Take the loss of logits, which are sharded by class unless they lie otherwise."""

    def prepare(mesh: DeviceMesh) -> Try:
        logits = laid_out(LOGITS, mesh["tp"], lies or Shard(1))
        given = target if isinstance(target, Tensor) else target(mesh)
        return lambda: parallel_cross_entropy(logits, given, **options)

    return prepare


def mapped(function: Callable[..., Any], out: Any, into: Any, *placements: Any) -> Prepare:
    """Map a function over tensors with placements along "tp", or another axis that they name."""

    def prepare(mesh: DeviceMesh) -> Try:
        axes = [p if isinstance(p, tuple) else (p, "tp") for p in placements]
        given = [laid_out(LOGITS, mesh[axis], placement) for placement, axis in axes]
        mapping: Any = local_map(function, out, into)
        return lambda: mapping(*given)

    return prepare


def shared(buffer: Tensor, dims: list[int], *axes: str) -> Prepare:
    """Share a sequence along axes."""

    def prepare(mesh: DeviceMesh) -> Try:
        def attempt() -> None:
            with context_parallel(mesh[axes], buffers=[buffer], buffer_seq_dims=dims):
                raise AssertionError("entered")

        return attempt

    return prepare


def same(x: Tensor, *_: Tensor) -> Tensor:
    return x


def pair(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x


def with_number(x: Tensor) -> tuple[Tensor, int]:
    return x, 3


def fifth(_: nn.Parameter) -> Shard:
    return Shard(5)


def zero(_: nn.Parameter) -> Any:
    return 0


def treated_twice(mesh: DeviceMesh) -> Try:
    model = parallelize_module(mlp(), mesh["tp"], {"0": ColwiseParallel()}, src_data_rank=None)
    return lambda: parallelize_module(model, mesh["tp"], {"0": RowwiseParallel()})


def sharded_first(mesh: DeviceMesh) -> Try:
    model = fully_shard(mlp(), mesh=mesh["dp"])
    return lambda: parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})


def sharded_twice(mesh: DeviceMesh) -> Try:
    model = fully_shard(mlp(), mesh=mesh["dp"])
    return lambda: fully_shard(model, mesh=mesh["dp"])


def sharded_apart(mesh: DeviceMesh) -> Try:
    model = Tied()
    fully_shard(model.b, mesh=mesh["dp"])
    return lambda: fully_shard(model, mesh=mesh["dp"])


def sharded_along_the_same_axis(mesh: DeviceMesh) -> Try:
    model = parallelize_module(nn.Linear(4, 4), mesh["tp"], ColwiseParallel(), src_data_rank=None)
    return lambda: fully_shard(model, mesh=mesh["tp"])


def forward_by_name(mesh: DeviceMesh) -> Try:
    model = fully_shard(mlp(), mesh=mesh["dp"])
    return lambda: model.forward(X + mesh.get_rank())


def no_such_method(mesh: DeviceMesh) -> Try:
    model = fully_shard(mlp(), mesh=mesh["dp"])
    return lambda: register_fsdp_forward_method(model, "encode")


def rules_of_two_meshes(mesh: DeviceMesh) -> Try:
    parts = [
        parallelize_module(nn.Linear(4, 4), mesh[axis], ColwiseParallel(), src_data_rank=None)
        for axis in ("tp", "dp")
    ]
    return lambda: placement_rules(nn.ModuleList(parts))


def plain_target_of_another_mesh(mesh: DeviceMesh) -> Try:
    logits = laid_out(LOGITS, mesh["tp"], Shard(1))
    target = laid_out(TARGET, mesh["dp"], Shard(0))

    def attempt() -> object:
        with loss_parallel():
            return F.cross_entropy(logits, target)

    return attempt


FIRST = {"0": ColwiseParallel()}
MISTAKES = [
    # meshes and names
    Mistake(
        "a mesh of two axes",
        lambda mesh: lambda: parallelize_module(mlp(), mesh, FIRST),
        "works along one axis, mesh dp=2,tp=2 has 2: pass mesh_dim=",
    ),
    Mistake(
        "an unknown axis",
        lambda mesh: lambda: parallelize_module(mlp(), mesh, FIRST, mesh_dim="cp"),
        r"Invalid mesh_dim_name 'cp': mesh dp=\d+,tp=\d+ has the dims \('dp', 'tp'\)",
    ),
    Mistake(
        "an axis by number",
        lambda mesh: lambda: parallelize_module(mlp(), mesh, FIRST, mesh_dim=1),  # pyright: ignore[reportArgumentType]
        "mesh_dim is the name of an axis of dp=2,tp=2, got 1",
    ),
    Mistake(
        "a number for a mesh",
        lambda _: lambda: parallelize_module(mlp(), 2, FIRST),  # pyright: ignore[reportArgumentType]
        "expected a DeviceMesh, got 2 of type int",
    ),
    Mistake(
        "a name for a mesh",
        lambda _: lambda: fully_shard(mlp(), mesh="dp"),  # pyright: ignore[reportArgumentType]
        "expected a DeviceMesh, got 'dp' of type str",
    ),
    Mistake("no mesh", lambda _: lambda: parallelize_module(mlp(), None, FIRST), "no mesh: pass"),
    Mistake(
        "fully_shard over three axes",
        lambda _: lambda: fully_shard(mlp(), mesh=DeviceMesh("cpu", Mesh((1, 1, 1)), rank=0)),
        "got DeviceMesh",
    ),
    Mistake(
        "fully_shard along the axis of the layers",
        sharded_along_the_same_axis,
        "'weight' lies on mesh tp=2, which is no part of one mesh with tp=2",
    ),
    Mistake("rules of two meshes", rules_of_two_meshes, "'1.weight' lies on mesh dp=2 and others"),
    # plans
    Mistake("no such part", planned({"9": ColwiseParallel()}), "no part .* is called '9'; there"),
    Mistake("a part by number", planned({0: ColwiseParallel()}), "by the names of parts, got 0; a"),
    Mistake("a list for a plan", planned([ColwiseParallel()]), "must be a style, .* got a list"),
    Mistake("a class for a style", planned({"0": ColwiseParallel}), "is the class ColwiseParallel"),
    Mistake(
        "a style of torch",
        planned({"0": torch_parallel.ColwiseParallel()}),
        "a ColwiseParallel of torch.distributed.*, expected a ParallelStyle of dtckpt",
    ),
    Mistake(
        "columns of a norm, after a style that fits",
        planned({**FIRST, "3": ColwiseParallel()}),
        "3: ColwiseParallel is for Linear, .* got a LayerNorm",
    ),
    Mistake(
        "a convolution of two groups",
        planned(ColwiseParallel(), lambda: nn.Conv1d(4, 4, 1, groups=2)),
        "convolutions of one group, got 2",
    ),
    Mistake("a sequence of a layer", planned({"0": SequenceParallel()}), "0: SequenceParallel is"),
    Mistake(
        "tied weights in two ways",
        planned({"a": ColwiseParallel(), "b": RowwiseParallel()}, Tied),
        "'b.weight' and 'a.weight' are one tensor, .* wants S.1. and S.0.",
    ),
    Mistake(
        "a weight that is made from others",
        planned(ColwiseParallel(), lambda: weight_norm(nn.Linear(4, 4))),
        "'weight' of a ParametrizedLinear is no parameter .* apply that after parallelize_module",
    ),
    Mistake("no such source", planned(FIRST, src_data_rank=7), "src_data_rank=7 is not an index"),
    Mistake("a module treated twice", treated_twice, "'0.weight' is distributed already, as float"),
    Mistake("fully_shard first", sharded_first, "apply tensor parallel styles before fully_shard"),
    # layouts of inputs and outputs
    Mistake(
        "a layout as text",
        lambda _: lambda: ColwiseParallel(input_layouts="S(0)"),  # pyright: ignore[reportArgumentType]
        r"input_layouts of ColwiseParallel must be a placement, .* got 'S\(0\)'",
    ),
    Mistake(
        "a class for a layout",
        lambda _: lambda: RowwiseParallel(output_layouts=Replicate),  # pyright: ignore[reportArgumentType]
        "output_layouts of RowwiseParallel must be a placement, .* got the class Replicate",
    ),
    Mistake(
        "a dim as text",
        lambda _: lambda: SequenceParallel(sequence_dim="1"),  # pyright: ignore[reportArgumentType]
        "must be an int, got '1'",
    ),
    Mistake(
        "layouts of two forms",
        lambda _: lambda: PrepareModuleInput(input_layouts=Shard(0)),
        "should have same length",
    ),
    Mistake(
        "an input of no such name",
        planned(
            PrepareModuleInput(
                input_kwarg_layouts={"y": Shard(0)}, desired_input_kwarg_layouts={"y": Replicate()}
            )
        ),
        r"name \['y'\], but forward of a Sequential takes \['input'\]",
    ),
    Mistake(
        "layouts of two inputs for one",
        called(
            PrepareModuleInput(
                input_layouts=(Shard(0), None), desired_input_layouts=(Replicate(), None)
            ),
            X,
        ),
        "inputs of Linear: the layouts .* do not fit a tuple of 1",
    ),
    Mistake(
        "a dim that the input has not",
        called(ColwiseParallel(input_layouts=Shard(5)), X),
        r"input of Linear, a plain tensor taken to lie as .*\(2, 4\) has 2 dims",
        sends=1,
    ),
    Mistake(
        "a dim that the output has not",
        called(ColwiseParallel(output_layouts=Shard(5)), X),
        "output of Linear, which must lie as .* has 2 dims",
    ),
    Mistake(
        "a whole input for a row layer",
        called(RowwiseParallel(), X),
        r"input of Linear, a plain tensor taken to lie as .* expected \(2, 2\) .* got \(2, 4\)",
    ),
    Mistake(
        "an input on another mesh",
        called(ColwiseParallel(), lambda mesh: laid_out(X, mesh["dp"], Shard(0))),
        "input of Linear: a DTensor lies on mesh dp=2, expected tp=2",
    ),
    Mistake(
        "an input on the whole mesh",
        called(ColwiseParallel(), lambda mesh: laid_out(X, mesh, Shard(0), Replicate())),
        "input of Linear: a DTensor lies on mesh dp=2,tp=2, expected tp=2",
    ),
    Mistake("a list for an input", called(ColwiseParallel(), [1.0]), "expected a tensor .* list"),
    Mistake("no input", called(ColwiseParallel()), "input of Linear: the call has none"),
    # fully_shard
    Mistake("sharded twice", sharded_twice, "this FSDPSequential is sharded already"),
    Mistake(
        "a list of names", sharded(lambda: ["a"]), "takes a module, or a list of some, got a str"
    ),
    Mistake(
        "a ModuleList",
        sharded(lambda: nn.ModuleList([mlp()])),
        "do not implement forward, at which",
    ),
    Mistake("tied over two units", sharded_apart, "'a.weight' is tied to 'b.weight' of a part"),
    Mistake(
        "no such dim", sharded(shard_placement_fn=fifth), "Shard dim 5 is invalid for 2D tensor"
    ),
    Mistake("a dim alone", sharded(shard_placement_fn=zero), r"got 0 for '0.weight'"),
    Mistake("a text for a flag", sharded(reshard_after_forward="no"), "reshard_after_forward is"),
    Mistake(
        "names of ignored ones", sharded(ignored_params=["0.bias"]), "has '0.bias' of type str"
    ),
    Mistake("a dtype for a policy", sharded(mp_policy=torch.bfloat16), "be a MixedPrecisionPolicy"),
    Mistake(
        "a dtype as text",
        lambda _: lambda: MixedPrecisionPolicy(param_dtype="bf16"),  # pyright: ignore[reportArgumentType]
        "param_dtype must be a torch.dtype or None, got 'bf16'",
        error=ValueError,
    ),
    Mistake("no such method", no_such_method, "has no method 'encode'"),
    Mistake("forward by its name", forward_by_name, "is a plain torch.Tensor .* differs", sends=1),
    Mistake(
        "an unknown axis of data",
        lambda mesh: (
            lambda: fully_shard(mlp(), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="cp"))
        ),
        "'cp'",
    ),
    # sequences
    Mistake("a sequence along two axes", shared(X, [1], "dp", "tp"), "takes a mesh of one axis"),
    Mistake("no such dim of a sequence", shared(X, [2], "tp"), "has no dim 2"),
    Mistake(
        "dims of other buffers", shared(X, [0, 1], "tp"), "1 buffers and 2 dims", 0, ValueError
    ),
    Mistake(
        "a parameter for a buffer", shared(nn.Parameter(X), [1], "tp"), "Parameter", 0, TypeError
    ),
    # losses
    Mistake(
        "logits that are plain",
        lambda _: lambda: parallel_cross_entropy(LOGITS, TARGET),  # pyright: ignore[reportArgumentType]
        "takes logits that are a DTensor, got Tensor of torch",
    ),
    Mistake("too few targets", entropy(TARGET[:3]), "must be int64 of shape .4., or probabilities"),
    Mistake("too few targets for terms", entropy(TARGET[:3], Partial()), "must be int64 of shape"),
    Mistake("targets of another dtype", entropy(TARGET.int()), "got int32 of shape"),
    Mistake("weights of other classes", entropy(weight=torch.ones(5)), "for each of 6 classes"),
    Mistake("no such class dim", entropy(dim=2), "dim 2 is none of logits of shape"),
    Mistake(
        "no such reduction", entropy(reduction="avg"), "'mean', 'sum' or 'none'", 0, ValueError
    ),
    Mistake("too much smoothing", entropy(label_smoothing=2.0), "between 0 and 1", 0, ValueError),
    Mistake(
        "targets on another mesh",
        entropy(lambda mesh: laid_out(TARGET, mesh["dp"], Shard(0))),
        "the target lies on mesh dp=2 and the logits on tp=2",
    ),
    Mistake(
        "targets that differ",
        entropy(lambda mesh: TARGET + mesh.get_local_rank("tp")),
        "the target is a plain tensor that differs between ranks",
        sends=1,
    ),
    Mistake(
        "targets on another mesh, by F.cross_entropy",
        plain_target_of_another_mesh,
        "tensor 1 lies on .*dp=2.* must lie on one mesh",
        sends=2,
    ),
    # local_map
    Mistake(
        "placements of three for one",
        mapped(same, [Replicate()], ([Replicate()],) * 3, Replicate()),
        "in_placements has 3 entries for 1 arguments",
    ),
    Mistake(
        "placements of one result for two",
        mapped(pair, ([Replicate()],), ([Replicate()],), Replicate()),
        "out_placements are for 1 results, but there are 2",
    ),
    Mistake(
        "placements of a number",
        mapped(with_number, ([Replicate()], [Replicate()]), ([Replicate()],), Replicate()),
        "result 1 of type int is no tensor",
    ),
    Mistake(
        "an input that lies otherwise",
        mapped(same, [Replicate()], ([Replicate()],), Shard(0)),
        r"DTensor 0 has placements \(S\(0\)\), expected \(R\); .* redistribute_inputs=True",
    ),
    Mistake(
        "inputs on two meshes",
        mapped(same, [Replicate()], ([Replicate()],) * 2, Replicate(), (Replicate(), "dp")),
        "a DTensor lies on mesh dp=2, the first on tp=2; redistribute it to one mesh, or say",
    ),
    Mistake(
        "placements of two axes",
        mapped(same, [Replicate(), Shard(0)], ([Replicate()],), Replicate()),
        "placements and mesh dims must have the same length",
    ),
    Mistake(
        "placements as text",
        mapped(same, "R", ([Replicate()],), Replicate()),
        r"expected a placement, as Shard\(0\) or Replicate\(\), got 'R' of type str",
    ),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_one_clear_error_on_all_ranks_before_anything_is_sent(mistake: Mistake) -> None:
    whole = torch.arange(6.0).view(3, 2)

    def body(mesh: DeviceMesh) -> str:
        attempt = mistake.prepare(mesh)
        with collectives() as sent, pytest.raises(mistake.error, match=mistake.told) as caught:
            attempt()
        assert len(sent) == mistake.sends
        again = laid_out(whole, mesh, Shard(0), Shard(1))  # the groups are as they were
        assert torch.equal(again.full_tensor(), whole)
        return re.sub(r" at \(\d,\)", "", str(caught.value))

    told = run_on_mesh((2, 2), body, ("dp", "tp"))
    assert len(set(told)) == 1
