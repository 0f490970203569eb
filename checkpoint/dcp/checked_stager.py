"""Stagers of torch that refuse tensors without memory of their own.

Torch's stagers copy the storage of a tensor. The storage of a tensor subclass that consists of
other tensors is undefined, and the copy may be a plain tensor whose values are noise. So such
tensors are looked for before the copy.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions

from dtckpt.errors import Unsavable

from ..ranks.together import ranks_of, together
from ..tensors.subclasses import has_subclass_shard, is_subclass
from ..tensors.visiting import tensors_in


def refuse_subclasses(state_dict: Any) -> None:
    """Raise Unsavable, with its name, for a tensor that torch's stagers would not copy."""
    for name, tensor in tensors_in(state_dict, "", 0):
        if is_subclass(tensor) or has_subclass_shard(tensor):
            local = getattr(tensor, "_local_tensor", tensor)
            raise Unsavable(
                f"tensor {name!r} is (or has as its shard) a {type(local).__module__}."
                f"{type(local).__qualname__}, which computes its elements from other tensors, and "
                "torch's stagers copy memory that it does not have. Leave out planner= and "
                "async_stager= of dtckpt's async_save, which then stages it itself, or call "
                "dtckpt.checkpoint.async_save"
            )


class CheckedStager(AsyncStager):
    """Refuses such tensors on all ranks if one has them, and calls another stager for the rest.

    Alone, a rank that raises would leave the others waiting for it in torch's planning.
    """

    def __init__(self, stager: AsyncStager, process_group: Any = None, *, no_dist: bool) -> None:
        self._stager = stager
        self._process_group = process_group
        self._no_dist = no_dist

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether the copy is done when ``stage`` returns, by the other stager."""
        return self._stager.should_synchronize_after_execute

    def stage(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the copy of a state dict that the other stager makes. Collective.

        Raises Unsavable where the state dict of some rank has such a tensor.
        """
        phase = "async_save: stage"

        def check() -> bytes:
            refuse_subclasses(state_dict)
            return b""

        with closing(ranks_of(self._process_group, no_dist=self._no_dist, purpose=phase)) as ranks:
            together(ranks, phase, check)
        return self._stager.stage(state_dict, *args, **kwargs)

    def synchronize_staging(self) -> None:
        """Wait until the other stager has copied all."""
        stager: Any = self._stager  # torch deprecates it, and calls it
        stager.synchronize_staging()

    def close(self) -> None:
        """Close the other stager."""
        self._stager.close()


def default_stager() -> AsyncStager:
    """Return the stager that torch takes where it is given none."""
    return DefaultStager(StagingOptions(False, False, False, False))


def staged(state_dict: Any) -> Any:
    """Return a copy of a state dict on the CPU, as torch makes it by default."""
    refuse_subclasses(state_dict)
    stager = default_stager()
    try:
        return stager.stage(state_dict)
    finally:
        stager.close()
