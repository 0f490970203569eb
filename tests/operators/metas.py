"""What planning says of results, compared with what the kernels of this device return.

``python -m tests.operators.metas --ops layer_norm`` runs the samples of torch's database of
operators forward and backward, on plain tensors, and looks at each operator of ATen that runs for
them: shape, dtype and strides of its results must be those that planning finds without data. A plan
that says otherwise reads the bytes of one dtype as those of another.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import click
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dtckpt.dtensor.calls.metas import metas_of
from dtckpt.dtensor.mesh.spec import TensorMeta

from .database import Sample, load, samples_of
from .expected import copies
from .values import flattened, map_tensors

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
)

_ORDER = "the kernel lays its result out in an order of dims of its own, which no view relies on"
_BAGS = "the kernel leaves out what it need not know; the local function of the rule adds it"
_VALUES = "reads values, so that it has no results without data and no plan"

EXCEPTIONS = {
    "aten._fft_c2r.default": _ORDER,
    "aten._fft_r2c.default": _ORDER,
    "aten._linalg_svd.default": _ORDER,
    "aten.linalg_eig.default": _ORDER,
    "aten.linalg_solve_triangular.default": _ORDER,
    "aten.max_unpool2d.default": _ORDER,
    "aten.nonzero_static.default": _ORDER,
    "aten.mul.Tensor": "of expanded tensors of one element the kernel chooses the other's order",
    "aten._embedding_bag.default": _BAGS,
    "aten._embedding_bag_forward_only.default": _BAGS,
    "aten._local_scalar_dense.default": _VALUES,
    "aten.allclose.default": _VALUES,
    "aten.repeat_interleave.Tensor": _VALUES,
    "aten.native_batch_norm.default": "in evaluation it has no plan, but a decomposition",
    "aten._native_batch_norm_legit.default": "has no plan, but a decomposition",
}
"""Operators whose results differ from what planning says of them, and why that does no harm."""


@dataclass
class Comparison(TorchDispatchMode):
    """Within it, each operator that runs is compared, once for each kind of call."""

    calls: int = 0
    differences: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    """By operator and kind of difference, an example."""
    _seen: set[Hashable] = field(default_factory=set[Hashable])

    def __post_init__(self) -> None:
        super().__init__()

    def __hash__(self) -> int:
        return id(self)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given: dict[str, Any] = kwargs or {}
        key = repr((func, _described(args), _described(given)))
        if key in self._seen or not _is_dense([args, given]):
            return func(*args, **given)
        self._seen.add(key)
        metas = _metas(func, args, given)
        result = func(*args, **given)
        if metas is not None:
            self.calls += 1
            self._compare(str(func), metas, flattened(result), _described([args, given]))
        return result

    def _compare(self, name: str, metas: Any, results: Sequence[Any], call: Any) -> None:
        if isinstance(metas, Exception):
            self._note(name, "raises", f"{type(metas).__name__}: {metas}", call)
            return
        for index, (meta, result) in enumerate(itertools.zip_longest(metas, results)):
            found = result if isinstance(result, Tensor) else None
            kind = _difference(meta, found)
            if kind:
                shown = None if found is None else (found.shape, found.dtype, found.stride())
                self._note(name, f"{kind} of result {index}", f"{meta}, not {shown}", call)

    def _note(self, name: str, kind: str, what: str, call: Any) -> None:
        self.differences.setdefault((name, kind), f"{what}, of {call}"[:600])


def _difference(meta: TensorMeta | None, result: Tensor | None) -> str:
    """Return what differs, or an empty string."""
    if meta is None or result is None:
        return "" if meta is result else "presence"
    if meta.dtype != result.dtype:
        return "dtype"
    if meta.shape != result.shape:
        return "shape"
    pairs = zip(meta.stride, result.stride(), result.shape, strict=True)
    return "strides" if result.numel() and any(a != b and n > 1 for a, b, n in pairs) else ""


def _metas(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what planning says of a call, what it raises, or None where it knows nothing."""

    def without_data(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    meta_args = map_tensors(without_data, args)
    meta_kwargs = {
        name: torch.device("meta") if isinstance(value, torch.device) else value
        for name, value in map_tensors(without_data, dict(kwargs)).items()
    }
    if not any(isinstance(leaf, Tensor) for leaf in flattened([meta_args, meta_kwargs])):
        return None
    try:
        return metas_of(func, meta_args, meta_kwargs, "cpu")
    except Exception as error:  # whatever it is, planning would raise it
        return error


def _described(value: Any) -> Any:
    """Return arguments with shape, strides and dtype in the place of every tensor."""
    return map_tensors(lambda t: (tuple(t.shape), t.stride(), str(t.dtype)), value)  # type: ignore


def _is_dense(value: Any) -> bool:
    tensors = [leaf for leaf in flattened(value) if isinstance(leaf, Tensor)]
    return all(tensor.layout == torch.strided for tensor in tensors)


def compare(
    operators: Iterable[tuple[str, Any]],
    dtypes: Sequence[torch.dtype] = DTYPES,
    samples: int = 5,
) -> Comparison:
    """Run samples of some operators of the database, forward and backward, in some dtypes."""
    comparison = Comparison()
    for _, info in operators:
        for dtype in dtypes:
            for sample in _samples(info, dtype, samples):
                _run(info, sample, comparison)
    return comparison


def _samples(info: Any, dtype: torch.dtype, count: int) -> Iterator[Sample]:
    try:
        yield from samples_of(info, count, (dtype,))
    except Exception:  # the database's own code, which may need other devices
        return


def _run(info: Any, sample: Sample, comparison: Comparison) -> None:
    inputs = copies(sample)
    args, kwargs = sample.with_tensors(inputs)
    try:
        with comparison:
            outputs = [
                leaf
                for leaf in flattened(sample.process(info(*args, **kwargs)))
                if isinstance(leaf, Tensor) and leaf.requires_grad
            ]
            wanted = [tensor for tensor in inputs if tensor.requires_grad]
            if outputs and wanted:
                ones = [torch.ones_like(output) for output in outputs]
                torch.autograd.grad(outputs, wanted, ones, allow_unused=True)
    except Exception:  # one device refuses it
        return


@click.command("metas")
@click.option("--ops", help="Names of operators contain this.", default="")
@click.option("--samples", default=5, type=click.IntRange(1), help="Most samples of an operator.")
def main(ops: str, samples: int) -> None:
    """Compare results without data with those of kernels; status 1 where some differ."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chosen = [(name, info) for name, info in load("uneven").items() if ops in name]
    comparison = compare(chosen, samples=samples)
    wrong = 0
    for (name, kind), example in sorted(comparison.differences.items()):
        reason = EXCEPTIONS.get(name)
        wrong += reason is None
        click.echo(f"{name}: {kind}: {reason or example}")
    click.echo(f"{comparison.calls} calls of {len(chosen)} operators, {wrong} unlike the kernels")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
