"""What lies where checkpoints were looked for, but is none of ours: told, not passed over."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dtckpt.errors import NotCommitted
from dtckpt.logs import logger_of

from .manifest import MANIFEST

logger = logger_of("checkpoint")

_DCP = re.compile(r"(?:.*/)?(?:\.metadata|[^/]*\.distcp)")
_KINDS = {
    "saves that have not ended, or were killed": re.compile(
        r"[^/]+/data/[0-9a-f]{16}/\d+\.safetensors"
    ),
    "checkpoints in directories whose names do not end in a number": re.compile(
        rf"[^/]+/{MANIFEST}"
    ),
    "checkpoints further down": re.compile(rf".+/{MANIFEST}"),
    "weights of Hugging Face or torch.save": re.compile(
        r".*\.(?:safetensors|safetensors\.index\.json|bin|pt|pth|ckpt)"
    ),
    "other files": re.compile(r".*", re.DOTALL),
}
"""What it may be, by name; the first that fits."""


def tell_of_others(url: str, names: Sequence[str]) -> None:
    """Warn of what is under ``url`` in place of checkpoints, so that nobody starts anew unawares.

    Raises NotCommitted where a run could only go on with what is there.
    """
    if MANIFEST in names:
        raise NotCommitted(
            f"{url} is a checkpoint itself, not a directory of checkpoints: load it, or give the "
            "directory above it"
        )
    if (found := next(filter(_DCP.fullmatch, names), None)) is not None:
        raise NotCommitted(
            f"{url} holds checkpoints of torch.distributed.checkpoint ({found}), which dtckpt does "
            "not read. Load them with torch and save anew, or choose another directory"
        )
    seen: dict[str, list[str]] = {}
    for name in names:
        kind = next(kind for kind, pattern in _KINDS.items() if pattern.fullmatch(name))
        seen.setdefault(kind, []).append(name)
    told = [f"{kind} ({len(found)}, such as {found[0]})" for kind, found in sorted(seen.items())]
    logger.warning("%s: no committed checkpoint here, but %s", url, "; ".join(told))
