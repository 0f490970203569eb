"""What a test knows of a server, whatever it is."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..storage.conformance import Raw

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "dtckpt", "servers")
"""Where servers are installed that neither pip brings nor the system has."""


class Missing(Exception):
    """A server that cannot be had here, for the reason that it gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server that is running, with an empty bucket."""

    name: str
    url: str
    """Of the bucket, for our stores."""
    storage_options: dict[str, Any]
    raw: Callable[[str], Raw]
    """Leads to what is below a prefix, not by our stores."""
    obstore_options: dict[str, Any] | None = None
    """Those of obstore, where it cannot do with the same."""
    engine: str = "fsspec"

    def by(self, engine: str) -> Server:
        """Return it as another engine reaches it."""
        own = self.obstore_options if engine == "obstore" else None
        options = (self.storage_options if own is None else own) | {"engine": engine}
        return replace(self, engine=engine, storage_options=options)


def require(*modules: str) -> None:
    """Raise Missing, with the names to install, unless all modules are there."""
    if absent := [name for name in modules if find_spec(name) is None]:
        raise Missing(f"pip install {' '.join(absent)}")


def free_port() -> int:
    """Return a port of 127.0.0.1 at which nobody listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def scratch(name: str) -> Generator[Path]:
    """A directory that goes with the block, or, if this process is killed, with its leash."""
    folder = Path(tempfile.mkdtemp(prefix=f"dtckpt-{name}-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def leashed(
    command: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None
) -> Generator[subprocess.Popen[bytes]]:
    """Run a program during the block, in ``folder``; it dies with this process, however that ends.

    What it says goes to ``folder/NAME.out``.
    """
    output = folder / f"{Path(command[0]).name}.out"
    leash = [sys.executable, str(Path(__file__).with_name("leash.py")), str(folder), *command]
    with output.open("ab") as said:
        running = subprocess.Popen(
            leash,
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=said,
            cwd=folder,
            env=os.environ | (variables or {}),
            start_new_session=True,  # a signal to the group of the tests is not for it
        )
    assert running.stdin is not None
    try:
        yield running
    finally:
        running.stdin.close()
        running.wait(30)


def wait_for(
    port: int, running: subprocess.Popen[bytes], folder: Path, seconds: float = 60.0
) -> None:
    """Wait until somebody listens; RuntimeError if the program ends before, or is late."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and running.poll() is None:
        with socket.socket() as line:
            line.settimeout(1)
            if line.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    said = "\n".join(path.read_text(errors="replace")[-500:] for path in folder.glob("*.out"))
    raise RuntimeError(f"nobody listens at port {port}: {said}")
