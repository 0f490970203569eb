"""Accelerate's objects are saved and loaded by dtckpt: see docs/integrations/accelerate.md.

``save_accelerator`` and ``load_accelerator`` take the place of ``save_state`` and ``load_state``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from ..checkpoint import (
    LoadReport,
    PerCoordinate,
    RandomNumbers,
    SaveHandle,
    SaveReport,
    async_save,
    buffers_of_first_rank,
    load,
    save,
)
from ..checkpoint.ranks.base import DEFAULT_TIMEOUT
from .frameworks import framework
from .newest import newest

DistributedType: Any = framework("accelerate", "accelerate.utils").DistributedType
SeedableRandomSampler: Any = framework("accelerate", "accelerate.data_loader").SeedableRandomSampler

__all__ = ["load_accelerator", "newest", "save_accelerator"]


def save_accelerator(
    accelerator: Any,
    path: str | os.PathLike[str],
    *,
    in_background: bool = False,
    step: int | None = None,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    allow_pickle: bool = False,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> SaveReport | SaveHandle:
    """Save all that an Accelerator has prepared or was told of by ``register_for_checkpointing``.

    All ranks call it; each writes what it holds of models and optimizers. Schedulers, the scaler,
    samplers and the random numbers of every rank go with them. ``in_background`` returns a handle
    once all is copied. ``step`` is what ``newest`` goes by. Other arguments and errors are those of
    ``dtckpt.checkpoint.save``; ValueError for DeepSpeed, Megatron-LM and FSDP1.
    """
    _refuse_others(accelerator)
    if _has_ddp(accelerator):
        for model in accelerator._models:  # which it notes before it wraps them
            buffers_of_first_rank(accelerator.unwrap_model(model))
    begin = async_save if in_background else save
    return begin(
        _state(accelerator),
        path,
        overwrite=overwrite,
        metadata=None if step is None else {"global_step": step},
        storage_options=storage_options,
        allow_pickle=allow_pickle,
        timeout=timeout,
    )


def load_accelerator(
    accelerator: Any,
    path: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    allow_pickle: bool = False,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> LoadReport:
    """Fill what an Accelerator has prepared, in the same order as at the save, on any mesh.

    A rank that is new takes the random numbers of one before it, in turn. Data loaders that keep
    their own place (``use_stateful_dataloader``) have it on each rank, and go on only where there
    are as many as there were. Errors are those of ``dtckpt.checkpoint.load``.
    """
    _refuse_others(accelerator)
    state = _state(accelerator)
    report = load(
        state,
        path,
        select=[name for name, part in state.items() if part != []],
        storage_options=storage_options,
        allow_pickle=allow_pickle,
        timeout=timeout,
    )
    accelerator.step = state["step"]
    return report


class _Sampler:
    """What a shuffling sampler has to know to shuffle as before."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._sampler.epoch, "initial_seed": self._sampler.initial_seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._sampler.epoch = state["epoch"]
        self._sampler.initial_seed = state["initial_seed"]


def _state(accelerator: Any) -> dict[str, Any]:
    """Return all parts under the names that they have in a checkpoint."""
    state: dict[str, Any] = {
        "models": [accelerator.unwrap_model(model) for model in accelerator._models],
        "optimizers": [getattr(o, "optimizer", o) for o in accelerator._optimizers],
        "schedulers": [getattr(s, "scheduler", s) for s in accelerator._schedulers],
        "custom": list(accelerator._custom_objects),
        "data": [_data(loader) for loader in accelerator._dataloaders],
        "rng": RandomNumbers(resize="repeat", numpy=True, python=True),
        "step": accelerator.step,
    }
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler
    return state


def _data(loader: Any) -> Any:
    """Return what knows the place of a data loader and can be told it; None if nothing does."""
    if getattr(loader, "use_stateful_dataloader", False):
        return PerCoordinate(loader)
    sampler = loader.get_sampler() if hasattr(loader, "get_sampler") else None
    return _Sampler(sampler) if isinstance(sampler, SeedableRandomSampler) else None


def _has_ddp(accelerator: Any) -> bool:
    """Whether models are wrapped by DDP that makes the first rank's buffers those of all."""
    handler = accelerator.ddp_handler
    is_ddp = str(getattr(accelerator.distributed_type, "value", "")).startswith("MULTI_")
    return is_ddp and (handler is None or handler.broadcast_buffers)


def _refuse_others(accelerator: Any) -> None:
    """Raise ValueError for what keeps its state where dtckpt cannot see it."""
    kind = accelerator.distributed_type
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ValueError(f"{kind} saves and loads its own state; dtckpt cannot see it")
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ValueError("FSDP1: prepare the Accelerator with fsdp_version=2")
