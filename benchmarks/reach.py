"""What nodes that can only call out cost: half of 20 nodes, beside the same cluster with all of them reachable.

    python -m benchmarks.reach start [--nodes 20] [--cluster published20] [--load 0]
    python -m benchmarks.reach plan [--cluster published20] [--changes 60000] [--bound 20] [--relays 100,500,2000]
    python -m benchmarks.reach iteration [--iterations 12] [--time 0.1] [--rounds 1] [--relay] [--upload 0.5]
    python -m benchmarks.reach promise [--nodes 6] [--rate 0.12] [--iterations 5] [--shared]
    python -m benchmarks.reach serving [--prompts 16]

Nodes are processes on this machine, forked from this one, and every second one is out only: it listens nowhere, or
(`start`) announces an address at which nobody answers, which the coordinator has to find out.

`start` takes the time until all nodes are at work, and the first iteration is done; with `--load`, so many other
processes compute meanwhile.
`plan` compares what plans promise, after as many changes of the search, and proven bounds; with `--relays`, also if
nodes of different locations meet at a relay that carries so many megabytes a second, those of one location in their
own network.
`iteration` takes the median time of an iteration, the first left out, over links that are as slow as the cluster file
says, scaled by `--time`; the plan for half out only does without links between two of those, and is run with all nodes
reachable as well: that is what another side to dial costs, beside what other links cost. With
`--relay`, as many nodes have an upload of so many megabytes a second each (`--upload`), to which they keep, and no
other limit; those that are out only meet at a `skippipe relay`, and the plan is the same as with all reachable.
`promise` has no node that can
be called, and one relay, a `skippipe relay` that carries so many megabytes a second: the time that the plan promises,
which counts on that rate, beside the median time of an iteration. Every node has an equal part of it, as plans count,
or (`--shared`) what the others leave. `serving` compares answers, with two nodes to a stage. All end with status 1 if
the goal was missed: 30 s, a ratio of 1.05, a promise within 5%, the same answers.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import httpx2
import numpy as np

from benchmarks.best import problem_of
from benchmarks.serving import BEGINNINGS, TOKEN, random_model
from skippipe.cluster import Cluster, Node, with_relay
from skippipe.launch.fork_server import ProcessPool
from skippipe.launch.launcher import JoinLauncher, LocalLauncher, join_config
from skippipe.planner.problem import PlanRequest, Strategy, iteration_ns
from skippipe.planner.problem_spec import cluster_named
from skippipe.planner.published import EXAMPLES
from skippipe.planner.strategies import make_plan
from skippipe.runtime.coordinator.interfaces import Callback, Event, IterationReport
from skippipe.runtime.node.agent import node_process
from skippipe.runtime.train_role import ROLES
from skippipe.timeline import Timing
from skippipe.training.build_run import build_run
from skippipe.training.job_config import JobConfig
from skippipe.training.job_tables import BatchConfig, DataConfig, EmulationConfig, PipelineConfig, TransportConfig
from skippipe.transport.addresses import OUT_ONLY, free_port
from skippipe.transport.keys import KeyFile, KeyPair, PeerList
from tests.helpers.serve_process import Command, Server

AT_WORK_S, RATIO, KEPT = 30.0, 1.05, 0.05
NODE_FLOPS, HOP_S = 2e10, 0.002  # of a node on this machine; from a node to another through a relay
STAGES = 4  # of the model that is served; nodes get them in turn


class MixedLauncher(LocalLauncher):
    """Nodes on this machine, some of which are out only: they say so, or it is found out."""

    def __init__(self, names: Collection[str], logs: Path, out_only: Collection[str], *, say_so: bool) -> None:
        super().__init__(list(names), ROLES, logs)
        self._out_only = out_only
        self._say_so = say_so

    def start(self, address: str) -> None:  # type: ignore[override]
        for name, keys in self._node_keys.items():
            config = join_config(name, address, self.keys, keys)
            if name in self._out_only:
                config |= {"listen": OUT_ONLY} if self._say_so else {"address": f"127.0.0.1:{free_port('127.0.0.1')}"}
            self._join_configs[name] = config
            self.pool.start(name, config)


@dataclass
class Taken(Callback):
    began: float = field(default_factory=time.monotonic)
    at_work_s: float = 0.0
    """From the start until all nodes have been at work: when the first iteration is done."""
    seconds: list[float] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def iteration_done(self, report: IterationReport) -> None:
        if not self.seconds:
            self.at_work_s = time.monotonic() - self.began
        self.seconds.append(report.seconds)

    def happened(self, event: Event) -> None:
        self.events.append(event)


def every_second(cluster: Cluster) -> list[str]:
    return [node.name for node in cluster.nodes[1::2]]


def without_links(cluster: Cluster, out_only: Collection[str]) -> Cluster:
    """The same links, but for those between two nodes that are out only."""
    bandwidth = cluster.bandwidth_bytes_per_s.copy()
    apart = [number for number, node in enumerate(cluster.nodes) if node.name in out_only]
    for one in apart:
        for other in apart:
            bandwidth[one, other] = 0.0
    return replace(cluster, bandwidth_bytes_per_s=bandwidth)


def trained(
    cluster: Cluster,
    folder: Path,
    out_only: Collection[str],
    asked: argparse.Namespace,
    *,
    say_so: bool,
    scale: float = 0.0,
    relay: bool = False,
) -> tuple[Taken, float]:
    """What a run took, and what its plan had promised."""
    folder.mkdir(parents=True)
    at = f"127.0.0.1:{free_port('127.0.0.1')}"
    job = job_of(
        cluster,
        folder,
        asked,
        pipeline=PipelineConfig(stages=6, skip="1/3", budget_s=asked.budget),
        emulation=EmulationConfig(enabled=True, time=scale) if scale else EmulationConfig(),
        transport=joins(folder, at) if relay else TransportConfig(),
    )
    relayed = RelayedLauncher(cluster.number, folder, at, out_only) if relay else None  # makes the keys of the job
    setup = build_run(job)
    taken = Taken()
    launcher = relayed or MixedLauncher(setup.run.names, folder / "logs", out_only, say_so=say_so)
    setup.run.launch(launcher, taken)
    return taken, setup.plan.promise.iteration_s


def job_of(
    cluster: Cluster,
    folder: Path,
    asked: argparse.Namespace,
    microbatches: int = BatchConfig().microbatches,
    **others: Any,
) -> JobConfig:
    """A job on this cluster, whose file and run are in the folder."""
    cluster.save(folder / "cluster.json")
    return JobConfig(
        cluster=str(folder / "cluster.json"),
        output=str(folder / "run"),
        iterations=asked.iterations,
        data=DataConfig(vocabulary=512),
        batch=BatchConfig(sequence=64, samples=2, microbatches=microbatches),
        **others,
    )


# Until all are at work


@contextmanager
def load(count: int) -> Iterator[None]:
    """Other processes that compute all the time."""
    context = multiprocessing.get_context("fork")
    busy = [context.Process(target=_compute, daemon=True) for _ in range(count)]
    for each in busy:
        each.start()
    try:
        yield
    finally:
        for each in busy:
            each.kill()
            each.join()


def _compute() -> None:
    while True:
        sum(range(10**6))


def start(asked: argparse.Namespace) -> int:
    cluster, _ = cluster_named(asked.cluster)
    half = every_second(cluster)
    worst_s = 0.0
    print(f"{'out only':<28} {'at work':>9} {'declared dead':>14}")
    with tempfile.TemporaryDirectory(prefix="reach") as name, load(asked.load):
        cases: tuple[tuple[str, list[str], bool], ...] = (
            ("none", [], True),
            ("half, and they say so", half, True),
            ("half, and it is found out", half, False),
        )
        for number, (what, out_only, say_so) in enumerate(cases):
            links = without_links(cluster, out_only)
            taken, _ = trained(links, Path(name) / str(number), out_only, asked, say_so=say_so)
            gone = [event for event in taken.events if event.kind == "lost"]
            print(f"{what:<28} {taken.at_work_s:>7.1f} s {len(gone):>14}", flush=True)
            for event in gone:
                print(f"    {event.node}: {event.text}", flush=True)
            worst_s = max(worst_s, taken.at_work_s)
    return worst_s > AT_WORK_S


# An iteration


def plan(asked: argparse.Namespace) -> int:
    problem = replace(problem_of(EXAMPLES[asked.cluster]()), timing=Timing.FULL)
    request = PlanRequest(seed=asked.seed, budget_s=math.inf, changes=asked.changes, bound_s=asked.bound)
    fewer = without_links(problem.cluster, every_second(problem.cluster))
    promised = []
    cases = {"all reachable": problem.cluster, "half out only": fewer}
    half = [problem.cluster.number[name] for name in every_second(problem.cluster)]
    at = [node.location for node in problem.cluster.nodes]
    pairs = {frozenset(pair) for pair in combinations(half, 2) if at[pair[0]] != at[pair[1]]}
    for rate in asked.relays:
        cases[f"half out only, a relay of {rate:g} MB/s"] = with_relay(problem.cluster, pairs, 1e6 * rate)
    for what, cluster in cases.items():
        found = make_plan(replace(problem, cluster=cluster), Strategy.BEST, request)
        promised.append(iteration_ns(found) / 1e9)
        proven = "" if found.lower_bound_ns is None else f", none is under {found.lower_bound_ns / 1e9:.1f} s"
        held, lanes = sum(len(stage.nodes) for stage in found.stages), len(found.lanes)
        print(f"{what}: {promised[-1]:.2f} s, {lanes} lanes over {held} nodes{proven}", flush=True)
    for what, promised_s in list(zip(cases, promised, strict=True))[1:]:
        print(f"{what} / all reachable: {promised_s / promised[0]:.3f} (goal {RATIO})")
    return min(promised[1:]) > RATIO * promised[0]


def iteration(asked: argparse.Namespace) -> int:
    cluster, _ = cluster_named(asked.cluster)
    half = every_second(cluster)
    fewer = without_links(cluster, half)
    cases: dict[str, tuple[Cluster, list[str]]] = {"all reachable": (cluster, []), "half out only": (fewer, half)}
    if asked.relay:  # emulated links are for nodes that a coordinator starts by itself, and relays for others
        cluster = machine(len(cluster), asked.upload)
        cases = {"all reachable": (cluster, []), "half out only": (cluster, every_second(cluster))}
    else:
        cases["all reachable, links of half out only"] = fewer, []
    seconds: dict[str, list[float]] = {what: [] for what in cases}
    promised = {}
    with tempfile.TemporaryDirectory(prefix="reach") as name:
        for number in range(asked.rounds):
            for what, (links, out_only) in cases.items():
                folder = Path(name) / f"{what} {number}"
                scale = 0.0 if asked.relay else asked.time
                taken, promised[what] = trained(
                    links, folder, out_only, asked, say_so=True, scale=scale, relay=asked.relay
                )
                seconds[what] += taken.seconds[1:]
    print(f"{'':<38} {'promised':>9} {'measured':>9}   spread")
    for what, all_s in seconds.items():
        print(f"{what:<38} {promised[what]:>7.3f} s {median(all_s):>7.3f} s   {min(all_s):.3f} … {max(all_s):.3f}")
    everywhere, mixed, *same = seconds
    for what in (everywhere, *same):
        ratio = median(seconds[mixed]) / median(seconds[what])
        print(f"half out only / {what}: {promised[mixed] / promised[what]:.3f} promised, {ratio:.3f} measured")
    return median(seconds[mixed]) > RATIO * median(seconds[everywhere])


# One relay


class RelayedLauncher(JoinLauncher):
    """Nodes, forked from this process, and a relay for those that only call out."""

    def __init__(
        self, names: Collection[str], folder: Path, address: str, out_only: Collection[str], *rates: object
    ) -> None:
        own, hub, pairs = KeyPair.new(), KeyPair.new(), {name: KeyPair.new() for name in names}
        key, peers = folder / "coordinator.key", folder / "peers.json"
        KeyFile("coordinator", own).save(key)
        KeyFile("hub", hub, own.public).save(folder / "hub.key")
        publics = {name: pair.public for name, pair in pairs.items()}
        PeerList({**publics, "hub": hub.public}, relays=("hub",)).save(peers)
        self._pool = ProcessPool(partial(node_process, ROLES), folder / "logs")
        super().__init__(list(names), key, peers)
        self._out_only = out_only
        self._pairs, where = pairs, f"127.0.0.1:{free_port('127.0.0.1')}"
        words = ("--join", address, "--key", folder / "hub.key", "--listen", where, "--address", where, *rates)
        self._relay = Command("relay", *words)
        self._relay.says("for the coordinator at")

    def start(self, address: str) -> None:
        super().start(address)
        for name, keys in self._pairs.items():
            listens = {"listen": OUT_ONLY} if name in self._out_only else {}
            self._pool.start(name, join_config(name, address, self.keys, keys) | listens)

    def ended(self) -> list[tuple[str, str]]:
        self._pool.poll()
        return super().ended()

    def close(self) -> None:
        super().close()
        self._relay.end()
        self._pool.close()


def joins(folder: Path, at: str) -> TransportConfig:
    return TransportConfig(listen=at, peers=str(folder / "peers.json"), key=str(folder / "coordinator.key"))


def promise(asked: argparse.Namespace) -> int:
    """Links are those of this machine, so the relay's rate is what takes time."""
    pairs = {frozenset(pair) for pair in combinations(range(asked.nodes), 2)}
    with tempfile.TemporaryDirectory(prefix="reach") as name:
        folder = Path(name)
        at = f"127.0.0.1:{free_port('127.0.0.1')}"
        job = job_of(
            with_relay(machine(asked.nodes), pairs, 1e6 * asked.rate),
            folder,
            asked,
            microbatches=2 * asked.nodes,
            pipeline=PipelineConfig(stages=3, skip="0", budget_s=asked.budget),
            transport=joins(folder, at),
        )
        rates = "--rate", asked.rate, *(() if asked.shared else ("--node-rate", asked.rate / asked.nodes))
        names = [f"n{number}" for number in range(asked.nodes)]
        launcher = RelayedLauncher(names, folder, at, names, *rates)
        setup, taken = build_run(job), Taken()
        setup.run.launch(launcher, taken)
    expected = setup.plan.promise
    seconds = taken.seconds[1:]
    sent = sum(link.sent_bytes for link in expected.links)
    ratio, used = median(seconds) / expected.iteration_s, sent / expected.iteration_s / (1e6 * asked.rate)
    gone = [event.text for event in taken.events if event.kind in ("link-down", "restarted", "replanned")]
    spread = f"{min(seconds):.3f} … {max(seconds):.3f}"
    print(f"promised {expected.iteration_s:.3f} s, measured {median(seconds):.3f} s ({spread})")
    print(f"measured / promised: {ratio:.3f}; {used:.0%} of what the relay carries is used")
    for text in gone:
        print(f"    {text}")
    return abs(ratio - 1) > KEPT


