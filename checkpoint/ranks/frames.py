"""What goes over a connection between two ranks: frames of bounded size.

A frame is taken for nothing else than what it says: its length is compared with a limit before
memory is taken for it, and so is the length of what it unpacks to.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import zstandard

from ..state.limits import check_metadata_bytes, metadata_bytes

MESSAGE, PACKED, SIGN, END = range(4)
"""Kinds: an answer or a decision; the same, compressed; a sign of life; "I leave this call"."""

_HEAD = struct.Struct("!BIQ")  # kind, number, length
_AGE = struct.Struct("!d")
_PACK_BYTES = 1 << 16
"""Longer messages, which list tensors, are compressed; they shrink ten times and more."""
_MAX_TEXT_BYTES = 1 << 16


class Frame(NamedTuple):
    """One frame, unpacked."""

    kind: int
    number: int
    """Of a message, the round; else the call that this rank is to make next, or a lower number."""
    payload: bytes


def message(number: int, payload: bytes) -> bytes:
    """Return the frame of an answer or a decision."""
    check_size(payload)
    if len(payload) > _PACK_BYTES:
        return _framed(PACKED, number, zstandard.compress(payload, 1))
    return _framed(MESSAGE, number, payload)


def check_size(payload: bytes) -> None:
    """Raise CheckpointError if a message is longer than others would take."""
    check_metadata_bytes(len(payload), "what ranks would have to tell each other of this state")


def sign(age: float, doing: str = "", next_call: int = 0) -> bytes:
    """Return the frame that says that a rank lives, and got on with its work ``age`` seconds ago.

    ``doing`` says what the work is, for those who may have to give the rank up. ``next_call`` is
    the least number of the member's next call, where some ranks have made others than all.
    """
    return _framed(SIGN, next_call, _AGE.pack(age) + _encoded(doing))


def read_sign(payload: bytes) -> tuple[float, str]:
    """Return what a sign of life says."""
    if len(payload) < _AGE.size:
        raise ConnectionError("it sent a sign of life that is too short")
    return _AGE.unpack_from(payload)[0], payload[_AGE.size :].decode(errors="replace")


def end(reason: str, next_call: int = 0) -> bytes:
    """Return the frame with which a rank leaves a call, and why if that is not its end."""
    return _framed(END, next_call, _encoded(reason))


def _encoded(text: str) -> bytes:
    # File names need not be Unicode.
    return text.encode(errors="backslashreplace")[:_MAX_TEXT_BYTES]


def _framed(kind: int, number: int, payload: bytes) -> bytes:
    return _HEAD.pack(kind, number, len(payload)) + payload


class FrameReader:
    """Cuts the bytes of one connection into frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def frames(self, received: bytes) -> list[Frame]:
        """Return the frames that are complete; ConnectionError where it is none of ours."""
        self._data += received
        found: list[Frame] = []
        at = 0
        while len(self._data) - at >= _HEAD.size:
            kind, number, length = _HEAD.unpack_from(self._data, at)
            limit = metadata_bytes() if kind in (MESSAGE, PACKED) else _MAX_TEXT_BYTES + _AGE.size
            if kind > END or length > limit:
                raise ConnectionError(
                    f"it sent what is no message of ours (kind {kind}, {length} bytes)"
                )
            start = at + _HEAD.size
            if len(self._data) < start + length:
                break
            at = start + length
            found.append(_unpacked(kind, number, bytes(self._data[start:at])))
        del self._data[:at]
        return found


def _unpacked(kind: int, number: int, payload: bytes) -> Frame:
    if kind != PACKED:
        return Frame(kind, number, payload)
    try:
        size = zstandard.frame_content_size(payload)
        if not 0 <= size <= metadata_bytes():
            raise ConnectionError(f"it sent a message that unpacks to {size} bytes")
        return Frame(MESSAGE, number, zstandard.decompress(payload, max_output_size=size))
    except zstandard.ZstdError as error:
        raise ConnectionError(f"it sent a message that does not unpack: {error}") from None
