"""What obstore is told of the options that users give to fsspec's drivers, and what is refused."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from dtckpt.errors import StorageError
from dtckpt.storage import FsspecStore, ObstoreStore, open_store
from dtckpt.storage.remote.obstore.connection import located
from dtckpt.storage.remote.obstore.options import settings_of
from dtckpt.storage.remote.obstore.places import Kind, Place
from dtckpt.storage.remote.trouble import Told
from tests.servers.fake_s3 import BUCKET, fake_s3


@pytest.fixture(autouse=True)
def no_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This machine may have files of AWS."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [({}, 60), ({"deadline": 6}, 3), ({"deadline": 6, "client_options": {"timeout": 5}}, 5)],
)
def test_a_request_takes_a_part_of_the_deadline(given: dict[str, Any], seconds: int) -> None:
    found = settings_of("s3", given).client["timeout"]
    assert found in (timedelta(seconds=seconds), seconds)


@pytest.mark.parametrize(
    ("kind", "given", "config"),
    [
        (
            "s3",
            {
                "key": "a",
                "secret": "b",
                "token": "c",
                "client_kwargs": {"endpoint_url": "http://x:1", "region_name": "eu"},
                "config_kwargs": {
                    "s3": {"addressing_style": "path", "payload_signing_enabled": False},
                    "max_pool_connections": 5,
                    "retries": {"max_attempts": 1},
                },
                "s3_additional_kwargs": {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "k"},
                "use_listings_cache": False,
                "endpoint_url": None,
            },
            {
                "access_key_id": "a",
                "secret_access_key": "b",
                "session_token": "c",
                "endpoint": "http://x:1",
                "region": "eu",
                "virtual_hosted_style_request": False,
                "unsigned_payload": True,
                "server_side_encryption": "aws:kms",
                "sse_kms_key_id": "k",
            },
        ),
        (
            "s3",
            {"anon": True, "requester_pays": True},
            {"skip_signature": True, "request_payer": 1},
        ),
        ("s3", {"access_key_id": "a", "region": "eu"}, {"access_key_id": "a", "region": "eu"}),
        ("gcs", {"token": "anon", "project": "p"}, {"skip_signature": True}),
        ("gcs", {"token": "google_default"}, {}),
        ("gcs", {"token": __file__}, {"application_credentials": __file__}),
        ("gcs", {"token": {"a": 1}}, {"service_account_key": '{"a": 1}'}),
        ("gcs", {"endpoint_url": "http://x:1"}, {"base_url": "http://x:1"}),
        (
            "azure",
            {"connection_string": "AccountName=n;AccountKey=k==;BlobEndpoint=http://x:1/n"},
            {"account_name": "n", "account_key": "k==", "endpoint": "http://x:1/n"},
        ),
        (
            "azure",
            {"connection_string": "AccountName=n;accountkey=k==;EndpointSuffix=core.windows.net;"},
            {"account_name": "n", "account_key": "k=="},
        ),
        (
            "azure",
            {"connection_string": "AccountName=n;AccountKey=k;EndpointSuffix=core.eu.example"},
            {
                "account_name": "n",
                "account_key": "k",
                "endpoint": "https://n.blob.core.eu.example",
            },
        ),
        ("azure", {"account_name": "n", "sas_token": "s"}, {"account_name": "n", "sas_key": "s"}),
        ("s3", {"config_kwargs": {"retries": {"total_max_attempts": 1}}}, {}),
        (
            "azure",
            {"account_name": "n", "credential": "k"},
            {"account_name": "n", "account_key": "k"},
        ),
    ],
)
def test_options_in_the_words_of_obstore(
    kind: Kind, given: dict[str, Any], config: dict[str, Any]
) -> None:
    assert settings_of(kind, given).config == config


def test_settings_of_the_client(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_bytes(b"pem")
    given: dict[str, Any] = {
        "client_kwargs": {"verify": str(tmp_path / "ca.pem")},
        "config_kwargs": {"connect_timeout": 3, "proxies": {"https": "http://p"}},
        "client_options": {"timeout": "5s"},
    }
    assert settings_of("s3", given).client == {
        "allow_http": True,
        "root_certificate": b"pem",
        "connect_timeout": timedelta(seconds=3),
        "proxy_url": "http://p",
        "timeout": "5s",
    }
    insecure = settings_of("s3", {"client_kwargs": {"verify": False}}).client
    assert insecure["allow_invalid_certificates"] is True


@pytest.mark.parametrize(
    ("url", "given", "named"),
    [
        ("s3://b/x", {"s3_additional_kwargs": {"ACL": "private"}}, "s3_additional_kwargs.ACL"),
        ("s3://b/x", {"config_kwargs": {"signature_version": "s3"}}, "signature_version"),
        ("s3://b/x", {"session": object()}, "session"),
        ("s3://b/x", {"version_aware": True}, "version_aware"),
        ("s3://b/x", {"nonesuch": 1}, "nonesuch"),
        ("s3://b/x", {"client_options": {"nonesuch": 1}}, "nonesuch"),
        ("gs://b/x", {"token": 7}, "credential_provider"),
        ("gs://b/x", {"requester_pays": True}, "requester_pays"),
        ("az://b/x", {"account_name": "n", "credential": object()}, "credential"),
    ],
)
def test_what_cannot_be_taken_is_named(url: str, given: dict[str, Any], named: str) -> None:
    with pytest.raises(TypeError, match=named):
        open_store(url, engine="obstore", **given)


def test_urls() -> None:
    store = open_store("S3://bucket/a/b/", engine="obstore", anon=True)
    assert isinstance(store, ObstoreStore)
    assert store.url == "s3://bucket/a/b"
    assert store.sibling("c").url == "s3://bucket/a/c"
    root = open_store("gs://bucket", engine="obstore", token="anon")
    assert root.url == "gs://bucket"
    with pytest.raises(StorageError, match="nothing beside it"):
        root.sibling("x")
    place = Place.of("abfss://box@acct.dfs.core.windows.net/a")
    assert (place.kind, place.bucket, place.account, place.prefix) == ("azure", "box", "acct", "a")
    for bad in ("s3://", "s3:///x", "s3://b/a//b", "s3://b/../x", "s3://b/x?versionId=1"):
        with pytest.raises(ValueError, match="bad store URL"):
            ObstoreStore(bad)
    with pytest.raises(ValueError, match="credentials do not go into it") as caught:
        Place.of("s3://AKIA:secret@bucket/run")
    assert "secret@" not in str(caught.value)
    with pytest.raises(ValueError, match=r"does not serve memory://, but s3://"):
        open_store("memory://x", engine="obstore")


def test_engines() -> None:
    assert isinstance(open_store("memory://x", engine="fsspec"), FsspecStore)
    with pytest.raises(ValueError, match="engine is 'fsspec' or 'obstore', got 'other'"):
        open_store("memory://x", engine="other")
    with pytest.raises(TypeError, match="engine"):
        open_store("/tmp/x", engine="obstore")


def test_hosts_with_the_bucket_in_their_name() -> None:
    config = {"endpoint": "https://s3.example", "virtual_hosted_style_request": True}
    place = Place.of("s3://bucket/x")
    assert located(place, config)["endpoint"] == "https://bucket.s3.example"
    named = config | {"endpoint": "https://bucket.s3.example"}
    assert located(place, named) == named


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(StorageError, match=r"pip install 'dtckpt\[obstore\]'"):
        open_store("s3://bucket/x", engine="obstore")


def test_signatures_are_not_told() -> None:
    from dtckpt.storage.remote.obstore.failures import explained

    def fail() -> None:
        with explained():
            from obstore.exceptions import GenericError

            raise GenericError("Error performing GET https://a/x?se=1&sig=SECRET%3D&x=1 status")

    with pytest.raises(Told) as caught:
        fail()
    assert "SECRET" not in str(caught.value) + str(caught.value.__cause__)
    assert "sig=..." in str(caught.value)


FILES = """
[default]
aws_access_key_id = one
aws_secret_access_key = secret
[work]
aws_access_key_id = two
aws_secret_access_key = secret
aws_session_token = token
region = eu-north-1
"""


def test_credentials_of_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "credentials").write_text(FILES)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    made = settings_of("s3", {})
    assert made.credential_provider()["access_key_id"] == "one"
    assert made.config == {}
    made = settings_of("s3", {"profile": "work"})
    found = made.credential_provider()
    assert (found["access_key_id"], found["token"]) == ("two", "token")
    assert made.config == {"region": "eu-north-1"}
    assert settings_of("s3", {"profile": "work", "region": "x"}).config == {"region": "x"}
    with pytest.raises(TypeError, match="nonesuch"):
        settings_of("s3", {"profile": "nonesuch"})
    for given in ({"key": "a", "secret": "b"}, {"anon": True}):
        assert settings_of("s3", given).credential_provider is None
    own = object()
    assert settings_of("s3", {"credential_provider": own}).credential_provider is own
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "in the environment")
    assert settings_of("s3", {}).credential_provider is None


CONFIG = """
[default]
endpoint_url = http://default
[profile work]
endpoint_url = http://work
services = own
[services own]
s3 =
    endpoint_url = http://own
