"""Torch's private names: all in one file, and what is done where one of them is missing."""

# pyright: reportPrivateUsage=false, reportUnknownLambdaType=false

from __future__ import annotations

import ast
import copy
import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from logging import INFO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dtckpt.dtensor
from dtckpt.dtensor import DeviceMesh, DTensor, Partial, Replicate, Shard, random
from dtckpt.dtensor import torch_private as private
from dtckpt.dtensor.comm import groups
from dtckpt.dtensor.debug import CommDebugMode
from dtckpt.dtensor.debug.coverage import op_coverage
from dtckpt.dtensor.fsdp import fully_shard
from dtckpt.dtensor.mesh import resolving as mesh_setup
from dtckpt.dtensor.mesh import torch_layouts as interop
from dtckpt.dtensor.mesh import torch_mesh
from dtckpt.dtensor.tensor import inplace_views, leaf_gradients
from dtckpt.dtensor.tensor.compilers import disabled_when_compiling
from dtckpt.dtensor.tensor.trees import flatten_tree
from dtckpt.errors import PlacementError, UnsupportedOp

from .mesh.test_device_mesh import run_script
from .rank_meshes import run_on_mesh, scattered

FOLDER = Path(dtckpt.dtensor.__file__).parent
CHECKPOINT = FOLDER.parent / "checkpoint"
OF_PYTHON = {
    "_make",
    "_asdict",
    "_current_frames",
    "_exit",
    "_getframe",
    "_register_atexit",
    "_replace",
    "_run_exitfuncs",
}


def files() -> list[Path]:
    every = [*FOLDER.rglob("*.py"), *CHECKPOINT.rglob("*.py")]
    return [path for path in every if path.name != "torch_private.py"]


def defined(trees: list[ast.AST]) -> Iterator[str]:
    """Yield every name that the library gives to something of its own."""
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield node.attr
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield node.target.id
            elif isinstance(node, ast.Assign):
                yield from (name.id for name in node.targets if isinstance(name, ast.Name))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                pass


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def test_no_other_file_names_what_torch_keeps_private() -> None:
    trees = {path: ast.parse(path.read_text()) for path in files()}
    own = {*defined(list(trees.values())), *OF_PYTHON}
    told: list[str] = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            name = ""
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                base = ast.unparse(node.value)
                operator = base.startswith(("aten", "prims", "torch.ops"))
                of_torch = base.startswith(("torch.", "dist", "_c10d")) and not operator
                name = node.attr if not operator and (of_torch or node.attr not in own) else ""
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in {
                "getattr",
                "hasattr",
            }:
                given = node.args[1]
                name = str(given.value) if isinstance(given, ast.Constant) else ""
                name = "" if name in own else name
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                parts = [*(node.module or "").split("."), *(a.name for a in node.names)]
                name = next(filter(is_private, parts), "")
            if is_private(name):
                told.append(f"{path.name}:{getattr(node, 'lineno', 0)} {name}")
    assert not told


def one_rank() -> DeviceMesh:
    return DeviceMesh("cpu", [0], rank=0)


def replicated(values: Tensor, mesh: DeviceMesh | None = None) -> DTensor:
    return DTensor.from_local(values, mesh or one_rank(), [Replicate()])


def test_what_torch_lacks_is_not_found() -> None:
    assert private.found("no_such.thing") is None
    assert private.found("nn.Linear") is torch.nn.Linear


def test_tensors_of_transforms_cannot_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    one = torch.zeros(2)
    for name in ("_PROXY", "_IS_TRANSFORMED", "_IS_BATCHED"):
        monkeypatch.setattr(private, name, None)
    assert not private.are_proxied([one])
    assert not private.is_transformed(one)
    assert not private.is_gradient_batch(one)
    public = SimpleNamespace(unpack_dual=torch.autograd.forward_ad.unpack_dual)
    monkeypatch.setattr(private, "_FORWARD", public)
    assert not private.has_tangent(one)


def test_modes_cannot_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "_NUM_MODES", None)
    assert private.has_modes()
    mesh = one_rank()
    random.manual_seed(3, mesh)
    first = torch.rand_like(replicated(torch.zeros(4), mesh)).to_local()  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.undo()
    random.manual_seed(3, mesh)
    assert torch.equal(first, torch.rand_like(replicated(torch.zeros(4), mesh)).to_local())  # pyright: ignore[reportAttributeAccessIssue]


