"""Azurite, Microsoft's emulator of Azure's blobs, by npm."""

from __future__ import annotations

import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from shutil import which
from typing import Any

from .server import CACHE, Missing, Server, free_port, leashed, scratch, wait_for

VERSION = "3.37.0"
_FOLDER = CACHE / f"azurite-{VERSION}"
PROGRAM = _FOLDER / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
_CONTAINER = "dtckpt-tests"
# Known to everybody: all emulators have this account.
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def install() -> None:
    """Bring the program; Missing if npm does not."""
    if which("node") is None or which("npm") is None:
        raise Missing("neither node nor npm is installed")
    _FOLDER.mkdir(parents=True, exist_ok=True)
    command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(_FOLDER)]
    done = subprocess.run(
        [*command, f"azurite@{VERSION}"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Missing(f"npm does not bring azurite: {done.stderr[-300:]}")


@dataclass(frozen=True, slots=True)
class RawContainer:
    """What is below a prefix of a container."""

    client: Any
    prefix: str

    def put(self, name: str, data: bytes) -> None:
        self.client.upload_blob(f"{self.prefix}/{name}", data, overwrite=True)

    def get(self, name: str) -> bytes | None:
        """``None`` if nothing has this name."""
        from azure.core.exceptions import ResourceNotFoundError

        try:
            return self.client.download_blob(f"{self.prefix}/{name}").readall()
        except ResourceNotFoundError:
            return None


@contextmanager
def azurite() -> Generator[Server]:
    """Serve from a process during the block."""
    from azure.storage.blob import BlobServiceClient

    port = free_port()
    endpoint = f"http://127.0.0.1:{port}/{_ACCOUNT}"
    line = (
        f"DefaultEndpointsProtocol=http;AccountName={_ACCOUNT};AccountKey={_KEY};"
        f"BlobEndpoint={endpoint};"
    )
    program = ["node", str(PROGRAM), "--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    place = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence"]
    with scratch("azurite") as folder, leashed([*program, *place], folder) as running:
        wait_for(port, running, folder)
        with BlobServiceClient.from_connection_string(line) as service:
            client = service.create_container(_CONTAINER)
            yield Server(
                name="azurite",
                url=f"az://{_CONTAINER}",
                storage_options={"connection_string": line},
                raw=lambda prefix: RawContainer(client, prefix),
            )
