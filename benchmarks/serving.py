"""`skippipe serve` under load while nodes are killed: does anything hang or break, and how long does it take?

    python -m benchmarks.serving [--checkpoint FOLDER [--cut 4]] [--clients 16] [--seconds 15] [--junk 10000] [--json]

Clients ask for streams, one after another, with the whole server as real processes of this machine, two nodes a stage.
Phases: calm; one node is killed; half of all nodes are killed, a whole stage among them, and whoever comes back is
killed again until the phase is over; they come back. A request counts to the phase in which it ends. At last, junk:
requests that get errors, after which the server has to be well. Ends with status 1 if a request hung, a stream broke, a
whole answer was another than before, or junk got anything but its error. Without a checkpoint weights are random.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from statistics import quantiles
from typing import Any

import httpx2

from skippipe.checkpoint.hf_export import ModelFolder
from skippipe.data.tokenizer import train_bpe
from skippipe.model.flat_params import FlatParams
from skippipe.model.model_spec import ModelSpec, llama_config
from skippipe.model.stage import StageModel, layer_ranges
from skippipe.model_shape import ModelShape
from skippipe.optim.config import OptimConfig
from tests.helpers.serve_process import Server

TOKEN = "benchmark-token-benchmark"
HUNG_S = 60.0  # for an answer that takes a second or two when nobody is killed
LOOK_S = 0.05
JUNK_AT_ONCE = 16
LAYERS = (2, 2, 2, 2)
TEXT = "It is a truth universally acknowledged, that a lane in possession of a good node must be in want of a token. "
BEGINNINGS = (
    "It is a truth",
    "a lane in",
    "possession of",
    "must be in want",
    "universally",
    "a good node",
    "of",
    "that",
)


@dataclass(frozen=True)
class Answer:
    began: float
    ended: float
    outcome: str
    """"whole", "part" (of the model), "refused" before it began, "broken" after that, or "hung"."""
    tokens: int = 0
    pause_s: float = 0.0
    """The longest that its client waited for the next piece, once the first one had come."""

    @property
    def took_s(self) -> float:
        return self.ended - self.began


@dataclass
class Phase:
    name: str
    began: float
    ended: float = 0.0
    note: str = ""
    kills: list[float] = field(default_factory=list)
    """When nodes were killed."""


@dataclass
class Load:
    """Clients that ask one thing after another until they are told to stop."""

    ask: httpx2.AsyncClient
    model: str
    tokens: int
    over: bool = False
    answers: list[Answer] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)
    """Question → what the whole model said first."""
    others: int = 0
    """Whole answers that were another than the first."""

    async def client(self, seed: int) -> None:
        random = Random(seed)
        while not self.over:
            began = time.monotonic()
            try:
                async with asyncio.timeout(HUNG_S):
                    answer = await self._asked(random.randrange(4 * len(BEGINNINGS)), began)
            except TimeoutError:
                answer = Answer(began, time.monotonic(), "hung")
            except httpx2.HTTPError:
                answer = Answer(began, time.monotonic(), "broken")
            self.answers.append(answer)

    async def _asked(self, question: int, began: float) -> Answer:
        said = {
            "model": self.model,
            "prompt": BEGINNINGS[question % len(BEGINNINGS)],
            "max_tokens": self.tokens,
            "temperature": 0.7,
            "seed": question,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        text, last, pause_s, heard, done = "", {}, 0.0, 0.0, False
        async with self.ask.stream("POST", "/v1/completions", json=said) as response:
            if response.status_code != 200:
                await response.aread()
                return Answer(began, time.monotonic(), "refused")
            async for line in response.aiter_lines():
                if not line:
                    continue
                now = time.monotonic()
                pause_s, heard = max(pause_s, now - heard if heard else 0.0), now
                done = line == "data: [DONE]"
                if not done:
                    last = json.loads(line[6:])
                    text += "".join(each["text"] for each in last.get("choices", ()))
        if not done or "error" in last:
            return Answer(began, heard, "broken")
        share = last["skippipe"]
        if share["stages"] < share["of"]:
            return Answer(began, heard, "part", last["usage"]["completion_tokens"], pause_s)
        self.others += self.texts.setdefault(question, text) != text
        return Answer(began, heard, "whole", last["usage"]["completion_tokens"], pause_s)


class Bench:
    def __init__(self, server: Server, asked: argparse.Namespace, model: str) -> None:
        self._server = server
        self._asked = asked
        self._model = model
        self.phases: list[Phase] = []
        self.nodes = 0
        self.recomputed_share = 0.0
        """Of all tokens that were computed, those that had been computed before and were lost."""

    async def run(self) -> tuple[Load, Counter[str]]:
        async with AsyncExitStack() as stack:
            ask = await stack.enter_async_context(
                httpx2.AsyncClient(
                    base_url=self._server.address,
                    headers={"Authorization": f"Bearer {TOKEN}"},
                    timeout=2 * HUNG_S,
                    limits=httpx2.Limits(max_connections=None),
                )
            )
            await self._all_there()
            load = Load(ask, self._model, self._asked.tokens)
            async with asyncio.TaskGroup() as group:
                for number in range(self._asked.clients):
                    group.create_task(load.client(number))
                await self._phases()
                load.over = True
            self.recomputed_share = await self._recomputed()
            return load, await junk(ask, self._model, self._asked.junk)

    async def _phases(self) -> None:
        seconds = self._asked.seconds
        with self._phase("calm"):
            await asyncio.sleep(seconds)
        one = _named(self._server, 1, 0)
        with self._phase("one node killed") as phase:
            self._server.kill(one)
            phase.kills.append(time.monotonic())
            phase.note = one
            await asyncio.sleep(seconds)
        with self._phase("half of all nodes killed") as phase:
            phase.note = ", ".join(self._half())
            await self._keep_down(self._half(), seconds, phase)
        with self._phase("they come back") as phase:
            phase.note = f"all there after {await self._all_there():.1f} s"
            await asyncio.sleep(seconds)

    def _phase(self, name: str) -> _Timed:
        self.phases.append(Phase(name, time.monotonic()))
        print(name, file=sys.stderr, flush=True)
        return _Timed(self.phases[-1])

    def _half(self) -> list[str]:
        """All of stage 1, and of the others the first ones, as many as make half."""
        names = sorted(self._server.pids())
        whole = [name for name in names if name.startswith("stage1.")]
        firsts = [name for name in names if name.endswith(".0") and name not in whole]
        return [*whole, *firsts][: len(names) // 2]

    async def _keep_down(self, nodes: Sequence[str], seconds: float, phase: Phase) -> None:
        killed: dict[str, int] = {}
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pids = self._server.pids()
            for node in [each for each in nodes if killed.get(each) != pids[each]]:
                self._server.kill(node)
                phase.kills.append(time.monotonic())
                killed[node] = pids[node]
            await asyncio.sleep(LOOK_S)

    async def _all_there(self) -> float:
        """Seconds until every node is."""
        began = time.monotonic()
        async with asyncio.timeout(2 * HUNG_S):
            while True:
                self.nodes = self.nodes or self._started()
                if metric(await self._metrics(), "stage_nodes") == self.nodes:
                    return time.monotonic() - began
                await asyncio.sleep(LOOK_S)

    async def _recomputed(self) -> float:
        text = await self._metrics()
        again = metric(text, "recomputed_tokens_total")
        return again / (again + metric(text, "prompt_tokens_total") + metric(text, "generation_tokens_total"))

    async def _metrics(self) -> str:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with httpx2.AsyncClient(base_url=self._server.address, headers=headers, timeout=HUNG_S) as ask:
            return (await ask.get("/metrics")).text

    def _started(self) -> int:
        return int(self._server.says(r"(\d+) nodes of this machine")[1])


def metric(text: str, name: str) -> float:
    """The value of a metric in the text that /metrics gives; of one with labels, the sum of all."""
    found = re.findall(rf"^skippipe_{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    if not found:
        raise ValueError(f"/metrics has no skippipe_{name}")
    return sum(map(float, found))


class _Timed:
    def __init__(self, phase: Phase) -> None:
        self._phase = phase

    def __enter__(self) -> Phase:
        return self._phase

    def __exit__(self, *_: object) -> None:
        self._phase.ended = time.monotonic()


def _named(server: Server, stage: int, replica: int) -> str:
    name = f"stage{stage}.{replica}"
    assert name in server.pids()
    return name


# Junk


def junk_request(random: Random, model: str) -> tuple[int, dict[str, Any]]:
    """The status that it has to get, and what httpx2 is told."""
    kind = {"Content-Type": "application/json"}
    good = {"model": model, "prompt": "It is", "max_tokens": 4}
    match random.randrange(100):
        case 0:
            return 413, {"json": {**good, "prompt": "x" * 2**20}}
        case share if share < 25:
            whole = json.dumps(good).encode()
            return 400, {"content": whole[: random.randrange(1, len(whole) - 1)], "headers": kind}
        case share if share < 50:
            return 401, {"json": good, "headers": {"Authorization": f"Bearer wrong-{random.getrandbits(64):x}"}}
        case share if share < 75:
            return 400, {"json": {**good, "prompt": [1] * random.randrange(5000, 9000)}}
    return 404, {"json": {**good, "model": f"model-{random.getrandbits(32):x}"}}


async def junk(ask: httpx2.AsyncClient, model: str, count: int) -> Counter[str]:
    """How often each status was given; "wrong": another than it should be."""
    statuses: Counter[str] = Counter()
    numbers = iter(range(count))

    async def some() -> None:
        for number in numbers:
            status, how = junk_request(Random(number), model)
            try:
                async with asyncio.timeout(HUNG_S):
                    response = await ask.post("/v1/completions", **how)
            except (TimeoutError, httpx2.HTTPError):
                statuses["wrong"] += 1
                continue
            statuses[str(response.status_code)] += 1
            proper = response.status_code == status and response.json()["error"]["message"]
            statuses["wrong"] += not proper

    async with asyncio.TaskGroup() as group:
        for _ in range(JUNK_AT_ONCE):
            group.create_task(some())
    health = (await ask.get("/health")).json()
    whole = await ask.post("/v1/completions", json={"model": model, "prompt": "It is", "max_tokens": 4})
    well = health["status"] == "ok" and whole.status_code == 200 and whole.json()["usage"]["completion_tokens"] >= 1
    statuses["well afterwards"] = int(well)
    return statuses


# What came of it


@dataclass(frozen=True)
class Row:
    phase: str
    note: str
    requests: int
    whole: int
    part: int
    refused: int
    broken: int
    hung: int
    tokens_per_s: float
    p50_s: float
    p99_s: float
    struck: int
    """Requests that were being answered when a node was killed …"""
    added_p99_s: float
    """… and by how much the 99th percentile of what they took is above that of the calm phase."""
    pause_p99_s: float
    struck_pause_p99_s: float


def rows_of(phases: Sequence[Phase], answers: Sequence[Answer]) -> list[Row]:
    rows: list[Row] = []
    for phase in phases:
        mine = [each for each in answers if phase.began <= each.ended < phase.ended]
        good = [each for each in mine if each.outcome in ("whole", "part")]
        outcomes = Counter(each.outcome for each in mine)
        p50_s, p99_s = _percentiles([each.took_s for each in good])
        struck = [each for each in good if any(each.began < at < each.ended for at in phase.kills)]
        rows.append(
            Row(
                phase.name,
                phase.note,
                len(mine),
                whole=outcomes["whole"],
                part=outcomes["part"],
                refused=outcomes["refused"],
                broken=outcomes["broken"],
                hung=outcomes["hung"],
                tokens_per_s=sum(each.tokens for each in good) / (phase.ended - phase.began),
                p50_s=p50_s,
                p99_s=p99_s,
                struck=len(struck),
                added_p99_s=_percentiles([each.took_s for each in struck])[1] - rows[0].p99_s if struck else 0.0,
                pause_p99_s=_percentiles([each.pause_s for each in good])[1],
                struck_pause_p99_s=_percentiles([each.pause_s for each in struck])[1],
            )
        )
    return rows


def _percentiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return (values[0], values[0]) if values else (0.0, 0.0)
    found = quantiles(values, n=100, method="inclusive")
    return found[49], found[98]


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| phase | requests | by the whole model | by a part | refused | broken | hung | tokens/s | p50 | p99 "
        "| longest pause, p99 | struck by a kill | added p99 | longest pause, p99 |",
        f"|{'---|' * 14}",
    ]
    lines += [
        f"| {row.phase} | {row.requests} | {row.whole} | {row.part} | {row.refused} | {row.broken} | {row.hung} "
        f"| {row.tokens_per_s:.0f} | {row.p50_s:.2f} s | {row.p99_s:.2f} s "
        f"| {row.pause_p99_s:.2f} s | {row.struck} "
        f"| {f'{row.added_p99_s:+.2f} s | {row.struck_pause_p99_s:.2f} s' if row.struck else '– | –'} |"
        for row in rows
    ]
    return "\n".join(lines)


def random_model(folder: Path) -> None:
    tokenizer = train_bpe(iter([TEXT * 50]), 400)
    shape = ModelShape("small", sum(LAYERS), 128, 4, 2, 32, 344, tokenizer.size)
    spec = ModelSpec(llama_config(shape, initializer_range=0.1, max_position_embeddings=1024), seed=0)
    made = ModelFolder(folder, LAYERS, spec, tokenizer)
    for number, each in enumerate(layer_ranges(LAYERS)):
        stage = StageModel(spec, each, ends=number == 0)
        made.store_flat(number, FlatParams(stage.named_weights(), OptimConfig()).values.clone())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--cut")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=15.0, help="of a phase")
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--junk", type=int, default=10_000)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = asked.checkpoint or Path(place) / "small"
        if asked.checkpoint is None:
            random_model(folder)
        options = [
            "--port",
            0,
            "--name",
            "benchmark",
            "--requests-a-minute",
            10**6,
            "--max-concurrent",
            10**3,
            "--no-access-log",
        ]
        cut = ["--cut", asked.cut] if asked.cut else []
        server = Server(folder, *options, *cut, environment={"SKIPPIPE_API_TOKEN": TOKEN})
        try:
            bench = Bench(server, asked, "benchmark")
            load, junk_statuses = asyncio.run(bench.run())
        finally:
            server.end()
    rows = rows_of(bench.phases, load.answers)
    if asked.json:
        said = {"phases": [asdict(row) for row in rows], "others": load.others, "junk": dict(junk_statuses)}
        share = {"recomputed_share": bench.recomputed_share}
        print(json.dumps({"clients": asked.clients, "nodes": bench.nodes, **share, **said}))
    else:
        print(table(rows))
        for row in rows:
            print(f"{row.phase}: {row.note}" if row.note else row.phase)
        print(f"whole answers that were another than before: {load.others}")
        print(f"tokens that were computed again, of all: {bench.recomputed_share:.1%}")
        print(f"junk: {', '.join(f'{count} × {status}' for status, count in sorted(junk_statuses.items()))}")
    bad = sum(each.outcome in ("broken", "hung") for each in load.answers)
    return int(bool(bad or load.others or junk_statuses["wrong"] or not junk_statuses["well afterwards"]))


if __name__ == "__main__":
    sys.exit(main())
