"""What every rank of the parallel demo does; the whole of it is run by ``make demo-parallel``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtckpt.dtensor import DeviceMesh, Mesh
from tests.dtensor.rank_meshes import groups_over_several_axes, run_on_mesh
from tools.demo.model import Config, make_model
from tools.demo.text import Corpus
from tools.demo_parallel.__main__ import PLAN
from tools.demo_parallel.model import passes, spread

SMALL = Config(vocabulary=256, context=9, width=12, heads=2, hidden=5, blocks=1)
BATCH = Corpus(bytes(range(256)) * 4).batch(1, rows=8, context=9)


@pytest.mark.parametrize("ranks", [PLAN.killed, PLAN.resumed], ids=str)
def test_passes_are_those_of_one_device(ranks: Any) -> None:
    whole = make_model(7, SMALL)
    expected = whole(BATCH.inputs, BATCH.targets)
    expected.backward()
    mesh = Mesh.parse(ranks.mesh)

    def body(on: DeviceMesh) -> torch.Tensor:
        model = spread(make_model(7, SMALL), on)
        loss = passes(model, on, BATCH)
        for (name, parameter), one in zip(
            model.named_parameters(), whole.parameters(), strict=True
        ):
            grad: Any = parameter.grad
            torch.testing.assert_close(grad.full_tensor(), one.grad, msg=name)
        return loss

    with groups_over_several_axes():
        losses = run_on_mesh(mesh.shape, body, mesh.axis_names)
    assert mesh.size == ranks.count
    torch.testing.assert_close(torch.stack(losses).mean(), expected.detach())
