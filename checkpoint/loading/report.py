"""What a load tells its caller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..ranks.text import some_names
from ..timing.costs import Costs


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LoadReport:
    """What a load did, as one rank saw it. All names are those of leaves in the checkpoint.

    ``print`` shows it in a few lines, however many names there are.
    """

    url: str
    loaded: tuple[str, ...]
    """Tensors and values of this rank's state that were filled."""
    missing: tuple[str, ...]
    """Leaves of this rank's state that the checkpoint does not have; left as they were."""
    tied: Mapping[str, str]
    """Tensors of this rank's state that the checkpoint does not have, and that were filled with the
    one that is named, whose memory they are."""
    unexpected: tuple[str, ...]
    """Leaves of the checkpoint that were selected and that no rank asked for."""
    dropped: tuple[str, ...]
    """Values of ranks (PerRank) and coordinates (PerCoordinate) that are not there any more."""
    kept: tuple[str, ...]
    """Values (PerRank, PerCoordinate) that this rank kept: it, or its coordinate, was not there at
    the save."""
    dealt: tuple[str, ...]
    """Values (PerCoordinate) of this rank that a rule made, since the mesh has other sizes than at
    the save: nothing was saved for this coordinate, or it was not taken as it was saved."""
    cleared: tuple[str, ...]
    """State of parameters of optimizers that this rank had and the checkpoint has not, by names in
    the state: it is gone, as after torch's ``load_state_dict``."""
    by_position: tuple[str, ...]
    """State of optimizers that was given to the parameter of the same number, because nothing tells
    a name: not at the save, or not now. Only shapes vouch for it."""
    without_values: tuple[str, ...]
    """Tensors of modules in this rank's state that are on the meta device after the load, by names
    in the state: what was not loaded, and what no state dict has, such as buffers that are not
    persistent, of which a warning tells, too."""
    untied: Mapping[str, str]
    """Parameters and buffers of a module that were one tensor at the save with the one that is
    named, and are not now: they have the same values, and training changes them apart."""
    resharded: tuple[str, ...]
    """Loaded tensors of which this rank holds another part than at the save."""
    cast: Mapping[str, tuple[str, str]]
    """Saved dtype and loaded dtype of the tensors for which they differ, by their torch names."""
    bytes_needed: int
    """Bytes of this rank's destinations."""
    bytes_read: int
    """Bytes of data that this rank read to fill them, and those that it sent to others."""
    bytes_received: int
    """Bytes of its destinations that other ranks read and sent."""
    read_once: bool
    """Whether ranks read once what several of them would read, and sent it to each other."""
    read_once_reason: str
    """Why they did, or why each rank read for itself."""
    costs: Costs = field(compare=False)
    """Seconds and bytes of each phase, on this rank and over all."""

    passed_over: Mapping[str, str] = field(default_factory=dict[str, str])
    """Where newer checkpoints were that a CheckpointManager found damaged, and how; also places
    that it could not look at."""

    def __str__(self) -> str:
        first = f"loaded {len(self.loaded)} tensors and values of {self.url}: "
        first += f"{self.bytes_needed:,} bytes, of which this rank read {self.bytes_read:,}"
        if self.bytes_received:
            first += f" and got {self.bytes_received:,} from other ranks"
        cast = [f"{name} ({old} to {new})" for name, (old, new) in self.cast.items()]
        named = {
            "resharded": self.resharded,
            "cast": cast,
            "missing in the checkpoint": self.missing,
            "not in the checkpoint, and tied to what is": tuple(self.tied),
            "not asked for": self.unexpected,
            "of ranks or coordinates that are not there": self.dropped,
            "kept, since this rank or coordinate was not there at the save": self.kept,
            "made by a rule for another mesh": self.dealt,
            "cleared, since the checkpoint has no such state": self.cleared,
            "state of optimizers given by position": self.by_position,
            "without values, on the meta device": self.without_values,
            "tied at the save, and not now": tuple(self.untied),
        }
        told = [f"  {what}: {some_names(names)}" for what, names in named.items() if names]
        told += [f"  passed over {url}: {why}" for url, why in self.passed_over.items()]
        return "\n".join([first, *told])

    def __repr__(self) -> str:
        return f"<LoadReport: {self}>"
