"""The ranks that take part in a save or load, and the rule that they fail together.

``together`` runs one phase on every rank and lets each know how the others fared: all get all
results, or all raise the same error. Errors travel as text, so no exception has to be picklable.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

import dtckpt.errors
from dtckpt.errors import CheckpointError, RankFailed

from .text import ranks_text

_OK, _FAILED = b"\0", b"\1"

_OWN_ERRORS = tuple(
    cls
    for cls in vars(dtckpt.errors).values()
    if isinstance(cls, type) and issubclass(cls, CheckpointError)
)


class Ranks(Protocol):
    """Some ranks, of which this process (or thread) is one."""

    @property
    def rank(self) -> int:
        """Global number of this rank."""
        ...

    @property
    def all(self) -> tuple[int, ...]:
        """Global numbers of all ranks that take part; the first one coordinates."""
        ...

    def exchange(self, payload: bytes) -> list[bytes]:
        """Give some bytes to every rank and return everyone's, in the order of ``all``."""
        ...


@dataclass(frozen=True, slots=True)
class Solo:
    """A single rank without a process group."""

    rank: int = 0

    @property
    def all(self) -> tuple[int, ...]:
        """This rank alone."""
        return (self.rank,)

    def exchange(self, payload: bytes) -> list[bytes]:
        """Return this rank's own payload."""
        return [payload]


class GroupRanks:
    """The ranks of a process group."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.all = _global_ranks(group)
        self.rank = self.all[group.rank()]
        self._device = _device_of(group)

    def exchange(self, payload: bytes) -> list[bytes]:
        """All-gather byte strings of any length: first the lengths, then the padded bytes."""
        lengths = self._all_gather(torch.tensor([len(payload)], dtype=torch.int64, device="cpu"))
        longest = max(int(length) for length in lengths)
        if longest == 0:
            return [b""] * len(lengths)
        mine = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        if payload:
            mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        gathered = self._all_gather(mine)
        return [
            data[: int(length)].numpy().tobytes()
            for data, length in zip(gathered, lengths, strict=True)
        ]

    def _all_gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        mine = mine.to(self._device)
        out = [torch.empty_like(mine) for _ in self.all]
        # The group's own method: groups of ranks that are threads are registered nowhere.
        self._group.allgather([out], [mine]).wait()
        return [data.to("cpu") for data in out]


def ranks_of(process_group: Any = None, *, no_dist: bool = False) -> Ranks:
    """Return the ranks of a group, of the default group if there is one, or this one alone."""
    if no_dist:
        # Alone, but still itself: what a rank keeps for itself is found under its number.
        available = torch.distributed.is_available() and torch.distributed.is_initialized()
        return Solo(torch.distributed.get_rank() if available else 0)
    if process_group is not None:
        if not hasattr(process_group, "rank"):  # what torch gives to ranks outside of a new group
            raise CheckpointError(
                "this rank is not a member of the process group that it was given; only the "
                "members of a group may call save and load with it"
            )
        return GroupRanks(process_group)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return GroupRanks(torch.distributed.group.WORLD)
    return Solo()


def together(
    ranks: Ranks,
    phase: str,
    body: Callable[[], bytes],
    *,
    on_failure: Callable[[CheckpointError], None] | None = None,
    touched: Callable[[], Iterable[str]] | None = None,
) -> list[bytes]:
    """Run ``body`` on every rank and return all results, or raise the same error on all ranks.

    ``phase`` is what messages call this part of the work, for instance "save: write". The error
    is of the type that the failing rank raised if that is one of ours, else CheckpointError. An
    exception that is not an ``Exception`` (Ctrl-C) is told to the others and raised as it is.

    ``on_failure`` is called with the error once this rank knows that some rank failed, and that
    all others know it, too; not where the exchange itself broke, since others may then believe
    that all went well. ``touched`` names what this rank has overwritten, whether it failed or not;
    it is asked, on every rank, only after a failure.
    """
    failure: BaseException | None = None
    try:
        payload = _OK + body()
    except BaseException as error:
        failure, payload = error, _FAILED + _describe(error)
    answers = _exchange(ranks, phase, payload, failure)
    failed = {
        rank: cast(dict[str, Any], json.loads(answer[1:]))
        for rank, answer in zip(ranks.all, answers, strict=True)
        if answer[:1] != _OK
    }
    if not failed:
        return [answer[1:] for answer in answers]
    error = _error(phase, failed, alone=len(ranks.all) == 1)
    if touched is not None:  # on all ranks or on none, so all take part in this exchange
        names = _exchange(ranks, phase, json.dumps(list(touched())).encode(), failure)
        _add_overwritten(error, [name for told in names for name in json.loads(told)])
    if on_failure is not None:
        on_failure(error)
    if failure is not None and not isinstance(failure, Exception):
        raise failure
    raise error from failure


def _add_overwritten(error: CheckpointError, names: Iterable[str]) -> None:
    error.overwritten = tuple(dict.fromkeys(names))
    if error.overwritten:
        shown = ", ".join(error.overwritten[:20])
        rest = len(error.overwritten) - 20
        told = f"{shown} and {rest} more" if rest > 0 else shown
        error.args = (f"{error}. Destinations already overwritten on some rank: {told}",)


def _exchange(
    ranks: Ranks, phase: str, payload: bytes, failure: BaseException | None
) -> Sequence[bytes]:
    try:
        return ranks.exchange(payload)
    except RuntimeError as error:
        raise RankFailed(
            f"{phase}: rank {ranks.rank} could not reach the other ranks "
            f"({ranks_text(ranks.all)} take part): one of them died, fell silent or left. "
            f"{'This rank had failed itself: ' + _told(failure) if failure else _short(error)}"
        ) from (failure or error)


def _describe(error: BaseException) -> bytes:
    """Return the type, if it is one of ours or derived from it, and the text; never raises."""
    ours = [cls.__name__ for cls in type(error).__mro__ if cls in _OWN_ERRORS]
    text = _safe_str(error)
    if not ours or type(error) not in _OWN_ERRORS:
        text = f"{type(error).__name__}: {text}"
    return json.dumps({"type": ours[0] if ours else None, "text": text}).encode()


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {_safe_str(error)}"


def _short(error: BaseException) -> str:
    """Return the fact that a backend reports, without the advice that Gloo appends to it."""
    return str(error).partition(" This is typically")[0].partition("\n")[0]


def _safe_str(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:
        return f"(its text could not be made: {type(broken).__name__})"


def _error(phase: str, failed: dict[int, Any], *, alone: bool) -> CheckpointError:
    by_text: dict[str, list[int]] = {}
    for rank, told in failed.items():
        by_text.setdefault(told["text"], []).append(rank)
    if alone:
        message = f"{phase}: {next(iter(by_text))}"
    else:
        parts = [f"{phase} failed on {ranks_text(r)}: {text}" for text, r in by_text.items()]
        message = "\n".join(parts)
    names = {told["type"] for told in failed.values()}
    cls = next((c for c in _OWN_ERRORS if names == {c.__name__}), CheckpointError)
    return cls(message)


def _global_ranks(group: Any) -> tuple[int, ...]:
    if isinstance(group, torch.distributed.ProcessGroup):
        return tuple(torch.distributed.get_process_group_ranks(group))
    return tuple(range(group.size()))


def _device_of(group: Any) -> torch.device:
    """Return where a group moves bytes: the CPU if it can, else the current accelerator."""
    if isinstance(group, torch.distributed.ProcessGroup):
        backends = str(torch.distributed.get_backend_config(group))
        if "cpu:" not in backends and "gloo" not in backends:
            return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
