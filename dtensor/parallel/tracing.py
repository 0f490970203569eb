"""Plans from traced models: pairs of linear layers between which activations may stay sharded.

A traced graph runs on tensors without data, on a mesh that nobody needs to be in. A linear layer
whose input is whole is tried by columns; what it makes goes through the operators of the graph as
their rules say. Where it comes to another layer still sharded by features, that one is by rows, and
nothing but its sum is sent. Layers whose output is lost on the way stay whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx
from torch import Tensor, nn

from dtckpt.errors import PlacementError

from ..dtensor import DTensor
from ..geometry.mesh import Mesh
from ..geometry.placement import Placement, Replicate, Shard, format_placements
from ..mesh.device_mesh import DeviceMesh
from ..mesh.modes import implicit_replication
from ..redistribute import moves_without_values
from ..tensor.wrapper import Wrapper
from .base_style import ParallelStyle
from .linear import ColwiseParallel, RowwiseParallel

if TYPE_CHECKING:  # who has a traced model has loaded it
    from torch.export import ExportedProgram

aten = torch.ops.aten


def plan_of(program: ExportedProgram, world_size: int) -> dict[str, ParallelStyle]:
    """Return styles for the linear layers of a traced model, by their names, for so many ranks.

    ``program`` is what ``torch.export.export`` returns, traced for shapes as they are used. A layer
    gets ``ColwiseParallel`` where all that is made of its output reaches layers of
    ``RowwiseParallel`` without communication; other layers are left out. So
    ``parallelize_module(model, mesh, plan_of(program, mesh.size()))`` computes what the model did.
    Between two layers are DTensors, so that code with sizes of the whole stays right. Needs no
    process group.

    Raises PlacementError for graphs of unknown sizes, and for no number of ranks.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    >>> program = torch.export.export(model, (torch.ones(2, 4),))
    >>> {name: type(style).__name__ for name, style in plan_of(program, 2).items()}
    {'0': 'ColwiseParallel', '2': 'RowwiseParallel'}
    >>> placement_rules_of(program, plan_of(program, 2), 2)
    'model/0.weight=S(0); model/0.bias=S(0); model/2.weight=S(1); model/2.bias=R'
    """
    mesh = _mesh_of(world_size)
    whole: set[str] = set()
    mixed: set[str] = set()
    while True:
        trace = _Trace(program, mesh, whole, mixed)
        trace.follow()
        if not trace.lost and not trace.mixed:
            styles = {**dict.fromkeys(trace.columns, True), **dict.fromkeys(trace.rows, False)}
            return {
                name: ColwiseParallel(use_local_output=False) if styles[name] else RowwiseParallel()
                for name in trace.seen
                if name in styles
            }
        whole |= trace.lost
        mixed |= trace.mixed


def placement_rules_of(
    program: ExportedProgram,
    plan: Mapping[str, ParallelStyle],
    world_size: int,
    prefix: str = "model",
) -> str:
    """Return how the parameters of a traced model lie by a plan, as ``dtckpt reshard`` takes it.

    As ``placement_rules`` does of a model that is parallel. The plan is for linear layers, by name.

    Raises PlacementError for names that are none.
    """
    mesh, rules = _mesh_of(world_size), list[str]()
    for name, style in plan.items():
        weight = program.state_dict.get(f"{name}.weight")
        if weight is None or weight.ndim != 2:
            raise PlacementError(
                f"placement_rules_of: no linear layer of the program is called {name!r}; there are "
                f"{', '.join(n for n in program.state_dict if n.endswith('.weight'))}"
            )
        bias = f"{name}.bias" in program.state_dict
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias, device="meta")
        for own, placement in style.placements(layer, mesh).items():
            rules.append(f"{prefix}/{name}.{own}={format_placements((placement,))}")
    return "; ".join(rules)


def _mesh_of(world_size: int) -> DeviceMesh:
    if type(world_size) is not int or world_size < 1:
        raise PlacementError(f"a plan is for a number of ranks, got {world_size!r}")
    return DeviceMesh("cpu", Mesh((world_size,), ("tp",)), rank=0)


class _Trace(fx.Interpreter):
    """One way through a graph, with linear layers by columns where nothing says they cannot be."""

    def __init__(
        self, program: ExportedProgram, mesh: DeviceMesh, whole: set[str], mixed: set[str]
    ) -> None:
        super().__init__(program.graph_module)
        signature = program.graph_signature
        self._parameters = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        self._mesh = mesh
        self._whole, self._mixed = whole, mixed
        self._nodes = list(program.graph_module.graph.nodes)
        self._makers: dict[fx.Node, frozenset[str]] = {}
        """The layers whose features a value still has, sharded."""
        self._reached: set[str] = set()
        """The layers whose features came to a layer by rows."""
        self.seen: dict[str, None] = {}
        self.columns: set[str] = set()
        self.rows: set[str] = set()
        self._others: set[str] = set()
        self.lost: set[str] = set()
        """Layers by columns that cannot be."""
        self.mixed: set[str] = set()
        """Layers that run several times, by rows and otherwise."""

    def follow(self) -> None:
        """Run the graph; afterwards the sets are filled."""
        with torch.no_grad(), implicit_replication():
            self.run(*[None] * sum(node.op == "placeholder" for node in self._nodes))
        self.lost |= self.columns - self._reached
        self.mixed = {name for name in self.rows if name in self.columns | self._others}

    def run_node(self, n: fx.Node) -> Any:
        """Return what a node makes, as tensors without data."""
        if n.op == "placeholder":
            return self._placed(_of_node(n), Replicate())
        makers = frozenset[str]().union(*(self._makers.get(one, ()) for one in n.all_input_nodes))
        if n.op == "output":
            self.lost |= makers
            return None
        if n.target is aten.linear.default:
            return self._linear(n, makers)
        if n.target is aten.scaled_dot_product_attention.default:
            made, stays = self._attention(n), True
        else:
            with moves_without_values() as moved:
                made = self._on_mesh(super().run_node(n))
            stays = not moved
        if makers and _is_sharded(made) and stays:
            self._makers[n] = makers
            return made
        self.lost |= makers
        return self._whole_again(made) if makers else made

    def _linear(self, n: fx.Node, makers: frozenset[str]) -> Any:
        x: Any = self.env[n.args[0]]  # pyright: ignore[reportArgumentType]
        weight = n.args[1]
        name = self._parameters.get(getattr(weight, "name", ""), "").removesuffix(".weight")
        made = _of_node(n)
        (lies,) = x.placements
        self.seen[name] = None
        # Another cut of the features, as what is joined has, would be moved to that of the weight.
        if name and lies == Shard(x.ndim - 1) and name not in self._mixed:
            self.rows.add(name)
            self._reached |= makers
            return self._placed(made, Replicate())
        self.lost |= makers
        if not name or name in self._whole | self._mixed or not lies.is_replicate():
            self._others.add(name)
            return self._placed(made, Replicate())
        self.columns.add(name)
        self._makers[n] = frozenset({name})
        return self._placed(made, Shard(made.ndim - 1))

    def _attention(self, n: fx.Node) -> Any:
        """Return attention over heads that are sharded alike: each is on its own.

        Without data nobody can tell which kernel runs, and for some heads are no dim.
        """
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        query, rest = args[0], args[3:]
        mask = rest[0] if rest else kwargs.get("attn_mask")
        lies, made = query.placements[0], _of_node(n)
        dim = next((d for d in range(query.ndim - 2) if lies.is_shard(d)), None)
        if dim is None or len({(t.placements, t.shape[: dim + 1]) for t in args[:3]}) > 1:
            return self._placed(made, Replicate())
        back = query.ndim - dim
        is_of_heads = mask is not None and mask.ndim >= back and mask.shape[-back] > 1
        return self._placed(made, Replicate() if is_of_heads else Shard(dim))

    def _placed(self, value: Any, placement: Placement) -> Any:
        if not isinstance(value, Tensor):
            return value
        whole = torch.empty(value.shape, dtype=value.dtype, device="meta")
        tensor: Any = DTensor.from_local(whole, self._mesh, [Replicate()])
        return tensor.redistribute(placements=[placement])

    def _whole_again(self, made: Any) -> Any:
        """Return results as they are where no layer is by columns."""
        if isinstance(made, list | tuple):
            return type(made)([self._whole_again(one) for one in made])
        return self._placed(made, Replicate())

    def _on_mesh(self, made: Any) -> Any:
        """Return results with tensors that were made in the graph as replicated ones."""
        if isinstance(made, list | tuple):
            return type(made)([self._on_mesh(one) for one in made])
        is_plain = isinstance(made, Tensor) and not isinstance(made, Wrapper)
        return self._placed(made, Replicate()) if is_plain else made


def _of_node(n: fx.Node) -> Any:
    """Return what torch.export noted of a node; PlacementError where sizes are unknown."""
    value = n.meta.get("val")
    if isinstance(value, Tensor) and not all(type(size) is int for size in value.shape):
        raise PlacementError(
            f"plan_of: {n.name} has the sizes {tuple(value.shape)}; export the model for sizes as "
            "they are used, without dynamic_shapes"
        )
    return value


def _is_sharded(made: Any) -> bool:
    """Whether all tensors that were made are sharded."""
    if isinstance(made, list | tuple):
        return all(map(_is_sharded, made))
    return isinstance(made, Wrapper) and made.spec.placements[0].is_shard()
