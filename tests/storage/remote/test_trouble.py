"""What failures of drivers are taken for, and what is told of them, and what is not."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from dtckpt.errors import AccessDenied, ObjectNotFound, StorageError, StorageTimeout
from dtckpt.storage import FsspecStore, open_store
from dtckpt.storage.remote.obstore.failures import explained
from dtckpt.storage.remote.trouble import Told, remote_error, told
from tests.servers.fake_gcs import fake_gcs
from tests.servers.fake_s3 import BUCKET, fake_s3
from tests.servers.faults import Fault

PASSWORD = "ODD%3Dpa55word"


class Broken(MemoryFileSystem):
    """A driver that raises what a test has put there."""

    protocol = "broken"
    at_first: ClassVar[list[Exception]] = []
    at_each: ClassVar[list[Exception]] = []

    def __init__(self, **_: Any) -> None:
        for error in self.at_first:
            raise error
        super().__init__()

    def info(self, path: str, **_: Any) -> Any:
        raise self.at_each[0] from (self.at_each[1:] or [None])[0]


@pytest.fixture(autouse=True)
def broken(monkeypatch: pytest.MonkeyPatch) -> type[Broken]:
    fsspec.register_implementation("broken", Broken, clobber=True)
    monkeypatch.setattr(Broken, "at_first", [])
    monkeypatch.setattr(Broken, "at_each", [])
    return Broken


def told_of(**options: object) -> BaseException:
    with pytest.raises(StorageError) as caught:
        FsspecStore(f"broken://me:{PASSWORD}@host/x", **options).stat("y")
    return caught.value


@pytest.mark.parametrize(
    "text",
    [
        f"Max retries exceeded with url: /tokeninfo?access_token={PASSWORD} (Caused by",
        f"404, url='https://a.blob.core.windows.net/b?sv=1&sig={PASSWORD}&x=1'",
        f"http://me:{PASSWORD}@host/x/y",
        f"https://b.s3.amazonaws.com/x?X-Amz-Security-Token={PASSWORD}",
    ],
)
@pytest.mark.parametrize("when", ["at_first", "at_each", "cause"])
def test_secrets_in_urls_are_not_shown(broken: type[Broken], text: str, when: str) -> None:
    if when == "cause":
        broken.at_each.extend([OSError("a shell"), ValueError(text)])
    else:
        getattr(broken, when).append(ValueError(text))
    shown = "".join(traceback.format_exception(told_of()))
    assert PASSWORD not in shown
    assert "a shell" in shown if when == "cause" else "..." in shown


def test_what_it_is_stays_known_without_the_secret(broken: type[Broken]) -> None:
    broken.at_each.append(PermissionError(f"http://me:{PASSWORD}@host/x/y"))
    assert isinstance(told_of(), AccessDenied)


@pytest.mark.parametrize("url", [f"s3://AKIA:{PASSWORD}/x@b/y", f"gs://a:{PASSWORD}@b/y"])
def test_credentials_do_not_go_into_the_url_of_a_bucket(url: str) -> None:
    with pytest.raises(ValueError, match="storage options") as caught:
        FsspecStore(url)
    assert PASSWORD not in str(caught.value)


def test_what_could_not_be_asked_for_is_not_missing(broken: type[Broken]) -> None:
    broken.at_each.extend([FileNotFoundError("http://host/x"), ConnectionRefusedError()])
    error = told_of(deadline=0.2)
    assert not isinstance(error, ObjectNotFound)
    assert "check the endpoint" in str(error)


class ClientAuthenticationError(Exception):
    """As azure.identity raises it for what the service of credentials has answered."""

    status_code = 404


def test_credentials_that_are_missing_are_no_missing_object(broken: type[Broken]) -> None:
    broken.at_each.append(ClientAuthenticationError("no such identity"))
    assert isinstance(told_of(), AccessDenied)


def test_what_is_no_url_is_not_asked_again() -> None:
    pytest.importorskip("gcsfs")
    options = {"token": "anon", "endpoint_url": "127.0.0.1:1", "deadline": 60}
    with pytest.raises(StorageError, match=r"127\.0\.0\.1:1/") as caught:
        FsspecStore("gs://b/x", **options).stat("y")
    assert not isinstance(caught.value, StorageTimeout)


@pytest.mark.parametrize("engine", ["fsspec", "obstore"])
def test_a_look_that_was_refused_has_not_found_nothing(engine: str) -> None:
    pytest.importorskip("s3fs")
    pytest.importorskip(engine)
    with fake_s3() as server:
        server.faults = [Fault(status=403, code="AccessDenied", kinds=["head"])]
        store = open_store(f"s3://{BUCKET}/x", **server.storage_options, engine=engine)
        with pytest.raises(AccessDenied):
            store.exists("y")


@pytest.mark.parametrize("engine", ["fsspec", "obstore"])
def test_credentials_that_ended_are_told_although_a_head_has_no_body(engine: str) -> None:
    pytest.importorskip("s3fs")
    pytest.importorskip(engine)
    with fake_s3() as server:
        server.faults = [Fault(status=400, code="ExpiredToken")]
        store = open_store(f"s3://{BUCKET}/x", **server.storage_options, engine=engine)
        with pytest.raises(AccessDenied, match=r"ExpiredToken.*renew them"):
            store.stat("y")


def test_a_driver_that_cannot_be_made_has_not_said_that_something_is_missing(
    broken: type[Broken],
) -> None:
    broken.at_first.append(FileNotFoundError(2, "no such file", "key.json"))
    error = told_of()
    assert not isinstance(error, ObjectNotFound)
    assert "cannot connect to broken://me@host/x" in str(error)


def google_error(*names: str) -> Exception:
    """Return what gcsfs raises where credentials cannot be renewed, for reasons so called."""
    errors = pytest.importorskip("google.auth.exceptions")
    error: Exception = pytest.importorskip("gcsfs.retry").HttpError(
        {"code": 401, "message": "Invalid Credentials"}
    )
    last = error
    for name in names:
        cause: Exception = getattr(errors, name)(name)
        last.__cause__, last = cause, cause
    return error


def aws_error(name: str, **said: str) -> Exception:
    return getattr(pytest.importorskip("botocore.exceptions"), name)(**said)


def azure_error(status: int | None) -> Exception:
    """Return what Azure's SDK raises where it gets no token, or where the store wants another."""
    error = pytest.importorskip("azure.core.exceptions").ClientAuthenticationError("no")
    error.status_code = status
    return error


