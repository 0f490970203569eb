"""What results depend on besides the mesh: the same on all ranks, and after a resume."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

import torch

from dtckpt.errors import PlacementError

from ..comm.caches import remembered

Environment = dict[str, str]

_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_DYNAMIC",
    "MKL_ENABLE_INSTRUCTIONS",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_MAX_CPU_ISA",
)
"""By which libraries choose their kernels."""


def environment(device: torch.device) -> Environment:
    """Return, by name, what kernels choose by: always the same names for one type of device."""
    found = {
        "torch": str(torch.__version__),  # of a class of its own
        "matmul precision": torch.get_float32_matmul_precision(),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "variables": " ".join(f"{v}={os.environ[v]}" for v in _VARIABLES if v in os.environ),
    }
    if device.type == "cpu":
        found |= {
            "processor": _processor(),
            "vector instructions": torch.backends.cpu.get_cpu_capability(),
            # Kernels cut sums by threads: layer_norm, softmax and sum differ with their number.
            "threads": str(torch.get_num_threads()),
            "oneDNN": str(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled),
        }
    if device.type == "cuda":
        found |= {
            "processor": _gpu(device),
            "CUDA": f"{torch.version.cuda} {torch.version.hip}",
            "cuDNN": str(torch.backends.cudnn.version()),
            "cuDNN enabled": str(torch.backends.cudnn.enabled),
            "reductions in fp16": str(
                torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
            ),
            "reductions in bf16": str(
                torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
            ),
            "attention": " ".join(
                name
                for name, is_on in (
                    ("flash", torch.backends.cuda.flash_sdp_enabled()),
                    ("efficient", torch.backends.cuda.mem_efficient_sdp_enabled()),
                    ("math", torch.backends.cuda.math_sdp_enabled()),
                    ("cudnn", torch.backends.cuda.cudnn_sdp_enabled()),
                )
                if is_on
            ),
        }
    return found


def require_deterministic(device: torch.device) -> None:
    """Raise PlacementError where kernels may give other bits when they are run again."""
    is_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    if not torch.are_deterministic_algorithms_enabled() or is_warning:
        raise PlacementError(
            "ElasticSteps: some kernels add in whatever order threads come; call "
            "torch.use_deterministic_algorithms(True) first, and set "
            "torch.utils.deterministic.fill_uninitialized_memory = False, which costs time"
        )
    if device.type == "cuda" and torch.backends.cudnn.benchmark:
        raise PlacementError(
            "ElasticSteps: cuDNN chooses its kernels by the time they take; set "
            "torch.backends.cudnn.benchmark = False"
        )


def differences(saved: Mapping[str, str], now: Environment) -> list[str]:
    """Return what differs, in words."""
    return [
        f"{name} {saved.get(name)!r}, now {now.get(name)!r}"
        for name in dict.fromkeys((*saved, *now))
        if saved.get(name) != now.get(name)
    ]


def _gpu(device: torch.device) -> str:
    found = torch.cuda.get_device_properties(device)
    return f"{found.name}, {found.multi_processor_count} multiprocessors"


@remembered(1)
def _processor() -> str:
    """Return the model of the processor: libraries of matrix products choose by it."""
    cpuinfo = Path("/proc/cpuinfo")
    found = models_of(cpuinfo.read_text()) if cpuinfo.exists() else ""
    return f"{platform.machine()} {found or platform.processor()}"


def models_of(cpuinfo: str) -> str:
    """Return the models of processors that Linux tells of, each once; ARM's have numbers alone.

    >>> models_of("processor: 0\\nmodel name: X 1\\nprocessor: 1\\nmodel name: X 1\\n")
    'X 1'
    >>> models_of("processor: 0\\nCPU implementer: 0x41\\nCPU part: 0xd40\\n")
    '0x41 0xd40'
    """
    fields = (line.partition(":") for line in cpuinfo.splitlines())
    names = ("model name", "CPU implementer", "CPU part")
    return " ".join(
        dict.fromkeys(value.strip() for name, _, value in fields if name.strip() in names)
    )
