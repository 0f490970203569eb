"""One plain safetensors file per rank, without a checksum or any agreement between ranks."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..folders import sync_files
from ..state import ShardedState


class SafetensorsFiles:
    """``save_file`` and fsync; ``safe_open`` and a copy into the tensors that are there."""

    name = "safetensors"

    def save(self, state: ShardedState, path: Path) -> None:
        """Write this rank's shards to its own file."""
        _save(state.locals, path, state.mesh.get_local_rank())

    def load(self, state: ShardedState, path: Path) -> None:
        """Read this rank's shards from its own file."""
        _load(state.locals, path, state.mesh.get_local_rank())

    def save_plain(self, tensors: dict[str, Tensor], path: Path) -> None:
        """Write one file."""
        _save(tensors, path, 0)

    def load_plain(self, tensors: dict[str, Tensor], path: Path) -> None:
        """Read one file."""
        _load(tensors, path, 0)


def _save(tensors: dict[str, Tensor], path: Path, rank: int) -> None:
    path.mkdir(parents=True, exist_ok=True)
    file = path / f"{rank}.safetensors"
    save_file(tensors, file)
    sync_files(file)


def _load(tensors: dict[str, Tensor], path: Path, rank: int) -> None:
    with safe_open(path / f"{rank}.safetensors", framework="pt") as file:
        for name, tensor in tensors.items():
            tensor.copy_(file.get_tensor(name))
