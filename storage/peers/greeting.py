"""How an agent and who connects to it make sure of each other.

Both prove that they know the token of the job, for random numbers that the other one has chosen, so
the token itself is never sent. What is sent after that is not encrypted.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from typing import Any

from dtckpt.errors import StorageError

from .frames import Channel

PROTOCOL = 1
"""Number of what is spoken; who speaks another one is told so."""
_MAX_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Greeted:
    """What an agent says of itself."""

    host: str
    pid: int


def greet(channel: Channel, job: str, token: bytes, where: str) -> Greeted:
    """Make oneself known to the agent at the other end; StorageError if it is not one of the job.

    OSError where the connection fails.
    """
    own = secrets.token_hex(16)
    channel.send({"protocol": PROTOCOL, "job": job, "nonce": own})
    told = channel.receive(max_json_bytes=_MAX_BYTES).fields
    if told.get("protocol") != PROTOCOL:
        raise StorageError(
            f"the agent at {where} is of another version: it speaks protocol "
            f"{told.get('protocol')!r}, this process {PROTOCOL}. Stop it with the version that "
            "started it; a new one is started then"
        )
    other = str(told.get("nonce"))
    expected = _proof(token, "agent", job, own, other)
    if not hmac.compare_digest(str(told.get("proof")).encode(), expected.encode()):
        raise StorageError(
            f"who listens at {where} does not know the token of the job {job!r}: it is an agent of "
            "another job, or was started with another token (DTCKPT_AGENT_TOKEN, or a file). Give "
            "the same to all hosts"
        )
    channel.send({"proof": _proof(token, "client", job, own, other)})
    channel.receive(max_json_bytes=_MAX_BYTES)
    return Greeted(str(told.get("host")), int(told.get("pid") or 0))


def be_greeted(channel: Channel, job: str, token: bytes, own: Greeted) -> None:
    """Find out whether who has connected knows the token; ConnectionError if not."""
    told = channel.receive(max_json_bytes=_MAX_BYTES).fields
    nonce, other = secrets.token_hex(16), str(told.get("nonce"))
    answer: dict[str, Any] = {"protocol": PROTOCOL, "host": own.host, "pid": own.pid}
    if told.get("protocol") == PROTOCOL:
        answer |= {"nonce": nonce, "proof": _proof(token, "agent", job, other, nonce)}
    channel.send(answer)
    proof = str(channel.receive(max_json_bytes=_MAX_BYTES).fields.get("proof"))
    expected = _proof(token, "client", job, other, nonce)
    if not hmac.compare_digest(proof.encode(), expected.encode()):
        raise ConnectionError("a stranger, who does not know the token of the job")
    channel.send({})


def _proof(token: bytes, side: str, *parts: str) -> str:
    said = "\0".join((side, *parts)).encode()
    return hmac.new(token, said, "sha256").hexdigest()
