"""Tensor subclasses with the attributes of published ones, and an optimizer that keeps them."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch

import dtckpt.checkpoint as ckpt
from dtckpt.storage import MemoryStore

BLOCK = 64
SHAPE = (8, 32)


class Made(torch.Tensor):
    """A tensor that is made of others, as torchao's are."""

    names: ClassVar[tuple[str, ...]] = ()
    facts: ClassVar[tuple[str, ...]] = ()
    codes: Any
    scale: Any
    qmap: Any
    factor: Any
    signed: Any
    computed: Any
    thing: Any
    _data: Any
    _scale_inv: Any
    _fp8_dtype: Any

    @staticmethod
    def __new__(cls: Any, *parts: Any) -> Any:
        tensors, facts, shape = parts
        make: Any = torch.Tensor
        device = next(iter(tensors.values())).device
        made = make._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=device)
        for key in cls.names:
            setattr(made, key, tensors.get(key))
        for key, fact in zip(cls.facts, facts, strict=True):
            setattr(made, key, fact)
        return made

    def __init__(self, *_: Any) -> None: ...

    def __tensor_flatten__(self) -> tuple[list[str], list[Any]]:
        held = [key for key in self.names if getattr(self, key) is not None]
        return held, [getattr(self, key) for key in self.facts]

    @classmethod
    def __tensor_unflatten__(cls, tensors: Any, facts: Any, size: Any, _stride: Any) -> Any:
        return cls(tensors, facts, size)

    def each(self, function: Any) -> Any:
        """The same of what a function makes of each tensor."""
        tensors = {key: function(getattr(self, key)) for key in self.__tensor_flatten__()[0]}
        return type(self)(tensors, self.__tensor_flatten__()[1], self.shape)

    def dequantize(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The elements that it stands for."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        own = args[0]
        if func in (aten.detach.default, aten.alias.default, aten.view.default):
            return own.each(torch.Tensor.detach)
        if func is aten.clone.default:
            return own.each(torch.Tensor.clone)
        if func is aten._to_copy.default:  # pyright: ignore[reportPrivateUsage]
            device = (kwargs or {}).get("device")
            return own.each(partial(torch.Tensor.to, device=device))
        if func is aten.copy_.default:
            for key in own.__tensor_flatten__()[0]:
                getattr(own, key).copy_(getattr(args[1], key))
            return own
        plain = [a.dequantize() if isinstance(a, Made) else a for a in args]
        return func(*plain, **(kwargs or {}))


class State8bit(Made):
    """torchao's OptimState8bit: codes into a table, with a scale for each block."""

    names = ("codes", "scale", "qmap")
    facts = ("signed", "shown")

    @classmethod
    def zeros(cls, shape: Any) -> Any:
        codes = torch.full(shape, 127, dtype=torch.uint8)
        qmap = torch.linspace(-1, 1, 255)
        tensors = {"codes": codes, "scale": torch.zeros(codes.numel() // BLOCK), "qmap": qmap}
        return cls(tensors, [True, torch.float32], shape)

    def dequantize(self) -> torch.Tensor:
        values = self.qmap[self.codes.int()].view(-1, BLOCK) * self.scale[:, None]
        return values.view(self.shape)

    def fill(self, values: torch.Tensor) -> None:
        """Take other values."""
        blocks = values.reshape(-1, BLOCK)
        self.scale.copy_(blocks.abs().amax(1) + 1e-12)
        codes = (blocks / self.scale[:, None] * 127 + 127).round().to(torch.uint8)
        self.codes.copy_(codes.view(self.shape))


class State4bit(Made):
    """torchao's OptimState4bit: two codes a byte, and the shape in the context."""

    names = ("codes", "scale", "qmap")
    facts = ("signed", "whole", "shown")

    @classmethod
    def zeros(cls, shape: Any) -> Any:
        size = torch.Size(shape)
        codes = torch.full((size.numel() // 2,), 0x77, dtype=torch.uint8)
        qmap = torch.linspace(-1, 1, 15)
        tensors = {"codes": codes, "scale": torch.zeros(size.numel() // BLOCK), "qmap": qmap}
        return cls(tensors, [True, size, torch.float32], size)

    def dequantize(self) -> torch.Tensor:
        codes = torch.stack([self.codes >> 4, self.codes & 15], -1)
        return (self.qmap[codes.int()].view(-1, BLOCK) * self.scale[:, None]).view(self.shape)

    def fill(self, values: torch.Tensor) -> None:
        """Take other values."""
        blocks = values.reshape(-1, BLOCK)
        self.scale.copy_(blocks.abs().amax(1) + 1e-12)
        codes = (blocks / self.scale[:, None] * 7 + 7).round().to(torch.uint8).view(-1, 2)
        self.codes.copy_(codes[:, 0] << 4 | codes[:, 1])


class StateFp8(Made):
    """torchao's OptimStateFp8: float8 codes, with a scale for each block."""

    names = ("codes", "scale")
    facts = ("shown",)

    @classmethod
    def zeros(cls, shape: Any) -> Any:
        codes = torch.zeros(shape).to(torch.float8_e4m3fn)
        return cls({"codes": codes, "scale": torch.zeros(codes.numel() // BLOCK)}, [None], shape)

    def dequantize(self) -> torch.Tensor:
        return (self.codes.float().view(-1, BLOCK) * self.scale[:, None]).view(self.shape)

    def fill(self, values: torch.Tensor) -> None:
        """Take other values."""
        blocks = values.reshape(-1, BLOCK)
        self.scale.copy_((blocks.abs().amax(1) + 1e-12) / 448)
        codes = (blocks / self.scale[:, None]).to(torch.float8_e4m3fn)
        self.codes.copy_(codes.view(self.shape))


class Float8(Made):
    """Transformer Engine's Float8Tensor, with a transpose that may be there or not."""

    names = ("_data", "_scale_inv", "_transpose")
    facts = ("_fp8_dtype",)

    @classmethod
    def of(cls, values: torch.Tensor, *, transposed: bool = False) -> Any:
        """The same values, rounded."""
        data = values.to(torch.float8_e4m3fn).view(torch.uint8)
        tensors = {"_data": data, "_scale_inv": torch.ones(1)}
        if transposed:
            tensors["_transpose"] = data.t().contiguous()
        return cls(tensors, [torch.float8_e4m3fn], values.shape)

    def dequantize(self) -> torch.Tensor:
        return self._data.view(self._fp8_dtype).float() * self._scale_inv


class Mxfp8(torch.Tensor):
    """Transformer Engine's MXFP8Tensor, which does not tell by ``__tensor_flatten__`` of what."""

    @staticmethod
    def __new__(cls: Any, *sizes: Any) -> Any:
        rows = sizes[0]
        make: Any = torch.Tensor
        made = make._make_wrapper_subclass(cls, (rows, 32), dtype=torch.float32)
        made._rowwise_data = torch.zeros(rows, 32, dtype=torch.uint8)
        made._rowwise_scale_inv = torch.zeros(rows, 1, dtype=torch.uint8)
        return made

    def __init__(self, *_: Any) -> None: ...

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


class Scaled(Made):
    """A subclass of a subclass: codes of one are those of another."""

    names = ("codes", "factor")
    facts = ()

    def dequantize(self) -> torch.Tensor:
        return self.codes.dequantize() * self.factor


class LowBit(torch.optim.Optimizer):
    """SGD with momentum that is kept in such tensors, of the local part of each parameter.

    Parts of fewer than ``fewest`` elements have plain state, as torchao's optimizers have.
    """

    def __init__(self, params: Any, kind: Any, *, fewest: int = BLOCK) -> None:
        super().__init__(params, {"lr": 0.1})
        self.kind = kind
        self.fewest = fewest

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Move every parameter."""
        for param in self.param_groups[0]["params"]:
            if param.grad is None:
                continue
            state = self.state[param]
            local, grad = (getattr(t, "_local_tensor", t) for t in (param, param.grad))
            if not state:
                state.update(step=torch.tensor(0.0), momentum_buffer=self.zeros_like(param, local))
            state["step"] += 1
            momentum = getattr(state["momentum_buffer"], "_local_tensor", state["momentum_buffer"])
            if isinstance(momentum, Made):
                now = momentum.dequantize() * 0.9 + grad
                momentum.fill(now)  # pyright: ignore
                now = momentum.dequantize()
            else:
                now = momentum.mul_(0.9).add_(grad)
            local.sub_(now * 0.1)

    def zeros_like(self, param: Any, local: torch.Tensor) -> Any:
        is_low = local.numel() >= self.fewest and local.numel() % BLOCK == 0
        made = self.kind.zeros(local.shape) if is_low else torch.zeros_like(local)
        if local is param:
            return made
        arguments = {"shape": param.shape, "stride": param.stride()}
        return type(param.data).from_local(made, param.device_mesh, param.placements, **arguments)


def same(one: Any, other: Any) -> bool:
    """Whether two tensors are of one class and consist of the same bits."""
    if type(one) is not type(other):
        return False
    if hasattr(one, "_local_tensor"):
        return same(one._local_tensor, other._local_tensor)
    if isinstance(one, Made):
        told = one.__tensor_flatten__()
        return told == other.__tensor_flatten__() and all(
            same(getattr(one, key), getattr(other, key)) for key in told[0]
        )
    return (one.dtype, one.shape) == (other.dtype, other.shape) and bool(
        torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))
    )


def of(kind: Any, seed: int) -> Any:
    """A tensor of random values."""
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
    if kind is Float8:
        return Float8.of(values)
    made = kind.zeros(SHAPE)
    made.fill(values)
    return made


def saved(state: Any, **options: Any) -> MemoryStore:
    """A checkpoint of a state."""
    store = MemoryStore()
    ckpt.save(state, store, **options)
    return store


class Holder:
    """An object with a tensor, or none yet."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "list": [self.value]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["list"] is not None
        self.value = state["value"]


class Odd(Made):
    """A subclass whose context may be more than plain values."""

    names = ("codes",)
    facts = ("thing",)

    @staticmethod
    def __new__(cls: Any, *parts: Any) -> Any:
        make: Any = torch.Tensor
        made = make._make_wrapper_subclass(cls, parts[2], dtype=torch.float32)
        made.codes, made.thing = parts[0].get("codes"), parts[1][0]
        return made