def test_settings_stay_in_their_thread_without_a_way_to_hand_them_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(private, "_TLS", (None, None, None))
    private.hand_to_autograd("key", 1)
    assert private.handed_to_autograd("key") is None
    with one_rank() as mesh, dtckpt.dtensor.strict():
        assert mesh_setup.resolve_mesh(None) is mesh
    with CommDebugMode() as mode:
        replicated(torch.ones(2)).sum()
    assert mode.get_total_counts() == 0


def test_what_is_handed_on_is_neither_lost_nor_kept() -> None:
    value = object()
    before = sys.getrefcount(value)
    for _ in range(20):
        private.hand_to_autograd("dtckpt_test", value)
        assert private.handed_to_autograd("dtckpt_test") is value
    assert sys.getrefcount(value) == before + 1
    private.hand_to_autograd("dtckpt_test", None)
    assert sys.getrefcount(value) == before


def test_overloads_have_names() -> None:
    add = torch.ops.aten.add
    assert private.overload_of(add.Tensor) == "Tensor"
    assert private.overload_of(torch.ops.aten.relu.default) == "default"
    assert isinstance(add.Tensor, private.OpOverload)


def test_operators_that_nobody_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    assert op_coverage()["aten.add.Tensor"] == "rule"
    monkeypatch.setattr(private, "found", lambda _: None)
    with pytest.raises(UnsupportedOp, match="does not list its operators"):
        op_coverage()


def test_names_of_operators_come_from_public_methods() -> None:
    assert private.name_of_operator(torch.ops.aten.add.Tensor) == "aten::add.Tensor"
    assert private.name_of_operator(torch.ops.aten.add) in ("aten::add", None)
    assert private.name_of_operator(3) is None


def test_without_decompositions_operators_run_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    real = private.found
    monkeypatch.setattr(private, "_COMPOSITE", None)
    monkeypatch.setattr(private, "found", lambda path: None if "decomp" in path else real(path))
    assert not private.is_composite(torch.ops.aten.linear.default)
    assert not private.decompositions()

    def body(mesh: DeviceMesh) -> None:
        left, right = torch.rand(3, 4, generator=torch.Generator().manual_seed(1)), torch.ones(3, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = torch.ops.aten.hypot(
                scattered(left, mesh, [Shard(0)]), scattered(right, mesh, [Shard(0)])
            )
            special = torch.ops.aten.special_entr(scattered(left, mesh, [Shard(0)]))
        torch.testing.assert_close(made.full_tensor(), torch.hypot(left, right))
        torch.testing.assert_close(special.full_tensor(), torch.special.entr(left))

    run_on_mesh((2,), body)


def test_an_operator_is_called_itself_where_it_names_nothing_below() -> None:
    op: Any = SimpleNamespace()
    assert private.called(op) is op


def test_dispatch_without_the_disabled_function(monkeypatch: pytest.MonkeyPatch) -> None:
    real = private.found
    monkeypatch.setattr(private, "found", lambda path: None if "disabled" in path else real(path))

    class Plain(DTensor):
        __torch_function__ = private.no_torch_function()

    local = torch.arange(4.0)
    spec = replicated(local)._spec
    tensor = Plain(local, spec)
    assert torch.equal((tensor + 1).to_local(), local + 1)  # pyright: ignore[reportAttributeAccessIssue]
    assert torch.cat([tensor, tensor]).shape == (8,)


def test_this_torch_has_the_quick_constructor() -> None:
    assert private.quick_constructor() is Tensor._dtensor__new__  # pyright: ignore[reportAttributeAccessIssue]


def transposed(cls: Any, local: Tensor, spec: Any, requires_grad: bool) -> Tensor:
    """Make a tensor of other strides, as a torch would that takes them from elsewhere."""
    return Tensor._dtensor__new__(cls, local, spec, requires_grad).t()  # pyright: ignore


def without_spec(cls: Any, local: Tensor, spec: Any, requires_grad: bool) -> Tensor:
    made = Tensor._dtensor__new__(cls, local, spec, requires_grad)  # pyright: ignore
    made._spec = None
    return made


def of_three(cls: Any, local: Tensor, spec: Any) -> Tensor:
    """Take fewer arguments."""
    raise AssertionError


@pytest.mark.parametrize(
    ("other", "fault"),
    [(transposed, "raises"), (without_spec, "keeps"), (of_three, "raises TypeError")],
)
def test_a_constructor_that_does_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    other: Callable[..., Tensor],
    fault: str,
) -> None:
    monkeypatch.setattr(private, "found", lambda _: other)
    with caplog.at_level(INFO, "dtckpt.dtensor"):
        assert private.quick_constructor() is None
    assert f"because it {fault}" in caplog.text


