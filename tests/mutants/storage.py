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
        file="storage/remote/puts.py",
        old='        return {"IfMatch": info["ETag"]}',
        new="        return {}",
        tests=("tests/storage/remote/test_s3.py",),
    ),
    Mutant(
        name="conflicts of conditional requests are not tried again",
        file="storage/remote/puts.py",
        old='code != "ConditionalRequestConflict" or attempt',
        new="True or attempt",
        tests=("tests/checkpoint/test_busy_server.py",),
    ),
    Mutant(
        name="no failure to publish is a refusal",
        file="storage/remote/s3_requests.py",
        old="        is_refusal = 400 <= status < 500 and",
        new="        is_refusal = False and",
        tests=("tests/checkpoint/test_busy_server.py",),
    ),
    Mutant(
        name="every failure to publish is a refusal",
        file="storage/remote/s3_requests.py",
        old="        is_refusal = 400 <= status < 500 and",
        new="        is_refusal = True or",
        tests=("tests/storage/remote/test_s3_requests.py",),
    ),
    Mutant(
        name="a refusal of a repeated request counts as certain",
        file="storage/remote/s3_requests.py",
        old="            self._may_be_under_way |= self._num_sent != before + 1",
        new="            pass",
        tests=("tests/checkpoint/test_busy_server.py",),
    ),
    Mutant(
        name="a refusal counts as certain although nothing can be read back",
        file="storage/remote/fsspec_store.py",
        old="""                return
            error.is_certain = is_known and""",
        new="""                return
            error.is_certain = True and""",
        tests=("tests/checkpoint/test_busy_server.py",),
    ),
    Mutant(
        name="an object is not looked for before it is made without a condition",
        file="storage/remote/puts.py",
        old="                look()",
        new="                pass",
        tests=("tests/checkpoint/test_busy_server.py",),
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
