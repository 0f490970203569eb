"""Files of ranks, found by their names.

verl 0.9 saves ``model_world_size_4_rank_0.pt`` and so on (verl/utils/checkpoint/
fsdp_checkpoint_manager.py), accelerate 1.15 with ``use_dcp=False`` ``pytorch_model_fsdp_rank0.bin``
(accelerate/utils/fsdp_utils.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from dtckpt.errors import Corrupt

from ....storage.base import Store
from ..names import OF_ACCELERATE, OF_TORCH_CHECKPOINTING, OF_VERL

TORCH_CHECKPOINTING = "metadata.pkl"
"""Its file that says what there is."""
ITEM_OF_RANK = re.compile(r"(?P<item>[A-Za-z0-9_-]+)_(?P<rank>\d{1,9})\.pt")
"""Names that torch_checkpointing gives where nobody asks for others."""


class RankFile(NamedTuple):
    """What a rank has saved of an item."""

    item: str
    """Key in the state."""
    rank: int
    name: str
    """Of the file, in the store."""
    layouts: Mapping[str, Any] = MappingProxyType({})
    """What is told beside the file of tensors in it, by path."""


class FilesOfRanks(NamedTuple):
    """The files of all ranks, of each item those of one rank after the other."""

    kind: str
    """The format."""
    files: list[RankFile]
    others: tuple[str, ...] = ()
    """Names of files that are passed over."""
    are_guessed: bool = False
    """Whether names alone tell nothing: they may be of epochs instead of ranks."""


class _Pattern(NamedTuple):
    kind: str
    """The format."""
    names: re.Pattern[str]
    """Groups ``item``, ``rank`` and, where names tell how many ranks there are, ``size``."""


_PATTERNS = (
    _Pattern(
        OF_VERL,
        re.compile(
            r"(?P<item>model|optim|extra_state)_world_size_(?P<size>\d{1,9})"
            r"_rank_(?P<rank>\d{1,9})\.pt"
        ),
    ),
    _Pattern(
        OF_ACCELERATE,
        re.compile(
            r"(?P<item>(?:pytorch_model_fsdp|optimizer)(?:_\d{1,9})?)_rank(?P<rank>\d{1,9})\.bin"
        ),
    ),
)

_BESIDE = {"fsdp_config.json", "huggingface", "lora_train_meta.json"}
"""What verl writes beside its files of ranks, with no state of a training in it."""


def find(store: Store, names: Sequence[str]) -> FilesOfRanks | None:
    """Return which of the names in a store are files of ranks; None where none is.

    Raises Corrupt where there are some, but not those of all ranks of one run.
    """
    for pattern in _PATTERNS:
        matches = [match for match in map(pattern.names.fullmatch, sorted(names)) if match]
        if not matches:
            continue
        size = _world_size(store, matches)
        items = dict.fromkeys(match["item"] for match in matches)
        files = {(match["item"], int(match["rank"])): match[0] for match in matches}
        for item in items:
            missing = next((r for r in range(size) if (item, r) not in files), None)
            if missing is not None:
                some = next(match[0] for match in matches if match["item"] == item)
                raise Corrupt(
                    f"{store.url}: {size} ranks have saved {item!r} ({some}, ...), but the file of "
                    f"rank {missing} is missing. Fetch it from the machine of that rank"
                )
        ordered = [RankFile(i, r, files[i, r]) for i in items for r in range(size)]
        return FilesOfRanks(pattern.kind, ordered, _others(names, ordered))
    return _guessed(names)


def _others(names: Sequence[str], files: Sequence[RankFile]) -> tuple[str, ...]:
    return tuple(sorted(set(names) - {file.name for file in files} - _BESIDE))


_OF_STEPS = re.compile(
    r"(?i)(?:.*[_-])?(?:epoch|step|steps|iter|iters|iteration|ckpt|checkpoint|version|round|best|last)"
)
"""What files of a run are called that are of its steps, not of ranks."""


def _guessed(names: Sequence[str]) -> FilesOfRanks | None:
    """Return the files that torch_checkpointing may have written without telling of them."""
    matches = [match for match in map(ITEM_OF_RANK.fullmatch, sorted(names)) if match]
    if len(matches) == 1 and _OF_STEPS.fullmatch(matches[0]["item"]):
        return None
    ranks = {(match["item"], int(match["rank"])): match[0] for match in matches}
    items = dict.fromkeys(item for item, _ in ranks)
    size = 1 + max((rank for _, rank in ranks), default=0)
    each = {item: sorted(rank for i, rank in ranks if i == item) for item in items}
    # An item may be of the first rank alone.
    if not matches or any(found not in ([0], list(range(size))) for found in each.values()):
        return None
    files = [RankFile(item, rank, ranks[item, rank]) for item in items for rank in each[item]]
    others = _others(names, files)
    return FilesOfRanks(OF_TORCH_CHECKPOINTING, files, others, are_guessed=size > 1)


def _world_size(store: Store, matches: Sequence[re.Match[str]]) -> int:
    """Return how many ranks have saved; Corrupt where files are of several runs."""
    if "size" not in matches[0].re.groupindex:
        return 1 + max(int(match["rank"]) for match in matches)
    sizes = {int(match["size"]): match[0] for match in matches}
    if len(sizes) > 1:
        raise Corrupt(
            f"{store.url}: files of {' and of '.join(map(str, sorted(sizes)))} ranks lie side by "
            f"side ({', '.join(sizes.values())}), of different saves. Remove those that are not "
            "meant"
        )
    return sizes.popitem()[0]
