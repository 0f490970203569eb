"""What stands in pickles of real trainings beside tensors, and pickles made to do harm."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import pickle
import random
import tracemalloc
import zipfile
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import UTC, date, datetime
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch import nn

import dtckpt.checkpoint as ckpt
from dtckpt.checkpoint.formats.pickles.unpickling import load_pickle
from dtckpt.dtensor import Mesh
from dtckpt.errors import CheckpointError

from .test_dcp import same, whole

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own


def with_torch_save(state: Any, path: Path) -> Path:
    torch.save(state, path / "state.pt")
    return path / "state.pt"


def with_protocol_5(state: Any, path: Path) -> Path:
    torch.save(state, path / "state.pt", pickle_protocol=5)
    return path / "state.pt"


def with_dcp(state: Any, path: Path) -> Path:
    torch_dcp.save(state, checkpoint_id=path / "dcp", no_dist=True)
    return path / "dcp"


def by_numpy_1(state: Any, path: Path) -> Path:
    """Write modules by the names that numpy had before 2.0."""
    made = with_torch_save(state, path)
    old = path / "old.pt"
    with zipfile.ZipFile(made) as source, zipfile.ZipFile(old, "w") as target:
        for name in source.namelist():
            data = source.read(name).replace(b"cnumpy._core.", b"cnumpy.core.")
            target.writestr(name, data)
    return old


WAYS = [with_torch_save, with_protocol_5, with_dcp, by_numpy_1]
ARRAYS: dict[str, Any] = {
    "floats": np.arange(12.0).reshape(3, 4),
    "columns first": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
    "none": np.empty((0, 3), np.int16),
    "one": np.array(2.5),
    "flags": np.array([True, False]),
    "unsigned": np.arange(4, dtype=np.uint32),
    "complex": np.array([1 + 2j], np.complex64),
    "scalar": np.float32(0.5),
    "double": np.float64(0.25),
    "count": np.int64(-7),
    "flag": np.bool_(True),
    "text": np.str_("words"),
    "inner": [{"x": np.ones(2)}, (np.uint8(3), torch.ones(2))],
}


def equal(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, np.ndarray):
        made = np.asarray(found)
        return made.dtype == wanted.dtype and np.array_equal(made, wanted)
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(equal(found[k], wanted[k]) for k in wanted)
    if isinstance(wanted, list | tuple):
        pairs = zip(found, wanted, strict=True)
        return type(found) is type(wanted) and all(equal(a, b) for a, b in pairs)
    if isinstance(wanted, torch.Tensor):
        return found.equal(wanted)
    return type(found) is type(wanted) and found == wanted


@pytest.mark.parametrize("way", WAYS)
def test_arrays_and_scalars_of_numpy(tmp_path: Path, way: Callable[[Any, Path], Path]) -> None:
    place = way(ARRAYS, tmp_path)
    assert equal(whole(ckpt.open(place).state_dict()), ARRAYS)
    assert ckpt.verify(place).problems == ()
    into = {"floats": np.zeros((3, 4)), "one": np.array(0.0)}
    ckpt.load(into, place, strict=False, no_dist=True)
    assert np.array_equal(into["floats"], ARRAYS["floats"])
    ckpt.reshard(place, tmp_path / "ours", Mesh.parse("a=2"), [])
    assert ckpt.verify(tmp_path / "ours").problems == ()
    assert equal(whole(ckpt.open(tmp_path / "ours").state_dict()), ARRAYS)


def test_arrays_of_another_byte_order_have_the_same_values(tmp_path: Path) -> None:
    array = np.arange(5, dtype=">i4")
    place = with_torch_save({"a": array, "b": np.array(1.5, ">f8")[()]}, tmp_path)
    found = whole(ckpt.open(place).state_dict())
    assert np.array_equal(np.asarray(found["a"]), array)
    assert found["b"] == 1.5


@pytest.mark.parametrize("way", WAYS)
def test_the_states_of_random_generators(tmp_path: Path, way: Callable[[Any, Path], Path]) -> None:
    """As transformers' Trainer saves them, in ``rng_state.pth``."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    expected = np.random.rand(3), torch.rand(3), random.random()
    place = way(state, tmp_path)
    into: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    ckpt.load(into, place, no_dist=True)
    random.setstate(into["python"])
    np.random.set_state(into["numpy"])
    torch.random.set_rng_state(into["cpu"])
    assert np.array_equal(np.random.rand(3), expected[0])
    assert torch.rand(3).equal(expected[1])
    assert random.random() == expected[2]