"""


def test_servers_that_files_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def endpoint(**options: Any) -> str | None:
        return settings_of("s3", {"key": "a", "secret": "b"} | options).config.get("endpoint")

    (tmp_path / "config").write_text(CONFIG)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    assert endpoint() == "http://default"
    assert endpoint(endpoint_url="http://given") == "http://given"
    monkeypatch.setenv("AWS_PROFILE", "work")
    assert endpoint() == "http://own"
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    assert endpoint() is None
    monkeypatch.delenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://environment")  # which obstore reads
    assert endpoint() is None


def test_settings_that_cannot_be_read() -> None:
    with pytest.raises(TypeError, match="connection_string") as caught:
        settings_of("azure", {"connection_string": "AccountName=n;SECRET"})
    assert "SECRET" not in str(caught.value)
    with pytest.raises(TypeError, match=r"verify=.*nowhere"):
        settings_of("s3", {"client_kwargs": {"verify": "/nowhere/ca.pem"}})


def test_files_without_botocore(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "credentials").write_text(FILES)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    for module in ("botocore.exceptions", "botocore.session"):
        monkeypatch.setitem(sys.modules, module, None)
    assert settings_of("s3", {}).credential_provider is None
    with pytest.raises(TypeError, match="pip install botocore"):
        settings_of("s3", {"profile": "work"})


def test_credentials_of_files_are_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "credentials").write_text(FILES)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    with fake_s3() as server:
        signed: list[str] = []
        understand = server.understand

        def look(request: Any, body: bytes) -> Any:
            signed.append(request.headers.get("Authorization", ""))
            return understand(request, body)

        monkeypatch.setattr(server, "understand", look)
        options = {"engine": "obstore", "endpoint_url": server.endpoint, "profile": "work"}
        assert not open_store(f"s3://{BUCKET}/x", **options).exists("y")
    assert signed
    assert all("Credential=two/" in text and "/eu-north-1/" in text for text in signed)
