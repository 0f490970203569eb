"""Pickles of other programs, of which nothing is run.

A pickle names functions and classes, which its reader looks up and calls. Here they are looked up
in a table of our own that has inert ones only: what they make are plain values, and notes of
tensors that say where the elements lie. All else is refused by its name before anything is called,
or stands for an object of which only the name is known (``Unheld``), so that the rest can be read.
"""

from __future__ import annotations

import io
import math
import pickle
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from datetime import date, datetime, timedelta, timezone
from pathlib import PurePosixPath
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from dtckpt.errors import CheckpointError, Corrupt
from dtckpt.interrupts import raised_by_signal_handler

from ....dtensor.comm.caches import remembered
from ...state.limits import MAX_DIMS, check_metadata_bytes, shown, size_of, text_of
from ...tensors.dtypes import BY_TORCH_NAME, DType
from .arrays import ArrayDtype, NotHeld, UnfinishedArray, array_of, scalar
from .memo import is_bounded

_BYTES_EACH = 6
"""Memory that a byte of a pickle takes, beside what is told by the next."""
_BYTES_OF = ((b"}", 64), (b"]", 56), (b"\x8f", 216), (b"\x85", 48), (b"\x86", 56), (b"\x87", 64))
"""Memory that opcodes of a single byte take, which make dicts, lists, sets and tuples."""
_BYTES_CALLED = 256
"""The same of what a function makes."""
_ARGUMENTS_EACH = 2
"""How much functions may be given for a byte of a pickle, in characters and items."""
_SIZED = frozenset({str, bytes, bytearray, tuple, list, dict, OrderedDict, Counter, defaultdict})
_CALLS_BETWEEN = 1 << 12
_MOST_CLASSES = 1000
"""That are unknown, of one pickle: each is a kilobyte."""
_WRAPPER = "torch._utils._rebuild_wrapper_subclass"
"""Makes tensors that consist of others: parts of distributed ones, which files of ranks have, and
quantized ones and the like."""
_FREE = 64
"""Arguments up to this length do not count, so that many may share a short one."""


class Storage(NamedTuple):
    """Memory of tensors: a record of the archive that the pickle lies in."""

    key: str
    dtype_name: str
    """Of torch; ``uint8`` of memory without a type."""
    start: int = 0
    """First element, where it is a view of the memory: of torch before 0.4."""


class StorageNote(NamedTuple):
    """Memory of tensors as files of torch before 1.6 tell it."""

    dtype_name: str
    """As of a Storage, or the name of a class that is not known."""
    count: Any
    """Of elements, as the pickle says."""


class TensorNote(NamedTuple):
    """A tensor in a pickle. A tuple, as is Storage: a pickle can change no attribute of it."""

    storage: Storage
    start: int
    """First element in the storage."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""
    dtype_name: str

    def dtype(self, where: str) -> DType:
        """Return the element type; CheckpointError where no checkpoint can hold it."""
        found = BY_TORCH_NAME.get(self.dtype_name)
        if found is None:
            raise CheckpointError(
                f"{where}: a tensor of dtype torch.{self.dtype_name}, which dtckpt does not hold; "
                "convert it with torch and save anew"
            )
        return found

    def byte_strides(self, itemsize: int) -> tuple[int, ...] | None:
        """Return the strides in bytes; None where elements are in row-major order."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected and math.prod(self.shape):
                return tuple(stride * itemsize for stride in self.strides)
            expected *= size
        return None


class Record:
    """An object of which only the attributes are known."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.args = tuple(state)


class Inert:
    """A function that a pickle may call, and not change: it could else set attributes of it."""

    __slots__ = ("function",)

    function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "function", function)

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        return self.function(*args)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a pickle may not set {shown(name)} of what it calls")


class Unheld:
    """An object that no checkpoint holds, or its class: only its name is known.

    Takes whatever a pickle gives it, and keeps nothing of that.
    """

    __slots__ = ()

    name: ClassVar[str] = ""
    reason: ClassVar[str] = ""

    def __new__(cls, *_: Any, **__: Any) -> Unheld:
        return super().__new__(cls)

    def __call__(self, *_: Any) -> Unheld:
        """Return what a call makes: nothing is called."""
        return self

    def __setstate__(self, state: Any) -> None:
        """Take attributes."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Take an item."""

    def append(self, value: Any) -> None:
        """Take an item."""

    def extend(self, values: Any) -> None:
        """Take items."""

    def add(self, value: Any) -> None:
        """Take an item."""

    @classmethod
    def error(cls) -> NotHeld:
        """Return why it is not held."""
        return NotHeld(cls.reason, cls.name)


