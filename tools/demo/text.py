"""Real text to train on, without a download, and batches that do not depend on who trains."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

_ROOT = Path(__file__).resolve().parents[2]


def find_texts(root: Path = _ROOT) -> list[Path]:
    """Return the repository's documentation, where there is one, and Python's own sources."""
    documents = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return [path for path in (*documents, *sources) if path.is_file()]


def write_corpus(texts: list[Path], target: Path) -> int:
    """Join texts into one file and return its size."""
    data = b"\n\n".join(path.read_bytes() for path in texts)
    target.write_bytes(data)
    return len(data)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of bytes and the bytes that follow each of them."""

    inputs: torch.Tensor
    targets: torch.Tensor

    def share(self, index: int, count: int) -> Batch:
        """Return the rows of part ``index`` of ``count``; together the parts are the batch."""
        rows = len(self.inputs)
        part = slice(index * rows // count, (index + 1) * rows // count)
        return Batch(self.inputs[part], self.targets[part])


class Corpus:
    """Text as bytes, cut into batches. A batch is a function of the step and nothing else."""

    def __init__(self, data: bytes) -> None:
        self._bytes = np.frombuffer(data, dtype=np.uint8)

    def batch(self, step: int, *, rows: int, context: int) -> Batch:
        """Return the batch of a step: ``rows`` passages of ``context`` bytes from random places."""
        places = np.random.default_rng(step).integers(0, len(self._bytes) - context, size=rows)
        windows = self._bytes[places[:, None] + np.arange(context + 1)]
        passages = torch.from_numpy(windows.astype(np.int64))
        return Batch(passages[:, :-1], passages[:, 1:])
