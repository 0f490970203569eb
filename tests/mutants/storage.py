"""Mutants of the stores."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS = (
    Mutant(
        name="the directory of a new object is not flushed",
        file="storage/local/store.py",
        old="""            self._temporary = ""
            sync_directory(os.path.dirname(self._path))""",
        new="""            self._temporary = \"\"""",
        tests=("tests/storage/local/test_local.py",),
    ),
    Mutant(
        name="a link whose reply was lost counts as refused",
        file="storage/local/posix.py",
        old="""        if not os.path.samestat(os.stat(temporary), os.lstat(target)):
            raise""",
        new="        raise",
        tests=("tests/storage/local/test_local.py",),
    ),
    Mutant(
        name="a replacement does not look at what is there",
        file="storage/local/store.py",
        old="                    if self.check is not None:",
        new="                    if False:",
        tests=("tests/storage/local/test_local.py",),
    ),
    Mutant(
        name="directories are not locked",
        file="storage/local/posix.py",
        old="                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        new="                pass",
        tests=("tests/storage/local/test_local.py",),
    ),
    Mutant(
        name="a replacement on S3 is not conditional",
        file="storage/remote/fsspec/dialects/s3.py",
        old='        return {"IfMatch": info["ETag"]} if info.get("ETag") else {}',
        new="        return {}",
        tests=("tests/storage/remote/fsspec/test_s3.py",),
    ),
    Mutant(
        name="conflicts of conditional requests are not tried again",
        file="storage/remote/trouble.py",
        old="    {Kind.CONFLICT, Kind.THROTTLED,",
        new="    {Kind.THROTTLED,",
        tests=("tests/checkpoint/test_busy_server.py",),
    ),
    Mutant(
        name="no failure to publish is a refusal",
        file="storage/remote/trouble.py",
        old="        return 400 <= self.status < 500 and",
        new="        return False and",
        tests=("tests/checkpoint/test_busy_server.py",),
    ),
    Mutant(
        name="every failure to publish is a refusal",
        file="storage/remote/trouble.py",
        old="        return 400 <= self.status < 500 and",
        new="        return True or",
        tests=("tests/storage/remote/test_requests.py",),
    ),
    Mutant(
        name="a refusal of the last request counts for those before",
        file="storage/remote/requests.py",
        old="        return self._num_refused == self._num_attempts",
        new="        return self._num_refused > 0",
        tests=("tests/checkpoint/test_busy_server.py",),
    ),
    Mutant(
        name="a refusal of a request that was repeated on the way counts as certain",
        file="storage/remote/requests.py",
        old="is_refusal and self._num_sent == before + 1",
        new="is_refusal",
        tests=("tests/storage/remote/test_requests.py",),
    ),
    Mutant(
        name="a refusal counts as certain although nothing can be read back",
        file="storage/remote/fsspec/store.py",
        old="""                return
            error.is_certain = is_known and""",
        new="""                return
            error.is_certain = True and""",
        tests=("tests/checkpoint/test_busy_server.py",),
    ),
    Mutant(
        name="an object is not looked for before it is made without a condition",
        file="storage/remote/requests.py",
        old="""    look()
    ask({})""",
        new="    ask({})",
        tests=("tests/checkpoint/test_busy_server.py",),
    ),
    Mutant(
        name="a busy server is asked as much as before",
        file="storage/remote/limit.py",
        old="self._allowed / 2",
        new="self._allowed",
        tests=("tests/storage/remote/test_asking.py",),
    ),
    Mutant(
        name="a driver that does not come back is waited for",
        file="storage/remote/asking.py",
        old="        return future.result(seconds)",
        new="        return future.result(60)",
        tests=("tests/storage/remote/test_asking.py",),
    ),
    Mutant(
        name="space is reserved by writing where the file system cannot",
        file="storage/local/posix.py",
        old="        fallocate(fd, size)",
        new="        os.posix_fallocate(fd, 0, size)",
        tests=("tests/storage/local/test_local.py",),
    ),
    Mutant(
        name="the alignment of the offset of a direct write is not looked at",
        file="storage/local/direct.py",
        old="if not length or offset % ALIGNMENT or view.readonly or",
        new="if not length or view.readonly or",
        equivalent="the kernel refuses it with EINVAL, for which it is written as usual",
    ),
)
