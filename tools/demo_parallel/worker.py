"""The training job of the demo: what every rank runs under torchrun.

What is done for the mesh is in ``model.py``; the rest is the job of ``make demo``, whose model
torch's parallelisms spread.
"""

from __future__ import annotations

import torch

from dtckpt.dtensor import DeviceMesh, Mesh, init_device_mesh

from ..demo.model import GPT
from ..demo.text import Batch
from ..demo.worker import Job, main
from .model import passes, spread


class ParallelJob(Job):
    """The job on one device, or on a mesh."""

    on: DeviceMesh | None = None

    def spread(self, model: GPT) -> GPT:
        """Return a model, which all ranks have alike, spread over the mesh."""
        if not self.options.mesh:
            return model
        mesh = Mesh.parse(self.options.mesh)
        self.on = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.axis_names)
        return spread(model, self.on)

    def backward(self, batch: Batch) -> torch.Tensor:
        """Make the passes of this rank's part of a batch and return its loss."""
        if self.on is not None:
            return passes(self.model, self.on, batch)
        loss = self.model(batch.inputs, batch.targets)
        loss.backward()
        return loss.detach()


if __name__ == "__main__":
    main(ParallelJob)
