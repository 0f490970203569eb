"""Progress on a terminal: a bar on stderr, and nothing at all where that is a file or a pipe."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

from dtckpt.logs import logger_of

logger = logger_of("checkpoint")

OnProgress = Callable[[int, int], None]
"""Called with bytes that are done, and bytes in all."""
Standing = Callable[[], tuple[int, int] | None]
"""Returns the same; None once all is over."""

_SECONDS = 0.2


@contextmanager
def progress(
    label: str, *, is_shown: bool = True, is_alone: bool = True
) -> Generator[OnProgress | None]:
    """Show a bar on stderr while the block runs; yield what to call with (done, total) bytes.

    Yields None, and shows nothing, where stderr is not a terminal, or unless ``is_shown``. Where
    others print meanwhile, and the bar is not ``is_alone``, their stdout and stderr are left to
    them.
    """
    if not is_shown or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=is_alone,
        redirect_stderr=is_alone,
    )
    with bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def watch(label: str, standing: Standing) -> threading.Thread | None:
    """Show how something in the background stands, from a thread; None where there is none.

    Nothing of it reaches the one who is watched: what fails is logged.
    """
    if not sys.stderr.isatty():
        return None
    thread = threading.Thread(
        target=_watch, args=(label, standing), name="dtckpt-progress", daemon=True
    )
    try:
        thread.start()
    except RuntimeError:  # the interpreter is ending, or there is no room for another one
        return None
    return thread


def _watch(label: str, standing: Standing) -> None:
    pause = threading.Event()
    try:
        with progress(label, is_alone=False) as tell:
            while tell is not None and (at := standing()) is not None:
                tell(*at)
                pause.wait(_SECONDS)
    except Exception:
        logger.exception("no progress can be shown of %s", label)
