"""What differs between one device and the ranks: findings, and refusals that are documented."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from dtckpt.dtensor.comm.reductions import reduce_locally
from dtckpt.dtensor.geometry.layout import Layout
from dtckpt.errors import PlacementError, UnsupportedOp

from .executors import Executor, Noise, Shown, Trace, run_plain
from .lines.pointwise import NAN_BY_LANES
from .program import Program, assigned_in, names_in, operator_of
from .ranks import RanksDiverged
from .values import SENTINEL, indices_of, plain_input

REFUSALS = (PlacementError, UnsupportedOp)


@dataclass(frozen=True, slots=True)
class Finding:
    """One difference."""

    kind: str
    """hang, ranks differ, raises, rule, no error, value, shape, dtype, grad, local, memory, type;
    of a rule that the library itself finds to be wrong ``rule``."""
    line: int
    """The first line after which it is seen."""
    text: str
    run: int = 0
    name: str = ""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A line that all ranks refuse alike, by an error that the documentation has."""

    operator: str
    text: str
    line: int


@dataclass(slots=True)
class Verdict:
    """What came of one program."""

    finding: Finding | None = None
    refusal: Refusal | None = None
    lines_run: int = 0


def examine(program: Program, executor: Executor) -> Verdict:
    """Run a program on one device and on its ranks, and compare."""
    verdict = Verdict()
    expected = [run_plain(program, numbers) for numbers in program.runs]
    found = executor.run(program)
    for run, (plain, ranks) in enumerate(zip(expected, found, strict=True)):
        verdict.lines_run += len(program.lines)
        finding, refusal = _compared(program, run, plain, ranks)
        if refusal is not None:
            verdict.refusal = verdict.refusal or refusal
        if finding is not None and _is_ill_conditioned(program, run, plain, finding):
            continue
        if finding is not None:
            verdict.finding = finding
            break
    return verdict


def _compared(
    program: Program, run: int, plain: Trace, ranks: list[Trace]
) -> tuple[Finding | None, Refusal | None]:
    errors = [trace.error for trace in ranks]
    refusal = None
    if any(errors):
        finding, refusal = _errors_compared(program, run, plain, ranks)
        if finding is not None:
            return finding, None
    elif plain.error is not None and not _may_pass(plain.error):
        text = f"one device: {_told(plain.error)}; the ranks raise nothing"
        return Finding("no error", plain.failed_line or 0, text, run), None
    if refusal is not None or plain.error is not None:
        return None, refusal  # what was written before an error is not compared
    return _values_compared(program, run, plain, ranks), refusal


_MAY_PASS = (
    "view size is not compatible",
    "refers to a single memory location",
    "single memory location",
    "internal overlap",
    "has been modified by an inplace operation",
    "is a view and its base or another view of its base has been modified",
    "is a view and is being modified inplace",
    "not implemented for",
    "leaf Variable",
    "requires grad is being used in an in-place",
    "cannot be resized",
    "Output 0 of",
    "may alias",
    "element 0 of tensors does not require grad",
    "isDifferentiableType(grad.scalar_type())",
    "Autograd not support dtype",
)
"""Errors of one device that come of its memory or its kernels, and need be none of the ranks."""


def _blames_a_rule(error: Exception | None) -> bool:
    """Whether the library has noticed that a kernel does other than its own rule says."""
    texts = ("The sharding rule of the operator is wrong", ": the local tensor is ")
    return any(text in str(error) for text in texts)


def _is_saved(error: Exception | None) -> bool:
    """Whether a tensor was written that ranks save for backward, and one device does not."""
    return "has been modified by an inplace operation" in str(error)


def _follows_integers(error: Exception | None) -> bool:
    """Whether autograd refuses to follow integers, as torch does for some kinds of tensors."""
    return "Autograd not support dtype" in str(error)


def _refuses_dtypes_of_nothing(program: Program, error: Exception | None) -> bool:
    """Whether dtypes are refused, of which kernels of one device that find no element pass some."""
    is_of_dtypes = "Input dtypes must be the same" in str(error)
    return is_of_dtypes and any(0 in given.shape for given in program.inputs.values())


def _may_pass(error: Exception) -> bool:
    return any(text in str(error) for text in _MAY_PASS)


