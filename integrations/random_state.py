"""The states of the random generators of this process, as a value to be saved."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Return the states of Python's, numpy's and torch's generators, and that of its device."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.get_rng_state(),
    }
    device = _accelerator()
    if device is not None:
        state[device] = getattr(torch, device).get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Give the generators of this process the states that were saved."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["cpu"])
    device = _accelerator()
    if device is not None and device in state:
        getattr(torch, device).set_rng_state(state[device])


def _accelerator() -> str | None:
    if not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type
