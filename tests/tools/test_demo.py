"""The parts of the demo; the whole of it is run by ``make demo``."""

from __future__ import annotations

import io
import threading
from pathlib import Path

import pytest
import torch
from rich.console import Console

import dtckpt.checkpoint as ck
from dtckpt.storage import Call, MemoryStore
from tools.demo.checks import (
    Claims,
    checkpoint_differences,
    count_dtensors,
    largest_difference,
    relative_differences,
    same_bits,
    state_by_names,
    state_differences,
)
from tools.demo.ending import KillHalfway
from tools.demo.launch import Outcome, Training, last_words
from tools.demo.model import Config, make_model
from tools.demo.s3 import Bucket, missing_packages
from tools.demo.text import Corpus, find_texts, write_corpus

SMALL = Config(context=9, width=12, heads=2, hidden=5, blocks=1)


@pytest.fixture
def corpus() -> Corpus:
    return Corpus(bytes(range(256)) * 4)


@pytest.fixture
def claims() -> Claims:
    return Claims(Console(file=io.StringIO(), width=80))


def printed(claims: Claims) -> str:
    file = claims._console.file  # pyright: ignore[reportPrivateUsage]
    assert isinstance(file, io.StringIO)
    return file.getvalue()


class TestText:
    def test_it_is_documentation_and_the_standard_library(self, tmp_path: Path) -> None:
        (tmp_path / "docs" / "deep").mkdir(parents=True)
        for name in ("README.md", "docs/a.md", "docs/deep/b.md", "docs/no.txt"):
            (tmp_path / name).write_text(name)
        texts = find_texts(tmp_path)
        assert [path.name for path in texts[:3]] == ["README.md", "a.md", "b.md"]
        assert {path.suffix for path in texts[3:]} == {".py"}
        assert "argparse.py" in {path.name for path in texts}

    def test_it_is_joined(self, tmp_path: Path) -> None:
        for name in "ab":
            (tmp_path / name).write_text(name)
        target = tmp_path / "corpus"
        assert write_corpus([tmp_path / "a", tmp_path / "b"], target) == 4
        assert target.read_text() == "a\n\nb"

    def test_batches_follow_from_the_step_alone(self, corpus: Corpus) -> None:
        again = Corpus(bytes(range(256)) * 4)
        again.batch(1, rows=6, context=9)
        one, two = (c.batch(5, rows=6, context=9) for c in (corpus, again))
        assert torch.equal(one.inputs, two.inputs)
        assert not torch.equal(one.inputs, corpus.batch(6, rows=6, context=9).inputs)

    def test_targets_are_the_bytes_that_follow(self, corpus: Corpus) -> None:
        batch = corpus.batch(1, rows=6, context=9)
        assert batch.inputs.shape == batch.targets.shape == (6, 9)
        assert torch.equal(batch.targets, (batch.inputs + 1) % 256)

    @pytest.mark.parametrize("count", [1, 2, 3, 6, 8])
    def test_shares_are_the_batch_whoever_takes_part(self, corpus: Corpus, count: int) -> None:
        batch = corpus.batch(3, rows=6, context=9)
        shares = [batch.share(index, count) for index in range(count)]
        assert torch.equal(torch.cat([share.inputs for share in shares]), batch.inputs)
        assert torch.equal(torch.cat([share.targets for share in shares]), batch.targets)

    def test_a_text_may_be_as_short_as_one_passage(self) -> None:
        assert Corpus(bytes(10)).batch(1, rows=2, context=9).inputs.shape == (2, 9)


