"""Forms: the factors of an operator as a line of text, one term per tensor.

``"ik, kj -> ij"`` is a matrix product. A letter is a factor; one that an output lacks is summed
over, so that the output is Partial where it is split. ``.`` is a dim that must be whole, ``_`` any
number of those, ``*`` any number of leading dims that pass through (batches). Dims of size 1
broadcast.
``+ij`` is an addend, which counts once; in ``o(c)`` the output does not depend on the factor ``c``.

A table of forms maps names to such lines: an operator is added by one.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...comm.caches import remembered
from ...mesh.spec import DTensorSpec
from ...tensor.schemas import Op
from ...torch_private import schema_of
from .factors import LINEAR_OPS, Dim, Dims, Factors
from .local_kernels import zeros_if_empty, zeros_of_nothing
from .table import RULES, LocalMaker, OpCall, Rule

Keys = tuple[Hashable | None, ...]


@dataclass(frozen=True, slots=True)
class Term:
    """The dims of one tensor of a form."""

    dims: str
    is_addend: bool
    untouched: str

    def keys(self, ndim: int) -> Keys:
        """Return what stands for each of ``ndim`` dims; None for those that must be whole."""
        fixed = self.dims.replace("*", "").replace("_", "")
        rest = ndim - len(fixed)
        if rest < 0:
            fixed = fixed[-rest:]
        found: list[Hashable | None] = []
        for letter in self.dims if rest >= 0 else fixed:
            if letter == "*":
                found.extend(range(rest, 0, -1))
            elif letter == "_":
                found.extend([None] * rest)
            else:
                found.append(None if letter == "." else letter)
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Form:
    """A form with the sets of inputs, named by their positions, that it is linear in."""

    text: str
    linear: tuple[str, ...] = ()
    local: LocalMaker | None = None
    linear_ops: tuple[str, ...] = LINEAR_OPS

    def rule(self, call: OpCall) -> Rule:
        """Return the rule of one call."""
        inputs, outputs = parsed(self.text)
        terms, positions = _terms_of(call, inputs)
        # A list of outputs repeats the last term.
        out_terms = [outputs[min(i, len(outputs) - 1)] for i in range(len(call.outputs))]
        dims, out_dims, reduce, numbers = _projected(call, terms, out_terms)
        linear = (frozenset(i for i, p in enumerate(positions) if str(p) in s) for s in self.linear)
        return Factors(
            call,
            dims,
            out_dims,
            reduce=reduce,
            addends=frozenset(i for i, term in enumerate(terms) if term.is_addend),
            linear=tuple(chosen for chosen in linear if chosen),
            linear_ops=self.linear_ops,
            untouched=tuple(
                frozenset(numbers[letter] for letter in term.untouched if letter in numbers)
                for term in out_terms
            ),
            local=self.local
            or (zeros_if_empty if _is_more(terms, out_terms) else zeros_of_nothing),
        )


def linear(text: str, local: LocalMaker | None = None) -> Form:
    """Return a form that is linear in the first tensor."""
    return Form(text, ("0",), local)


def register_forms(namespace: Any, forms: Mapping[str, str | Form]) -> None:
    """Add a table of forms by operator name, such as ``mm`` or ``mm.dtype``.

    Names that this version of torch does not have are left out.
    """
    for name, given in forms.items():
        made = Form(given) if isinstance(given, str) else given
        RULES.register(operators(namespace, name), made.rule)


def operators(namespace: Any, names: str) -> list[Op]:
    """Return the operators of some names in a text, such as ``"mm mm.dtype"``, that torch has."""
    found = [operator(namespace, name) for name in names.split()]
    return [op for op in found if op is not None]


def operator(namespace: Any, name: str) -> Op | None:
    """Return the operator of a name with or without an overload, if torch has it."""
    base, _, overload = name.partition(".")
    return getattr(getattr(namespace, base, None), overload or "default", None)


@remembered(4096)
def parsed(text: str) -> tuple[tuple[Term, ...], tuple[Term, ...]]:
    """Return the terms of the inputs and of the outputs.

    >>> parsed("nc_, +o -> no_")[0][1]
    Term(dims='o', is_addend=True, untouched='')
    """
    left, _, right = text.replace(" ", "").partition("->")
    return tuple(map(_term, left.split(","))), tuple(map(_term, right.split(",")))


def _term(text: str) -> Term:
    dims, _, untouched = text.removeprefix("+").rstrip(")").partition("(")
    return Term(dims, text.startswith("+"), untouched)


def _terms_of(call: OpCall, inputs: Sequence[Term]) -> tuple[list[Term], list[int]]:
    """Return the term of every tensor that is given, and which of those of the schema it is."""
    terms: list[Term] = []
    positions: list[int] = []
    tensors = [
        call.arg(argument.name)
        for argument in schema_of(call.op).arguments
        if "Tensor" in str(argument.type)
    ]
    for position, (value, term) in enumerate(zip(tensors, inputs, strict=True)):
        given = value if isinstance(value, list | tuple) else [value]
        count = sum(isinstance(item, DTensorSpec) for item in given)
        terms.extend([term] * count)
        positions.extend([position] * count)
    return terms, positions


def _projected(
    call: OpCall, terms: Sequence[Term], out_terms: Sequence[Term]
) -> tuple[tuple[Dims, ...], tuple[Dims, ...], dict[int, str], dict[Hashable, int]]:
    """Return the dims of inputs and outputs, the summed factors, and the factor of every key."""
    keys = [term.keys(spec.ndim) for term, spec in zip(terms, call.specs, strict=True)]
    shapes = [meta.shape if meta else () for meta in call.outputs]
    out_keys = [term.keys(len(shape)) for term, shape in zip(out_terms, shapes, strict=True)]
    sizes = _sizes(keys, [spec.shape for spec in call.specs])
    missing = [
        key
        for key in sizes
        for meta, row, term in zip(call.outputs, out_keys, out_terms, strict=True)
        if meta is not None
        and 0 not in meta.shape
        and not any(k == key and n == sizes[key] for k, n in zip(row, meta.shape, strict=True))
        and not (isinstance(key, str) and key in term.untouched)
    ]
    for key in missing:  # a batch is never summed over
        if isinstance(key, int):
            sizes.pop(key, None)
    numbers = {key: number for number, key in enumerate(sizes)}
    reduce = {numbers[key]: "sum" for key in missing if key in numbers}

    def dims(row: Keys, shape: Sequence[int]) -> Dims:
        return tuple(
            Dim(numbers[key]) if key in numbers and size == sizes[key] else None
            for key, size in zip(row, shape, strict=True)
        )

    ins = tuple(dims(k, spec.shape) for k, spec in zip(keys, call.specs, strict=True))
    return ins, tuple(map(dims, out_keys, shapes)), reduce, numbers


def _sizes(keys: Sequence[Keys], shapes: Sequence[Sequence[int]]) -> dict[Hashable, int]:
    """Return the size of every factor, without those whose dims differ and do not broadcast."""
    found: dict[Hashable, set[int]] = {}
    for row, shape in zip(keys, shapes, strict=True):
        for key, size in zip(row, shape, strict=True):
            if key is not None:
                found.setdefault(key, set()).add(size)
    wide = {key: sizes - {1} or {1} for key, sizes in found.items()}
    return {key: next(iter(sizes)) for key, sizes in wide.items() if len(sizes) == 1}


def _is_more(terms: Sequence[Term], out_terms: Sequence[Term]) -> bool:
    """Whether a sum of nothing leaves an addend, or some output needs no factor that is empty."""
    return any(t.is_addend for t in terms) or any(t.untouched for t in out_terms)
