"""A Trainer resumes from a checkpoint of the model alone. Run by test_transformers: FOLDER."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from typing import Any

import torch

import dtckpt.checkpoint as ckpt
from dtckpt.integrations.transformers import DtckptTrainer

transformers: Any = importlib.import_module("transformers")
ROWS = [{"input_ids": row, "labels": row} for row in torch.arange(512).reshape(64, 8) % 64]


def trainer(folder: str, **options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    args = transformers.TrainingArguments(
        folder, save_steps=3, use_cpu=True, report_to=[], disable_tqdm=True, **options
    )
    model = transformers.LlamaForCausalLM(config)
    return DtckptTrainer(model=model, args=args, train_dataset=ROWS)


def main(folder: str) -> None:
    for name in ("RANK", "WORLD_SIZE"):  # a training of one process without a group
        del os.environ[name]
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("dtckpt").addHandler(handler)
    first = trainer(folder, save_only_model=True, max_steps=6)
    first.train()
    trained = {name: value.clone() for name, value in first.model.state_dict().items()}
    second = trainer(folder, max_steps=9)
    seen: list[int] = []
    weights: list[bool] = []

    class Look(transformers.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen.append(state.global_step)
            own = second.model.state_dict()
            weights.append(all(torch.equal(own[name], trained[name]) for name in trained))

    second.add_callback(Look())
    second.train(resume_from_checkpoint=True)
    assert seen == [6], seen
    assert weights == [True]
    assert second.state.global_step == 9
    assert any("save_only_model" in text for text in told), told
    with ckpt.open(f"{folder}/checkpoint-9") as opened:
        assert "optimizer" in opened.state_dict()


if __name__ == "__main__":
    main(sys.argv[1])
    sys.stdout.flush()
    os._exit(0)
