"""What a file is, told by its first bytes, never by the ending of its name."""

from __future__ import annotations

import pickle
import re

from dtckpt.errors import CheckpointError, Corrupt

LEGACY_MAGIC = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)
"""What a file of torch.save of before 1.6 begins with."""
HEAD_BYTES = 512
"""As many first bytes are looked at."""

_UNPACK = "unpack it and open what is in it"
_CONVERT = "load it with the program that wrote it and save the tensors with safetensors or torch"
_FETCH = "fetch the file itself"
_NOT_THE_FILE: tuple[tuple[re.Pattern[bytes], str, str], ...] = (
    (
        re.compile(rb"version https://(?:git-lfs|hawser)\.github\.com/spec/"),
        "a pointer of git-lfs, not the file that it stands for",
        "run `git lfs pull` where it was cloned, or download the file",
    ),
    (
        re.compile(rb"(?i)\s*(?:<!doctype html|<html|<head|<\?xml)"),
        "a web page or an answer of a server",
        "look at it by a text editor: it says why the server sent it; then download the file again",
    ),
)
"""What is in the place of a file: pattern of the first bytes, what it is, and what to do."""
_OTHERS: tuple[tuple[re.Pattern[bytes], str, str], ...] = (
    (re.compile(rb"\x1f\x8b"), "compressed by gzip", _UNPACK),
    (re.compile(rb"\x28\xb5\x2f\xfd"), "compressed by zstd", _UNPACK),
    (re.compile(rb"BZh[1-9]"), "compressed by bzip2", _UNPACK),
    (re.compile(rb"\xfd7zXZ\x00"), "compressed by xz", _UNPACK),
    (re.compile(rb"7z\xbc\xaf\x27\x1c"), "a 7z archive", _UNPACK),
    (re.compile(rb"(?s).{257}ustar"), "a tar archive, as of NeMo or of torch before 0.2", _UNPACK),
    (re.compile(rb"GGUF"), "a GGUF file of llama.cpp", _CONVERT),
    (re.compile(rb"lmgg|tjgg|fmgg|algg"), "an old file of llama.cpp", _CONVERT),
    (re.compile(rb"\x89HDF\r\n\x1a\n"), "an HDF5 file, as of Keras", _CONVERT),
    (re.compile(rb"\x93NUMPY"), "an array of numpy", "load it with numpy.load and save a dict"),
    (re.compile(rb"ARROW1"), "an Arrow file", _CONVERT),
    (re.compile(rb"PAR1"), "a Parquet file", _CONVERT),
    (
        re.compile(rb'\s*\{.*"weight_map"', re.DOTALL),
        "an index of weights",
        "open the directory that it lies in",
    ),
    (
        re.compile(rb'\s*\{"digest"'),
        "the manifest of a checkpoint of dtckpt",
        "open the directory that it lies in",
    ),
    (re.compile(rb"\s*[\[{]"), "a JSON text, without tensors", "give the path of the weights"),
    (
        re.compile(rb"\x80[\x02-\x05]"),
        "a plain pickle, not one of torch.save",
        "load it with pickle, if you trust who wrote it, and save it by torch.save",
    ),
)


def is_safetensors(head: bytes, size: int) -> bool:
    """Whether a file of these first bytes may be of safetensors."""
    length = int.from_bytes(head[:8], "little")
    return len(head) > 8 and 2 <= length <= size - 8 and head[8:].lstrip()[:1] == b"{"


def is_torch_save(head: bytes) -> bool:
    """Whether a file of these first bytes may be one of torch.save."""
    return is_zip(head) or head.startswith(LEGACY_MAGIC)


def is_zip(head: bytes) -> bool:
    """Whether a file of these first bytes may be a zip archive."""
    return head.startswith((b"PK\x03\x04", b"PK\x05\x06"))


def check_readable(head: bytes, size: int, where: str) -> None:
    """Raise CheckpointError where first bytes tell that a file is of no format that is read.

    Corrupt where something else is in the place of a file, or nothing. Returns for zip archives,
    for safetensors, and for what is not recognised.
    """
    head = head[:HEAD_BYTES]
    if size == 0:
        raise Corrupt(f"{where}: the file is empty. Fetch it again")
    for pattern, what, remedy in _NOT_THE_FILE:
        if pattern.match(head):
            raise Corrupt(f"{where} is {what}: {remedy}")
    if not any(head):
        raise Corrupt(
            f"{where}: begins with {len(head)} zero bytes: it was made but never written, as by a "
            "copy or a download that broke off. Fetch it again"
        )
    if is_zip(head) or is_safetensors(head, size):
        return
    for pattern, what, remedy in _OTHERS:
        if pattern.match(head):
            raise CheckpointError(f"{where} is {what}, which dtckpt does not read: {remedy}")
