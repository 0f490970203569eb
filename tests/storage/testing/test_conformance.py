"""The public suite is used as its page says, and finds stores that break their promises."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

STORES = """
import time
import pytest
from dtckpt.errors import ObjectExists
from dtckpt.storage import MemoryStore, ReadRequest
from dtckpt.storage.base import WholeStream
from dtckpt.storage.testing.conformance import StoreTests


class Given(StoreTests):
    num_races = 1
    big_bytes = 1 << 20

    @pytest.fixture
    def store(self):
        return self.kind()


class TestGood(Given):
    kind = MemoryStore


class TestOverwrites(Given):
    class kind(MemoryStore):
        def publish(self, name, data, *, overwrite):
            super().publish(name, data, overwrite=True)


class TestReadsLess(Given):
    class kind(MemoryStore):
        def read(self, name, start=0, stop=None):
            whole = super().read(name)
            return whole[start:stop]


class TestShowsTooEarly(Given):
    class kind(MemoryStore):
        def create(self, name, size):
            stream = super().create(name, size)
            super().publish(name, b"", overwrite=False)
            return stream


class TestListsBeside(Given):
    class kind(MemoryStore):
        def list(self, prefix=""):
            return iter([i for i in super().list() if i.name.startswith(prefix)])


class TestComparesFirst(Given):
    class kind(MemoryStore):
        def remove(self, name, *, expected):
            if self.read(name) != expected:
                raise ObjectExists(name)
            time.sleep(0.05)
            self.delete([name])


class TestTouchesAgain(Given):
    class kind(MemoryStore):
        def read_each(self, name, requests):
            yield from super().read_each(name, requests)
            self.read_into(name, requests)


class TestKeepsAborted(Given):
    class kind(MemoryStore):
        def create(self, name, size):
            class Stream(WholeStream):
                def _discard(stream):
                    self.publish(name, bytes(stream._data), overwrite=True)

            super().create(name, size)
            return Stream(name, size, lambda data: self.publish(name, data, overwrite=False))
"""

FOUND = {
    "TestOverwrites": "test_publish",
    "TestReadsLess": "test_past_the_end",
    "TestShowsTooEarly": "test_create",
    "TestListsBeside": "test_list",
    "TestComparesFirst": "test_racing_removals",
    "TestTouchesAgain": "test_read_each_leaves_alone_what_it_yielded",
    "TestKeepsAborted": "test_abort_leaves_nothing",
}


def test_it_finds_what_stores_do_wrong(tmp_path: Path) -> None:
    (tmp_path / "test_stores.py").write_text(STORES)
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-rf", "-p", "no:cacheprovider"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    found: dict[str, set[str]] = {}
    for suite, test in re.findall(r"^FAILED .*::(\w+)::(\w+)", run.stdout, re.MULTILINE):
        found.setdefault(suite, set()).add(test)
    assert found.keys() == FOUND.keys(), run.stdout + run.stderr
    assert not {suite for suite, test in FOUND.items() if test not in found[suite]}, found
