"""How much is read, verified, staged and dealt out at once.

One place for all that reads, looked up when it is needed, so that a test can make it small. What
goes between ranks at once depends on their backend: ``CostModel.round_bytes``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from ...storage.base import Store
from ..files.blocks import DEFAULT_BLOCK_BYTES

READ_BYTES = 16 << 20
"""Most bytes that are read in one go."""
STAGED_BYTES = 2 << 20
"""Most bytes that are read in one go through a buffer where a request costs little: they are still
in the processor's own cache when they are dealt out."""
NUM_READERS = 4
"""Reads in flight; each has at most one buffer of READ_BYTES, which bounds the memory of a load."""
NUM_REMOTE_READERS = 8
"""Reads in flight on object stores, where connections have limits; 128 MiB of buffers at most."""
PAGE_BYTES = 4 << 10
"""Gaps up to this are read over: the system reads pages anyway."""
STEP_BYTES = 64 << 10
"""Gaps between the rows of a wanted box up to this are read over: a request for each row takes 20
microseconds, in which a file that the system holds in memory gives more."""
GAP_BYTES = 64 << 10
"""Gaps up to this are read over as long as all of them are an eighth of what is wanted."""
IN_PLACE_BYTES = 64 << 10
"""Runs of fewer bytes are copied: that costs less than a buffer of their own in a read."""
VERIFY_BYTES = 1 << 20
"""Bytes that are hashed at once after they were read; less than a processor's own cache."""

NUM_OPENED_FOR = 4096
"""Chunks for which files are opened before any of these chunks is looked up."""

STRIPE_BYTES = 16 << 20
"""Most bytes of a stripe."""
ROUND_BYTES = 64 << 20
"""Most bytes that a rank reads in one round of stripes."""
MIN_TIMES = 2.0
"""Tensors that would be read so many times are exchanged where reading is expensive."""
SLOT_BYTES = 2 << 20
"""Most bytes that a rank reads into memory of the host before the others copy them, where a request
costs little: those of all ranks are in the processor's caches then."""
MIN_SHARED_BYTES = 32 << 20
"""Ranks of a host that have less to share than this read all of it faster than they agree on it."""
BLOCK_BYTES = DEFAULT_BLOCK_BYTES
"""Stripes begin at multiples of this. In files with other blocks some are read twice."""
ALIGNMENT = 64
"""Buffers of reads, and stripes in the memory of a round, begin at multiples of this."""


def num_readers(stores: Iterable[Store], num_local: int | None) -> int:
    """Return how many reads a rank may have in flight on some stores.

    With ``num_local`` ranks on its host as many as it has cores for itself, unless a store is
    remote: readers that the processor does the work of only get in each other's way beyond that.
    """
    if any(map(is_remote, stores)):
        return NUM_REMOTE_READERS
    if num_local is None:
        return NUM_READERS
    can_ask = hasattr(os, "sched_getaffinity")
    num_cores = len(os.sched_getaffinity(0)) if can_ask else os.cpu_count() or 1
    return max(min(num_cores // num_local, NUM_READERS), 1)


def is_remote(store: Store) -> bool:
    """Whether every read of a store goes over a network.

    Agents hold what ranks of their own host want, as a rule.
    """
    return "://" in store.url and not store.url.startswith(("in-process://", "peers://"))


def piece_bytes(store: Store) -> int:
    """Return how many bytes are best read in one go, where all of them are wanted."""
    return READ_BYTES if is_remote(store) else min(STAGED_BYTES, READ_BYTES)


def slot_bytes(store: Store) -> int:
    """Return how much a rank reads before the other ranks of its host copy it."""
    return ROUND_BYTES if is_remote(store) else SLOT_BYTES


def staged_bytes(store: Store, block_bytes: int) -> int:
    """Return how many bytes of a file of such blocks are read in one go through a buffer.

    Of blocks that are large beside it, very many would be read again for the next elements.
    """
    return READ_BYTES if 16 * block_bytes > STAGED_BYTES else piece_bytes(store)
