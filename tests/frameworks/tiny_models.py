"""Tiny models of transformers, whose fused weights and experts are sharded part by part."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

transformers: Any = importlib.import_module("transformers")  # far too large to be type-checked

_SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {"moe_intermediate_size": 16, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "mixtral": ("MixtralConfig", {"intermediate_size": 64, "num_local_experts": 4}),
    "llama-4": (
        "Llama4TextConfig",
        {
            "intermediate_size": 16,
            "intermediate_size_mlp": 64,
            "head_dim": 8,
            "num_local_experts": 4,
        },
    ),
}
"""The class of each model's configuration, and what it takes."""


def write_pretrained(folder: Path) -> None:
    """Write every model as transformers does, with weights of its own."""
    for seed, (name, (config, sizes)) in enumerate(CONFIGS.items()):
        torch.manual_seed(seed)
        made = getattr(transformers, config)(**_SIZES, **sizes)
        transformers.AutoModelForCausalLM.from_config(made).save_pretrained(folder / name)


def pretrained(folder: Path, name: str, **sizes: int) -> Any:
    """Return a model on the ranks of the job, over axes of these sizes; without any, whole."""
    spread: dict[str, Any] = {}
    if sizes:
        distributed: Any = importlib.import_module("transformers.distributed")
        spread = {"distributed_config": distributed.DistributedConfig(**sizes)}
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder / name, dtype=torch.float32, **spread
    )
