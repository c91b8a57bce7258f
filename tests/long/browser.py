"""The live page in a real browser: Debian's chromium, driven by Playwright. Not part of the suite, since it is large:

make test-browser    # apt-get install chromium, first

With SKIPPIPE_PICTURES=folder it leaves pictures of what it saw there.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from skippipe.report.html import write_html
from skippipe.report.run.html import write_run_html
from skippipe.runs.history import read_history
from skippipe.transport.addresses import free_port
from skippipe.transport.keys import PeerList
from tests.helpers.dashboards import HOSTILE, RunFolder, plan_line, plan_of, shown
from tests.helpers.processes import NODES, Place
from tests.helpers.serve_process import Command

playwright = pytest.importorskip("playwright.sync_api")

TIMEOUT_S = 90.0  # for runs on a busy machine
LOOK_MS = 50
DRAWN_S = 5.0  # within which all of a page is there, at any size; under a second on an idle machine
PANELS = ("run", "map", "load", "chart", "curves", "events")
LARGEST_PAGE_BYTES = 2_000_000
SLOWLY = "emulation = { enabled = true, time = 0.02 }\n"  # or it would be over before anybody looks


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium = shutil.which("chromium")
    assert chromium, "no chromium: apt-get install chromium"
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])  # root has no sandbox
        yield found
        found.close()


class Tab:
    """A page, and everything that goes wrong on it."""

    def __init__(
        self, browser: Any, address: str, *, width: int = 1280, scheme: str = "light", panels: Sequence[str] = PANELS
    ) -> None:
        self.wrong: list[str] = []
        self.asked: list[str] = []
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page.set_default_timeout(1000 * TIMEOUT_S)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", lambda said: self.wrong.append(said.text) if said.type == "error" else None)
        self.page.on("dialog", self._startled)
        self.page.on("request", lambda request: self.asked.append(request.url))
        began = time.monotonic()
        self.page.goto(address)
        self.until(f"{list(panels)}.every((name) => document.body.dataset[name])")
        self.drawn_s = time.monotonic() - began

    def _startled(self, dialog: Any) -> None:
        self.wrong.append(dialog.message)
        dialog.dismiss()

    def until(self, holds: str) -> None:
        """The page's own policy forbids what Playwright would wait with."""
        deadline = time.monotonic() + TIMEOUT_S
        while not self.page.evaluate(holds):
            assert time.monotonic() < deadline, f"never: {holds}; the page says: {self.text('body')[:500]}"
            self.page.wait_for_timeout(LOOK_MS)

    def count(self, selector: str) -> int:
        return int(self.page.locator(selector).count())

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).inner_text())

    def cut(self) -> list[str]:
        """Text that begins or ends outside the window; what scrolls sideways by itself does not count."""
        found: list[str] = self.page.evaluate(CUT)
        return found

    @property
    def overflow(self) -> int:
        """Pixels by which the page is wider than the window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - innerWidth"))

    def picture(self, name: str) -> None:
        if folder := os.environ.get("SKIPPIPE_PICTURES"):
            self.page.screenshot(path=str(Path(folder) / name), full_page=True)


CUT = """() => [...document.querySelectorAll("p, h1, h2, h3, dt, dd, li, span, td, th, text")].filter((each) => {
  const { left, right } = each.getBoundingClientRect(), scrolls = each.closest(".scroll:not(#map)");
  return each.textContent.trim() && !scrolls && (left < -1 || right > innerWidth + 1);
}).map((each) => each.textContent)"""
DONE = "Number(document.querySelector('#tiles dd').firstChild.data.replaceAll(',', ''))"


def test_it_renders(browser: Any, tmp_path: Path) -> None:
    run = RunFolder(tmp_path, plan_of(names=[HOSTILE, "<script>alert(2)"]))
    for number in range(6):
        run.iteration(number, 4.0 - number / 5, recorded=number == 4)
    run.event("lost", f"last log lines: {HOSTILE}", HOSTILE)
    run.event("rerouted", "3 lanes go on another way", HOSTILE)
    run.checkpoint(5)
    with shown(tmp_path) as address:
        tab = Tab(browser, address)
        assert tab.text("#tiles dd >> nth=0").split() == ["6", "of", "1,000"]
        assert tab.count("#map .node") == 8
        assert tab.count("#map .node.lost") == 1
        assert tab.page.locator("#map .node.lost text").text_content() == f"{HOSTILE[:17]}…"
        assert tab.count("#map .link") > 0
        assert tab.count("#lanes li") == len(run.plan.lanes)
        assert [HOSTILE in tab.text(f"#events li >> nth={place}") for place in (0, 1, 2)] == [False, True, True]
        assert "checkpointed" in tab.text("#events li >> nth=0")
        assert tab.count("#curves polyline") >= 4
        assert "iteration 5" in tab.text("#chart-count")
        assert is_painted(tab)
        assert tab.count("img, script:not([src])") == 0
        tab.page.locator("#map .node").first.click()
        assert tab.count("#map .path") > 0
        tab.page.locator("#chart-bars").hover(position={"x": 400, "y": 8})
        assert "planned:" in tab.text("#chart-told")
        tab.page.locator("#moment").fill("500")
        assert re.search(r"[1-9]\d* microbatches in flight", tab.text("#moment-told"))
        assert tab.count("#map .flying") > 0
        assert tab.wrong == []
        assert {re.match(r"http://[^/]+", url)[0] for url in tab.asked} == {address}  # type: ignore[index]
        dark = Tab(browser, address, scheme="dark")
        assert background(dark) != background(tab)
        assert is_painted(dark)


def is_painted(tab: Tab) -> bool:
    """Some bar is on the canvas."""
    script = """() => {
      const canvas = document.getElementById("chart-bars"), paper = canvas.getContext("2d");
      const found = paper.getImageData(0, 0, canvas.width, canvas.height).data;
      const colours = new Set();
      for (let at = 0; at < found.length; at += 4) {
        if (found[at + 3] === 255) colours.add(found.slice(at, at + 3).join());
      }
      return colours.size;
    }"""
    return int(tab.page.evaluate(script)) >= 4


def background(tab: Tab) -> str:
    return str(tab.page.evaluate("getComputedStyle(document.body).backgroundColor"))


@pytest.mark.parametrize(("nodes", "stages"), [(20, 4), (200, 8)])
@pytest.mark.parametrize("width", [1280, 390])
def test_usable_at(browser: Any, tmp_path: Path, nodes: int, stages: int, width: int) -> None:
    plan = plan_of(nodes, stages)
    run = RunFolder(tmp_path, plan)
    run.wal(plan_line(plan))
    for number in range(4):
        run.iteration(number, 4.0 - number / 5, recorded=number == 3)
    run.event("lost", "no heartbeat for 5 s", "node-3")
    with shown(tmp_path) as address:
        tab = Tab(browser, address, width=width)
        assert tab.drawn_s < DRAWN_S
        assert tab.overflow <= 0
        assert tab.cut() == []
        assert tab.count(".tick.left") >= 4
        assert tab.count(".tick.below") >= 4
        names = tab.page.evaluate("[...document.querySelectorAll('#map .node title')].map((each) => each.textContent)")
        assert {name.split(" ")[0] for name in names} == {node.name for node in plan.cluster.nodes}
        pairs = {frozenset((use.sender, use.receiver)) for use in plan.expected.links} if plan.expected else set()
        assert tab.count("#map .link") == len(pairs)
        assert tab.count("#lanes li") == len(plan.lanes)
        assert is_painted(tab)
        before = time.monotonic()
        run.iteration(4, 1.0)
        tab.until(f"{DONE} === 5")
        assert time.monotonic() - before < DRAWN_S
        tab.picture(f"{nodes}-{width}.png")
        assert tab.wrong == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_pages_of_a_plan_and_of_a_run(browser: Any, tmp_path: Path, width: int, scheme: str) -> None:
    plan = plan_of(20, 4)
    run = RunFolder(tmp_path, plan)
    run.wal(plan_line(plan))
    for number in range(30):
        run.iteration(number, 4.0 - number / 20, recorded=number in (1, 20))
    run.event("lost", "no heartbeat for 5 s", "node-3", 5)
    write_html(plan, plan.promise, tmp_path / "plan.html")
    write_run_html(read_history(tmp_path), tmp_path / "report.html")
    grounds = {"light": "rgb(255, 255, 255)", "dark": "rgb(22, 26, 31)"}
    for name, figures in (("plan", 3), ("report", 7)):
        path = tmp_path / f"{name}.html"
        assert path.stat().st_size < LARGEST_PAGE_BYTES
        tab = Tab(browser, path.as_uri(), width=width, scheme=scheme, panels=("drawn",))
        assert tab.count(".figure .main-svg >> visible=true") >= figures
        assert tab.overflow <= 0
        assert tab.cut() == []
        assert background(tab) == grounds[scheme]
        assert tab.page.evaluate("document.querySelector('.figure .bg, .figure .main-svg').style.background") != ""
        tab.picture(f"{name}-{width}-{scheme}.png")
        assert tab.wrong == []
        assert tab.asked == [path.as_uri()]
        tab.page.close()


def test_it_goes_along_with_a_run(browser: Any, tmp_path: Path) -> None:
    place = Place(tmp_path)
    job = place.job("run", NODES, 2, SLOWLY)
    train = Command("train", job, "--iterations", 100_000, "--dashboard", "0")
    try:
        tab = Tab(browser, train.says(r"the dashboard is at (http://\S+)")[1])
        tab.until(f"{DONE} >= 1")
        seen = int(tab.page.evaluate(DONE))
        tab.until(f"{DONE} >= {seen + 3}")
        tab.until("document.getElementById('status').className === 'training'")
        assert tab.count("#map .node") == NODES
        assert tab.overflow <= 0
        assert tab.wrong == []
        assert train.end(signal.SIGINT) == 130
        tab.until("document.getElementById('status').className === 'link-down'")  # its page has gone with it
        seen = int(tab.page.evaluate(DONE))
        assert len(place.losses("run")) >= seen
        with shown(tmp_path / "run") as address:
            after = Tab(browser, address)
            assert after.text("#status") == "stopped on request; train --resume goes on"
            assert int(after.page.evaluate(DONE)) == len(place.losses("run"))
    finally:
        train.end(signal.SIGKILL)


def test_a_coordinator_that_is_killed_and_started_again(browser: Any, tmp_path: Path) -> None:
    place = Place(tmp_path)
    keys = tmp_path / "keys"
    made = Command("keys", f"regions:{NODES}", keys)
    made.says("node keys")
    made.end(signal.SIGTERM)
    port, at = free_port("127.0.0.1"), free_port("127.0.0.1")
    words = ("train", place.joining("run", port), "--iterations", 100_000, "--dashboard", at)
    started = [Command(*words)]
    try:
        for name in PeerList.load(keys / "peers.json").peers:
            started.append(Command("node", "--join", f"127.0.0.1:{port}", "--key", keys / f"{name}.key"))
        tab = Tab(browser, started[0].says(r"the dashboard is at (http://\S+)")[1])
        tab.until(f"{DONE} >= 3")
        started[0].end(signal.SIGKILL)
        tab.until("document.getElementById('status').className === 'link-down'")
        seen = int(tab.page.evaluate(DONE))
        started.append(Command(*words, "--resume"))
        tab.until(f"{DONE} >= {seen + 3}")  # the same page, not loaded again
        assert "coordinator-restarted" in tab.text("#events")
        assert tab.count("#map .node") == NODES
        assert [url for url in tab.asked if url.endswith("dashboard.js")] == [f"http://127.0.0.1:{at}/dashboard.js"]
    finally:
        for each in reversed(started):
            each.end(signal.SIGKILL)
