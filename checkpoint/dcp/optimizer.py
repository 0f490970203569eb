"""``load_sharded_optimizer_state_dict``: torch's, under the name of torch's module."""

from __future__ import annotations

from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict

__all__ = ["load_sharded_optimizer_state_dict"]
