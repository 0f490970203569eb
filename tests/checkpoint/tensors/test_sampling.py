"""Which bytes of large tensors are compared."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from dtckpt.checkpoint.tensors.local_tensor import local_tensor
from dtckpt.checkpoint.tensors.sampling import PAGE_BYTES, WHOLE_BYTES, Sampling

KINDS = [
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.complex64,
    torch.bool,
    torch.uint16,
    torch.float8_e4m3fn,
]


def digest(tensor: torch.Tensor, sampling: Sampling) -> str:
    [(_, found)] = local_tensor("w", tensor).digests(sampling)
    return found


def sampled_bytes(sampling: Sampling, num_bytes: int) -> set[int]:
    """Return which bytes of a tensor of so many are compared."""
    pages, start = sampling.pages(num_bytes)
    starts = [start + int(page) * PAGE_BYTES for page in pages]
    return set(itertools.chain.from_iterable(range(s, s + PAGE_BYTES) for s in starts))


def test_small_tensors_are_compared_whole() -> None:
    tensor = torch.zeros(WHOLE_BYTES // 4)
    assert Sampling(b"").of(tensor) is tensor
    other = tensor.clone()
    other[-1] = 1.0
    assert digest(tensor, Sampling(b"")) != digest(other, Sampling(b""))


@pytest.mark.parametrize("num_bytes", [WHOLE_BYTES + 2, 5_000_000, 100 << 20])
def test_a_sixteenth_of_large_ones_and_at_most_a_mebibyte(num_bytes: int) -> None:
    tensor = torch.zeros(num_bytes, dtype=torch.uint8)
    sample = Sampling(b"1").of(tensor)
    assert PAGE_BYTES <= sample.nbytes <= min(num_bytes / 16 + PAGE_BYTES, 1 << 20)
    assert sample.nbytes == len(sampled_bytes(Sampling(b"1"), num_bytes)), "no page twice"
    assert max(sampled_bytes(Sampling(b"1"), num_bytes)) < num_bytes


def test_every_byte_has_its_turn() -> None:
    num_bytes = WHOLE_BYTES + 1234
    seen: set[int] = set()
    for save in range(300):
        seen |= sampled_bytes(Sampling(save.to_bytes(4, "big")), num_bytes)
    assert seen == set(range(num_bytes))


def test_a_page_out_of_every_stretch_and_not_always_the_same_of_each() -> None:
    """So what reaches over two stretches is found, and what comes again at intervals as well."""
    pages, _ = Sampling(b"2").pages(16 << 20)
    assert (pages // 16 == np.arange(256)).all()
    assert len(set((pages % 16).tolist())) == 16


def test_it_shows_the_elements_that_it_says() -> None:
    tensor = torch.arange(300_001, dtype=torch.int32)
    for seed in range(8):
        sampling = Sampling(bytes([seed]))
        pages, start = sampling.pages(tensor.nbytes)
        first = (start + pages * PAGE_BYTES) // 4
        found = sampling.of(tensor).view(torch.int32)
        assert found[:, 0].tolist() == first.tolist()
        assert (found - found[:, :1] == torch.arange(PAGE_BYTES // 4)).all()


@pytest.mark.parametrize("dtype", KINDS)
def test_strides_do_not_count(dtype: torch.dtype) -> None:
    bits = torch.randint(0, 2, (3, 700, 300), dtype=torch.uint8)
    whole = bits.to(dtype) if dtype not in (torch.uint16, torch.float8_e4m3fn) else bits
    if whole is bits:
        whole = bits.repeat_interleave(dtype.itemsize, -1).view(dtype)
    for seed in range(4):
        sampling = Sampling(bytes([seed]))
        expected = digest(whole.contiguous(), sampling)
        strided = whole.permute(2, 0, 1).contiguous().permute(1, 2, 0)
        assert not strided.is_contiguous()
        assert digest(strided, sampling) == expected
        spread = torch.stack([whole, whole], -1)[..., 0]
        assert digest(spread, sampling) == expected


def test_what_is_conjugated_or_negated_lazily_is_compared_by_its_values() -> None:
    whole = torch.view_as_complex(torch.randn(200, 400, 2))
    sampling = Sampling(b"3")
    assert digest(whole.conj(), sampling) == digest(whole.conj().resolve_conj(), sampling)
    assert digest(whole.conj(), sampling) != digest(whole, sampling)
    negative = torch.randn(400, 400, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    assert digest(negative, sampling) == digest(negative.resolve_neg().contiguous(), sampling)


def test_the_choice_depends_on_the_seed_and_on_the_size_alone() -> None:
    """Ranks may know one tensor by two names, or two tensors that are equal."""
    tensor = torch.randn(1000, 1000)
    assert digest(tensor, Sampling(b"4")) == digest(tensor.clone(), Sampling(b"4"))
    assert digest(tensor, Sampling(b"4")) != digest(tensor, Sampling(b"5"))