def test_a_constructor_of_other_dtypes_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = private.found

    def real_parts(cls: Any, local: Tensor, spec: Any, requires_grad: bool) -> Tensor:
        made = Tensor._dtensor__new__(cls, local.real, spec, requires_grad)  # pyright: ignore
        made._local_tensor = local
        return made

    monkeypatch.setattr(
        private, "found", lambda path: real_parts if "dtensor" in path else real(path)
    )
    with caplog.at_level(INFO, "dtckpt.dtensor"):
        assert private.quick_constructor() is None
    assert "because it makes" in caplog.text


MISSING = """
import torch
del torch._C._current_graph_task_id
torch.Tensor._base = None
try:
    from dtckpt.dtensor import DTensor
except ImportError as error:
    print(error)
"""


def test_all_names_that_are_needed_and_missing_are_told_at_once() -> None:
    lines = run_script(MISSING).splitlines()
    assert torch.__version__ in lines[0]
    assert [line.split(":")[0].strip() for line in lines[1:-1]] == [
        "torch.Tensor._base",
        "torch._C._current_graph_task_id",
    ]
    assert all(line.partition(": ")[2] for line in lines[1:-1])
    assert private.TESTED in lines[-1]


def test_names_that_can_be_missing_are_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(private, "_NOT_FOUND", set())
    with caplog.at_level(INFO, "dtckpt.dtensor"):
        for _ in range(2):
            assert private.found("_C._no_such_name") is None
            assert private.found("nn.Linear") is not None
    (record,) = caplog.records
    assert "has no torch._C._no_such_name" in record.getMessage()


def test_every_name_that_is_needed_is_used() -> None:
    text = Path(private.__file__).read_text()
    for path in private._NEEDED:
        assert text.count(path.rpartition(".")[2]) >= 2, path


def test_lazy_conjugates_need_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    local = torch.ones(3, dtype=torch.complex64)[1:].conj()  # torch's own constructor marks itself
    assert replicated(local).is_conj()
    monkeypatch.setattr(private, "_BITS", (None, None))
    with pytest.raises(UnsupportedOp, match="resolve_conj"):
        replicated(local)
    assert not replicated(local.resolve_conj()).is_conj()


def test_storages_are_told_apart_without_memory() -> None:
    tensor = torch.ones(4, device="meta")
    assert private.storage_id(tensor) == private.storage_id(tensor[1:])
    assert private.storage_id(tensor) != private.storage_id(torch.ones(4, device="meta"))


def test_leaves_follow_without_a_look_at_their_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "_SHOWS_HOOKS", False)

    def body(mesh: DeviceMesh) -> None:
        leaf = scattered(torch.ones(4, 4), mesh, [Shard(0)]).detach()
        leaf.requires_grad_()
        leaf.requires_grad_()
        assert len(leaf_gradients._find(leaf)) == 1  # pyright: ignore[reportArgumentType]
        leaf.data = scattered(torch.ones(4, 4), mesh, [Shard(1)])
        (leaf * scattered(torch.ones(4, 4), mesh, [Replicate()])).sum().backward()
        assert leaf.grad.placements == (Shard(1),)  # pyright: ignore

    run_on_mesh((2,), body)
    gc.collect()


def test_shapes_do_not_change_in_place_without_a_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inplace_views, "correct_aliasing", None)
    tensor = replicated(torch.ones(2, 3))
    with pytest.raises(UnsupportedOp, match="there is no way to do so"):
        tensor.t_()
    assert torch.add(tensor, 1, out=torch.empty_like(tensor)).shape == (2, 3)


