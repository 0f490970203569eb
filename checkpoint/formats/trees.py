"""Trees of states that other programs saved, from values and from paths of leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

from dtckpt.errors import CheckpointError, Corrupt, Unsavable

from ..state.limits import MAX_NESTING, check_metadata_bytes, shown, text_of
from ..state.names import index_component, is_encodable, join, key_component
from ..state.tree import ABSENT, DICT_TAGS, SEQUENCES, children, container_node, dict_tag, tag_of
from ..state.values import Node, encode_value
from .pickles.arrays import NotHeld
from .pickles.unpickling import Namespace, Stream, unheld_of

T = TypeVar("T")

_MOST_KEY_BITS = 63
_MOST_SHOWN = 80
_MOST_NODES = 1_000_000
"""Of one value: a pickle may name one list many times, and that one another."""


class IntKey(int):
    """An int in a path that is the key of a dict; other ints are positions in lists."""


StatePath = tuple[str | int, ...]
"""Keys and positions, from the root of a state."""


def component_of(part: str | int) -> str:
    """Return the component of a name for a part of a path."""
    if isinstance(part, int) and not isinstance(part, IntKey):
        return index_component(part)
    return key_component(part)


def name_of(path: StatePath) -> str:
    """Return the name of what lies under a path."""
    return join(tuple(map(component_of, path)))


def paths_of(flat_names: Iterable[str], told: object) -> dict[str, StatePath]:
    """Return the path of every name that torch.distributed.checkpoint has made of one.

    ``told`` is what it notes beside: paths by name, or None where names are keys. It writes int
    keys as text: those of an optimizer's state become ints. ValueError for what is no path.
    """
    noted = cast(dict[str, Any], told) if isinstance(told, dict) else {}
    paths: dict[str, StatePath] = {}
    for name in flat_names:
        path = tuple(noted.get(name, (name,)))
        if not all(type(part) in (str, int) for part in path):
            raise ValueError(f"{shown(path)} is no path")
        paths[text_of(name, "a name")] = path
    optimizers = {
        p[:i] for p in paths.values() for i, part in enumerate(p) if part == "param_groups"
    }
    return {name: _with_numbers(path, optimizers) for name, path in paths.items()}


def _with_numbers(path: StatePath, optimizers: set[StatePath]) -> StatePath:
    for i, part in enumerate(path[:-1]):
        number = path[i + 1]
        is_number = isinstance(number, str) and number.isascii() and number.isdecimal()
        if part == "state" and is_number and path[:i] in optimizers:
            return (*path[: i + 1], IntKey(number), *path[i + 2 :])
    return path


def tree_of_paths(leaves: Iterable[tuple[StatePath, Node]], where: str) -> Node:
    """Return the tree that has these leaves; Corrupt where one lies below another.

    A dict of nothing has no leaves: that of an optimizer without state stands beside its groups.
    """
    root: dict[str | int, Any] = {}
    for path, node in leaves:
        at = root
        for part in path[:-1]:
            at = at.setdefault(part, {})
            if not isinstance(at, dict):
                raise Corrupt(f"{where}: {name_of(path)!r} lies below a value")
        if not path or path[-1] in at or len(path) > MAX_NESTING:
            raise Corrupt(f"{where}: {shown(path)} is no path of one value")
        at[path[-1]] = _Leaf(node)
    return _node(root)


class _Leaf:
    def __init__(self, node: Node) -> None:
        self.node = node


def _node(inner: dict[str | int, Any] | _Leaf) -> Node:
    if isinstance(inner, _Leaf):
        return inner.node
    items = [(key, _node(child)) for key, child in inner.items()]
    if _are_groups(inner.get("param_groups")) and "state" not in inner:
        items.insert(0, ("state", {"dict": {}}))
    positions = [key for key in inner if type(key) is int]
    if positions and sorted(positions) == list(range(len(items))):
        return container_node("list", sorted(items))
    if all(type(key) is str for key, _ in items):
        return container_node("dict", items)
    return container_node("items", [(key if type(key) is str else int(key), n) for key, n in items])


def _are_groups(inner: dict[str | int, Any] | _Leaf | None) -> bool:
    """Whether this is the list of the groups of an optimizer."""
    first = inner.get(0) if isinstance(inner, dict) else None
    return isinstance(first, dict) and "params" in first


class Tensors(Protocol):
    """Where tensors are noted on the way."""

    def mark(self) -> Any:
        """Return what ``undo`` takes to forget all that is noted from now on."""
        ...

    def undo(self, mark: Any) -> None:
        """Forget what was noted since a mark."""
        ...


class ValueNodes(Generic[T]):
    """Makes nodes of values that were pickled; ``tensor`` is given those of ``kinds`` by name.

    It returns the node of one. ``allow_pickle`` pickles what the format does not hold. A small
    pickle does not become a large tree: it may name one object many times, a text of a megabyte
    or a list of lists.

    What no checkpoint holds is refused, or, where ``tensors`` are given, left out of the dict that
    has it, in it or in a list of its own; ``left_out`` tells what, by name.
    """

    def __init__(
        self,
        where: str,
        kinds: type[T] | tuple[type[T], ...],
        tensor: Callable[[str, T], Node],
        *,
        allow_pickle: bool = False,
        tensors: Tensors | None = None,
    ) -> None:
        self.left_out: dict[str, str] = {}
        """What of each is not held, by name."""
        self._tensors = tensors
        self.why: NotHeld | None = None
        """Of the first that was left out."""
        self._where = where
        self._kinds = kinds
        self._tensor = tensor
        self._allow_pickle = allow_pickle
        self._left = _MOST_NODES
        self._num_bytes = 0

    def node(self, value: Any, path: Sequence[str]) -> Node:
        """Return the node of a value; CheckpointError, with its name, for what has none.

        That is so, too, where all that it has would be left out.
        """
        try:
            node = self._node(value, path)
        except NotHeld as error:
            raise CheckpointError(f"{self._where}: {error}") from error
        if self.why is not None and _holds_nothing(node):
            raise CheckpointError(f"{self._where}: {self.why}") from self.why
        return node

    def node_if_held(self, value: Any, path: Sequence[str]) -> Node:
        """Return the node of a value; ABSENT where it is left out as a whole."""
        assert self._tensors is not None
        mark = self._tensors.mark()
        try:
            return self._node(value, path)
        except NotHeld as error:
            self._leave_out(path, error, mark)
            return ABSENT

    def _leave_out(self, path: Sequence[str], error: NotHeld, mark: Any) -> None:
        assert self._tensors is not None
        self._tensors.undo(mark)
        self.why = self.why or error
        self.left_out[join(tuple(path))] = error.kind
        self._count(len(error.kind))

    def _items(self, value: Any, path: Sequence[str]) -> Iterator[tuple[str | int, Node]]:
        """Yield the nodes of a dict, but for what is left out of it."""
        for key, item in value.items():
            below = (*path, key_component(key))
            if self._tensors is None:
                yield key, self._node(item, below)
            elif (node := self.node_if_held(item, below)) is not ABSENT:
                yield key, node

    def _node(self, value: Any, path: Sequence[str]) -> Node:
        self._left -= 1
        if self._left < 0 or len(path) > MAX_NESTING:
            name = join(tuple(path))[:_MOST_SHOWN]
            raise CheckpointError(f"{self._where}: {name!r} is a value of too many parts")
        if isinstance(value, Namespace):
            value = value.fields
        if isinstance(value, Stream):
            value = value.data
        if type(value) in SEQUENCES:
            items = [
                (i, self._node(item, (*path, index_component(i)))) for i, item in enumerate(value)
            ]
            return container_node(SEQUENCES[type(value)], items)
        tag = dict_tag(value)
        odd = [] if tag is None else [key for key in value if not _is_key(key)]
        if tag is not None and not (odd and self._allow_pickle):
            if odd:
                name = join(tuple(path))[:_MOST_SHOWN]
                raise NotHeld(
                    f"{name!r} is a dict with the key {shown(odd[0])}; checkpoints hold those of "
                    "texts and of ints below 2**63",
                    f"a dict with the key {shown(odd[0])}",
                )
            nodes = list(self._items(value, path))
            self._count(sum(len(key) for key in value if type(key) is str))
            is_plain = tag == "items" and all(type(key) is str for key in value)
            return container_node("dict" if is_plain else tag, nodes)
        return self._leaf(value, path)

    def _leaf(self, value: Any, path: Sequence[str]) -> Node:
        if (why := unheld_of(value)) is not None:
            raise why
        self._count(sum(map(len, path)))  # of its name, which is made later
        if type(value) is int and value.bit_length() <= _MOST_KEY_BITS:
            return value  # as most of the leaves that are no tensors
        name = join(tuple(path))
        try:
            if isinstance(value, self._kinds):
                return self._tensor(name, value)
            if isinstance(value, str | bytes | bytearray):
                self._count(2 * len(value))
            plain = bytes(value) if isinstance(value, bytearray) else value
            return encode_value(plain, name[:_MOST_SHOWN], allow_pickle=self._allow_pickle)
        except Unsavable as error:
            raise NotHeld(str(error), f"a value of type {type(value).__qualname__}") from error

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        check_metadata_bytes(self._num_bytes, f"the values of {self._where}")


def _holds_nothing(node: Node) -> bool:
    """Whether there are only empty containers in a tree."""
    if tag_of(node) not in (*DICT_TAGS, *SEQUENCES.values()):
        return False
    return all(_holds_nothing(child) for _, _, child in children(node))


def _is_key(key: object) -> bool:
    """Whether something is a key of the dicts that checkpoints hold."""
    if type(key) is str:
        return is_encodable(key)
    return type(key) is int and key.bit_length() <= _MOST_KEY_BITS
