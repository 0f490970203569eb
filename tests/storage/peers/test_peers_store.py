"""What every store does, with one agent and with copies on several hosts."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dtckpt.errors import ObjectNotFound
from dtckpt.storage import PeersStore, Store

from ..conformance import Raw, StoreTests
from .hosts import Hosts, hosts


@dataclass
class RawAgents:
    """Puts objects into the memory of one agent, and finds them in that of all."""

    made: Hosts
    prefix: str

    def put(self, name: str, data: bytes) -> None:
        host = sorted(self.made.pids)[-1]
        key = f"{self.prefix}/{name}"
        self.made.peer(host).ask("put", data, name=key, stamp=None, above=0, is_new=False)

    def get(self, name: str) -> bytes | None:
        found = {self._of(host, f"{self.prefix}/{name}") for host in self.made.pids}
        there = found - {None}
        assert len(there) < 2
        return there.pop() if there else None

    def _of(self, host: str, key: str) -> bytes | None:
        peer = self.made.peer(host)
        try:
            size = peer.ask("read", name=key, ranges=[])[0]["size"]
            return peer.ask("read", name=key, ranges=[(0, size)])[1]
        except ObjectNotFound:
            return None


@pytest.fixture
def prefix() -> str:
    return uuid.uuid4().hex


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with hosts(tmp_path_factory.mktemp("one"), "a") as made:
        yield made


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with hosts(tmp_path_factory.mktemp("three"), "a", "b", "c") as made:
        yield made


class TestOneHost(StoreTests):
    @pytest.fixture
    def raw(self, one: Hosts, prefix: str) -> Raw:
        return RawAgents(one, prefix)

    @pytest.fixture
    def store(self, one: Hosts, prefix: str) -> Store:
        return one.store("a").substore(prefix)


class TestThreeHosts(StoreTests):
    one_remover = False  # the first host forgets, and the next one decides while it still holds it

    @pytest.fixture
    def raw(self, three: Hosts, prefix: str) -> Raw:
        return RawAgents(three, prefix)

    @pytest.fixture
    def store(self, three: Hosts, prefix: str) -> Store:
        return three.store("b").substore(prefix)


def test_the_url_opens_it_again(tmp_path: Path) -> None:
    with hosts(tmp_path, "a") as made:
        store = made.store("a").substore("x/y")
        store.publish("z", b"1", overwrite=False)
        again = PeersStore(store.url, **made.options("a"))
        assert again.read("z") == b"1"