@remembered(4096)
def unheld(name: str, reason: str = "") -> type[Unheld]:
    """Return the class of objects of a name; ``reason`` says why they are not held."""
    fields = {"__slots__": (), "name": name, "reason": reason or not_known(name)}
    return type("Unheld", (Unheld,), fields)


def unheld_of(value: Any) -> NotHeld | None:
    """Return why a value is not held: an object that is not known, its class, or a numpy dtype."""
    if isinstance(value, ArrayDtype):
        return NotHeld("a dtype of numpy, which dtckpt does not hold", "numpy.dtype")
    if isinstance(value, Unheld):
        return value.error()
    if isinstance(value, type) and issubclass(value, Unheld):
        return value.error()
    return None


class Known(Protocol):
    """Names besides those of every pickle, with what is called for them."""

    def get(self, name: str, /) -> Any:
        """Return what stands for a name; None where it is not known."""
        ...


def is_known(name: str) -> bool:
    """Whether a name may be in every pickle."""
    return name in _KNOWN


PROTOCOL = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
"""Attributes by which a tensor says to torch_checkpointing which boxes of another it has."""
_OF_RANKS = "open the folder that has the files of all ranks"


def not_known(name: str) -> str:
    """Return why a name is refused, for an error message."""
    if name == _WRAPPER:
        return (
            f"the pickle has a tensor that is made of others. If it is a DTensor, {_OF_RANKS}. "
            "Others, such as quantized ones, are loaded with torch and saved anew by dtckpt"
        )
    return (
        f"the pickle asks for {name}, which is not among the names that dtckpt knows to be "
        "harmless; nothing of it was run. If you trust who wrote it, load it with torch and save "
        "it anew without this value"
    )


