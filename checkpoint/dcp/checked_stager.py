"""Stagers of torch that are not given tensors without memory of their own.

Torch's stagers copy what a tensor's storage holds. That of a tensor subclass which is made of
others is undefined, and where the class makes a plain tensor of ``new_empty`` the copy is one, too:
nobody could tell later that its elements mean nothing. So they are looked for before the copy.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions

from dtckpt.errors import Unsavable

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
    """A stager that refuses such tensors, and leaves the rest to another one."""

    def __init__(self, stager: AsyncStager) -> None:
        self._stager = stager

    @property
    def should_synchronize_after_execute(self) -> bool:
        """As the other one says."""
        return self._stager.should_synchronize_after_execute

    def stage(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what the other one makes of a state dict."""
        refuse_subclasses(state_dict)
        return self._stager.stage(state_dict, *args, **kwargs)

    def synchronize_staging(self) -> None:
        """Wait as the other one does."""
        stager: Any = self._stager  # torch deprecates it, and calls it
        stager.synchronize_staging()

    def close(self) -> None:
        """Let the other one release what it holds."""
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