def named(tensor: torch.Tensor) -> torch.Tensor:
    tensor.note = "an attribute"  # type: ignore[attr-defined]
    return tensor


OTHERS: dict[str, tuple[Any, Any]] = {
    "args": (Namespace(lr=0.1, dims=[1, 2]), {"lr": 0.1, "dims": [1, 2]}),
    "simple": (SimpleNamespace(a=SimpleNamespace(b=1)), {"a": {"b": 1}}),
    "queue": (deque([1, 2], maxlen=3), [1, 2]),
    "when": (datetime(2026, 11, 23, 5, tzinfo=UTC), "2026-11-23T05:00:00+00:00"),
    "day": (date(2026, 11, 23), "2026-11-23"),
    "set": ({1, "a"}, {1, "a"}),
    "frozen": ([frozenset({(1, 2)})], [frozenset({(1, 2)})]),
    "version": (torch.__version__, str(torch.__version__)),
    "bytearray": (bytearray(b"\x00\xff"), b"\x00\xff"),
    "attributes": (named(torch.ones(2)), torch.ones(2)),
    "parameter": (nn.Parameter(torch.ones(2)), torch.ones(2)),
    "path": (Path("a/b"), "a/b"),
    "counter": (Counter("aab"), Counter("aab")),
    "default": (defaultdict(list, {"a": [1]}), {"a": [1]}),
    "ordered": (OrderedDict(b=1, a=2), OrderedDict(b=1, a=2)),
    "device": (torch.device("cuda", 1), torch.device("cuda", 1)),
    "many sizes": ([torch.Size([2, 3])] * 500, [torch.Size([2, 3])] * 500),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OTHERS)
def test_plain_objects_of_scripts(
    tmp_path: Path, name: str, way: Callable[[Any, Path], Path]
) -> None:
    given, wanted = OTHERS[name]
    place = way({"x": given, "y": given}, tmp_path)
    assert same(whole(ckpt.open(place).state_dict()), {"x": wanted, "y": wanted})


NOT_HELD: dict[str, tuple[Any, str]] = {
    "objects": (np.array([None, "a"]), r"'x': numpy's dtype 'O8', which dtckpt does not hold"),
    "texts": (np.array(["a"]), r"'x': an array of numpy's str.*, which dtckpt does not hold"),
    "dates": (np.array(["2026-01-01"], "M8[D]"), r"numpy's dtype 'M8', which dtckpt does not"),
    "wide": (np.ones(2, np.longdouble), r"'x': an array of numpy's float128"),
    "fields": (np.zeros(2, [("a", "f4")]), r"'x': numpy's dtype 'V4'"),
    "class": (nn.Linear, r"asks for torch\.nn\.modules\.linear\.Linear, which is not among"),
    "module": (nn.Linear(1, 1), r"asks for torch\.nn\.modules\.linear\.Linear, which is not among"),
    "keys": ({(1, 2): 3}, r"'x' is a dict with the key \(1, 2\)"),
    "sparse": (torch.eye(2).to_sparse(), r"asks for torch\._utils\._rebuild_sparse_tensor"),
}


@pytest.mark.parametrize("name", NOT_HELD)
def test_what_no_checkpoint_holds_is_named(tmp_path: Path, name: str) -> None:
    value, match = NOT_HELD[name]
    for way in (with_torch_save, with_dcp):
        if way is with_torch_save or name not in ("sparse", "class", "module", "keys"):
            place = way({"x": value}, tmp_path)
            with pytest.raises(CheckpointError, match=match):
                ckpt.open(place)


def put(*parts: bytes) -> bytes:
    return b"\x80\x02" + b"".join(parts) + b"."


def text(size: int) -> bytes:
    """A text that is the object 0."""
    return b"X" + size.to_bytes(4, "little") + b"a" * size + b"q\x00"


