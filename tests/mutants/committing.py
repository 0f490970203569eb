"""Mutants of the commit, of incremental saves, of deleting and of cleaning."""

from __future__ import annotations

from .mutant import Mutant

_STATES = ("tests/checkpoint/files/test_commit_states.py",)
_COMMITS = ("tests/checkpoint/files/test_commit.py", "tests/checkpoint/saving/test_save_hazards.py")
_BASES = ("tests/checkpoint/saving/test_incremental.py",)
_CLEANING = ("tests/checkpoint/test_cleaning.py",)
_STEPS = ("tests/checkpoint/test_steps.py",)

MUTANTS = (
    Mutant(
        name="lenders are not claimed before the manifest is published",
        file="checkpoint/files/committing.py",
        old="""            claim_lenders(store, manifest)
""",
        new="""            pass
""",
        tests=_STATES,
    ),
    Mutant(
        name="who is deleting a lender is not looked at",
        file="checkpoint/files/borrowing.py",
        old="""        if going is not None:
            raise going


def refuse_if_going""",
        new="""

def refuse_if_going""",
        tests=_STATES,
    ),
    Mutant(
        name="a lender that is gone or another one is not noticed",
        file="checkpoint/files/borrowing.py",
        old="        if found != save_id:",
        new="        if False:",
        tests=_STATES,
    ),
    Mutant(
        name="claims do not keep a checkpoint",
        file="checkpoint/files/borrowing.py",
        old="    if claims := [mark for mark in marks if is_claim(mark)]:",
        new="    if claims := [mark for mark in marks if False]:",
        tests=_STATES,
    ),
    Mutant(
        name="checkpoints that refer to one do not keep it",
        file="checkpoint/files/borrowing.py",
        old="    others = dependents(store, marks)",
        new="    others = dependents(store, ())",
        tests=_STATES,
    ),
    Mutant(
        name="claims are withdrawn although the manifest may yet appear",
        file="checkpoint/files/committing.py",
        old="        if error.is_certain:  # else",
        new="        if True:  # else",
        tests=_STATES,
    ),
    Mutant(
        name="claims stay after a failure that is certain",
        file="checkpoint/files/committing.py",
        old="""            withdraw_claims(store, manifest)
        raise""",
        new="""            pass
        raise""",
        tests=_BASES,
    ),
    Mutant(
        name="claims stay after a commit",
        file="checkpoint/files/committing.py",
        old="""    withdraw_claims(store, manifest)
    if replaced""",
        new="    if replaced",
        tests=_COMMITS,
    ),
    Mutant(
        name="who needs replaced files is not looked at before they go",
        file="checkpoint/files/committing.py",
        old="""            refuse_if_needed(store, "replaced", manifest.save_id)
            store.delete(""",
        new="            store.delete(",
        tests=_STATES,
    ),
    Mutant(
        name="who needs a checkpoint is not looked at before it is replaced",
        file="checkpoint/files/committing.py",
        old="""            refuse_if_needed(store, "replaced", _save_id(store, there))
    try:""",
        new="""            _save_id(store, there)
    try:""",
        tests=_COMMITS,
    ),
    Mutant(
        name="a checkpoint is replaced whatever it is by now",
        file="checkpoint/files/committing.py",
        old="""            store.replace(MANIFEST, text, expected=there)
    except""",
        new="""            store.publish(MANIFEST, text, overwrite=True)
    except""",
        tests=_STATES,
    ),
    Mutant(
        name="our own manifest counts as a rival's",
        file="checkpoint/files/committing.py",
        old="        if found == text:  # only the reply was lost",
        new="        if False:  # only the reply was lost",
        tests=_COMMITS,
    ),
    Mutant(
        name="a rival's manifest counts as our own",
        file="checkpoint/files/committing.py",
        old="        if found == text:  # only the reply was lost",
        new="        if True:  # only the reply was lost",
        tests=_STATES,
    ),
    Mutant(
        name="a failure after publishing counts as certain",
        file="checkpoint/files/committing.py",
        old="""        with failing(certain=False):
            found""",
        new="""        with failing(certain=True):
            found""",
        tests=_STATES,
    ),
    Mutant(
        name="a refusal of a request that was repeated is certain",
        file="checkpoint/files/committing.py",
        old="        with failing(certain=error.is_certain):",
        new="        with failing(certain=True):",
        tests=_STATES,
    ),
    Mutant(
        name="a failure before publishing is not certain",
        file="checkpoint/files/committing.py",
        old="""        with failing(certain=True):
            there =""",
        new="""        with failing(certain=False):
            there =""",
        tests=_STATES,
    ),
    Mutant(
        name="what was published is not compared",
        file="checkpoint/files/committing.py",
        old="""    if found == text:
        return
""",
        new="""    if found:
        return
""",
        tests=_COMMITS,
    ),
    Mutant(
        name="a damaged replacement is left there",
        file="checkpoint/files/committing.py",
        old="""        except CheckpointError:
            _put_back(store, there)
""",
        new="""        except CheckpointError:
""",
        tests=_COMMITS,
    ),
    Mutant(
        name="files of the replaced checkpoint are left over",
        file="checkpoint/files/committing.py",
        old="""    if replaced is not None:
        _sweep(store, replaced, manifest.save_id)""",
        new="""    if replaced is not None:
        pass""",
        tests=_COMMITS,
    ),
    Mutant(
        name="a listing that lags behind is believed",
        file="checkpoint/files/committing.py",
        old="        if is_wrong(record, found):  # a listing",
        new="        if False:  # a listing",
        tests=_STEPS,
    ),
    Mutant(
        name="data files that a manifest borrows are not looked for",
        file="checkpoint/files/committing.py",
        old="    for (source, save_id), records in lenders.items():",
        new="    for (source, save_id), records in ():",
        tests=_STEPS,
    ),
    Mutant(
        name="delete does not look who needs the checkpoint",
        file="checkpoint/deleting.py",
        old='        marks = refuse_if_needed(store, "deleted", manifest.save_id)',
        new="        marks: list[str] = []",
        tests=_STATES,
    ),
    Mutant(
        name="delete looks before it has left its record",
        file="checkpoint/deleting.py",
        old="""    store.publish(record, text, overwrite=False)
    try:
        marks = refuse_if_needed(store, "deleted", manifest.save_id)
""",
        new="""    try:
        marks = refuse_if_needed(store, "deleted", manifest.save_id)
        store.publish(record, text, overwrite=False)
""",
        tests=_STATES,
    ),
    Mutant(
        name="delete takes whatever is there by now",
        file="checkpoint/deleting.py",
        old="            store.remove(MANIFEST, expected=text)",
        new="            store.delete([MANIFEST])",
        tests=_STATES,
    ),
    Mutant(
        name="a record of a deletion that was refused stays",
        file="checkpoint/deleting.py",
        old="""        with suppress(StorageError):
            store.delete([record])
        raise""",
        new="        raise",
        tests=_BASES,
    ),
    Mutant(
        name="a record stays although the checkpoint does",
        file="checkpoint/deleting.py",
        old="            if find_manifest(store) == text:  # not",
        new="            if False:  # not",
        tests=_BASES,
    ),
    Mutant(
        name="a base that is being deleted is found out late",
        file="checkpoint/saving/job.py",
        old="            refuse_if_going(base, parsed[0].save_id)",
        new="            pass",
        tests=_BASES,
    ),
    Mutant(
        name="files of a checkpoint that stands go with an old record",
        file="checkpoint/deleting.py",
        old="""        if find_manifest(store) == text:
            store.delete([info.name])""",
        new="""        if False:
            store.delete([info.name])""",
        tests=_CLEANING,
    ),
    Mutant(
        name="a deletion that was interrupted is not finished",
        file="checkpoint/deleting.py",
        old="        if not finish_deletions(store):",
        new="        if True:",
        tests=_CLEANING,
    ),
    Mutant(
        name="one old file makes a save dead",
        file="checkpoint/cleaning.py",
        old="        if all(is_before(objects",
        new="        if any(is_before(objects",
        tests=_CLEANING,
    ),
    Mutant(
        name="cleaning takes what checkpoints name",
        file="checkpoint/cleaning.py",
        old="        if match and not match[1] and match[2] not in needed:",
        new="        if match and not match[1]:",
        tests=_CLEANING,
    ),
    Mutant(
        name="cleaning takes what others borrow",
        file="checkpoint/cleaning.py",
        old="        found |= {file.save_id",
        new="        found &= {file.save_id",
        tests=_CLEANING,
    ),
    Mutant(
        name="young claims keep nothing from cleaning",
        file="checkpoint/cleaning.py",
        old="    if any(is_claim(info.name) and not",
        new="    if any(False and not",
        tests=_CLEANING,
    ),
    Mutant(
        name="cleaning lists marks before it looks at the manifest",
        file="checkpoint/cleaning.py",
        old="""    text = find_manifest(here)
    found = set() if text is None else {Manifest.from_bytes(text, here.url).save_id}
    listed = list(here.list(MARKS))
""",
        new="""    listed = list(here.list(MARKS))
    text = find_manifest(here)
    found = set() if text is None else {Manifest.from_bytes(text, here.url).save_id}
""",
        tests=_STATES,
    ),
    Mutant(
        name="cleaning believes the name of a data file",
        file="checkpoint/cleaning.py",
        old="        if found != save_id:",
        new="        if False:",
        tests=_CLEANING,
    ),
    Mutant(
        name="cleaning takes unfinished files of other programs",
        file="checkpoint/cleaning.py",
        old="if _is_ours(n, places)]",
        new="]",
        tests=_CLEANING,
    ),
    Mutant(
        name="latest does not look for data files",
        file="checkpoint/steps.py",
        old="        if not missing:",
        new="        if True:",
        tests=_STEPS,
    ),
    Mutant(
        name="latest gives up on a checkpoint that is being replaced",
        file="checkpoint/steps.py",
        old="    while (text := read_manifest_bytes(place)) != before:",
        new="    while not before and (text := read_manifest_bytes(place)) != before:",
        tests=_STEPS,
    ),
    Mutant(
        name="latest takes whatever else is there for nothing",
        file="checkpoint/steps.py",
        old=" or check_first_start(store)",
        new="",
        tests=_STEPS,
    ),
    Mutant(
        name="a missing bucket is an empty one",
        file="storage/remote/trouble.py",
        old='    "NoSuchBucket": Kind.NO_BUCKET,',
        new='    "NoSuchBucket": Kind.MISSING,',
        tests=_STEPS,
    ),
    Mutant(
        name="an unreachable host is an empty directory",
        file="storage/remote/fsspec/listing.py",
        old="    if not isinstance(error, FileNotFoundError):",
        new="    if False:",
        tests=_STEPS,
    ),
)
