"""What it costs to move bytes: the model by which a route is chosen."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds of one communication step: lines with few parameters.

    A step takes ``launch_us`` and a latency for every other rank of its group, both once for every
    round that its buffers need, the time that its busiest rank needs to send or receive (whichever
    is more), and that of copying what has to be packed and unpacked. With ``ranks_per_host``, ranks
    that follow each other share a host, and what comes from others goes over ``host_link_gb_s``.
    Only proportions matter. All ranks of a mesh must use the same model: their plans would differ.
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
    round_bytes: int = 4 << 20
    """About as much does a rank send, and receive, in one round: its buffers are no larger."""
    direct_bytes: int | None = None
    """From here on exchanges go from rank to rank as they lie in memory, on CPUs; None never.
    What lies in one stretch then needs neither buffers nor rounds."""
    ranks_per_host: int | None = None
    """None where all ranks are on one host, or all links are alike."""
    host_link_gb_s: float = 1.0
    """Of one rank, to other hosts."""

    def num_rounds(self, num_bytes: int) -> int:
        """Return in how many rounds ranks exchange that send or receive at most ``num_bytes``."""
        return max(-(-num_bytes // self.round_bytes), 1)

    def exchange_rounds(self, most_bytes: int, *, in_rows: bool) -> int:
        """Return the rounds of an exchange that is not awaited later.

        ``in_rows`` says that on all ranks all that moves lies in one stretch.
        """
        return 1 if in_rows and self.is_direct(most_bytes) else self.num_rounds(most_bytes)

    def is_direct(self, most_bytes: int) -> bool:
        """Whether so much goes from rank to rank as it lies in memory."""
        return self.direct_bytes is not None and most_bytes >= self.direct_bytes

    def exchange(
        self, size: int, moved: int, copied: int, far: int = 0, *, rounds: int = 1
    ) -> float:
        """Return the seconds of an exchange in a group of ``size`` ranks.

        ``moved`` bytes are sent or received by the busiest rank, ``far`` of them from other hosts,
        and ``copied`` are packed and unpacked.
        """
        latency = rounds * (self.launch_us + (size - 1) * self.message_us)
        wire = max(moved / self.exchange_gb_s, far / self.host_link_gb_s)
        return latency * 1e-6 + (wire + copied / self.copy_gb_s) * 1e-9

    def gather(
        self, size: int, moved: int, copied: int, far: float = 0.0, *, rounds: int = 1
    ) -> float:
        """Return the seconds of an all-gather, or of a reduction that moves as much.

        ``far`` is what a rank has to take from other hosts if those of one host share that.
        """
        latency = rounds * (self.launch_us + (size - 1) * self.hop_us)
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
    direct_bytes=4 << 20,
)
"""Between processes of one machine, as measured in ``docs/benchmarks.md``: an all-gather is a ring
of synchronous steps, and an exchange that sends the same to everyone takes half of its time.
Messages from rank to rank begin more slowly than one all-to-all, but save the copies."""

NCCL = CostModel(
    launch_us=20.0,
    message_us=2.0,
    exchange_gb_s=150.0,
    hop_us=1.0,
    gather_gb_s=200.0,
    copy_gb_s=1000.0,
    host_link_gb_s=40.0,
    round_bytes=128 << 20,
)
"""For GPUs that NVLink joins on a host, with a network card each; from their data sheets, not
measured here. Rounds are as large as buffers may be, since each is launched."""
