"""Frames: what goes in comes out, and nothing else is taken for one."""

from __future__ import annotations

import struct

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from dtckpt.checkpoint.ranks import frames
from dtckpt.checkpoint.ranks.frames import END, MESSAGE, PACKED, SIGN, FrameReader
from dtckpt.checkpoint.state.limits import METADATA_VARIABLE
from dtckpt.errors import CheckpointError

HEAD = struct.Struct("!BIQ")


def read(data: bytes) -> list[frames.Frame]:
    return FrameReader().frames(data)


@given(
    st.lists(st.one_of(st.binary(max_size=50), st.integers(1 << 16, 1 << 17).map(bytes))),
    st.integers(1, 100),
)
def test_frames_come_out_as_they_went_in(payloads: list[bytes], step: int) -> None:
    sent = b"".join(frames.message(n, payload) for n, payload in enumerate(payloads))
    reader, found = FrameReader(), list[frames.Frame]()
    for at in range(0, len(sent), step):
        found += reader.frames(sent[at : at + step])
    assert found == [(MESSAGE, n, payload) for n, payload in enumerate(payloads)]


def test_only_long_messages_are_compressed() -> None:
    assert len(frames.message(0, bytes(1 << 16))) == HEAD.size + (1 << 16)
    assert len(frames.message(0, bytes((1 << 16) + 1))) < 1000


def test_signs_and_ends_are_read_back() -> None:
    [(kind, _, payload)] = read(frames.sign(2.5, "writing \udcff"))
    assert kind == SIGN
    assert frames.read_sign(payload) == (2.5, "writing \\udcff")
    for text in ("", "x" * (1 << 16)):
        [(_, _, payload)] = read(frames.sign(0.0, text + text))
        assert frames.read_sign(payload) == (0.0, text)
    [(kind, _, payload)] = read(frames.end("x" * (1 << 20)))
    assert kind == END
    assert payload == b"x" * (1 << 16), "no reason is longer than others take"
    with pytest.raises(ConnectionError, match="too short"):
        frames.read_sign(b"123")


@pytest.mark.parametrize(
    "head", [(MESSAGE, 0, 1 << 60), (PACKED, 0, (256 << 20) + 1), (SIGN, 0, 1 << 17), (9, 0, 0)]
)
def test_what_states_too_much_is_refused_before_it_comes(head: tuple[int, int, int]) -> None:
    with pytest.raises(ConnectionError, match="no message of ours"):
        read(HEAD.pack(*head))


def test_what_unpacks_to_too_much_is_refused() -> None:
    for bomb in (zstandard.compress(bytes(1 << 29), 1), b"\x28\xb5\x2f\xfd" + bytes(20), b"x" * 99):
        with pytest.raises(ConnectionError, match="unpack"):
            read(HEAD.pack(PACKED, 0, len(bomb)) + bomb)


def test_a_frame_that_lies_about_what_it_unpacks_to_is_refused() -> None:
    told, bomb = zstandard.compress(bytes(100)), zstandard.compress(bytes(1 << 24))
    lie = bytearray(bomb)
    assert told[4] >> 6 == 0
    start = 6  # magic, descriptor and window are followed by the size
    lie[start : start + 4] = (5000).to_bytes(4, "little")
    with pytest.raises(ConnectionError):
        read(HEAD.pack(PACKED, 0, len(lie)) + bytes(lie))


def test_nobody_says_more_than_others_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(METADATA_VARIABLE, "1")
    with pytest.raises(CheckpointError, match=METADATA_VARIABLE):
        frames.message(0, bytes((1 << 20) + 1))
    assert read(frames.message(0, bytes(1 << 20)))