def machine(nodes: int, upload: float | None = None) -> Cluster:
    """Nodes of this machine, with no limit but the relay's, or their uploads of so many MB/s: what they compute takes
    little beside what they send."""
    rate = upload and 1e6 * upload
    return Cluster(
        "this machine",
        tuple(Node(f"n{number}", "here", NODE_FLOPS, 2**30, rate) for number in range(nodes)),
        np.full((nodes, nodes), HOP_S),
        np.full((nodes, nodes), 1e9),
    )


# Answers


def answers(folder: Path, place: Path, prompts: int, *, out_only: bool) -> list[str]:
    """Of a server with two nodes to a stage, all of every second stage out only: no answer can do without them."""
    names = [f"n{number}" for number in range(2 * STAGES)]
    own, pairs = KeyPair.new(), {name: KeyPair.new() for name in names}
    KeyFile("coordinator", own).save(place / "keys" / "coordinator.key")
    PeerList({name: pair.public for name, pair in pairs.items()}).save(place / "keys" / "peers.json")
    (place / "token").write_text(TOKEN)
    (place / "token").chmod(0o600)
    at = f"127.0.0.1:{free_port('127.0.0.1')}"
    server = Server(
        folder, "--port", 0, "--keys", place / "keys", "--listen", at, "--token-file", place / "token", "--cut", STAGES
    )
    nodes = []
    try:
        for number, name in enumerate(names):
            KeyFile(name, pairs[name], own.public).save(place / f"{name}.key")
            listens = ("--listen", "none") if out_only and number % 2 else ()
            nodes.append(Command("node", "--join", at, "--key", place / f"{name}.key", *listens))
        for name in names:
            server.back(name, 1)
        asked = {"model": folder.name, "max_tokens": 24, "temperature": 0}
        with httpx2.Client(base_url=server.address, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60.0) as ask:
            return [
                str(ask.post("/v1/completions", json={**asked, "prompt": f"{number} {begin}"}).json()["choices"])
                for number, begin in ((each, BEGINNINGS[each % len(BEGINNINGS)]) for each in range(prompts))
            ]
    finally:
        for command in (server, *nodes):
            command.end(signal.SIGTERM)


