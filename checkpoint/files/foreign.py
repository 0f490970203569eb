"""What lies where checkpoints were looked for, but is none of ours: told, not passed over."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import islice

from dtckpt.errors import NotCommitted
from dtckpt.logs import logger_of

from ...storage.base import Store
from .places import MANIFEST

ENDINGS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
"""How files of tensors end that are opened by themselves."""

logger = logger_of("checkpoint")

_DCP = re.compile(r"(?:.*/)?(?:\.metadata|[^/]*\.distcp)")
_HUGGING_FACE = ("tf_model.h5", "flax_model.msgpack")
_OF_EACH_RANK = "__0.metadata"
_FEW_CHECKPOINTS = 3
_MOST_ENTRIES = 10_000
_KINDS = {
    "saves that have not ended, or were killed": re.compile(
        r"[^/]+/data/[0-9a-f]{16}/\d+\.(?:safetensors|compressed)"
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
            f"{url} holds checkpoints of torch.distributed.checkpoint ({found}), of which no steps "
            "are counted: load one by its path, or choose another directory"
        )
    seen: dict[str, list[str]] = {}
    for name in names:
        kind = next(kind for kind, pattern in _KINDS.items() if pattern.fullmatch(name))
        seen.setdefault(kind, []).append(name)
    told = [f"{kind} ({len(found)}, such as {found[0]})" for kind, found in sorted(seen.items())]
    logger.warning("%s: no committed checkpoint here, but %s", url, "; ".join(told))


def what_is_there(store: Store) -> str:
    """Return what a place without a manifest holds, and what to do, for an error message.

    Looks for a few names only, since it may be the root of anything. StorageError where the storage
    says that there is no such place at all, as for a bucket that does not exist.
    """
    url = store.url
    is_local = os.path.isabs(url)
    if is_local and not os.path.isdir(url):
        what = "is not a directory" if os.path.lexists(url) else "does not exist"
        return f"{url}: no committed checkpoint here: {url} {what}. Check the path"
    if not is_local:
        next(store.list("data/none"), None)  # which a bucket that does not exist refuses
    found = next(filter(store.exists, _HUGGING_FACE), None)
    if found is not None:
        return (
            f"{url}: no checkpoint of dtckpt here, but weights as Hugging Face saves them "
            f"({found}), of which dtckpt reads those of torch and safetensors. Load them by "
            "from_pretrained of their library and save anew"
        )
    if store.exists(_OF_EACH_RANK):
        return (
            f"{url}: {_OF_EACH_RANK} here, as torch.distributed.checkpoint saves it with "
            "use_collectives=False: nothing tells what the ranks have together. Load it with torch "
            "on as many ranks and save anew"
        )
    steps = _checkpoints_in(url) if is_local else []
    if steps:
        more = f" and {len(steps) - _FEW_CHECKPOINTS} more" if steps[_FEW_CHECKPOINTS:] else ""
        first = ", ".join(steps[:_FEW_CHECKPOINTS])
        return (
            f"{url} is no checkpoint, but a directory of them: {first}{more}. Give the path of one "
            "of them; dtckpt.checkpoint.latest finds the newest"
        )
    files = _files_in(url) if is_local else []
    if files:
        return (
            f"{url}: no checkpoint of a known form here, but files of tensors "
            f"({', '.join(files[:_FEW_CHECKPOINTS])}). Give the path of one of them"
        )
    return nothing_there(store)


def nothing_there(store: Store) -> str:
    """Return that a place has no manifest."""
    return (
        f"{store.url}: no committed checkpoint here ({MANIFEST} is missing). Either nothing was "
        "saved to this place, or a save did not finish; load another checkpoint"
    )


def _names_in(directory: str) -> list[str]:
    """Return names directly under a local directory, not all of them where there are very many."""
    try:
        with os.scandir(directory) as entries:
            return sorted(entry.name for entry in islice(entries, _MOST_ENTRIES))
    except OSError:
        return []


def _files_in(directory: str) -> list[str]:
    """Return the names of files that may hold tensors and are opened by their own paths."""
    return [name for name in _names_in(directory) if name.lower().endswith(ENDINGS)]


def _checkpoints_in(directory: str) -> list[str]:
    """Return the names of checkpoints directly under a local directory."""
    names = _names_in(directory)
    return [name for name in names if os.path.isfile(os.path.join(directory, name, MANIFEST))]
