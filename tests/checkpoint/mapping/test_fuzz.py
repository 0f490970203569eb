"""Chains of random rules against numpy, and back by their inverse."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint.copies.boxes import source_boxes
from dtckpt.checkpoint.copies.copies import Copy, Loop, joined, simplified
from dtckpt.checkpoint.copies.mapped import Mapped
from dtckpt.checkpoint.copies.meeting import without
from dtckpt.checkpoint.mapping.changes import MappingRule
from dtckpt.checkpoint.mapping.copies_rule import Copies, Made
from dtckpt.checkpoint.mapping.table import MappingTable
from dtckpt.checkpoint.tensors.dtypes import DTYPES
from dtckpt.dtensor import Box
from dtckpt.storage import MemoryStore

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


class Chain:
    """Rules that are drawn one after the other, and what numpy makes of the same."""

    def __init__(self, data: st.DataObject, arrays: Arrays) -> None:
        self.data = data
        self.arrays = dict(arrays)
        self.rules: list[MappingRule] = []

    def draw(self, strategy: st.SearchStrategy[Any]) -> Any:
        return self.data.draw(strategy)

    def add(self) -> None:
        name = self.draw(st.sampled_from(sorted(self.arrays)))
        array = self.arrays[name]
        kinds = [self.move, self.reshape, self.stack, self.pad]
        if array.ndim:
            kinds += [self.permute, self.split, self.unstack, self.regroup]
        made, rule = self.draw(st.sampled_from(kinds))(f"{name}_", name, array)
        self.rules.append(rule)
        del self.arrays[name]
        self.arrays |= made

    def dim(self, array: Array) -> int:
        return self.draw(st.integers(0, array.ndim - 1))

    def move(self, new: str, name: str, array: Array) -> tuple[Arrays, MappingRule]:
        return {new: array}, ckpt.Move(name, new)

    def permute(self, new: str, name: str, array: Array) -> tuple[Arrays, MappingRule]:
        dims = tuple(self.draw(st.permutations(range(array.ndim))))
        return {new: array.transpose(dims)}, ckpt.Permute(name, new, dims)

    def regroup(self, new: str, name: str, array: Array) -> tuple[Arrays, MappingRule]:
        dim = self.dim(array)
        inner = self.draw(st.sampled_from(divisors(array.shape[dim])))
        view = (*array.shape[:dim], array.shape[dim] // inner, inner, *array.shape[dim + 1 :])
        dims = tuple(self.draw(st.permutations(range(len(view)))))
        made = array.reshape(view).transpose(dims).reshape(array.shape)
        return {new: made}, ckpt.Permute(name, new, dims, view)

    def reshape(self, new: str, name: str, array: Array) -> tuple[Arrays, MappingRule]:
        first = self.draw(st.sampled_from(divisors(array.size)))
        shape = (first, array.size // first)
        rule = ckpt.Reshape(name, new, (first, -1), array.shape)
        return {new: array.reshape(shape)}, rule

    def split(self, new: str, name: str, array: Array) -> tuple[Arrays, MappingRule]:
        dim = self.dim(array)
        size = array.shape[dim]
        groups = self.draw(st.sampled_from([d for d in divisors(size) if size // d > 1] or [1]))
        if size // groups < 2:
            return self.move(new, name, array)
        first = self.draw(st.integers(1, size // groups - 1))
        sizes = (first, size // groups - first)
        grouped = np.moveaxis(array, dim, 0).reshape(groups, sum(sizes), -1)
        rest = array.shape[:dim] + array.shape[dim + 1 :]
        made = {
            f"{new}{i}": np.moveaxis(part.reshape(-1, *rest), 0, dim)
            for i, part in enumerate(np.split(grouped, [first], axis=1))
        }
        return made, ckpt.Split(name, (f"{new}0", f"{new}1"), dim, sizes, groups)

    def unstack(self, new: str, name: str, array: Array) -> tuple[Arrays, MappingRule]:
        dim = self.dim(array)
        made = {f"{new}.{i}": part for i, part in enumerate(np.moveaxis(array, dim, 0))}
        return made, ckpt.Unstack(name, f"{new}.{{i}}", dim)

    def stack(self, new: str, name: str, array: Array) -> tuple[Arrays, MappingRule]:
        beside = [n for n, a in self.arrays.items() if n != name and a.shape == array.shape]
        if not beside or not array.ndim:
            return self.move(new, name, array)
        other = beside[0]
        second = self.arrays.pop(other)
        dim = self.dim(array)
        return {new: np.concatenate([array, second], dim)}, ckpt.Merge((name, other), new, dim)

    def pad(self, new: str, name: str, array: Array) -> tuple[Arrays, MappingRule]:
        if not array.ndim:
            return self.move(new, name, array)
        dim = self.dim(array)
        more = self.draw(st.integers(0, 3))
        widths = [(0, more if d == dim else 0) for d in range(array.ndim)]
        size = array.shape[dim]
        return {new: np.pad(array, widths)}, ckpt.Pad(name, new, size + more, size, dim)


def slices(data: st.DataObject, shape: tuple[int, ...]) -> tuple[slice, ...]:
    starts = [data.draw(st.integers(0, size)) for size in shape]
    return tuple(
        slice(start, data.draw(st.integers(start, size)))
        for start, size in zip(starts, shape, strict=True)
    )


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_chains_of_rules_and_their_inverse(data: st.DataObject) -> None:
    some = st.sampled_from([(12, 4), (8, 3), (2, 6, 2)])
    shapes = data.draw(st.lists(some, min_size=1, max_size=3))
    arrays = {
        f"t{i}": np.arange(1, 1 + np.prod(shape), dtype=np.int32).reshape(shape) + 1000 * i
        for i, shape in enumerate(shapes)
    }
    store = MemoryStore()
    ckpt.save(arrays, store, no_dist=True)
    chain = Chain(data, arrays)
    for _ in range(data.draw(st.integers(1, 5))):
        chain.add()
    table = MappingTable(chain.rules)
    assert MappingTable.from_bytes(table.to_bytes(), "here") == table
    opened = ckpt.open(store, mapping=table)
    assert set(opened) == set(chain.arrays)
    for name, value in chain.arrays.items():
        index = slices(data, value.shape)
        assert np.array_equal(opened[name][...].numpy(), value), name
        assert np.array_equal(opened[name][index].numpy(), value[index]), name
    made = MemoryStore()
    ckpt.save({n: np.array(a) for n, a in chain.arrays.items()}, made, no_dist=True)
    back = ckpt.open(made, mapping=table.inverse())
    assert {name: back[name][...].tolist() for name in back} == {
        name: value.tolist() for name, value in arrays.items()
    }


loops = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 7), st.integers(0, 9)), max_size=3)


def copy_of(given: list[tuple[int, int, int]], start: int) -> Copy | None:
    """A copy of any loops, if it writes no element twice."""
    copy = simplified(Copy(source="w", start=start, loops=tuple(Loop(*loop) for loop in given)))
    elements = pairs(copy)[0]
    return copy if len(set(elements)) == len(elements) else None


def pairs(copy: Copy) -> tuple[list[int], list[int]]:
    """Elements of the target and of the source, one by one."""
    targets, sources = [copy.start], [copy.source_start]
    for size, to, of in copy.loops:
        targets = [t + i * to for t in targets for i in range(size)]
        sources = [s + i * of for s in sources for i in range(size)]
    return targets, sources


def table_of(copies: list[Copy]) -> dict[int, int]:
    found: dict[int, int] = {}
    for copy in copies:
        for target, source in zip(*pairs(copy), strict=True):
            assert target not in found
            found[target] = source
    return found


@settings(max_examples=120, deadline=None)
@given(loops, st.integers(0, 9), loops, st.integers(0, 9))
def test_what_is_left_of_a_copy(
    given_loops: list[tuple[int, int, int]], start: int, others: list[tuple[int, int, int]], at: int
) -> None:
    copy, taken = copy_of(given_loops, start), copy_of(others, at)
    if copy is None or taken is None:
        return
    left = without(copy, taken)
    gone = set(pairs(taken)[0])
    expected = {t: s for t, s in table_of([copy]).items() if t not in gone}
    assert table_of(left) == expected
    assert table_of(list(joined(left))) == expected


@settings(max_examples=120, deadline=None)
@given(loops, st.sampled_from([(64,), (8, 8), (4, 2, 8), (3, 22)]), st.integers(0, 20))
def test_boxes_of_what_a_copy_takes(
    given_loops: list[tuple[int, int, int]], shape: tuple[int, ...], skipped: int
) -> None:
    copy = copy_of([(n, of + 1, to) for n, to, of in given_loops], 3)
    if copy is None or copy.source_end > np.prod(shape):
        return
    numbers = np.arange(np.prod(shape)).reshape(shape)
    found: dict[int, int] = {}
    for box, part in source_boxes(copy, shape, skipped):
        assert Box.whole(shape).contains(box)
        elements = numbers[box.slices].reshape(-1)
        for target, source in table_of([part]).items():
            found[target] = int(elements[source])
        if not skipped:
            assert len(set(pairs(part)[1])) == box.numel
    assert found == table_of([copy])


def test_traced_and_written_tables_are_the_same_elements() -> None:
    rule = ckpt.Split("w", ("a", "b"), groups=3)
    mapped = Mapped(dtype=DTYPES["F32"], shape=(12, 4), copies=(Copy.whole("w", (12, 4)),))
    (change,) = rule.changes({"w": mapped})
    ground = Copies(
        {"w": (12, 4)}, {name: Made(made.shape, made.copies) for name, made in change.made.items()}
    )
    assert [len(made.copies) for made in change.made.values()] == [1, 1]
    (again,) = ground.changes({"w": mapped})
    assert again.made == change.made
