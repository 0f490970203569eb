"""Arguments that several commands take, and how their text becomes a value."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import wraps
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from dtckpt.errors import PlacementError

if TYPE_CHECKING:
    from ....checkpoint import MappingTable, Rule
    from ....dtensor import Mesh
    from ....storage import Store

DEBUG = "dtckpt.debug"
"""Key in a context's ``meta`` of whether to show tracebacks."""

_DURATION = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|h|d)")
_SECONDS = {"s": 1, "min": 60, "h": 3_600, "d": 86_400}

_Command = TypeVar("_Command", bound=Callable[..., Any])


def debug_option(command: _Command) -> _Command:
    """Add ``--debug``."""

    def remember(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
        if value:
            ctx.meta[DEBUG] = True

    return click.option(
        "--debug", is_flag=True, expose_value=False, callback=remember, help="Show tracebacks."
    )(command)


class _Place(click.types.StringParamType):
    """A directory, file or URL; shells complete paths."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Leave it to the shell."""
        return [CompletionItem(incomplete, type="file")]


PLACE = _Place()

_MAX_NAMES = 1000
"""As many as a shell would list."""


class _Name(click.types.StringParamType):
    """A name in the checkpoint that was given before it; shells complete it if that is local."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return names of tensors and values that begin so, or nothing."""
        from ....checkpoint import read_manifest
        from .treeview import plain_values

        # What follows an option that has no value yet is not parsed: the first argument is there.
        given = ctx.params.get("checkpoint") or ctx.params.get("source") or (*ctx.args, "")[0]
        place = str(given)
        if not place or "://" in place:
            return []
        try:
            manifest = read_manifest(store_at(place, {}))
        except Exception:  # there is nobody to tell, on the line that is being typed
            return []
        names = chain(manifest.tensors_of_state, (name for name, _ in plain_values(manifest.tree)))
        fit = (CompletionItem(name) for name in names if name.startswith(incomplete))
        return list(islice(fit, _MAX_NAMES))


NAME = _Name()


def store_option(
    name: str = "--option", of_what: str = "the store"
) -> Callable[[_Command], _Command]:
    """Return a decorator that adds a repeatable ``KEY=VALUE`` option for a store's driver."""

    def callback(
        _ctx: click.Context, _param: click.Parameter, values: Sequence[str]
    ) -> dict[str, Any]:
        return parse_options(values)

    return click.option(
        name,
        multiple=True,
        metavar="KEY=VALUE",
        callback=callback,
        help=f"Option for the driver of {of_what}, such as anon=true or "
        "client_kwargs.endpoint_url=URL; JSON where VALUE is JSON, else text. Repeatable.",
    )


BOTH = "both stores, or of the one that is no local path"
"""Whose options those are that a command with two places takes for both."""


def two_store_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a command that reads a SOURCE and writes a TARGET.

    It gets ``source_options`` and ``target_options``, in each of which are those of both.
    """

    @wraps(command)
    def with_merged(
        *args: Any,
        option: dict[str, Any],
        source_option: dict[str, Any],
        target_option: dict[str, Any],
        **kwargs: Any,
    ) -> Any:
        source, target = of_both(
            option, (kwargs["source"], source_option), (kwargs["target"], target_option)
        )
        return command(*args, source_options=source, target_options=target, **kwargs)

    for name, of_what in (
        ("--target-option", "TARGET alone"),
        ("--source-option", "SOURCE alone"),
        ("--option", BOTH),
    ):
        with_merged = store_option(name, of_what)(with_merged)
    return with_merged


def dry_run_option(help: str) -> Callable[[_Command], _Command]:
    """Return a decorator that adds ``--dry-run``."""
    return click.option("-n", "--dry-run", is_flag=True, help=help)


def duration(_ctx: click.Context, _param: click.Parameter, text: str | None) -> timedelta | None:
    """Return the time of a text such as 90s, 30min, 12h or 7d; a usage error where it is none."""
    if text is None:
        return None
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is no time such as 30min, 12h or 7d")
    return timedelta(seconds=float(match[1]) * _SECONDS[match[2]])


def split_place(place: str) -> tuple[str, str]:
    """Return the directory in which a checkpoint is, and its name there; links are followed.

    >>> split_place("s3://bucket/run/step-1/"), split_place("step-1")
    (('s3://bucket/run', 'step-1'), ('.', 'step-1'))
    """
    path = place.rstrip("/")
    if os.path.islink(path):
        path = os.path.realpath(path)
    root, slash, name = path.rpartition("/")
    if not name or name in (".", "..") or root.endswith(":/"):
        raise click.BadParameter(f"{place!r} does not end in the name of a checkpoint")
    return root or (slash or "."), name


def parse_options(items: Sequence[str]) -> dict[str, Any]:
    """Return the dictionary of ``KEY=VALUE`` items; dots in a key open dictionaries.

    >>> parse_options(["anon=true", "client_kwargs.region_name=eu"])
    {'anon': True, 'client_kwargs': {'region_name': 'eu'}}
    """
    options: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        path = key.split(".")
        if not equals or not all(path):
            raise click.BadParameter(f"expected KEY=VALUE, got {key!r}")
        inner = options
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise click.BadParameter(f"{key} needs {part} to be a dictionary, not a value")
        if path[-1] in inner:
            raise click.BadParameter(f"{key} is given twice")
        inner[path[-1]] = _json_or_text(text)
    return options


def key_values(items: Sequence[str], *, is_text: bool = False) -> dict[str, Any]:
    """Return the dictionary of ``KEY=VALUE`` items, of which dots in a key are nothing special.

    >>> key_values(["a.b=1", "c=x=y"])
    {'a.b': 1, 'c': 'x=y'}
    """
    found: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise click.BadParameter(f"expected KEY=VALUE, got {item!r}")
        if key in found:
            raise click.BadParameter(f"{key} is given twice")
        found[key] = text if is_text else _json_or_text(text)
    return found


def of_both(both: dict[str, Any], *places: tuple[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the options of each of two places, which are given with their own ones.

    A local path has no driver, so those for both are for the other one.

    >>> list(of_both({"anon": True}, ("s3://a/b", {}), ("c", {"direct_io": False})))
    [{'anon': True}, {'direct_io': False}]
    """
    are_local = [_is_local(place) for place, _ in places]
    for (_, own), is_local in zip(places, are_local, strict=True):
        yield own if is_local and not all(are_local) else merged(both, own)


def _is_local(place: str) -> bool:
    scheme, separator, _ = place.partition("://")
    return not separator or scheme.lower() in ("file", "local")


def merged(options: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """Return options with others in their place, dictionaries key by key.

    >>> merged({"a": {"x": 1}, "b": 2}, {"a": {"y": 3}, "b": 4})
    {'a': {'x': 1, 'y': 3}, 'b': 4}
    """
    found = options | others
    for key in options.keys() & others.keys():
        if isinstance(options[key], dict) and isinstance(others[key], dict):
            found[key] = merged(options[key], others[key])
    return found


def _json_or_text(text: str) -> Any:
    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    try:
        return json.loads(text, parse_constant=refuse)
    except ValueError:
        return text


def store_at(url: str, options: dict[str, Any], argument: str = "CHECKPOINT") -> Store:
    """Return the store of a URL; a usage error, naming its argument, where it cannot be one."""
    of = {"SOURCE": "source", "TARGET": "target", "OTHER": "other"}.get(argument)
    own = f" / '--{of}-option'" if of else ""
    from ....checkpoint.formats.opening import open_place

    try:
        return open_place(url, **options)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=f"'{argument}'") from error
    except TypeError as error:
        raise click.BadParameter(str(error), param_hint=f"'--option'{own}") from error


def mapping_option(command: _Command) -> _Command:
    """Add ``--mapping``."""

    def read(_ctx: click.Context, _param: click.Parameter, path: str | None) -> MappingTable | None:
        if path is None:
            return None
        from ....checkpoint import MappingTable

        return MappingTable.from_bytes(Path(path).read_bytes(), path)

    return click.option(
        "--mapping",
        callback=read,
        type=click.Path(exists=True, dir_okay=False),
        metavar="FILE",
        help="JSON of a MappingTable: rules that make tensors of others before all else.",
    )(command)


def parse_mesh(_ctx: click.Context, _param: click.Parameter, text: str | None) -> Mesh | None:
    """Return the mesh of a text such as ``dp=2,tp=4``; a usage error where it is none."""
    if text is None:
        return None
    from ....dtensor import Mesh

    try:
        return Mesh.parse(text)
    except PlacementError as error:
        raise click.BadParameter(str(error)) from error


def parse_rule_sets(
    _ctx: click.Context, _param: click.Parameter, texts: Sequence[str]
) -> tuple[Rule, ...]:
    """Return the rules of all texts, in order; a usage error where one is no rule."""
    from ....checkpoint import parse_rules

    rules: list[Rule] = []
    for text in texts:
        try:
            found = parse_rules(text)
        except PlacementError as error:
            raise click.BadParameter(str(error)) from error
        if not found:
            raise click.BadParameter(f"no rule in {text!r}")
        rules += found
    return tuple(rules)
