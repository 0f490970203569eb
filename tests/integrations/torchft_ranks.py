"""Two replicas train by torchft's Manager; one loses all it had, and heals through the transport.

Run by test_torchft, in one process, as torchft's own tests do: a thread for each replica.
"""

from __future__ import annotations

import importlib
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dtckpt.integrations.torchft import DtckptTransport

torchft: Any = importlib.import_module("torchft")
coordination: Any = importlib.import_module("torchft.coordination")
STEPS, LOST_AT = 6, 3
SECONDS = timedelta(seconds=60)


class Counted(DtckptTransport):
    """A transport that remembers the steps that it has brought."""

    received: list[int]

    def __init__(self) -> None:
        super().__init__(timeout=SECONDS)
        self.received = []

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        found = super().recv_checkpoint(src_rank, metadata, step, timeout)
        self.received.append(step)
        return found


def train(name: str, seed: int, lighthouse: str, until: int) -> tuple[list[int], list[Any], Any]:
    """Train a replica with weights of its own to a step, and return what it has received."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(given: dict[str, Any]) -> None:
        model.load_state_dict(given["model"])
        optimizer.load_state_dict(given["optimizer"])

    c10d: Any = dist
    rendezvous = c10d.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    transport = Counted()
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=SECONDS),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=2,
        use_async_quorum=False,
        timeout=SECONDS,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=rendezvous.port,
        lighthouse_addr=lighthouse,
        hostname="localhost",
        replica_id=name,
        checkpoint_transport=transport,
    )
    try:
        while manager.current_step() < until:
            manager.start_quorum()
            optimizer.zero_grad()
            inputs = torch.full((2, 4), float(manager.current_step()))
            model(inputs).square().mean().backward()
            for parameter in model.parameters():
                manager.allreduce(parameter.grad).wait()
            if manager.should_commit():
                optimizer.step()
    finally:
        manager.shutdown(wait=False)
    return transport.received, [value.clone() for value in model.parameters()], state()


def dying(lighthouse: str) -> tuple[list[int], list[Any], Any]:
    """Train, lose everything, and come back as a replica that knows nothing."""
    first, _, _ = train("dying-1", 1, lighthouse, LOST_AT)
    second, weights, state = train("dying-2", 2, lighthouse, STEPS)
    return first + second, weights, state


def main() -> None:
    server = coordination.LighthouseServer(
        bind="[::]:0", min_replicas=2, join_timeout_ms=100, heartbeat_timeout_ms=1000
    )
    with ThreadPoolExecutor(2) as pool:
        living = pool.submit(train, "living", 0, server.address(), STEPS)
        other = pool.submit(dying, server.address())
        (_, weights, state), (received, others, other_state) = living.result(), other.result()
    assert LOST_AT in received, received
    for own, healed in zip(weights, others, strict=True):
        assert own.equal(healed)
    for number, entry in state["optimizer"]["state"].items():
        assert entry["exp_avg"].equal(other_state["optimizer"]["state"][number]["exp_avg"])
    server.shutdown()
    print("ok", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
