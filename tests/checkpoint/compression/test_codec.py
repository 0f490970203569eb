"""Blocks come back as they were, and what is damaged or forged is an error that costs nothing."""

from __future__ import annotations

import doctest
import random
import struct
import threading
import tracemalloc

import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from dtckpt.checkpoint.compression import codec as module
from dtckpt.checkpoint.compression.codec import LEAST_BYTES, Codec, borrowed_codec

WIDTHS = (1, 2, 4, 8)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def normal(dtype: torch.dtype, num_bytes: int = 1 << 20) -> bytes:
    generator = torch.Generator().manual_seed(7)
    count = num_bytes // dtype.itemsize
    return bytes_of((torch.randn(count, generator=generator) * 0.02).to(dtype))


def encoded(block: bytes, width: int) -> bytes:
    return bytes(Codec().encode(memoryview(block), width))


def decoded(stored: bytes, size: int, width: int) -> bytes:
    block = bytearray(size)
    Codec().decode(memoryview(stored), memoryview(block), width)
    return bytes(block)


def test_its_example() -> None:
    assert doctest.testmod(module).failed == 0


@settings(deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    size=st.one_of(st.integers(0, 300), st.integers(LEAST_BYTES - 9, 3 * LEAST_BYTES)),
    alphabet=st.integers(1, 256),
    width=st.sampled_from(WIDTHS),
)
def test_blocks_come_back(seed: int, size: int, alphabet: int, width: int) -> None:
    """Of any length, be it no multiple of the width."""
    block = bytes(random.Random(seed).choices(range(alphabet), k=size))
    stored = encoded(block, width)
    assert len(stored) <= size
    assert (stored == block) == (len(stored) == size)
    assert decoded(stored, size, width) == block


def test_a_codec_is_used_again() -> None:
    codec = Codec()
    blocks = [normal(torch.bfloat16), bytes(5000), random.Random(0).randbytes(9000), b"", b"12"]
    for block in blocks * 2:
        stored = bytes(codec.encode(memoryview(block), 2))
        found = bytearray(len(block))
        codec.decode(memoryview(stored), memoryview(found), 2)
        assert found == block


@pytest.mark.parametrize(
    ("dtype", "least"),
    [
        (torch.bfloat16, 1.48),
        (torch.float16, 1.1),
        (torch.float32, 1.15),
        (torch.float64, 1.04),
        (torch.float8_e4m3fn, 1.2),
        (torch.int64, 7),
        (torch.bool, 1000),
    ],
)
def test_numbers_shrink(dtype: torch.dtype, least: float) -> None:
    block = normal(dtype)
    assert len(block) / len(encoded(block, dtype.itemsize)) >= least


def test_moments_shrink() -> None:
    generator = torch.Generator().manual_seed(1)
    block = bytes_of((torch.randn(1 << 18, generator=generator) * 1e-4) ** 2)
    assert len(block) / len(encoded(block, 4)) >= 1.15


def test_planes_that_do_not_shrink_stay_as_they_are() -> None:
    block = normal(torch.bfloat16)
    stored = encoded(block, 2)
    low, high = struct.unpack_from("<2I", stored)
    assert low == len(block) // 2
    assert high < 0.5 * low
    assert stored[8 : 8 + low] == block[0::2]
    assert zstandard.decompress(stored[8 + low :], max_output_size=low) == block[1::2]


def test_blocks_that_hardly_shrink_stay_as_they_are() -> None:
    block = random.Random(0).randbytes(1 << 16)
    for saved, is_stored in ((200, True), (6000, False)):
        tried = bytes(saved) + block[saved:]
        assert (encoded(tried, 1) == tried) == is_stored


def frame(data: bytes, **more: int | bool) -> bytes:
    told = zstandard.ZstdCompressionParameters.from_level(1, **more)
    return zstandard.ZstdCompressor(compression_params=told).compress(data)


def stored_as(planes: list[bytes], lengths: list[int] | None = None) -> bytes:
    told = lengths or [len(plane) for plane in planes]
    return struct.pack(f"<{len(told)}I", *told) + b"".join(planes)


