from __future__ import annotations

from pathlib import Path

import torch

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint import Verifier
from dtckpt.storage import LocalStore


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_a_file_that_several_share_is_read_once_and_its_damage_told_of_each(
    tmp_path: Path,
) -> None:
    same = torch.arange(40_000)
    dcp.save({"same": same, "w": torch.zeros(10)}, tmp_path / "step-1")
    dcp.save({"same": same, "w": torch.ones(10)}, tmp_path / "step-2", base=tmp_path / "step-1")
    alone = dcp.verify(tmp_path / "step-2")
    verifier = Verifier()
    first = verifier.verify(LocalStore(tmp_path / "step-1"))
    second = verifier.verify(LocalStore(tmp_path / "step-2"))
    assert not first.problems
    assert not second.problems
    assert second.bytes_checked == alone.bytes_checked - same.nbytes

    [lender] = tmp_path.glob("step-1/data/*/*")
    flip(lender, 4096 + 1000)
    verifier = Verifier()
    for step in ("step-1", "step-2"):
        [problem] = verifier.verify(LocalStore(tmp_path / step)).problems
        assert problem.tensors == ("same",)
        assert lender.name in problem.message


def test_damage_is_told_in_the_order_of_files_whatever_thread_finds_it(tmp_path: Path) -> None:
    dcp.save({f"w{i}": torch.rand(1 << 20) for i in range(12)}, tmp_path / "a")
    [file] = tmp_path.glob("a/data/*/*")
    for mib in (40, 3, 17, 30):
        flip(file, mib << 20)
    problems = dcp.verify(tmp_path / "a").problems
    starts = [problem.start for problem in problems]
    assert len(starts) == 4
    assert starts == sorted(starts)
    assert all(p.start <= m << 20 < p.end for p, m in zip(problems, (3, 17, 30, 40), strict=True))


def test_what_is_behind_the_end_of_a_file_is_told_and_repaired(tmp_path: Path) -> None:
    same = torch.arange(40_000)
    dcp.save({"same": same}, tmp_path / "step-1")
    dcp.save({"same": same, "w": torch.ones(10)}, tmp_path / "step-2", base=tmp_path / "step-1")
    dcp.copy(tmp_path / "step-1", tmp_path / "copy" / "step-1")
    [file] = tmp_path.glob("step-1/data/*/*")
    size = file.stat().st_size
    with file.open("ab") as stream:
        stream.write(b"more")
    for step in ("step-1", "step-2"):
        [problem] = dcp.verify(tmp_path / step).problems
        assert (problem.start, problem.end) == (size, size + 4)
        assert problem.message.startswith(f"{file}: the file has {size + 4} bytes")
    assert not dcp.repair(tmp_path / "step-1", tmp_path / "copy" / "step-1").after.problems
    assert file.stat().st_size == size
    assert not dcp.verify(tmp_path / "step-2").problems
