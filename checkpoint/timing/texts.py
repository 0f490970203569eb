"""Seconds, bytes and rates in a few characters, and columns of them."""

from __future__ import annotations

from collections.abc import Sequence

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")


def duration(seconds: float) -> str:
    """Return seconds with three digits that count, in 9 characters at most.

    >>> duration(0.00042), duration(0.0314), duration(2.5), duration(754), duration(86400)
    ('0.420 ms', '31.4 ms', '2.50 s', '754 s', '24.0 h')
    """
    if seconds < 1:
        return f"{_digits(seconds * 1e3)} ms"
    return f"{_digits(seconds)} s" if seconds < 3600 else f"{_digits(seconds / 3600)} h"


def amount(num_bytes: float) -> str:
    """Return bytes in units of a thousand, in 8 characters at most; nothing for none.

    >>> amount(0), amount(999), amount(1_500_000)
    ('', '999 B', '1.50 MB')
    """
    if num_bytes <= 0:
        return ""
    value, unit = float(num_bytes), 0
    while value >= 999.5 and unit + 1 < len(_UNITS):
        value, unit = value / 1000, unit + 1
    return f"{_digits(value) if unit else round(value)} {_UNITS[unit]}"


def rate(bytes_per_second: float) -> str:
    """Return bytes a second.

    >>> rate(2.5e9), rate(0)
    ('2.50 GB/s', '')
    """
    return f"{amount(bytes_per_second)}/s" if bytes_per_second > 0 else ""


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines of aligned columns, the first to the left and the others to the right.

    >>> table([("a", "bytes"), ("long", "1 B")])
    ['a    bytes', 'long   1 B']
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        " ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _digits(value: float) -> str:
    for decimals, limit in ((3, 0.9995), (2, 9.995), (1, 99.95)):
        if value < limit:
            return f"{value:.{decimals}f}"
    return f"{value:.0f}"
