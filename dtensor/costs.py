"""What it costs to move bytes: the model by which a route is chosen."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds of one communication step: lines with few parameters.

    A step takes ``launch_us``, a latency for every other rank of its group, the time that its
    busiest rank needs to send or receive (whichever is more), and that of copying what has to be
    packed and unpacked. With ``ranks_per_host``, ranks that follow each other share a host, and
    what comes from others goes over ``host_link_gb_s``. Only proportions matter. All ranks of a
    mesh must use the same model: their plans would differ.
    """

    launch_us: float
    message_us: float
    """Latency of an exchange, for every other rank of the group."""
    exchange_gb_s: float
    """What a rank sends and receives in an exchange."""
    hop_us: float
    """Latency of an all-gather or a reduction, for every other rank of the group."""
    gather_gb_s: float
    """What a rank receives in an all-gather or a reduction."""
    copy_gb_s: float
    """Copying between strided and packed memory."""
    few_bytes: int = 0
    """Up to as many bytes, a sum over ranks is an exchange of terms that each rank adds up."""
    ranks_per_host: int | None = None
    """None where all ranks are on one host, or all links are alike."""
    host_link_gb_s: float = 1.0
    """Of one rank, to other hosts."""

    def exchange(self, size: int, moved: int, copied: int, far: int = 0) -> float:
        """Return the seconds of an exchange in a group of ``size`` ranks.

        ``moved`` bytes are sent or received by the busiest rank, ``far`` of them from other hosts,
        and ``copied`` are packed and unpacked.
        """
        latency = self.launch_us + (size - 1) * self.message_us
        wire = max(moved / self.exchange_gb_s, far / self.host_link_gb_s)
        return latency * 1e-6 + (wire + copied / self.copy_gb_s) * 1e-9

    def gather(self, size: int, moved: int, copied: int, far: float = 0.0) -> float:
        """Return the seconds of an all-gather, or of a reduction that moves as much.

        ``far`` is what a rank has to take from other hosts if those of one host share that.
        """
        latency = self.launch_us + (size - 1) * self.hop_us
        wire = max(moved / self.gather_gb_s, far / self.host_link_gb_s)
        return latency * 1e-6 + (wire + copied / self.copy_gb_s) * 1e-9

    def host(self, rank: int) -> int:
        """Return the host of a rank."""
        return rank // self.ranks_per_host if self.ranks_per_host else 0


GLOO = CostModel(
    launch_us=20.0,
    message_us=120.0,
    exchange_gb_s=0.9,
    hop_us=300.0,
    gather_gb_s=0.4,
    copy_gb_s=5.0,
    few_bytes=256 << 10,
)
"""Between processes of one machine, as measured in ``docs/benchmarks.md``: an all-gather is a ring
of synchronous steps, and an exchange that sends the same to everyone takes half of its time."""

NCCL = CostModel(
    launch_us=20.0,
    message_us=2.0,
    exchange_gb_s=150.0,
    hop_us=1.0,
    gather_gb_s=200.0,
    copy_gb_s=1000.0,
    host_link_gb_s=40.0,
)
"""For GPUs that NVLink joins on a host, with a network card each; from their data sheets, not
measured here."""


def costs_of(device_type: str) -> CostModel:
    """Return the model for the backend that moves the tensors of a device."""
    return GLOO if device_type == "cpu" else NCCL