def found(module: str) -> list[type]:
    return private.found(f"{module}._foreach_supported_types")


def test_lists_are_asked_for_where_torch_has_no_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [found("optim.optimizer"), found("utils._foreach_utils")]
    assert all(DTensor in listed for listed in kinds), "of optimizers, and of clipping"
    monkeypatch.setattr(private, "found", lambda _: None)
    private.list_by_default(int)
    assert not any(int in listed for listed in kinds)
    parameter = torch.nn.Parameter(replicated(torch.ones(3)))
    (parameter * 2).sum().backward()
    torch.optim.SGD([parameter], lr=0.5, foreach=True).step()
    assert parameter.to_local().tolist() == [0, 0, 0]  # pyright: ignore[reportAttributeAccessIssue]


def test_collectives_are_counted_without_a_view_of_autograd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(private, "found", lambda _: None)
    assert private.backward_node() is None
    assert private.next_node_number() == 0
    assert private.node_number(object()) == -1

    def body(mesh: DeviceMesh) -> None:
        net = torch.nn.Linear(4, 4, bias=False)
        net.weight = torch.nn.Parameter(scattered(torch.ones(4, 4), mesh, [Shard(0)]))
        with CommDebugMode() as mode:
            made = net(scattered(torch.ones(2, 4), mesh, [Replicate()]))
            made.redistribute(placements=[Replicate()]).sum().backward()
        assert mode.get_total_counts() >= 1

    run_on_mesh((2,), body)


def test_functions_are_kept_from_compilers_by_public_means(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(private, "found", lambda _: None)
    assert private.skip_strategy() is None
    assert disabled_when_compiling(lambda x: x + 1)(1) == 2


class Bare:
    """A group without torch's private methods."""

    def __init__(self, group: Any) -> None:
        self._given = group

    def __getattr__(self, name: str) -> Any:
        if name in ("_allgather_base", "_reduce_scatter_base"):
            raise AttributeError(name)
        return getattr(self._given, name)


def test_collectives_by_lists() -> None:
    def body(mesh: DeviceMesh) -> None:
        bare = DeviceMesh("cpu", mesh.layout_mesh, groups=[Bare(mesh.get_group())])
        whole = torch.arange(24.0).view(6, 4)
        for source, target in (
            (Shard(0), Replicate()),
            (Partial(), Shard(0)),
            (Partial(), Shard(1)),
        ):
            moved = scattered(whole, bare, [source]).redistribute(placements=[target])
            assert torch.equal(moved.full_tensor(), whole)

    run_on_mesh((2,), body)


def test_groups_without_a_look_up_or_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    assert private.group_named("no such group") is None
    monkeypatch.setattr(private, "found", lambda _: None)
    assert private.group_named("any") is None
    assert not dist.is_initialized()
    assert private.job_store() is None


def test_allocators_of_groups() -> None:
    device = torch.device("cpu")
    has_one: Any = SimpleNamespace(_get_backend=lambda _: SimpleNamespace(mem_allocator="pool"))
    has_none: Any = SimpleNamespace(_get_backend=lambda _: SimpleNamespace())
    assert private.allocator_of(has_one, device) == "pool"
    assert private.allocator_of(has_none, device) is None
    assert private.allocator_of(SimpleNamespace(), device) is None


def test_group_names_that_torch_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "_C10D", SimpleNamespace())
    with pytest.warns(UserWarning, match="cannot be told the name of a process group"):  # noqa: SIM117
        with groups._named("x"):
            assert groups._name.text == ""
    counted: list[Any] = []

    def name_of(ranks: list[int], use_hashed_name: bool) -> str:
        counted.append(ranks)
        return f"{ranks} {use_hashed_name}"

    known: Any = SimpleNamespace(_process_group_name=name_of)
    monkeypatch.setattr(private, "_C10D", known)
    with groups._named("x"):
        assert len(known._process_group_name([1], use_hashed_name=True)) == 40
    assert not counted  # torch counts what it names, and ranks have to count alike
    assert known._process_group_name([1], use_hashed_name=True) == "[1] True"
    for other in (lambda: "", lambda ranks, salt: "", 3):
        monkeypatch.setattr(private, "_C10D", SimpleNamespace(_process_group_name=other))
        assert not private.ask_for_group_names(lambda: "x")


