"""All rows of the benchmark, in the order in which they are shown."""

from __future__ import annotations

from ..frame.row import Row
from .background import BUSY, STALL
from .compression import CODEC_MOMENTS, CODEC_WEIGHTS, LOAD_COMPRESSED, SAVE_COMPRESSED
from .formats import CONVERT, HUGGING_FACE_COLUMNS, HUGGING_FACE_ROWS
from .loading import FIRST_LOAD, LOAD, LOAD_FRESH, LOAD_MANY
from .memory import memory_row
from .memory_tier import PEERS_LOAD, PEERS_SAVE
from .remote import REMOTE_LOAD, REMOTE_REQUESTS, REMOTE_SAVE
from .replicas import LOAD_REPLICAS
from .resharding import RESHARD, RESHARD_FEW, RESHARD_MANY
from .rounds import LOAD_ROUNDS
from .saving import SAVE
from .small import SMALL_LOAD, SMALL_SAVE
from .spread import SPREAD

ROWS: tuple[Row, ...] = (
    SAVE,
    LOAD,
    LOAD_MANY,
    LOAD_FRESH,
    FIRST_LOAD,
    LOAD_REPLICAS,
    RESHARD_FEW,
    RESHARD,
    RESHARD_MANY,
    STALL,
    BUSY,
    SPREAD,
    memory_row("memory-quarter", 0.25),
    memory_row("memory-whole", 1.0),
    SMALL_SAVE,
    SMALL_LOAD,
    LOAD_ROUNDS,
    HUGGING_FACE_ROWS,
    HUGGING_FACE_COLUMNS,
    CONVERT,
    PEERS_SAVE,
    PEERS_LOAD,
    REMOTE_SAVE,
    REMOTE_LOAD,
    REMOTE_REQUESTS,
    CODEC_WEIGHTS,
    CODEC_MOMENTS,
    SAVE_COMPRESSED,
    LOAD_COMPRESSED,
)