CREDENTIALS: dict[str, tuple[Callable[[], Exception], str]] = {
    "none": (lambda: aws_error("NoCredentialsError"), "be fetched"),
    "command": (
        lambda: aws_error("CredentialRetrievalError", provider="x", error_msg="y"),
        "be fetched",
    ),
    "metadata": (lambda: google_error("RefreshError", "TransportError"), "be fetched"),
    "default": (lambda: google_error("DefaultCredentialsError"), "be fetched"),
    "no-reply": (lambda: azure_error(None), "be fetched"),
    "sso": (lambda: aws_error("UnauthorizedSSOTokenError"), "renew them"),
    "refused": (lambda: google_error("RefreshError"), "renew them"),
    "unauthorized": (lambda: azure_error(401), "renew them"),
    "forbidden": (lambda: azure_error(403), "check the credentials"),
}


@pytest.mark.parametrize("case", CREDENTIALS)
def test_credentials_that_could_not_be_fetched_have_not_expired(
    broken: type[Broken], case: str
) -> None:
    make, said = CREDENTIALS[case]
    broken.at_each.append(make())
    cause = broken.at_each[0].__cause__
    broken.at_each.extend([cause] if isinstance(cause, Exception) else [])
    error = told_of()
    assert isinstance(error, AccessDenied)
    assert said in str(error)


@pytest.mark.parametrize(
    ("asked", "said"),
    [("169.254.169.254/latest/api/token", "be fetched"), ("b.host/latest/x", "are allowed to do")],
)
def test_a_metadata_service_that_refuses_is_not_the_store(asked: str, said: str) -> None:
    generic = pytest.importorskip("obstore.exceptions").GenericError
    with pytest.raises(Told) as caught, explained():
        raise generic(f"Error performing PUT http://{asked} - non-2xx status code: 403 Forbidden")
    error = remote_error("write", "s3://b/x", caught.value, told(caught.value))
    assert isinstance(error, AccessDenied)
    assert said in str(error)


def test_google_tells_a_missing_bucket_from_a_missing_object() -> None:
    pytest.importorskip("gcsfs")
    with fake_gcs() as server:
        options = server.storage_options | {"deadline": 5}
        with pytest.raises(StorageError, match="the bucket does not exist") as caught:
            open_store("gs://no-such/x", **options).read_start("y", 10)
        assert not isinstance(caught.value, ObjectNotFound)
        store = open_store(f"gs://{BUCKET}/x", **options)
        for faults in ([], [Fault(kinds={"list"}, status=403, code="Forbidden")]):
            server.faults = faults
            with pytest.raises(ObjectNotFound):
                store.read_start("y", 10)
        server.faults = [Fault(kinds={"list"}, limit=1)]
        with pytest.raises(ObjectNotFound):
            store.read_start("y", 10)
        assert server.faults[0].hits == 1
