"""Names of torch that it does not promise, all of them, each with what is done where it is missing.

Nothing else in the library names them (`tests/dtensor/test_torch_private.py` looks). What is found
here is decided when the module is imported or when a function is called, never by a release number;
every other way is run by a test. Without the names in `_NEEDED` there are no DTensors at all, or
none with the right values: the import fails and lists those that are missing. The others have a
fallback, and a message at INFO tells which are missing.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import ctypes
import functools
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from dtckpt.errors import UnsupportedOp
from dtckpt.logs import logger_of

if TYPE_CHECKING:
    OpOverload = torch._ops.OpOverload
    OpOverloadPacket = torch._ops.OpOverloadPacket
else:
    OpOverload = type(torch.ops.aten.add.Tensor)
    OpOverloadPacket = type(torch.ops.aten.add)


_LOGGER = logger_of("dtensor")
_NOT_FOUND: set[str] = set()
"""Dotted names of which a message has told that they are missing."""


def found(path: str) -> Any:
    """Return what torch has under a dotted name below ``torch``; None where it has nothing."""
    at: Any = torch
    names = path.split(".")
    for number, name in enumerate(names, 1):
        at = getattr(at, name, None)
        if at is None:  # torch.optim takes its modules back out of its names
            at = sys.modules.get(".".join(["torch", *names[:number]]))
        if at is None:
            if path not in _NOT_FOUND:
                _NOT_FOUND.add(path)
                _LOGGER.info("torch %s has no torch.%s: a fallback is taken", _VERSION, path)
            return None
    return at


_VERSION = str(torch.__version__)
TESTED = "2.11 to 2.15"
"""Releases of torch on which the tests pass."""
_NEEDED = {
    "Tensor._make_wrapper_subclass": "makes DTensors, which have no memory of their own",
    "Tensor._version": "counts writes, by which stale views and changed parameters are found",
    "Tensor._base": "tells what a view was made of",
    "UntypedStorage._cdata": "tells tensors that share memory",
    "ops.aten.add.Tensor._schema": "tells what operators take and return",
    "utils._python_dispatch.TorchDispatchMode": "shows operators to modes",
    "_C._current_graph_task_id": "tells backward passes, in which random numbers are repeated",
}
"""By dotted name below ``torch``, what is needed for every DTensor, and what for."""


def check_names() -> None:
    """Raise ImportError, with all their names, where torch lacks something that is needed."""
    missing = [f"torch.{path}: {what}" for path, what in _NEEDED.items() if found(path) is None]
    if missing:
        listed = "\n  ".join(missing)
        raise ImportError(
            f"dtckpt has no DTensors with torch {_VERSION}, which lacks\n  {listed}\n"
            f"dtckpt is tested with torch {TESTED}: install one of these, or a release of dtckpt "
            "that knows this torch"
        )


check_names()


_OUTSIDE = tuple(
    found(path)
    for path in ("_C._DisableTorchDispatch", "_C._DisableFuncTorch", "_C.DisableTorchFunction")
)
"""Contexts that take torch out of the modes that surround a call."""


def can_leave_modes() -> bool:
    """Whether `outside_modes` does what it says; if not, nothing that is made may be kept."""
    return None not in _OUTSIDE


class outside_modes:
    """Within it, new tensors are ordinary: no mode, transform or inference has a hand in them.

    For what outlives a call (`random/kept.py`), which is made thousands of times in some calls.
    """

    __slots__ = ("_entered",)

    def __enter__(self) -> None:
        contexts = (context() for context in _OUTSIDE if context is not None)
        self._entered: list[Any] = [*contexts, torch.inference_mode(False)]
        for context in self._entered:
            context.__enter__()

    def __exit__(self, *error: object) -> None:
        for context in reversed(self._entered):
            context.__exit__(*error)


def has_no_values(tensor: Tensor) -> bool:
    """Whether a tensor has a shape only: one on the meta device, or of a fake mode."""
    return tensor.is_meta or (type(tensor) is not Tensor and hasattr(tensor, "fake_mode"))


_NUM_MODES = found("_C._len_torch_dispatch_stack")


def has_modes() -> bool:
    """Whether some dispatch mode sees what operators do here; or nobody can tell."""
    return _NUM_MODES is None or _NUM_MODES() > 0


_MODE = found("_C._get_dispatch_mode")
_PROXY = found("_C._TorchDispatchModeKey.PROXY")


def are_proxied(tensors: Sequence[Tensor]) -> bool:
    """Whether ``make_fx`` stands by with names for some tensors in the graph that it records.

    False, too, where torch does not show them.
    """
    mode = None if _PROXY is None or _MODE is None else _MODE(_PROXY)
    names: Any = getattr(getattr(mode, "tracer", None), "tensor_tracker", ())
    return any(tensor in names for tensor in tensors) if names else False


_IS_TRANSFORMED = found("_C._functorch.is_functorch_wrapped_tensor")


def is_transformed(tensor: Tensor) -> bool:
    """Whether a tensor is one that a transform of ``torch.func`` passes in place of a real one."""
    return _IS_TRANSFORMED is not None and _IS_TRANSFORMED(tensor)


_IS_BATCHED = found("_C._functorch.is_legacy_batchedtensor")


def is_gradient_batch(grad: Tensor) -> bool:
    """Whether a gradient stands for many, by ``is_grads_batched`` of ``torch.autograd.grad``."""
    return _IS_BATCHED is not None and _IS_BATCHED(grad)


_FORWARD: Any = torch.autograd.forward_ad


def has_tangent(tensor: Tensor) -> bool:
    """Whether forward-mode differentiation follows what is computed with a tensor."""
    # The level tells in a tenth of the time that it takes to ask the tensor.
    if getattr(_FORWARD, "_current_level", 0) < 0:
        return False
    return _FORWARD.unpack_dual(tensor).tangent is not None


_GRAPH_TASK = found("_C._current_graph_task_id")


def in_backward() -> bool:
    """Whether this thread runs a backward pass.

    A forward pass that activation checkpointing runs again there has to draw the same numbers.
    """
    return _GRAPH_TASK() != -1


_TLS = tuple(
    found(path) for path in ("_C._stash_obj_in_tls", "_C._is_key_in_tls", "_C._get_obj_in_tls")
)


def hand_to_autograd(key: str, value: object) -> None:
    """Let threads in which autograd works for this one find a value.

    Where torch has no means, those threads find none: settings do not reach a backward pass on an
    accelerator.
    """
    if None not in _TLS:
        if _STEALS:
            _add_reference(value)
        _TLS[0](key, value)


def _add_reference(value: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def _steals_references() -> bool:
    """Whether what is handed on is let go once too often, as by torch 2.11."""
    if None in _TLS:
        return False
    probe, key = object(), "dtckpt_probe"
    before = sys.getrefcount(probe)
    _TLS[0](key, probe)
    steals = sys.getrefcount(probe) == before
    if steals:
        _add_reference(probe)
        _add_reference(None)
    _TLS[0](key, None)
    return steals


_STEALS = _steals_references()


def handed_to_autograd(key: str) -> Any:
    """Return the value that this thread, or the one that autograd works for here, has handed on."""
    if None in _TLS or not _TLS[1](key):
        return None
    return _TLS[2](key)


# Operators

_COMPOSITE = found("_C.DispatchKey.CompositeImplicitAutograd")


def schema_of(op: OpOverload) -> Any:
    """Return the schema of an operator."""
    return op._schema


def overload_of(op: OpOverload) -> str:
    """Return the name of an overload, without that of the operator."""
    return op.name().partition(".")[2] or "default"


def is_composite(op: OpOverload) -> bool:
    """Whether torch makes an operator of others; where it cannot tell, none is."""
    return _COMPOSITE is not None and op.has_kernel_for_dispatch_key(_COMPOSITE)


def decompositions() -> Mapping[OpOverload, Callable[..., Any]]:
    """Return torch's decompositions; none where there is no table of them."""
    return found("_decomp.decomposition_table") or {}


