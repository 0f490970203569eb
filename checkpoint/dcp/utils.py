"""Finding what an index names in a state: torch's, under the name of torch's module."""

from __future__ import annotations

from torch.distributed.checkpoint.utils import find_state_dict_object, find_tensor_shard

__all__ = ["find_state_dict_object", "find_tensor_shard"]
