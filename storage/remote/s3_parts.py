"""An upload to S3 in parts, several of which are on their way at a time."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from typing import Any, final

NUM_PARTS = 4
"""Parts in flight; with the one that fills, an upload holds one part more than these in memory."""


@final
class PartsFile:
    """A file to be written front to back, by one thread; it appears when it is closed.

    The driver's own file sends one part after the other and waits for each. Here every part has a
    thread, and fsspec's event loop does the work. Not a pool of ``concurrent.futures``: it takes
    no work once the interpreter is ending, when saves in the background still have to finish.
    """

    def __init__(self, fs: Any, path: str, part_bytes: int) -> None:
        """Begin an upload through ``fs``, an ``s3fs.S3FileSystem``; raises what that raises."""
        bucket, key, _ = fs.split_path(path)
        self.closed = False
        self._fs = fs
        self._part_bytes = part_bytes
        self._target = {"Bucket": bucket, "Key": key}
        self._target["UploadId"] = self._call("create_multipart_upload")["UploadId"]
        # Filled again and again: a fresh one would be faulted in for every part.
        self._part = bytearray(part_bytes)
        self._filled = 0
        self._threads: deque[threading.Thread] = deque()
        self._num_parts = 0
        # Filled by the threads, each by its own key; a failure ends the upload.
        self._sent: dict[int, dict[str, Any]] = {}
        self._failed: list[BaseException] = []

    def write(self, view: memoryview) -> None:
        """Take a copy of the bytes of ``view``; waits while too many parts are on their way.

        Raises the error of any part that failed so far.
        """
        while view.nbytes:
            taken = view[: self._part_bytes - self._filled]
            self._part[self._filled : self._filled + len(taken)] = taken
            self._filled += len(taken)
            view = view[len(taken) :]
            if self._filled == self._part_bytes:
                self._send()

    def close(self) -> None:
        """Send the rest, wait for all parts and complete the object, or raise what went wrong."""
        if self._filled:
            self._send()
        self._wait(0)
        parts = [self._sent[number] for number in sorted(self._sent)]
        self._call("complete_multipart_upload", MultipartUpload={"Parts": parts})
        self.closed = True
        self._fs.invalidate_cache(f"{self._target['Bucket']}/{self._target['Key']}")

    def discard(self) -> None:
        """Give up: the server forgets all parts."""
        self._filled = 0
        # A part that arrives after the end of its upload would stay there, and be paid for.
        try:
            with suppress(Exception):
                self._wait(0)
        finally:
            self._call("abort_multipart_upload")

    def _send(self) -> None:
        self._wait(NUM_PARTS - 1)
        self._num_parts += 1
        work = (self._num_parts, bytes(memoryview(self._part)[: self._filled]))
        self._filled = 0
        thread = threading.Thread(target=self._upload, args=work, name="dtckpt-part", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # an interpreter that is ending starts no threads
            self._upload(*work)
            self._wait(NUM_PARTS)
        else:
            self._threads.append(thread)

    def _wait(self, most: int) -> None:
        """Wait until at most so many parts are on their way; raise the first error of any."""
        while len(self._threads) > most:
            self._threads.popleft().join()
        if self._failed:
            raise self._failed[0]

    def _upload(self, number: int, data: bytes) -> None:
        try:
            reply = self._call("upload_part", PartNumber=number, Body=data)
            known = {name: reply[name] for name in ("ETag", "ChecksumSHA256") if name in reply}
            self._sent[number] = {"PartNumber": number, **known}
        except BaseException as error:  # it must reach the writer, whatever it is
            self._failed.append(error)

    def _call(self, method: str, **arguments: Any) -> Any:
        """The driver adds the user's own settings (encryption, who pays) and tries again."""
        return self._fs.call_s3(method, **self._target, **arguments)
