"""Where a storage of torch.distributed.checkpoint writes to or reads from."""

from __future__ import annotations

import os

from dtckpt.errors import CheckpointError, DtckptError

from ...storage.base import Store
from ...storage.open import open_store

Target = str | os.PathLike[str] | Store


class AtPlace:
    """A storage that is given its place when it is made, or by each call that it serves."""

    def __init__(self, target: Target | None) -> None:
        self.target = target

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save or load, at ``checkpoint_id`` where it is given."""
        if checkpoint_id is not None:
            self.target = checkpoint_id

    @property
    def place(self) -> Target:
        """The place; CheckpointError if nobody has said which."""
        if self.target is None:
            raise CheckpointError(
                f"say where the checkpoint is: checkpoint_id=, or {type(self).__name__}(path)"
            )
        return self.target

    @property
    def checkpoint_id(self) -> str | os.PathLike[str] | None:
        """The place, as torch tells of it."""
        return self.target.url if isinstance(self.target, Store) else self.target

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is a path or a URL that a store serves."""
        try:
            open_store(checkpoint_id).close()
        except (DtckptError, TypeError, ValueError):
            return False
        return True
