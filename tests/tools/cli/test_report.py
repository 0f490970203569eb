"""Pages as a browser shows them; pictures of them are kept in ``build/screenshots``."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dtckpt.checkpoint as dcp
from dtckpt.checkpoint.timing.costs import Costs, Span
from dtckpt.dtensor import Mesh
from dtckpt.errors import AccessDenied, ObjectNotFound
from dtckpt.tools.cli.common.console import iec

from .conftest import Run, data_file, document, flip

SCREENSHOTS = Path(__file__).parents[3] / "build" / "screenshots"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium, as the system has it; while it lives, no other event loop runs here."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


class Page:
    """A page that was opened, and all that it has complained of or asked for."""

    def __init__(self, browser: Any, path: Path, *, theme: str = "light") -> None:
        self.at = browser.new_page(viewport={"width": 1300, "height": 900}, color_scheme=theme)
        self.faults: list[str] = []
        self.at.on("pageerror", self._failed)
        self.at.on("console", self._heard)
        self.at.on("request", self._asked)
        self.at.goto(path.as_uri())
        self.at.wait_for_selector("html[data-drawn]")

    def _failed(self, error: Any) -> None:
        self.faults.append(str(error))

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(message.text)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith(("file:", "data:", "blob:")):
            self.faults.append(request.url)

    def close(self, name: str) -> None:
        """Keep a picture; the page must not have complained."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.at.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)
        self.at.close()
        assert not self.faults


CUBE = """() => {
  const starts = (rank) => [4, 2, 1].map((bit) => (rank & bit ? 2 : 0));
  const boxes = [...Array(8).keys()].map((rank) => [...starts(rank), 2, 2, 2, [rank]]);
  const at = tensors.shape.push([4, 4, 4]) - 1;
  const place = document.createElement("div");
  place.append(...sharding(at, { axes: [["a", 2], ["b", 2], ["c", 2]], boxes }));
  const choices = () => [...place.querySelectorAll("select")].map((select) => select.value);
  const found = [choices()];
  const last = place.querySelectorAll("select")[2];
  last.value = 1;
  last.dispatchEvent(new Event("change"));
  place.querySelectorAll("rect.box")[2].dispatchEvent(new Event("click"));
  return [...found, choices()];
}"""
"""Choices for a tensor that is cut in three dims: at first, and after a coordinate and a box were
chosen; the last choice is which slice is drawn."""


def contrast(at: Any) -> float:
    """The least contrast of texts with what is behind them, in the treemap of a page."""
    colours = at.evaluate(
        """() => [...document.querySelectorAll("#modules .slice")].map((slice) => {
          const of = (part) => getComputedStyle(slice.querySelector(part)).fill;
          return [of("path.surface"), of(".slicetext text")];
        })"""
    )
    return min(ratio(*pair) for pair in colours)