BOMB = zstandard.ZstdCompressor(level=19).compress(bytes(1 << 28))
NAMELESS_BOMB = frame(bytes(1 << 28), write_content_size=False)
SIZE = 8192
HALF = bytes(SIZE // 2)
BAD = {
    "too long": bytes(SIZE + 1),
    "nothing": b"",
    "no room for lengths": bytes(7),
    "claims more": stored_as([BOMB, frame(HALF)]),
    "unpacks to more": stored_as([frame(HALF + b"1", write_content_size=False), frame(HALF)]),
    "unpacks to very much more": stored_as([frame(HALF), NAMELESS_BOMB[: SIZE // 2 - 1]]),
    "unpacks to less": stored_as([frame(HALF[1:], write_content_size=False), frame(HALF)]),
    "claims less": stored_as([frame(HALF[1:]), frame(HALF)]),
    "two frames": stored_as([frame(HALF) * 2, frame(HALF)]),
    "a frame that is skipped": stored_as([b"\x50\x2a\x4d\x18\x00\x00\x00\x00", frame(HALF)]),
    "no frame": stored_as([b"1234567890", frame(HALF)]),
    "half a frame": stored_as([frame(HALF)[:-3], frame(HALF)]),
    "an empty plane": stored_as([b"", frame(HALF)]),
    "more than its planes": stored_as([frame(HALF), frame(HALF), b"x"], [len(frame(HALF))] * 2),
    "a plane beyond the end": stored_as([frame(HALF)], [17, 4000]),
    "a plane that is too long": stored_as([HALF + b"12", b""], [SIZE // 2 + 2, 0]),
    "a huge plane": stored_as([frame(HALF)], [0xFFFFFFFF, 17]),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_malformed_is_refused_within_its_memory(kind: str) -> None:
    codec, block = Codec(), memoryview(bytearray(SIZE))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"stored in|unpack|claims"):
            codec.decode(memoryview(BAD[kind]), block, 2)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_windows_have_a_limit() -> None:
    """What a decoder has to keep of a frame is memory that the frame says."""
    told = zstandard.ZstdCompressionParameters.from_level(
        1, window_log=27, write_content_size=False
    )
    stream = zstandard.ZstdCompressor(compression_params=told).compressobj()
    wide = stream.compress(HALF) + stream.flush()
    assert zstandard.get_frame_parameters(wide).window_size == 1 << 27
    with pytest.raises(ValueError, match="does not unpack"):
        decoded(stored_as([wide, frame(HALF)]), SIZE, 2)


def test_other_encoders_are_read() -> None:
    """Frames of any level, with content size and checksum or without."""
    half = bytes(range(256)) * (SIZE // 512)
    block = bytearray(SIZE)
    block[0::2] = block[1::2] = half
    for more in ({"write_checksum": True}, {"write_content_size": False}, {"window_log": 24}):
        stored = stored_as([frame(half, **more), frame(half)])
        assert decoded(stored, SIZE, 2) == block


@pytest.mark.parametrize("width", WIDTHS)
def test_damage_never_gives_more_than_a_block(width: int) -> None:
    """10,000 changes in all: an error, or another block, which its digest tells."""
    rng = random.Random(width)
    good = bytes(rng.choices(range(60), weights=range(60), k=SIZE))
    stored = encoded(good, width)
    codec, block = Codec(), memoryview(bytearray(SIZE))
    refused = 0
    tracemalloc.start()
    try:
        for _ in range(2500):
            changed = bytearray(stored)
            for _ in range(rng.choice((1, 1, 2, 8))):
                at = rng.randrange(len(changed))
                kind = rng.randrange(4)
                if kind == 0:
                    changed[at] ^= 1 << rng.randrange(8)
                elif kind == 1:
                    changed[at : at + 4] = rng.randbytes(min(4, len(changed) - at))
                elif kind == 2 and len(changed) > 1:
                    del changed[at:]
                else:
                    changed[at:at] = rng.randbytes(3)
                if not changed:
                    break
            try:
                codec.decode(memoryview(changed), block, width)
            except ValueError:
                refused += 1
        assert tracemalloc.get_traced_memory()[1] < 1 << 21
    finally:
        tracemalloc.stop()
    assert refused > 1000
    codec.decode(memoryview(stored), block, width)
    assert block == good


def test_codecs_are_lent_to_one_at_a_time() -> None:
    seen: list[Codec] = []
    both = threading.Barrier(2)

    def borrow() -> None:
        with borrowed_codec() as codec:
            both.wait(10)
            seen.append(codec)
            both.wait(10)

    threads = [threading.Thread(target=borrow) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen[0] is not seen[1]
    with borrowed_codec() as codec:
        assert codec in seen


def test_large_memory_is_not_kept() -> None:
    with borrowed_codec() as codec:
        codec.memory(64 << 20)
    with borrowed_codec() as other:
        assert other is not codec
