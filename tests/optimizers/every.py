"""The optimizers of the matrix: all of torch's, and those of others that keep state otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .models import like


def _any(param: torch.Tensor) -> bool:
    return True


def _is_matrix(param: torch.Tensor) -> bool:
    return param.ndim == 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """An optimizer, and what it takes."""

    name: str
    make: Callable[[list[dict[str, Any]]], Any]
    takes: Callable[[torch.Tensor], bool] = _any
    is_sparse: bool = False
    """Whether it takes sparse gradients alone, which the embedding has."""
    has_closure: bool = False
    wants_even: bool = False
    """Whether torch's DTensor has it fail where parts are not of one size."""

    def of(self, model: nn.Module) -> Any:
        """Return it over the parameters of a model, in two groups of other settings."""
        named = list(model.named_parameters())
        params = [(n, p) for n, p in named if self.takes(p) and (p.requires_grad or _is_plain(p))]
        if self.is_sparse:
            params = [(n, p) for n, p in params if n.endswith("embedding.weight")]
        if self.wants_even:
            params = [(n, p) for n, p in params if n.endswith(("conv.weight", "conv.bias", "wide"))]
        if self.has_closure:
            return self.make([{"params": [p for _, p in params if p.requires_grad]}])
        first = [param for name, param in params if name.endswith("weight")]
        second = [param for name, param in params if not name.endswith("weight")]
        groups: list[dict[str, Any]] = [{"params": first}, {"params": second, "lr": 3e-3}]
        return self.make([group for group in groups if group["params"]])


def _is_plain(param: torch.Tensor) -> bool:
    """Whether a frozen parameter is given to the optimizer, too, without gradient and state."""
    return param.ndim == 2


class GatheringMuon(Optimizer):
    """Muon that gathers gradients: momentum is whole and plain on every rank."""

    def __init__(self, params: Any, lr: float = 1e-2, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        del closure
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                grad = param.grad
                whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
                held = self.state[param]
                if not held:
                    held["momentum_buffer"] = torch.zeros_like(whole, dtype=torch.float32)
                    held["step"] = 0
                held["step"] += 1
                held["momentum_buffer"].lerp_(whole.float(), 1 - group["momentum"])
                u, _, v = torch.linalg.svd(held["momentum_buffer"], full_matrices=False)
                param.sub_(like((u @ v).to(param.dtype), param), alpha=group["lr"])


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class LocalBlocks(Optimizer):
    """Keeps int8 codes of what this rank holds, and a scale for each block, in plain tensors."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        del closure
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                held = self.state[param]
                local, grad = _local(param), _local(param.grad)
                blocks = -(-grad.numel() // 16)
                if not held:
                    held["codes"] = torch.zeros(grad.numel(), dtype=torch.int8)
                    held["scales"] = torch.zeros(blocks)
                    held["step"] = 0
                held["step"] += 1
                old = held["codes"].float() * held["scales"].repeat_interleave(16)[: grad.numel()]
                new = torch.zeros(blocks * 16)
                new[: grad.numel()] = old * 0.9 + grad.flatten().float() * 0.1
                held["scales"] = new.view(blocks, 16).abs().amax(1) / 127 + 1e-12
                codes = new / held["scales"].repeat_interleave(16)
                held["codes"] = codes.round().to(torch.int8)[: grad.numel()]
                local.sub_((group["lr"] * new[: grad.numel()]).view(local.shape).to(local.dtype))


class NestedLars(Optimizer):
    """LARS whose state lies in dicts and lists within the state of a parameter."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "trust": {"coefficient": 1e-3, "powers": (1, 2.0)}})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        del closure
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                held = self.state[param]
                if not held:
                    held["lars"] = {"momentum": torch.zeros_like(param), "rates": []}
                    held["count"] = (0, "steps")
                held["count"] = (held["count"][0] + 1, "steps")
                rate = group["trust"]["coefficient"] * (1 + len(held["lars"]["rates"]))
                held["lars"]["rates"].append(torch.tensor(rate, dtype=torch.float64))
                held["lars"]["momentum"].mul_(0.9).add_(param.grad, alpha=rate)
                param.sub_(held["lars"]["momentum"], alpha=group["lr"])


def _of(module: str, name: str, **settings: Any) -> Callable[[list[dict[str, Any]]], Any]:
    def make(groups: list[dict[str, Any]]) -> Any:
        return getattr(import_module(module), name)(groups, **settings)

    return make


def _schedule_free(groups: list[dict[str, Any]]) -> Any:
    made = _of("schedulefree", "AdamWScheduleFree", lr=1e-2, warmup_steps=2)(groups)
    made.train()
    return made


def _lookahead(groups: list[dict[str, Any]]) -> Any:
    inner = torch.optim.AdamW(groups, lr=1e-2)
    return import_module("pytorch_optimizer").Lookahead(inner, k=2)


_TORCH = "torch.optim"
_OTHERS = "pytorch_optimizer"

KINDS = (
    *(
        Kind(name=name, make=_of(_TORCH, name, lr=1e-2, **settings))
        for name, settings in (
            ("Adadelta", {}),
            ("Adafactor", {}),
            ("Adagrad", {}),
            ("Adam", {"amsgrad": True}),
            ("AdamW", {}),
            ("Adamax", {}),
            ("ASGD", {"t0": 2}),
            ("NAdam", {}),
            ("RAdam", {}),
            ("RMSprop", {"momentum": 0.9, "centered": True}),
            ("Rprop", {}),
            ("SGD", {"momentum": 0.9}),
        )
    ),
    Kind(
        name="LBFGS",
        make=_of(_TORCH, "LBFGS", lr=1e-2, max_iter=2),
        has_closure=True,
        wants_even=True,
    ),
    Kind(name="Muon", make=_of(_TORCH, "Muon", lr=1e-2), takes=_is_matrix, wants_even=True),
    Kind(name="SparseAdam", make=_of(_TORCH, "SparseAdam", lr=1e-2), is_sparse=True),
    Kind(name="GatheringMuon", make=GatheringMuon, takes=_is_matrix),
    Kind(name="LocalBlocks", make=LocalBlocks),
    Kind(name="SOAP", make=_of(_OTHERS, "SOAP", lr=1e-2, precondition_frequency=2)),
    Kind(name="Shampoo", make=_of(_OTHERS, "Shampoo", lr=1e-2, momentum=0.9)),
    Kind(name="Prodigy", make=_of(_OTHERS, "Prodigy", lr=1.0), wants_even=True),
    Kind(name="Lion", make=_of(_OTHERS, "Lion", lr=1e-2)),
    Kind(name="AdaFactor", make=_of(_OTHERS, "AdaFactor", lr=1e-2)),
    Kind(name="LARS", make=_of(_OTHERS, "LARS", lr=1e-2)),
    Kind(name="NestedLars", make=NestedLars),
    Kind(name="Lookahead", make=_lookahead),
    Kind(name="ScheduleFree", make=_schedule_free),
    Kind(name="AdamW8bit", make=_of("torchao.optim", "AdamW8bit", lr=1e-2)),
)
