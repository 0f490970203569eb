"""Saves of a training, one after the other, and deletions that wait for them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from dtckpt.errors import NotCommitted

from ..checkpoint import SaveHandle, SaveReport, async_save, delete, save
from ..checkpoint.ranks.base import DEFAULT_TIMEOUT


class Saver:
    """Saves in the background or not; what is no longer wanted goes once its successor is durable.

    All ranks that share the saves call it alike, and one of them removes.
    """

    def __init__(
        self,
        *,
        in_background: bool = False,
        no_dist: bool = False,
        allow_pickle: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        self.allow_pickle = allow_pickle
        self.storage_options = dict(storage_options or {})
        self.timeout = timeout
        self._in_background = in_background
        self._no_dist = no_dist
        self._pending: SaveHandle | None = None
        self._unwanted: list[tuple[str, bool]] = []

    def save(
        self,
        state: Mapping[str, Any],
        path: str | os.PathLike[str],
        *,
        metadata: Any = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Save, over what is there; an error of the save before is raised first."""
        self.wait()
        begin: Callable[..., SaveHandle | SaveReport] = async_save if self._in_background else save
        begun = begin(
            state,
            path,
            no_dist=self._no_dist,
            overwrite=True,
            metadata=metadata,
            storage_options=self.storage_options | dict(storage_options or {}),
            allow_pickle=self.allow_pickle,
            timeout=self.timeout,
        )
        if isinstance(begun, SaveHandle):
            self._pending = begun

    def remove(self, path: str | os.PathLike[str], *, with_folder: bool = False) -> None:
        """Delete a checkpoint, if a save is under way only when that is durable.

        ``with_folder`` takes away what else lies in its folder, which is one of this machine's.
        """
        self._unwanted.append((os.fspath(path), with_folder))
        if self._pending is None or self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Return once the last save is durable and what it replaces is gone; raise its error.

        After an error nothing is removed that was asked for before.
        """
        handle, self._pending = self._pending, None
        unwanted, self._unwanted = self._unwanted, []
        if handle is not None:
            handle.result()
        for path, with_folder in unwanted:
            self._delete(path, with_folder)

    def _delete(self, path: str, with_folder: bool) -> None:
        try:
            delete(path, storage_options=self.storage_options)
        except NotCommitted:
            if os.path.isfile(path):  # of the framework itself, from before
                Path(path).unlink()
        if with_folder:
            shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):  # not a folder of this machine, or something else is in it
            Path(path).rmdir()
