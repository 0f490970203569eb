"""What was true of a tensor when a save began, so that nothing else is saved for it later.

torch counts writes, by any operator, also within ``no_grad`` and by lists (``_foreach``). It does
not count those through ``.data``, NumPy or DLPack, by collectives, by kernels of somebody's own, or
by lists of its DTensors. So some elements are kept, too, or a sum of all of them, and compared with
the copy.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

import torch

from dtckpt.errors import StateChanged

from ...dtensor.torch_private import num_writes
from .area import Copy
from .quiet import Quiet

_KEPT_PER_DIM = {1: 512, 2: 24, 3: 8}
_KEPT_OF_MANY = 4
"""How many elements are kept along a dim of a tensor of so many dims, or more."""

REMEDY = (
    "Nothing was saved. Change tensors after an optimizer's step has begun, or after "
    "handle.finish_staging(), or save without spread. The next save copies what had changed within "
    "the call"
)


@dataclass(frozen=True, slots=True)
class Witness:
    """One copy that is still to be made, and what its source was when it was to be."""

    copy: Copy
    holders: Sequence[tuple[torch.Tensor, int]]
    """All that is known to lie in the memory, with the number of writes through each."""
    address: int
    storage_bytes: int
    kept: torch.Tensor
    """Some elements, or the sum of all bytes."""
    is_sum: bool

    @classmethod
    def of(cls, copy: Copy, holders: Sequence[torch.Tensor], *, thorough: bool) -> Witness | None:
        """Return what is known of the source of a copy; None where that is not enough.

        ``thorough`` has all its bytes added up, which takes about half as long as the copy.
        """
        source = copy.source
        kept = _sum(source) if thorough else source[_lattice(source)].clone()
        if kept is None:
            return None
        counts = [(holder, num_writes(holder)) for holder in holders]
        storage = source.untyped_storage()
        return cls(copy, counts, source.data_ptr(), storage.nbytes(), kept, thorough)

    def require_unmoved(self) -> None:
        """Raise StateChanged if the memory is not there any more, in which case it is not read."""
        source = self.copy.source
        found = (source.data_ptr(), source.untyped_storage().nbytes())
        if found != (self.address, self.storage_bytes):
            raise StateChanged(
                f"tensor {self.copy.name!r}: its memory ({self.storage_bytes} bytes) was given "
                f"away or resized (to {found[1]} bytes) while a save with spread=True was to "
                f"copy it, before the step of any optimizer. {REMEDY}"
            )

    def require_unwritten(self) -> None:
        """Raise StateChanged if an operator has written to the memory."""
        for holder, count in self.holders:
            writes = num_writes(holder) - count
            if writes:
                how = f"written to ({writes} times)" if writes > 0 else "swapped for another one"
                raise StateChanged(
                    f"tensor {self.copy.name!r} was {how} after the call of a save with "
                    "spread=True and before it was copied, outside of the steps of optimizers. "
                    f"{REMEDY}"
                )

    def require_same(self) -> None:
        """Raise StateChanged if the copy is known not to be of what was there at the call."""
        target = self.copy.target
        found = _sum(target) if self.is_sum else target[_lattice(target)]
        if found is None or not torch.equal(_as_bytes(found), _as_bytes(self.kept.cpu())):
            raise StateChanged(
                f"tensor {self.copy.name!r} was changed after the call of a save with spread=True "
                "and before it was copied, by a write that torch does not count (through .data, "
                f"NumPy or DLPack, by a collective or a kernel of its own). {REMEDY}"
            )


def witnesses(
    copies: Iterable[Copy], quiet: Quiet, restless: Container[str], *, thorough: bool
) -> dict[Copy, Witness]:
    """Return those of the copies that may wait for some time, and what is known of them.

    ``restless`` are names of tensors that have been found to change. Of a GPU's memory all bytes
    are added up in any case, as it takes no time there.
    """
    found: dict[Copy, Witness] = {}
    copies = list(copies)
    for copy in copies:
        quiet.watch(copy.source)
    for copy in copies:
        holders = quiet.holders_of(copy.source)
        if holders is not None and copy.name not in restless:
            witness = Witness.of(copy, holders, thorough=thorough or copy.source.is_cuda)
            if witness is not None:
                found[copy] = witness
    return found


def _lattice(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Return the indices of elements that lie all over a tensor."""
    most = _KEPT_PER_DIM.get(tensor.ndim, _KEPT_OF_MANY)
    return tuple(slice(None, None, -(-size // most) or 1) for size in tensor.shape)


def _sum(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the sum of all bytes, 8 at a time; None where they do not lie in a row."""
    if not tensor.is_contiguous():
        return None
    flat = tensor.reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8:  # integers have to lie at multiples of their size
        flat = flat.clone()
    end = flat.numel() // 8 * 8
    return flat[:end].view(torch.int64).sum() + flat[end:].sum()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
