"""Packed sequences of DTensors, and networks that run on them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from dtckpt.dtensor import DeviceMesh, DTensor, Replicate, Shard, distribute_module

from ..rank_meshes import run_on_mesh, scattered

PADDED = torch.arange(60.0).view(4, 5, 3).sin()
LENGTHS = torch.tensor([2, 4, 1, 3])


def results(lstm: nn.Module, padded: Tensor, lengths: Tensor) -> list[Tensor]:
    """Return outputs, lengths, last states and the gradient of what was packed."""
    padded = padded.detach().requires_grad_()
    packed = pack_padded_sequence(padded, lengths, batch_first=True, enforce_sorted=False)
    out, (hidden, cell) = lstm(packed)
    outputs, sizes = pad_packed_sequence(out, batch_first=True)
    outputs.square().sum().backward()
    assert padded.grad is not None
    return [outputs, sizes, hidden, cell, padded.grad]


def test_packed_sequences_run_through_an_lstm_as_on_one_device() -> None:
    """``pad_packed_sequence`` and the LSTM asked a DTensor of batch sizes for its memory."""
    torch.manual_seed(0)
    lstm = nn.LSTM(3, 4, batch_first=True)
    expected = results(lstm, PADDED, LENGTHS)

    def body(mesh: DeviceMesh) -> None:
        model = distribute_module(copy.deepcopy(lstm), mesh)
        for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
            padded = scattered(PADDED, mesh, [placement])
            for lengths in (LENGTHS, scattered(LENGTHS, mesh, [Shard(0)])):
                for made, one in zip(results(model, padded, lengths), expected, strict=True):
                    whole = made.full_tensor() if isinstance(made, DTensor) else made
                    torch.testing.assert_close(whole, one)

    run_on_mesh((2,), body)


def test_lengths_that_do_not_fit_are_the_same_error_on_all_ranks() -> None:
    def body(mesh: DeviceMesh) -> None:
        padded = scattered(PADDED, mesh, [Shard(0)])
        for lengths, told in (([3, 3], "equal to batch_size"), ([4, 3, 0, 0], "greater than 0")):
            with pytest.raises(RuntimeError, match=told):
                pack_padded_sequence(padded, torch.tensor(lengths), batch_first=True)
        with pytest.raises(RuntimeError, match="data"):  # read in C++: docs/dtensor.md, "Errors"
            torch.tensor_split(padded, scattered(torch.tensor([1, 3]), mesh, [Replicate()]))

    run_on_mesh((2,), body)
