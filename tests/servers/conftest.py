"""Servers for the tests of this folder, those that were chosen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from .every import CHOSEN, SERVERS
from .server import Missing, Server


@pytest.fixture(scope="session", params=CHOSEN)
def server(request: Any, short_pauses: None) -> Iterator[Server]:
    (kind,) = (kind for kind in SERVERS if kind.name == request.param)
    try:
        kind.check()
    except Missing as error:
        pytest.skip(f"{kind}: {error}")
    with kind.run() as running:
        yield running
