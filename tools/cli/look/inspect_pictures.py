"""``dtckpt inspect --layout``: which rank held which part of a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from ....dtensor.debug import visualize_sharding
from ..common.console import printable, stdout_console
from ..common.grid import Lines, plain, show
from ..common.treeview import matcher

if TYPE_CHECKING:
    from ....checkpoint import Manifest


def show_layouts(url: str, manifest: Manifest, names: tuple[str, ...]) -> None:
    """Print pictures of the layouts of all tensors, or of those that match."""
    console = stdout_console()
    wanted = matcher(names)
    layouts = {n: t.layout for n, t in manifest.tensors.items() if wanted(n)}
    if not layouts:
        show(console, Lines([plain(f"no tensor of {printable(url)} matches")]))
        return
    in_colour = console.color_system is not None and not console.no_color
    drawn = visualize_sharding(layouts, url, in_colour, show=False)
    console.print(Text.from_ansi(drawn), soft_wrap=True)
