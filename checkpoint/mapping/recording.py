"""Recording tensors: what a loader does with them is written down, not carried out.

A recording tensor has a dtype and a shape, but no elements. Views of it are left to torch, on the
meta device; what copies elements (``recorded_ops``) is noted in the ``Memory`` that they go to. All
else is refused, with the line of the loader that asks for it.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dtckpt.errors import LayoutMismatch

from ...dtensor.tensor.arguments import collect_tensors, map_tensors
from ...dtensor.tensor.schemas import base_name, is_written
from ...dtensor.torch_private import (
    DispatchMode,
    make_wrapper,
    no_torch_function,
    schema_of,
    storage_id,
)
from ..copies.copies import Copy
from .memories import Memory, numel_of
from .recorded_ops import OPERATORS

_NOT_THE_LOADER = tuple(
    os.path.dirname(os.path.realpath(file)) + os.sep for file in (str(torch.__file__), __file__)
)

_HANDING_OUT = ("numpy", "tolist", "__array__", "__dlpack__")


class RecordingTensor(Tensor):
    """Stands for a tensor of a checkpoint, or for what a loader makes of some."""

    lying: Tensor
    """The view of the base of a ``Memory`` that it is."""
    recorder: Recorder

    __torch_function__ = no_torch_function()

    @staticmethod
    def __new__(cls: Any, inner: Tensor, recorder: Recorder) -> RecordingTensor:
        made = make_wrapper(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device="cpu",
        )
        made.lying, made.recorder = inner, recorder
        return made

    def __repr__(self, **_: Any) -> str:
        return f"<RecordingTensor {self.dtype}{list(self.shape)}>"

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()

    def numpy(self, **_: Any) -> NoReturn:
        """Raise LayoutMismatch."""
        raise refused("numpy() asks for elements, which are not there while a loader is traced")

    def tolist(self) -> NoReturn:
        """Raise LayoutMismatch."""
        raise refused("tolist() asks for elements, which are not there while a loader is traced")

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        recorder = next(t.recorder for t in _tensors(args, kwargs) if isinstance(t, cls))
        return recorder.call(func, args, kwargs or {})


class Recorder:
    """What is known of all memory while one loader runs."""

    def __init__(self) -> None:
        self._memories: dict[int, Memory] = {}
        """By their bases."""
        self._plain: dict[int, tuple[Tensor, Memory]] = {}
        """Memory of ordinary tensors, by a number that holds as long as the tensor does."""
        self._targets: set[int] = set()

    def source(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> RecordingTensor:
        """Return the tensor that stands for one of a checkpoint."""
        memory = self._memory(torch.empty(shape, dtype=dtype, device="meta"))
        if 0 not in shape:
            memory.copies.append(Copy.whole(name, shape))
        return self._recording(memory.base.view(shape))

    def add_target(self, tensor: Tensor) -> None:
        """Note a tensor that a loader may fill; nothing will be written to it."""
        if not isinstance(tensor, RecordingTensor):
            self._take_in(tensor)
            self._targets.add(storage_id(tensor))

    def copies_of(self, tensor: Tensor) -> list[Copy]:
        """Return what a tensor is made of; nothing if no loader has come to it."""
        if not isinstance(tensor, RecordingTensor) and storage_id(tensor) not in self._plain:
            return []
        return list(self.read(self.inner(tensor)))

    def watching(self) -> AbstractContextManager[Any]:
        """Return a context in which operators on ordinary tensors of this thread are seen, too."""
        watching = ExitStack()
        watching.enter_context(_Watching(self))
        watching.enter_context(_WatchingMethods(self))
        return watching

    def is_filled(self, tensor: Tensor) -> bool:
        """Whether something was recorded into the memory of a tensor."""
        return bool((known := self._plain.get(storage_id(tensor))) and known[1].copies)

    def concerns(self, func: Any, args: Sequence[Any], kwargs: Any) -> bool:
        """Whether an operator on ordinary tensors changes or copies what is recorded."""
        if func.is_view:
            return False
        for position, argument in enumerate(schema_of(func).arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for tensor in _tensors([value], None):
                known = self._plain.get(storage_id(tensor))
                if known is not None and (known[1].copies or is_written(argument)):
                    return True
        return False

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record one call of an operator; LayoutMismatch, naming the line, if that cannot be."""
        name = base_name(func)
        record = OPERATORS.get(name)
        try:
            if record is not None and "out" not in kwargs:
                return record(self, *args, **kwargs)
            if func.is_view or name == "_unsafe_view":
                inner = map_tensors(self.inner, args)
                return map_tensors(self._viewed(inner[0].dtype), func(*inner, **kwargs))
        except LayoutMismatch as error:
            raise refused(f"{name} cannot be recorded: {error}") from error
        raise refused(f"{name} computes with elements, and a table only says where they go")

    def inner(self, tensor: Tensor, *, is_read: bool = True) -> Tensor:
        """Return the view of a memory that a tensor is.

        LayoutMismatch where it ``is_read`` and holds values of the loader's own.
        """
        if isinstance(tensor, RecordingTensor):
            return tensor.lying
        if storage_id(tensor) not in self._plain:
            memory = self._take_in(tensor)
            whole = tensor.detach().as_strided(memory.base.shape, (1,), 0)
            if not tensor.is_meta and not int(torch.count_nonzero(whole)):
                memory.zero(memory.base)
            elif is_read:
                raise LayoutMismatch("it has values that are not those of the checkpoint")
        memory = self._plain[storage_id(tensor)][1]
        if memory.base.dtype != tensor.dtype:
            raise LayoutMismatch("elements are seen as other ones")
        return memory.view(tensor)

    def is_target(self, tensor: Tensor) -> bool:
        """Whether a tensor is one that was to be filled, or a part of one."""
        return not isinstance(tensor, RecordingTensor) and storage_id(tensor) in self._targets

    def read(self, inner: Tensor) -> Iterable[Copy]:
        """Return what a view of a memory is made of."""
        return self._memories[storage_id(inner)].read(inner)

    def write(self, inner: Tensor, copies: Iterable[Copy]) -> None:
        """Note what a view of a memory is made of from now on."""
        self._memories[storage_id(inner)].write(inner, list(copies))

    def made(self, like: Tensor, copies: Iterable[Copy]) -> RecordingTensor:
        """Return a new tensor, strided as another one is, that is made of copies."""
        inner = self._memory(like).view(like)
        self.write(inner, copies)
        return self._recording(inner)

    def _recording(self, inner: Tensor) -> RecordingTensor:
        made = RecordingTensor(inner, self)
        # An ordinary tensor whose ``data`` becomes this one lies as this one does.
        self._plain[storage_id(made)] = made, self._memories[storage_id(inner)]
        return made

    def _viewed(self, dtype: torch.dtype) -> Any:
        def wrap(view: Tensor) -> RecordingTensor:
            if view.dtype != dtype or view.is_conj() or view.is_neg():
                raise LayoutMismatch("elements are seen as other ones")
            return self._recording(view)

        return wrap

    def _memory(self, like: Tensor) -> Memory:
        memory = Memory.of(numel_of(like), like.dtype)
        self._memories[storage_id(memory.base)] = memory
        return memory

    def _take_in(self, tensor: Tensor) -> Memory:
        number = storage_id(tensor)
        if number not in self._plain:
            size = tensor.untyped_storage().nbytes() // tensor.element_size()
            whole = torch.empty(size, dtype=tensor.dtype, device="meta")
            self._plain[number] = tensor, self._memory(whole)
        return self._plain[number][1]


