"""Exporting: what a checkpoint holds, as files that other programs load."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal

from dtckpt.errors import CheckpointError, LayoutMismatch, ObjectExists

from ...storage.base import Store
from ...storage.one_file import OneFile
from ...storage.open import open_store, split_target
from ..files.blocks import digest
from ..files.manifest import Manifest
from ..formats.names import SAFETENSORS
from ..formats.opening import (
    ManifestText,
    manifest_text,
    open_place,
    parse_manifest,
    stored_data,
)
from ..mapping.table import TensorMapping, mapped_manifest, table_of
from ..ranks.failing import CalledOff
from ..ranks.together import DEFAULT_TIMEOUT, Answers, Ranks, closing, ranks_of, together
from ..reading.batches import counted
from ..reading.packed_values import holds_dicts, with_plain_values
from ..state.selecting import near_names
from ..state.tree import ABSENT, index_tree
from .format import Format
from .safetensors_files import SafetensorsFiles

MAX_FILE_BYTES = 5_000_000_000
"""As the libraries of Hugging Face cut files by default."""
FormatName = Literal["safetensors", "dcp"]
"""What checkpoints are exported as."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What an export has written, on all ranks together."""

    url: str
    files: tuple[str, ...]
    """Names of the files that hold tensors, in order."""
    tensors: tuple[str, ...]
    """Names of the tensors in them."""
    tied: Mapping[str, str]
    """Names that stand for the elements of another one, which alone is written."""
    num_bytes: int
    """Bytes of all tensors that are written."""


