"""transformers' Trainer saves and resumes by dtckpt: see docs/integrations/transformers.md.

``DtckptTrainer`` takes the place of ``Trainer``, and ``DtckptTrainerMixin`` goes before any class
derived from it (``class MyTrainer(DtckptTrainerMixin, SFTTrainer)``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from dtckpt.errors import NotCommitted
from dtckpt.logs import logger_of

from ..checkpoint import RandomNumbers, load
from ..checkpoint import open as open_checkpoint
from ..checkpoint.files.places import MANIFEST
from ..checkpoint.manager.deciding import decided
from ..checkpoint.ranks.base import DEFAULT_TIMEOUT
from ..checkpoint.runs.run import Run
from ..checkpoint.saving.first_rank_buffers import declare_buffers_of_ddp
from ..storage.open import open_store
from .frameworks import framework
from .newest import newest
from .saver import Saver
from .schedules import regrouped
from .whole_state import read_part

_trainer = framework("transformers", "transformers.trainer")
_callbacks = framework("transformers", "transformers.trainer_callback")
Trainer: Any = _trainer.Trainer
TrainerState: Any = _callbacks.TrainerState

logger = logger_of("checkpoint")

_PREFIX = "checkpoint-"
_STATE = "trainer_state.json"


class DtckptTrainerMixin:
    """Checkpoints of dtckpt in the folders ``checkpoint-N`` of a Trainer.

    Each rank writes and reads what it holds of model and optimizer, under DDP, FSDP2 and
    ``from_pretrained(distributed_config=...)``, and another number of ranks or another mesh may go
    on. With ``async_save`` the training does while the copies are written; ``save_total_limit``
    then removes a checkpoint once its successor is durable. Folders that the Trainer itself has
    saved are resumed as before.
    """

    args: Any
    state: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    accelerator: Any

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *others: Any,
        async_save: bool = False,
        allow_pickle: bool = False,
        save_timeout: timedelta = DEFAULT_TIMEOUT,
        **kwargs: Any,
    ) -> None:
        with _without_its_refusal(model, args):
            super().__init__(model, args, *others, **kwargs)  # pyright: ignore
        self._saver = Saver(
            in_background=async_save, allow_pickle=allow_pickle, timeout=save_timeout
        )

    def newest_checkpoint(self, *, read: bool = True) -> str | None:
        """Return the newest intact checkpoint in the output folder, or None where there is none.

        It is what ``train(resume_from_checkpoint=...)`` takes. Damaged ones are passed over;
        ``read=False`` looks at manifests and sizes only.
        """
        return newest(self.args.output_dir, read=read)

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train as ``Trainer.train``, and return when all that was saved is durable.

        ``resume_from_checkpoint=True`` means the newest intact checkpoint; NotCommitted where there
        is none.
        """
        self._refuse_others()
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self.newest_checkpoint()
            if resume_from_checkpoint is None:
                raise NotCommitted(f"{self.args.output_dir}: no checkpoint to resume from")
        if resume_from_checkpoint and _is_ours(resume_from_checkpoint):
            self._write_trainer_state(resume_from_checkpoint)
        result = super().train(resume_from_checkpoint, *args, **kwargs)  # pyright: ignore
        self._saver.wait()
        return result

    def _refuse_others(self) -> None:
        """Raise ValueError for what keeps its state where dtckpt cannot see it."""
        trainer: Any = self
        version = getattr(getattr(self.accelerator.state, "fsdp_plugin", None), "fsdp_version", 2)
        refused = {
            "DeepSpeed": trainer.is_deepspeed_enabled,
            "FSDP1 (set fsdp_version=2)": trainer.is_fsdp_enabled and version == 1,
            "FSDP of XLA": trainer.is_fsdp_xla_enabled,
            "push_to_hub": self.args.push_to_hub,
        }
        found = [name for name, is_on in refused.items() if is_on]
        if found:
            raise ValueError(f"DtckptTrainer does not go together with {', '.join(found)}")

    def _write_trainer_state(self, path: str) -> None:
        """Write the file that the Trainer reads its progress from, as the checkpoint has it."""

        def write(_: object) -> bytes:
            text = bytes(read_part(path, "trainer_state").tolist()).decode()
            file = Path(path, _STATE)
            if not file.exists() or file.read_text() != text:
                temporary = file.with_suffix(".new")
                temporary.write_text(text)
                temporary.replace(file)
            return b""

        decided({"timeout": self._saver.timeout}, "trainer state", path, write)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        trainer: Any = self
        if trainer.hp_search_backend is None and trial is None:
            trainer.store_flos()
        folder = Path(trainer._get_output_dir(trial=trial))
        path = folder / f"{_PREFIX}{self.state.global_step}"
        best = folder / f"{_PREFIX}{self.state.best_global_step}"
        if self.state.best_global_step and (best == path or best.is_dir()):
            self.state.best_model_checkpoint = str(best)
        declare_buffers_of_ddp(trainer.model_wrapped)
        state: dict[str, Any] = {"model": self._bare_model()}
        if not self.args.save_only_model:
            state |= self._training_state() | {"rng": _random_numbers()}
        if self.args.should_save:
            text = self._trainer_state().encode()
            state["trainer_state"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            self._write_beside(path, text)
        self._saver.save(state, path, metadata={"global_step": self.state.global_step})
        if self.args.should_save:
            self._rotate(folder, self.state.global_step)

    def _bare_model(self) -> Any:
        return self.accelerator.unwrap_model(self.model)

    def _training_state(self) -> dict[str, Any]:
        """Return what is saved and loaded beside the model."""
        optimizer, scheduler = self.optimizer, self.lr_scheduler
        state: dict[str, Any] = {
            "optimizer": getattr(optimizer, "optimizer", optimizer),
            "scheduler": getattr(scheduler, "scheduler", scheduler),
        }
        if self.accelerator.scaler is not None:
            state["scaler"] = self.accelerator.scaler
        return state

    def _trainer_state(self) -> str:
        """Return the progress of the training, with that of callbacks, as JSON."""
        trainer: Any = self
        for callback in [*trainer.callback_handler.callbacks, trainer.control]:
            if isinstance(callback, _callbacks.ExportableState):
                kept, told = self.state.stateful_callbacks, callback.state()
                name = type(callback).__name__
                if isinstance(kept[name], list):
                    kept[name].append(told)
                else:
                    kept[name] = told
        return json.dumps(asdict(self.state), indent=2, sort_keys=True) + "\n"

    def _write_beside(self, path: Path, trainer_state: bytes) -> None:
        """Write what is no state: the progress once more, configuration, tokenizer."""
        path.mkdir(parents=True, exist_ok=True)
        (path / _STATE).write_bytes(trainer_state)
        others: tuple[Any, ...] = (
            getattr(self._bare_model(), "config", None),
            getattr(self, "processing_class", None),
        )
        for part in others:
            if hasattr(part, "save_pretrained"):
                part.save_pretrained(str(path))

    def _rotate(self, folder: Path, step: int) -> None:
        """Remove checkpoints of dtckpt above the limit, the oldest first; never the best one."""
        limit = self.args.save_total_limit
        if not limit or limit < 0:
            return
        steps = Run(open_store(folder), _PREFIX).look().steps
        older = [found.name for found in steps if found.number != step]
        best = Path(self.state.best_model_checkpoint or folder).name
        removable = [name for name in older if name != best]
        for name in removable[: max(0, len(older) + 1 - limit)]:
            self._saver.remove(folder / name, with_folder=True)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not _is_ours(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # pyright: ignore
            return
        bare = self.accelerator.unwrap_model(self.model if model is None else model)
        self._load({"model": bare}, resume_from_checkpoint, select=["model"])

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not _is_ours(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)  # pyright: ignore
            return
        if not _has_training_state(checkpoint):
            return  # save_only_model: as the Trainer, which warns when it finds no such files
        state = self._training_state()
        groups = state["optimizer"].param_groups
        saved = read_part(checkpoint, "optimizer", "param_groups")
        schedule = state["scheduler"]
        if len(saved) != len(groups):  # by mesh, of which there are others now
            del state["scheduler"]
        self._load({"model": self._bare_model()} | state, checkpoint, select=list(state))
        if len(saved) != len(groups):
            told = read_part(checkpoint, "scheduler")
            schedule.load_state_dict(regrouped(told, groups, num_saved=len(saved)))

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not _is_ours(checkpoint):  # else it came with the optimizer
            super()._load_scaler(checkpoint)  # pyright: ignore

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None or not _is_ours(checkpoint):
            super()._load_rng_state(checkpoint)  # pyright: ignore
            return
        if not _has_training_state(checkpoint):
            return
        self._load({"rng": _random_numbers()}, checkpoint, select=["rng"])

    def _load_best_model(self) -> None:
        self._saver.wait()
        best = self.state.best_model_checkpoint
        if not _is_ours(best):
            super()._load_best_model()  # pyright: ignore
            return
        self._load({"model": self._bare_model()}, best, select=["model"])

    def _load(self, state: Mapping[str, Any], path: str, *, select: list[str]) -> None:
        load(
            state,
            path,
            select=select,
            timeout=self._saver.timeout,
            allow_pickle=self._saver.allow_pickle,
        )


class DtckptTrainer(DtckptTrainerMixin, Trainer):
    """transformers' Trainer with checkpoints of dtckpt."""


@contextmanager
def _without_its_refusal(model: Any, args: Any) -> Generator[None]:
    """Let a Trainer be made that is to save the optimizer of a model sharded as it was loaded.

    transformers refuses that, since its own files could not hold it; dtckpt's do.
    """
    is_sharded = getattr(model, "is_distributed_loading_by_transformers", False)
    if args is None or not is_sharded or args.save_only_model:
        yield
        return
    args.save_only_model = True
    try:
        yield
    finally:
        args.save_only_model = False


def _random_numbers() -> RandomNumbers:
    return RandomNumbers(resize="repeat", numpy=True, python=True)


def _has_training_state(path: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint has more than the model; tells by a warning if not."""
    with open_checkpoint(path) as checkpoint:
        saved = checkpoint.state_dict()
    if "optimizer" in saved:
        return True
    logger.warning(
        "%s was saved with save_only_model: optimizer, scheduler and random numbers begin anew",
        path,
    )
    return False


def _is_ours(path: str | os.PathLike[str]) -> bool:
    return Path(path, MANIFEST).exists()
