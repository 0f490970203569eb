"""Names of Azure that its driver of fsspec would take for others are refused, by both engines."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtckpt.storage import open_store
from dtckpt.storage.remote.fsspec.dialects.az import check_path
from dtckpt.storage.remote.obstore.places import Place

ODD = st.text(alphabet="ab?#/ \t\n%&=+:@[].", min_size=1, max_size=12) | st.sampled_from(
    ["a?versionid=b", "a?b=c", "a#b", "\u00fc?\u00e4"]
)
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
LINE = f"DefaultEndpointsProtocol=https;AccountName=devstoreaccount1;AccountKey={KEY}"


@given(key=ODD)
def test_a_path_that_is_taken_is_kept_by_the_driver(key: str) -> None:
    adlfs = pytest.importorskip("adlfs")
    try:
        check_path(f"box/{key}")
    except ValueError:
        return
    fs = adlfs.AzureBlobFileSystem(connection_string=LINE)
    found = fs.split_path(f"box/{key}")
    assert found == ("box", key, None)


@pytest.mark.parametrize("name", ["a?", "a#", "a#/b", "a?/b", "a?b#c", "a?versionid=1", "a\tb"])
@pytest.mark.parametrize("engine", ["fsspec", "obstore"])
def test_names_are_refused(engine: str, name: str) -> None:
    pytest.importorskip("adlfs" if engine == "fsspec" else "obstore")
    store = open_store("az://box/run", engine=engine, connection_string=LINE)
    calls: list[Callable[[], object]] = [
        lambda: store.read(name),
        lambda: store.level(name),
        lambda: list(store.list(name)),
        lambda: store.publish(name, b"", overwrite=True),
        lambda: store.create(name, 1),
        lambda: store.delete([name]),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="on Azure"):
            call()


def test_what_stands_above_and_below_counts_together() -> None:
    pytest.importorskip("adlfs")
    store = open_store("az://box/run", connection_string=LINE).substore("a?b")
    with pytest.raises(ValueError, match="on Azure"):
        store.read("c#d")


@pytest.mark.parametrize("engine", ["fsspec", "obstore"])
def test_a_root_is_refused(engine: str) -> None:
    pytest.importorskip("adlfs" if engine == "fsspec" else "obstore")
    with pytest.raises(ValueError, match="on Azure"):
        open_store("az://box/run#", engine=engine, connection_string=LINE)


def test_elsewhere_they_are_names_like_others() -> None:
    assert Place.of("s3://box/run#").prefix == "run#"
