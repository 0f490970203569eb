"""One HTML page of a document, with everything in it that it needs."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from importlib.resources import files
from importlib.util import find_spec
from typing import Any, Literal

import dtckpt
from dtckpt.errors import StorageError

from ..common.console import printable

Kind = Literal["checkpoint", "run"]

_MAX_INT = 1 << 53
"""Beyond it JavaScript rounds."""


def check_library() -> None:
    """Raise StorageError, with what to install, where the library that draws charts is missing."""
    if find_spec("plotly") is None:
        raise StorageError(
            None, 'pages need plotly, which is not installed: pip install "dtckpt[report]"'
        )


def page_of(kind: Kind, document: dict[str, Any]) -> str:
    """Return the HTML of a page that needs no other file and no network."""
    from jinja2 import Environment
    from plotly.offline import get_plotlyjs

    url = printable(document["url"])
    template = Environment(autoescape=True).from_string(_file("page.html"))
    return template.render(
        version=dtckpt.__version__,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        title=f"{url.rstrip('/').rpartition('/')[2]} - dtckpt",
        kind=kind,
        heading="Checkpoint" if kind == "checkpoint" else "Run",
        url=url,
        style=_markup(_file("page.css")),
        data=_markup(_json(document)),
        common=_markup(_file("common.js")),
        code=_markup(_file(f"{kind}.js")),
        plotly=_markup(get_plotlyjs()),
    )


def _file(name: str) -> str:
    return files("dtckpt.tools.cli.report").joinpath(name).read_text("utf-8")


def _markup(text: str) -> Any:
    from markupsafe import Markup

    return Markup(text)


def _json(document: dict[str, Any]) -> str:
    """Return JSON that can stand in a script element, whatever names are in it."""
    text = json.dumps(_safe(document), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _safe(value: Any) -> Any:
    """Return a value in which numbers that JSON, or JavaScript, does not have are texts."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and abs(value) > _MAX_INT:
        return str(value)
    if isinstance(value, dict):
        return {key: _safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_safe(item) for item in value]
    return value
