"""``CommDebugMode``: counts the collectives of a ``with`` block, module by module."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from dtckpt.logs import rank_of_job

from ..comm.traffic import Asked
from ..torch_private import DispatchMode
from .comm_counts import CommCounts
from .comm_reports import chrome_trace, json_report, table
from .module_tracker import Phase, with_parents
from .recording import Recording, SeenCollective

NOISE_LEVELS = (0, 1, 2, 3)


class CommDebugMode(DispatchMode):
    """Within it, collectives and operators of this thread are counted.

    Every collective counts that the library is asked for, those of saves and loads included, and
    those that go through torch's own operators. A redistribute from Partial to Replicate is one
    ``all_reduce``, whatever the backend takes for it and however often; ``get_collectives`` has
    what was issued. ``agreement`` is what ranks tell each other of sizes, arguments and failures,
    and a phase of a save or load that they conclude together; it is neither listed among the counts
    nor in their total. What autograd or a save in the background does for this thread counts, too;
    the latter to its end, even after the block. Entering it again begins anew.

    >>> with CommDebugMode() as comm:
    ...     pass
    >>> comm.get_total_counts(), comm.get_comm_counts()["all_gather"]
    (0, 0)
    """

    def __init__(self) -> None:
        super().__init__()
        self._recording = Recording()
        self._is_open = False

    def __enter__(self) -> Self:
        if self._is_open:
            raise RuntimeError("this CommDebugMode is entered already; make another one")
        self._recording = Recording()
        self._recording.start()
        self._is_open = True
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*(error or (None, None, None)))
        self._is_open = False
        self._recording.stop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._recording.run_operator(func, types, args, kwargs)

    def get_comm_counts(
        self, *, module: str | None = None, phase: Phase | None = None
    ) -> CommCounts:
        """Return how many collectives of each kind there were.

        Keys are kinds ("all_reduce") and torch's operators (``c10d_functional.all_reduce``) alike.
        ``module`` and ``phase`` ("forward", "backward", "recomputation") limit it to those in a
        module and its parts, and to a part of the step.
        """
        counted: set[Asked] = set()

        def once(seen: SeenCollective) -> int:
            asked = seen.collective.asked
            if asked is None:
                return 1
            if asked in counted:
                return 0
            counted.add(asked)
            return 1

        return self._sums(once, module, phase)

    @property
    def comm_counts(self) -> CommCounts:
        """How many collectives of each kind there were: a name of torch's."""
        return self.get_comm_counts()

    @property
    def comm_module_counts(self) -> dict[str, dict[str, CommCounts]]:
        """How many there were in every module that had any, forward and backward."""
        names = {
            name
            for seen in list(self._recording.collectives)
            for name in with_parents(seen.place.module)
        }
        return {
            name: {
                "forward": self.get_comm_counts(module=name, phase="forward"),
                "backward": self.get_comm_counts(module=name, phase="backward"),
            }
            for name in sorted(names)
        }

    def get_comm_bytes(
        self, *, module: str | None = None, phase: Phase | None = None, sent: bool = False
    ) -> CommCounts:
        """Return how many bytes reached this rank by each kind, or with ``sent`` left it.

        They are those that ranks have to send each other, whatever the backend makes of it.
        """

        def num_bytes(seen: SeenCollective) -> int:
            collective = seen.collective
            return collective.sent_bytes if sent else collective.received_bytes

        return self._sums(num_bytes, module, phase)

    def get_total_counts(self) -> int:
        """Return how many collectives there were, agreements left out."""
        return sum(self.get_comm_counts().values())

    def get_collectives(self) -> list[SeenCollective]:
        """Return every collective in the order in which they were issued."""
        return list(self._recording.collectives)

    def get_parameter_info(self) -> dict[str, dict[str, Any]]:
        """Return the parameters' data by their last name, by the name of their module."""
        return {
            name: {last: p.data for last, p in info.parameters.items()}
            for name, info in self._recording.tracker.modules.items()
        }

    def get_sharding_info(self) -> dict[str, tuple[Any, ...]]:
        """Return the placements of every distributed parameter, by its full name."""
        return {
            f"{name}.{last}": tuple(parameter.placements)
            for name, info in self._recording.tracker.modules.items()
            for last, parameter in info.parameters.items()
            if hasattr(parameter, "placements")
        }

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """Return a table of what happened in every module.

        Level 0 has collectives; 1 adds where they were issued, parameters with their placements,
        and operators on distributed tensors that do more than make or view memory; 2 adds those on
        plain tensors; 3 all operators.
        """
        return table(self._recording, _checked(noise_level))

    def log_comm_debug_tracing_table_to_file(
        self, file_name: str | os.PathLike[str] = "comm_mode_log.txt", noise_level: int = 3
    ) -> str:
        """Write the table to a file and return its path, which names the rank."""
        return self._write(file_name, self.generate_comm_debug_tracing_table(noise_level) + "\n")

    def generate_json_dump(
        self, file_name: str | os.PathLike[str] = "comm_mode_log.json", noise_level: int = 3
    ) -> str:
        """Write a JSON tree of modules to a file and return its path, which names the rank."""
        document = json_report(self._recording, _checked(noise_level))
        return self._write(file_name, json.dumps(document, indent=2) + "\n")

    def generate_chrome_trace(
        self, file_name: str | os.PathLike[str] = "comm_mode_trace.json"
    ) -> str:
        """Write collectives and operators over time, for chrome://tracing or Perfetto.

        Return the path, which names the rank.
        """
        return self._write(file_name, json.dumps(chrome_trace(self._recording, self._rank() or 0)))

    def _sums(
        self, number: Callable[[SeenCollective], int], module: str | None, phase: Phase | None
    ) -> CommCounts:
        sums = CommCounts()
        for seen in list(self._recording.collectives):
            is_there = module is None or module in with_parents(seen.place.module)
            if is_there and phase in (None, seen.place.phase):
                sums.add(seen.kind, number(seen))
        return sums

    def _rank(self) -> int | None:
        rank = rank_of_job()
        if rank is None and self._recording.collectives:  # a rank that is a thread
            collective = self._recording.collectives[-1].collective
            return collective.ranks[collective.rank]
        return rank

    def _write(self, file_name: str | os.PathLike[str], text: str) -> str:
        path, rank = Path(file_name), self._rank()
        if rank is not None:
            path = path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
        path.write_text(text, encoding="utf-8")
        return str(path)


def _checked(noise_level: int) -> int:
    if noise_level not in NOISE_LEVELS:
        raise ValueError(f"noise_level is one of 0, 1, 2 and 3, got {noise_level!r}")
    return noise_level
