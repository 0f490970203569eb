"""What lies where checkpoints were looked for, but is none of ours: told, not passed over."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import islice

from dtckpt.errors import NotCommitted
from dtckpt.logs import logger_of

from ...storage.base import Level, Store
from .places import DATA, MANIFEST, RECORDS

ENDINGS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
"""How files of tensors end that are opened by themselves."""

logger = logger_of("checkpoint")

_DCP = re.compile(r"(?:.*/)?(?:\.metadata|[^/]*\.distcp)")
_HUGGING_FACE = ("tf_model.h5", "flax_model.msgpack")
_OF_EACH_RANK = "__0.metadata"
_FEW_CHECKPOINTS = 3
_FEW_ASKED = 4
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
        return f"{url}: no committed checkpoint here: {url} {what}. Check the path{_near(url)}"
    level = store.level()  # which a bucket that does not exist refuses
    if not level.objects and not level.folders:
        return (
            f"{url}: no committed checkpoint here, nor anything else: "
            + ("the directory is empty" if is_local else "no object has a name that begins so")
            + ". Check the path"
        )
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
    steps = _checkpoints_in(store, level)
    if steps:
        return (
            f"{url} is no checkpoint, but a directory of them: {_first(steps)}. Give the path of "
            "one of them; dtckpt.checkpoint.latest finds the newest, dtckpt ls lists them"
        )
    files = [info.name for info in level.objects if info.name.lower().endswith(ENDINGS)]
    if files:
        return (
            f"{url}: no checkpoint of a known form here, but files of tensors "
            f"({', '.join(files[:_FEW_CHECKPOINTS])}). Give the path of one of them"
        )
    if is_begun(level):
        return nothing_there(store)
    runs = [name for name in _some(level.folders) if _is_run(store.substore(name))]
    if runs:
        return (
            f"{url} is no checkpoint, but above directories of them: {', '.join(runs)}. dtckpt ls "
            "lists those in one of these directories; give the path of a checkpoint"
        )
    names = [f"{name}/" for name in level.folders] + [info.name for info in level.objects]
    return f"{url}: no checkpoint of a known form here, but {_first(names)}. Check the path"


def nothing_there(store: Store) -> str:
    """Return that a place has no manifest."""
    return (
        f"{store.url}: no committed checkpoint here ({MANIFEST} is missing). Either nothing was "
        "saved to this place, or a save did not finish; load another checkpoint"
    )


def is_begun(level: Level) -> bool:
    """Whether somebody has begun to save or to delete a checkpoint where this was listed."""
    has_folder = any(name in (DATA, RECORDS) for name in level.folders)
    return has_folder or any(_DCP.fullmatch(info.name) for info in level.objects)


def _checkpoints_in(store: Store, level: Level, num_asked: int = _FEW_ASKED) -> list[str]:
    """Return the names of checkpoints directly below, asked for a few from either end only."""
    names = [name for name in level.folders if name != DATA]
    some = _some(names, num_asked)
    found = [name for name in some if store.exists(f"{name}/{MANIFEST}")]
    return names if len(found) == len(some) else found


def _is_run(store: Store) -> bool:
    return bool(_checkpoints_in(store, store.level(), num_asked=1))


def _some(names: Sequence[str], num_each: int = _FEW_ASKED) -> list[str]:
    """Return a few names from either end."""
    return [*dict.fromkeys((*names[:num_each], *names[-num_each:]))]


def _first(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - _FEW_CHECKPOINTS:,} more" if names[_FEW_CHECKPOINTS:] else ""
    return ", ".join(names[:_FEW_CHECKPOINTS]) + more


def _near(path: str) -> str:
    """Return what is beside a local path that does not exist, for an error message."""
    folder, name = os.path.split(path)
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in islice(entries, _MOST_ENTRIES))
    except OSError:
        return ""
    near = get_close_matches(name, names, _FEW_CHECKPOINTS)
    return f": beside it are {', '.join(near)}" if near else ""
