"""What lies where checkpoints were looked for, but is none of ours: told, not passed over."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from difflib import get_close_matches

from dtckpt.errors import NotCommitted, StorageError
from dtckpt.logs import logger_of

from ...storage.base import Level, Store
from .places import DATA, MANIFEST, RECORDS

ENDINGS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
"""How files of tensors end that are opened by themselves."""

ASKED_ENDINGS = (
    *ENDINGS,
    *(
        ".tar",
        ".gz",
        ".zst",
        ".npz",
        ".npy",
        ".pkl",
        ".pickle",
        ".jit",
        ".ptl",
        ".pt2",
        ".th",
        ".sft",
    ),
    *(
        ".model",
        ".nemo",
        ".gguf",
        ".ggml",
        ".h5",
        ".keras",
        ".msgpack",
        ".onnx",
        ".distcp",
        ".json",
    ),
)
"""How files end that are asked for where a directory may as well be meant: content tells the rest.
On local disks no ending is needed."""

logger = logger_of("checkpoint")

_DCP = re.compile(r"(?:.*/)?(?:\.metadata|[^/]*\.distcp)")
_HUGGING_FACE = ("tf_model.h5", "flax_model.msgpack")
_OF_EACH_RANK = "__0.metadata"
_FEW_CHECKPOINTS = 3
_FEW_ASKED = 4
_MOST_NAMES = 1000
_ENDS_IN_NUMBER = re.compile(r"\d+$")
_OF_OTHERS = (".metadata", "model.safetensors", "model.safetensors.index.json")
"""What a checkpoint of another program often has, to find a run of such."""
_OWN_DATA = re.compile(r"(?:.*/)?data/[0-9a-f]{16}/\d+\.(?:safetensors|compressed)")
_WEIGHTS = re.compile(
    r"(?:[^/]+/){0,2}(?:[^/]*\.(?:safetensors|safetensors\.index\.json|pt|pth|ckpt)"
    r"|[^/]*(?:model|weights|checkpoint)[^/]*\.bin)",
    re.IGNORECASE,
)
"""Files of tensors, two folders down at most: what lies deeper is of something else."""
_NUMBERED = re.compile(r"(.*?)(?:0|[1-9]\d*)")
"""A name that ends in a number, and what precedes that: "step-00" in "step-0010"."""


def check_first_start(
    store: Store, prefix: str | None = None, *, any_name: bool = False
) -> frozenset[str]:
    """Return for a run that found no checkpoint of its own: nothing here looks like one.

    Raises NotCommitted where something does, with what finds it: a run that began anew would pass
    over what it was to go on from. The names of the run are ``{prefix}{step}``, without a prefix
    anything that ends in a number, with ``any_name`` all. What saves that died have left, and other
    files, are warned of.

    Returns the names of the run's own checkpoints that are listed by now; else nothing.
    """
    level = store.level()
    if not level.objects and not level.folders:
        return frozenset()
    names = [info.name for info in store.list()]
    told = _itself(store, names)
    if not told:
        folders = [n.removesuffix(f"/{MANIFEST}") for n in names if n.endswith(f"/{MANIFEST}")]
        direct = [name for name in folders if "/" not in name]
        if own := frozenset(n for n in direct if any_name or _takes(prefix, n)):
            return own
        told = _of_other_names(store.url, folders, prefix) or _of_others(store.url, names)
    if told:
        raise NotCommitted(
            f"{told}. Nothing is begun anew beside it: a new run takes a directory of its own"
        )
    kinds: dict[str, list[str]] = {}
    for name in names:
        is_dead = _OWN_DATA.fullmatch(name)
        kind = "saves that have not ended, or were killed" if is_dead else "other files"
        kinds.setdefault(kind, []).append(name)
    parts = [f"{kind} ({len(found)}, such as {found[0]})" for kind, found in sorted(kinds.items())]
    if parts:
        logger.warning("%s: no committed checkpoint here, but %s", store.url, "; ".join(parts))
    return frozenset()


def listed_only(url: str, name: str) -> StorageError:
    """Return the error for a checkpoint that a listing has, but not its manifest."""
    return StorageError(
        f"{url}: {name} is listed, but its manifest is not there; the listing lags behind, or "
        "checkpoints are being saved or deleted. Try again"
    )


def newer_of_other_names(store: Store, names: Iterable[str], step: int) -> list[str]:
    """Return which directories of checkpoints have a higher number than ``step``, the last first.

    ``names`` are directories in ``store`` that the names of the run do not take.
    """
    ends = ((_ENDS_IN_NUMBER.search(name), name) for name in names)
    newer = _newest_first(name for match, name in ends if match and int(match[0]) > step)
    marks = (MANIFEST, *_OF_OTHERS)
    return [n for n in _some(newer) if any(store.exists(f"{n}/{mark}") for mark in marks)]


def _itself(store: Store, names: Sequence[str]) -> str:
    """Return that the root of a run is a checkpoint, if it is one."""
    if MANIFEST not in names:
        return ""
    return (
        f"{store.url} is a checkpoint itself, not a directory of checkpoints: load it, or give the "
        "directory above it"
    )


def _of_other_names(url: str, folders: Sequence[str], prefix: str | None) -> str:
    """Return which checkpoints of ours the names of a run do not take, and what does."""
    found = _newest_first(folders)
    direct = [name for name in found if "/" not in name]
    if not found:
        return ""
    if not direct:
        above = found[0].rpartition("/")[0]
        steps = [name for name in found if name.startswith(f"{above}/")]
        return f"{url} has its checkpoints further down ({_first(steps)}): give {url}/{above}"
    names = "that end in a number" if prefix is None else f"like {prefix}10"
    told = f"{url} holds {_first(direct)}, and checkpoints are looked for by names {names}"
    if prefix is not None and (match := _NUMBERED.fullmatch(direct[0])) is not None:
        return f"{told}: prefix={match[1]!r} takes {direct[0]}"
    return f"{told}: load one by its path"


def _takes(prefix: str | None, name: str) -> bool:
    """Whether a run has checkpoints of this name."""
    if prefix is None:
        return _ENDS_IN_NUMBER.search(name) is not None
    match = _ENDS_IN_NUMBER.search(name.removeprefix(prefix))
    return match is not None and name == f"{prefix}{int(match[0])}"


def _of_others(url: str, names: Sequence[str]) -> str:
    """Return which files here are of checkpoints of other programs, if any are."""
    if (found := next(filter(_DCP.fullmatch, names), None)) is not None:
        return (
            f"{url} holds checkpoints of torch.distributed.checkpoint ({found}), of which no steps "
            "are counted: load one by its path, or choose another directory"
        )
    found = next((n for n in names if _WEIGHTS.fullmatch(n) and not _OWN_DATA.fullmatch(n)), None)
    if found is None:
        return ""
    return (
        f"{url} holds weights of Hugging Face or torch.save ({found}), of which no steps are "
        "counted: load them by their path, or choose another directory"
    )


def what_is_there(store: Store) -> str:
    """Return what a place without a manifest holds, and what to do, for an error message.

    Looks for a few names only, since it may be the root of anything. StorageError where the storage
    says that there is no such place at all, as for a bucket that does not exist.
    """
    url = store.url
    is_local = os.path.isabs(url)
    level = store.level()  # which a bucket that does not exist refuses
    around = store.parent()
    if around is not None and (told := _by_what_is_around(around, url)):
        return told
    if is_local and (special := _special_file(url)):
        return f"{url} is {special}, and no checkpoint. {_advice(store)}"
    if is_local and not os.path.isdir(url):
        return f"{url}: no committed checkpoint here: {url} does not exist. {_advice(store)}"
    if is_local and not level.objects and not level.folders and (odd := _special_files(url)):
        return f"{url}: no committed checkpoint here, but {odd}. Fetch the files themselves"
    if not level.objects and not level.folders:
        return f"{url}: no committed checkpoint here, nor anything else: " + (
            "the directory is empty. Check the path"
            if is_local
            else f"no object has a name that begins so. {_advice(store)}"
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
        are_numbered = any(map(_ENDS_IN_NUMBER.search, steps))
        return (
            f"{url} is no checkpoint, but a directory of them: {_first(steps)}. Give the path of "
            "one of them"
            + ("; dtckpt.checkpoint.latest finds the newest, dtckpt ls lists them" * are_numbered)
        )
    files = [info.name for info in level.objects if info.name.lower().endswith(ENDINGS)]
    if files:
        return (
            f"{url}: no checkpoint of a known form here, but files of tensors "
            f"({', '.join(files[:_FEW_CHECKPOINTS])}). Give the path of one of them"
        )
    if is_begun(level):
        return (
            f"{url}: no committed checkpoint here ({MANIFEST} is missing), but files of one: a "
            "save did not finish, or is under way. Load another checkpoint"
        )
    runs = [name for name in _some(level.folders) if _is_run(store.substore(name))]
    if runs:
        return (
            f"{url} is no checkpoint, but above directories of them: {', '.join(runs)}. dtckpt ls "
            "lists those in one of these directories; give the path of a checkpoint"
        )
    names = [f"{name}/" for name in level.folders] + [info.name for info in level.objects]
    return f"{url}: no checkpoint of a known form here, but {_first(names)}. Check the path"


def _special_file(path: str) -> str:
    """Return what a path of this machine is that is neither a file nor a directory, if any."""
    if os.path.isfile(path) or os.path.isdir(path) or not os.path.lexists(path):
        return ""
    if os.path.islink(path) and not os.path.exists(path):
        return f"a symbolic link to {os.readlink(path)}, which does not exist"
    mode = os.stat(path).st_mode
    if stat.S_ISFIFO(mode):
        return "a FIFO"
    return "a socket" if stat.S_ISSOCK(mode) else "a device"


def _special_files(folder: str) -> str:
    """Return what there is in a directory that is neither a file nor a directory."""
    names = sorted(os.listdir(folder))[:_MOST_NAMES]
    found = [(name, _special_file(os.path.join(folder, name))) for name in names]
    return ", ".join([f"{name} ({what})" for name, what in found if what][:_FEW_CHECKPOINTS])


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
    """Return the names of checkpoints directly below, asked for a few from either end only.

    Of other programs only what ends in a number, as the steps of a run do.
    """
    names = _newest_first(name for name in level.folders if name != DATA)
    some = _some(names, num_asked)
    found = [name for name in some if store.exists(f"{name}/{MANIFEST}")]
    if found:
        return names if len(found) == len(some) else found
    steps = [name for name in names if _ENDS_IN_NUMBER.search(name)]
    if steps and any(store.exists(f"{steps[0]}/{name}") for name in _OF_OTHERS):
        return steps
    return []


def _newest_first(names: Iterable[str]) -> list[str]:
    """Return names that end in a number by it, the largest first, and then the others."""

    def key(name: str) -> tuple[int, str]:
        match = _ENDS_IN_NUMBER.search(name)
        return (-int(match[0]) if match else 1, name)

    return sorted(names, key=key)


def _is_run(store: Store) -> bool:
    return bool(_checkpoints_in(store, store.level(), num_asked=1))


def _some(names: Sequence[str], num_each: int = _FEW_ASKED) -> list[str]:
    """Return a few names from either end."""
    return [*dict.fromkeys((*names[:num_each], *names[-num_each:]))]


def _first(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - _FEW_CHECKPOINTS:,} more" if names[_FEW_CHECKPOINTS:] else ""
    return ", ".join(names[:_FEW_CHECKPOINTS]) + more


def _by_what_is_around(around: Store, url: str) -> str:
    """Return what a place is of the one around it, if that tells; an empty text otherwise."""
    name = url.rpartition("/")[2]
    with suppress(StorageError):
        if around.exists(MANIFEST):
            return f"{url} is within the checkpoint {around.url}: give that path"
        if around.exists(name):
            told = "no committed checkpoint here: it is a file, not a directory"
            return f"{url}: {told}. Check the path"
    return ""


def _advice(store: Store) -> str:
    """Return what is beside a place that does not exist, or beside the first one above it."""
    advice = "Check the path"
    missing, around, names = store, store.parent(), list[str]()
    with suppress(StorageError):
        while around is not None and not names:
            level = around.level()
            names = [*level.folders, *(info.name for info in level.objects)]
            if not names and os.path.isdir(around.url):
                return advice
            if not names:
                missing, around = around, around.parent()
    if around is None or not names:
        return advice
    near = get_close_matches(missing.url.rpartition("/")[2], names, _FEW_CHECKPOINTS)
    where = "beside it" if missing is store else f"in {around.url}"
    told = near or _newest_first(names)
    return f"{advice}: {where} {'is' if len(told) == 1 else 'are'} {_first(told)}"
