"""Mutants of what ranks say to each other."""

from __future__ import annotations

from .mutant import Mutant

_TOGETHER = ("tests/checkpoint/test_together.py", "tests/checkpoint/test_save_hazards.py")

MUTANTS = (
    Mutant(
        name="half a frame may be followed by another",
        file="checkpoint/wire.py",
        old="                    self._sockets[rank].shutdown(socket.SHUT_RDWR)",
        new="                    pass",
        tests=(*_TOGETHER, "tests/checkpoint/test_async_save.py"),
    ),
    Mutant(
        name="a process that was itself stopped blames the others",
        file="checkpoint/wire.py",
        old="                if now - expected > 1.0:",
        new="                if False:",
        tests=("tests/checkpoint/test_stop.py", "tests/checkpoint/test_save_hazards.py"),
    ),
    Mutant(
        name="a stranger's token is not compared",
        file="checkpoint/rendezvous.py",
        old="if not hmac.compare_digest(token, self._token) or rank not in missing:",
        new="if rank not in missing:",
        tests=("tests/checkpoint/test_together.py", "tests/checkpoint/test_load_together.py"),
    ),
    Mutant(
        name="a rank that is stuck shows signs of life for ever",
        file="checkpoint/ranks.py",
        old="now - self._progress_at > _STUCK * self._timeout or now - self._beat_at < interval",
        new="now - self._beat_at < interval",
        tests=("tests/checkpoint/test_save_hazards.py", "tests/checkpoint/test_async_save.py"),
    ),
)
