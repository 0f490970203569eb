"""What ``compiled`` uses of the library, whose functions hide from torch.compile as it was told to.

The process imports it that all ranks are forked from: the compiler of torch takes seconds.
"""

# pyright: reportPrivateUsage=false
# Takes the private way of marking functions away, to see the public one work.

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

_torch_c: Any = torch._C
_frames = _torch_c._dynamo.eval_frame
_strategy = _frames.set_code_exec_strategy
if sys.argv[1] == "public":
    del _frames.set_code_exec_strategy
dtensor = importlib.import_module("dtckpt.dtensor")
importlib.import_module("dtckpt.dtensor.dtensor")
_frames.set_code_exec_strategy = _strategy
traffic = importlib.import_module("dtckpt.dtensor.comm.traffic")
parallel = importlib.import_module("dtckpt.dtensor.parallel")
fsdp = importlib.import_module("dtckpt.dtensor.fsdp")
experimental = importlib.import_module("dtckpt.dtensor.experimental")
assert "torch._dynamo" not in sys.modules
importlib.import_module("torch._dynamo")
