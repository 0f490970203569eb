"""The state of an optimizer by the names of its parameters, as it is stored and read again.

The state of the parameter that is saved as ``model/w`` is stored as ``state/model/w``, and the
``params`` of its group list ``model/w``, all below the name of the optimizer. Where a parameter has
no name its number stands in both places, as in the optimizer's own state dict. Checkpoints of other
origins list numbers with ``param_names`` beside, or names as torch's ``get_optimizer_state_dict``
gives them; both are understood.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from ..state.names import key_component, key_of
from ..state.tree import ABSENT, DICT_TAGS, Node, TreeIndex, below, children, tag_of
from .param_names import ParamLabel, given_names

_PARAMS = ("params", "param_names")
"""Entries of a group that say which parameters it has; the others are its settings."""


def is_numbered(state: Any) -> bool:
    """Whether a state dict has the form that torch's optimizers give: state by numbers."""
    if not isinstance(state, dict):
        return False
    parts = cast(dict[Any, Any], state)
    groups, entries = parts.get("param_groups"), parts.get("state")
    if not isinstance(groups, list) or not isinstance(entries, dict):
        return False
    numbers: list[Any] = []
    for group in cast(list[Any], groups):
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):  # pyright: ignore
            return False
        numbers += cast(dict[str, Any], group)["params"]
    known = range(len(numbers))
    keys = [key for key in cast(dict[Any, Any], entries) if isinstance(key, int)]
    return numbers == list(known) and all(key in known for key in keys)


def named_state(state: Any, labels: Sequence[ParamLabel]) -> dict[Any, Any] | None:
    """Return the state dict of an optimizer with names for numbers, as far as there are names.

    None where the state dict has another form, or a key that would be mistaken for a name.
    """
    if not is_numbered(state) or sum(len(g["params"]) for g in state["param_groups"]) != len(
        labels
    ):
        return None
    texts = [label.text for label in labels]
    taken = {key_component(key) for key in state["state"] if type(key) is str}
    tops = {text.split("/")[0] for text in texts if text is not None}
    if tops & taken or (None in texts and any(top.startswith("#") for top in tops)):
        return None
    entries: dict[Any, Any] = {}
    for number, entry in state["state"].items():
        text = texts[number] if isinstance(number, int) else None
        if text is None:
            entries[number] = entry
        else:
            put_entry(entries, [key_of(component) for component in text.split("/")], entry)
    groups = [
        settings_of(group)
        | {"params": [n if texts[n] is None else texts[n] for n in group["params"]]}
        for group in state["param_groups"]
    ]
    return {**state, "state": entries, "param_groups": groups}


def put_entry(entries: dict[Any, Any], path: Sequence[str | int], entry: Any) -> None:
    """Put state into nested dicts at the keys of a name."""
    for key in path[:-1]:
        entries = entries.setdefault(key, {})
    entries[path[-1]] = entry


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a group says of its parameters, without which they are."""
    return {key: value for key, value in group.items() if key not in _PARAMS}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedParam:
    """A parameter as a checkpoint knows it."""

    position: int
    """Its number in order of the groups."""
    group: int
    name: str | None
    """None where it was saved by its number, and nothing tells its name."""
    given: str | None
    """Name that the optimizer was given for it, where it was saved by its number."""
    at: str
    """Name of its state in the checkpoint, which need not be there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedOptimizer:
    """The parameters and groups of an optimizer as a checkpoint has them."""

    at: str
    params: tuple[SavedParam, ...]
    groups: tuple[Mapping[str, Node], ...]
    """Nodes of the settings of every group."""
    sizes: tuple[int, ...]
    """Numbers of parameters of the groups."""

    def group_at(self, group: int) -> str:
        """Return the name of a group in the checkpoint."""
        return f"{self.at}/param_groups/{group}" if self.at else f"param_groups/{group}"

    def leaves_of_params(self, index: TreeIndex) -> list[str]:
        """Return the leaves that only say which parameters there are."""
        places = [
            below(self.group_at(g), part) for g in range(len(self.groups)) for part in _PARAMS
        ]
        return [leaf for at in places if at in index.nodes for leaf in index.leaves_of(at)]


def read_saved(index: TreeIndex, at: str) -> SavedOptimizer | None:
    """Return the optimizer saved under a name, or None where nothing of that form was."""
    groups, state = index.find(below(at, "param_groups")), index.find(below(at, "state"))
    if groups is ABSENT or tag_of(groups) != "list" or not _is_dict(state):
        return None
    names_in_state = {key for key, _, _ in children(state)}
    params: list[SavedParam] = []
    settings: list[Mapping[str, Node]] = []
    sizes: list[int] = []
    for _, _, group in children(groups):
        if not _is_dict(group):
            return None
        fields = {str(key): node for key, _, node in children(group)}
        keys = _plain_list(fields.get("params"))
        if keys is None:
            return None
        given = _plain_list(fields.get("param_names"))
        for place, key in enumerate(keys):
            if isinstance(key, int):
                own = given[place] if given is not None and len(given) == len(keys) else None
                own = name = key_component(own) if isinstance(own, str) else None
                where = key_component(key)
            elif isinstance(key, str):
                own, name = None, key_component(key) if key in names_in_state else key
                where = name
            else:
                return None
            params.append(
                SavedParam(
                    position=len(params),
                    group=len(settings),
                    name=name,
                    given=own,
                    at=f"{below(at, 'state')}/{where}",
                )
            )
        settings.append(settings_of(fields))
        sizes.append(len(keys))
    names = [param.name for param in params if param.name is not None]
    if len(set(names)) < len(names):  # of several modules, so that no name tells anything
        params = [replace(param, name=None) for param in params]
    return SavedOptimizer(at=at, params=tuple(params), groups=tuple(settings), sizes=tuple(sizes))


def optimizers_in(index: TreeIndex) -> list[str]:
    """Return the names of what may be optimizers in a checkpoint."""
    return [
        name.removesuffix("param_groups").rstrip("/")
        for name in index.nodes
        if name.endswith("param_groups") and name[:-12][-1:] in ("", "/")
    ]


def wrong_numbers(state: Mapping[Any, Any], index: TreeIndex, at: str) -> str:
    """Return what is wrong if a state dict by numbers is to take what was saved, or ""."""
    saved = read_saved(index, at) if is_numbered(state) else None
    if saved is None:
        return ""
    remedy = "give the optimizer itself, with its module beside it, whose names tell which is which"
    by_name = [param.name for param in saved.params if param.name and param.given is None]
    if by_name:
        return (
            f"{at}: the state of the optimizer was saved by the names of its parameters "
            f"({by_name[0]}, ...), and a state_dict() that numbers them is wanted; {remedy}"
        )
    given = given_names(state["param_groups"])
    for number, (name, param) in enumerate(zip(given, saved.params, strict=False)):
        if None not in (name, param.given) and name != param.given:
            was = param.given
            return f"{at}: parameter {number} was saved as {was!r}, but is {name!r} now; {remedy}"
    return ""


def _is_dict(node: Node) -> bool:
    return node is not ABSENT and tag_of(node) in DICT_TAGS


def _plain_list(node: Node) -> list[Any] | None:
    """Return the items of a list node without containers."""
    if tag_of(node) != "list":
        return None
    return [item for _, _, item in children(node)]
