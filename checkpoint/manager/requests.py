"""What asks for a save beside the rules: signals, other processes, and the clock of one rank."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from ...storage.base import Store
from ..agreement.agreement import Agreement
from ..agreement.gate import Agreed
from .demand import DemandWatch
from .emergency import Emergency
from .signals import Signals


@dataclass(frozen=True, slots=True, kw_only=True)
class OnSignals:
    """Signals at which a run is saved."""

    save: tuple[int, ...] = (signal.SIGUSR1,)
    """Those to save at and go on."""
    stop: tuple[int, ...] = (signal.SIGTERM,)
    """Those to save at within the deadline of ``emergency`` and stop."""
    emergency: Emergency = field(default_factory=Emergency)


class Requests:
    """Requests that come to some rank, agreed by all; nothing at all where none may come."""

    def __init__(
        self,
        group: Mapping[str, Any],
        *,
        by_clock: bool,
        on_signals: OnSignals | None,
        root: Store,
        on_demand: bool | timedelta,
    ) -> None:
        """``group`` are the arguments of ``ranks_of``, ``on_demand`` how often to look in ``root``.

        Signals are handled from now on, if this is the main thread.
        """
        self.agreement: Agreement | None = None
        self._signals: Signals | None = None
        self._watch: DemandWatch | None = None
        if not (by_clock or on_signals or on_demand):
            return
        self.agreement = Agreement(**group)
        if on_signals is not None:
            self._signals = Signals(
                self.agreement.ask,
                save=on_signals.save,
                stop=on_signals.stop,
                within=on_signals.emergency.deadline,
            )
        if on_demand and is_first(group):
            every = on_demand if isinstance(on_demand, timedelta) else timedelta(seconds=5)
            self._watch = DemandWatch(root, self.agreement.ask, every)

    def ends_with(self, reason: Agreed | str | None) -> Agreed | None:
        """Return the reason if it is one to stop for, on whichever rank its signal came."""
        if not isinstance(reason, Agreed) or self._signals is None:
            return None
        return reason if self._signals.stops(reason.reasons) else None

    def raise_held(self) -> None:
        """Raise what other handlers of a signal to stop had raised, now that the save is over."""
        if self._signals is not None:
            self._signals.raise_held()

    def begin_save(self) -> tuple[str, ...]:
        """Return which requests of other processes a save answers that begins now."""
        return () if self._watch is None else self._watch.begin_save()

    def answer(self, requests: tuple[str, ...], url: str = "", problem: str = "") -> None:
        """Tell other processes what has become of their requests."""
        if self._watch is not None:
            self._watch.answer(requests, url, problem)

    def close(self) -> None:
        """End it; handlers of signals are put back."""
        if self._signals is not None:
            self._signals.close()
        if self._watch is not None:
            self._watch.close()
        if self.agreement is not None:
            self.agreement.close()


def is_first(group: Mapping[str, Any]) -> bool:
    """Whether this rank is the one that decides for a group, and looks after a run."""
    process_group = group["process_group"]
    if group["no_dist"]:
        return True
    if process_group is None:
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()):
            return True
        return distributed.get_rank() == 0
    return process_group.rank() == 0
