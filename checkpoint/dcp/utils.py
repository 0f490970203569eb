"""Finding what an index names in a state: torch's, under the name of torch's module."""

from __future__ import annotations

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.utils import find_state_dict_object, find_tensor_shard

__all__ = ["CheckpointException", "find_state_dict_object", "find_tensor_shard"]
