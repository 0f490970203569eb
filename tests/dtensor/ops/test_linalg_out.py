"""Linear algebra that writes to ``out=``: DTensors laid out in any way, and empty ones."""

# pyright: reportUnknownLambdaType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, linalg

from dtckpt.dtensor import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor

from ..rank_meshes import run_on_mesh, scattered

MATRICES = torch.arange(32.0).view(2, 4, 4).sin() + 3 * torch.eye(4)
SYMMETRIC = MATRICES @ MATRICES.mT
RIGHT = torch.arange(24.0).view(2, 4, 3).cos()

Call = Callable[..., Any]
CASES: dict[str, tuple[Call, Sequence[Tensor]]] = {
    "det": (linalg.det, [MATRICES]),
    "slogdet": (linalg.slogdet, [MATRICES]),
    "inv": (linalg.inv, [MATRICES]),
    "inv_ex": (linalg.inv_ex, [MATRICES]),
    "pinv": (linalg.pinv, [MATRICES]),
    "solve": (linalg.solve, [MATRICES, RIGHT]),
    "cholesky": (linalg.cholesky, [SYMMETRIC]),
    "qr": (linalg.qr, [RIGHT]),
    "eigvalsh": (linalg.eigvalsh, [SYMMETRIC]),
    "svdvals": (linalg.svdvals, [RIGHT]),
    "lu_factor": (linalg.lu_factor, [MATRICES]),
    "lu": (linalg.lu, [MATRICES]),
    "lstsq": (linalg.lstsq, [MATRICES, RIGHT]),
    "vector_norm": (linalg.vector_norm, [MATRICES]),
    "matrix_norm": (linalg.matrix_norm, [MATRICES]),
    "cond": (linalg.cond, [MATRICES]),
    "matrix_power": (lambda a, out: linalg.matrix_power(a, 3, out=out), [MATRICES]),
    "multi_dot": (lambda a, b, out: linalg.multi_dot([a[0], b[0]], out=out), [MATRICES, RIGHT]),
    "matmul": (linalg.matmul, [MATRICES, RIGHT]),
}


def several(made: Any) -> list[Tensor]:
    return [made] if isinstance(made, Tensor) else list(made)


def test_out_of_linear_algebra_is_written_however_it_lies() -> None:
    expected = {
        name: several(function(*given, out=None)) for name, (function, given) in CASES.items()
    }

    def body(mesh: DeviceMesh) -> None:
        for name, (function, given) in CASES.items():
            for placement in (Shard(0), Replicate()):
                outs: list[Any] = [
                    distribute_tensor(torch.full_like(one, 7), mesh, [placement])
                    if one.ndim
                    else distribute_tensor(torch.full_like(one, 7), mesh)
                    for one in expected[name]
                ]
                inputs = [scattered(whole, mesh, [Shard(0)]) for whole in given]
                function(*inputs, out=outs[0] if len(outs) == 1 else tuple(outs))
                for out, one in zip(outs, expected[name], strict=True):
                    assert isinstance(out, DTensor)
                    torch.testing.assert_close(out.full_tensor(), one, msg=lambda m, n=name: n + m)

    run_on_mesh((2,), body)


def test_torch_writes_no_rank_of_matrices_to_tensors_of_subclasses() -> None:
    """As docs/dtensor.md says: it assigns the result to the name of ``out`` in C++."""

    def body(mesh: DeviceMesh) -> None:
        matrices = scattered(MATRICES, mesh, [Shard(0)])
        out = distribute_tensor(torch.tensor([7, 7]), mesh)
        linalg.matrix_rank(matrices, out=out)
        assert out.full_tensor().tolist() == [7, 7], "torch writes it now: say so in the page"
        assert linalg.matrix_rank(matrices).full_tensor().tolist() == [4, 4]  # pyright: ignore[reportAttributeAccessIssue]

    run_on_mesh((2,), body)
