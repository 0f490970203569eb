"""Servers for the tests of this folder, those that were chosen."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from .every import CHOSEN, SERVERS
from .server import Missing, Server


@pytest.fixture(scope="session", params=CHOSEN)
def running(request: Any, short_pauses: None) -> Iterator[Server]:
    """A server, once for all tests."""
    (kind,) = (kind for kind in SERVERS if kind.name == request.param)
    try:
        kind.check()
    except Missing as error:
        pytest.skip(f"{kind}: {error}")
    with kind.run() as running:
        yield running


@pytest.fixture(scope="session", params=["fsspec", "obstore"])
def server(request: Any, running: Server) -> Server:
    """A server, and the engine by which our stores reach it."""
    if request.param == "obstore" and find_spec("obstore") is None:
        pytest.skip("pip install obstore")
    return running.by(request.param)
