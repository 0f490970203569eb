"""What all commands share in talking to people: consoles, sizes, safe text, progress bars."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper
from typing import TYPE_CHECKING, NoReturn

from ....dtensor.debug.pictures.picture import printable

if TYPE_CHECKING:
    from rich.console import Console

    from ....checkpoint.files.stored_tensor import StoredTensor
    from ....dtensor import IrregularLayout, Layout, Mesh

BROKEN_PIPE = 141
"""Exit code when the reader of our output has gone, as a shell reports SIGPIPE."""

_PIPE_COLUMNS = 100_000
_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")


def stdout_console() -> Console:
    """Return a console for results.

    Colours, NO_COLOR, FORCE_COLOR and COLUMNS are rich's business. Into a pipe nothing is wrapped,
    unless COLUMNS says so, since whoever reads it may want whole lines.
    """
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> NoReturn:
            silence_stdout()
            raise SystemExit(BROKEN_PIPE)

    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    whole_lines = not sys.stdout.isatty() and not os.environ.get("COLUMNS")
    return Output(
        markup=False,
        emoji=False,
        highlight=False,
        width=_PIPE_COLUMNS if whole_lines else None,
    )


def silence_stdout() -> None:
    """Send what is still buffered for a closed pipe nowhere, so that exiting raises nothing."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def iec(num_bytes: int) -> str:
    """Return a size for people.

    >>> iec(512), iec(1536), iec(3 << 30)
    ('512 B', '1.5 KiB', '3.0 GiB')
    """
    if num_bytes < 1024:
        return f"{num_bytes} B"
    size, unit = num_bytes / 1024, 0
    while round(size, 1) >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.1f} {_UNITS[unit]}"


def count(number: int, noun: str) -> str:
    """Return a number and its noun.

    >>> count(1, "file"), count(1200, "file")
    ('1 file', '1,200 files')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def age(seconds: float) -> str:
    """Return how long ago something was, for people.

    >>> age(42.0), age(5_000.0), age(200_000.0)
    ('42 s', '83 min', '2 d')
    """
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length or (unit == "min" and seconds >= length):
            return f"{seconds / length:,.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def tensor_text(tensor: StoredTensor) -> str:
    """Return dtype and shape, such as ``bfloat16[1024, 64]``."""
    return f"{tensor.dtype.torch_name}{list(tensor.shape)}"


def mesh_text(mesh: Mesh) -> str:
    """Return a mesh's axes, and its ranks where they do not count up from 0."""
    if mesh.ranks is None:
        return printable(str(mesh))
    from ....checkpoint.ranks.text import ranks_text

    return f"{printable(str(mesh))} ({ranks_text(mesh.ranks)})"


def layout_text(layout: Layout | IrregularLayout) -> str:
    """Return placements and mesh; for an irregular layout how many boxes it has."""
    from ....dtensor import IrregularLayout

    if isinstance(layout, IrregularLayout):
        from ....checkpoint.ranks.text import ranks_text

        boxes = len(layout.boxes())
        what = "1 box" if boxes == 1 else f"{boxes:,} boxes"
        return f"{what} on {ranks_text({rank for rank, _ in layout.pieces})}"
    return f"{placements_text(layout)} on {mesh_text(layout.mesh)}"


def placements_text(layout: Layout) -> str:
    """Return placements in the form that ``--placements`` takes."""
    return ",".join(str(placement) for placement in layout.placements)