def export(
    source: str | os.PathLike[str] | Store,
    target: str | os.PathLike[str] | Store,
    *,
    format: FormatName = "safetensors",
    part: str = "",
    mapping: TensorMapping | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    overwrite: bool = False,
    process_group: Any = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    source_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> ExportReport:
    """Write a checkpoint as another program's files. ``part`` is the part of the state meant.

    As ``"safetensors"`` the tensors are written as Hugging Face's libraries load them: ``target``
    is a directory, in which ``model.safetensors`` is made, or several files of at most
    ``max_file_bytes`` (a larger tensor has a file of its own) and their index, which is written
    last; or the path of one file that ends in ``.safetensors``. Names are those below ``part``,
    joined by dots: of ``"model"``, ``model/layers.0.weight`` becomes ``layers.0.weight``. Tied
    tensors are written once, and named in the metadata of their file, as by
    ``safetensors.torch.save_model``.

    As ``"dcp"`` tensors and values are written as ``torch.distributed.checkpoint`` saves them, and
    its ``load`` finds them under the names that it would have given them; what each rank kept for
    itself lies under the number of the rank. Tensors are in chunks of at most 32 MiB.

    ``mapping`` is a table of rules, or a list of them, that makes the tensors of others; it is
    given the names below ``part``. What was loaded through a table goes back by its ``inverse()``.

    Memory is bounded whatever the size; every byte is verified as it is read, if the checkpoint has
    checksums. ``on_progress(done, total)`` is called with bytes, of this rank's files.

    By default this process writes alone, in a group too. The ranks of a ``process_group`` call this
    together and write files in parallel; each reads what its files hold. They fail together, and
    a rank that shows no sign of life for ``timeout`` is given up.

    Raises LayoutMismatch where the part is not there, holds what the format cannot, or gives
    two tensors one name, and where the target is the place of the source; ObjectExists where
    files of the format are in the target, unless ``overwrite``, which takes them away before
    anything is written; and what ``open`` raises. What was written until then is taken away.
    """
    ranks = ranks_of(
        process_group,
        no_dist=process_group is None,
        timeout=timeout,
        purpose="export",
        target=target,
        wrong=_wrong(format, max_file_bytes),
    )
    with closing(ranks):
        job = _Export(ranks, part.strip("/"), mapping, format, max_file_bytes, overwrite)
        opening = partial(
            job.open, source, target, dict(source_options or {}), dict(target_options or {})
        )
        told = together(ranks, "export: open", opening, lambda _: job.tell())
        together(ranks, "export: plan", partial(job.plan, told))
        write = partial(job.write, on_progress)
        together(ranks, "export: write", write, on_failure=job.take_away)
        together(ranks, "export: finish", job.check, job.finish, on_failure=job.take_away)
        return job.report()


def _wrong(format: object, max_file_bytes: object) -> str:
    """Return what is wrong with arguments, or nothing."""
    if format not in ("safetensors", "dcp"):
        return f"format={format!r}: expected 'safetensors' or 'dcp'"
    if not isinstance(max_file_bytes, int) or max_file_bytes <= 0:
        return f"max_file_bytes={max_file_bytes!r}: expected a number of bytes above zero"
    return ""


class _Export:
    """One export as this rank sees it."""

    def __init__(
        self,
        ranks: Ranks,
        part: str,
        mapping: TensorMapping | None,
        format: FormatName,
        max_file_bytes: int,
        overwrite: bool,
    ) -> None:
        self.ranks = ranks
        self.part = part
        self.mapping = mapping
        self.format: FormatName = format
        self.max_file_bytes = max_file_bytes
        self.overwrite = overwrite
        self.made = ManifestText()
        self.written: list[str] = []
        self.told: dict[str, str] = {}
        """What the index must know of the files of this rank."""

    def open(
        self,
        source: str | os.PathLike[str] | Store,
        target: str | os.PathLike[str] | Store,
        source_options: dict[str, Any],
        target_options: dict[str, Any],
    ) -> bytes:
        """Open both stores; the coordinator reads the manifest."""
        self.old = open_place(source, **source_options)
        self.place, self.only = _place(target, target_options, self.format)
        _refuse_source(self.old, self.place)
        if self.ranks.is_coordinator:
            self.made = manifest_text(self.old)
        return b""

    def tell(self) -> bytes:
        """Return what the coordinator was given, and what it has found."""
        return json.dumps(self._given()).encode() + b"\n" + self.made.text

    def _given(self) -> dict[str, Any]:
        """Return all that the plan follows from, by the names of arguments."""
        table = b"" if self.mapping is None else table_of(self.mapping).to_bytes()
        return {
            "source": self.old.url,
            "target": self.place.url if self.only is None else f"{self.place.url}/{self.only}",
            "format": self.format,
            "part": self.part,
            "max_file_bytes": self.max_file_bytes,
            "overwrite": self.overwrite,
            "mapping": f"that of digest {digest(table).hex()}" if table else None,
        }

    def plan(self, told: bytes) -> bytes:
        """Plan all files, alike on all ranks; the coordinator makes room for them."""
        given, _, text = told.partition(b"\n")
        mine = self._given()
        for name, other in json.loads(given).items():
            if other != mine[name]:
                raise LayoutMismatch(
                    f"the ranks were not given the same {name}: this rank has {mine[name]}, and "
                    f"rank {self.ranks.all[0]} has {other}. Give it to all alike"
                )
        self.manifest = parse_manifest(text, self.old.url, self.made.seen)
        self._check_part()
        self.manifest = mapped_manifest(self.manifest, self.mapping, self.old.url, part=self.part)
        self.files = self._format_of(self.manifest)
        if self.ranks.is_coordinator:
            _make_room(self.place, self.only, self.files, overwrite=self.overwrite)
        return b""

    def _check_part(self) -> None:
        index = index_tree(self.manifest.tree)
        if index.find(self.part) is ABSENT:
            hint = near_names(self.part, index.leaves)
            raise LayoutMismatch(f"{self.old.url}: there is no part {self.part!r}{hint}")

    def _format_of(self, manifest: Manifest) -> Format:
        if self.format == "dcp":
            from .dcp_files import DcpFiles  # which imports all of torch.distributed.checkpoint

            data = stored_data(self.old, manifest)
            plain = with_plain_values(manifest, data, holds_dicts)
            return DcpFiles(plain, self.part, self.old.url)
        return SafetensorsFiles(
            manifest,
            self.part,
            self.old.url,
            only=self.only,
            max_file_bytes=self.max_file_bytes,
        )

    def write(self, on_progress: Callable[[int, int], None] | None) -> bytes:
        """Write the files of this rank."""
        turn, count = self.ranks.all.index(self.ranks.rank), len(self.ranks.all)
        mine = self.files.files[turn::count]
        self.data = stored_data(self.old, self.manifest)
        progress = counted(on_progress, self.files.num_bytes)

        def on_read(num_bytes: int) -> None:
            self.ranks.tell_alive()
            if self.ranks.is_called_off():
                raise CalledOff
            progress(num_bytes)

        for file in mine:
            self.told[file] = self.files.write(file, self.place, self.data, on_read)
            self.written.append(file)  # only now: a file that is there already is another's
        return b""

    def check(self) -> bytes:
        """Return what the index must know of the files of this rank; all have read all by now.

        A rank that opened a file without checksums later than others would not see that they have
        read another version of it: each asks once more for those that it opened itself.
        """
        self.data.check_unchanged()
        return json.dumps(self.told).encode()

    def finish(self, answers: Answers) -> bytes:
        """Write what tells of all files; runs on the coordinator."""
        told: dict[str, str] = {}
        for answer in answers.values():
            told |= json.loads(answer)
        index = self.files.index(told)
        if index is None:
            return b""
        try:
            self.place.publish(*index, overwrite=False)
        except ObjectExists:
            raise  # it is another's
        except BaseException:
            self.written.insert(0, index[0])  # it may be there all the same
            raise
        return b""

    def take_away(self, _: CheckpointError) -> None:
        """Delete what this rank has written."""
        self.place.delete(self.written)

    def report(self) -> ExportReport:
        """Return what was written."""
        return ExportReport(
            url=self.place.url,
            files=tuple(self.files.files),
            tensors=self.files.names,
            tied=self.files.tied,
            num_bytes=self.files.num_bytes,
        )


def _place(
    target: str | os.PathLike[str] | Store, options: dict[str, Any], format: FormatName
) -> tuple[Store, str | None]:
    """Return the store to write to, and the name of the file where it is to be one."""
    if isinstance(target, Store):
        return target, None
    path, options = split_target(target, options)
    if format != "safetensors" or not path.lower().endswith(SAFETENSORS):
        return open_store(path, **options), None
    folder, _, name = path.rpartition("/")
    return open_store(folder or ("/" if path.startswith("/") else "."), **options), name


def _refuse_source(old: Store, place: Store) -> None:
    """Raise LayoutMismatch where what is read lies in the target, which may have to make room."""
    source = os.path.dirname(old.url) if isinstance(old, OneFile) else old.url
    paths = [os.path.realpath(url) if os.path.isabs(url) else url for url in (source, place.url)]
    if paths[0] == paths[1]:
        raise LayoutMismatch(
            f"{place.url}: the checkpoint that is exported lies there itself; choose another place"
        )


def _make_room(place: Store, only: str | None, files: Format, *, overwrite: bool) -> None:
    """Raise ObjectExists where such files are already; with ``overwrite`` take them away."""
    if only is not None:
        names = [only] if place.exists(only) else []
    else:
        names = [info.name for info in place.list() if files.replaces.fullmatch(info.name)]
    if names and not overwrite:
        raise ObjectExists(
            f"{place.url}: {names[0]} is there already; choose another place, or pass "
            "overwrite=True to replace it"
        )
    names.sort(key=lambda name: name.endswith((SAFETENSORS, ".distcp")))
    for name in names:  # the index first: without it what is left is taken for no whole
        place.delete([name])
