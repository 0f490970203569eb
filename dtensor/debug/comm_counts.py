"""Numbers by kind of collective, which may also be asked for by torch's operators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from ..torch_private import name_of_operator

_NAMES = {
    "all_gather": (
        "all_gather_into_tensor all_gather_into_tensor_out all_gather_into_tensor_coalesced"
        " allgather_ _allgather_base_ allgather_coalesced_ allgather_into_tensor_coalesced_"
    ),
    "all_reduce": (
        "all_reduce_ all_reduce_coalesced all_reduce_coalesced_ allreduce_ allreduce_coalesced_"
    ),
    "all_to_all": "all_to_all_single alltoall_ alltoall_base_ shard_dim_alltoall",
    "reduce_scatter": (
        "reduce_scatter_tensor reduce_scatter_tensor_out reduce_scatter_tensor_coalesced"
        " reduce_scatter_ _reduce_scatter_base_ reduce_scatter_tensor_coalesced_"
    ),
    "broadcast": "broadcast_",
    "reduce": "reduce_",
    "scatter": "scatter_",
    "gather": "gather_",
    "send": "",
    "receive": "recv_ recv_any_source_",
    "barrier": "monitored_barrier_",
    "agreement": "",
}
"""Of every kind, what torch calls its operators besides."""
AGREEMENT = "agreement"
KINDS = tuple(_NAMES)
"""Every kind of collective there is."""
_KIND_OF_NAME = {name: kind for kind, names in _NAMES.items() for name in (kind, *names.split())}
_NAMESPACES = frozenset(
    {"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"}
)


def kind_of(key: Any) -> str | None:
    """Return the kind of collective that an operator of torch, or a text, means.

    >>> kind_of("all_gather"), kind_of("c10d_functional.all_gather_into_tensor"), kind_of("aten.mm")
    ('all_gather', 'all_gather', None)
    """
    if isinstance(key, str):
        if key in _NAMES:
            return key
        name = key
    else:  # an operator, or one overload of it
        name = name_of_operator(key)
        if name is None:
            return None
    namespace, _, rest = name.replace("::", ".", 1).partition(".")
    return _KIND_OF_NAME.get(rest.partition(".")[0]) if namespace in _NAMESPACES else None


class CommCounts(dict[str, int]):
    """A number for every kind of collective that there was.

    An operator of torch, as ``torch.ops.c10d_functional.all_gather_into_tensor``, is a key, too: it
    stands for its kind, also where counts are compared with a dict of such keys. A kind that there
    was none of has the number 0, and is not listed; neither are agreements.

    >>> counts = CommCounts(all_reduce=3)
    >>> counts["all_reduce"], counts["c10d_functional.all_reduce"], counts["broadcast"]
    (3, 3, 0)
    >>> counts == {"c10d_functional.all_reduce": 3}
    True
    """

    agreements: int = 0
    """The number of agreements."""

    def add(self, kind: str, number: int) -> None:
        """Add to the number of a kind."""
        if kind == AGREEMENT:
            self.agreements += number
        else:
            super().__setitem__(kind, super().get(kind, 0) + number)

    def __getitem__(self, key: Any) -> int:
        kind = kind_of(key)
        if kind is None:
            raise KeyError(
                f"{key!r} is no kind of collective and no operator of torch that is one; there are "
                f"{', '.join(KINDS)}"
            )
        return self.agreements if kind == AGREEMENT else super().get(kind, 0)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(kind_of(key))

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the number of a kind, ``default`` where there was none."""
        kind = kind_of(key)
        return default if kind is None else super().get(kind, default)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        given = cast("Mapping[Any, Any]", other)
        return dict(self) == {kind_of(key) or key: number for key, number in given.items()}

    def __ne__(self, other: object) -> bool:
        return not self == other  # a dict would compare itself
