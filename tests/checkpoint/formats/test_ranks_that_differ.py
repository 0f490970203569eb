"""Ranks that do not see the same files of another program: all fail alike, and nothing hangs."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import save_file

import dtckpt.checkpoint as ckpt
from dtckpt.dtensor import Shard, distribute_tensor
from dtckpt.errors import CheckpointError, DtckptError, ObjectNotFound, StorageError
from dtckpt.storage import open_store
from dtckpt.storage.base import Store
from dtckpt.storage.testing.faults import Call, Fault, RaiseError
from dtckpt.storage.testing.faulty import FaultyStore

from ...dtensor.rank_meshes import run_on_mesh
from .test_dcp_layouts import compressed

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own

FULL = torch.arange(64.0).view(8, 8)


def of_dcp(place: Path) -> str:
    torch_dcp.save({"w": FULL}, checkpoint_id=place, no_dist=True)
    return "__0_0.distcp"


def of_dcp_compressed(place: Path) -> str:
    torch_dcp.save({"w": FULL}, storage_writer=compressed(place), no_dist=True)
    return "__0_0.distcp"


def of_hugging_face(place: Path) -> str:
    place.mkdir()
    save_file({"w": FULL}, place / "model.safetensors")
    return "model.safetensors"


def of_torch_save(place: Path) -> str:
    place.mkdir()
    torch.save({"w": FULL}, place / "pytorch_model.bin")
    return "pytorch_model.bin"


KINDS: list[Callable[[Path], str]] = [of_dcp, of_dcp_compressed, of_hugging_face, of_torch_save]


@pytest.mark.parametrize("op", ["stat", "read"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_one_rank_does_not_find(
    tmp_path: Path, kind: Callable[[Path], str], op: str
) -> None:
    file = kind(tmp_path / "given")

    def missing(call: Call) -> Fault | None:
        is_it = call.op.startswith(op) and call.name == file
        return RaiseError(ObjectNotFound(f"no {file} here")) if is_it else None

    def body(mesh: Any) -> tuple[type[BaseException], str]:
        inner = open_store(tmp_path / "given")
        store: Store = FaultyStore(inner, missing) if mesh.get_rank() == 1 else inner
        into = {"w": distribute_tensor(torch.zeros(8, 8), mesh, [Shard(0)])}
        with pytest.raises(DtckptError) as caught:
            ckpt.load(into, store, process_group=mesh.get_group())
        assert into["w"].full_tensor().count_nonzero() == 0 or op == "read"
        return type(caught.value), str(caught.value)

    kinds, messages = zip(*run_on_mesh((2,), body), strict=True)
    assert len(set(kinds)) == 1
    assert issubclass(kinds[0], CheckpointError | StorageError)
    assert all(file in message for message in messages)
