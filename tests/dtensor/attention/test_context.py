"""``context_parallel``: models of plain tensors over parts of the sequence."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as imported_before
from torch.utils.checkpoint import CheckpointError, checkpoint

from dtckpt.dtensor import DeviceMesh, HeadTail, Shard, distribute_tensor
from dtckpt.dtensor.debug import CommDebugMode
from dtckpt.dtensor.experimental import context_parallel
from dtckpt.dtensor.experimental.attention import context_parallel_unshard, set_rotate_method
from dtckpt.errors import PlacementError, UnsupportedOp
from tests.dtensor.rank_meshes import run_on_mesh

TORCHS = F.scaled_dot_product_attention


def whole(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Model(nn.Module):
    """A GPT of two blocks that asks torch for attention; positions are an argument."""

    def __init__(self, attention: Any = None, *, recomputes: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.qkv = nn.ModuleList(nn.Linear(8, 24) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.attention = attention
        self.recomputes = recomputes
        self.double()
        for number, parameter in enumerate(self.parameters()):
            parameter.data = whole(*parameter.shape, seed=number) / 3

    def block(self, x: Tensor, qkv: nn.Module, out: nn.Module) -> Tensor:
        heads = [p.unflatten(-1, (2, 4)).transpose(1, 2) for p in qkv(x).chunk(3, -1)]
        attention = self.attention or F.scaled_dot_product_attention
        return x + out(attention(*heads, is_causal=True).transpose(1, 2).flatten(2))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(tokens) + positions
        for qkv, out in zip(self.qkv, self.out, strict=True):
            if self.recomputes:
                x = checkpoint(self.block, x, qkv, out, use_reentrant=False)
            else:
                x = self.block(x, qkv, out)
        return x @ self.tokens.weight.T


def batch(length: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.arange(2 * length).view(2, length) * 7 % 11
    return tokens, tokens.roll(-1, 1), whole(length, 8, seed=1)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("length", [16, 13])
@pytest.mark.parametrize(
    ("attention", "recomputes"), [(None, False), (None, True), (imported_before, False)]
)
def test_a_model_has_the_loss_and_the_gradients_of_one_device(
    length: int, attention: Any, recomputes: bool
) -> None:
    tokens, labels, positions = batch(length)
    alone = Model()
    loss = F.cross_entropy(alone(tokens, positions).flatten(0, 1), labels.flatten())
    loss.backward()

    def body(mesh: DeviceMesh) -> None:
        model = Model(attention, recomputes=recomputes)
        buffers = [tensor.clone() for tensor in batch(length)]
        own_tokens, own_labels, own_positions = buffers
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 0]):
            assert own_tokens.shape[1] == own_positions.shape[0] < length
            logits = model(own_tokens, own_positions)
            part = F.cross_entropy(logits.flatten(0, 1), own_labels.flatten(), reduction="sum")
            (part / tokens.numel()).backward()
        total = distribute_tensor(torch.zeros((), dtype=torch.float64), mesh).to_local()
        total += part.detach() / tokens.numel()
        group = mesh.get_group()
        sums = [total, *gradients(model)]
        for tensor in sums:
            group.allreduce([tensor]).wait()
        for found, wanted in zip(sums, [loss.detach(), *gradients(alone)], strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
        for buffer, before in zip(buffers, batch(length), strict=True):
            assert torch.equal(buffer, before)

    run_on_mesh((3,), body)
    assert F.scaled_dot_product_attention is TORCHS


def test_what_is_computed_again_without_the_other_ranks_is_noticed() -> None:
    def body(mesh: DeviceMesh) -> None:
        tokens, _, positions = (tensor.clone() for tensor in batch(16))
        for attention in (None, imported_before):
            model = Model(attention, recomputes=True)
            with context_parallel(mesh, buffers=[tokens, positions], buffer_seq_dims=[1, 0]):
                loss = model(tokens.clone(), positions.clone()).sum()
            with pytest.raises(CheckpointError, match="different metadata"):
                loss.backward()

    run_on_mesh((2,), body)


@pytest.mark.parametrize("method", ["allgather", "alltoall"])
def test_the_rotate_method_is_that_of_the_process(method: Any) -> None:
    q = whole(1, 2, 16, 4)
    wanted = TORCHS(q, q, q, is_causal=True)
    set_rotate_method(method)

    def body(mesh: DeviceMesh) -> None:
        own = q.clone()
        keys = "all_gather" if method == "allgather" else "all_to_all"
        with context_parallel(mesh, buffers=[own], buffer_seq_dims=[2]):
            with CommDebugMode() as counted:
                out = F.scaled_dot_product_attention(own, own, own, is_causal=True)
            assert counted.comm_counts == {keys: 1}
            assert counted.comm_counts["agreement"] == 1, "of sizes"
            (found,) = context_parallel_unshard(mesh, [out], [2])
        torch.testing.assert_close(found, wanted)

    try:
        run_on_mesh((2,), body)
    finally:
        set_rotate_method("ring")


def test_buffers_are_cut_as_head_tail_and_are_what_they_were_in_the_end() -> None:
    values = whole(13, 2)

    def body(mesh: DeviceMesh) -> None:
        kept, let_go, view = values.clone(), values.T.clone(), values.clone()
        row = view[3]
        part = distribute_tensor(values, mesh, [HeadTail(0)]).to_local()
        buffers: dict[str, Any] = {"buffers": [kept, let_go, view], "buffer_seq_dims": [0, -1, 0]}

        def fail() -> None:
            with context_parallel(mesh, **buffers, no_restore_buffers=iter([let_go])):
                assert torch.equal(kept, part)
                assert torch.equal(let_go, part.T)
                assert torch.equal(row, values[3])
                kept.zero_()
                raise RuntimeError("stop here")

        with pytest.raises(RuntimeError, match="stop here"):
            fail()
        assert torch.equal(kept, values)
        assert torch.equal(let_go, part.T)
        assert row.data_ptr() == view[3].data_ptr()
        assert torch.equal(row, values[3])

    run_on_mesh((3,), body)


def test_buffers_of_inference_mode() -> None:
    q = whole(1, 2, 13, 4)
    wanted = TORCHS(q, q, q, is_causal=True)

    def body(mesh: DeviceMesh) -> None:
        with torch.inference_mode():
            made = q.clone()
        for own, infers in ((made, False), (made, True), (q.clone(), True)):
            was = own.is_inference()
            with torch.inference_mode(infers):
                with context_parallel(mesh, buffers=[own], buffer_seq_dims=[2]):
                    out = F.scaled_dot_product_attention(own, own, own, is_causal=True)
                    (found,) = context_parallel_unshard(mesh, [out], [2])
                torch.testing.assert_close(found, wanted)
            assert torch.equal(own, q)
            assert own.is_inference() == was

    run_on_mesh((2,), body)


def test_whole_tensors_come_back_by_one_exchange() -> None:
    values, more = whole(13, 2), torch.arange(13)

    def body(mesh: DeviceMesh) -> None:
        first, second = values.clone(), more.clone()
        with context_parallel(mesh, buffers=[first, second], buffer_seq_dims=[0, 0]):
            parts = [first * 2, second]
            with CommDebugMode() as counted:
                found = context_parallel_unshard(mesh, parts, [0, 0])
        assert counted.comm_counts == {"all_gather": 1}
        assert torch.equal(found[0], values * 2)
        assert torch.equal(found[1], more)
        assert context_parallel_unshard(mesh, [], []) == []
        with pytest.raises(PlacementError, match="local shapes do not fit"):
            context_parallel_unshard(mesh, [values[: 1 + 2 * mesh.get_rank()]], [0])
        with pytest.raises(TypeError, match="leave it out"):
            context_parallel_unshard(mesh, parts, [0, 0], object())

    run_on_mesh((2,), body)


def test_tensors_of_three_dims_or_more_than_four_and_unlike_lengths() -> None:
    q, kv = whole(3, 8, 4), whole(3, 20, 4, seed=1)
    wanted = TORCHS(q, kv, kv)

    def body(mesh: DeviceMesh) -> None:
        for lead in ((), (2, 2)):
            own_q, own_kv = q.expand(*lead, *q.shape).clone(), kv.expand(*lead, *kv.shape).clone()
            with context_parallel(mesh, buffers=[own_q, own_kv], buffer_seq_dims=[-2, -2]):
                out = F.scaled_dot_product_attention(own_q, own_kv, value=own_kv)
                (found,) = context_parallel_unshard(mesh, [out], [-2])
            torch.testing.assert_close(found, wanted.expand_as(found))

    run_on_mesh((2,), body)


def test_with_heads_sharded_along_another_axis() -> None:
    """By tensor parallelism, whose DTensors know nothing of the sequence; or all on one mesh."""
    q = whole(2, 4, 13, 4)
    leaf = q.clone().requires_grad_()
    out = TORCHS(leaf, leaf, leaf, is_causal=True)
    out.square().sum().backward()

    def body(mesh: DeviceMesh) -> None:
        own = q.clone()
        with context_parallel(mesh["cp"], buffers=[own], buffer_seq_dims=[2]):
            heads: Any = distribute_tensor(own, mesh["tp"], [Shard(1)], src_data_rank=None)
            heads.requires_grad_()
            part: Any = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
            part.square().sum().backward()
            assert part.placements == heads.grad.placements == (Shard(1),)
            for found, wanted in ((part.detach(), out.detach()), (heads.grad, leaf.grad)):
                (come,) = context_parallel_unshard(mesh["cp"], [found.full_tensor()], [2])
                torch.testing.assert_close(come, wanted)
            both: Any = distribute_tensor(q, mesh, [HeadTail(2), Shard(1)], src_data_rank=None)
            made: Any = F.scaled_dot_product_attention(both, both, both, is_causal=True)
            assert made.placements == both.placements
            torch.testing.assert_close(made.full_tensor(), out.detach())
            cut = distribute_tensor(own, mesh["tp"], [Shard(2)], src_data_rank=None)
            with pytest.raises(PlacementError, match="a part of one already"):
                F.scaled_dot_product_attention(cut, cut, cut)

    run_on_mesh((2, 2), body, ("cp", "tp"))


def test_modules_of_torch_are_routed_or_refused() -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, batch_first=True).double()
    x = whole(2, 8, 8)
    wanted = module(x, x, x, need_weights=False)[0]

    def body(mesh: DeviceMesh) -> None:
        own = x.clone()
        with context_parallel(mesh, buffers=[own], buffer_seq_dims=[1]):
            out = module(own, own, own, need_weights=False)[0]
            (found,) = context_parallel_unshard(mesh, [out.detach()], [1])
            torch.testing.assert_close(found, wanted.detach())
            with pytest.raises(UnsupportedOp, match="need_weights=False"):
                module(own, own, own)

    run_on_mesh((2,), body)


def test_autocast_casts_as_it_does_for_torchs() -> None:
    q, v = whole(1, 2, 16, 4).float(), whole(1, 2, 16, 3, seed=1).float()

    def attend(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        leaf = query.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = F.scaled_dot_product_attention(leaf, query.bfloat16(), value, is_causal=True)
            out.float().square().sum().backward()
        assert out.dtype == torch.bfloat16
        assert leaf.grad is not None
        assert leaf.grad.dtype == torch.float32
        return out.detach(), leaf.grad

    wanted = attend(q, v)

    def body(mesh: DeviceMesh) -> None:
        own_q, own_v = q.clone(), v.clone()
        with context_parallel(mesh, buffers=[own_q, own_v], buffer_seq_dims=[2, 2]):
            found = context_parallel_unshard(mesh, attend(own_q, own_v), [2, 2])
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-1)

    run_on_mesh((2,), body)


def test_without_buffers_the_ranks_tell_what_they_have() -> None:
    q = whole(1, 2, 13, 4)
    wanted = TORCHS(q, q, q, is_causal=True)

    def body(mesh: DeviceMesh) -> None:
        own = distribute_tensor(q, mesh, [HeadTail(2)]).to_local()
        with context_parallel(mesh):
            out = F.scaled_dot_product_attention(own, own, own, is_causal=True)
            long = q[:, :, : 2 + mesh.get_rank()]
            told = r"the ranks have \[2, 3, 4\] positions, expected \[3, 3, 3\] of 9"
            with pytest.raises(PlacementError, match=told):
                F.scaled_dot_product_attention(own, long, long)
        (found,) = context_parallel_unshard(mesh, [out], [2])
        torch.testing.assert_close(found, wanted)

    run_on_mesh((3,), body)


def test_others_are_left_alone() -> None:
    """Attention in other threads, of DTensors, and after the block."""
    q = whole(2, 2, 4, 4)
    wanted = TORCHS(q, q, q)

    def body(mesh: DeviceMesh) -> None:
        found: list[Tensor] = []
        with context_parallel(mesh):
            other = threading.Thread(
                target=lambda: found.append(F.scaled_dot_product_attention(q, q, q))
            )
            other.start()
            other.join()
            batched = distribute_tensor(q, mesh, [Shard(0)])
            made: Any = F.scaled_dot_product_attention(batched, batched, batched)
            found.append(made.full_tensor())
        found.append(F.scaled_dot_product_attention(q, q, q))
        for tensor in found:
            torch.testing.assert_close(tensor, wanted)

    run_on_mesh((2,), body)


def test_a_backward_pass_after_the_block_raises_where_it_needs_buffers() -> None:
    q = whole(1, 1, 8, 4)

    def body(mesh: DeviceMesh) -> None:
        own, weight = q.clone(), whole(4, 4).requires_grad_()
        with context_parallel(mesh, buffers=[own], buffer_seq_dims=[2]):
            out = own @ weight
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()

    run_on_mesh((2,), body)


def test_what_is_wrong_is_said_before_anything_changes() -> None:
    plain = whole(8, 2)

    def refused(mesh: DeviceMesh, error: type[Exception], text: str, **options: Any) -> None:
        with pytest.raises(error, match=text), context_parallel(mesh, **options):
            pytest.fail("the block was entered")
        assert plain.shape == (8, 2)
        assert F.scaled_dot_product_attention is TORCHS

    def body(mesh: DeviceMesh) -> None:
        flat = mesh["cp"]
        both: dict[str, Any] = {"buffers": [plain], "buffer_seq_dims": [0]}
        refused(mesh, PlacementError, "one of 'dp', 'cp'", **both)
        refused(flat, ValueError, "1 buffers and 2 dims", buffers=[plain], buffer_seq_dims=[0, 1])
        refused(flat, ValueError, "1 buffers and 0 dims", buffers=[plain])
        parameter = nn.Parameter(plain.clone())
        for value in (parameter, distribute_tensor(plain, flat), [1.0]):
            refused(
                flat,
                TypeError,
                "buffer 1 is .*, expected",
                buffers=[plain, value],
                buffer_seq_dims=[0, 0],
            )
        grad = plain.clone().requires_grad_()
        refused(flat, ValueError, "requires grad", buffers=[plain, grad], buffer_seq_dims=[0, 0])
        refused(flat, PlacementError, "has no dim 2", buffers=[plain], buffer_seq_dims=[2])
        refused(flat, ValueError, "given twice", buffers=[plain, plain], buffer_seq_dims=[0, 0])
        refused(flat, ValueError, "must be among", **both, no_restore_buffers={plain.clone()})
        refused(
            flat,
            PlacementError,
            "sequences of 8 and 9 have parts of one size",
            buffers=[plain, whole(9)],
            buffer_seq_dims=[0, 0],
        )

    run_on_mesh((1, 2), body, ("dp", "cp"))


def test_attention_that_cannot_be_shared_is_refused() -> None:
    q = whole(1, 2, 8, 4)

    def body(mesh: DeviceMesh) -> None:
        own = q.clone()
        with context_parallel(mesh, buffers=[own], buffer_seq_dims=[2]):
            with pytest.raises(UnsupportedOp, match="is_causal=True"):
                F.scaled_dot_product_attention(own, own, own, torch.ones(4, 4))
            with pytest.raises(UnsupportedOp, match="dropout_p"):
                F.scaled_dot_product_attention(own, own, own, dropout_p=0.5)
            with pytest.raises(PlacementError, match="outside of it"):
                F.scaled_dot_product_attention(own, q, q)
            with pytest.raises(PlacementError, match="do not go together"):
                F.scaled_dot_product_attention(own, own[:, :1], own[:, :1])
            with pytest.raises(PlacementError, match="make them one"):
                F.scaled_dot_product_attention(own, own.float(), own)

    run_on_mesh((2,), body)


@pytest.mark.parametrize("method", ["ring", "alltoall", "allgather"])
def test_what_is_wrong_on_one_rank_is_told_to_all(method: Any) -> None:
    q = whole(1, 2, 16, 4)
    told: list[str] = []

    def body(mesh: DeviceMesh) -> None:
        is_odd = mesh.get_rank() == 1

        def refused(length: int, **changed: Any) -> None:
            own = q[:, :, :length].clone()
            with context_parallel(mesh, buffers=[own], buffer_seq_dims=[2]):
                given: dict[str, Any] = {"query": own, "key": own, "value": own}
                with pytest.raises(PlacementError) as raised:
                    F.scaled_dot_product_attention(**given | (changed if is_odd else {}))
                told.append(str(raised.value))

        refused(15 if is_odd else 16)
        refused(16, query=q[:, :, :7])
        refused(16, key=q[:, :, :7], value=q[:, :, :7])
        refused(16, value=q[:, :, :8, :2])
        refused(16, query=q[:, :, :8].float())
        refused(16, is_causal=True)

    set_rotate_method(method)
    try:
        run_on_mesh((2,), body)
    finally:
        set_rotate_method("ring")
    assert len(told) == 12
    assert sum("the ranks have [8, 7] positions, expected [8, 8] of 16" in t for t in told) == 4
    assert sum("call it alike on all" in text for text in told) == 8


def test_where_ranks_do_not_tell_each_other_each_goes_by_its_part() -> None:
    mesh = DeviceMesh("meta", range(2), rank=1)
    own = torch.ones(1, 2, 9, 4, device="meta")
    with context_parallel(mesh, buffers=[own], buffer_seq_dims=[2]):
        assert own.shape[2] == 4
        told = r"rank 1 has \[3\] positions, expected \[4\] of 9"
        with pytest.raises(PlacementError, match=told):
            F.scaled_dot_product_attention(own, own[:, :, 1:], own[:, :, 1:])


class Balancer:
    """As torch's: it tells the order by which its own is undone."""

    def __init__(self, orders: list[list[int]]) -> None:
        self.orders = torch.tensor(orders)

    def _generate_indices(self, restore: bool = False) -> torch.Tensor:
        assert restore
        return self.orders


