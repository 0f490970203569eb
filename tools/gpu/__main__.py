"""Checks on a machine with a GPU what cannot be seen without one.

Devices, streams, NCCL, random numbers, backward passes, graphs, staging, copies and speed. Run
``make gpu-check`` or ``python -m tools.gpu``. It makes a process group of one rank, saves and
loads over it, and compares every bit. Exits with 1 if something is wrong, with 0 if all is well or
if there is no GPU. ``--device cpu`` runs the same over Gloo on the CPU; ``--record`` writes what
was found into a file that is named after the machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.cuda.nccl
import torch.distributed as dist

from .attention import check_attention
from .ops import check_ops
from .saving import (
    TIMEOUT,
    check_async_content,
    check_group,
    check_other_device,
    check_speed,
    check_spread,
    check_staging,
)
from .setting import Finding, Setting
from .tensors import (
    check_backward,
    check_capture,
    check_collectives,
    check_device,
    check_random,
    check_streams,
    check_tensor_speed,
)

NOTHING_CHECKED = "no CUDA device: nothing checked"
CHECKS: tuple[Callable[[Setting], Finding], ...] = (
    check_group,
    check_staging,  # before other saves in the background, whose memory it would reuse
    check_async_content,
    check_spread,
    check_other_device,
    check_speed,
    check_ops,
    check_attention,
    check_device,
    check_collectives,
    check_streams,
    check_random,
    check_backward,
    check_capture,
    check_tensor_speed,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all checks, print what they found, and return the exit code."""
    options = _options(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(json.dumps({"checked": False, "reason": NOTHING_CHECKED}) if options.json
              else NOTHING_CHECKED)  # fmt: skip
        return 0
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    with tempfile.TemporaryDirectory(prefix="dtckpt-gpu-", dir=options.folder) as folder:
        setting = Setting(
            device=device, mib=options.mib, rounds=options.rounds, folder=Path(folder)
        )
        with _group_of_one(device, Path(folder)):
            machine = _machine(device)
            if not options.json:
                print("\n".join(f"{name}: {value}" for name, value in machine.items()))
            findings: list[Finding] = []
            for check in CHECKS:
                findings.append(_run(check, setting))
                if not options.json:
                    print(_text(findings[-1]), flush=True)
    num_wrong = sum(bool(finding.problems) for finding in findings)
    told = {"checked": True, "machine": machine, "num_wrong": num_wrong}
    text = json.dumps(told | {"findings": [asdict(finding) for finding in findings]}, indent=2)
    if options.record:
        _record(Path(options.record), machine, text)
    if options.json:
        print(text)
    else:
        print(f"\n{num_wrong} of {len(findings)} checks found something wrong"
              if num_wrong else f"\nall {len(findings)} checks found everything right")  # fmt: skip
    return 1 if num_wrong else 0


def _record(folder: Path, machine: dict[str, str], text: str) -> None:
    name = re.sub(r"[^a-z0-9]+", "-", f"{machine['host']} {machine['device']}".lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(f"{text}\n")


def _run(check: Callable[[Setting], Finding], setting: Setting) -> Finding:
    """Run one check; one that breaks off is a finding, too, so that the others still run."""
    try:
        return check(setting)
    except Exception as error:
        told = f"it broke off: {type(error).__name__}: {error}"
        return Finding(name=str(check.__doc__).partition("\n")[0], problems=(told,))


@contextmanager
def _group_of_one(device: torch.device, folder: Path) -> Generator[None]:
    """Make the default process group, of this process alone: NCCL for a GPU, Gloo for the CPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=0,
        world_size=1,
        timeout=TIMEOUT,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _machine(device: torch.device) -> dict[str, str]:
    found = {
        "host": platform.node(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        found["device"] = f"{torch.cuda.get_device_name(device)}, {memory / 2**30:.0f} GiB"
        found["cuda"] = str(torch.version.cuda)
        nccl: Any = torch.cuda.nccl  # pyright: ignore[reportAttributeAccessIssue]
        found["nccl"] = ".".join(map(str, nccl.version()))
    else:
        found["device"] = platform.machine()
    return found


def _text(finding: Finding) -> str:
    lines = [f"{'WRONG' if finding.problems else 'right'}  {finding.name}"]
    lines += [f"         {problem}" for problem in finding.problems[:20]]
    lines += [f"       {note}" for note in finding.notes]
    lines += [f"       {name}: {value:.2f}" for name, value in finding.numbers.items()]
    return "\n".join(lines)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    parser.add_argument("--mib", type=int, default=2048, help="size of the state that is timed")
    parser.add_argument("--rounds", type=int, default=3, help="times that a save is timed")
    parser.add_argument("--record", help="a folder for a file of what was found on this machine")
    parser.add_argument("--folder", help="where to write; by default where temporary files go")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