def _errors_compared(
    program: Program, run: int, plain: Trace, ranks: list[Trace]
) -> tuple[Finding | None, Refusal | None]:
    errors = [trace.error for trace in ranks]
    lines = [len(program.lines) if t.failed_line is None else t.failed_line for t in ranks]
    first = min(lines)
    told = "; ".join(
        f"rank {rank}: {'nothing' if error is None else _told(error)}"
        + (f" (line {line + 1})" if error is not None else "")
        for rank, (error, line) in enumerate(zip(errors, lines, strict=True))
    )
    if any(isinstance(error, RanksDiverged) for error in errors):
        return Finding("hang", first, told, run), None
    if len(set(lines)) > 1 or None in errors:
        return Finding("ranks differ", first, told, run), None
    if plain.error is not None and plain.failed_line == first:
        return None, None
    if plain.error is not None and plain.failed_line is not None and plain.failed_line < first:
        if _may_pass(plain.error):
            return None, None
        text = f"one device: {_told(plain.error)}; the ranks raise nothing there"
        return Finding("no error", plain.failed_line, text, run), None
    line = program.lines[first] if first < len(program.lines) else ""
    if any(_blames_a_rule(error) for error in errors):
        return Finding("rule", first, told, run), None
    if all(
        isinstance(error, REFUSALS)
        or _is_saved(error)
        or _follows_integers(error)
        or _refuses_dtypes_of_nothing(program, error)
        for error in errors
    ):
        return None, Refusal(operator_of(line) if line else "", _told(errors[0]), first)
    return Finding("raises", first, told, run), None


def _told(error: Exception | None) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:300]}"


def _values_compared(
    program: Program, run: int, plain: Trace, ranks: list[Trace]
) -> Finding | None:
    tolerance = _tolerance(program, plain)
    last = len(program.lines) - 1
    for name, expected in plain.env.items():
        seen = [trace.env.get(name) for trace in ranks]
        problem = compare(seen, expected, tolerance)
        if problem is not None:
            kind, text = problem
            if _is_taken_for_finite(program, run, plain, ranks, name, tolerance) or (
                _is_gradient(program, name) and _has_nan(program, plain, NAN_BY_LANES)
            ):
                break  # what follows from it differs, too
            if _has_nan(program, plain, _SIGNS):
                break  # what follows from it differs, too
            return Finding(kind, last, f"{name}: {text}", run, name)
    for name in program.inputs:
        for rank, trace in enumerate(ranks):
            rest = trace.buffers[name]
            if bool((rest != torch.tensor(SENTINEL).to(rest.dtype)).any()):
                text = f"{name}: rank {rank} writes beside its part"
                return Finding("memory", last, text, run, name)
    return None


def _is_taken_for_finite(
    program: Program,
    run: int,
    plain: Trace,
    ranks: list[Trace],
    name: str,
    tolerance: float,
) -> bool:
    """Whether only infinite numbers are others that are not finite, as docs/dtensor.md says.

    Terms of a sum are multiplied one by one with tensors of several elements, and with matrices,
    which are taken for finite, and divided by those, which are taken for other than zero: to look
    at them would cost an exchange at each product.
    """
    wholes = [plain_input(given)[0] for given in program.inputs.values()]
    wholes += [value for value in plain.env.values() if isinstance(value, Tensor)]
    has_infinite = any(bool(whole.isinf().any()) for whole in wholes)
    if _is_gradient(program, name):  # of x / 0 it is infinite
        numbers = program.runs[run].values()
        has_infinite |= any(number == 0 or not math.isfinite(number) for number in numbers)
    if not has_infinite and not _divides_by_zeros(program, plain):
        return False
    shown = [one for one in ranks[0].env.values() if isinstance(one, Shown)]
    layouts = [one.layout for one in shown if one.layout is not None]
    if not any(layout.is_partial for layout in layouts):
        return False
    seen, expected = [trace.env.get(name) for trace in ranks], plain.env[name]
    # Formulas of gradients divide by such products (atan2), which an infinite one makes 0.
    inverses = _is_gradient(program, name)
    alike = [_without_infinity(one, inverses) for one in seen]
    return compare(alike, _without_infinity(expected, inverses), tolerance) is None


def _is_gradient(program: Program, name: str) -> bool:
    return any(name in assigned_in(line) for line in program.lines if _has_gradients(line))


_SIGNS = ("copysign", "copysign_", "signbit")
"""Operators that take the sign of not-a-number, which nobody says."""


def _has_nan(program: Program, plain: Trace, operators: Sequence[str]) -> bool:
    """Whether something in lines with some operators is nan: so it may be by later numbers."""
    lines = [line for line in program.lines if operator_of(line) in operators]
    values = [plain.env.get(name) for line in lines for name in names_in(line)]
    return any(isinstance(value, Tensor) and bool(value.isnan().any()) for value in values)


def _has_gradients(line: str) -> bool:
    return operator_of(line) in ("gradients", "accumulated")


def _without_infinity(value: Any, inverses: bool) -> Any:
    """Return a value, or a list of them, with not-a-number for all elements that are infinite.

    With ``inverses`` for zeros, too.
    """
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return [_without_infinity(item, inverses) for item in cast(Sequence[Any], value)]
    if isinstance(value, Shown):
        return replace(value, value=_without_infinity(value.value, inverses))
    return _as_not_a_number(value, inverses) if isinstance(value, Tensor) else value


