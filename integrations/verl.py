"""verl's training state is saved and loaded by dtckpt: see docs/integrations/verl.md."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from ..checkpoint import RandomNumbers, export, load
from ..checkpoint.ranks.base import DEFAULT_TIMEOUT
from .frameworks import framework
from .saver import Saver

BaseCheckpointManager: Any = framework(
    "verl", "verl.utils.checkpoint.checkpoint_manager"
).BaseCheckpointManager


class DtckptManager(BaseCheckpointManager):
    """verl's checkpoint manager for FSDP2, whose checkpoints load on any number of ranks.

    verl's own files, of each rank, load on as many ranks only. ``save_contents`` and
    ``load_contents`` count: ``model``, ``optimizer``, ``extra`` (schedule and random numbers), and
    ``hf_model``, which writes the weights under ``huggingface/`` without gathering them.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        processing_class: Any = None,
        checkpoint_config: Any = None,
        *,
        in_background: bool = False,
        timeout: timedelta = DEFAULT_TIMEOUT,
        **_: Any,
    ) -> None:
        super().__init__(model, optimizer, lr_scheduler, processing_class, checkpoint_config)
        if any(isinstance(part, FullyShardedDataParallel) for part in model.modules()):
            raise ValueError("the model is one of FSDP1: set strategy=fsdp2")
        if self.should_save_lora_only:
            raise ValueError("save_lora_only: dtckpt saves all weights, frozen ones included")
        self._saver = Saver(in_background=in_background, timeout=timeout)

    def save_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Save on all ranks; older ones above ``max_ckpt_to_keep`` go once this is durable."""
        if local_path is None:
            return
        self.previous_global_step = global_step
        state = self._state(self.checkpoint_save_contents)
        if self.rank == 0:
            self._write_beside(Path(local_path) / "huggingface")
        self._saver.save(state, local_path, metadata={"global_step": global_step})
        if self.should_save_hf_model:
            self._saver.wait()
            export(
                local_path,
                os.path.join(local_path, "huggingface"),
                part="model",
                overwrite=True,
                process_group=torch.distributed.group.WORLD,
            )
        self._register(local_path, max_ckpt_to_keep)

    def load_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        del_local_after_load: bool = False,
    ) -> None:
        """Fill what ``load_contents`` names; a rank that is new takes the random numbers of one
        before it, in turn."""
        if local_path is None:
            return
        self._saver.wait()
        state = self._state(self.checkpoint_load_contents)
        select = list(state)
        load({"model": self.model} | state, local_path, select=select, timeout=self._saver.timeout)

    def wait(self) -> None:
        """Return once the last save in the background is durable; raise its error."""
        self._saver.wait()

    def _state(self, contents: Any) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "extra": self.lr_scheduler}
        wanted = {name: part for name, part in parts.items() if name in contents}
        if missing := [name for name in ("model", "optimizer") if wanted.get(name, 0) is None]:
            raise ValueError(f"{', '.join(missing)} is to be saved or loaded, and was not given")
        if "extra" in contents:
            wanted["rng"] = RandomNumbers(resize="repeat", numpy=True, python=True)
        return {name: part for name, part in wanted.items() if part is not None}

    def _write_beside(self, folder: Path) -> None:
        """Write configuration and tokenizer, as readers of Hugging Face's files want them."""
        folder.mkdir(parents=True, exist_ok=True)
        for part in (getattr(self.model, "config", None), self.processing_class):
            if hasattr(part, "save_pretrained"):
                part.save_pretrained(str(folder))  # pyright: ignore

    def _register(self, path: str, keep: int | None) -> None:
        kept: list[str] = [*self.previous_saved_paths, path]
        unwanted = kept[:-keep] if keep and keep > 0 else []
        self.previous_saved_paths = kept[len(unwanted) :]
        if self.rank == 0:
            for old in unwanted:
                self._saver.remove(old, with_folder=True)
