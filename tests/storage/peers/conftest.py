"""Sockets and locks of agents in a directory of the tests, where nothing may stay behind."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtckpt.storage import start_agent, stop_agent
from dtckpt.storage.peers import job

from ...waiting import wait_for


@pytest.fixture(scope="module", autouse=True)
def agent_folder() -> Iterator[Path]:
    """Checks that no agent, no file of one and nothing in /dev/shm is left."""
    before = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name) / "agents"
        patch.setenv(job.FOLDER, str(folder))
        for variable in (job.AGENTS, job.REGISTRY, job.TOKEN, job.TOKEN_FILE, job.HOST):
            patch.delenv(variable, raising=False)
        yield folder
        start_agent("last")  # which takes away what those have left that were killed
        stop_agent("last")
        left = sorted(path.name for path in folder.glob("*") if path.suffix != ".token")
        assert left == []
    wait_for(lambda: set(os.listdir("/dev/shm")) <= before)  # other tests have some for a while
