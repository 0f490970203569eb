"""One plain safetensors file per rank, without a checksum or any agreement between ranks."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from ..folders import sync_files
from ..state import State


class SafetensorsFiles:
    """``save_file`` and fsync; ``safe_open`` and a copy into the tensors that are there."""

    name = "safetensors"

    def save(self, state: State, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        file = path / f"{state.rank}.safetensors"
        save_file(state.locals, file)
        sync_files(file)

    def load(self, state: State, path: Path) -> None:
        with safe_open(path / f"{state.rank}.safetensors", framework="pt") as file:
            for name, tensor in state.locals.items():
                tensor.copy_(file.get_tensor(name))
