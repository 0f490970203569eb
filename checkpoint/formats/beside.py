"""What lies beside the files that are read, and what was left out of them: told, not dropped.

Both stand in the metadata of the manifest, which ``inspect`` shows and conversions keep; who opens
a checkpoint is warned, and ``verify`` tells it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dtckpt.errors import StorageError

from ...storage.base import Store
from ..files.manifest import Manifest
from ..state.limits import shown
from .files import names_in
from .names import OF_MEGATRON

PASSED_OVER, LEFT_OUT, UNSURE = "passed_over", "left_out", "unsure"
"""Keys of metadata: names of files, names of values with why, and what nothing tells."""

_MOST_SHOWN = 8
_NO_STATE = re.compile(
    r"(?i)\..*|(?:licen[cs]e|notice|readme|changelog|dockerfile|makefile|merges|vocab)[^/]*"
    r"|(?!trainer_state\.json$)(?!metadata\.json$).*\.(?:json|jsonl|md|txt|rst|ya?ml|toml|cfg|ini"
    r"|model|spm|tiktoken|py|pyc|sh|jinja2?|html|css|js|png|jpe?g|gif|svg|pdf|csv|tsv|log|lock"
    r"|xml|onnx|index\.json|done|complete)|events\.out\..*|tf_model\.h5|flax_model\.msgpack"
)
"""Names of files and folders with no state of a training in them: texts, settings, tokenizers."""
_NO_FOLDERS = re.compile(r"(?i)\..*|runs|logs|wandb|tensorboard|onnx|openvino|__pycache__|assets")


def beside(
    store: Store, read: Collection[str], *, also: re.Pattern[str] | None = None
) -> list[str]:
    """Return the names in a store that may hold some state, and are not among those that are read.

    ``also`` fits names of the same in another form. Nothing where the store does not list.
    """
    try:
        if os.path.isabs(store.url):
            names = names_in(store)
            folders = {name for name in names if os.path.isdir(os.path.join(store.url, name))}
        else:
            level = store.level()
            folders = set(level.folders)
            names = [*(info.name for info in level.objects), *folders]
    except StorageError:
        return []
    found: list[str] = []
    first_parts = {name.partition("/")[0] for name in read}
    for name in sorted(set(names) - first_parts):
        is_folder = name in folders
        if (_NO_FOLDERS if is_folder else _NO_STATE).fullmatch(name):
            continue
        if also is None or not also.fullmatch(name):
            found.append(f"{name}/" if is_folder else name)
    return found


def with_notes(
    manifest: Manifest,
    *,
    passed_over: Sequence[str] = (),
    left_out: Mapping[str, str] | None = None,
    unsure: str = "",
) -> Manifest:
    """Return a manifest that tells in its metadata what is not in it."""
    told: dict[str, Any] = {}
    if passed_over:
        told[PASSED_OVER] = list(passed_over)
    if left_out:
        told[LEFT_OUT] = dict(left_out)
    if unsure:
        told[UNSURE] = unsure
    if not told:
        return manifest
    return replace(manifest, metadata=(manifest.metadata or {}) | told)


def left_out_of(manifest: Manifest) -> dict[str, str]:
    """Return what was left out of a manifest, by name, with why."""
    found = manifest.metadata.get(LEFT_OUT) if isinstance(manifest.metadata, dict) else None
    return found if isinstance(found, dict) else {}


def notes_of(manifest: Manifest) -> list[str]:
    """Return what users are told of a manifest of another program's files: what is not in it."""
    told = manifest.metadata
    if manifest.is_ours or not isinstance(told, dict):
        return []
    notes: list[str] = []
    if isinstance(names := told.get(PASSED_OVER), list) and names:
        notes.append(f"passed over {_some(names)}, which may be opened by their own paths")
    if left_out := left_out_of(manifest):
        which = "objects of Megatron: " if manifest.format == OF_MEGATRON else ""
        notes.append("left out " + which + _some([f"{n} ({w})" for n, w in left_out.items()]))
    if isinstance(unsure := told.get(UNSURE), str) and unsure:
        notes.append(unsure)
    return notes


def _some(names: Sequence[Any]) -> str:
    more = f" and {len(names) - _MOST_SHOWN:,} more" if names[_MOST_SHOWN:] else ""
    return ", ".join(str(name) for name in names[:_MOST_SHOWN]) + more


def not_there(manifest: Manifest, name: str) -> str:
    """Return why a name is not in a manifest, if it was left out; an empty text otherwise."""
    left_out = left_out_of(manifest)
    for left, why in left_out.items():
        if name == left or name.startswith(f"{left}/") or left.startswith(f"{name}/"):
            return f"{shown(left)} was left out: {why}"
    return ""
