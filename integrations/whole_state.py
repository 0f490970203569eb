"""Reading all of a checkpoint into memory, for frameworks that want a dict."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from ..checkpoint import LazyTensor, load, open
from ..checkpoint.state.names import key_of
from ..storage.base import Store


def read_whole(
    path: str | os.PathLike[str] | Store,
    *,
    storage_options: Mapping[str, Any] | None = None,
    allow_pickle: bool = False,
) -> dict[str, Any]:
    """Return the saved structure with whole tensors on the CPU; this process reads it alone.

    State of optimizers has numbers for the names of parameters, in the order of their groups, as
    ``load_state_dict`` of torch's optimizers takes it.
    """
    with open(path, storage_options=storage_options) as checkpoint:
        state = _empty(checkpoint.state_dict(allow_pickle=allow_pickle))
    load(state, path, no_dist=True, storage_options=storage_options, allow_pickle=allow_pickle)
    return numbered(state)


def read_values(
    path: str | os.PathLike[str],
    *without: str,
    storage_options: Mapping[str, Any] | None = None,
    allow_pickle: bool = False,
) -> dict[str, Any]:
    """Return what was saved under all other names than some, with whole tensors on the CPU."""
    with open(path, storage_options=storage_options) as checkpoint:
        saved = checkpoint.state_dict(allow_pickle=allow_pickle)
        return {key: _read(value) for key, value in saved.items() if key not in without}


def read_part(
    path: str | os.PathLike[str],
    *keys: Any,
    storage_options: Mapping[str, Any] | None = None,
    allow_pickle: bool = False,
) -> Any:
    """Return what was saved under a path of keys, with whole tensors on the CPU."""
    with open(path, storage_options=storage_options) as checkpoint:
        found = checkpoint.state_dict(allow_pickle=allow_pickle)
        for key in keys:
            found = found[key]
        return _read(found)


def _empty(value: Any) -> Any:
    def empty(lazy: LazyTensor) -> torch.Tensor:
        return torch.empty(lazy.shape, dtype=lazy.dtype)

    return _with_tensors(value, empty)


def _read(value: Any) -> Any:
    def read(lazy: LazyTensor) -> torch.Tensor:
        return lazy[...]

    return _with_tensors(value, read)


def _with_tensors(value: Any, tensor: Callable[[LazyTensor], torch.Tensor]) -> Any:
    if isinstance(value, LazyTensor):
        return tensor(value)
    if isinstance(value, dict):
        return {k: _with_tensors(v, tensor) for k, v in cast(dict[Any, Any], value).items()}
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(v, tensor) for v in value)
    return value


def numbered(value: Any) -> Any:
    """Return a state in which all optimizers have numbers for the names of their parameters."""
    if isinstance(value, dict):
        parts = cast(dict[Any, Any], value)
        names = _names_of_params(parts)
        if names is None:
            return {key: numbered(part) for key, part in parts.items()}
        return _numbered(parts, names)
    if isinstance(value, list):
        return [numbered(part) for part in cast(list[Any], value)]
    return value


def _names_of_params(state: dict[Any, Any]) -> list[Any] | None:
    """Return the parameters of an optimizer's state in order; None for any other dict."""
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not isinstance(state.get("state"), dict):
        return None
    names: list[Any] = []
    for group in cast(list[Any], groups):
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):  # pyright: ignore
            return None
        names += cast(dict[str, Any], group)["params"]
    return names if any(isinstance(name, str) for name in names) else None


def _numbered(state: dict[Any, Any], names: list[Any]) -> dict[Any, Any]:
    entries: dict[int, Any] = {}
    for number, name in enumerate(names):
        entry = _entry(state["state"], name)
        if entry is not None:
            entries[number] = entry
    groups: list[Any] = []
    first = 0
    for group in state["param_groups"]:
        last = first + len(group["params"])
        groups.append(group | {"params": list(range(first, last))})
        first = last
    return {**state, "state": entries, "param_groups": groups}


def _entry(entries: dict[Any, Any], name: Any) -> Any:
    """Return the state of a parameter, which lies at the path that its name is; else None."""
    if not isinstance(name, str):
        return entries.get(name)
    if name in entries:
        return entries[name]
    found: Any = entries
    for component in name.split("/"):
        key = key_of(component)
        if not isinstance(found, dict) or key not in found:
            return None
        found = cast(dict[Any, Any], found)[key]
    return found
