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

from ..checkpoint import Dequantize, SaveHandle, export, load, save
from ..checkpoint.files.places import MANIFEST
from ..checkpoint.ranks.base import DEFAULT_TIMEOUT
from ..checkpoint.ranks.together import closing, ranks_of, together
from ..storage.open import open_store
from .frameworks import framework
from .saver import Saver

_base: Any = framework("torchtitan", "torchtitan.components.checkpointer.base")
_DTYPES: Any = framework("torchtitan", "torchtitan.config").TORCH_DTYPE_MAP
_filesystem: Any = framework("torchtitan", "torchtitan.tools.filesystem")
BaseCheckpointManager: Any = _base.BaseCheckpointManager
MODEL: str = _base.MODEL

logger = logger_of("checkpoint")
_STEP = re.compile(r"step-(\d+)")
_DCP = ".metadata"


class _Part:
    """State of torchtitan's, asked and given as a state dict whatever else its class is."""

    def __init__(self, part: Any) -> None:
        self.state_dict: Callable[[], Any] = part.state_dict
        self.load_state_dict: Callable[[Any], Any] = part.load_state_dict


class DtckptManager(BaseCheckpointManager):
    """torchtitan's checkpoints, ``step-N`` in its folder, as checkpoints of dtckpt.

    Each rank writes and reads what it holds. All settings of ``BaseCheckpointManager.Config``
    count. The newest checkpoint is loaded, and where it is damaged the one before it, with a
    warning; older ones go once a newer one is durable. What torchtitan saved by
    torch.distributed.checkpoint is resumed, too.
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
        self._saver = Saver(in_background=config.async_save, **self._options)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self._should_save(curr_step, last_step):
            return False
        if last_step and self.config.last_save_in_hf:
            self._saver.wait()
            self._save_in_hf(curr_step)
            return True
        state: dict[str, Any] = self._parts(self.states)
        if last_step and self.config.last_save_model_only:
            state = {MODEL: self._exported()}
        self._saver.save(state, self._path(curr_step), metadata={"step": curr_step})
        self.save_future = self._saver.pending
        self._purge(curr_step)
        if last_step:
            self._wait_for_saving()
        return True

    def _should_save(self, step: int, last_step: bool) -> bool:
        config = self.config
        if config.load_only:
            return False
        is_first = step == 1 and config.enable_first_step_checkpoint
        return is_first or last_step or step % config.interval == 0

    def _path(self, step: int) -> str:
        return _filesystem.join(self.folder, f"step-{step}")

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
        self._on_first_rank("delete", lambda: self._saver.remove(between))

    def _purge(self, step: int) -> None:
        """Remove what ``keep_latest_k`` does not keep, once this step is durable."""
        keep = self.config.keep_latest_k
        if not keep or not self._is_first_rank():
            return
        older = sorted(n for n in self._steps((MANIFEST,)) if n != step)
        for number in older[: max(0, len(older) + 1 - keep)]:
            self._saver.remove(self._path(number))

    def _load(self, step: int = -1) -> bool:
        self._saver.wait()
        if step != -1:
            self._load_step(step)
            return True
        damaged: Corrupt | None = None
        for number in self._agreed_steps():
            try:
                self._load_step(number)
            except (Corrupt, NotCommitted) as error:  # the same on every rank
                logger.warning("passing over step %d: %s", number, error)
                damaged = error if isinstance(error, Corrupt) else damaged
            else:
                return True
        if damaged is not None:
            raise Corrupt(f"{self.folder}: none of the checkpoints here loads: {damaged}")
        return self._load_initial()

    def _load_step(self, step: int) -> None:
        model_only = step == 0  # the seed checkpoint
        self._fill(self._path(step), model_only=model_only)

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
        left_out = set(self.config.exclude_from_loading)
        if unknown := left_out - set(self.states):
            raise ValueError(f"exclude_from_loading: there is no {', '.join(sorted(unknown))}")
        wanted = {MODEL} if model_only else set(self.states) - left_out
        state = self._parts({name: self.states[name] for name in self.states if name in wanted})
        rename = {MODEL: ""} if self._is_dcp(path) else None
        load(state, path, strict="state", rename=rename, **self._options)

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
        self._saver.wait()

    def _close(self) -> None:
        if hasattr(self, "_saver"):
            self._wait_for_saving()

    def _is_dcp(self, path: str) -> bool:
        names = {info.name for info in open_store(path, **self._options["storage_options"]).list()}
        return MANIFEST not in names and _DCP in names

    def _steps(self, markers: tuple[str, ...]) -> set[int]:
        """Return the steps whose folder has a file that is the last one to be written."""
        found: set[int] = set()
        for info in open_store(self.folder, **self._options["storage_options"]).list():
            name, _, rest = info.name.partition("/")
            match = _STEP.fullmatch(name)
            if match and rest in markers:
                found.add(int(match[1]))
        return found

    def _agreed_steps(self) -> list[int]:
        """Return the steps that there are, as the first rank sees them, newest first."""
        told = self._on_first_rank(
            "steps", lambda: " ".join(map(str, self._steps((MANIFEST, _DCP)))).encode()
        )
        return sorted(map(int, told.split()), reverse=True)

    def _on_first_rank(self, purpose: str, action: Callable[[], bytes | None]) -> bytes:
        """Return what the first rank gets; all raise its error."""
        ranks = ranks_of(purpose=purpose, timeout=self._options["timeout"])
        with closing(ranks):
            return together(ranks, purpose, lambda: b"", lambda _: action() or b"")

    def _is_first_rank(self) -> bool:
        return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
