"""What a server does to requests instead of answering them, and what it has seen."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal[
    "get",
    "head",
    "put",
    "copy",
    "delete",
    "delete-many",
    "list",
    "begin-upload",
    "upload-part",
    "complete-upload",
    "abort-upload",
    "list-parts",
    "list-uploads",
    "bucket",
    "other",
]
"""What a request asks for; "bucket" is all that is about a bucket itself."""

Deed = Literal["refuse", "reset", "hang", "truncate", "stall", "alter", "swallow", "keep", "answer"]
"""What is done, see ``Fault.does``."""


@dataclass(kw_only=True)
class Fault:
    """What happens to which requests. The fields may be changed at any time."""

    does: Deed = "refuse"
    """* refuse: answer ``status`` and ``code``;
    * reset: hang up without a word;
    * hang: never answer;
    * truncate: send half of the body, then hang up;
    * stall: send half of the body, then nothing more;
    * alter: change a bit of what is stored, or, of a request to read, of what is sent;
    * swallow: say that all is well, and do nothing;
    * keep: hang up, and carry the request out when ``FakeServer.deliver`` is called;
    * answer: as asked; for a delay, a slow line, or conditions that are not looked at."""
    kinds: Collection[Kind] = ()
    """Of these only; of all where it is empty."""
    match: str = ""
    """Only where the path and query have this in them."""
    conditional: bool = False
    """Only requests to write or delete on a condition."""
    share: float = 1.0
    """How many of them, by chance."""
    skip: int = 0
    """So many are let pass first."""
    limit: int | None = None
    """At most so many."""
    status: int = 503
    code: str = "SlowDown"
    headers: dict[str, str] = field(default_factory=dict[str, str])
    """Of a refusal, such as Retry-After."""
    carry_out: bool = False
    """Whether what was asked is done all the same: only the reply of refuse, reset and hang."""
    ignore_conditions: bool = False
    """Whether it is done as if it had been asked without a condition."""
    seconds: float = 0.0
    """How long the server waits before it does anything."""
    bytes_per_second: float | None = None
    """How fast the body comes in, or goes out."""
    meanwhile: Callable[[], object] = lambda: None
    """Called at each of them, before anything is done about it; the server waits for it."""
    passed: int = 0
    hits: int = 0
    chance: random.Random = field(default_factory=lambda: random.Random(1))

    def takes(self, request: Asked) -> bool:
        """Whether this one is hit; counts it then."""
        if (
            (self.kinds and request.kind not in self.kinds)
            or self.match not in request.target
            or (self.conditional and not request.is_conditional)
            or (self.limit is not None and self.hits >= self.limit)
            or self.chance.random() >= self.share
        ):
            return False
        if self.passed < self.skip:
            self.passed += 1
            return False
        self.hits += 1
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request as it came, body and all."""

    kind: Kind
    method: str
    target: str
    """Path and query, decoded."""
    bucket: str
    key: str
    """Empty where it is about the bucket."""
    query: dict[str, str]
    headers: dict[str, str]
    """By names in lower case."""
    body: bytes

    @property
    def is_conditional(self) -> bool:
        """Whether something is to be written or deleted only on a condition."""
        named = {name.lower() for name in (*self.headers, *self.query)}
        conditions = {
            "if-match",
            "if-none-match",
            "ifgenerationmatch",
            "x-goog-if-generation-match",
        }
        return self.kind not in ("get", "head") and bool(named & conditions)

    @property
    def span(self) -> tuple[int, int | None] | None:
        """First and last byte of a Range header; ``(-n, None)`` are the last n; None without."""
        unit, _, given = self.headers.get("range", "").partition("=")
        first, dash, last = given.partition("-")
        if unit != "bytes" or not dash or "," in given:
            return None
        if not first:
            return -int(last), None
        return int(first), int(last) if last else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What is sent back."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict[str, str])
    body: bytes | memoryview = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What is remembered of a request that was answered, or to which something was done."""

    kind: Kind
    key: str
    span: tuple[int, int | None] | None
    """The range that was asked for."""
    status: int | None
    """None where nothing was answered."""
    received: int
    """Bytes of the body that came."""
    sent: int
    """Bytes of the body that went out."""
