"""What the checks on a GPU share: the device, the states, the time, and what they find."""

from __future__ import annotations

import shutil
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

MIB = 1 << 20
_DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32,
    torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn,
)  # fmt: skip

State = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check has shown."""

    name: str
    problems: tuple[str, ...] = ()
    """What is wrong; none if all is well."""
    numbers: dict[str, float] = field(default_factory=dict[str, float])
    """What was measured, by name and unit."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the checks have in common."""

    device: torch.device
    mib: int
    """MiB of the state whose saves and loads are timed."""
    rounds: int
    folder: Path

    def wait(self) -> None:
        """Wait until the device has done all that it was asked to."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @contextmanager
    def timed(self, seconds: list[float]) -> Generator[None]:
        """Append the seconds that a block takes, with the device idle before and after."""
        self.wait()
        start = time.perf_counter()
        yield
        self.wait()
        seconds.append(time.perf_counter() - start)

    @contextmanager
    def place(self, name: str) -> Generator[Path]:
        """A place for a checkpoint, which is deleted after the block."""
        path = self.folder / name
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def timed_state(self) -> State:
        """A state of ``mib`` MiB in tensors of one size, as of a model."""
        count = 16
        numel = self.mib * MIB // count // 4
        return {f"w{i}": torch.randn(numel, device=self.device) for i in range(count)}

    def odd_state(self) -> State:
        """Every dtype; contiguous, transposed, a slice, a scalar, and nothing at all."""
        generator = torch.Generator().manual_seed(7)
        state: State = {}
        for dtype in _DTYPES:
            limit = 2 if dtype is torch.bool else 100
            whole = torch.randint(0, limit, (60, 50), generator=generator).to(self.device).to(dtype)
            name = str(dtype).removeprefix("torch.")
            state[name] = whole
            state[f"{name} transposed"] = whole.t()
            state[f"{name} slice"] = whole[3:50:2, 5:20]
            state[f"{name} scalar"] = whole[0, 0]
            state[f"{name} empty"] = whole[:0]
        return state


def bits(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor in row-major order, as bytes."""
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def differing(one: State, other: State) -> tuple[str, ...]:
    """Name what two states do not hold bit for bit alike."""
    names = [n for n in one | other if n not in one or n not in other]
    names += [n for n in one if n in other and bits(one[n]) != bits(other[n])]
    return tuple(f"{name!r} differs" for name in names)


def emptied(state: State, device: torch.device | str) -> State:
    """A state of the same names, shapes and dtypes, to be filled."""
    return {name: torch.zeros_like(tensor, device=device) for name, tensor in state.items()}