def test_parts_of_a_balancer_of_torch_are_put_in_order() -> None:
    whole = torch.arange(24.0).view(2, 4, 3)
    order = [[2, 0, 3, 1]]
    of_each = [[2, 0, 3, 1], [3, 2, 1, 0]]

    def body(mesh: DeviceMesh) -> None:
        rank = mesh.get_rank()
        for orders in (order, of_each):
            given = torch.empty_like(whole)
            for row, index in enumerate(orders if len(orders) > 1 else orders * 2):
                given[row, torch.tensor(index)] = whole[row]
            part = given.chunk(2, 1)[rank].contiguous()
            # Restored, element i is the one that the balancer has put to place order[i].
            (found,) = context_parallel_unshard(mesh, [part], [1], Balancer(orders))
            assert found.equal(whole)
        with pytest.raises(PlacementError, match="orders for 2 sequences, the batch has 4"):
            context_parallel_unshard(mesh, [torch.ones(4, 2)], [1], Balancer(of_each))

    run_on_mesh((2,), body)


def test_a_balancer_of_torch_itself() -> None:
    module = pytest.importorskip(
        "torch.distributed.tensor.experimental._context_parallel._load_balancer"
    )
    whole = torch.arange(8.0)

    def body(mesh: DeviceMesh) -> None:
        balancer = module._HeadTailLoadBalancer(8, 2, torch.device("cpu"))
        own = whole.view(4, 2)[[mesh.get_rank(), 3 - mesh.get_rank()]].view(-1)
        (found,) = context_parallel_unshard(mesh, [own], [0], balancer)
        assert found.equal(whole)

    run_on_mesh((2,), body)
