"""What the command exits with."""

from __future__ import annotations

FINDING = 1
"""Something was found: stored bytes that are not those written, or a difference."""
FAILED = 3
"""The storage failed, or the request cannot be met; no checkpoint is where one was named."""
BUG = 70
INTERRUPTED = 130
