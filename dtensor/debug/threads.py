"""Whose work a thread does: on accelerators, autograd runs the backward pass in its own threads."""

# pyright: reportPrivateUsage=false
# What autograd hands to its threads has no public name in torch.

from __future__ import annotations

import threading

import torch

from ..traffic import ask_for_owner

_KEY = "dtckpt_thread"


def mark_thread() -> None:
    """Let the threads in which autograd works for this one know that they do."""
    torch._C._stash_obj_in_tls(_KEY, threading.get_ident())
    ask_for_owner(_owner)


def _owner() -> int | None:
    return torch._C._get_obj_in_tls(_KEY) if torch._C._is_key_in_tls(_KEY) else None
