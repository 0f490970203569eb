"""Mutants of manifests, data files and reads."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS = (
    Mutant(
        name="gaps that were not verified are kept in the cache",
        file="checkpoint/reading/execution.py",
        old="        if self._cache is not None and fresh and not fresh[-1][0].has_gaps:",
        new="        if self._cache is not None and fresh:",
        tests=("tests/checkpoint/reading/test_reading.py", "tests/checkpoint/files/test_damage.py"),
    ),
    Mutant(
        name="a data file of another save is read",
        file="checkpoint/files/stored_data.py",
        old="    if layout.save_id != save_id:",
        new="    if False:",
        equivalent="the digest of its header, held by the manifest, differs and is checked first",
    ),
    Mutant(
        name="a reader fills a buffer again that it has left in the cache",
        file="checkpoint/reading/execution.py",
        old='            self._buffer = memoryview(b"")  # it belongs',
        new="            # it belongs",
        tests=("tests/checkpoint/reading/test_reading.py",),
    ),
    Mutant(
        name="files without checksums are not asked for once all is read",
        file="checkpoint/reading/execution.py",
        old="            list(pool.map(DataFile.check_unchanged, run.unverified))",
        new="            pass",
        tests=("tests/checkpoint/formats/test_rewritten_files.py",),
    ),
    Mutant(
        name="a file may be another than when the manifest was made",
        file="checkpoint/formats/files.py",
        old="    if record.seen is not None:",
        new="    if False:",
        tests=("tests/checkpoint/formats/test_rewritten_files.py",),
    ),
    Mutant(
        name="another file's bytes are taken from the cache",
        file="checkpoint/reading/execution.py",
        old="if last is None or last[0] is not file or wanted.start < last[1]:",
        new="if last is None or wanted.start < last[1]:",
        tests=("tests/checkpoint/reading/test_reading.py",),
    ),
    Mutant(
        name="fewer bytes than wanted are taken from the cache",
        file="checkpoint/reading/execution.py",
        old="return data if len(data) == wanted.end - wanted.start else None",
        new="return data if len(data) else None",
        tests=("tests/checkpoint/reading/test_reading.py",),
    ),
    Mutant(
        name="what a store does not tell of is not verified",
        file="checkpoint/reading/execution.py",
        old="        for check in checks.values():  # whatever a store tells",
        new="        for check in ():  # whatever a store tells",
        tests=("tests/checkpoint/files/test_damage.py",),
    ),
    Mutant(
        name="elements are stored before their blocks are verified",
        file="checkpoint/reading/execution.py",
        old="        if damaged:\n            raise Corrupt",
        new="        if damaged and not read.ranges:\n            raise Corrupt",
        tests=("tests/checkpoint/files/test_damage.py",),
    ),
    Mutant(
        name="blocks read straight into place are not told as touched",
        file="checkpoint/reading/execution.py",
        old="in in_place:\n            self._touched[extent.want.name] = None",
        new="in in_place:\n            pass",
        tests=("tests/checkpoint/reading/test_reading.py", "tests/checkpoint/files/test_damage.py"),
    ),
    Mutant(
        name="a block that two extents share is verified for the first one only as far as it goes",
        file="checkpoint/reading/execution.py",
        old="            start = max(start, done)",
        new="            start = done",
        tests=("tests/checkpoint/reading/test_reading.py", "tests/checkpoint/files/test_damage.py"),
    ),
    Mutant(
        name="runs are verified against the blocks before them",
        file="checkpoint/reading/execution.py",
        old="check = partial(file.damaged, extent.entry, extent.cut.low + low, blocks)",
        new="check = partial(file.damaged, extent.entry, low, blocks)",
        tests=("tests/checkpoint/reading/test_reading.py", "tests/checkpoint/files/test_damage.py"),
    ),
    Mutant(
        name="buffers do not keep the alignment of the file",
        file="checkpoint/reading/execution.py",
        old="    return -(-(r.end - r.start) // limits.ALIGNMENT) * limits.ALIGNMENT",
        new="    return r.end - r.start",
        equivalent="numpy takes items that are not aligned, only slower",
    ),
    Mutant(
        name="readers go on after one of them has failed",
        file="checkpoint/reading/execution.py",
        old="        if stop.is_set():\n            return",
        new="        if stop.is_set():\n            pass",
        tests=("tests/checkpoint/reading/test_reading.py", "tests/checkpoint/files/test_damage.py"),
    ),
    Mutant(
        name="ranks do not agree on the end of a load in which code of users takes part",
        file="checkpoint/loading/decision.py",
        old="calls_back=any(one.calls_back for one in told),",
        new="calls_back=False,",
        tests=("tests/checkpoint/loading/test_rounds.py", "tests/checkpoint/test_together.py"),
    ),
    Mutant(
        name="a rank that may read for others plans before it knows whether it does",
        file="checkpoint/loading/loader.py",
        old="            if not offer.fingerprint:\n",
        new="            if True:\n",
        tests=("tests/checkpoint/loading/test_rounds.py",),
    ),
    Mutant(
        name="what one rank lacks is not looked at before others read",
        file="checkpoint/loading/decision.py",
        old="any(one.offer.fingerprint or not one.is_complete for one in told)",
        new="any(one.offer.fingerprint for one in told)",
        tests=("tests/checkpoint/loading/test_rounds.py",),
    ),
    Mutant(
        name="tensors without memory are read through a buffer, however they will lie",
        file="checkpoint/loading/destinations.py",
        old="is_memory = not is_filled and will_be_host_memory(value, self._options.device)",
        new="is_memory = False",
        equivalent="only slower",
    ),
)
