"""What the demo proves: claims that are printed with their verdict, and comparisons of state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch.distributed.tensor import DTensor as TorchDTensor

from dtckpt.checkpoint import Checkpoint, LazyTensor
from dtckpt.dtensor import DTensor


class Claims:
    """Prints claims as they are checked and remembers those that do not hold."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.num_checked = 0
        self.failed: list[str] = []

    def check(self, text: str, holds: bool, detail: str = "") -> bool:
        """Print a claim with its verdict and return whether it holds."""
        self.num_checked += 1
        if not holds:
            self.failed.append(text)
        style = "green" if holds else "bold red"
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_row(
            Text("  holds" if holds else " FAILED", style), Text(text, "" if holds else style)
        )
        if detail:
            table.add_row("", Text(detail, "dim"))
        self._console.print(table)
        return holds

    @property
    def exit_code(self) -> int:
        """0 if something was checked and all of it holds, else 1."""
        return 0 if self.num_checked and not self.failed else 1


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bits, NaNs and zeros included."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return one.detach().numpy().tobytes() == other.detach().numpy().tobytes()


def state_differences(live: Any, saved: Any, where: str = "") -> list[str]:
    """Return where the state of this job differs from a saved one, which is read for it.

    ``live`` is what ``state_dict()`` returns, ``saved`` what ``Checkpoint.state_dict()`` does.
    Distributed tensors are gathered, so all ranks call this alike.
    """
    if isinstance(saved, LazyTensor):
        whole = live.full_tensor() if is_distributed(live) else live
        return [] if same_bits(whole, saved[...]) else [where]
    if isinstance(saved, Mapping) and isinstance(live, Mapping):
        if live.keys() != saved.keys():
            return [f"{where}: keys {sorted(map(str, live.keys() ^ saved.keys()))}"]
        pairs = [(key, live[key], saved[key]) for key in saved]
    elif isinstance(saved, list | tuple) and isinstance(live, list | tuple):
        if len(live) != len(saved):
            return [f"{where}: {len(live)} items, {len(saved)} saved"]
        pairs = [(index, *pair) for index, pair in enumerate(zip(live, saved, strict=True))]
    else:
        return [] if type(live) is type(saved) and live == saved else [where]
    return [
        difference
        for key, one, other in pairs
        for difference in state_differences(one, other, f"{where}/{key}")
    ]


def state_by_names(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, Any]:
    """Return the state of an optimizer by names of parameters, as saved beside ``model``."""
    names = {id(param): name for name, param in model.named_parameters()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    state = optimizer.state_dict()
    entries = {names[id(params[number])]: entry for number, entry in state["state"].items()}
    groups = [
        group | {"params": [f"model/{names[id(params[number])]}" for number in group["params"]]}
        for group in state["param_groups"]
    ]
    return {**state, "state": {"model": entries}, "param_groups": groups}


def count_dtensors(state: Any) -> int:
    """Return how many distributed tensors are in nested dicts and lists."""
    if isinstance(state, Mapping):
        return sum(count_dtensors(value) for value in state.values())
    if isinstance(state, list | tuple):
        return sum(count_dtensors(value) for value in state)
    return int(is_distributed(state))


def is_distributed(value: Any) -> bool:
    """Return whether a value is a DTensor, torch's or ours."""
    return isinstance(value, DTensor | TorchDTensor)


def checkpoint_differences(one: Checkpoint, other: Checkpoint) -> list[str]:
    """Return the names of tensors that two checkpoints do not hold bit for bit alike."""
    names = dict.fromkeys([*one, *other])
    return [
        name
        for name in names
        if name not in one or name not in other or not same_bits(one[name][...], other[name][...])
    ]


def largest_difference(one: Checkpoint, other: Checkpoint, prefix: str) -> float:
    """Return the largest absolute difference of elements of all tensors whose name has a prefix."""
    return max(
        float((one[name][...].double() - other[name][...].double()).abs().max())
        for name in one
        if name.startswith(prefix)
    )


def relative_differences(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """Return the difference of every pair relative to the first; infinite where one is not finite.

    >>> relative_differences([2.0, 4.0], [2.0, 3.0])
    [0.0, 0.25]
    """
    pairs = zip(one, other, strict=True)
    found = [abs(a - b) / abs(a) if a else float("inf") for a, b in pairs]
    return [difference if difference == difference else float("inf") for difference in found]
