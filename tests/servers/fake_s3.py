"""An S3 server of our own: conditions, parts, lists in pages, ranges, and trouble on demand.

``python -m tests.servers.fake_s3`` serves until it is stopped, and says where.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import formatdate
from typing import Any
from urllib.parse import parse_qs, quote, unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from aiohttp import web

from .faults import Asked, Kind, Reply
from .objects import Stored, digest
from .serving import FakeServer, cut, numbers

BUCKET = "dtckpt-tests"
LEAST_PART_BYTES = 5 << 20
"""Of every part of an upload but the last, as at the original."""
_SKEW_SECONDS = 900.0
_PAGE = 1000
_COPY_FROM = {"x-amz-copy-source", "x-goog-copy-source"}


@dataclass(slots=True)
class Upload:
    """What has come of an object that is sent in parts."""

    bucket: str
    key: str
    begun: float
    parts: dict[int, Stored] = field(default_factory=dict[int, Stored])


class Refused(Exception):
    """The answer to a request that cannot be carried out."""

    def __init__(self, status: int, code: str, more: str = "") -> None:
        super().__init__(code)
        self.status, self.code, self.more = status, code, more


class FakeS3(FakeServer):
    """Objects by the REST protocol of S3, with paths as ``/bucket/key``; any key is accepted.

    Uploads in parts count only once they are completed; each write is atomic; ``If-None-Match: *``
    and ``If-Match`` hold for PUT, for completing an upload, and ``If-Match`` for DELETE.
    """

    def __init__(self) -> None:
        super().__init__()
        self.uploads: dict[str, Upload] = {}
        """Those that were neither completed nor given up, by id."""
        self.objects.buckets[BUCKET] = {}
        self._ways: dict[Kind, Callable[[Asked], Reply]] = {
            "get": self._get,
            "head": self._get,
            "put": self._put,
            "copy": self._copy,
            "delete": self._delete,
            "delete-many": self._delete_many,
            "list": self._list,
            "begin-upload": self._begin,
            "upload-part": self._part,
            "complete-upload": self._complete,
            "abort-upload": self._abort,
            "list-parts": self._parts,
            "list-uploads": self._list_uploads,
            "bucket": self._bucket,
        }

    @property
    def storage_options(self) -> dict[str, Any]:
        """What leads s3fs here."""
        # Certificates, which are not needed here, take longer to read than a request does.
        client = {"endpoint_url": self.endpoint, "region_name": "us-east-1", "verify": False}
        return {"key": "test", "secret": "test", "client_kwargs": client}

    @property
    def obstore_options(self) -> dict[str, Any]:
        """What leads obstore here."""
        return self.storage_options

    @property
    def keys(self) -> dict[str, Stored]:
        """The objects of the bucket that tests use."""
        return self.objects.buckets[BUCKET]

    def understand(self, request: web.Request, body: bytes) -> Asked:
        headers, query = headers_of(request), query_of(request)
        bucket, _, key = request.path.lstrip("/").partition("/")
        if "aws-chunked" in headers.get("content-encoding", ""):
            body = _unchunked(body)
        return Asked(
            kind=_kind(request.method, bool(key), query, headers),
            method=request.method,
            target=f"{request.path}?{request.query_string}",
            bucket=bucket,
            key=key,
            query=query,
            headers=headers,
            body=body,
        )

    def carry_out(self, asked: Asked) -> Reply:
        try:
            self._check_clock(asked)
            self._check_bucket(asked)
            return self._ways.get(asked.kind, _not_known)(asked)
        except Refused as error:
            return self.refusal(asked, error.status, error.code, error.more)

    def refusal(self, asked: Asked, status: int, code: str, more: str = "") -> Reply:
        headers = {"Content-Type": "application/xml"}
        if asked.method == "HEAD" or status == 304:
            return Reply(status=status, headers=headers)
        text = f"<Code>{code}</Code><Message>{code}: {escape(asked.key)}</Message>{more}"
        return Reply(
            status=status,
            headers=headers,
            body=f'<?xml version="1.0" encoding="UTF-8"?>\n<Error>{text}</Error>'.encode(),
        )

    def unconditionally(self, asked: Asked) -> Asked:
        left = {k: v for k, v in asked.headers.items() if k not in ("if-match", "if-none-match")}
        return replace(asked, headers=left)

    def _check_clock(self, asked: Asked) -> None:
        stamp = asked.headers.get("x-amz-date")
        if stamp is not None and not self.is_lenient:
            sent = datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
            if abs(sent - self.now()) > _SKEW_SECONDS:
                raise Refused(403, "RequestTimeTooSkewed")

    def _check_bucket(self, asked: Asked) -> None:
        if asked.kind != "bucket" and asked.bucket not in self.objects.buckets:
            raise Refused(404, "NoSuchBucket")

    def _check_conditions(self, asked: Asked) -> Stored | None:
        """Return the object that is there; Refused if the conditions do not hold."""
        found = self.objects.buckets[asked.bucket].get(asked.key)
        wanted, unwanted = asked.headers.get("if-match"), asked.headers.get("if-none-match")
        if wanted is not None:
            if found is None:
                raise Refused(404, "NoSuchKey")
            if wanted.strip('"') not in (found.etag, "*"):
                raise Refused(412, "PreconditionFailed", "<Condition>If-Match</Condition>")
        if unwanted is not None and found is not None and unwanted.strip('"') in (found.etag, "*"):
            if asked.kind in ("get", "head"):
                raise Refused(304, "NotModified")
            raise Refused(412, "PreconditionFailed", "<Condition>If-None-Match</Condition>")
        return found

    def _marks(self, found: Stored) -> dict[str, str]:
        """Return the headers by which this state of an object is known."""
        return {"ETag": f'"{found.etag}"'}

    def _get(self, asked: Asked) -> Reply:
        found = self._check_conditions(asked)
        if found is None:
            raise Refused(404, "NoSuchKey")
        size = len(found.data)
        headers = self._marks(found) | {
            "Last-Modified": formatdate(found.modified, usegmt=True),
            "Accept-Ranges": "bytes",
            "Content-Type": "binary/octet-stream",
        }
        place = cut(asked, size)
        if place is None:
            raise Refused(416, "InvalidRange")
        start, stop = place
        if asked.span is not None:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        if asked.method == "HEAD":
            headers["Content-Length"] = str(stop - start)
        status = 200 if asked.span is None else 206
        return Reply(status=status, headers=headers, body=memoryview(found.data)[start:stop])

    def _put(self, asked: Asked) -> Reply:
        self._check_conditions(asked)
        return Reply(headers=self._marks(self.objects.put(asked.bucket, asked.key, asked.body)))

    def _copy(self, asked: Asked) -> Reply:
        found = self._source(asked)
        data = found.data
        upload = asked.query.get("uploadId")
        if upload is None:
            made = self.objects.put(asked.bucket, asked.key, data)
            return _xml("CopyObjectResult", _described(made))
        span = asked.headers.get("x-amz-copy-source-range")
        if span is not None:
            first, _, last = span.removeprefix("bytes=").partition("-")
            data = data[int(first) : int(last) + 1]
        return _xml("CopyPartResult", _described(self._add_part(asked, data)))

    def _source(self, asked: Asked) -> Stored:
        (source,) = (asked.headers[name] for name in asked.headers.keys() & _COPY_FROM)
        named = unquote(source).lstrip("/").partition("?")[0]
        bucket, _, key = named.partition("/")
        found = self.objects.buckets.get(bucket, {}).get(key)
        if found is None:
            raise Refused(404, "NoSuchKey")
        return found

    def _delete(self, asked: Asked) -> Reply:
        self._check_conditions(asked)
        self.objects.buckets[asked.bucket].pop(asked.key, None)
        return Reply(status=204)

    def _delete_many(self, asked: Asked) -> Reply:
        keys = [found.text or "" for found in _find(asked.body, "Key")]
        if len(keys) > _PAGE:
            raise Refused(400, "MalformedXML")
        for key in keys:
            self.objects.buckets[asked.bucket].pop(key, None)
        gone = (f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
        return _xml("DeleteResult", "".join(gone))

    def _list(self, asked: Asked) -> Reply:
        query = asked.query
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        limit = min(int(query.get("max-keys") or _PAGE), _PAGE)
        page = self.objects.page(asked.bucket, prefix, delimiter, after, limit)

        def name(key: str) -> str:
            return quote(key) if query.get("encoding-type") == "url" else escape(key)

        items = [
            f"<Contents><Key>{name(key)}</Key>{_described(found)}<Size>{len(found.data)}</Size>"
            "<StorageClass>STANDARD</StorageClass></Contents>"
            for key, found in page.objects.items()
        ]
        items += [
            f"<CommonPrefixes><Prefix>{name(folder)}</Prefix></CommonPrefixes>"
            for folder in page.folders
        ]
        items.append(f"<Name>{asked.bucket}</Name><Prefix>{name(prefix)}</Prefix>")
        items.append(f"<KeyCount>{len(page.objects) + len(page.folders)}</KeyCount>")
        items.append(f"<MaxKeys>{limit}</MaxKeys>")
        if query.get("encoding-type"):
            items.append(f"<EncodingType>{escape(query['encoding-type'])}</EncodingType>")
        if delimiter:
            items.append(f"<Delimiter>{name(delimiter)}</Delimiter>")
        if page.after is not None:
            token = f"<NextContinuationToken>{escape(page.after)}</NextContinuationToken>"
            items.append(token)
        items.append(f"<IsTruncated>{'false' if page.after is None else 'true'}</IsTruncated>")
        return _xml("ListBucketResult", "".join(items))

    def _begin(self, asked: Asked) -> Reply:
        upload_id = f"upload-{next(numbers)}"
        self.uploads[upload_id] = Upload(asked.bucket, asked.key, self.now())
        return _xml("InitiateMultipartUploadResult", _names(asked, upload_id))

    def _upload(self, asked: Asked) -> Upload:
        found = self.uploads.get(asked.query["uploadId"])
        if found is None or (found.bucket, found.key) != (asked.bucket, asked.key):
            raise Refused(404, "NoSuchUpload")
        return found

    def _part(self, asked: Asked) -> Reply:
        return Reply(headers=self._marks(self._add_part(asked, asked.body)))

    def _add_part(self, asked: Asked, data: bytes) -> Stored:
        upload = self._upload(asked)
        number = int(asked.query["partNumber"])
        if not 1 <= number <= 10_000:
            raise Refused(400, "InvalidArgument")
        made = Stored(data=data, etag=digest(data), modified=self.now(), generation=number)
        upload.parts[number] = made
        return made

    def _complete(self, asked: Asked) -> Reply:
        upload = self._upload(asked)
        numbered = [int(found.text or 0) for found in _find(asked.body, "PartNumber")]
        tags = [(found.text or "").strip('"') for found in _find(asked.body, "ETag")]
        if numbered != sorted(set(numbered)) or not numbered:
            raise Refused(400, "InvalidPartOrder" if numbered else "MalformedXML")
        parts = [upload.parts.get(number) for number in numbered]
        chosen = [part for part in parts if part is not None]
        if [part.etag for part in chosen] != tags:
            raise Refused(400, "InvalidPart")
        if any(len(part.data) < LEAST_PART_BYTES for part in chosen[:-1]):
            raise Refused(400, "EntityTooSmall")
        self._check_conditions(asked)
        etag = f"{digest(''.join(tags).encode())}-{len(chosen)}"
        whole = b"".join(part.data for part in chosen)
        made = self.objects.put(asked.bucket, asked.key, whole, etag)
        del self.uploads[asked.query["uploadId"]]
        text = f'{_names(asked)}<ETag>"{etag}"</ETag>'
        return replace(_xml("CompleteMultipartUploadResult", text), headers=self._marks(made))

    def _abort(self, asked: Asked) -> Reply:
        self._upload(asked)
        del self.uploads[asked.query["uploadId"]]
        return Reply(status=204)

    def _parts(self, asked: Asked) -> Reply:
        parts = self._upload(asked).parts
        items = (
            f"<Part><PartNumber>{number}</PartNumber>{_described(part)}"
            f"<Size>{len(part.data)}</Size></Part>"
            for number, part in sorted(parts.items())
        )
        last = "<IsTruncated>false</IsTruncated>"
        names = _names(asked, asked.query["uploadId"])
        return _xml("ListPartsResult", names + "".join(items) + last)

    def _list_uploads(self, asked: Asked) -> Reply:
        prefix = asked.query.get("prefix", "")
        items = (
            f"<Upload><Key>{escape(upload.key)}</Key><UploadId>{upload_id}</UploadId>"
            f"<Initiated>{_timestamp(upload.begun)}</Initiated></Upload>"
            for upload_id, upload in sorted(self.uploads.items(), key=lambda item: item[1].key)
            if upload.bucket == asked.bucket and upload.key.startswith(prefix)
        )
        last = "<IsTruncated>false</IsTruncated>"
        return _xml("ListMultipartUploadsResult", "".join(items) + last)

    def _bucket(self, asked: Asked) -> Reply:
        buckets = self.objects.buckets
        if asked.method == "PUT":
            buckets.setdefault(asked.bucket, {})
            return Reply()
        if not asked.bucket:
            names = (f"<Bucket><Name>{escape(name)}</Name></Bucket>" for name in sorted(buckets))
            return _xml("ListAllMyBucketsResult", f"<Buckets>{''.join(names)}</Buckets>")
        if asked.bucket not in buckets:
            raise Refused(404, "NoSuchBucket")
        if asked.method == "DELETE":
            if buckets[asked.bucket]:
                raise Refused(409, "BucketNotEmpty")
            del buckets[asked.bucket]
            return Reply(status=204)
        if "versioning" in asked.query:
            return _xml("VersioningConfiguration", "")
        if "location" in asked.query:
            return _xml("LocationConstraint", "")
        return Reply()


def headers_of(request: web.Request) -> dict[str, str]:
    """Return the headers, by names in lower case."""
    return {name.lower(): value for name, value in request.headers.items()}


def query_of(request: web.Request) -> dict[str, str]:
    """Return what stands behind the question mark, decoded."""
    given = parse_qs(request.rel_url.raw_query_string, keep_blank_values=True)
    return {name: values[-1] for name, values in given.items()}


def _kind(method: str, has_key: bool, query: dict[str, str], headers: dict[str, str]) -> Kind:
    if not has_key:
        if method == "POST" and "delete" in query:
            return "delete-many"
        if method != "GET" or query.keys() & {"location", "versioning"}:
            return "bucket"
        if "uploads" in query:
            return "list-uploads"
        return "list" if "list-type" in query else "bucket"
    in_parts = "uploadId" in query
    if method == "PUT" and headers.keys() & _COPY_FROM:
        return "copy"
    kinds: dict[tuple[str, bool], Kind] = {
        ("GET", False): "get",
        ("HEAD", False): "head",
        ("PUT", False): "put",
        ("DELETE", False): "delete",
        ("PUT", True): "upload-part",
        ("POST", True): "complete-upload",
        ("DELETE", True): "abort-upload",
        ("GET", True): "list-parts",
    }
    if method == "POST" and "uploads" in query:
        return "begin-upload"
    return kinds.get((method, in_parts), "other")


def _not_known(asked: Asked) -> Reply:
    raise Refused(501, "NotImplemented")


def _unchunked(body: bytes) -> bytes:
    """Take away what marks the chunks of a signed stream, and what trails it."""
    found, place = bytearray(), 0
    while True:
        end = body.index(b"\r\n", place)
        size = int(body[place:end].partition(b";")[0], 16)
        if size == 0:
            return bytes(found)
        found += body[end + 2 : end + 2 + size]
        place = end + 4 + size


def _find(body: bytes, name: str) -> list[ElementTree.Element]:
    """Return the elements of a document that are called so, whatever their namespace."""
    root = ElementTree.fromstring(body)
    return [one for one in root.iter() if one.tag.rpartition("}")[2] == name]


def _timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def _described(found: Stored) -> str:
    modified = _timestamp(found.modified)
    return f"<LastModified>{modified}</LastModified><ETag>&quot;{found.etag}&quot;</ETag>"


def _names(asked: Asked, upload_id: str = "") -> str:
    named = f"<Bucket>{asked.bucket}</Bucket><Key>{escape(asked.key)}</Key>"
    return named + (f"<UploadId>{upload_id}</UploadId>" if upload_id else "")


def _xml(name: str, inside: str) -> Reply:
    space = "http://s3.amazonaws.com/doc/2006-03-01/"
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<{name} xmlns="{space}">{inside}</{name}>'
    return Reply(headers={"Content-Type": "application/xml"}, body=text.encode())


@contextmanager
def fake_s3() -> Generator[FakeS3]:
    """Serve during the block."""
    with FakeS3() as server:
        yield server


if __name__ == "__main__":
    with fake_s3() as running:
        print(running.endpoint, BUCKET, flush=True)
        threading.Event().wait()
