"""Strategies whose ranks hold parts of the model: each writes and reads its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, cast

import torch
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ...checkpoint import load
from ...checkpoint.ranks.base import DEFAULT_TIMEOUT
from ...checkpoint.state.names import key_component, key_of
from ..frameworks import framework
from ..saver import Saver
from ..whole_state import read_values
from .checkpoint_io import told_of

_strategies = framework("lightning", "lightning.pytorch.strategies")
FSDPStrategy: Any = _strategies.FSDPStrategy
ModelParallelStrategy: Any = _strategies.ModelParallelStrategy

MODEL, OPTIMIZERS = "state_dict", "optimizer_states"
"""Names that Lightning gives to what is sharded; all else is the same on every rank."""


class _Sharded:
    """What both strategies do: save all that ranks hold together, and let one of them remove."""

    model: Any
    optimizers: list[Any]
    lightning_module: Any
    is_global_zero: bool
    _saver: Saver

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Save what all ranks hold, in place of what is there; nothing is gathered.

        What is not sharded is that of the first rank, as everywhere in Lightning.
        """
        state = checkpoint
        if not self.is_global_zero:
            state = {key: value for key, value in checkpoint.items() if key in (MODEL, OPTIMIZERS)}
        path = cast(Any, self).broadcast(os.fspath(filepath))
        self._saver.save(state, path, metadata=told_of(checkpoint), storage_options=storage_options)

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Fill model and optimizers, whatever mesh they were saved from, and return the rest."""
        self._saver.wait()
        path = cast(Any, self).broadcast(os.fspath(checkpoint_path))
        options: dict[str, Any] = {
            "storage_options": self._saver.storage_options,
            "allow_pickle": self._saver.allow_pickle and not weights_only,
        }
        self._fill(path, strict=bool(self.lightning_module.strict_loading), **options)
        return read_values(path, MODEL, OPTIMIZERS, **options)

    def _fill(self, path: str, *, strict: bool, **options: Any) -> None:
        raise NotImplementedError

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Delete a checkpoint, once the save that is under way is durable."""
        if self.is_global_zero:
            self._saver.remove(filepath)

    def teardown(self) -> None:
        """Wait until all is durable, and raise the error of a save that failed."""
        try:
            self._saver.wait()
        finally:
            super().teardown()  # pyright: ignore

    def _load(self, state: dict[str, Any], path: str, *, strict: bool, **options: Any) -> None:
        """Fill a state from the part of a checkpoint that it is about."""
        state = {key: part for key, part in state.items() if part}
        load(
            state,
            path,
            select=list(state),
            strict=strict,
            timeout=self._saver.timeout,
            **options,
        )


def _saver(
    async_save: bool,
    allow_pickle: bool,
    storage_options: Mapping[str, Any] | None,
    timeout: timedelta,
) -> Saver:
    return Saver(
        in_background=async_save,
        allow_pickle=allow_pickle,
        storage_options=storage_options,
        timeout=timeout,
    )


class DtckptModelParallelStrategy(_Sharded, ModelParallelStrategy):
    """Lightning's ModelParallelStrategy (FSDP2, tensor parallel) with checkpoints of dtckpt.

    Each rank writes what it holds; a checkpoint loads on any other mesh, number of ranks or
    strategy of this module, and by ``DtckptIO`` on one device. ``async_save``, ``allow_pickle`` and
    ``storage_options`` are as for ``DtckptIO``; other arguments are Lightning's.
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
        self._saver = _saver(async_save, allow_pickle, storage_options, save_timeout)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the model as it lies on this rank."""
        return self.model.state_dict()

    def optimizer_state(self, optimizer: Any) -> Any:
        """Return the optimizer itself, whose state is saved by the names of its parameters."""
        return getattr(optimizer, "_optimizer", optimizer)

    def _fill(self, path: str, *, strict: bool, **options: Any) -> None:
        state = {MODEL: self.model, OPTIMIZERS: list(self.optimizers)}
        self._load(state, path, strict=strict, **options)


class DtckptFSDPStrategy(_Sharded, FSDPStrategy):
    """Lightning's FSDPStrategy (FSDP1) with checkpoints of dtckpt.

    As ``DtckptModelParallelStrategy``; ``state_dict_type`` does not count.
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
        super().__init__(*args, **kwargs | {"state_dict_type": "sharded"})
        self._saver = _saver(async_save, allow_pickle, storage_options, save_timeout)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the model as it lies on this rank."""
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of an optimizer as it lies on this rank, by names of parameters."""
        plain: torch.optim.Optimizer = getattr(optimizer, "_optimizer", optimizer)
        return _below_model(get_optimizer_state_dict(self.model, plain))

    def _fill(self, path: str, *, strict: bool, **options: Any) -> None:
        weights = self.lightning_module_state_dict()
        optimizers = [self.optimizer_state(optimizer) for optimizer in self.optimizers]
        self._load({MODEL: weights, OPTIMIZERS: optimizers}, path, strict=strict, **options)
        set_model_state_dict(self.model, weights)
        for optimizer, state in zip(self.optimizers, optimizers, strict=True):
            set_optimizer_state_dict(self.model, optimizer, optim_state_dict=_bare(state))


def _below_model(state: Any) -> dict[str, Any]:
    """Return the state of an optimizer by the names that parameters have in the checkpoint."""
    groups = [
        group | {"params": [f"{MODEL}/{key_component(name)}" for name in group["params"]]}
        for group in state["param_groups"]
    ]
    return {"state": {MODEL: state["state"]}, "param_groups": groups}


def _bare(state: dict[str, Any]) -> Any:
    """Return the state of an optimizer by the names that parameters have in their module."""
    groups = [
        group | {"params": [key_of(name.removeprefix(f"{MODEL}/")) for name in group["params"]]}
        for group in state["param_groups"]
    ]
    return {"state": state["state"][MODEL], "param_groups": groups}
