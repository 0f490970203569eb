"""Distributed checkpoints for PyTorch that load on any mesh and any placement.

``dtckpt.checkpoint`` saves and loads, ``dtckpt.dtensor`` distributes tensors, ``dtckpt.storage`` is
where bytes live, ``dtckpt.errors`` what can be caught. ``__version__`` is that of the installed
package, ``0+unknown`` where its files are used without being installed.

Installed as ``dtckpt/__init__.py``. It imports nothing, so that ``import dtckpt.dtensor`` does
not load ``dtckpt.checkpoint``, and neither loads the command line.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("dtckpt")
        except PackageNotFoundError:
            return "0+unknown"
