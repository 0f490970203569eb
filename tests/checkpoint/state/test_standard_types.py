"""Values of the standard library's types are saved by declared forms, and nothing is pickled."""

from __future__ import annotations

import enum
import json
from collections import deque
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import pytest

import dtckpt.checkpoint as ckpt
from dtckpt.errors import Corrupt, Unsavable
from dtckpt.storage import MemoryStore

NOW = datetime(2026, 11, 27, 20, 14, 35, 123456)
VALUES: list[Any] = [
    NOW,
    NOW.replace(tzinfo=UTC),
    NOW.replace(tzinfo=timezone(timedelta(hours=-3, minutes=-30))),
    date(1, 1, 1),
    time(23, 59, 59, 1),
    timedelta(days=-1, microseconds=7),
    Path("/data/run 1"),
    PurePosixPath("a/../b"),
    PureWindowsPath("C:\\a"),
    {3, "a", None, (1, 2.5)},
    frozenset({frozenset(), b"x"}),
    set(),
    deque([1, [2, (3,)], "x"], maxlen=5),
    deque(),
]


@pytest.mark.parametrize(
    "value", VALUES, ids=[f"{type(v).__name__} {n}" for n, v in enumerate(VALUES)]
)
def test_a_value_comes_back_equal_and_of_the_same_type(value: Any) -> None:
    store = MemoryStore()
    ckpt.save({"value": value, "many": [value] * 3000}, store)
    text = store.read("manifest.json")
    assert json.loads(text)["version"] == 3
    assert b"pickle" not in text
    state: dict[str, Any] = {"value": None, "many": []}
    ckpt.load(state, store)
    assert type(state["value"]) is type(value)
    assert state == {"value": value, "many": [value] * 3000}
    if isinstance(value, deque):
        assert state["value"].maxlen == value.maxlen  # pyright: ignore
    if isinstance(value, datetime):
        assert state["value"].utcoffset() == value.utcoffset()


def test_equal_sets_have_one_form() -> None:
    forms: set[bytes] = set()
    for items in (["a", "b", "c"], ["c", "b", "a"]):
        store = MemoryStore()
        ckpt.save({"value": set(items)}, store)
        forms.add(json.dumps(json.loads(store.read("manifest.json"))["tree"]).encode())
    assert len(forms) == 1


class Point(NamedTuple):
    x: int
    y: int


@dataclass
class Config:
    lr: float = 0.1


class Color(enum.Enum):
    RED = 1


class Number(enum.IntEnum):
    ONE = 1


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        (Point(1, 2), "_asdict"),
        (Config(), "asdict"),
        (Color.RED, "register_enum"),
        (Number.ONE, "register_enum"),
        (NOW.replace(tzinfo=ZoneInfo("UTC")), "astimezone"),
        ({Point(1, 2)}, "_asdict"),
        (deque([object()]), "Convert"),
    ],
    ids=["namedtuple", "dataclass", "enum", "int enum", "zone", "set", "deque"],
)
def test_what_needs_code_of_the_user_is_refused_with_a_remedy(value: Any, remedy: str) -> None:
    store = MemoryStore()
    with pytest.raises(Unsavable, match="config/value") as refused:
        ckpt.save({"config": {"value": value}}, store)
    assert remedy in str(refused.value)
    with pytest.raises(Unsavable, match="config/17"):
        ckpt.save({"config": [1] * 17 + [value] + [1] * 3000}, store)


@pytest.mark.parametrize(
    "node",
    [
        {"datetime": "now"},
        {"timedelta": [1]},
        {"path": ["os.system", "x"]},
        {"set": [1, 1]},
        {"set": [{"list": []}]},
        {"deque": [[1], -1]},
        {"date": 5},
    ],
    ids=str,
)
def test_malformed_nodes_are_told(node: Any) -> None:
    from dtckpt.checkpoint.state.values import decode_value

    with pytest.raises(Corrupt, match="where"):
        decode_value(node, "where", allow_pickle=False)
