"""Parameters after some steps are those of torch's ``fully_shard``, by as many collectives."""

from __future__ import annotations

from tests.processes import run_processes


def test_every_option_beside_that_of_torch() -> None:
    run_processes("tests.dtensor.fsdp.beside_torch", 4)