def ratio(one: str, other: str) -> float:
    """The contrast of two colours as WCAG defines it."""
    lights = sorted(map(luminance, (one, other)))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def page_data(path: Path) -> dict[str, Any]:
    """The document in a page."""
    (text,) = re.findall(r'id="data">(.*?)</script>', path.read_text("utf-8"), re.DOTALL)
    return json.loads(text)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 4 ranks with names that are not harmless."""
    root = tmp_path_factory.mktemp("sharded")
    model = {
        f"layers.{i}.{name}": torch.arange(rows * 8.0).reshape(rows, 8)
        for i in range(3)
        for name, rows in (("up", 16), ("down", 8))
    }
    hostile = "</script><script>document.title='owned'</script>"
    dcp.save({"model": model, hostile: torch.tensor(1.0), "note": "<b>&"}, root / "one")
    rules = "*.up=S(0),S(1); model/*=R,S(0)"
    dcp.reshard(root / "one", root / "four", Mesh.parse("dp=2,tp=2"), dcp.parse_rules(rules))
    return root / "four"


def test_a_checkpoint_in_a_browser(run: Run, sharded: Path, tmp_path: Path, browser: Any) -> None:
    out = tmp_path / "page.html"
    result = run("report", sharded, "-o", out)
    assert result.exit_code == 0, result.output
    page = Page(browser, out)
    at = page.at
    assert at.title() == "four - dtckpt"
    assert at.inner_text("#told").startswith("7 of 7 tensors")
    at.keyboard.press("/")
    at.keyboard.type("*.up")
    assert at.inner_text("#told").startswith("3 of 7 tensors")
    at.keyboard.press("ArrowDown")
    at.keyboard.press("ArrowDown")
    at.keyboard.press("Enter")
    assert at.inner_text("#details h2") == "model/layers.1.up"
    assert at.evaluate("document.activeElement.id") == "details"  # whence Tab goes on into it
    assert at.inner_text("#details [role=status]") == "[0:8, 0:4] on rank 0"
    assert at.locator("#details rect.box").count() == 4
    at.select_option("#details select >> nth=0", "1")
    assert at.inner_text("#details [role=status]") == "[8:16, 0:4] on rank 2"
    at.locator("#details rect.box").nth(1).click()
    assert at.inner_text("#details [role=status]") == "[0:8, 4:8] on rank 1"
    chosen = [at.locator("#details select").nth(axis).input_value() for axis in (0, 1)]
    assert chosen == ["0", "1"]
    told = at.inner_text("#details dl")
    assert "S(0),S(1) on dp=2,tp=2" in told
    assert "Mean\n63.5" in told
    assert at.locator("#details rect.bin").count() == 64
    at.keyboard.press("Escape")
    assert at.locator("#details").is_hidden()
    assert at.evaluate("document.activeElement.textContent") == "model/layers.1.up"
    at.click("th >> text=Bytes")
    assert at.get_attribute("th[aria-sort=descending]", "aria-sort") == "descending"
    at.fill("#search", "script")
    assert at.locator("#table tbody tr").count() == 1
    at.fill("#search", "")
    at.locator("#modules .slice").last.click()  # a leaf, which is drawn last
    assert re.fullmatch(r"model/layers\.\d\.(up|down)", at.inner_text("#details h2"))
    at.focus("#modules select")
    at.keyboard.type("model")
    at.keyboard.press("Tab")
    at.keyboard.press("Enter")
    assert at.evaluate("document.activeElement.textContent") == "model"
    assert at.input_value("#search") == "model/*"
    assert at.inner_text("#told").startswith("6 of 7 tensors")
    at.click("text=Theme")
    assert at.get_attribute("html", "data-theme") == "dark"
    page.close("checkpoint")


def test_a_comparison(run: Run, sharded: Path, tmp_path: Path, browser: Any) -> None:
    down = torch.arange(64.0).reshape(8, 8)
    lost = down.clone()
    lost[0, :2] = torch.tensor([float("nan"), float("inf")])
    up = torch.arange(128.0).reshape(16, 8) + 1
    other = {"layers.0.up": up, "layers.0.down": lost, "layers.1.down": down, "new": torch.ones(3)}
    dcp.save({"model": other}, tmp_path / "other")
    out = tmp_path / "page.html"
    result = run("report", sharded, "--compare", tmp_path / "other", "-o", out)
    assert result.exit_code == 0, result.output
    found = page_data(out)["comparison"]
    assert (
        found["summary"]
        == "1 tensor the same in every bit (1 of them laid out otherwise), 8 differences."
    )
    rows = {name: row for name, *row in found["rows"]}
    assert rows["model/new"] == ["only there", None, None, None, None]
    what, odd, drift, max_abs, cosine = rows["model/layers.0.up"]
    assert (what, odd, max_abs) == ("another layout; 128 of 128 values", 0, 1.0)
    before = np.arange(128.0)
    assert drift == pytest.approx(np.sqrt(128) / np.linalg.norm(before))
    assert cosine == pytest.approx(
        before @ (before + 1) / np.linalg.norm(before) / np.linalg.norm(before + 1)
    )
    names = list(rows)
    assert names.index("model/layers.0.down") < names.index(
        "model/layers.0.up"
    )  # no drift tells NaN
    assert rows["model/layers.0.down"][1:3] == [2, 0.0]
    page = Page(browser, out)
    at = page.at
    assert at.locator("#comparison tbody tr").count() == len(rows) == 8
    at.click("#comparison >> text=model/layers.0.down")
    assert at.inner_text("#details h2") == "model/layers.0.down"
    page.close("comparison")


def test_drift_of_a_run(run: Run, tmp_path: Path, browser: Any) -> None:
    still = torch.full((8,), 3.0)
    for step, scale in ((1, 1.0), (2, 1.5), (3, 1.5), (4, 1.5), (5, 1.5)):
        layers = {f"layers.{i}.w": still + (scale if i else 0) for i in range(2)}
        if step >= 4:
            layers["layers.1.w"] = torch.full((8,), float("nan"))
        state = {"model": layers, "count": torch.tensor(step), "b<i>": torch.zeros(4) + (step > 2)}
        dcp.save(state, tmp_path / f"run/step-{step}")
    for data in (tmp_path / "run").glob("step-5/data/*/*"):
        data.unlink()
    (tmp_path / "run/step-6/data").mkdir(parents=True)
    out = tmp_path / "page.html"
    assert run("report", tmp_path / "run", "-o", out).exit_code == 0
    found = page_data(out)
    assert [step["state"] for step in found["steps"]] == ["committed"] * 4 + [
        "damaged",
        "incomplete",
    ]
    drift = found["drift"]
    assert drift["modules"] == ["model/layers.0.w", "model/layers.1.w", "b<i>"]
    first, second, third = drift["pairs"]
    assert first["modules"] == [0.0, 0.125, 0.0]
    assert (first["from"], first["to"], first["num_weights"], first["num_changed"]) == (
        "step-1",
        "step-2",
        3,
        1,
    )
    assert [name for name, *_ in first["most"]] == ["model/layers.1.w"]
    assert (second["modules"], second["odd"], second["most"]) == ([0.0, 0.0, "inf"], [], [])
    assert (third["modules"], third["odd"], third["bad"]) == (
        [0.0] * 3,
        [1],
        [["model/layers.1.w", 8, 0]],
    )
    page = Page(browser, out)
    at = page.at
    assert at.locator("#drift .heatmaplayer image").count() == 2
    assert at.locator(at.get_attribute("a.skip", "href")).count() == 1
    assert at.locator("#drift .legendtext", has_text="b<i>").count() == 1
    at.click("#drift summary")
    cells = at.locator("#drift details tbody tr").all_inner_texts()
    assert cells[2].split("\t") == ["b<i>", "unchanged", "was zero", "unchanged"]
    assert cells[1].split("\t")[1:] == ["0.125", "unchanged", "NaN or Inf"]
    assert "damaged" in at.inner_text("#steps")
    page.close("run-drift")


def test_a_long_run_is_looked_at_in_parts(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(1, 8):
        dcp.save(
            {"w": torch.full((2,), float(step)), "f": torch.ones(9)}, tmp_path / f"run/step-{step}"
        )
    (data,) = (tmp_path / "run").glob("step-4/data/*/*.safetensors")
    flip(data, data.read_bytes().index(np.full(2, 4, "<f4").tobytes()))
    out = tmp_path / "page.html"
    assert run("report", tmp_path / "run", "-o", out, "--max-steps", "3").exit_code == 0
    drift = page_data(out)["drift"]
    assert (drift["num_steps"], drift["num_compared"]) == (7, 3)
    assert [(pair["from"], pair["to"]) for pair in drift["pairs"]] == [
        ("step-1", "step-4"),
        ("step-4", "step-7"),
    ]
    assert all(data.name in pair["problem"] for pair in drift["pairs"])

    def gone(*_: object, **__: object) -> None:
        raise ObjectNotFound("step-4", "it is not there")

    monkeypatch.setattr("dtckpt.checkpoint.examining.movement.compare", gone)
    assert run("report", tmp_path / "run", "-o", out, "--max-steps", "3").exit_code == 0
    assert "not there" in page_data(out)["drift"]["pairs"][1]["problem"]

    def refused(*_: object, **__: object) -> None:
        raise AccessDenied("step-4", "it is not for you")

    monkeypatch.setattr("dtckpt.checkpoint.examining.movement.compare", refused)
    assert run("report", tmp_path / "run", "-o", out).exit_code == 3


def traced(traces: Path, checkpoint: Path, step: int) -> None:
    """Leave the trace of a save of two ranks."""
    for rank in (0, 1):
        span = Span(phase="write", started_at=1.0 + step, seconds=2.0 + rank)
        costs = Costs(
            kind="save",
            url=str(checkpoint),
            rank=rank,
            host="h",
            num_ranks=2,
            started_at=1.0 + step,
            seconds=4.0,
            stall_seconds=0.25,
            phases=(),
            spans=(span,),
            summary=(),
        )
        dcp.Tracing(traces)(costs, dcp.Occasion("save", step))


def test_times_of_a_save(run: Run, sharded: Path, tmp_path: Path, browser: Any) -> None:
    out = tmp_path / "page.html"
    traced(tmp_path / "traces", sharded, 4)
    args = ("report", sharded, "-o", out, "--no-statistics", "--timing")
    assert run(*args, tmp_path / "traces").exit_code == 0
    assert page_data(out)["timing"] == {
        "phases": ["write"],
        "ranks": [0, 1],
        "seconds": [[2.0, 3.0]],
    }
    page = Page(browser, out)
    assert page.at.locator("#timing .heatmaplayer").count() == 1
    page.close("timing")
    (tmp_path / "other").mkdir()
    result = run(*args, tmp_path / "other")
    assert result.exit_code == 2
    assert "no save of" in result.stderr
    (tmp_path / "bad.json").write_text("{")
    assert run(*args, tmp_path / "bad.json").exit_code == 2


def test_odd_names_and_numbers(run: Run, tmp_path: Path, browser: Any) -> None:
    link = '<a href="https:evil.example">link<b>'
    values = {
        "exact": torch.tensor([2**60 + 1, 3]),
        "wide": torch.tensor([1.7e308, -1.7e308], dtype=torch.float64),
        "bad": torch.tensor([float("nan"), float("inf"), 1.0]),
        "none": torch.full((2,), float("nan")),
        "empty": torch.empty(0, 4),
        "turned\u202e": torch.ones(1 << 8),
    }
    tied = torch.ones(4)
    inner = {"x&lt;": torch.ones(4096), "y": torch.ones(4096)}
    state = values | {"tied": (tied, tied), "__proto__": torch.ones(1), link: inner}
    dcp.save(state, tmp_path / "odd")
    out = tmp_path / "page.html"
    assert run("report", tmp_path / "odd", "-o", out).exit_code == 0
    assert sum(page_data(out)["held"].values()) == sum(page_data(out)["tensors"]["stored"])
    page = Page(browser, out, theme="dark")
    at = page.at
    assert at.get_attribute("html", "data-theme") == "dark"
    assert at.locator("#modules .slicetext a").count() == 0  # Plotly takes names for HTML
    assert link in at.locator("#modules").text_content()
    at.set_viewport_size({"width": 420, "height": 800})
    assert at.evaluate("document.documentElement.scrollWidth") <= 420
    cells = {
        row.split("\t")[0]: row.split("\t")[1:]
        for row in at.locator("#table tbody tr").all_inner_texts()
    }
    assert cells["exact"][4:6] == ["3", "1,152,921,504,606,846,977"]
    assert cells["bad"][4:] == ["1", "1", "1", "0", "2"]
    assert cells["none"][4:] == ["", "", "", "", "2"]
    assert "turned\\u202e" in cells
    at.click("th >> text=Max")  # descending, what has none last
    order = at.locator("#table tbody td:first-child").all_inner_texts()
    assert order[:2] == ["wide", "exact"]
    assert set(order[-2:]) == {"none", "empty"}
    sizes = [0, 1023, 1075, 1177, 494848, 1048575, 1048576, 2**53]
    assert at.evaluate(f"{sizes}.map(size)") == list(map(iec, sizes))
    assert contrast(at) >= 4.5
    assert at.evaluate(CUBE) == [["0", "0", "0", "0"], ["1", "0", "1", "2"]]
    page.close("odd-dark-narrow")


def test_a_damaged_checkpoint_has_a_page(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    data = data_file(checkpoint)
    flip(data, data.stat().st_size // 2)
    out = tmp_path / "page.html"
    result = run("report", checkpoint, "-o", out, "--json")
    assert result.exit_code == 1
    told = document(result)
    assert (told["kind"], told["num_bytes"]) == ("checkpoint-page", out.stat().st_size)
    assert data.name in told["problem"]
    assert page_data(out)["problem"] == told["problem"]
    assert "statistics" not in page_data(out)


def test_refusals_come_before_tensors_are_read(
    run: Run, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr("dtckpt.checkpoint.examining.statistics.statistics_of", read)
    monkeypatch.setattr("dtckpt.checkpoint.compare", read)
    (tmp_path / "traces").mkdir()
    one, out = saved / "step-100", tmp_path / "page.html"
    for args, code, text in (
        ((one, "-o", tmp_path / "no/page.html"), 2, "no is no folder"),
        ((one, "-o", tmp_path), 2, "is a directory"),
        ((one, "-o", out, "--compare", tmp_path / "no"), 3, "does not exist. Check the path"),
        ((one, "-o", out, "--compare", saved), 3, "but a directory of them: step-100"),
        ((saved, "-o", out, "--compare", one), 2, "is a run"),
        ((one, "-o", out, "--timing", tmp_path / "no"), 2, "does not exist"),
        ((one, "-o", out, "--timing", tmp_path / "traces"), 2, "no save of"),
        ((saved, "-o", out, "--timing", tmp_path / "traces"), 2, "no save of"),
    ):
        result = run("report", *args)
        assert result.exit_code == code, result.output
        assert text in result.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["traces"]


def test_a_page_that_cannot_be_written_leaves_the_one_before(
    run: Run, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "page.html"
    out.write_text("before")

    def full(_: Path, __: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    result = run("report", saved / "step-20", "-o", out)
    assert result.exit_code == 3
    assert f"cannot write {out}: No space left on device" in result.stderr
    assert out.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_plotly_is_asked_for(
    run: Run, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(_: str) -> None:
        return None

    monkeypatch.setattr("dtckpt.tools.cli.report.page.find_spec", find)
    result = run("report", saved, "-o", tmp_path / "page.html")
    assert result.exit_code == 3
    assert 'pip install "dtckpt[report]"' in result.stderr


def test_a_run_in_a_browser(run: Run, saved: Path, tmp_path: Path, browser: Any) -> None:
    out = tmp_path / "page.html"
    traced(tmp_path / "traces", saved / "step-20", 20)
    traced(tmp_path / "traces", saved / "step-100", 100)
    result = run("report", saved, "-o", out, "--timing", tmp_path / "traces")
    assert result.exit_code == 0, result.output
    assert [one["step"] for one in page_data(out)["stalls"]] == [20, 100]
    page = Page(browser, out)
    assert page.at.inner_text("h1") == "Run"
    assert [step["number"] for step in page_data(out)["steps"]] == [20, 100, 300]
    assert page.at.locator("#steps tbody tr").count() == 3
    told = page.at.inner_text("#drift tbody tr").split("\t")
    assert told[:4] == ["20 to 100", "0", "0", "13"]  # which have nothing in common
    page.close("run")


def test_ten_thousand_tensors(run: Run, tmp_path: Path, browser: Any) -> None:
    names = [f"layers.{i}.experts.{j}.{n}" for i in range(50) for j in range(50) for n in "abcd"]
    dcp.save({name: torch.zeros(2) for name in names}, tmp_path / "many")
    run("report", tmp_path / "many", "-o", tmp_path / "page.html")
    page = Page(browser, tmp_path / "page.html")
    assert page.at.inner_text("#told").startswith("10,000 of 10,000 tensors")
    page.at.fill("#search", "layers.7.experts.13.")
    assert page.at.inner_text("#told").startswith("4 of 10,000")
    assert page.at.locator("#modules .slice").count() < 1000  # drawing all takes seconds
    page.close("ten-thousand")
