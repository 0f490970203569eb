"""torchtitan saves and loads by dtckpt: see docs/integrations/torchtitan.md.

``checkpoint=DtckptManager.Config(enable=True, ...)`` in a trainer's configuration is all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from dtckpt.errors import Corrupt, NotCommitted
from dtckpt.logs import logger_of

from ..checkpoint import (
    CheckpointManager,
    Dequantize,
    Keep,
    SaveHandle,
    delete,
    export,
    load,
    save,
)
from ..checkpoint.files.places import MANIFEST
from ..checkpoint.manager.deciding import decided
from ..checkpoint.ranks.base import DEFAULT_TIMEOUT
from ..storage.base import Store
from ..storage.open import open_store
from .frameworks import framework

_base: Any = framework("torchtitan", "torchtitan.components.checkpointer.base")
_DTYPES: Any = framework("torchtitan", "torchtitan.config").TORCH_DTYPE_MAP
_filesystem: Any = framework("torchtitan", "torchtitan.tools.filesystem")
BaseCheckpointManager: Any = _base.BaseCheckpointManager
MODEL: str = _base.MODEL

logger = logger_of("checkpoint")
_PREFIX = "step-"
_STEP = re.compile(rf"{_PREFIX}\d+")
_DCP = ".metadata"


class _Part:
    """State of torchtitan's, asked and given as a state dict whatever else its class is."""

    def __init__(self, part: Any) -> None:
        self.state_dict: Callable[[], Any] = part.state_dict
        self.load_state_dict: Callable[[Any], Any] = part.load_state_dict


