"""What a mutant is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change of the code, and who notices it."""

    name: str
    """What the changed code does wrong."""
    file: str
    """Below the root of the repository."""
    old: str
    """Text that stands in the file once."""
    new: str
    """What replaces it."""
    tests: tuple[str, ...] = ()
    """Arguments of pytest: what is run, of which at least one test must fail."""
    equivalent: str = ""
    """Why nobody could notice it, where no test is named."""

    def __post_init__(self) -> None:
        if bool(self.tests) == bool(self.equivalent):
            raise ValueError(f"{self.name}: name tests that fail or say why none can, not both")
