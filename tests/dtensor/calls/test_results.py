"""Local results are compared with their specs; what is written to an ``out=`` or a view."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dtckpt.dtensor import DeviceMesh, Partial, Replicate, Shard, register_sharding
from dtckpt.dtensor.calls import fallback
from dtckpt.dtensor.dtensor import DTensor
from dtckpt.dtensor.mesh.spec import spec_of
from dtckpt.dtensor.ops.engine.primitives import on_locals
from dtckpt.dtensor.ops.engine.table import RULES
from dtckpt.dtensor.redistribute import redistribute_local
from dtckpt.errors import PlacementError, UnsupportedOp

from ..rank_meshes import assert_holds, run_on_mesh, scattered

aten = torch.ops.aten


def made_up(tensor: Tensor) -> Tensor:
    """Return what a wrong kernel might, by the first element."""
    kinds: list[Tensor] = [tensor + 1, tensor.double(), tensor[1:].clone(), (tensor > 0)]
    return kinds[int(tensor.reshape(-1)[0])]


@pytest.fixture
def wrong_op() -> Any:
    library = torch.library.Library("dtckpt_tests", "FRAGMENT")
    library.define("unsure(Tensor x) -> Tensor")
    library.define("unsure_pair(Tensor x) -> (Tensor, Tensor)")
    library.impl("unsure", made_up, "CPU")
    library.impl("unsure", torch.empty_like, "Meta")
    library.impl("unsure_pair", lambda x: (x + 1, made_up(x)), "CPU")  # pyright: ignore
    library.impl("unsure_pair", lambda x: (torch.empty_like(x), torch.empty_like(x)), "Meta")  # pyright: ignore
    ops: Any = torch.ops.dtckpt_tests
    for op, outputs in ((ops.unsure.default, 1), (ops.unsure_pair.default, 2)):

        @register_sharding(op)
        def rule(x: Any, _outputs: int = outputs) -> Any:
            del x
            return [([Shard(0)] * _outputs, [Shard(0)])]

    yield ops
    for op in (ops.unsure.default, ops.unsure_pair.default):
        RULES.pop(op)
        RULES.by_users.discard(op)
    library._destroy()  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("name", ["unsure", "unsure_pair"])
def test_a_local_result_unlike_its_spec_is_refused_in_every_call(wrong_op: Any, name: str) -> None:
    op = getattr(wrong_op, name)

    def body(mesh: DeviceMesh) -> None:
        def of(first: int) -> DTensor:
            return DTensor.from_local(torch.full((2, 3), float(first)), mesh, [Shard(0)])

        with pytest.raises(PlacementError, match=rf"{name}.default: this rank got float64\[2, 3\]"):
            op(of(1))  # which is planned
        for _ in range(3):
            found = op(of(0))
            assert_holds(found[0] if name == "unsure_pair" else found, torch.ones(4, 3))
            for first, got in ((1, "float64[2, 3]"), (2, "float32[1, 3]"), (3, "bool[2, 3]")):
                with pytest.raises(PlacementError, match="expected float32") as raised:
                    op(of(first))
                assert got in str(raised.value)

    run_on_mesh((2,), body)


def doubled(local: Tensor) -> list[Tensor]:
    return [local.double()]


def test_local_functions_of_decompositions_are_held_to_their_specs() -> None:
    def body(mesh: DeviceMesh) -> None:
        x = scattered(torch.ones(4), mesh, [Shard(0)])
        with pytest.raises(PlacementError, match=r"this rank got float64\[2\], expected float32"):
            on_locals(doubled, [x], [x.spec])

    run_on_mesh((2,), body)


def test_a_redistribute_takes_what_its_source_says() -> None:
    def body(mesh: DeviceMesh) -> None:
        x = scattered(torch.ones(4, 2), mesh, [Shard(0)])
        whole = x.spec.replicated()
        for local in (x.to_local().double(), x.to_local()[:1]):
            with pytest.raises(PlacementError, match="the local tensor is"):
                redistribute_local(local, x.spec, whole)
        wide = spec_of(mesh, (Replicate(),), (4, 2), None, torch.float64)
        with pytest.raises(PlacementError, match="cast or reshape before"):
            redistribute_local(x.to_local(), x.spec, wide)

    run_on_mesh((2,), body)


_COMPARISONS = ("eq_", "ne_", "lt_", "le_", "gt_", "ge_")
_VIEWS: tuple[Any, ...] = (
    lambda t: t.view(-1),  # pyright: ignore
    lambda t: t.diagonal(),  # pyright: ignore
    lambda t: t[:, 1:3],  # pyright: ignore
    lambda t: t.t(),  # pyright: ignore
)


@pytest.mark.parametrize("placements", [(Partial(), Shard(0)), (Shard(1), Partial())])
def test_comparisons_in_place_write_numbers_of_the_dtype_of_the_view(placements: Any) -> None:
    whole = torch.arange(32.0).view(4, 8).remainder(5)

    def body(mesh: DeviceMesh) -> None:
        for view in _VIEWS:
            for name in (*_COMPARISONS, "logical_not_", "logical_or_", "logical_xor_"):
                args: tuple[Any, ...] = (2,) if name in _COMPARISONS else ()
                expected, x = whole.clone(), scattered(whole, mesh, placements)
                if name in ("logical_or_", "logical_xor_"):
                    other = view(whole).flip(0).contiguous()
                    args = (other,)
                getattr(view(expected), name)(*args)
                given = [
                    scattered(a, mesh, [Replicate()] * 2) if args and isinstance(a, Tensor) else a
                    for a in args
                ]
                try:
                    seen = getattr(view(x), name)(*given)
                except PlacementError as error:
                    assert "would not reach" in str(error)  # noqa: PT017
                    continue
                assert_holds(x, expected)
                assert_holds(seen, view(expected))

    run_on_mesh((2, 2), body)


_REDUCTIONS: dict[str, Any] = {
    "sum": lambda x, out: torch.sum(x, 0, out=out),  # pyright: ignore
    "nansum": lambda x, out: torch.nansum(x, 0, out=out),  # pyright: ignore
    "mean": lambda x, out: torch.mean(x, 0, out=out),  # pyright: ignore
    "prod": lambda x, out: torch.prod(x, 0, out=out),  # pyright: ignore
    "var": lambda x, out: torch.var(x, 0, out=out),  # pyright: ignore
    "std": lambda x, out: torch.std(x, 0, out=out),  # pyright: ignore
    "cumsum": lambda x, out: torch.cumsum(x, 0, out=out),  # pyright: ignore
    "cumprod": lambda x, out: torch.cumprod(x, 0, out=out),  # pyright: ignore
}


@pytest.mark.parametrize("name", _REDUCTIONS)
def test_reductions_compute_in_the_dtype_of_out(name: str) -> None:
    run = _REDUCTIONS[name]
    numbers = torch.tensor([16777216.0, 1.0, 1.0, 0.3, 1.0, -0.7, 2.5, 0.1]).view(4, 2)
    given = [(numbers, (torch.float64, torch.bfloat16, torch.int32))]
    small = torch.tensor([200, 100, 2, 3, 5, 7, 1, 300]).view(4, 2)
    given += [(small, (torch.uint8, torch.int32, torch.float64))]

    def body(mesh: DeviceMesh) -> None:
        for whole, dtypes in given:
            for dtype in dtypes:
                shape = whole.shape if name.startswith("cum") else (2,)
                for placement in (Shard(0), Shard(1), Replicate()):
                    x = scattered(whole, mesh, [placement])
                    ours = DTensor.from_local(torch.zeros(shape, dtype=dtype), mesh)
                    expected = torch.zeros(shape, dtype=dtype)
                    try:
                        run(whole, expected)
                    except RuntimeError:
                        with pytest.raises(RuntimeError, match=r"cast|not implemented|dtype"):
                            run(x, ours)
                        assert not ours.to_local().any()
                        continue
                    run(x, ours)
                    close = 2e-2 if dtype == torch.bfloat16 else 1e-12
                    found = ours.full_tensor()
                    torch.testing.assert_close(found, expected, rtol=close, atol=0)

    run_on_mesh((2,), body)


_REFUSING_OUT: dict[str, Any] = {
    "all": lambda x, out: torch.all(x, 0, out=out),  # pyright: ignore
    "any": lambda x, out: torch.any(x, 0, out=out),  # pyright: ignore
    "amax": lambda x, out: torch.amax(x, 0, out=out),  # pyright: ignore
    "amin": lambda x, out: torch.amin(x, 0, out=out),  # pyright: ignore
    "argmax": lambda x, out: torch.argmax(x, 0, out=out),  # pyright: ignore
    "neg": lambda x, out: torch.neg(x[0], out=out),  # pyright: ignore
    "abs": lambda x, out: torch.abs(x[0], out=out),  # pyright: ignore
    "logsumexp": lambda x, out: torch.logsumexp(x, 0, out=out),  # pyright: ignore
    "mm": lambda x, out: torch.mv(x.t(), x[:, 0], out=out),  # pyright: ignore
}


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("name", _REFUSING_OUT)
def test_out_has_the_dtypes_that_kernels_take(name: str) -> None:
    run = _REFUSING_OUT[name]
    source = torch.tensor([[0.25, 0.0], [1.5, -0.5], [0.75, 0.25]])
    dtypes = (torch.uint8, torch.bool, torch.int64, torch.float32, torch.float64, torch.complex64)

    def body(mesh: DeviceMesh) -> None:
        for whole in (source, source + 0.5j, source > 0, source.long()):
            for dtype in dtypes:
                ours = DTensor.from_local(torch.zeros(2, dtype=dtype), mesh)
                expected = torch.zeros(2, dtype=dtype)
                x = scattered(whole, mesh, [Shard(0)])
                try:
                    run(whole, expected)
                except (RuntimeError, TypeError) as error:  # by the release of torch
                    with pytest.raises(type(error)):
                        run(x, ours)
                    assert not ours.to_local().any()
                    continue
                run(x, ours)
                torch.testing.assert_close(ours.full_tensor(), expected)

    run_on_mesh((2,), body)


def test_errors_of_decompositions_go_out(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def decomposition(xs: list[Tensor], *_: Any) -> Tensor:
        x = xs[0]
        total = x.sum()
        tried.append(x.device.type)
        if not x.is_meta:
            total.item()
            raise PlacementError("no more than this")
        return total

    op = aten._chunk_cat.default
    monkeypatch.setattr(fallback, "decompositions", lambda: {op: decomposition})

    def body(mesh: DeviceMesh) -> None:
        x = scattered(torch.ones(4), mesh, [Shard(0)])
        for _ in range(2):
            with pytest.raises(PlacementError, match="no more than this"):
                op([x], 0, 2)

    run_on_mesh((2,), body)
    assert sorted(tried) == ["cpu"] * 4 + ["meta"] * 2


@pytest.mark.filterwarnings("ignore:.*has no sharding rule:UserWarning")
def test_a_decomposition_without_what_it_needs_is_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def decomposition(xs: list[Tensor], *_: Any) -> Tensor:
        assert xs[0].is_meta
        raise UnsupportedOp("there is no such operator")

    op = aten._chunk_cat.default
    monkeypatch.setattr(fallback, "decompositions", lambda: {op: decomposition})

    def body(mesh: DeviceMesh) -> None:
        whole = torch.arange(4.0)
        x = scattered(whole, mesh, [Shard(0)])
        assert_holds(op([x], 0, 2), aten._chunk_cat.default([whole], 0, 2))

    run_on_mesh((2,), body)


def test_a_view_in_name_only_is_decomposed() -> None:
    whole = torch.arange(24.0).view(4, 6)

    def body(mesh: DeviceMesh) -> None:
        view = scattered(whole, mesh, [Shard(1)]).reshape(-1)
        expected = aten._chunk_cat.default([whole.reshape(-1)], 0, 2)
        assert_holds(aten._chunk_cat.default([view], 0, 2), expected)

    run_on_mesh((2,), body)


@pytest.mark.parametrize("numbers", [(2.5, 1), (1, 2.5), (2.0, 3)])
def test_a_rank_that_multiplies_nothing_takes_fractions_as_the_others(numbers: Any) -> None:
    alpha, beta = numbers

    def body(mesh: DeviceMesh) -> None:
        addend, left, right = torch.arange(16).view(4, 4), torch.ones(4, 1).long(), torch.ones(1, 4)
        expected = torch.addmm(addend, left, right.long(), alpha=alpha, beta=beta)
        found = torch.addmm(
            scattered(addend, mesh, [Replicate()]),
            scattered(left, mesh, [Shard(1)]),
            scattered(right.long(), mesh, [Shard(0)]),
            alpha=alpha,
            beta=beta,
        )
        assert_holds(found, expected)

    run_on_mesh((2,), body)


def test_a_small_addend_of_a_product_of_nothing_is_brought_to_the_shape_of_the_result() -> None:
    # One device returns the addend as small as it came, and warns.
    def body(mesh: DeviceMesh) -> None:
        for shape in ((), (1,)):
            addend = scattered(torch.ones(shape), mesh, [Replicate()])
            matrix = scattered(torch.ones(5, 0), mesh, [Shard(0)])
            vector = scattered(torch.ones(0), mesh, [Replicate()])
            assert_holds(torch.addmv(addend, matrix, vector), torch.ones(5))

    run_on_mesh((2,), body)


_REFUSED: dict[str, Any] = {
    "floor_divide": lambda i, f: i // 0,  # pyright: ignore
    "remainder": lambda i, f: i % 0,  # pyright: ignore
    "fmod": lambda i, f: torch.fmod(i, 0),  # pyright: ignore
    "remainder_": lambda i, f: i.remainder_(0),  # pyright: ignore
    "div": lambda i, f: torch.div(i, 0, rounding_mode="floor"),  # pyright: ignore
    "pad": lambda i, f: torch.nn.functional.pad(i, (0, 2), value=300),  # pyright: ignore
    "pad after": lambda i, f: torch.nn.functional.pad(i, (1, 1), value=math.nan),  # pyright: ignore
    "addmv": lambda i, f: torch.addmv(i, i[:, None], i[:1], alpha=math.inf),  # pyright: ignore
    "addmm_": lambda i, f: i[:, None].addmm_(i[:, None], i[:, None], beta=300),  # pyright: ignore
    "cumsum": lambda i, f: f[:, None].cumsum(1, dtype=torch.bool),  # pyright: ignore
    "cumprod_": lambda i, f: (f > 0)[:, None].cumprod_(1),  # pyright: ignore
    "cummax": lambda i, f: f.to(torch.complex64).cummax(0),  # pyright: ignore
    "softmax": lambda i, f: i[:, None].softmax(1),  # pyright: ignore
    "log_softmax": lambda i, f: f[:, None].log_softmax(1, dtype=torch.int32),  # pyright: ignore
    "nansum": lambda i, f: f[:, None].nansum(1, dtype=torch.complex64),  # pyright: ignore
    "var": lambda i, f: i[:, None].var(1),  # pyright: ignore
    "std": lambda i, f: i.std(0),  # pyright: ignore
    "amax": lambda i, f: f[:, None].to(torch.complex64).amax(1),  # pyright: ignore
    "max": lambda i, f: f[:, None].to(torch.complex64).max(1),  # pyright: ignore
    "argmax": lambda i, f: (f > 0)[:, None].argmax(1),  # pyright: ignore
    "median": lambda i, f: (f > 0)[:, None].median(1),  # pyright: ignore
    "mode": lambda i, f: f[:, None].to(torch.complex64).mode(1),  # pyright: ignore
    "mm": lambda i, f: (f > 0)[:, None] @ (f > 0)[:, None],  # pyright: ignore
    "cdist": lambda i, f: torch.cdist(f[:, None].half(), f[:, None].half()),  # pyright: ignore
    "add_": lambda i, f: f[:, None].expand(1, 3).add_(1),  # pyright: ignore
    "mul_": lambda i, f: f[:, None].expand(1, 3).mul_(f),  # pyright: ignore
    "copy_": lambda i, f: f[:, None].expand(1, 3).copy_(f),  # pyright: ignore
}


@pytest.mark.parametrize("name", _REFUSED)
def test_ranks_without_elements_raise_what_the_others_raise(name: str) -> None:
    whole = torch.ones(1, dtype=torch.int8), torch.ones(1)
    with pytest.raises((RuntimeError, TypeError)) as expected:  # by the release of torch
        _REFUSED[name](*whole)
    text = str(expected.value).split("\n")[0]

    def body(mesh: DeviceMesh) -> None:
        for _ in range(2):
            given = [scattered(t, mesh, [Shard(0)]) for t in whole]
            with pytest.raises(expected.type) as raised:
                _REFUSED[name](*given)
            assert str(raised.value).split("\n")[0] == text
            assert_holds(given[1], whole[1])
            assert_holds(given[0] // 2, whole[0] // 2)

    run_on_mesh((2,), body)


_DIVISIONS: dict[str, Any] = {
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "floor_divide": torch.floor_divide,
    "div": lambda a, b: torch.div(a, b, rounding_mode="trunc"),  # pyright: ignore
    "number divided": lambda a, b: 5 // b,  # pyright: ignore
    "remainder_": lambda a, b: a.remainder_(b),  # pyright: ignore
    "floor_divide_": lambda a, b: a.floor_divide_(b),  # pyright: ignore
}


@pytest.mark.parametrize("placement", [Shard(0), Partial("min"), Partial("sum"), Replicate()])
@pytest.mark.parametrize("name", _DIVISIONS)
def test_integers_divided_by_a_tensor_with_a_zero_are_refused_on_all_ranks(
    name: str, placement: Any
) -> None:
    dividend, divisor = torch.arange(7), torch.tensor([0, 1, 2, 3, -4, 5, 6])

    def body(mesh: DeviceMesh) -> None:
        for _ in range(2):
            zero, none = (scattered(t, mesh, [placement]) for t in (divisor, divisor.abs() + 1))
            with pytest.raises(RuntimeError, match=r"ZeroDivisionError|failed on another rank"):
                _DIVISIONS[name](scattered(dividend, mesh, [placement]), zero)
            found = _DIVISIONS[name](scattered(dividend, mesh, [placement]), none)
            assert_holds(found, _DIVISIONS[name](dividend.clone(), divisor.abs() + 1))

    run_on_mesh((2,), body)


def test_a_part_without_elements_is_not_divided_and_refused_too() -> None:
    def body(mesh: DeviceMesh) -> None:
        dividend, zero = scattered(torch.ones(1).long(), mesh, [Shard(0)]), torch.tensor(0)
        with pytest.raises(RuntimeError, match=r"ZeroDivisionError|failed on another rank"):
            _ = dividend % zero

    run_on_mesh((2,), body)


def test_writes_that_torch_lets_overlap_are_made() -> None:
    def body(mesh: DeviceMesh) -> None:
        x = scattered(torch.ones(3), mesh, [Shard(0)])
        x[:, None].expand(3, 2).fill_(4)
        assert_holds(x, torch.full((3,), 4.0))

    run_on_mesh((2,), body)
