"""Plans from traced models compute what the models did, and send the sums of rows alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtckpt.checkpoint import parse_rules
from dtckpt.dtensor import DeviceMesh, PlacementError
from dtckpt.dtensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
    placement_rules,
    placement_rules_of,
    plan_of,
)
from tests.dtensor.rank_meshes import collectives, run_on_mesh


class Gpt(nn.Module):
    """One block: attention with sizes of the whole in its code, and a gated block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 16)
        self.norms = nn.ModuleList([nn.LayerNorm(16), nn.LayerNorm(16)])
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.gate, self.up = nn.Linear(16, 20, bias=False), nn.Linear(16, 20, bias=False)
        self.down = nn.Linear(20, 16, bias=False)
        self.head = nn.Linear(16, 17, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        h = self.norms[0](x)
        parts = (
            layer(h).view(*tokens.shape, 4, 4).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).reshape(*tokens.shape, 16))
        h = self.norms[1](x)
        return self.head(x + self.down(F.silu(self.gate(h)) * self.up(h)))


TOKENS = torch.arange(10).view(2, 5)
ATTENTION, GATED = ["q", "k", "v"], ["gate", "up"]


def traced(model: nn.Module, *args: Tensor, **options: Any) -> Any:
    return torch.export.export(model, args, **options)


def kinds(plan: Any) -> dict[str, list[str]]:
    styles = {"columns": ColwiseParallel, "rows": RowwiseParallel}
    return {
        kind: [name for name, style in plan.items() if type(style) is cls]
        for kind, cls in styles.items()
    }


@pytest.mark.parametrize(
    ("ranks", "columns", "rows"),
    [
        (2, [*ATTENTION, *GATED], ["o", "down"]),
        (4, [*ATTENTION, *GATED], ["o", "down"]),
        (3, GATED, ["down"]),  # which 4 heads are not for
        (1, [*ATTENTION, *GATED], ["o", "down"]),
    ],
)
def test_pairs_of_layers_are_found(ranks: int, columns: list[str], rows: list[str]) -> None:
    assert kinds(plan_of(traced(Gpt(), TOKENS), ranks)) == {"columns": columns, "rows": rows}


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_plan_computes_what_the_model_did(ranks: int) -> None:
    torch.manual_seed(0)
    model = Gpt()
    program = traced(model, TOKENS)
    plan = plan_of(program, ranks)
    model(TOKENS).sin().sum().backward()
    expected, grads = model(TOKENS).detach(), {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()

    def body(mesh: DeviceMesh) -> str:
        ours: Any = parallelize_module(copy.deepcopy(model), mesh, plan)
        with collectives() as seen, torch.no_grad():
            torch.testing.assert_close(ours(TOKENS), expected)
        assert len(seen) == len(kinds(plan)["rows"])
        ours(TOKENS).sin().sum().backward()
        for name, parameter in ours.named_parameters():
            whole = parameter.grad
            whole = whole.full_tensor() if name.split(".")[0] in plan else whole
            torch.testing.assert_close(whole, grads[name], rtol=1e-4, atol=1e-5)
        return placement_rules(ours)

    rules = placement_rules_of(program, plan, ranks)
    assert sorted(rules.split("; ")) == sorted(run_on_mesh((ranks,), body)[0].split("; "))
    parse_rules(rules)


class Odd(nn.Module):
    """Layers that are no pairs: a norm between them, one that runs twice, one that is the last."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.b(self.norm(self.a(x)))
        twice = self.c(torch.relu(self.c(x)))
        return twice, self.d(x).softmax(-1)


def test_what_is_no_pair_stays_whole() -> None:
    assert plan_of(traced(Odd(), torch.ones(2, 8)), 2) == {}


class Joined(nn.Module):
    """Features that come to a layer in another cut than its weight has."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))
        self.joined, self.taken, self.padded = nn.Linear(16, 4), nn.Linear(6, 4), nn.Linear(11, 4)

    def forward(self, x: Tensor) -> Tensor:
        joined = self.joined(torch.cat([self.a(x), self.b(x)], -1))
        return joined + self.taken(self.c(x)[..., :6]) + self.padded(F.pad(self.d(x), (0, 3)))


def test_layers_between_which_features_would_move_stay_whole() -> None:
    assert plan_of(traced(Joined(), torch.ones(2, 8)), 2) == {}


def test_what_cannot_be_told_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    sizes = {"input": {0: torch.export.Dim("batch")}}
    with pytest.raises(PlacementError, match="without dynamic_shapes"):
        plan_of(traced(model, torch.ones(4, 4), dynamic_shapes=sizes), 2)
    program = traced(model, torch.ones(4, 4))
    with pytest.raises(PlacementError, match="number of ranks, got 0"):
        plan_of(program, 0)
    with pytest.raises(PlacementError, match=r"called 'up'; there are 0\.weight, 2\.weight"):
        placement_rules_of(program, {"up": ColwiseParallel()}, 2)