def load_pickle(
    data: bytes,
    where: str,
    known: Known | None = None,
    *,
    with_unheld: bool = False,
    storages: dict[str, StorageNote] | None = None,
) -> Any:
    """Return the value of a pickle that torch wrote, with notes in the places of tensors.

    ``known`` are names besides those of every pickle, with what is called for them. Raises
    CheckpointError for a name that is not known, unless objects of such are to be ``Unheld``, and
    Corrupt for what is no pickle. ``storages`` are given what is told of memory, by its key.
    """
    taken = _BYTES_EACH * len(data) + sum(size * data.count(code) for code, size in _BYTES_OF)
    check_metadata_bytes(taken, where)
    if not is_bounded(data):
        raise Corrupt(
            f"{where}: malformed pickle of {len(data)} bytes: it numbers objects beyond that, or "
            "says that they are longer; it is damaged, or made to take all memory"
        )
    try:
        unpickler = _Unpickler(io.BytesIO(data), where, {} if known is None else known, len(data))
        unpickler.with_unheld = with_unheld
        unpickler.storages = storages
        return unpickler.load()
    except CheckpointError:
        raise
    except NotHeld as error:
        raise CheckpointError(f"{where}: {error}") from error
    except Exception as error:  # an unpickler raises anything for bytes that are none
        if raised_by_signal_handler(error):
            raise
        raise Corrupt(f"{where}: malformed pickle of {len(data)} bytes: {shown(error)}") from error


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, where: str, known: Known, num_bytes: int) -> None:
        super().__init__(file, encoding="utf-8")
        self._where = where
        self._known = known
        self._num_bytes = num_bytes
        self._left = _ARGUMENTS_EACH * num_bytes
        self._calls = 0
        self._unheld: dict[str, type[Unheld]] = {}
        self.with_unheld = False
        """Whether objects of unknown classes are read, as such."""
        self.storages: dict[str, StorageNote] | None = None

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Return what stands for a name here."""
        module = _MOVED.get(module_name, module_name)
        name = f"{module}.{global_name}"
        found = self._known.get(name) or _KNOWN.get(name)
        if found is None:
            if not self.with_unheld:
                raise CheckpointError(f"{self._where}: {not_known(name)}")
            if name not in self._unheld:
                if len(self._unheld) == _MOST_CLASSES:
                    raise CheckpointError(
                        f"{self._where}: the pickle has objects of more than {_MOST_CLASSES} "
                        "unknown classes; load it with torch and save it anew without them"
                    )
                self._unheld[name] = unheld(name)
            return self._unheld[name]
        return self._limited(found) if isinstance(found, Inert) else found

    def _limited(self, inert: Inert) -> Inert:
        """Return a function that a small pickle cannot have take all memory by copies."""
        function = inert.function

        def call(*args: Any) -> Any:
            self._calls += 1
            for argument in args:
                if type(argument) in _SIZED and len(argument) > _FREE:
                    self._left -= len(argument)
            if self._left < 0:
                raise Corrupt(
                    f"{self._where}: a pickle of {self._num_bytes} bytes has functions copy more "
                    f"than {_ARGUMENTS_EACH} times that; it is damaged, or made to take all memory"
                )
            if self._calls % _CALLS_BETWEEN == 0:
                check_metadata_bytes(self._calls * _BYTES_CALLED, self._where)
            return function(*args)

        return Inert(call)

    def persistent_load(self, pid: Any) -> Any:
        """Return the memory that torch refers to by its record."""
        if self.storages is not None and pid[0] == "module":  # with its source
            return pid[1]
        kind, dtype_name, key, *more = pid
        is_unheld = isinstance(dtype_name, type) and issubclass(dtype_name, Unheld)
        view_start = 0
        if self.storages is not None and isinstance(key, str):
            _, count, view = more
            name = dtype_name.name if is_unheld else str(dtype_name)
            if self.storages.setdefault(key, StorageNote(name, count)) != (name, count):
                raise ValueError(f"storage {shown(key)} is told in two ways")
            view_start = 0 if view is None else size_of(view[1], "the start of a view")
        if is_unheld:
            return dtype_name()
        if kind != "storage" or not isinstance(dtype_name, _DTypeName) or not isinstance(key, str):
            raise ValueError(f"unknown reference {shown(pid)}")
        return Storage(key, str(dtype_name), view_start)


class _Name(str):
    """A class that is only named, and never called."""

    __slots__ = ()


class _DTypeName(_Name):
    """The class of a typed storage, as the name of its dtype."""

    __slots__ = ()


def _reconstructed(cls: Any, *_: Any) -> Any:
    """Return an object as pickles of protocols 0 and 1 make it."""
    if isinstance(cls, type) and issubclass(cls, Unheld):
        return cls()
    raise NotHeld(f"an object of {shown(cls)} of an old form")


def _tensor(
    storage: Storage, start: int, shape: Any, strides: Any, _grad: bool, _hooks: Any, *more: Any
) -> TensorNote | Unheld:
    return _note(storage, start, shape, strides, storage.dtype_name, more)


def _tensor_before_04(
    storage: Storage, start: int, shape: Any, strides: Any
) -> TensorNote | Unheld:
    return _note(storage, start, shape, strides, storage.dtype_name, ())


def _tensor_of_dtype(
    storage: Storage,
    start: int,
    shape: Any,
    strides: Any,
    _grad: bool,
    _hooks: Any,
    dtype: torch.dtype,
    *more: Any,
) -> TensorNote | Unheld:
    name = str(dtype).removeprefix("torch.")
    return _note(storage, start, shape, strides, name, more)


def _note(
    storage: Any, start: int, shape: Any, strides: Any, dtype_name: str, more: tuple[Any, ...]
) -> TensorNote | Unheld:
    """Return the note of a tensor; ValueError where it is none.

    A tensor whose values are others than those in its memory is not held.
    """
    sizes, steps = tuple(shape), tuple(strides)
    numbers = (start, *sizes, *steps)
    if not isinstance(storage, Storage) or len(sizes) != len(steps) or len(sizes) > MAX_DIMS:
        raise ValueError(f"a tensor of shape {shown(sizes)} and strides {shown(steps)}")
    for number in numbers:
        size_of(number, "a size, a stride or a start")
    if any(more):
        return unheld(
            "a tensor that is a view which computes its values",
            f"a tensor was saved as a view that computes its values ({shown(more[0])}); load it "
            "with torch, call resolve_conj() and resolve_neg(), and save it anew",
        )()
    if storage.start:
        storage, start = storage._replace(start=0), start + storage.start
    return TensorNote(storage, start, sizes, steps, dtype_name)


def _parameter(tensor: TensorNote, *_: Any) -> TensorNote:
    return tensor


def _text_to_bytes(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"bytes in the encoding {shown(encoding)}")
    return text.encode("latin1")


def _bytes(data: bytes | str = b"", *encoding: str) -> bytes:
    """Return bytes; a number would be a length."""
    if isinstance(data, str):
        return _text_to_bytes(data, *encoding)
    return bytes(memoryview(data))


def _path(*parts: str) -> str:
    return str(PurePosixPath(*parts))


def _no_factory(*_: Any) -> defaultdict[Any, Any]:
    return defaultdict(None)  # a factory is code


def _list(items: Iterable[Any] = (), _most: Any = None) -> list[Any]:
    return list(items)


def _text_of_time(kind: type[datetime | date]) -> Inert:
    return Inert(lambda *parts: kind(*parts).isoformat())


def _of_type(function: Any, cls: Any, args: Any, state: Any, *_: Any) -> Any:
    """Return a tensor that has attributes, without these."""
    if cls is not _TENSOR:
        name = getattr(cls, "name", None)
        told = name if isinstance(name, str) else shown(cls)
        if getattr(function, "name", None) == _WRAPPER:
            if told.startswith("torch.distributed."):
                raise NotHeld(not_known(_WRAPPER))
            why = (
                f"a tensor of a class that makes it of other tensors ({told}). Load it with torch "
                "and save it anew by dtckpt"
            )
            return unheld(f"a tensor of class {told}", why)()
        return unheld(f"a tensor of class {told}", f"a tensor of a class of its own ({told})")()
    if set(PROTOCOL) <= attributes_of(state).keys():
        raise NotHeld(f"a tensor that has {PROTOCOL[0]} and is a part of another; {_OF_RANKS}")
    return function(*args)


def attributes_of(state: Any) -> dict[str, Any]:
    """Return the attributes of a tensor that was pickled with some: a dict, and perhaps slots."""
    found: dict[str, Any] = {}
    for part in state if isinstance(state, tuple) else (state,):
        found |= part or {}
    return found


class Namespace:
    """An object of names, of which a checkpoint holds a dict."""

    __slots__ = ("fields",)

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        self.fields = {text_of(name, "a name"): value for name, value in state.items()}


class Stream:
    """A stream of bytes in memory, of which a checkpoint holds the bytes."""

    __slots__ = ("data",)

    def __init__(self, data: bytes = b"") -> None:
        self.data = data

    def __setstate__(self, state: Any) -> None:
        self.data = state[0]


class _SameText:
    """The class of texts of a class of their own, which become plain ones."""

    def __new__(cls, text: str = "") -> Any:
        return text


_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_TENSOR = _Name("torch.Tensor")
_KNOWN: dict[str, Any] = {
    "torch._utils._rebuild_tensor": Inert(_tensor_before_04),
    "torch._utils._rebuild_tensor_v2": Inert(_tensor),
    "torch._utils._rebuild_tensor_v3": Inert(_tensor_of_dtype),
    "torch._utils._rebuild_parameter": Inert(_parameter),
    "torch._utils._rebuild_parameter_with_state": Inert(_parameter),
    "torch._tensor._rebuild_from_type_v2": Inert(_of_type),
    "torch.Tensor": _TENSOR,
    "torch.nn.parameter.Parameter": _TENSOR,
    "torch.Size": Inert(torch.Size),
    "torch.device": Inert(torch.device),
    "torch.storage.UntypedStorage": _DTypeName("uint8"),
    "torch.serialization._get_layout": Inert(str),
    "torch.torch_version.TorchVersion": _SameText,
    "collections.OrderedDict": Inert(OrderedDict),
    "collections.Counter": Inert(Counter),
    "collections.defaultdict": Inert(_no_factory),
    "collections.deque": Inert(_list),
    "builtins.list": Inert(_list),
    "builtins.dict": Inert(dict),
    "builtins.set": Inert(set),
    "builtins.frozenset": Inert(frozenset),
    "builtins.int": Inert(int),
    "builtins.float": Inert(float),
    "builtins.complex": Inert(complex),
    "builtins.bytes": Inert(_bytes),
    "builtins.bytearray": Inert(_bytes),
    "_codecs.encode": Inert(_text_to_bytes),
    "copyreg._reconstructor": Inert(_reconstructed),
    **{
        f"{module}.{name}": Inert(_path)
        for module in ("pathlib", "pathlib._local")  # as Python 3.13 calls it
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
    "argparse.Namespace": Namespace,
    "types.SimpleNamespace": Namespace,
    "_io.BytesIO": Stream,
    "datetime.datetime": _text_of_time(datetime),
    "datetime.date": _text_of_time(date),
    "datetime.timedelta": Inert(timedelta),
    "datetime.timezone": Inert(timezone),
    "numpy.dtype": Inert(ArrayDtype),
    "numpy.ndarray": _Name("numpy.ndarray"),
    "numpy._core.multiarray._reconstruct": Inert(UnfinishedArray),
    "numpy._core.multiarray.scalar": Inert(scalar),
    "numpy._core.numeric._frombuffer": Inert(array_of),
    **{
        f"{module}.{name}": _DTypeName(dtype)
        for module in ("torch", "torch.cuda")
        for name, dtype in _STORAGES.items()
    },
    **{f"torch.{name}": dtype for name, dtype in _DTYPES.items()},
}
"""By module and name. Nothing that opens, imports, calls or takes memory by a number."""
_MOVED = {
    "__builtin__": "builtins",  # of protocol 2
    "copy_reg": "copyreg",
    "numpy.core.multiarray": "numpy._core.multiarray",  # of numpy 1
    "numpy.core.numeric": "numpy._core.numeric",
}
"""Modules by the names that they had."""
