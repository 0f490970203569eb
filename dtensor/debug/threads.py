"""Whose work a thread does: on accelerators, autograd runs the backward pass in its own threads."""

from __future__ import annotations

import threading

from ..comm.traffic import ask_for_owner
from ..torch_private import hand_to_autograd, handed_to_autograd

_KEY = "dtckpt_thread"


def mark_thread() -> None:
    """Let the threads in which autograd works for this one know that they do."""
    hand_to_autograd(_KEY, threading.get_ident())
    ask_for_owner(_owner)


def _owner() -> int | None:
    return handed_to_autograd(_KEY)
