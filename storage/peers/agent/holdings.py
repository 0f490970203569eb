"""What one agent holds: objects by name, in bounded memory."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from dtckpt.errors import StorageError

from ...failures import already_exists, changed, not_found
from ...names import join
from .generations import COMMIT_NAME, Unit, parent, retired, strays
from .memory import Memory, free_bytes


@dataclass(frozen=True, slots=True)
class Held:
    """An object that an agent holds."""

    name: str
    size: int
    stamp: int
    """Greater than that of every object that it replaces, on any agent."""
    number: int
    """Counts the objects of this agent as they come."""
    memory: Memory = field(repr=False)
    is_fixed: bool = True
    """Whether it was made once for all; others may be replaced."""

    def read(self) -> bytes:
        """Return its bytes."""
        return os.pread(self.memory.fd, self.size, 0)


@dataclass(slots=True, eq=False)
class Draft:
    """Memory for an object that is being written."""

    name: str
    memory: Memory
    is_open: bool = True


class Holdings:
    """Objects and drafts, of ``budget_bytes`` at most; any thread may call any method.

    Memory that a process of this host still reads is not given back before it has ended that.
    """

    def __init__(self, where: str, budget_bytes: int) -> None:
        """``where`` stands before names in messages."""
        self.where = where
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._reserving = 0
        """Of the used bytes, those that the system may not have given yet."""
        self._objects: dict[str, dict[str, Held]] = {}
        """By directory and name in it."""
        self._drafts: Counter[str] = Counter()
        """How many objects of a directory are being written."""
        self._number = 0
        self._lock = threading.RLock()

    def find(self, name: str) -> Held:
        """Return an object; ObjectNotFound if there is none."""
        with self._lock:
            found = self._find(name)
        if found is None:
            raise not_found(join(self.where, name))
        return found

    def look(self, directory: str) -> list[Held]:
        """Return the objects of a directory, but for those in directories in it."""
        with self._lock:
            return list(self._objects.get(directory, {}).values())

    def list(self, prefix: str) -> list[Held]:
        """Return all objects below a directory."""
        below = f"{prefix}/" if prefix else ""
        with self._lock:
            return [
                held
                for directory, objects in self._objects.items()
                if f"{directory}/".startswith(below)
                for held in objects.values()
            ]

    def reserve(self, name: str, size: int) -> Draft:
        """Make room for an object; ObjectExists if there is one, StorageError if there is none."""
        with self._lock:
            self._refuse_taken(name)
            directory = parent(name)
            self._make_room(size, directory)
            self.used_bytes += size
            self._reserving += size
            self._drafts[directory] += 1
        try:
            return Draft(name, Memory(size))
        except BaseException as error:
            with self._lock:
                self.used_bytes -= size
                self._end_draft(directory)
            if isinstance(error, OSError) and not isinstance(error, StorageError):
                raise self._full(size, str(error)) from error
            raise
        finally:
            with self._lock:
                self._reserving -= size

    def discard(self, draft: Draft) -> None:
        """Give the memory of a draft back, unless it has become an object."""
        with self._lock:
            if draft.is_open:
                draft.is_open = False
                self.used_bytes -= draft.memory.size
                self._end_draft(parent(draft.name))

    def commit(self, draft: Draft, stamp: int, size: int) -> None:
        """Make the first ``size`` bytes of a draft an object; ObjectExists if the name was taken.

        ValueError if the draft has fewer.
        """
        with self._lock:
            if not draft.is_open:
                raise StorageError(f"the draft of {draft.name} has ended")
            self._refuse_taken(draft.name)
            reserved = draft.memory.size
            draft.memory.seal(size)
            self.used_bytes -= reserved - size
            draft.is_open = False
            self._end_draft(parent(draft.name))
            self._add(draft.name, draft.memory, stamp, is_fixed=True)

    def put(self, name: str, data: bytes, *, stamp: int | None, above: int, is_new: bool) -> int:
        """Hold a small object and return its stamp, which is that of the newest one held.

        Without a stamp it gets one greater than ``above``, and than that of what it replaces.
        ``is_new`` refuses to replace anything, with ObjectExists.
        """
        with self._lock:
            there = self._find(name)
            is_same = there is not None and there.stamp == stamp  # asked again: a reply was lost
            if there is not None and is_new and not is_same:
                raise already_exists(join(self.where, name))
            if there is not None and stamp is not None and there.stamp >= stamp:
                return there.stamp
            before = 0 if there is None else there.stamp
            self._replace(name, data, stamp or max(time.time_ns(), above + 1, before + 1))
            return self.find(name).stamp

    def swap(self, name: str, data: bytes | None, *, stamp: int) -> int:
        """Replace, or without ``data`` remove, the object that has a stamp, and no other one.

        Returns the stamp of what is there then. ObjectNotFound or ObjectExists if it is gone or
        was replaced.
        """
        with self._lock:
            there = self.find(name)
            if there.stamp != stamp:
                raise changed(join(self.where, name))
            if data is None:
                self._drop(there)
                return stamp
            return self.put(name, data, stamp=None, above=stamp, is_new=False)

    def delete(self, names: Iterable[str], *, up_to: int | None = None) -> None:
        """Let objects go; with ``up_to`` those that have no greater stamp."""
        with self._lock:
            for name in names:
                held = self._find(name)
                if held is not None and (up_to is None or held.stamp <= up_to):
                    self._drop(held)

    def retire(self, directory: str, keep: int) -> int:
        """Let go what the generation in ``directory`` makes superfluous; return how many objects.

        The objects that make checkpoints of directories go first.
        """
        with self._lock:
            gone = retired(self._units(), directory, +self._drafts, max(keep, 1))
            return self._drop_all(gone)

    def _make_room(self, size: int, target: str) -> None:
        """Raise StorageError unless ``size`` bytes can be had, if need be from dead saves."""
        if not self._fits(size):
            for directory in strays(self._units(), target, +self._drafts):
                self._drop_all([directory])
                if self._fits(size):
                    break
        if not self._fits(size):
            raise self._full(size)

    def _fits(self, size: int) -> bool:
        free = free_bytes() - self._reserving
        return size <= min(self.budget_bytes - self.used_bytes, free)

    def _full(self, size: int, why: str = "") -> StorageError:
        free = self.budget_bytes - self.used_bytes
        return StorageError(
            f"{size} bytes are needed, but {free} of {self.budget_bytes} are free for objects and "
            f"{free_bytes()} on the host{why and f' ({why})'}. Two checkpoints have to fit, the "
            "newest and the one that is being written: give agents more (budget_bytes), or save "
            "less there"
        )

    def _units(self) -> dict[str, Unit]:
        found: dict[str, Unit] = {}
        for directory, objects in self._objects.items():
            numbers = [held.number for held in objects.values()]
            commit = objects.get(join(directory, COMMIT_NAME))
            found[directory] = Unit(
                directory,
                [name.rpartition("/")[2] for name in objects],
                min(numbers),
                max(numbers),
                None if commit is None else commit.number,
                all(held.is_fixed for held in objects.values()),
            )
        return found

    def _replace(self, name: str, data: bytes, stamp: int) -> None:
        self._make_room(len(data), parent(name))
        memory = Memory(len(data))
        if data:
            os.pwrite(memory.fd, data, 0)
        memory.seal(len(data))
        there = self._find(name)
        if there is not None:
            self._drop(there)
        self.used_bytes += len(data)
        self._add(name, memory, stamp, is_fixed=False)

    def _add(self, name: str, memory: Memory, stamp: int, *, is_fixed: bool) -> None:
        self._number += 1
        self._objects.setdefault(parent(name), {})[name] = Held(
            name=name,
            size=memory.size,
            stamp=stamp,
            number=self._number,
            memory=memory,
            is_fixed=is_fixed,
        )

    def _drop(self, held: Held) -> None:
        objects = self._objects[parent(held.name)]
        del objects[held.name]
        if not objects:
            del self._objects[parent(held.name)]
        self.used_bytes -= held.size

    def _drop_all(self, directories: Iterable[str]) -> int:
        held = [h for directory in directories for h in self._objects.get(directory, {}).values()]
        held.sort(key=lambda h: h.name.rpartition("/")[2] != COMMIT_NAME)
        for each in held:
            self._drop(each)
        return len(held)

    def _end_draft(self, directory: str) -> None:
        self._drafts[directory] -= 1
        if not self._drafts[directory]:
            del self._drafts[directory]

    def _refuse_taken(self, name: str) -> None:
        if self._find(name) is not None:
            raise already_exists(join(self.where, name))

    def _find(self, name: str) -> Held | None:
        return self._objects.get(parent(name), {}).get(name)
