"""The public suite, by the name that tests have for it."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("dtckpt.storage.testing.conformance")

from dtckpt.storage.testing.conformance import (  # noqa: E402
    BAD_NAMES,
    DATA,
    Interrupted,
    Raw,
    StoreTests,
    names,
    race,
    write,
)

__all__ = ["BAD_NAMES", "DATA", "Interrupted", "Raw", "StoreTests", "names", "race", "write"]
