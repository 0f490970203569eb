"""What a store does, tried by one rank for all of a job."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from ..storage.base import Store
from ..storage.open import open_store
from ..storage.probing import Capabilities
from ..storage.probing import capabilities as tried
from .steps import check_same_root


def capabilities(
    root: str | os.PathLike[str] | Store,
    *,
    write: bool = True,
    process_group: Any = None,
    no_dist: bool = False,
    timeout: timedelta | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Capabilities:
    """Return what the store at ``root`` was seen to do, as ``dtckpt.storage.capabilities`` tells.

    Every rank of ``process_group`` calls this, with the same root. The first one tries it, and all
    get its answer, or its error: those of ``dtckpt.storage.capabilities``; LayoutMismatch where
    ranks have given different roots. Of local directories it is the disk of that rank's host.
    ``timeout`` is as of ``latest``.
    """
    from .ranks.together import DEFAULT_TIMEOUT, closing, ranks_of, together  # loads torch

    options = dict(storage_options or {})
    ranks = ranks_of(
        process_group,
        no_dist=no_dist,
        timeout=DEFAULT_TIMEOUT if timeout is None else timeout,
        purpose="capabilities",
        target=root,
    )

    def url() -> bytes:
        return open_store(root, **options).url.encode()

    def probe(urls: Mapping[int, bytes]) -> bytes:
        check_same_root(urls)
        return json.dumps(asdict(tried(root, write=write, **options))).encode()

    with closing(ranks):
        return Capabilities(**json.loads(together(ranks, "capabilities", url, probe)))
