"""Fabric's strategy whose ranks hold parts of the model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch

from ...checkpoint import load
from ...checkpoint.ranks.base import DEFAULT_TIMEOUT
from ..frameworks import framework
from ..saver import Saver
from ..whole_state import read_values

ModelParallelStrategy: Any = framework(
    "lightning", "lightning.fabric.strategies"
).ModelParallelStrategy


class DtckptFabricModelParallelStrategy(ModelParallelStrategy):
    """Fabric's ModelParallelStrategy (FSDP2, tensor parallel) with checkpoints of dtckpt.

    ``fabric.save(path, state)`` and ``fabric.load(path, state)`` take modules, optimizers, objects
    with ``state_dict()`` and values, all as ``dtckpt.checkpoint.save`` and ``load`` do: each rank
    writes and reads its part, on any mesh.
    """

    def __init__(
        self,
        *args: Any,
        async_save: bool = False,
        allow_pickle: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        save_timeout: timedelta = DEFAULT_TIMEOUT,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._saver = Saver(
            in_background=async_save,
            allow_pickle=allow_pickle,
            storage_options=storage_options,
            timeout=save_timeout,
        )

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: dict[str, Any],
        storage_options: Mapping[str, Any] | None = None,
        filter: Any = None,
    ) -> None:
        """Save a state, in place of what is there. ``filter`` chooses names as in Fabric."""
        state = {key: _filtered(part, (filter or {}).get(key)) for key, part in state.items()}
        self._saver.save(state, self.broadcast(os.fspath(path)), storage_options=storage_options)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Fill a state, or a module alone, and return what else was saved."""
        self._saver.wait()
        if not state and not isinstance(state, torch.nn.Module):
            raise ValueError(f"a state to be filled is needed, got {state!r}")
        path = self.broadcast(os.fspath(path))
        options: dict[str, Any] = {
            "storage_options": self._saver.storage_options,
            "allow_pickle": self._saver.allow_pickle and not weights_only,
        }
        if isinstance(state, torch.nn.Module | torch.optim.Optimizer):
            load(state, path, strict=strict, timeout=self._saver.timeout, **options)
            return {}
        load(
            state,
            path,
            select=list(state) if strict else None,
            strict=strict,
            timeout=self._saver.timeout,
            **options,
        )
        return read_values(path, *state, **options)

    def teardown(self) -> None:
        """Wait until all is durable, and raise the error of a save that failed.

        Nobody in Fabric calls this; a process that ends waits all the same, with exit code 1 then.
        """
        self._saver.wait()


def _filtered(part: Any, wanted: Any) -> Any:
    if wanted is None:
        return part
    names = part.state_dict() if hasattr(part, "state_dict") else part
    return {key: value for key, value in names.items() if wanted(key, value)}
