"""Mutants of the commit, of incremental saves and of deleting."""

from __future__ import annotations

from .mutant import Mutant

_COMMITS = (
    "tests/checkpoint/test_commit.py",
    "tests/checkpoint/test_incremental.py",
    "tests/checkpoint/test_save_hazards.py",
)

MUTANTS = (
    Mutant(
        name="lenders are not looked at before the manifest is published",
        file="checkpoint/committing.py",
        old="""        leave_marks(store, manifest.borrowed)
        check_lenders(store, manifest.borrowed)
""",
        new="""        leave_marks(store, manifest.borrowed)
""",
        tests=_COMMITS,
    ),
    Mutant(
        name="who has come to need replaced files is not looked at before they go",
        file="checkpoint/committing.py",
        old="        if replaced and not dependents(store):",
        new="        if replaced:",
        tests=_COMMITS,
    ),
    Mutant(
        name="a listing that lags behind is believed",
        file="checkpoint/committing.py",
        old="if found != record.size and store.exists(name):",
        new="if found != record.size and False:",
        tests=_COMMITS,
    ),
    Mutant(
        name="delete does not look a second time who needs the checkpoint",
        file="checkpoint/deleting.py",
        old='        refuse_if_needed(store, "deleted")  # one may have been committed just before',
        new="        pass",
        tests=_COMMITS,
    ),
)
