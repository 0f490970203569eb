"""Compressed checkpoints: what the codec gains and takes, and saves and loads with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import zstandard

from dtckpt import checkpoint
from dtckpt.checkpoint.compression.codec import Codec

from ..folders import fresh, warm
from ..frame.contest import Contestant, compete
from ..frame.row import OURS, Bar, Column, Outcome, Row
from ..frame.setting import Setting
from ..frame.team import Team
from .contestants import COSTS

_BLOCK_BYTES = 1 << 20
_MOST_BYTES = 64 << 20
_ZSTD, _PLAIN = "zstd 1", "not compressed"
_COLUMNS = (
    Column(metric="stored_share", heading="stored / bytes", kind="ratio"),
    Column(metric="in_seconds", heading="core seconds a GB in"),
    Column(metric="out_seconds", heading="core seconds a GB out"),
)


def _normal(num_bytes: int, dtype: torch.dtype, scale: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_bytes // dtype.itemsize, generator=generator) * scale).to(dtype)


def _weights(num_bytes: int) -> list[torch.Tensor]:
    return [_normal(num_bytes, torch.bfloat16, 0.02, 0)]


def _moments(num_bytes: int) -> list[torch.Tensor]:
    first = _normal(num_bytes // 2, torch.float32, 1e-4, 1)
    return [first, _normal(num_bytes // 2, torch.float32, 1e-4, 2) ** 2]


class _Ours:
    def __init__(self, width: int) -> None:
        self._codec, self._width = Codec(), width

    def encode(self, block: memoryview) -> bytes:
        return bytes(self._codec.encode(block, self._width))

    def decode(self, stored: bytes, block: memoryview) -> None:
        self._codec.decode(memoryview(stored), block, self._width)


class _Zstd:
    def __init__(self) -> None:
        self._in = zstandard.ZstdCompressor(level=1)
        self._out = zstandard.ZstdDecompressor()

    def encode(self, block: memoryview) -> bytes:
        return self._in.compress(block)

    def decode(self, stored: bytes, block: memoryview) -> None:
        block[:] = self._out.decompress(stored)


def _codec(make: Callable[[int], list[torch.Tensor]], _team: Team, setting: Setting) -> Outcome:
    tensors = make(min(setting.size, _MOST_BYTES))
    blocks: list[memoryview] = []
    for tensor in tensors:
        data: memoryview = tensor.view(torch.uint8).numpy().data
        blocks += [data[at : at + _BLOCK_BYTES] for at in range(0, len(data), _BLOCK_BYTES)]
    outcome = Outcome()
    for name, codec in ((OURS, _Ours(tensors[0].itemsize)), (_ZSTD, _Zstd())):
        values: dict[str, list[float]] = {column.metric: [] for column in _COLUMNS}
        for turn in range(-1, setting.rounds):
            found = _measured(codec, blocks)
            if turn >= 0:
                for metric, value in zip(values, found, strict=True):
                    values[metric].append(value)
        outcome.values[name] = values
    outcome.facts["bytes"] = sum(map(len, blocks))
    return outcome


def _measured(codec: Any, blocks: Sequence[memoryview]) -> tuple[float, float, float]:
    """Return the share that is stored, and the seconds of a thread for a GB in and out."""
    num_bytes = sum(map(len, blocks))
    began = time.thread_time()
    stored = [codec.encode(block) for block in blocks]
    encoded = time.thread_time() - began
    room = memoryview(bytearray(_BLOCK_BYTES))
    began = time.thread_time()
    for kept, block in zip(stored, blocks, strict=True):
        codec.decode(kept, room[: len(block)])
    decoded = time.thread_time() - began
    if room[: len(blocks[-1])] != blocks[-1]:
        raise ValueError("a block was decoded to other bytes than those encoded")
    return sum(map(len, stored)) / num_bytes, encoded / num_bytes * 1e9, decoded / num_bytes * 1e9


def _codec_row(
    name: str, title: str, make: Callable[[int], list[torch.Tensor]], bars: tuple[Bar, ...]
) -> Row:
    return Row(
        name=name,
        title=title,
        what="Blocks of 1 MiB that are in memory, encoded and decoded one after the other: "
        "processor time of one thread for 1e9 bytes of what they are when decoded.",
        columns=_COLUMNS,
        bars=bars,
        systems=(OURS, _ZSTD),
        run=partial(_codec, make),
        ranks=lambda _: 1,
    )


def _whole(is_load: bool, team: Team, setting: Setting) -> Outcome:
    weights, moments = _weights(setting.size // 5), _moments(setting.size // 5 * 4)
    state = {f"t{i}": tensor for i, tensor in enumerate((*weights, *moments))}
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    ways: dict[str, Literal["zstd"] | None] = {OURS: "zstd", _PLAIN: None}

    def save(path: Path, compress: Literal["zstd"] | None) -> None:
        checkpoint.save(state, path, no_dist=True, compress=compress)

    def check() -> None:
        if not all(torch.equal(into[name], tensor) for name, tensor in state.items()):
            raise ValueError("other elements were loaded than those saved")

    contestants: list[Contestant] = []
    for name, compress in ways.items():
        path = team.folder / name
        before, call = partial(fresh, team, path), partial(save, path, compress)
        if is_load:
            before()
            call()
            before, call = partial(warm, team, path), partial(_load, into, path)
        after = check if is_load else lambda: None
        contestants.append(Contestant(name=name, before=before, call=call, after=after))
    outcome = compete(team, contestants, setting.rounds)
    outcome.add_rate(sum(tensor.nbytes for tensor in state.values()))
    return outcome


def _load(into: dict[str, torch.Tensor], path: Path) -> None:
    checkpoint.load(into, path, no_dist=True)


def _whole_row(name: str, title: str, what: str, *, is_load: bool) -> Row:
    return Row(
        name=name,
        title=title,
        what="One rank with bf16 weights of a normal distribution and fp32 moments of them. "
        + what,
        columns=COSTS,
        bars=(),
        systems=(OURS, _PLAIN),
        run=partial(_whole, is_load),
        ranks=lambda _: 1,
    )


CODEC_WEIGHTS = _codec_row(
    "codec-weights",
    "The codec on bf16 weights",
    _weights,
    (
        Bar(metric="stored_share", limit=1 / 1.48),
        Bar(metric="in_seconds", limit=1 / 0.8),
        Bar(metric="out_seconds", limit=1 / 1.3),
    ),
)
CODEC_MOMENTS = _codec_row(
    "codec-moments",
    "The codec on Adam's fp32 moments",
    _moments,
    (Bar(metric="stored_share", limit=1 / 1.15),),
)
SAVE_COMPRESSED = _whole_row(
    "save-compressed",
    "Save with compression",
    "Until every byte is synced to the local disk.",
    is_load=False,
)
LOAD_COMPRESSED = _whole_row(
    "load-compressed",
    "Load of a compressed checkpoint",
    "Files are in the page cache; all is verified.",
    is_load=True,
)
