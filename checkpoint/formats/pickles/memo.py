"""How far a pickle numbers its objects, and how long it says that they are.

An unpickler takes memory for all objects up to the last number, and for a bytearray before it has
read any of it: twenty bytes with the number 2**31 would take 32 GiB.
"""

from __future__ import annotations

import pickle
import pickletools
import re
from collections.abc import Iterable

from ....dtensor.comm.caches import remembered

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


def _any_of(codes: Iterable[int]) -> bytes:
    return b"[" + b"".join(re.escape(bytes([code])) for code in codes) + b"]"


@remembered(1024)
def _plain_run(last: int) -> re.Pattern[bytes]:
    """Return what fits a run of opcodes with arguments of fixed lengths, nearly all that there are.

    Numbers of objects are below ``last`` in units of 65,536, or of 2**24 where there are so many.
    """
    by_size: dict[int, list[int]] = {}
    for code, size in _FIXED.items():
        if code not in (_STOP, _LONG_BINPUT):
            by_size.setdefault(size, []).append(code)
    forms = [_any_of(codes) + b".{%d}" % size for size, codes in by_size.items()]
    high = b"[\\x00-\\x%02x]" % min(last, 255)
    forms.append(re.escape(pickle.LONG_BINPUT) + b".." + high + b"[\\x00-\\x%02x]" % (last >> 8))
    return re.compile(b"(?:%s)*+" % b"|".join(forms), re.DOTALL)


def is_bounded(data: bytes) -> bool:
    """Whether numbers of objects are about below the length of a pickle, and all lengths within it.

    Picklers count objects up from 0. What else is malformed is left to the unpickler, which stops
    there.

    >>> is_bounded(pickle.dumps([1, "a", (2,)])), is_bounded(b"Nr\\xff\\xff\\xff\\x7f.")
    (True, False)
    >>> is_bounded(pickle.BYTEARRAY8 + (1 << 40).to_bytes(8, "little"))
    False
    """
    return _end(data, 0) != _UNBOUNDED


def end_of_pickle(data: bytes, start: int) -> int | None:
    """Return where the pickle ends that begins at ``start``; None if that is not in the data.

    >>> one, other = pickle.dumps([1]), pickle.dumps("a")
    >>> end_of_pickle(one + other, 0) == len(one), end_of_pickle(one + other[:-1], len(one))
    (True, None)
    """
    end = _end(data, start)
    return end if end > 0 else None


_UNBOUNDED, _OPEN = -1, -2


def _end(data: bytes, at: int) -> int:
    """Return where a pickle ends; ``_UNBOUNDED`` or ``_OPEN`` where it does not."""
    end = len(data)
    plain = _plain_run(end >> 16)
    while at < end:
        run = plain.match(data, at)
        at = run.end() if run else at
        if at >= end:
            break
        code = data[at]
        at += 1
        if code in _LENGTHS:
            width = _LENGTHS[code]
            at += width + int.from_bytes(data[at : at + width], "little")
            if at > end:
                return _UNBOUNDED
        elif code in _LINES:
            for _ in range(_LINES[code]):
                stop = data.find(b"\n", at)
                if stop < 0:
                    return _OPEN
                line, at = data[at:stop], stop + 1
                if code == _PUT and not (
                    len(line) <= _MOST_DIGITS and line.strip().isdigit() and int(line) <= end
                ):
                    return _UNBOUNDED
        elif code == _STOP:
            return at
        else:  # a number that is too large, or nothing that an unpickler takes
            return _UNBOUNDED if code == _LONG_BINPUT else _OPEN
    return _OPEN