class _Watching(DispatchMode):
    """Sees the operators of a thread, of which some fill ordinary tensors."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given: dict[str, Any] = kwargs or {}
        is_seen = any(isinstance(tensor, RecordingTensor) for tensor in _tensors(args, given))
        if is_seen or not self._recorder.concerns(func, args, given):
            return func(*args, **given)
        return self._recorder.call(func, args, given)


class _WatchingMethods(TorchFunctionMode):
    """Sees what hands out the elements of ordinary tensors and is no operator."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _HANDING_OUT and any(map(self._recorder.is_filled, _tensors(args, None))):
            raise refused(f"{name}() asks for elements, which are not there")
        return func(*args, **kwargs or {})


def _tensors(args: Sequence[Any], kwargs: Any) -> list[Tensor]:
    found: list[Tensor] = []
    collect_tensors([*args, *(kwargs or {}).values()], found)
    return found


def refused(what: str) -> LayoutMismatch:
    """Return an error that names the line of the loader that is running."""
    return LayoutMismatch(f"{_line()}: {what}")


def _line() -> str:
    """Return file and line of the innermost code that is neither torch's nor ours."""
    frame = inspect.currentframe()
    while frame is not None:
        file = os.path.realpath(frame.f_code.co_filename)
        if not file.startswith(_NOT_THE_LOADER) and os.path.exists(file):
            return f"{file}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return "a loader"
