"""Mutants of what compiled graphs call."""

from __future__ import annotations

from .mutant import Mutant

_COMPILED = ("tests/compiling/test_compiling.py",)

MUTANTS = (
    Mutant(
        name="compilers take a call for nothing but its results",
        file="dtensor/graphs/calls.py",
        old="register_effect(torch.ops.dtckpt.call.default)\n",
        new="",
        tests=_COMPILED,
    ),
    Mutant(
        name="a call may be computed again in the backward pass",
        file="dtensor/graphs/calls.py",
        old="    with never_recomputed():",
        new="    if True:",
        tests=_COMPILED,
    ),
    Mutant(
        name="calls are recorded where a memory budget decides what is computed again",
        file="dtensor/torch_private.py",
        old="    return has_budget or in_checkpoint",
        new="    return in_checkpoint",
        tests=_COMPILED,
    ),
    Mutant(
        name="an operator that needs a number gets the symbol",
        file="dtensor/calls/symbols.py",
        old="        return symbol if keeps and type(symbol) in _STAND_INS else",
        new="        return symbol if type(symbol) in _STAND_INS else",
        tests=_COMPILED,
    ),
    Mutant(
        name="a symbol that can be one number only is recorded",
        file="dtensor/calls/symbols.py",
        old="        if known is not None:",
        new="        if False:",
        tests=_COMPILED,
    ),
)