MILLION = 1_000_000
BOMBS: dict[str, bytes] = {
    # each a megabyte or so, of which a thousand functions make a copy
    "paths": put(text(MILLION), *[b"cpathlib\nPurePosixPath\nh\x00\x85R"] * 2000, b"e" * 0),
    "long path": put(text(MILLION), b"cpathlib\nPurePosixPath\n(", b"h\x00" * 10_000, b"tR"),
    "encoded": put(text(MILLION), *[b"c_codecs\nencode\nh\x00X\x06\x00\x00\x00latin1\x86R"] * 2000),
    "lists": put(b"](", b"N" * MILLION, b"eq\x00", *[b"c__builtin__\nlist\nh\x00\x85R"] * 2000),
    "dicts": put(
        b"}(",
        *[b"M" + i.to_bytes(2, "little") + b"N" for i in range(10_000)],
        b"uq\x00",
        *[b"ccollections\nOrderedDict\nh\x00\x85R"] * 3000,
    ),
    "zeros": put(b"c__builtin__\nbytes\nJ\x00\x00\x00\x7f\x85R"),
    "more zeros": put(b"c__builtin__\nbytearray\nJ\x00\x00\x00\x7f\x85R"),
    "bytes to come": b"\x80\x05\x96" + (1 << 33).to_bytes(8, "little") + b"abc.",
    "dicts alone": put(b"}" * MILLION),
    "tuples alone": put(b"N" + b"\x85" * MILLION),
    "results": put(b"ccollections\nOrderedDict\nq\x00", b"h\x00)R" * 150_000),
    "a long int": put(b"c__builtin__\nint\nX\x00\x00\x10\x00" + b"9" * 0x100000 + b"\x85R"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_no_pickle_has_functions_take_all_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = BOMBS[name]
    monkeypatch.setenv("DTCKPT_METADATA_MIB", "32")
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            load_pickle(data, "here")
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_a_hundred_thousand_tensors_are_not_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three per cent of them, with three per cent of the memory that is allowed."""
    names = [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(3000)]
    place = with_dcp({name: torch.ones(1) for name in names}, tmp_path)
    monkeypatch.setenv("DTCKPT_METADATA_MIB", str(256 * 3 // 100))
    with ckpt.open(place) as opened:
        assert list(opened) == names


def shared_text(count: int) -> dict[str, Any]:
    long = "a" * MILLION
    return {"texts": [long] * count}


def shared_key(count: int) -> dict[str, Any]:
    long = "k" * MILLION
    return {"a": [{long: 1} for _ in range(count)]}


def under_a_long_key(count: int) -> dict[str, Any]:
    return {"k" * MILLION: list(range(count))}


def shared_array(count: int) -> dict[str, Any]:
    return {"arrays": [np.zeros(MILLION, np.uint8)] * count}


def laughing_keys(_count: int) -> list[Any]:
    lists: list[Any] = ["ha"]
    for _ in range(30):
        lists = [lists, lists]
    return lists


SWELLING: list[Callable[[int], Any]] = [
    shared_text,
    shared_key,
    under_a_long_key,
    shared_array,
    laughing_keys,
]


@pytest.mark.parametrize("made", SWELLING)
def test_no_small_file_becomes_a_large_tree(tmp_path: Path, made: Callable[[int], Any]) -> None:
    file = with_torch_save(made(1000), tmp_path)
    assert file.stat().st_size < 4 << 20
    with pytest.raises(CheckpointError) as caught:
        ckpt.open(file)
    assert len(str(caught.value)) < 2000


def test_texts_that_no_file_can_hold_are_refused(tmp_path: Path) -> None:
    for state in ({"\ud800": 1}, {"a": {"\ud800": torch.ones(1)}}, {10**5000: 1}, {None: 1}):
        with pytest.raises(CheckpointError, match="is a dict with the key"):
            ckpt.open(with_torch_save(state, tmp_path))


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_paths_are_texts_whatever_python_pickled_them(module: str) -> None:
    pickled = pickle.dumps({"at": PurePosixPath("a/b")}, protocol=2)
    name = f"c{PurePosixPath.__module__}\nPurePosixPath\n".encode()
    assert name in pickled
    theirs = pickled.replace(name, f"c{module}\nPurePosixPath\n".encode())
    assert load_pickle(theirs, "here") == {"at": "a/b"}
