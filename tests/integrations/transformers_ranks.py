"""transformers' Trainer trains a tiny model, and saves and resumes by dtckpt.

Its argument is a list of trainings, as JSON. Rank 0 prints the losses of all as its last line.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dtckpt.integrations.transformers import DtckptTrainer

from ..processes import join_group, leave_group

transformers: Any = importlib.import_module("transformers")
accelerate_state: Any = importlib.import_module("accelerate.state")
BATCH = 4

# Accelerate refuses meshes of CPUs here, and nowhere else.
parallelism: Any = importlib.import_module("accelerate.parallelism_config")


def _accept(*_: object) -> None:
    """Take any mesh."""


parallelism.ParallelismConfig._validate_accelerator = _accept


class EndsAt(transformers.TrainerCallback):
    """End the training after a step, or kill this process, as the system would."""

    def __init__(self, stop: int | None, kill: int | None) -> None:
        self.stop, self.kill = stop, kill

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        if state.global_step == self.stop:
            control.should_training_stop = True


def model_of(told: Any) -> Any:
    spread: dict[str, Any] = {}
    if told.get("mesh"):
        distributed: Any = importlib.import_module("transformers.distributed")
        spread = {"distributed_config": distributed.DistributedConfig(**told["mesh"])}
    return transformers.AutoModelForCausalLM.from_pretrained(
        told["model"], dtype=torch.float32, attn_implementation="eager", **spread
    )


def data() -> list[dict[str, Any]]:
    tokens = torch.randint(128, (64, 8), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


def trainer(told: Any) -> Any:
    mesh = told.get("mesh") or {}
    args = transformers.TrainingArguments(
        told["folder"],
        use_cpu=True,
        max_steps=8,
        per_device_train_batch_size=BATCH // (mesh.get("fsdp_size", 1) if mesh else told["size"]),
        logging_steps=1,
        save_steps=2,
        save_total_limit=told.get("keep"),
        learning_rate=1e-2,
        warmup_steps=3,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=7,
        **({"ddp_backend": "gloo"} if told["size"] > 1 else {}),
    )
    return DtckptTrainer(
        model=model_of(told),
        args=args,
        train_dataset=data(),
        callbacks=[EndsAt(told.get("stop"), told.get("kill"))],
        async_save=told.get("background", False),
    )


def fit(number: int, told: Any) -> Any:
    """Run a training on the first ranks, and return what is to be known of it."""
    size = told.setdefault("size", math.prod((told.get("mesh") or {}).values()))
    rank = int(os.environ["RANK"])
    if rank >= size:
        return None
    kept = dict(os.environ)
    if size > 1:
        join_group(size, str(number))
        os.environ |= {"LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {"MASTER_PORT": "29500"}
    else:
        for name in ("RANK", "WORLD_SIZE"):
            os.environ.pop(name)
    try:
        return run(told)
    finally:
        accelerate_state.AcceleratorState._reset_state(reset_partial_state=True)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        os.environ |= kept


def run(told: Any) -> Any:
    """Run a training, from the newest checkpoint of a folder if it is to resume."""
    made = trainer(told)
    path: Any = None
    if told.get("resume"):
        made.args.output_dir = told["resume"]
        path = made.newest_checkpoint()
        made.args.output_dir = told["folder"]
        assert path, "nothing to go on from"
    made.train(resume_from_checkpoint=path)
    losses = {log["step"]: log["loss"] for log in made.state.log_history if "loss" in log}
    names = sorted(place.name for place in Path(told["folder"]).glob("checkpoint-*"))
    return {"losses": list(losses.values()), "from": path and Path(path).name, "saved": names}


def main(trainings: list[Any]) -> None:
    done = [fit(number, told) for number, told in enumerate(trainings)]
    print(json.dumps(done), flush=True)
    join_group()
    leave_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