def called(op: OpOverload) -> Callable[..., Any]:
    """Return what an operator calls in its turn, half a microsecond sooner, if torch names it."""
    return getattr(op, "_op", op)


def operators(namespace: str) -> Iterator[OpOverload]:
    """Yield the operators of a namespace; UnsupportedOp where torch has no list of them."""
    every = found("_C._dispatch_get_all_op_names")
    if every is None:
        raise UnsupportedOp(f"this torch ({torch.__version__}) does not list its operators")
    packets = getattr(torch.ops, namespace)
    for name in sorted(every()):
        base, _, overload = name.partition(".")
        space, _, packet = base.partition("::")
        op = getattr(packets, packet, None) if space == namespace else None
        op = getattr(op, overload or "default", None)
        if op is not None:
            yield op


def name_of_operator(op: Any) -> str | None:
    """Return the name of an operator or of one overload of it, as ``aten::add``."""
    if isinstance(op, OpOverload):
        return op.name()
    name = getattr(op, "_qualified_op_name", None)
    return name if isinstance(name, str) else None


# Tensors and their classes


def _without_classes(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    with torch._C.DisableTorchFunctionSubclass():  # undocumented, too, but named in tutorials
        return func(*args, **(kwargs or {}))


def no_torch_function() -> Any:
    """Return the ``__torch_function__`` of a class that leaves all to ``__torch_dispatch__``."""
    return found("_C._disabled_torch_function_impl") or classmethod(_without_classes)


make_wrapper: Callable[..., Any] = found("Tensor._make_wrapper_subclass")
"""Returns a tensor of a class and a shape, without memory."""


class _Probe(Tensor):
    """As much of a DTensor as a constructor fills."""

    __slots__ = ("_local_tensor", "_spec")
    _local_tensor: Tensor
    _spec: Any

    @classmethod
    def __torch_dispatch__(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, func: Any, *_: Any
    ) -> Any:
        raise NotImplementedError(func)


def quick_constructor() -> Callable[..., Any] | None:
    """Return the constructor of torch's own DTensor, which takes half the time of ``make_wrapper``.

    It is given a class, a local tensor, what has a ``tensor_meta``, and ``requires_grad``. None
    where there is none, or where it makes another tensor of them; a message at INFO tells so.
    """
    made = found("Tensor._dtensor__new__")
    fault = "" if made is None else _fault_of_constructor(made)
    if not fault:
        return made
    _LOGGER.info(
        "torch.Tensor._dtensor__new__ of torch %s is not used, because %s: DTensors are made by "
        "_make_wrapper_subclass, which takes twice as long or more",
        _VERSION,
        fault,
    )
    return None


def _fault_of_constructor(make: Callable[..., Any]) -> str:
    """Return in what a tensor that is made is not as `make_wrapper` makes it; empty where it is."""
    local = torch.empty(4, dtype=torch.complex64).conj()
    meta = SimpleNamespace(shape=torch.Size((2, 3)), stride=(1, 2), dtype=local.dtype)
    spec = SimpleNamespace(tensor_meta=meta)
    for requires_grad in (False, True):
        wanted = make_wrapper(
            _Probe,
            meta.shape,
            strides=meta.stride,
            dtype=local.dtype,
            device=local.device,
            layout=local.layout,
            requires_grad=requires_grad,
        )
        take_bits(wanted, local)
        try:
            found = make(_Probe, local, spec, requires_grad)
            if found._local_tensor is not local or found._spec is not spec:
                return "it keeps neither local tensor nor spec"
        except (AttributeError, RuntimeError, TypeError) as error:
            return f"it raises {error!r}"
        one, other = _properties(found), _properties(wanted)
        if one != other:
            return f"it makes {one} instead of {other}"
    return ""


def _properties(tensor: Tensor) -> tuple[Any, ...]:
    """Return all that wrappers can differ in, with the keys by which operators find them."""
    keys = found("_C._dispatch_keys")
    return (
        type(tensor),
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.device,
        tensor.layout,
        tensor.requires_grad,
        tensor.is_leaf,
        tensor.is_conj(),
        None if keys is None else str(keys(tensor)),
    )


_BITS = (found("_C._set_conj"), found("_C._set_neg"))


def take_bits(made: Tensor, local: Tensor) -> None:
    """Mark a wrapper as conjugate or negative where its local tensor is.

    Operators see to that before they come to the wrapper, and not again for what is in it. Raises
    UnsupportedOp where torch has no means.
    """
    for is_set, mark in zip((local.is_conj(), local.is_neg()), _BITS, strict=True):
        if is_set and mark is None:
            raise UnsupportedOp(
                f"this torch ({torch.__version__}) cannot mark a DTensor as conjugate or negative; "
                "call resolve_conj().resolve_neg() first"
            )
        if is_set:
            mark(made, True)


def num_writes(tensor: Tensor) -> int:
    """Return how often a tensor and its views were written."""
    return tensor._version


def storage_id(tensor: Tensor) -> int:
    """Return a number that tensors share which share memory, be it memory of the meta device.

    It holds as long as one of them lives.
    """
    return tensor.untyped_storage()._cdata


def base_of(view: Tensor) -> Tensor | None:
    """Return the tensor that a view was made of; None for no view."""
    return view._base


def hooks_of(tensor: Tensor) -> dict[int, Any] | None:
    """Return the gradient hooks of a tensor; None where torch does not show them."""
    return (tensor._backward_hooks or {}) if _SHOWS_HOOKS else None


_SHOWS_HOOKS = hasattr(Tensor, "_backward_hooks")

correct_aliasing: Callable[..., Any] | None = found(
    "utils._python_dispatch.return_and_correct_aliasing"
)
"""Changes the sizes of a wrapper, which lie in C++; None where operators that do so are refused."""


def list_by_default(kind: type) -> None:
    """Have optimizers, and clipping, take tensors of a class as lists where nobody says so.

    Nothing is done where torch has no such lists: ``foreach=True`` works in any case.
    """
    for name in ("optim.optimizer", "utils._foreach_utils"):
        known = found(f"{name}._foreach_supported_types")
        if known is not None:
            known.append(kind)


DispatchMode: Any = found("utils._python_dispatch.TorchDispatchMode")
"""The base of modes, which see the operators of a thread."""


def restoring_order(load_balancer: Any) -> Tensor:
    """Return the indices by which torch's balancer of sequences undoes its own order.

    TypeError for what is no such balancer.
    """
    order = getattr(load_balancer, "_generate_indices", None)
    if order is None:
        raise TypeError(
            f"load_balancer is a {type(load_balancer).__name__}, expected one of torch's, which "
            "tells the order of a sequence; leave it out for parts that HeadTail cuts"
        )
    return order(restore=True)


# Autograd


def backward_node() -> Any:
    """Return the node that autograd runs in this thread; None where none runs, or none can tell."""
    current = found("_C._current_autograd_node")
    return None if current is None else current()


def node_number(node: Any) -> int:
    """Return when a node was made, among all nodes; -1 where it does not say."""
    number = getattr(node, "_sequence_nr", None)
    return -1 if number is None else number()


def next_node_number() -> int:
    """Return the number of the next node; 0 where torch does not say."""
    number = found("_C._autograd._get_sequence_nr")
    return 0 if number is None else number()


def saved_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """Return what packs and unpacks the tensors that autograd saves here.

    None where nothing does, or where torch does not say: hooks that are set then replace others.
    """
    top = found("_C._autograd._top_saved_tensors_default_hooks")
    return None if top is None else top(False)


def are_of_checkpointing(hooks: tuple[Callable[..., Any], ...]) -> bool:
    """Return whether hooks that pack and unpack tensors are those of torch.utils.checkpoint."""
    return hooks[0].__module__ == "torch.utils.checkpoint"


def when_backward_ends(callback: Callable[[], None]) -> bool:
    """Call something when the backward pass that runs is over; return whether torch can."""
    engine = found("autograd.Variable._execution_engine")
    if engine is None or not hasattr(engine, "queue_callback"):
        return False
    engine.queue_callback(callback)
    return True


# Compilers


_KNOWN = {
    torch.SymInt: "maybe_as_int",
    torch.SymFloat: "maybe_as_float",
    torch.SymBool: "maybe_as_bool",
}


def constant_of(symbol: Any) -> Any:
    """Return the number of a symbol that can be no other any more; else None.

    Nothing in the graph stands for it, so it cannot be recorded. None, too, where torch does not
    say.
    """
    known = getattr(getattr(symbol, "node", None), _KNOWN[type(symbol)], None)
    return None if known is None else known()


_STAND_IN = found("_library.fake_class_registry.FakeScriptObject")


def without_stand_in(thing: Any) -> Any:
    """Return what stands behind the object that compilers pass on in its place, or the thing."""
    is_one = _STAND_IN is not None and type(thing) is _STAND_IN
    return getattr(thing, "real_obj", thing) if is_one else thing


_FAKE = found("_subclasses.fake_tensor.FakeTensor")
_FUNCTIONAL = found("_subclasses.functional_tensor.FunctionalTensor")
_TRACED = tuple(kind for kind in (_FAKE, _FUNCTIONAL) if kind is not None)


def is_traced(tensor: Tensor) -> bool:
    """Whether a tensor stands for those that a graph will have, which is being recorded."""
    return type(tensor) is not Tensor and isinstance(tensor, _TRACED)


_UNRECORDED: Any = found("_subclasses.fake_tensor.UnsupportedOperatorException") or RuntimeError


class NotRecorded(UnsupportedOp, _UNRECORDED):
    """Compilers leave what raises this out of their graphs, and run it between two of them."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.func = reason  # which they tell


_RECORDING = found("_C._TorchDispatchModeKey.FUNCTIONAL")
_MODES = "utils._python_dispatch._get_current_dispatch_mode_stack"
_CHECKPOINTING = found("utils.checkpoint._CachingTorchDispatchMode")


def will_recompute() -> bool:
    """Whether a graph computes anew in its backward pass what is recorded now; or nobody can tell.

    A mode of activation checkpointing, or a note of operators, tells, or a memory budget for what
    the backward pass needs, which is compared with sizes on this rank.
    """
    if recording() is None:
        return False
    notes, modes = found("fx.traceback.current_meta"), found(_MODES)
    if notes is None or modes is None or _CHECKPOINTING is None:
        return True
    budgets = (
        found("_functorch.config.activation_memory_budget"),
        notes.get("memory_budget"),
        notes.get("custom", {}).get("_region_activation_memory_budget"),
    )
    has_budget = any(budget is not None and budget < 1 for budget in budgets)
    in_checkpoint = any(isinstance(mode, _CHECKPOINTING) for mode in modes())
    return has_budget or in_checkpoint or "recompute" in notes


_REGISTER_EFFECT = found("library._register_effectful_op")
_ORDERED = found("_library.effects.EffectType.ORDERED")
_GET_META = found("fx.traceback.get_current_meta")


def can_record() -> bool:
    """Whether graphs can have DTensors: what is recorded, and by whom, has to be known.

    So do effects: without them a graph leaves collectives out, or runs them twice.
    """
    needed = (_FAKE, _FUNCTIONAL, _MODE, _RECORDING, _REGISTER_EFFECT, _ORDERED, _GET_META)
    return None not in needed


def register_effect(op: OpOverload) -> None:
    """Declare an operator to have an effect besides its results, where `can_record`.

    Compilers then keep every call of it, once, in the pass and in the order in which it was made,
    whether its results are used or not.
    """
    if can_record():
        _REGISTER_EFFECT(op, _ORDERED)


@contextmanager
def never_recomputed() -> Generator[None]:
    """Within it, no operator that is recorded is computed again in a backward pass.

    An effect alone does not keep it from that where ``aggressive_recomputation`` is set.
    """
    meta: dict[str, Any] = _GET_META()  # which nodes get that are made meanwhile
    before = dict(meta)
    meta["recompute"] = CheckpointPolicy.MUST_SAVE
    try:
        yield
    finally:
        meta.clear()
        meta.update(before)


def recording() -> Any:
    """Return what records a graph of operators in this thread; None where nothing does."""
    return _MODE(_RECORDING) if can_record() else None


def skip_strategy() -> tuple[Callable[[Any, Any], None], Any] | None:
    """Return torch's function that says what to do with code, and what that is: nothing.

    The public ``torch.compiler.disable`` imports Dynamo, which takes seconds, and wraps the
    function, which costs at every operator a good part of what the operator does.
    """
    module = found("_C._dynamo.eval_frame")
    names = ("set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction")
    if not all(hasattr(module, name) for name in names):
        return None
    skip = module._FrameAction.SKIP
    return module.set_code_exec_strategy, module._FrameExecStrategy(skip, skip)


def compiled_modules() -> tuple[type[Any], ...]:
    """Return the classes of modules that are compiled; none where no compiler is loaded."""
    if "torch._dynamo.eval_frame" not in sys.modules:
        return ()
    kind = found("_dynamo.eval_frame.OptimizedModule")
    return () if kind is None else (kind,)


def record_redistribute(kind: type[Tensor]) -> None:
    """Let Dynamo record ``redistribute`` of a class of tensors as any other method.

    Dynamo of torch 2.11 has a way of its own for methods of this name, which takes placements for
    constants and fails at those that are none to it. Later releases have no such way.
    """
    module = sys.modules.get("torch._dynamo.variables.tensor")
    variable: Any = getattr(module, "TensorVariable", None)
    own: Any = getattr(variable, "method_redistribute", None)
    if own is None or hasattr(own, "__wrapped__"):
        return

    @functools.wraps(own)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Dynamo records the call itself where a way of its own returns None.
        return None if issubclass(self.class_type, kind) else own(self, *args, **kwargs)

    variable.method_redistribute = method


# Modules and values


def tree_functions() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return what takes nested containers apart, and puts them together; None without both."""
    flatten, unflatten = found("utils._pytree.tree_flatten"), found("utils._pytree.tree_unflatten")
    return None if flatten is None or unflatten is None else (flatten, unflatten)


def parameters_of(module: torch.nn.Module) -> dict[str, Any]:
    """Return the parameters of a module by name, to be replaced by what need be no parameter."""
    return module._parameters


# Process groups


def non_persistent_buffers(module: torch.nn.Module) -> set[str]:
    """Return the names of a module's own buffers that its state dict leaves out.

    Empty where torch does not show them.
    """
    return getattr(module, "_non_persistent_buffers_set", set())


def gather_into(group: Any, received: Tensor, sent: Tensor) -> Any:
    """Start to gather a flat tensor of every rank into one; returns the work."""
    if hasattr(group, "_allgather_base"):
        return group._allgather_base(received, sent)
    return group.allgather([list(received.view(group.size(), -1).unbind(0))], [sent])


def scatter_reduced(group: Any, received: Tensor, sent: Tensor, options: Any) -> Any:
    """Start to add up flat tensors of every rank, of which each gets its part; returns the work."""
    if hasattr(group, "_reduce_scatter_base"):
        return group._reduce_scatter_base(received, sent, options)
    parts = list(sent.view(group.size(), *received.shape).unbind(0))
    return group.reduce_scatter([received], [parts], options)


def allocator_of(group: Any, device: torch.device) -> Any:
    """Return what allocates memory for a group's backend; None where it does not."""
    backend_of = getattr(group, "_get_backend", None)
    try:
        return None if backend_of is None else backend_of(device).mem_allocator
    except (AttributeError, RuntimeError):  # no such backend, or none that allocates
        return None


def group_named(name: str) -> Any:
    """Return the process group of a name; None where torch has no look-up, or no such group."""
    resolve = found("distributed.distributed_c10d._resolve_process_group")
    try:
        return None if resolve is None else resolve(name)
    except RuntimeError:
        return None


def job_store() -> Any:
    """Return the store of the default process group; None where there is no way to it."""
    get: Any = getattr(dist.group.WORLD, "get_group_store", None)
    return None if get is None else get()


_C10D: Any = dist.distributed_c10d
_NAMING = "_process_group_name"


def ask_for_group_names(ask: Callable[[], str]) -> bool:
    """Have torch call a new group by what ``ask`` returns in its thread, if that is not empty.

    Of itself torch takes the ranks and how many groups the process has, which hangs where some
    members have made other groups besides. It counts the groups that it names, since 2.14 those of
    some ranks too, and calls the groups of all ranks by this count: one that is named here is not
    counted, or those would hang after it. Returns whether torch can be told, once for all.
    """
    named = getattr(_C10D, _NAMING, None)
    if getattr(named, "asks_dtckpt", False):
        return True
    if named is None or not _takes_ranks(named):
        return False

    def name_of(ranks: Sequence[int], use_hashed_name: bool) -> str:
        return ask() or named(ranks, use_hashed_name=use_hashed_name)

    told: Any = name_of
    told.asks_dtckpt = True
    setattr(_C10D, _NAMING, told)
    return True


def _takes_ranks(function: Any) -> bool:
    try:
        return list(inspect.signature(function).parameters) == ["ranks", "use_hashed_name"]
    except (TypeError, ValueError):
        return False


def warn_of_group_names() -> None:
    """Say that groups get names that may differ between their ranks."""
    warnings.warn(
        f"this torch ({torch.__version__}) cannot be told the name of a process group: ranks that "
        "have made other groups than their peers before wait for each other. Make the groups of "
        "meshes in the same order on all ranks, or pass groups= to DeviceMesh",
        stacklevel=2,
    )


# torch's own meshes and DTensors


def strided_shard() -> Any:
    """Return the placement by which torch writes an order of cuts; None where it has none."""
    module = importlib.import_module("torch.distributed.tensor.placement_types")
    return getattr(module, "_StridedShard", None)


def spec_of_torch(tensor: Any) -> Any:
    """Return the spec of a torch DTensor; None where it shows none."""
    return getattr(tensor, "_spec", None)


def local_of_torch(tensor: Any) -> Any:
    """Return the local tensor of a torch DTensor, detached."""
    local = getattr(tensor, "_local_tensor", None)
    return tensor.to_local().detach() if local is None else local


def gathered_by_torch_fsdp() -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Yield the sharded tensor and the gathered ones of parameters that torch's FSDP2 has gathered.

    Parameters of modules that ``torch.distributed.fsdp.fully_shard`` sharded, and that are not
    sharded now or are being gathered. What is written to a gathered tensor is lost at the next
    reshard; what is written to a sharded one is not seen before. Nothing where torch does not show
    its states.
    """
    if "torch.distributed.fsdp._fully_shard._fsdp_state" not in sys.modules:
        return  # nobody has called fully_shard: spares the import
    states = found("distributed._composable_state._module_state_mapping") or {}
    for state in {id(s): s for s in (made() for made in list(states.values()))}.values():
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch before 2.12 has one group
            groups = [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            is_coming = getattr(group, "_all_gather_result", None) is not None
            for one in getattr(group, "fsdp_params", ()):
                if not is_coming and getattr(one.sharded_state, "name", "SHARDED") == "SHARDED":
                    continue
                names = ("_unsharded_param", "_sharded_post_forward_param")
                gathered = (getattr(one, name, None) for name in names)
                yield one.sharded_param, [tensor for tensor in gathered if tensor is not None]


_FORGET_GROUP = found("distributed.distributed_c10d._cleanup_process_group_global_state")


def abort_groups(groups: Sequence[Any]) -> None:
    """Abort process groups, those of NCCL at once, and have torch.distributed forget them.

    Where torch cannot put them together they are aborted one by one; where it cannot forget them,
    its functions still find them, and raise.
    """
    together: Any = None
    if groups and torch.accelerator.is_available():
        start = getattr(groups[0], "_start_coalescing", None)
        device = torch.accelerator.current_accelerator()
        try:
            together = None if start is None else (start(device), device)
        except RuntimeError:  # the backend has no such thing
            together = None
    for group in groups:
        group.abort()
    if together is not None:
        groups[0]._end_coalescing(together[1])
    if _FORGET_GROUP is not None:
        for group in groups:
            if isinstance(group, dist.ProcessGroup):
                _FORGET_GROUP(group)


MESH_FIELDS = (
    "_dim_group_names",
    "_flatten_mapping",
    "_flatten_rank_map",
    "_hash",
    "_layout",
    "_pg_registry",
    "_rank",
    "_rank_map",
    "_thread_id",
)
"""What torch's code reads of a mesh beside its methods. One that a torch does not have is missing
on our meshes as on its own."""


def rank_of_torch_mesh(mesh: Any) -> int | None:
    """Return this process's rank in a torch mesh that was made without a job."""
    return getattr(mesh, "_cur_rank", None)


def torch_mesh_without_groups(mesh: Any, device_type: str, ranks: Tensor, rank: int) -> Any:
    """Return a torch mesh of a class without process groups; None where it takes no such one."""
    try:
        return mesh(device_type, ranks, _init_backend=False, _rank=rank)
    except TypeError:
        return None


def state_dict_helpers(names: Sequence[str]) -> Any:
    """Return the module by which torch gathers and cuts state dicts, which has these names.

    It looks them up at every call. None where there is no such module, or it lacks some of them.
    """
    try:
        module = importlib.import_module("torch.distributed._state_dict_utils")
    except ImportError:
        return None
    return module if all(hasattr(module, name) for name in names) else None


# torch.distributed.checkpoint


def contiguous_code() -> Any:
    """Return what stands for a contiguous layout in pickles; UnsupportedOp where nothing does."""
    module = importlib.import_module("torch.distributed.checkpoint.metadata")
    try:
        return module._MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    except AttributeError as error:
        raise UnsupportedOp(
            f"this torch ({torch.__version__}) has no code for contiguous tensors, which exports "
            "for torch.distributed.checkpoint hold; take one of the releases that the README names"
        ) from error
