"""How far a pickle numbers its objects: an unpickler takes memory for all up to the last number.

Twenty bytes with the number 2**31 would take 32 GiB before anything else is looked at.
"""

from __future__ import annotations

import pickle
import pickletools

_PREFIXED = {  # opcodes whose argument is a length, in so many bytes, and as many bytes
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_FIXED: dict[int, int] = {}
"""Bytes of an argument, by opcode."""
_LENGTHS: dict[int, int] = {}
"""Bytes of the length before an argument."""
_LINES: dict[int, int] = {}
"""Lines of an argument."""
for _op in pickletools.opcodes:
    _code, _size = ord(_op.code), 0 if _op.arg is None else _op.arg.n
    if _size in _PREFIXED:
        _LENGTHS[_code] = _PREFIXED[_size]
    elif _size < 0:
        _LINES[_code] = 2 if _op.name in ("GLOBAL", "INST") else 1
    else:
        _FIXED[_code] = _size
_STOP, _PUT, _LONG_BINPUT = pickle.STOP[0], pickle.PUT[0], pickle.LONG_BINPUT[0]
_MOST_DIGITS = 20


def has_small_memo(data: bytes) -> bool:
    """Whether all numbers that a pickle gives to objects are below its length in bytes.

    Picklers count them up from 0. What is malformed is left to the unpickler, which stops there.

    >>> has_small_memo(pickle.dumps([1, "a", (2,)])), has_small_memo(b"Nr\\xff\\xff\\xff\\x7f.")
    (True, False)
    """
    at, end = 0, len(data)
    while at < end:
        code = data[at]
        at += 1
        size = _FIXED.get(code)
        if size is not None:
            if code == _LONG_BINPUT and int.from_bytes(data[at : at + 4], "little") > end:
                return False
            if code == _STOP:
                return True
            at += size
        elif code in _LENGTHS:
            width = _LENGTHS[code]
            at += width + int.from_bytes(data[at : at + width], "little")
        elif code in _LINES:
            for _ in range(_LINES[code]):
                stop = data.find(b"\n", at)
                if stop < 0:
                    return True
                line, at = data[at:stop], stop + 1
                if code == _PUT and not (
                    len(line) <= _MOST_DIGITS and line.strip().isdigit() and int(line) <= end
                ):
                    return False
        else:
            return True
    return True
