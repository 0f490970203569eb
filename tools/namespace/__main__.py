"""``python -m dtckpt``: the ``dtckpt`` command, where its script is not on the path."""

from __future__ import annotations

from dtckpt.tools.cli import main

if __name__ == "__main__":
    main(prog_name="dtckpt")
