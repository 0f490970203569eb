"""Publishing: small objects, at once and on condition."""

from __future__ import annotations

import time

import pytest

from dtckpt.errors import ObjectExists, ObjectNotFound

from ...base import Store
from .basics import Raw, Suite, names


class PublishingTests(Suite):
    """One at a time; races have a file of their own."""

    def test_publish(self, store: Store, raw: Raw) -> None:
        store.publish("a/x", b"one", overwrite=False)
        assert raw.get("a/x") == b"one"
        with pytest.raises(ObjectExists, match="a/x"):
            store.publish("a/x", b"two", overwrite=False)
        assert raw.get("a/x") == b"one"
        store.publish("a/x", b"three", overwrite=True)
        assert raw.get("a/x") == b"three"
        store.publish("a/y", b"new", overwrite=True)
        assert raw.get("a/y") == b"new"
        assert list(store.leftovers()) == []

    def test_replace(self, store: Store, raw: Raw) -> None:
        with pytest.raises(ObjectNotFound, match="a/x"):
            store.replace("a/x", b"two", expected=b"one")
        store.publish("a/x", b"one", overwrite=False)
        for wrong in (b"", b"on", b"One", b"one!"):
            with pytest.raises(ObjectExists, match="a/x"):
                store.replace("a/x", b"two", expected=wrong)
            assert raw.get("a/x") == b"one"
        store.replace("a/x", b"two", expected=b"one")
        assert raw.get("a/x") == b"two"
        store.replace("a/x", b"", expected=b"two")
        assert raw.get("a/x") == b""
        assert list(store.leftovers()) == []

    @pytest.mark.parametrize("size", [4, 17 << 20])
    def test_create_anew(self, store: Store, raw: Raw, size: int) -> None:
        """Large ones, too, which object stores take in parts."""
        for there in (b"one", b""):
            store.publish("a/x", there, overwrite=True)
            stream = store.create_anew("a/x", size)
            stream.write(b"2" * (size - 1))
            stream.abort()
            assert raw.get("a/x") == there
            with store.create_anew("a/x", size) as stream:
                stream.write(b"2" * size)
            assert raw.get("a/x") == b"2" * size
        assert list(store.leftovers()) == []

    def test_remove(self, store: Store, raw: Raw) -> None:
        with pytest.raises(ObjectNotFound, match="a/x"):
            store.remove("a/x", expected=b"one")
        raw.put("a/x", b"one")
        for wrong in (b"", b"on", b"One", b"one!"):
            with pytest.raises(ObjectExists, match="a/x"):
                store.remove("a/x", expected=wrong)
            assert raw.get("a/x") == b"one"
        store.remove("a/x", expected=b"one")
        assert raw.get("a/x") is None
        assert names(store) == []

    def test_times(self, store: Store) -> None:
        with store.create("x", 1) as stream:
            stream.write(b"1")
            assert list(store.leftovers(before=time.time() - 3600)) == []
            assert sorted(store.leftovers(before=time.time() + 3600)) == sorted(store.leftovers())
        (info,) = store.list()
        assert info.modified is None or abs(info.modified - time.time()) < 3600

    def test_refusals_are_certain(self, store: Store, raw: Raw) -> None:
        raw.put("x", b"one")
        with pytest.raises(ObjectExists) as caught:
            store.publish("x", b"two", overwrite=False)
        assert caught.value.is_certain
        with pytest.raises(ObjectExists) as caught:
            store.replace("x", b"two", expected=b"three")
        assert caught.value.is_certain
        with pytest.raises(ObjectNotFound) as missing:
            store.replace("y", b"two", expected=b"three")
        assert missing.value.is_certain
