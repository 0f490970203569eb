"""How ranks of the demo end before their time: killed in a save, or asked to go."""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass
from types import FrameType

from dtckpt.storage import Call, Fault, Kill

_PATIENCE_SECONDS = 60.0


class KillHalfway:
    """A plan of faults: SIGKILL once half of a data file's bytes have been written.

    The file then stays as it is until ``go_on`` is set, and only then is the process killed.
    """

    def __init__(self, go_on: threading.Event) -> None:
        self._go_on = go_on
        self._announced = 0
        self._written = 0

    def __call__(self, call: Call) -> Fault | None:
        """Choose the fault of a storage call."""
        if call.op == "create" and call.name.startswith("data/"):
            self._announced = call.size
        if call.op != "write" or not self._announced:
            return None
        self._written += call.size
        return _KillLater(self._go_on) if 2 * self._written >= self._announced else None


@dataclass(frozen=True, slots=True)
class _KillLater(Fault):
    """Wait within a storage call, after its effect, and end the process."""

    go_on: threading.Event

    def after(self) -> None:
        self.go_on.wait(_PATIENCE_SECONDS)
        Kill(after_effect=True).after()


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
