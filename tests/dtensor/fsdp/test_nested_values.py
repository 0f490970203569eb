"""Tensors within dataclasses and other containers, as inputs and outputs of sharded modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils import _pytree as pytree

from dtckpt.dtensor import DeviceMesh, DTensor
from dtckpt.dtensor.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from dtckpt.dtensor.tensor.trees import map_tensors
from tests.dtensor.rank_meshes import run_on_mesh


@dataclasses.dataclass
class Record:
    x: Any
    name: str = "kept"
    made: Any = dataclasses.field(init=False, default=None)
    listed: list[Any] = dataclasses.field(default_factory=list[Any])


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slotted:
    x: Any
    number: int = 3


class Child(Record):
    """A subclass with attributes that are no fields."""


class Named(NamedTuple):
    x: Any


class Mapping(dict[str, Any]):
    pass


class Listed(list[Any]):
    pass


class Registered:
    def __init__(self, x: Any) -> None:
        self.x = x


pytree.register_pytree_node(
    Registered, lambda value: ([value.x], None), lambda parts, _: Registered(*parts)
)

KINDS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "dataclass": (Record, lambda v: v.x),
    "frozen": (Frozen, lambda v: v.x),
    "slots": (lambda x: Slotted(x=x), lambda v: v.x),
    "dataclass in a dict in a list": (lambda x: [{"a": Record(x)}], lambda v: v[0]["a"].x),
    "dataclass in a named tuple": (lambda x: Named(Record(x)), lambda v: v.x.x),
    "dataclass in a registered class": (lambda x: Registered(Record(x)), lambda v: v.x.x),
    "registered class in a dataclass": (lambda x: Record(Registered(x)), lambda v: v.x.x),
    "list in a dataclass": (lambda x: Record(None, listed=[x]), lambda v: v.listed[0]),
    "subclass of dict": (lambda x: Mapping(x=x), lambda v: v["x"]),
    "subclass of list": (lambda x: Listed([x]), lambda v: v[0]),
    "set": (lambda x: {x}, lambda v: next(iter(v))),
}


class Reading(nn.Module):
    """Takes a value apart, and gives one of the same kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.make, self.read = KINDS[kind]
        self.linear = nn.Linear(4, 4)
        self.seen: Any = None

    def forward(self, value: Any) -> Any:
        self.seen = value
        return self.make(self.linear(self.read(value)))


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_and_outputs_within_containers_are_cast(kind: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    make, read = KINDS[kind]

    def body(mesh: DeviceMesh) -> None:
        model: Any = fully_shard(Reading(kind), mesh=mesh, mp_policy=policy)
        value = make(torch.ones(2, 4))
        for _ in range(2):
            result = model(value)
            assert read(model.seen).dtype == torch.bfloat16
            assert read(value).dtype == torch.float32  # the caller's own is as it was
            assert type(model.seen) is type(result) is type(value)
            assert read(result).dtype == torch.float32
            read(result).sum().backward()
            grad = model.linear.bias.grad
            assert isinstance(grad, DTensor)
            assert grad.full_tensor().tolist() == [2.0] * 4  # the mean over ranks of two rows
            assert not any(s.is_in_backward or s.unit.is_whole for s in _states(model))
            model.zero_grad()

    run_on_mesh((2,), body)


def _states(model: FSDPModule) -> list[Any]:
    return model._states(recurse=True)  # pyright: ignore[reportPrivateUsage]


def test_a_backward_pass_begins_at_tensors_within_dataclasses() -> None:
    """A unit is gathered as the gradient of its output comes, not when a saved tensor is read."""

    def body(mesh: DeviceMesh) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Linear(4, 4)

            def forward(self, value: Record) -> Record:
                return Record(self.inner(value.x))

        model: Any = fully_shard(Model(), mesh=mesh, reshard_after_forward=True)
        result = model(Record(torch.ones(2, 4)))
        seen: list[bool] = []

        def look(grad: Tensor) -> None:
            seen.append(_states(model)[0].is_in_backward)

        result.x.register_hook(look)
        result.x.sum().backward()
        assert seen == [True]

    run_on_mesh((2,), body)


def test_packed_sequences_are_cast() -> None:
    def body(mesh: DeviceMesh) -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.float64)

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(4, 4)

            def forward(self, packed: PackedSequence) -> Tensor:
                assert type(packed) is PackedSequence
                return self.linear(packed.data)

        model: Any = fully_shard(Model(), mesh=mesh, mp_policy=policy)
        assert model(pack_sequence([torch.ones(2, 4)])).dtype == torch.float64

    run_on_mesh((1,), body)


def doubled(tensor: Tensor) -> Tensor:
    return tensor * 2 if tensor.is_floating_point() else tensor


def test_mapped_records_keep_their_class_and_other_fields() -> None:
    record = Child(torch.ones(2), listed=[1])
    record.made = torch.ones(1)
    vars(record)["extra"] = 7
    mapped: Any = map_tensors(doubled, record)
    assert type(mapped) is Child
    assert mapped.x.tolist() == [2.0, 2.0]
    assert mapped.made.tolist() == [2.0]
    assert (mapped.name, mapped.listed, vars(mapped)["extra"]) == ("kept", [1], 7)
    assert mapped.listed is record.listed
    assert record.x.tolist() == [1.0, 1.0]


def test_what_holds_no_changed_tensor_is_the_same_object() -> None:
    record = Record(torch.tensor([1, 2]), listed=[{"a": {3}}])
    value = ({"a": [record]}, SimpleNamespace(x=1.0))
    assert map_tensors(doubled, value) is value


def test_an_object_met_twice_is_copied_once_and_cycles_end() -> None:
    record = Record(torch.ones(1))
    first, second = map_tensors(doubled, (record, record))
    assert first is second
    record.made = record
    mapped = map_tensors(doubled, record)
    assert mapped.x.tolist() == [2.0]
    assert mapped.made is record
