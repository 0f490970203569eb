"""Transforms of ``torch.func`` and forward-mode derivatives: as on one device, or refused."""

from __future__ import annotations

from tests.processes import run_processes


def test_transforms_and_tangents_are_those_of_one_device_or_refused_on_all_ranks() -> None:
    run_processes("tests.dtensor.tensor.transform_ranks", 2)