_DIVISIONS = frozenset({"/", "/=", "div", "div_", "true_divide", "addcdiv", "addcdiv_"})


def _divides_by_zeros(program: Program, plain: Trace) -> bool:
    """Whether some line divides, and has a tensor of several elements with a zero among them."""
    names = {n for line in program.lines if operator_of(line) in _DIVISIONS for n in names_in(line)}
    values = [plain.env.get(name) for name in names]
    return any(isinstance(v, Tensor) and v.numel() > 1 and bool((v == 0).any()) for v in values)


def _as_not_a_number(values: Tensor, inverses: bool) -> Tensor:
    """Return values with not-a-number for all that are infinite, and, with ``inverses``, 0."""
    if not (values.dtype.is_floating_point or values.dtype.is_complex):
        return values
    is_left_out = values.isinf() | (values == 0) if inverses else values.isinf()
    return torch.where(is_left_out, torch.nan, values)


def compare(seen: Sequence[Any], expected: Any, tolerance: float) -> tuple[str, str] | None:
    """Return kind and text of the first difference of what the ranks have from a value."""
    if isinstance(expected, nn.Module):
        tensors = [*expected.named_parameters(), *expected.named_buffers()]
        expected = [tensor for _, tensor in tensors]
    if isinstance(expected, list | tuple) and not isinstance(expected, torch.Size):
        items = list(cast(Sequence[Any], expected))
        if any(not isinstance(one, list) or len(one) != len(items) for one in seen):
            return "type", f"expected {len(items)} results"
        for index, item in enumerate(items):
            problem = compare([one[index] for one in seen], item, tolerance)
            if problem is not None:
                return problem[0], f"[{index}] {problem[1]}"
        return None
    if any(not isinstance(one, Shown) for one in seen):
        return "type", f"{seen}, expected {type(expected).__name__}"
    if any(one.kind == "unreadable" for one in seen):
        errors = [one.value for one in seen]
        if len({str(error) for error in errors}) == 1:
            return None
        return "ranks differ", f"to_local: {[str(e)[:100] for e in errors]}"
    if isinstance(expected, Tensor):
        is_integer = not (expected.dtype.is_floating_point or expected.dtype.is_complex)
        # The gradient of nothing may be the input itself (cummin).
        told = [one.requires_grad for one in seen if expected.numel() and not is_integer]
        if any(one != expected.requires_grad for one in told):
            return "grad", f"requires_grad is {told}, expected {expected.requires_grad}"
        return _tensors_compared(seen, expected.detach(), tolerance)
    if expected is None:
        values = [one.value for one in seen]
        right = all(v is None or (isinstance(v, Tensor) and not bool(v.any())) for v in values)
        return None if right else ("value", f"{values}, expected None")
    if any(one.kind != "other" for one in seen):
        return "type", f"{seen[0].kind}, expected {expected!r}"
    for one in seen:
        if not _same_number(one.value, expected, tolerance):
            return "value", f"{[one.value for one in seen]}, expected {expected!r}"
    return None


def _same_number(one: Any, other: Any, tolerance: float) -> bool:
    if callable(other) or not isinstance(other, bool | int | float | complex):
        return True if callable(other) else one == other
    if type(one) is not type(other):
        return False
    if one == other or (one != one and other != other):
        return True
    if isinstance(other, bool | int):
        return False
    return abs(one - other) <= tolerance * max(1.0, abs(other))


def _tensors_compared(
    seen: Sequence[Shown], expected: Tensor, tolerance: float
) -> tuple[str, str] | None:
    if len({one.kind for one in seen}) > 1 or any(one.kind == "other" for one in seen):
        return "type", f"{[one.kind for one in seen]}, expected a tensor"
    for one in seen:
        if one.shape != tuple(expected.shape):
            return "shape", f"{one.shape}, expected {tuple(expected.shape)}"
        if one.dtype != expected.dtype:
            return "dtype", f"{one.dtype}, expected {expected.dtype}"
        if one.spec_dtype != expected.dtype:
            return "dtype", f"{one.spec_dtype} in the spec, expected {expected.dtype}"
    layout = seen[0].layout
    if layout is None:
        for rank, one in enumerate(seen):
            problem = _values_differ(one.value, expected, tolerance)
            if problem:
                return "value", f"rank {rank}, plain: {problem}"
        return None
    if any(one.layout != layout for one in seen):
        return "ranks differ", f"layouts {[str(one.layout) for one in seen]}"
    return _parts_compared(seen, layout, expected, tolerance)


