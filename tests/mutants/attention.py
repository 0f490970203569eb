"""Mutants of attention over a sequence that ranks share."""

from __future__ import annotations

from .mutant import Mutant

_BLOCKS = ("tests/dtensor/attention/test_blocks.py",)
_FUNCTION = ("tests/dtensor/attention/test_function.py",)
_CONTEXT = ("tests/dtensor/attention/test_context.py",)

MUTANTS = [
    Mutant(
        name="attention: a query sees the key after its own",
        file="dtensor/attention/blocks.py",
        old="start + count - 1 <= first\n",
        new="start + count - 2 <= first\n",
        tests=_BLOCKS,
    ),
    Mutant(
        name="attention: diagonals are counted from positions, not from what both hold",
        file="dtensor/attention/blocks.py",
        old="None if is_whole else first - start",
        new="None if is_whole else first",
        tests=_BLOCKS,
    ),
    Mutant(
        name="attention: tiles forget where their queries begin",
        file="dtensor/attention/kernels.py",
        old="None if diagonal is None else diagonal + start",
        new="diagonal",
        tests=_FUNCTION,
    ),
    Mutant(
        name="attention: blocks are added without the weights of their sums",
        file="dtensor/attention/merging.py",
        old="        out.mul_((lse - base).exp_()[..., None])\n",
        new="        out.mul_(0.5)\n",
        tests=_FUNCTION,
    ),
    Mutant(
        name="attention: a later block does not count in the sum of exponentials",
        file="dtensor/attention/merging.py",
        old="        lse.copy_(both)\n",
        new="",
        tests=_FUNCTION,
    ),
    Mutant(
        name="attention: gradients of grouped heads are those of the first one",
        file="dtensor/attention/ring_attention.py",
        old="unflatten(1, (heads, -1)).sum(2, dtype=dtype)",
        new="unflatten(1, (heads, -1)).select(2, 0).to(dtype)",
        tests=_FUNCTION,
    ),
    Mutant(
        name="attention: keys go further than they are seen",
        file="dtensor/attention/blocks.py",
        old="(s[0], s[-1]) if s",
        new="(s[0], count - 1) if s",
        tests=_BLOCKS,
    ),
    Mutant(
        name="attention: sums of gradients do not come home",
        file="dtensor/attention/rotation.py",
        old="            sums = _sum(sums, home)\n",
        new="",
        tests=_FUNCTION,
    ),
    Mutant(
        name="context parallel: buffers stay parts after an exception",
        file="dtensor/attention/context.py",
        old="        for buffer, whole in wholes:\n",
        new="        for buffer, whole in ():\n",
        tests=_CONTEXT,
    ),
    Mutant(
        name="context parallel: parts are not counted as written",
        file="dtensor/attention/context.py",
        old="        torch.autograd.graph.increment_version(buffer)\n",
        new="        pass\n",
        tests=_CONTEXT,
    ),
    Mutant(
        name="context parallel: a recomputation does not find the shared attention",
        file="dtensor/attention/context.py",
        old="        F.scaled_dot_product_attention = _in_any_thread\n",
        new="        pass\n",
        tests=_CONTEXT,
    ),
]