def test_torch_meshes_without_private_parameters() -> None:
    assert private.rank_of_torch_mesh(SimpleNamespace()) is None

    def takes_none(device_type: str, ranks: Tensor) -> None: ...

    assert private.torch_mesh_without_groups(takes_none, "cpu", torch.arange(1), 0) is None
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch_mesh, "torch_mesh_without_groups", lambda *_: None)
        with pytest.raises(PlacementError, match="makes no mesh without a process group"):
            one_rank().to_torch()


def test_torch_tensors_that_show_nothing() -> None:
    local = torch.ones(2)
    shows: Any = SimpleNamespace(to_local=lambda: local)
    assert private.spec_of_torch(shows) is None
    assert torch.equal(private.local_of_torch(shows), local)
    assert interop._STRIDED is private.strided_shard() is not None


def test_state_dicts_without_helpers() -> None:
    assert private.state_dict_helpers(["no_such_name"]) is None


def test_operators_of_torch_are_not_seen_without_modes() -> None:
    assert issubclass(CommDebugMode, private.DispatchMode)
    without = type("Operators", (nullcontext,), {"__torch_dispatch__": None})
    with without():  # as where torch has no modes: nothing calls it
        assert (replicated(torch.ones(2)) + 1).sum().item() == 4


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.mark.parametrize("torchs", [True, False])
def test_trees_are_taken_apart_and_put_together(
    monkeypatch: pytest.MonkeyPatch, torchs: bool
) -> None:
    if not torchs:
        monkeypatch.setattr(private, "found", lambda path: None)
    tree = {"a": [1, (2, None)], "b": Pair(3, {"c": ()})}
    leaves, rebuild = flatten_tree(tree)
    assert leaves == [1, 2, None, 3]
    made = rebuild(value and value * 10 for value in leaves)
    assert made == {"a": [10, (20, None)], "b": Pair(30, {"c": ()})}
    assert type(made["b"]) is Pair
    assert flatten_tree(7)[1]([8]) == 8


def test_sharded_modules_train_where_torch_tells_nothing_of_backward_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hidden = ("_top_saved_tensors_default_hooks", "_execution_engine")
    found = private.found
    monkeypatch.setattr(
        private, "found", lambda path: None if path.endswith(hidden) else found(path)
    )
    assert private.saved_hooks() is None
    assert not private.when_backward_ends(lambda: None)
    start = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    start[0].requires_grad_(False)  # so that nothing tells when it may be freed
    x = torch.randn(4, 3)
    whole = copy.deepcopy(start)

    def step(model: Any, batch: Tensor) -> None:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
        for _ in range(2):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    step(whole, x)

    def body(mesh: DeviceMesh) -> None:
        model: Any = copy.deepcopy(start)
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        step(model, x.chunk(2)[mesh.get_local_rank()])
        for made, wanted in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(made.full_tensor(), wanted.data)

    run_on_mesh((2,), body)


def test_record_redistribute_leaves_calls_of_our_class_to_the_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Ours(torch.Tensor):
        pass

    class TensorVariable:  # Dynamo's of torch 2.11, as far as it is read
        def __init__(self, kind: type) -> None:
            self.class_type = kind

        def method_redistribute(self, tx: str, mesh: int) -> tuple[str, int]:
            return tx, mesh

    module = SimpleNamespace(TensorVariable=TensorVariable)
    monkeypatch.setitem(sys.modules, "torch._dynamo.variables.tensor", module)
    for _ in range(2):  # the second call finds what the first has made
        private.record_redistribute(Ours)
    assert TensorVariable(Ours).method_redistribute("tx", mesh=1) is None
    assert TensorVariable(torch.Tensor).method_redistribute("tx", mesh=1) == ("tx", 1)
    monkeypatch.setitem(sys.modules, "torch._dynamo.variables.tensor", SimpleNamespace())
    private.record_redistribute(Ours)
