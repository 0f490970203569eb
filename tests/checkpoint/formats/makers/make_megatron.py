"""Make ``tests/data/megatron-core-0.16.1.tar.xz`` anew: a GPT over two tensor-parallel ranks.

    pip install --no-deps --target PLACE megatron-core==0.16.1
    PYTHONPATH=PLACE python -m tests.checkpoint.formats.makers.make_megatron

Saved by ``megatron.core.dist_checkpointing.save`` as a training of Megatron-LM does: the sharded
state dict of a GPTModel, in which layers are stacked, that of an Adam, generators of each rank, and
what is the same on all in ``common.pt``, with the arguments. ``expected.pt`` has what
``dist_checkpointing`` loads of it again, and what the model says of five tokens.
"""

# pyright: reportPrivateImportUsage=false, reportMissingImports=false, reportUnknownVariableType=false

from __future__ import annotations

import os
import random
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from . import making

RANKS = 2


def rank_main(rank: int, place: str) -> None:
    """Train a step and save, on one rank."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29653"}
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer import TransformerConfig

    patch = pytest.MonkeyPatch()  # of what it calls without a GPU, too
    patch.setattr(torch.cuda, "synchronize", lambda: None)
    patch.setattr(torch.cuda, "current_device", lambda: "cpu")
    patch.setattr(CudaRNGStatesTracker, "fork", unforked)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=12,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        use_cpu_initialization=True,
        tensor_model_parallel_size=RANKS,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=32,
        max_sequence_length=16,
        position_embedding_type="rope",
        parallel_output=False,
        share_embeddings_and_output_weights=False,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()

    ids, mask = torch.arange(5).unsqueeze(0), torch.ones(1, 1, 5, 5).triu(1).bool()
    with torch.no_grad():
        logits = model.eval()(ids, ids, mask)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(100 + rank)
    save = stated(model, optimizer, rank)
    dist_checkpointing.save(save, place)
    loaded = dist_checkpointing.load_plain_tensors(place)
    if rank == 0:
        tensors = {k: v for k, v in loaded.items() if isinstance(v, torch.Tensor)}
        torch.save(tensors | {"logits of 0 to 4": logits}, Path(place) / "expected.pt")
    dist.destroy_process_group()


def stated(model: Any, adam: Any, rank: int) -> dict[str, Any]:
    """Return the state that Megatron-LM saves, of ``generate_state_dict`` in its training."""
    from megatron.core.dist_checkpointing import ShardedObject
    from megatron.core.optimizer.optimizer import FP32Optimizer
    from megatron.core.transformer.enums import AttnBackend

    optimizer = object.__new__(FP32Optimizer)  # its __init__ asks for a GPU, the rest does not
    optimizer.optimizer = adam
    optimizer.is_stub_optimizer = False
    sharded = model.sharded_state_dict()
    return {
        "args": Namespace(num_layers=2, lr=0.01, attention_backend=AttnBackend.auto, seed=1),
        "checkpoint_version": 3.0,
        "iteration": 10,
        "model": sharded,
        "optimizer": optimizer.sharded_state_dict(sharded),
        "opt_param_scheduler": {"max_lr": 0.01, "num_steps": 80},
        "rng_state": ShardedObject("rng_state", [rng_state()], (1, RANKS), (0, rank)),
    }


def unforked(*_: Any) -> Any:
    """Draw from the one generator that there is without a GPU."""
    return nullcontext()


def rng_state() -> dict[str, Any]:
    """Return the state of generators, as Megatron-LM collects it."""
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "rng_tracker_states": {},
    }


if __name__ == "__main__":
    with making("megatron-core-0.16.1") as place:
        torch.multiprocessing.spawn(rank_main, (place,), nprocs=RANKS)