def _parts_compared(
    seen: Sequence[Shown], layout: Layout, expected: Tensor, tolerance: float
) -> tuple[str, str] | None:
    coordinates = list(itertools.product(*map(range, layout.mesh.shape)))
    parts: dict[tuple[int, ...], Tensor] = {}
    for here, one in zip(coordinates, seen, strict=True):
        sizes = layout.box(here).sizes
        if tuple(one.value.shape) != sizes:
            return "local", f"{layout}: {tuple(one.value.shape)} at {here}, expected {sizes}"
        if one.value.dtype != expected.dtype:
            return "local", f"{layout}: {one.value.dtype} at {here}, expected {expected.dtype}"
        parts[here] = one.value
    flat = expected.reshape(-1)
    for axis, placement in enumerate(layout.placements):
        op = getattr(placement, "reduce_op", None)
        if op is not None:
            parts = _reduced(parts, axis, op)
    for here, part in parts.items():
        problem = _values_differ(part, flat[indices_of(layout, here)], tolerance)
        if problem:
            return "value", f"{layout} at {here}: {problem}"
    return None


def _reduced(
    parts: dict[tuple[int, ...], Tensor], axis: int, op: str
) -> dict[tuple[int, ...], Tensor]:
    found: dict[tuple[int, ...], Tensor] = {}
    for here in parts:
        rows = [
            part
            for other, part in parts.items()
            if other[:axis] == here[:axis] and other[axis + 1 :] == here[axis + 1 :]
        ]
        found[here] = reduce_locally(torch.stack([row.resolve_conj() for row in rows]), op)
    return found


def _values_differ(found: Tensor, expected: Tensor, tolerance: float) -> str:
    if found.numel() == 0:
        return ""
    if not (expected.dtype.is_floating_point or expected.dtype.is_complex):
        wrong = found != expected
    else:
        finite = expected[torch.isfinite(expected)]
        scale = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
        wrong = ~torch.isclose(
            found, expected, rtol=tolerance, atol=tolerance * scale, equal_nan=True
        )
        if expected.dtype.is_complex:
            # Which parts of an infinite product are not-a-number goes by how many elements kernels
            # multiply at once.
            wrong &= found.isfinite() | expected.isfinite()
    if not bool(wrong.any()):
        return ""
    return (
        f"{found.flatten()[:8].tolist()}, expected {expected.flatten()[:8].tolist()}, "
        f"{int(wrong.sum())} of {wrong.numel()} differ"
    )


_TOLERANCES = {
    torch.bfloat16: 6e-2,
    torch.float16: 8e-3,
    torch.float32: 2e-4,
    torch.complex64: 2e-4,
}


def _tolerance(program: Program, plain: Trace) -> float:
    """Return that of the coarsest dtype of a program, of its values or within its lines."""
    text = " ".join(program.lines)
    named = [t for dtype, t in _TOLERANCES.items() if str(dtype).removeprefix("torch.") in text]
    dtypes = {value.dtype for value in plain.env.values() if isinstance(value, Tensor)}
    for value in plain.env.values():
        if isinstance(value, nn.Module):
            dtypes |= {parameter.dtype for parameter in value.parameters()}
    return max([1e-7, *named, *(_TOLERANCES.get(dtype, 1e-7) for dtype in dtypes)])


_LOGICAL = ("logical_not", "logical_and", "logical_or", "logical_xor")
_EQUALITIES = frozenset(
    {
        "==",
        "!=",
        "eq",
        "ne",
        "eq_",
        "ne_",
        "count_nonzero",
        "any",
        "all",
        "sign",
        "sgn",
        "heaviside",
    }
    | {*_LOGICAL, *(f"{name}_" for name in _LOGICAL)}
)
"""Operators that ask for one number, perhaps zero, which noise does not find."""


def _is_ill_conditioned(program: Program, run: int, plain: Trace, finding: Finding) -> bool:
    """Whether rounding alone changes the value by what differs: no finding then."""
    if finding.kind != "value":
        return False
    expected = plain.env.get(finding.name)
    noises = [Noise(seed, of_zeros=seed == 2, of_largest=seed >= 4) for seed in range(6)]
    noises.append(Noise(2, of_zeros=True, sign=-1))  # a number alone has one sign only
    if any(operator_of(line) in _EQUALITIES for line in program.lines):
        numbers = [n for n in program.runs[run].values() if math.isfinite(n)]
        noises.append(Noise(0, onto=[0, *numbers]))
    for noise in noises:
        try:
            noisy = run_plain(program, program.runs[run], noise)
        except Exception:
            return True
        if noisy.error is not None:
            return True
        if compare([_as_shown(noisy.env[finding.name])], expected, _tolerance(program, plain) / 8):
            return True
    return False


def _as_shown(value: Any) -> Any:
    from .executors import shown

    return shown(value)


def check(program: Program) -> None:
    """Raise AssertionError where a program differs between one device and its ranks."""
    verdict = examine(program, Executor())
    if verdict.finding is not None:
        raise AssertionError(f"{verdict.finding}\n{program}")


__all__ = ["Finding", "Refusal", "Verdict", "check", "compare", "examine", "plain_input"]