class DtckptManager(BaseCheckpointManager):
    """torchtitan's checkpoints, ``step-N`` in its folder, as checkpoints of dtckpt.

    Each rank writes and reads what it holds, by a ``CheckpointManager`` of dtckpt. All settings of
    ``BaseCheckpointManager.Config`` count. The newest checkpoint is loaded, and where it is damaged
    the one before it, with a warning; older ones go once a newer one is durable. What torchtitan
    saved by torch.distributed.checkpoint is resumed, too.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """Settings beside those of torchtitan's own managers."""

        async_save: bool = True
        """Whether the training goes on while copies are written."""

        storage_options: dict[str, Any] = field(default_factory=dict[str, Any])
        """Options for the driver of a remote folder."""

        timeout_seconds: float = DEFAULT_TIMEOUT.total_seconds()
        """How long a rank may show no sign of life before the others give it up."""

    def __init__(
        self,
        config: Any,
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable: bool = config.enable
        self.save_future: SaveHandle | None = None
        if not self.enable:
            return
        if config.last_save_in_hf and sd_adapter is None:
            raise ValueError("last_save_in_hf needs the sd_adapter of the model, which has none")
        self.config = config
        self.folder: str = _filesystem.join(base_folder, config.folder)
        self.sd_adapter = sd_adapter
        self.states = states
        self.states |= {
            MODEL: _base.ModelWrapper(model_parts),
            _base.OPTIMIZER: optimizers,
            _base.DATALOADER: dataloader,
            _base.LR_SCHEDULER: lr_schedulers,
        }
        self._options: dict[str, Any] = {
            "storage_options": dict(config.storage_options),
            "timeout": timedelta(seconds=config.timeout_seconds),
        }
        self._manager = CheckpointManager(
            self.folder,
            keep=Keep(last=config.keep_latest_k or None),
            in_background=config.async_save,
            prefix=_PREFIX,
            **self._options,
        )

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self._should_save(curr_step, last_step):
            return False
        if last_step and self.config.last_save_in_hf:
            self._manager.wait()
            self._save_in_hf(curr_step)
            return True
        state: dict[str, Any] = self._parts(self.states)
        if last_step and self.config.last_save_model_only:
            state = {MODEL: self._exported()}
        is_saved = self._manager.save(curr_step, state, metadata={"step": curr_step})
        self.save_future = self._manager.saving
        if last_step:
            self._wait_for_saving()
        return is_saved

    def _should_save(self, step: int, last_step: bool) -> bool:
        config = self.config
        if config.load_only:
            return False
        is_first = step == 1 and config.enable_first_step_checkpoint
        return is_first or last_step or step % config.interval == 0

    def _path(self, step: int) -> str:
        return _filesystem.join(self.folder, f"{_PREFIX}{step}")

    def _parts(self, states: Mapping[str, Any]) -> dict[str, Any]:
        return {name: _Part(part) for name, part in states.items() if part is not None}

    def _exported(self) -> dict[str, Any]:
        """Return the weights in the dtype of the last checkpoint."""
        dtype = _DTYPES[self.config.export_dtype]
        return {
            name: value.to(dtype)
            if isinstance(value, torch.Tensor) and value.is_floating_point()
            else value
            for name, value in self.states[MODEL].state_dict().items()
        }

    def _save_in_hf(self, step: int) -> None:
        """Write the last weights as Hugging Face's libraries read them, by way of a checkpoint."""
        path = self._path(step)
        between = f"{path}.weights"
        weights = {MODEL: self.sd_adapter.to_hf(self._exported())}
        save(weights, between, overwrite=True, **self._options)
        group = torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
        storage = self._options["storage_options"]
        export(
            between,
            path,
            part=MODEL,
            overwrite=True,
            process_group=group,
            source_options=storage,
            target_options=storage,
        )

        def take_away(root: Store) -> None:
            name = f"{_PREFIX}{step}.weights"
            delete(root.substore(name))
            root.delete([f"{name}/nothing"])  # and with it the folder, which is empty

        self._on_first_rank(self.folder, take_away)

    def _load(self, step: int = -1) -> bool:
        if step != -1:
            self._load_step(step)
            return True
        damaged: Corrupt | None = None
        steps = {*self._manager.all_steps(), *self._steps_of_dcp()}
        for number in sorted(steps, reverse=True):
            try:
                self._load_step(number)
            except (Corrupt, NotCommitted) as error:  # the same on every rank
                logger.warning("passing over step %d: %s", number, error)
                damaged = error if isinstance(error, Corrupt) else damaged
            else:
                return True
        if damaged is not None:
            raise Corrupt(f"{self.folder}: none of the checkpoints here loads: {damaged}")
        if not steps:
            self._manager.latest()  # raises where there is anything that other names would take
        return self._load_initial()

    def _load_step(self, step: int) -> None:
        path, model_only = self._path(step), step == 0  # the seed checkpoint
        if self._is_dcp(path):
            self._fill(path, model_only=model_only)
        else:
            self._manager.restore(self._wanted(model_only=model_only), step, strict="state")

    def _load_initial(self) -> bool:
        """Load what the training begins from, if anything."""
        config = self.config
        if config.initial_load_in_hf:
            path = config.initial_load_path or getattr(self.sd_adapter, "hf_assets_path", None)
            if not path:
                raise ValueError("initial_load_in_hf needs initial_load_path or hf_assets_path")
            self._fill_from_hf(path)
            return True
        if not config.initial_load_path:
            return False
        self._fill(config.initial_load_path, model_only=config.initial_load_model_only)
        return True

    def _fill(self, path: str, *, model_only: bool) -> None:
        """Fill all parts, or the model alone, from a checkpoint of dtckpt or of DCP."""
        rename = {MODEL: ""} if self._is_dcp(path) else None
        wanted = self._wanted(model_only=model_only)
        load(wanted, path, strict="state", rename=rename, **self._options)

    def _wanted(self, *, model_only: bool) -> dict[str, Any]:
        """Return the parts that are to be filled."""
        left_out = set(self.config.exclude_from_loading)
        if unknown := left_out - set(self.states):
            raise ValueError(f"exclude_from_loading: there is no {', '.join(sorted(unknown))}")
        wanted = {MODEL} if model_only else set(self.states) - left_out
        return self._parts({name: self.states[name] for name in self.states if name in wanted})

    def _fill_from_hf(self, path: str) -> None:
        """Fill the model from weights of Hugging Face, through the names of its adapter."""
        if self.sd_adapter is None:
            raise ValueError("initial_load_in_hf needs the sd_adapter of the model, which has none")
        weights = self.sd_adapter.to_hf(self.states[MODEL].state_dict())
        mapping = [Dequantize()] if self.config.initial_load_in_hf_quantized else None
        load(weights, path, strict="state", mapping=mapping, dtype_policy="cast", **self._options)
        self.states[MODEL].load_state_dict(self.sd_adapter.from_hf(weights))

    def _maybe_wait_for_staging(self) -> None:
        """Return at once: a save has copied what it writes before it returns."""

    def _wait_for_saving(self) -> None:
        self.save_future = None
        self._manager.wait()

    def _close(self) -> None:
        if hasattr(self, "_manager"):
            self.save_future = None
            self._manager.close()

    def _is_dcp(self, path: str) -> bool:
        return bool(self._on_first_rank(path, lambda store: b"1" if _is_dcp(store) else b""))

    def _steps_of_dcp(self) -> list[int]:
        def look(store: Store) -> bytes:
            steps = [name for name in store.level().folders if _STEP.fullmatch(name)]
            return " ".join(name for name in steps if _is_dcp(store.substore(name))).encode()

        names = self._on_first_rank(self.folder, look).decode().split()
        return [int(name.removeprefix(_PREFIX)) for name in names]

    def _on_first_rank(self, path: str, action: Callable[[Store], bytes | None]) -> bytes:
        """Return what the first rank gets of a place; all raise its error."""

        def act(_: object) -> bytes:
            return action(open_store(path, **self._options["storage_options"])) or b""

        return decided({"timeout": self._options["timeout"]}, "look", path, act)


def _is_dcp(store: Store) -> bool:
    return store.exists(_DCP) and not store.exists(MANIFEST)