def serving(asked: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="reach") as name:
        folder = Path(name) / "small"
        random_model(folder)
        found = [answers(folder, Path(name) / str(each), asked.prompts, out_only=each) for each in (False, True)]
    same = sum(one == other for one, other in zip(*found, strict=True))
    print(f"half of {2 * STAGES} nodes out only: {same} of {asked.prompts} answers are those of all reachable nodes")
    return int(same < asked.prompts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True)
    for name, run, iterations in (("start", start, 2), ("iteration", iteration, 12)):
        each = kinds.add_parser(name)
        each.add_argument("--cluster", default="published20")
        each.add_argument("--iterations", type=int, default=iterations)
        each.add_argument("--budget", type=float, default=10.0)
        each.set_defaults(run=run)
        if name == "start":
            each.add_argument("--load", type=int, default=0)
        else:
            each.add_argument("--time", type=float, default=0.1)
            each.add_argument("--rounds", type=int, default=1)
            each.add_argument("--relay", action="store_true")
            each.add_argument("--upload", type=float, default=0.5)
    each = kinds.add_parser("plan")
    each.add_argument("--cluster", choices=EXAMPLES, default="published20")
    each.add_argument("--changes", type=float, default=60_000)
    each.add_argument("--bound", type=float, default=20.0, help="seconds for a proven bound")
    each.add_argument("--seed", type=int, default=0)
    each.add_argument("--relays", type=lambda text: [float(each) for each in text.split(",")], default=[])
    each.set_defaults(run=plan)
    each = kinds.add_parser("promise")
    each.add_argument("--nodes", type=int, default=6)
    each.add_argument("--rate", type=float, default=0.12)
    each.add_argument("--shared", action="store_true")
    each.add_argument("--iterations", type=int, default=5)
    each.add_argument("--budget", type=float, default=5.0)
    each.set_defaults(run=promise)
    each = kinds.add_parser("serving")
    each.add_argument("--prompts", type=int, default=16)
    each.set_defaults(run=serving)
    asked = parser.parse_args()
    return int(asked.run(asked))


if __name__ == "__main__":
    sys.exit(main())
