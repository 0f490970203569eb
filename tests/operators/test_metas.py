"""Planning says of results what kernels return, for a few operators; ``make metas`` tries all."""

from __future__ import annotations

import warnings

import pytest
import torch

from .database import NoDatabase, load
from .metas import EXCEPTIONS, compare

OPERATORS = (
    "nn.functional.batch_norm",
    "nn.functional.cross_entropy",
    "nn.functional.embedding_bag",
    "nn.functional.group_norm",
    "nn.functional.huber_loss",
    "nn.functional.instance_norm",
    "nn.functional.layer_norm",
    "nn.functional.mse_loss",
    "add",
    "cumsum",
    "softmax",
    "sum",
)
"""Those whose kernels differ in dtypes or shapes between devices, and a few others."""


def test_planned_results_are_those_of_the_kernels() -> None:
    try:
        known = load("uneven")
    except NoDatabase as error:
        pytest.skip(str(error))
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.int32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = compare([(name, known[name]) for name in OPERATORS], dtypes, samples=4)
    unknown = {key: text for key, text in found.differences.items() if key[0] not in EXCEPTIONS}
    assert not unknown
    assert found.calls > 150
