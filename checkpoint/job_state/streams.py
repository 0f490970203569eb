"""The random generators of a process, whose states are bytes of a fixed number."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dtckpt.errors import Unsavable

_WORDS = 624
"""Of the state of a Mersenne twister."""
_NUMPY = struct.Struct("<iid")
"""Position, whether a normal number is kept, and that."""
_PYTHON = struct.Struct(f"<{_WORDS + 1}I?d")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """One generator of this process."""

    read: Callable[[], Tensor]
    """Returns its state: bytes on the CPU, in memory of their own."""
    write: Callable[[Tensor], object]
    """Sets its state."""
    begun: Callable[[int], Tensor]
    """Returns the state of such a generator that begins with a seed of 64 bits."""


def process_streams() -> dict[str, Stream]:
    """Return torch's own generators: of the CPU and of every accelerator that this process sees.

    The one of the current device is named by its type, ``"cuda"``, those after it ``"cuda+1"``,
    ..., so that a name means the same to ranks that use other devices.
    """
    found = {"cpu": torch_stream(torch.default_generator)}
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return found
    module: Any = torch.get_device_module(kind.type)
    count: int = module.device_count()
    current: int = module.current_device() if count > 1 else 0
    for number in range(count):
        name = kind.type if number == 0 else f"{kind.type}+{number}"
        found[name] = _of_device(module, torch.device(kind.type, (current + number) % count))
    return found


def torch_stream(generator: torch.Generator) -> Stream:
    """Return a generator of torch, on any device."""
    return Stream(
        read=lambda: generator.get_state().clone(),
        write=lambda state: generator.set_state(state),
        begun=lambda seed: torch.Generator(generator.device).manual_seed(seed).get_state(),
    )


def _of_device(module: Any, device: torch.device) -> Stream:
    return Stream(
        read=lambda: module.get_rng_state(device).cpu().clone(),
        write=lambda state: module.set_rng_state(state, device),
        begun=lambda seed: torch.Generator(device).manual_seed(seed).get_state(),
    )


def numpy_stream() -> Stream:
    """Return numpy's global generator."""
    return Stream(
        read=lambda: _numpy_bytes(np.random.get_state()),
        write=_set_numpy,
        begun=lambda seed: _numpy_bytes(np.random.RandomState(np.random.MT19937(seed)).get_state()),
    )


def _numpy_bytes(state: Any) -> Tensor:
    kind, words, position, has_normal, normal = state
    if kind != "MT19937":
        raise Unsavable(f"numpy's global random numbers are those of {kind}, expected MT19937")
    data = words.astype("<u4").tobytes() + _NUMPY.pack(position, has_normal, normal)
    return _tensor(data)


def _set_numpy(state: Tensor) -> None:
    data = state.numpy().tobytes()
    words = np.frombuffer(data, "<u4", _WORDS)
    np.random.set_state(("MT19937", words, *_NUMPY.unpack_from(data, 4 * _WORDS)))


def python_stream() -> Stream:
    """Return Python's global generator."""
    return Stream(
        read=lambda: _python_bytes(random.getstate()),
        write=_set_python,
        begun=lambda seed: _python_bytes(random.Random(seed).getstate()),
    )


def _python_bytes(state: Any) -> Tensor:
    _, words, normal = state
    return _tensor(_PYTHON.pack(*words, normal is not None, normal or 0.0))


def _set_python(state: Tensor) -> None:
    *words, has_normal, normal = _PYTHON.unpack(state.numpy().tobytes())
    random.setstate((3, tuple(words), normal if has_normal else None))


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def streams_of(
    *, process: bool, numpy: bool, python: bool, generators: Mapping[str, torch.Generator]
) -> dict[str, Stream]:
    """Return the generators that a caller wants, by name."""
    found = process_streams() if process else {}
    if numpy:
        found["numpy"] = numpy_stream()
    if python:
        found["python"] = python_stream()
    for name, generator in generators.items():
        if name in found:
            raise ValueError(f"generators[{name!r}]: the name is taken; give it another one")
        found[name] = torch_stream(generator)
    return found
