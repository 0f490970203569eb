"""A server of Google Cloud Storage of our own: its JSON face, and the XML one that is like S3's."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote

from aiohttp import web

from .fake_s3 import BUCKET, FakeS3, Refused, headers_of, query_of
from .faults import Asked, Kind, Reply
from .objects import Stored
from .serving import numbers

# Its driver asks by another protocol, which nothing here answers, whether it is on Google's.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")

_CHUNK = 256 << 10
_JSON = re.compile(r"/(?:(upload|download)/)?storage/v1/b(?:/(?P<bucket>[^/]+))?(?P<rest>/.*)?$")
_ACTION = re.compile(r"^(?P<key>.+)/(?:rewriteTo|copyTo)/b/(?P<to>[^/]+)/o/(?P<other>.+)$")
_SPAN = re.compile(r"bytes (?:(?P<first>\d+)-(?P<last>\d+)|\*)/(?P<total>\d+|\*)$")


@dataclass(slots=True)
class Resumable:
    """What has come of an object that is sent front to back in chunks."""

    begun: Asked
    data: bytearray = field(default_factory=bytearray)
    made: Stored | None = None
    """What became of it, once all has come."""


class FakeGcs(FakeS3):
    """Objects by both protocols of Google Cloud Storage; conditions are generations."""

    def __init__(self) -> None:
        super().__init__()
        self.sessions: dict[str, Resumable] = {}
        self._json_ways: dict[Kind, Callable[[Asked], Reply]] = {
            "get": self._get,
            "head": self._metadata,
            "put": self._put_json,
            "copy": self._rewrite,
            "delete": self._delete_json,
            "list": self._list_json,
            "begin-upload": self._begin_json,
            "upload-part": self._chunk,
            "complete-upload": self._chunk,
            "abort-upload": self._cancel,
            "list-parts": self._chunk,
            "bucket": self._bucket_json,
        }

    @property
    def storage_options(self) -> dict[str, Any]:
        """What leads gcsfs here."""
        return {"token": "anon", "endpoint_url": self.endpoint, "project": "test"}

    @property
    def obstore_options(self) -> dict[str, Any]:
        """What leads obstore here, which asks Google for a token unless it has an account."""
        account = {"gcs_base_url": self.endpoint, "disable_oauth": True}
        account |= {"client_email": "", "private_key": "", "private_key_id": ""}
        options = {"client_options": {"allow_http": True}}
        return {"service_account_key": json.dumps(account)} | options

    def understand(self, request: web.Request, body: bytes) -> Asked:
        found = _JSON.match(request.rel_url.raw_path)
        if found is None:
            return super().understand(request, body)
        headers, query = headers_of(request), query_of(request)
        rest = found["rest"] or ""
        asked = Asked(
            kind="other",
            method=request.method,
            target="",
            bucket=unquote(found["bucket"] or ""),
            key=query.get("name", ""),
            query=query | {"face": "json"},
            headers=headers,
            body=body,
        )
        if found[1] == "upload":
            kind, asked = _upload_kind(asked)
        else:
            asked = replace(asked, key=unquote(rest.removeprefix("/o").removeprefix("/")))
            kind = _kind(asked, rest)
        if kind == "copy":
            asked = replace(asked, key=rest.removeprefix("/o/"))
        return replace(
            asked, kind=kind, target=f"/{asked.bucket}/{asked.key}?{request.query_string}"
        )

    def carry_out(self, asked: Asked) -> Reply:
        if "face" not in asked.query:
            return super().carry_out(asked)
        try:
            if asked.kind != "bucket":
                self._check_bucket(asked)
            way = self._json_ways.get(asked.kind)
            return Reply(status=501) if way is None else way(asked)
        except Refused as error:
            return self.refusal(asked, error.status, error.code)

    def refusal(self, asked: Asked, status: int, code: str, more: str = "") -> Reply:
        if "face" not in asked.query:
            return super().refusal(asked, status, code, more)
        told = {"reason": code, "message": f"{code}: {asked.key}"}
        error = {"code": status, "message": told["message"], "errors": [told]}
        return replace(_json({"error": error}), status=status)

    def unconditionally(self, asked: Asked) -> Asked:
        left = super().unconditionally(asked)
        headers = {k: v for k, v in left.headers.items() if k != "x-goog-if-generation-match"}
        query = {k: v for k, v in left.query.items() if k != "ifGenerationMatch"}
        return replace(left, headers=headers, query=query)

    def _marks(self, found: Stored) -> dict[str, str]:
        return super()._marks(found) | {"x-goog-generation": str(found.generation)}

    def _check_conditions(self, asked: Asked) -> Stored | None:
        found = self.objects.buckets[asked.bucket].get(asked.key)
        headers, query = asked.headers, asked.query
        wanted = query.get("ifGenerationMatch", headers.get("x-goog-if-generation-match"))
        if wanted is not None and int(wanted) != (0 if found is None else found.generation):
            raise Refused(412, "conditionNotMet")
        return super()._check_conditions(asked)

    def _present(self, asked: Asked) -> Stored:
        found = self._check_conditions(asked)
        if found is None:
            raise Refused(404, "notFound")
        return found

    def _metadata(self, asked: Asked) -> Reply:
        return _json(_resource(asked.bucket, asked.key, self._present(asked)))

    def _put_json(self, asked: Asked) -> Reply:
        self._check_conditions(asked)
        made = self.objects.put(asked.bucket, asked.key, asked.body)
        return _json(_resource(asked.bucket, asked.key, made))

    def _rewrite(self, asked: Asked) -> Reply:
        found = _ACTION.match(asked.key)
        assert found is not None
        source = replace(asked, key=unquote(found["key"]), query={}, headers={})
        target = replace(asked, bucket=unquote(found["to"]), key=unquote(found["other"]))
        data = self._present(source).data
        self._check_conditions(target)
        made = self.objects.put(target.bucket, target.key, data)
        resource = _resource(target.bucket, target.key, made)
        size = str(len(data))
        told = {"kind": "storage#rewriteResponse", "done": True, "resource": resource}
        return _json(told | {"objectSize": size, "totalBytesRewritten": size})

    def _delete_json(self, asked: Asked) -> Reply:
        self._present(asked)
        return self._delete(asked)

    def _list_json(self, asked: Asked) -> Reply:
        query = asked.query
        page = self.objects.page(
            asked.bucket,
            query.get("prefix", ""),
            query.get("delimiter", ""),
            query.get("pageToken", ""),
            min(int(query.get("maxResults") or 1000), 1000),
        )
        told: dict[str, Any] = {
            "kind": "storage#objects",
            "items": [_resource(asked.bucket, key, it) for key, it in page.objects.items()],
            "prefixes": page.folders,
        }
        if page.after is not None:
            told["nextPageToken"] = page.after
        return _json(told)

    def _begin_json(self, asked: Asked) -> Reply:
        self._check_conditions(asked)
        session = f"session-{next(numbers)}"
        self.sessions[session] = Resumable(asked)
        place = f"{self.endpoint}/upload/storage/v1/b/{asked.bucket}/o"
        return Reply(headers={"Location": f"{place}?uploadType=resumable&upload_id={session}"})

    def _session(self, asked: Asked) -> Resumable:
        found = self.sessions.get(asked.query["upload_id"])
        if found is None:
            raise Refused(404, "notFound")
        return found

    def _chunk(self, asked: Asked) -> Reply:
        session = self._session(asked)
        begun, have = session.begun, len(session.data)
        if session.made is None:
            span = _span(asked)
            total = None if span["total"] == "*" else int(span["total"])
            first = have if span["first"] is None else int(span["first"])
            if first <= have:
                session.data += asked.body[have - first :]
            if total is None or len(session.data) < total:
                if len(session.data) % _CHUNK:
                    del session.data[have:]
                    raise Refused(400, "badChunk")
                end = len(session.data) - 1
                return Reply(status=308, headers={"Range": f"bytes=0-{end}"} if end > 0 else {})
            if len(session.data) > total:
                raise Refused(400, "badRequest")
            self._check_conditions(begun)
            session.made = self.objects.put(begun.bucket, begun.key, bytes(session.data))
        return _json(_resource(begun.bucket, begun.key, session.made))

    def _cancel(self, asked: Asked) -> Reply:
        self._session(asked)
        del self.sessions[asked.query["upload_id"]]
        return Reply(status=499)

    def _bucket_json(self, asked: Asked) -> Reply:
        buckets = self.objects.buckets
        if asked.method == "POST":
            asked = replace(asked, bucket=json.loads(asked.body)["name"])
            buckets.setdefault(asked.bucket, {})
        if not asked.bucket:
            items = [{"kind": "storage#bucket", "name": name} for name in sorted(buckets)]
            return _json({"kind": "storage#buckets", "items": items})
        self._check_bucket(replace(asked, kind="list"))
        if asked.method == "DELETE":
            del buckets[asked.bucket]
            return Reply(status=204)
        return _json({"kind": "storage#bucket", "name": asked.bucket, "location": "US"})


def _kind(asked: Asked, rest: str) -> Kind:
    """Say what is asked for where nothing is uploaded."""
    if not rest.startswith("/o"):
        return "bucket"
    if not asked.key:
        return "list"
    if asked.method == "POST" and _ACTION.match(rest.removeprefix("/o/")):
        return "copy"
    if asked.method == "GET":
        return "get" if asked.query.get("alt") == "media" else "head"
    return "delete" if asked.method == "DELETE" else "other"


def _upload_kind(asked: Asked) -> tuple[Kind, Asked]:
    """Say what is asked for where something is uploaded, and of which bytes."""
    query = asked.query
    if "upload_id" in query:
        if asked.method == "DELETE":
            return "abort-upload", asked
        span = _span(asked)
        if span["first"] is None:
            return "list-parts" if span["total"] == "*" else "complete-upload", asked
        is_last = span["total"] == str(int(span["last"]) + 1)
        return "complete-upload" if is_last else "upload-part", asked
    if query.get("uploadType") == "multipart":
        told, data = _parts(asked)
        return "put", replace(asked, key=json.loads(told)["name"], body=data)
    if query.get("uploadType") == "resumable":
        named = json.loads(asked.body).get("name", "") if asked.body else ""
        return "begin-upload", replace(asked, key=asked.key or named)
    return "put", asked


def _span(asked: Asked) -> dict[str, str | Any]:
    """Return what Content-Range says; all of it where there is none."""
    given = asked.headers.get("content-range", f"bytes 0-{len(asked.body) - 1}/{len(asked.body)}")
    found = _SPAN.match(given)
    if found is None:
        return {"first": None, "last": None, "total": str(len(asked.body))}
    return found.groupdict()


def _parts(asked: Asked) -> tuple[bytes, bytes]:
    """Return the two parts of a body of type multipart/related: what is told, and the bytes."""
    boundary = re.search(r'boundary="?([^";]+)', asked.headers["content-type"])
    assert boundary is not None
    mark = f"--{boundary[1]}".encode()
    _, first, rest = asked.body.split(mark, 2)
    second = rest[: rest.rindex(mark)]
    return _without_headers(first), _without_headers(second).removesuffix(b"\n").removesuffix(b"\r")


def _without_headers(part: bytes) -> bytes:
    found = re.search(rb"\r?\n\r?\n", part.lstrip(b"\r\n"))
    assert found is not None
    return part.lstrip(b"\r\n")[found.end() :]


def _resource(bucket: str, key: str, found: Stored) -> dict[str, Any]:
    stamp = datetime.fromtimestamp(found.modified, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
    return {
        "kind": "storage#object",
        "bucket": bucket,
        "name": key,
        "size": str(len(found.data)),
        "generation": str(found.generation),
        "metageneration": "1",
        "etag": found.etag,
        "timeCreated": stamp,
        "updated": stamp,
        "contentType": "application/octet-stream",
        "md5Hash": base64.b64encode(hashlib.md5(found.data).digest()).decode(),
    }


def _json(told: dict[str, Any]) -> Reply:
    headers = {"Content-Type": "application/json; charset=UTF-8"}
    return Reply(headers=headers, body=json.dumps(told).encode())


@contextmanager
def fake_gcs() -> Generator[FakeGcs]:
    """Serve during the block."""
    with FakeGcs() as server:
        yield server


__all__ = ["BUCKET", "FakeGcs", "fake_gcs"]
