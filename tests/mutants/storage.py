"""Mutants of the stores."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS = (
    Mutant(
        name="the directory of a new object is not flushed",
        file="storage/local.py",
        old="""            self._temporary = ""
            sync_directory(os.path.dirname(self._path))""",
        new="""            self._temporary = \"\"""",
        tests=("tests/storage/test_local.py",),
    ),
    Mutant(
        name="a link whose reply was lost counts as refused",
        file="storage/posix.py",
        old="""        if not os.path.samestat(os.stat(temporary), os.lstat(target)):
            raise""",
        new="        raise",
        tests=("tests/storage/test_local.py",),
    ),
    Mutant(
        name="the alignment of the offset of a direct write is not looked at",
        file="storage/direct.py",
        old="if not length or offset % ALIGNMENT or view.readonly or",
        new="if not length or view.readonly or",
        equivalent="the kernel refuses it with EINVAL, for which it is written as usual",
    ),
)
