"""Ranks train by FSDP, and vLLM's tensor parallel Llama reads their checkpoints. Run by test_vllm.

Two ranks, on CPUs: the model is made and filled, and not run, which takes kernels.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import dtckpt.checkpoint as ckpt

from ..processes import join_group, leave_group
from . import flip_a_bit

platforms: Any = importlib.import_module("vllm.platforms")
cpu: Any = importlib.import_module("vllm.platforms.cpu")
# A build for GPUs knows of no platform where there is none, and frees the memory of one at a load.
platforms._current_platform = cpu.CpuPlatform()
torch.accelerator.empty_cache = lambda: None

config: Any = importlib.import_module("vllm.config")
distributed: Any = importlib.import_module("vllm.distributed")
loaders: Any = importlib.import_module("vllm.model_executor.model_loader")
plugins: Any = importlib.import_module("vllm.plugins")
reload: Any = importlib.import_module("vllm.model_executor.model_loader.reload.inplace")
transformers: Any = importlib.import_module("transformers")


def train(folder: str) -> None:
    """Save a model twice, and its weights as files that vLLM reads by itself."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    llama = transformers.LlamaConfig(**sizes, **heads, dtype="float32")
    for number in (1, 2):
        torch.manual_seed(number)
        model = transformers.LlamaForCausalLM(llama)
        if dist.get_rank() == 0:
            model.save_pretrained(f"{folder}/files-{number}")
        fully_shard(model)
        ckpt.save({"model": model, "step": number}, f"{folder}/step-{number}")
        weights = {"net": dict(model.state_dict())}
        lacking = weights["net"].pop("model.layers.1.mlp.down_proj.weight")
        assert lacking.numel() > 0
        ckpt.save(weights, f"{folder}/lacking-{number}")


def told(model: str, load_format: str = "dtckpt", like: str | None = None, **choices: Any) -> Any:
    """Return vLLM's configuration, of a model that is ``like`` another one."""
    return config.VllmConfig(
        model_config=config.ModelConfig(
            model=model,
            hf_config_path=like,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
        ),
        load_config=config.LoadConfig(load_format=load_format, model_loader_extra_config=choices),
        device_config=config.DeviceConfig("cpu"),
        parallel_config=config.ParallelConfig(tensor_parallel_size=2),
    )


def model_of(vllm: Any) -> Any:
    with config.set_current_vllm_config(vllm):
        return loaders.get_model(vllm_config=vllm)


def values(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def check(model: Any, wanted: dict[str, torch.Tensor]) -> None:
    found = values(model)
    assert found.keys() == wanted.keys()
    assert all(found[name].equal(value) for name, value in wanted.items())


def refused(vllm: Any) -> str:
    try:
        model_of(vllm)
    except (ckpt.CheckpointError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def main(folder: str) -> None:
    join_group()
    train(folder)
    plugins.load_general_plugins()
    with config.set_current_vllm_config(told(f"{folder}/files-1")):
        distributed.init_distributed_environment(2, dist.get_rank(), backend="gloo")
        distributed.initialize_model_parallel(2)
    first, second = (values(model_of(told(f"{folder}/files-{n}", "safetensors"))) for n in (1, 2))
    assert not first["lm_head.weight"].equal(second["lm_head.weight"])

    vllm = told(f"{folder}/files-2", checkpoint=f"{folder}/step-1")
    model = model_of(vllm)
    check(model, first)
    with config.set_current_vllm_config(vllm):
        with torch.no_grad():
            model.lm_head.weight.zero_()
        reload.reload_weights(vllm, model, None, None, True)
        check(model, first)
        reload.reload_weights(vllm, model, None, f"{folder}/step-2", True)
        check(model, second)
        reload.reload_weights(vllm, model, None, f"{folder}/files-1", True)
        check(model, first)
    check(model_of(told(f"{folder}/step-2", like=f"{folder}/files-1")), second)

    lacking = {"checkpoint": f"{folder}/lacking-1", "part": "net"}
    message = refused(told(f"{folder}/files-1", **lacking))
    assert "no weights for 1 parameters" in message, message
    assert "LayoutMismatch" in message, message
    assert "model.layers.1.mlp.down_proj.weight" in message, message
    message = refused(told(f"{folder}/files-1", checkpoint=f"{folder}/step-1", part="net"))
    assert "LayoutMismatch" in message, message
    assert "no tensors below 'net'" in message, message
    assert "got parts" in refused(told(f"{folder}/files-1", parts="net"))
    dist.barrier()
    if dist.get_rank() == 0:
        flip_a_bit(Path(folder, "step-1"))
    dist.barrier()
    message = refused(told(f"{folder}/files-1", checkpoint=f"{folder}/step-1"))
    assert message.startswith("Corrupt"), message
    leave_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
