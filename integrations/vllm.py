"""vLLM reads weights straight out of checkpoints: see docs/integrations/vllm.md.

``load_format="dtckpt"`` is all. vLLM finds it, in each of its processes, by the entry point that an
installation of dtckpt has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from dtckpt.errors import LayoutMismatch

from ..checkpoint import Checkpoint, open
from ..checkpoint.state.names import key_of
from .frameworks import framework

_loaders: Any = framework("vllm", "vllm.model_executor.model_loader")
BaseModelLoader: Any = _loaders.BaseModelLoader

LOAD_FORMAT = "dtckpt"
_CHOICES = {"checkpoint", "part", "storage_options"}
_MODEL = "model of the checkpoint"
"""Where it is kept, beside the choices, which model these are about."""
_PART = "model"


class DtckptLoader(BaseModelLoader):
    """Weights of a model from any checkpoint that dtckpt opens, each tensor verified as it is read.

    It is what vLLM calls the ``model``, or ``checkpoint`` of ``model_loader_extra_config``: a path
    or URL, for the first model that is loaded until it is loaded anew from another path. Beside it
    count ``part``, where its state has the model (by default ``model``, or all of it where it has
    no such part), and ``storage_options``.
    """

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        told: dict[str, Any] = load_config.model_loader_extra_config
        if unknown := sorted(set(told) - _CHOICES - {_MODEL}):
            raise ValueError(
                f"model_loader_extra_config: of {LOAD_FORMAT} there are {sorted(_CHOICES)}, got "
                f"{', '.join(unknown)}"
            )
        self._told = told

    def download_model(self, model_config: Any) -> None:
        """Do nothing: each process reads what it loads, from where it is."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Fill a model; LayoutMismatch where weights of one that is not quantized are missing."""
        loaded = model.load_weights(self.get_all_weights(model_config, model))
        if loaded is None or model_config.quantization is not None:
            return
        if missing := sorted({name for name, _ in model.named_parameters()} - loaded):
            raise LayoutMismatch(
                f"{self._place(model_config)}: no weights for {len(missing)} parameters of the "
                f"model: {', '.join(missing[:8])}"
            )

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights by the names that the model of Hugging Face has for them."""
        options = self._told.get("storage_options")
        with open(self._place(model_config), storage_options=options) as checkpoint:
            yield from _read_ahead(checkpoint, self._names(checkpoint))

    def _place(self, model_config: Any) -> str:
        """Return which checkpoint is meant: drafts, and what is loaded anew, have other paths."""
        model: str = model_config.model
        is_about = self._told.setdefault(_MODEL, model) == model
        return self._told.get("checkpoint", model) if is_about else model

    def _names(self, checkpoint: Checkpoint) -> dict[str, str]:
        """Return what the weights are called, by their names in the checkpoint."""
        part = self._told.get("part")
        if part is None:
            part = _PART if any(name.startswith(f"{_PART}/") for name in checkpoint) else ""
        below = f"{part.strip('/')}/" if part else ""
        names = {
            name: ".".join(str(key_of(key)) for key in name.removeprefix(below).split("/"))
            for name in checkpoint
            if name.startswith(below)
        }
        if not names:
            raise LayoutMismatch(f"{checkpoint.url} has no tensors below {part!r}")
        return names


def register() -> None:
    """Make ``load_format="dtckpt"`` known to vLLM; called by its processes as they begin."""
    _loaders.register_model_loader(LOAD_FORMAT)(DtckptLoader)


def _read_ahead(
    checkpoint: Checkpoint, names: Mapping[str, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors, of which the next one is read while the last one is taken to the model."""
    with ThreadPoolExecutor(1, "dtckpt-vllm") as pool:
        coming = ((new, pool.submit(_read, checkpoint, name)) for name, new in names.items())
        ahead = next(coming)
        for following in coming:
            yield ahead[0], ahead[1].result()
            ahead = following
        yield ahead[0], ahead[1].result()


def _read(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    return checkpoint[name][...]
