"""The live page over HTTP: it shows a run, loads nothing from elsewhere, and can change nothing."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx2
import pytest

from skippipe.dashboard import server as dashboard_server
from skippipe.dashboard.routes import ASSETS
from skippipe.dashboard.server import dashboard_process
from skippipe.errors import UserError
from tests.helpers.dashboards import HOSTILE, TIMEOUT_S, RunFolder, panels, plan_of, shown
from tests.helpers.processes import Command

TOKEN = "a-token-that-is-long"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path, plan_of(names=[HOSTILE, "<script>"]))
    run.iteration(0, recorded=True)
    run.event("rerouted", f"last log lines: {HOSTILE}\u2028\r\n\ndata: {{}}", HOSTILE)
    return run


@pytest.fixture
def address(run: RunFolder) -> Iterator[str]:
    with shown(run.folder) as address:
        yield address


def get(url: str, **headers: str) -> httpx2.Response:
    return httpx2.get(url, headers=headers, timeout=TIMEOUT_S)


def test_the_page_loads_nothing_from_elsewhere(address: str) -> None:
    for path, (_, kind) in ASSETS.items():
        found = get(f"{address}/{path}")
        assert found.status_code == 200
        assert found.headers["content-type"] == kind
        policy = found.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
        assert found.headers["x-content-type-options"] == "nosniff"
        links = re.findall(r"(?:https?:)?//[\w.]+", re.sub(r"^\s*//.*| // .*", "", found.text, flags=re.MULTILINE))
        assert set(links) <= {"http://www.w3.org"}  # the name of SVG


def test_the_page_asks_for_no_more_than_there_is() -> None:
    data = files("skippipe.dashboard").joinpath("static")
    scripts = {name: data.joinpath(name).read_text() for name in ASSETS if name.endswith(".js")}
    html = data.joinpath("dashboard.html").read_text()
    asked = re.findall(r'(?:src|href)="([^"]*)"', html)
    asked += [name for text in scripts.values() for name in re.findall(r'from "\./([^"]*)"', text)]
    assert set(asked) == set(ASSETS) - {""}
    ids = set(re.findall(r'id="([^"]*)"', html))
    assert {name for text in scripts.values() for name in re.findall(r'byId\("([^"]*)"\)', text)} <= ids
    assert not re.search(r"<script(?![^>]*src=)|\son\w+=|style=", html)


def test_nothing_from_a_run_becomes_markup() -> None:
    for name in ASSETS:
        if name.endswith(".js"):
            text = files("skippipe.dashboard").joinpath("static", name).read_text()
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(|DOMParser", text
            )


def test_state(address: str, run: RunFolder) -> None:
    found = get(f"{address}/state")
    assert found.headers["content-type"] == "application/json"
    assert found.json() == panels(run.folder)
    assert [node["name"] for node in found.json()["map"]["nodes"]][:2] == [HOSTILE, "<script>"]
    assert HOSTILE not in get(f"{address}/").text


def test_the_stream_tells_what_is_new(address: str, run: RunFolder) -> None:
    with httpx2.stream("GET", f"{address}/stream", timeout=TIMEOUT_S) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        told = messages(response)
        first: dict[str, Any] = {}
        while len(first) < 6:
            name, data = next(told)
            first[name] = data
        assert first == panels(run.folder)
        run.iteration(1, 1.25)
        news = dict(next(told) for _ in range(3))
    assert news.keys() == {"run", "load", "curves"}
    assert news["curves"]["loss"] == [3.0, 1.25]


def messages(response: httpx2.Response) -> Iterator[tuple[str, Any]]:
    name = ""
    deadline = time.monotonic() + TIMEOUT_S
    for line in response.iter_lines():
        assert time.monotonic() < deadline, "no news"
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, json.loads(value)


def test_elsewhere_there_is_nothing(address: str) -> None:
    for path in ("nothing", "dashboard.html", "state/", "../pyproject.toml", "%2e%2e/plan.json", "plan.json", "docs"):
        assert get(f"{address}/{path}").status_code == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"])
def test_it_can_only_be_looked_at(address: str, method: str) -> None:
    for path in ("", "state", "stream", "nothing"):
        found = httpx2.request(method, f"{address}/{path}", timeout=TIMEOUT_S)
        assert (found.status_code, found.headers["allow"]) == (405, "GET")


def test_other_names_are_other_peoples_pages(address: str) -> None:
    assert get(f"{address}/state", Host="evil.example").status_code == 403
    assert get(f"{address}/state", Host="localhost:5").status_code == 200


def test_with_a_token_only(run: RunFolder) -> None:
    with shown(run.folder, TOKEN) as address:
        refused = get(f"{address}/")
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"].startswith("Basic ")
        assert "default-src 'none'" in refused.headers["content-security-policy"]
        for wrong in ("Basic", "Basic !!", "Basic Og==", "Bearer x", f"Bearer {TOKEN}x"):
            assert get(f"{address}/state", Authorization=wrong).status_code == 401
        assert httpx2.get(f"{address}/state", auth=("me", TOKEN), timeout=TIMEOUT_S).status_code == 200
        assert get(f"{address}/state", Authorization=f"Bearer {TOKEN}").status_code == 200


# Commands


def test_bad_input(skippipe: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(dashboard_server.TOKEN, raising=False)
    monkeypatch.setenv("SKIPPIPE_PURE_PYTHON", "")  # the command sets it if it is not set, and that must not stay
    ran = skippipe("dashboard", tmp_path / "nowhere")
    assert ran.code == 2 and "is no folder" in ran.err
    ran = skippipe("dashboard", tmp_path, "--host", "0.0.0.0")
    assert ran.code == 2 and "others can reach that address" in ran.err
    monkeypatch.setenv(dashboard_server.TOKEN, "short")
    ran = skippipe("dashboard", tmp_path, "--host", "0.0.0.0")
    assert ran.code == 2 and "hard to guess" in ran.err and "short" not in ran.err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.delenv(dashboard_server.TOKEN)
        ran = skippipe("dashboard", tmp_path, "--port", str(taken.getsockname()[1]))
    assert ran.code == 2 and "cannot listen there" in ran.err


@pytest.mark.parametrize("asked", ["", "x", "70000", "127.0.0.1:", "127.0.0.1:x"])
def test_a_place_that_is_none(asked: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected a port"), dashboard_process(tmp_path, asked, resumed=False):
        pass


def test_beside_a_run(run: RunFolder, capfd: pytest.CaptureFixture[str]) -> None:
    with dashboard_process(run.folder, "0", resumed=True):
        address = re.search(r"http://\S+", capfd.readouterr().err)
        assert address is not None
        assert get(f"{address[0]}state").json() == panels(run.folder)
    with pytest.raises(httpx2.ConnectError):
        get(f"{address[0]}state")
    assert capfd.readouterr().err == ""


OWNER = """
import sys
from pathlib import Path
from skippipe.dashboard.server import dashboard_process
with dashboard_process(Path(sys.argv[1]), "0", resumed=False):
    sys.stdin.read()
"""


def test_it_ends_with_a_run_that_is_killed(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert owner.stderr is not None and owner.stdin is not None
    with owner.stderr, owner.stdin:
        address = re.search(r"http://\S+", owner.stderr.readline())
        assert address is not None
        assert get(f"{address[0]}state").json()["run"]["iterations"] == 0
        owner.kill()
        owner.wait(TIMEOUT_S)
        assert within(TIMEOUT_S, lambda: not answers(address[0]))


def answers(address: str) -> bool:
    try:
        return get(f"{address}state").status_code == 200
    except httpx2.TransportError:
        return False


def within(most_s: float, holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + most_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
