"""How ranks of the demo end before their time: killed in a save, or asked to go."""

from __future__ import annotations

import signal
from types import FrameType

from dtckpt.storage import Call, Fault, Kill


class KillHalfway:
    """A plan of faults: SIGKILL as soon as half of a data file's bytes have been written."""

    def __init__(self) -> None:
        self._announced = 0
        self._written = 0

    def __call__(self, call: Call) -> Fault | None:
        """Choose the fault of a storage call."""
        if call.op == "create" and call.name.startswith("data/"):
            self._announced = call.size
        if call.op != "write" or not self._announced:
            return None
        self._written += call.size
        return Kill(after_effect=True) if 2 * self._written >= self._announced else None


class Stop:
    """Remembers SIGTERM, so that a rank first says what it saw and leaves between two steps.

    torchrun sends it to the other ranks when one has died.
    """

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, _signal: int, _frame: FrameType | None) -> None:
        self.asked = True

    def leave_if_asked(self) -> None:
        """End the process if SIGTERM has come."""
        if self.asked:
            raise SystemExit(128 + signal.SIGTERM)