class TestModel:
    @torch.no_grad()
    def test_an_untrained_model_guesses_evenly(self, corpus: Corpus) -> None:
        batch = corpus.batch(1, rows=4, context=9)
        loss = make_model(0, SMALL)(batch.inputs, batch.targets)
        assert loss.shape == ()
        assert float(loss) == pytest.approx(torch.log(torch.tensor(256.0)).item(), abs=0.5)

    def test_it_sees_no_later_byte(self, corpus: Corpus) -> None:
        batch = corpus.batch(1, rows=4, context=9)
        changed = batch.inputs.clone()
        changed[:, -1] += 1
        model = make_model(0, SMALL)
        ignored = batch.targets.clone()
        ignored[:, -1] = -100  # the index that the loss leaves out
        assert torch.equal(model(batch.inputs, ignored), model(changed, ignored))

    def test_it_depends_on_the_seed_alone(self) -> None:
        torch.manual_seed(1)
        one = make_model(7, SMALL).state_dict()
        torch.manual_seed(2)
        two = make_model(7, SMALL).state_dict()
        assert all(torch.equal(one[name], two[name]) for name in one)
        assert not torch.equal(make_model(8, SMALL).head.weight, one["head.weight"])

    def test_the_demo_has_uneven_shards(self) -> None:
        config = Config()
        parameters = sum(p.numel() for p in make_model(0).parameters())
        assert 1e6 < parameters < 3e6
        assert config.hidden % 2
        assert (config.width // 2) % 2
        assert config.context % 2


class TestClaims:
    def test_all_hold(self, claims: Claims) -> None:
        assert claims.check("fire is hot", True, "300 [C]")
        assert claims.exit_code == 0
        assert "holds" in printed(claims)
        assert "300 [C]" in printed(claims)

    def test_one_fails(self, claims: Claims) -> None:
        claims.check("fire is hot", True)
        assert not claims.check("fire is cold", False)
        assert claims.exit_code == 1
        assert (claims.num_checked, claims.failed) == (2, ["fire is cold"])
        assert "FAILED" in printed(claims)

    def test_nothing_checked_is_no_success(self, claims: Claims) -> None:
        assert claims.exit_code == 1


class TestComparisons:
    def test_bits(self) -> None:
        zero, nan = torch.tensor([0.0]), torch.tensor([float("nan")])
        assert same_bits(nan, nan.clone())
        assert not same_bits(zero, -zero)
        assert not same_bits(zero, zero.double())
        assert not same_bits(zero, zero[0])

    def test_losses_that_are_no_numbers_never_agree(self) -> None:
        nan, inf = float("nan"), float("inf")
        assert relative_differences([nan, 1.0, inf, 0.0], [1.0, nan, inf, 0.0]) == [inf] * 4

    def test_state_and_checkpoint(self) -> None:
        state = {"a": torch.arange(3.0), "b": [1, {"c": torch.ones(())}], "d": (None, "x")}
        store = MemoryStore()
        ck.save(state, store, no_dist=True)
        with ck.open(store) as checkpoint:
            saved = checkpoint.state_dict()
            assert state_differences(state, saved) == []
            changed = {"a": torch.arange(3.0) + 1, "b": [1.0, state["b"][1]], "d": (None, "y")}
            assert state_differences(changed, saved) == ["/a", "/b/0", "/d/1"]
            assert state_differences({"a": state["a"]}, saved) == [": keys ['b', 'd']"]
            assert state_differences(state | {"b": [1]}, saved) == ["/b: 1 items, 2 saved"]
        assert count_dtensors(state) == 0

    def test_two_checkpoints(self) -> None:
        stores = [MemoryStore(), MemoryStore()]
        for number, store in enumerate(stores):
            state = {"model": {"same": torch.ones(2), "other": torch.tensor([1.0, 2.0 + number])}}
            ck.save(state | {"extra": torch.ones(number + 1)}, store, no_dist=True)
        with ck.open(stores[0]) as one, ck.open(stores[1]) as other:
            assert checkpoint_differences(one, one) == []
            assert checkpoint_differences(one, other) == ["model/other", "extra"]
            assert largest_difference(one, other, "model/") == 1.0


def test_kill_halfway() -> None:
    plan = KillHalfway(threading.Event())
    calls = [
        Call(number=1, op="stat", name="manifest.json"),
        Call(number=2, op="create", name="data/a/00002.safetensors", size=100),
        Call(number=3, op="write", name="data/a/00002.safetensors", size=49),
        Call(number=4, op="write", name="data/a/00002.safetensors", size=30),
    ]
    assert [plan(call) is not None for call in calls] == [False, False, False, True]


def test_worker_arguments_leave_out_what_is_not_given() -> None:
    job = Training(
        name="x",
        worker="w",
        checkpoints=Path("c"),
        ranks=2,
        mesh="dp=2",
        steps=4,
        save_every=2,
        kill_rank=0,
    )
    arguments = job.arguments()
    assert arguments[arguments.index("--kill-rank") + 1] == "0"
    assert "--kill-step" not in arguments


def test_outcome_keeps_losses_by_step() -> None:
    events = (
        {"event": "resume", "step": 1},
        {"event": "step", "step": 2, "loss": 3.0},
        {"event": "save", "step": 2},
    )
    outcome = Outcome(exit_code=0, log="", events=events, errors={})
    assert outcome.losses() == {2: 3.0}
    assert outcome.resumed() == events[0]


def test_last_words_are_those_of_the_ranks() -> None:
    words = [f"line {n}" for n in range(60)] + ["ValueError: no"]
    own = [
        "W1 torch/distributed/elastic/multiprocessing/api.py:1] Sending",
        "Traceback",
        "Failures:",
    ]
    cause = ["Root Cause (first observed failure):", "  rank : 2"]
    told = last_words("\n".join(words + own + cause)).splitlines()
    assert told == [*words[-40:], *cause]
    assert last_words("ValueError: no\n") == "ValueError: no"


def test_s3_is_reached_alike_by_options_and_environment() -> None:
    bucket = Bucket("s3://b", "http://127.0.0.1:1")
    options, environment = bucket.storage_options(), bucket.environment()
    assert options["key"] == environment["AWS_ACCESS_KEY_ID"]
    assert options["client_kwargs"]["endpoint_url"] == environment["AWS_ENDPOINT_URL"]
    assert missing_packages() == []


def test_an_optimizer_is_compared_by_the_names_it_was_saved_under() -> None:
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    store = MemoryStore()
    ck.save({"model": model, "optim": optimizer}, store)
    with ck.open(store) as checkpoint:
        saved = checkpoint.state_dict()["optim"]
        assert state_differences(state_by_names(optimizer, model), saved) == []
        optimizer.step()
        assert "/state/model/bias/step" in state_differences(
            state_by_names(optimizer, model), saved
        )
