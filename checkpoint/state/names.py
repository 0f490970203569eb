"""Names of leaves: the path through the state dict as one readable, unambiguous string.

Components are joined by ``/``. A flat dict keeps its keys as they are, dots included
(``model.embed.weight``), a dict of dicts reads as a path (``model/embed.weight``). An integer key
is written ``#3`` and a list index ``3``. Characters that would be mistaken for structure are
percent-encoded, so different paths always have different names. The names are also the keys of
data files, where ``[`` opens the box of a part.
"""

from __future__ import annotations

from urllib.parse import unquote

_ESCAPES = str.maketrans({"%": "%25", "/": "%2F", "[": "%5B"})

Path = tuple[str, ...]
"""Encoded components."""


def key_component(key: str | int) -> str:
    """Return the component of a dict key.

    >>> key_component("layers.0.weight"), key_component("a/b"), key_component(3)
    ('layers.0.weight', 'a%2Fb', '#3')
    """
    if isinstance(key, int):
        return f"#{key}"
    if key[:1] not in "#@_" and "/" not in key and "%" not in key and "[" not in key:
        return key  # nearly all, of which there may be very many
    text = key.translate(_ESCAPES)
    if text[:1] in ("#", "@"):
        return f"%{ord(text[0]):02X}{text[1:]}"
    # "__metadata__" and "__dtckpt..." are taken in data files; an empty key would be invisible.
    if text == "__metadata__" or text.startswith("__dtckpt"):
        return f"%5F{text[1:]}"
    return text or "%"


def key_of(component: str) -> str | int:
    """Return the dict key of a component; that of a position in a list is taken for a str key.

    >>> [key_of(key_component(key)) for key in ("a/b", "%2F", "#1", 1, "", "__metadata__")]
    ['a/b', '%2F', '#1', 1, '', '__metadata__']
    """
    if component[:1] == "#":
        return int(component[1:])
    if "%" not in component:
        return component
    return "" if component == "%" else unquote(component)


def index_component(index: int) -> str:
    """Return the component of a position in a list or tuple."""
    return str(index)


def rank_component(rank: int) -> str:
    """Return the component of the value that one rank keeps for itself."""
    return f"@{rank}"


def join(path: Path) -> str:
    """Return the name of a path.

    >>> join(("model", "embed.weight"))
    'model/embed.weight'
    """
    return "/".join(path)


def is_encodable(name: str) -> bool:
    """Whether a name has a form in UTF-8, as data files need it.

    >>> is_encodable("w"), is_encodable("w" + chr(0xD800))
    (True, False)
    """
    if name.isascii():
        return True
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
