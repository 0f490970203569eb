"""Every error the library raises, in one tree, grouped by what a caller would do about it.

::

    DtckptError
      PlacementError(ValueError, RuntimeError, AssertionError)
                                          a placement, mesh or layout that cannot be: fix the call
        MeshDimError(KeyError, IndexError)  a mesh has no dim of that name or index
      UnsupportedOp(NotImplementedError)  no sharding rule for an operator
      CollectiveMismatch                  ranks issue different collectives: fix the program
      CheckpointError                     anything about saving and loading
        NotCommitted(FileNotFoundError)   no complete checkpoint there: choose another path
        AlreadyCommitted(FileExistsError) one is there already: pass overwrite=True or another path
        Corrupt                           stored bytes are not those written: use another checkpoint
        LayoutMismatch(ValueError)        names, shapes or dtypes differ from what was asked for
        Unsavable(TypeError)              a value that the format cannot hold
        StateChanged                      tensors changed before they were copied: save again
        RankFailed                        another rank failed or fell silent
        Timeout(TimeoutError)             a deadline passed
        Cancelled                         a save was called off
        Busy                              another save is still under way
        InUse                             other checkpoints need this one
        StorageError(OSError)             the storage failed
          ObjectNotFound(FileNotFoundError)
          ObjectExists(FileExistsError)
          AccessDenied(PermissionError)     renew the credentials, or have them allow it
          StorageTimeout(TimeoutError)      the storage was busy or silent for too long: try later

Each also derives from the builtins that a caller would expect, so ``except OSError`` works. Where
torch's DTensors raise RuntimeError, ValueError, AssertionError or KeyError, code that catches these
catches ours.
Messages say what happened, where (tensor, file, byte range, rank), what was expected, what was
found, and what to do. The module imports nothing: it is the ground that all packages stand on.
"""

from __future__ import annotations

__all__ = [
    "AccessDenied",
    "AlreadyCommitted",
    "Busy",
    "Cancelled",
    "CheckpointError",
    "CollectiveMismatch",
    "Corrupt",
    "DtckptError",
    "InUse",
    "LayoutMismatch",
    "MeshDimError",
    "NotCommitted",
    "ObjectExists",
    "ObjectNotFound",
    "PlacementError",
    "RankFailed",
    "StateChanged",
    "StorageError",
    "StorageTimeout",
    "Timeout",
    "Unsavable",
    "UnsupportedOp",
]


class DtckptError(Exception):
    """Base class of every error that dtckpt raises on purpose."""


class PlacementError(DtckptError, ValueError, RuntimeError, AssertionError):
    """A box, placement, mesh or layout is impossible or does not fit its tensor."""


class MeshDimError(PlacementError, KeyError, IndexError):
    """A mesh has no dim of that name or index."""

    __str__ = Exception.__str__  # that of KeyError would quote the message


class UnsupportedOp(DtckptError, NotImplementedError):
    """What is not supported here: an operator without a rule that may not fall back, say."""


class CollectiveMismatch(DtckptError):
    """Ranks are about to issue different collectives, or one does not come to them."""

    ranks: tuple[int, ...] = ()
    """Global numbers of the ranks that diverge, or do not come."""


class CheckpointError(DtckptError):
    """A checkpoint could not be saved, read or understood."""

    is_certain: bool = False
    """After a failed save, or ``publish`` of a store: whether it is known that nothing came of it,
    nor will, as after a refusal. Else the last request may have been carried out, or still be."""
    phase: str = ""
    """The phase of the call in which some rank failed, as messages name it; "" outside of one."""
    overwritten: tuple[str, ...] = ()
    """After a failed load: names of tensors of which some elements had been loaded, on any rank."""


class NotCommitted(CheckpointError, FileNotFoundError):
    """There is no committed checkpoint at this place."""


class AlreadyCommitted(CheckpointError, FileExistsError):
    """A committed checkpoint is already at this place and may not be replaced."""


class Corrupt(CheckpointError):
    """Stored bytes are not the bytes that were written."""


class LayoutMismatch(CheckpointError, ValueError):
    """Names, shapes, dtypes or boxes do not fit what was asked for."""


class Unsavable(CheckpointError, TypeError):
    """A value has a type that the format does not hold."""


class StateChanged(CheckpointError):
    """A tensor changed after the call of a save and before it was copied: nothing was saved."""


class RankFailed(CheckpointError):
    """A rank raised, died or fell silent; every other rank raises this in its place."""

    lost: tuple[int, ...] = ()
    """Global numbers of the ranks that died or fell silent, where nothing else was wrong."""


class Timeout(CheckpointError, TimeoutError):
    """A deadline passed."""


class Cancelled(CheckpointError):
    """A save was cancelled by its caller before it was committed."""


class Busy(CheckpointError):
    """A save in the background has not ended yet, and another one may not begin before."""


class InUse(CheckpointError):
    """A checkpoint cannot be deleted or replaced: others refer to its files."""


class StorageError(CheckpointError, OSError):
    """The storage refused or failed an operation."""


class ObjectNotFound(StorageError, FileNotFoundError):
    """The named object does not exist."""


class ObjectExists(StorageError, FileExistsError):
    """The named object exists already and objects are never overwritten."""


class AccessDenied(StorageError, PermissionError):
    """The storage does not let this process do that, or does not know its credentials any more."""


class StorageTimeout(StorageError, TimeoutError):
    """The storage did not do it before the deadline, however often it was asked."""
