"""Text that comes from elsewhere, made safe to print."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""Return text that cannot steer a terminal.

    >>> printable("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
