"""The obstore engine: on moto, and on an S3 server that makes trouble."""

from __future__ import annotations

import pytest

from dtckpt.storage import Store, open_store

from ....conftest import S3
from ...conformance import Raw, StoreTests
from ..fsspec.test_s3 import RawBucket


class TestOnMoto(StoreTests):
    num_races = 1
    one_remover = False

    @pytest.fixture
    def raw(self, s3: S3) -> Raw:
        return RawBucket(s3)

    @pytest.fixture
    def store(self, s3: S3) -> Store:
        return open_store(s3.url, engine="obstore", **s3.options)
