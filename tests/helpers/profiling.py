"""Nodes that are measured, and links whose figures are known: in virtual time, as processes, and while training.

Nodes that are processes are forked, and a process that has seen other tests may have threads; so whoever starts some
has a process of its own, forked from a fresh one that has imported this file and done nothing else (as in test_run).
"""

from __future__ import annotations

import heapq
import itertools
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skippipe.cli import main, profile
from skippipe.cluster import Cluster, Node
from skippipe.launch.fork_server import ProcessPool
from skippipe.launch.launcher import LocalLauncher
from skippipe.model.model_spec import ModelSpec
from skippipe.optim.config import OptimConfig
from skippipe.profiling.coordinator import ProfilingCallback, ProfilingCoordinator, ProfilingDeadlines, profile_nodes
from skippipe.profiling.estimators import ProbeSettings
from skippipe.profiling.node import ROLES, ProfilingConfig, ProfilingNode
from skippipe.profiling.results import ProfileResult, save_results
from skippipe.runtime.coordinator.interfaces import Callback
from skippipe.runtime.coordinator.settings import CoordinatorSettings, RecoverySettings
from skippipe.runtime.messages import Computed, ControlMessage, LinkDown, Probe, Probed, ProbeRate
from skippipe.runtime.simulation.virtual_cluster import VirtualCluster
from skippipe.transport.link_emulation import DelayQueue, EmulatedLink, LinkEmulator
from skippipe.transport.message import Message, Received
from skippipe.workload import Workload
from tests.helpers.models import tiny
from tests.helpers.plans import TINY, wide_plan
from tests.helpers.processes import FORKED

UPLOAD = 5e6
TIMEOUT_S = 60.0  # for processes, on a machine that is busy with others
WORK = Workload(TINY, 16, 2, compute_dtype="fp32")
QUICK = ProbeSettings(round_trips=5, transfers=3, transfer_s=0.06)


@dataclass
class Net(ProfilingCallback):
    """A coordinator of profiling and its nodes over links of a cluster; a bandwidth of 0 swallows everything."""

    true: Cluster
    deadlines: ProfilingDeadlines = field(default_factory=ProfilingDeadlines)
    now: int = 0
    heard: list[str] = field(default_factory=list)
    most_at_once: int = 0

    def __post_init__(self) -> None:
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.alive: dict[int, ProfilingNode] = {}
        self.busy: dict[int, set[int]] = {}
        self.arriving: dict[int, DelayQueue] = {}
        self._wakes: set[tuple[int, int]] = set()
        self.names = tuple(node.name for node in self.true.nodes)
        self.coordinator = ProfilingCoordinator(
            ProfilingConfig(self.names, {}, WORK, effort=QUICK), self, self, self.deadlines
        )

    def now_ns(self) -> int:
        return self.now

    def happened(self, text: str) -> None:
        self.heard.append(text)

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + round(seconds * 1e9), next(self._order), what))

    def tell(self, node: int, control: ControlMessage) -> None:
        if isinstance(control, Probe | ProbeRate):
            peers = {control.peer} if isinstance(control, Probe) else {row[0] for row in control.streams}
            for other in self.busy.values():
                assert not other & {node, *peers}, "measured twice at once"
            self.busy[control.probe] = {node, *peers}
            self.most_at_once = max(self.most_at_once, len(self.busy))
        self.later(0, lambda: self.alive[node].handle_control(control) if node in self.alive else None)

    def join(self, node: int, computed: Computed | None = None) -> None:
        self.alive[node] = ProfilingNode(node, len(self.true), QUICK, VirtualNodeEnv(self, node))
        here = {other: self.link(other, node) for other in range(len(self.true)) if self.reaches(other, node)}
        named = {self.names[other]: link for other, link in here.items()}
        self.arriving[node] = DelayQueue(named, self.true.nodes[node].download_bytes_per_s)
        self.coordinator.joined(node)
        self.later(
            1, lambda: self.coordinator.handle(node, computed or Computed([[0.01, 0.02]], 2**30, "cpu", f"m{node}"))
        )

    def reaches(self, sender: int, receiver: int) -> bool:
        return sender != receiver and bool(self.true.bandwidth_bytes_per_s[sender, receiver])

    def link(self, sender: int, receiver: int) -> EmulatedLink:
        return EmulatedLink(*self.true.hop(self.names[sender], self.names[receiver]))

    def arrive(self, node: int) -> None:
        """Hand over what is due at a node."""
        for received in self.arriving[node].ready(self.now):
            if node in self.alive:
                self.alive[node].receive(self.true.number[received.peer], received.message)
        self.wake(node)

    def wake(self, node: int) -> None:
        """Come back when the next message is due at a node."""
        due_ns = self.arriving[node].next_due_ns()
        if due_ns is not None and (node, due_ns) not in self._wakes:
            self._wakes.add((node, due_ns))
            heapq.heappush(self._events, (max(due_ns, self.now), next(self._order), lambda: self.arrive(node)))

    def die(self, node: int) -> None:
        del self.alive[node]
        self.busy = {probe: nodes for probe, nodes in self.busy.items() if node not in nodes}
        self.coordinator.lost(node, "it was killed")

    def run(self, until: Callable[[], bool] | None = None) -> ProfileResult:
        while not (until or (lambda: self.coordinator.over))():
            assert self.now < 3600e9, "no end"
            if not self._events:
                self.now += 10**9
            else:
                self.now, _, what = heapq.heappop(self._events)
                what()
            for node in self.alive.values():
                node.decide()
            self.coordinator.tick()
        return self.coordinator.result("now")


@dataclass
class VirtualNodeEnv:
    """The `NodeEnv` of one node in the virtual network."""

    net: Net
    node: int

    def __post_init__(self) -> None:
        net, own = self.net, self.node
        links = {net.names[to]: net.link(own, to) for to in range(len(net.true)) if net.reaches(own, to)}
        upload = net.true.nodes[own].upload_bytes_per_s
        self.uplink = LinkEmulator(links, self.deliver, self.now_ns, upload)

    def deliver(self, peer: str, message: Message, due_ns: int) -> None:
        receiver = self.net.true.number[peer]
        self.net.arriving[receiver].put(Received(self.net.names[self.node], message, due_ns))
        self.net.wake(receiver)

    def now_ns(self) -> int:
        return self.net.now

    def send(self, receiver: int, message: Message) -> None:
        assert message.body is not None and not isinstance(message.body, dict)
        if not self.net.reaches(self.node, receiver):
            self.net.later(5, lambda: self.send_control(LinkDown(receiver)))
        elif receiver in self.net.arriving:
            self.uplink.send(self.net.names[receiver], message)

    def send_control(self, control: ControlMessage, _to: int = -1) -> None:
        if isinstance(control, Probed):
            self.net.busy.pop(control.probe, None)
        if isinstance(control, LinkDown):
            both = {self.node, control.peer}
            self.net.busy = {probe: nodes for probe, nodes in self.net.busy.items() if not both <= nodes}
        self.net.later(0, lambda: self.net.coordinator.handle(self.node, control))

    def start(self, _work: Any) -> None:
        raise AssertionError("computing is not up to this")

    def fits(self, _message: Message, _expected: Any) -> bool:
        raise AssertionError("nobody asks")

    def prefetch(self, _given: Any, _device: int) -> Any:
        raise AssertionError("no tensor comes")


def far_apart(nodes: int, longest_s: float = 0.2) -> Cluster:
    """Latencies there and back are alike: only both together can be measured."""
    random = np.random.default_rng(nodes)
    machines = tuple(Node(f"n{index}", "here", 1e9, 2**30) for index in range(nodes))
    latency_s = random.uniform(0.001, longest_s / 2, (nodes, nodes))
    return Cluster("far", machines, latency_s + latency_s.T, random.uniform(1e6, 1e8, (nodes, nodes)))


def with_uploads(cluster: Cluster) -> Cluster:
    """The same nodes, each with an upload that is less than its links carry together."""
    nodes = tuple(replace(node, upload_bytes_per_s=UPLOAD) for node in cluster.nodes)
    return replace(cluster, nodes=nodes, bandwidth_bytes_per_s=np.minimum(cluster.bandwidth_bytes_per_s, UPLOAD))


def agrees(found: Cluster, true: Cluster, share: float, absolute_s: float) -> None:
    """Every link of what was found, with what is true."""
    for i, sender in enumerate(found.nodes):
        for j, receiver in enumerate(found.nodes):
            at = true.number[sender.name], true.number[receiver.name]
            if i != j:
                assert found.latency_s[i, j] == pytest.approx(true.latency_s[at], rel=share, abs=absolute_s)
                assert found.bandwidth_bytes_per_s[i, j] == pytest.approx(true.bandwidth_bytes_per_s[at], rel=share)


# Processes


class Notes(ProfilingCallback):
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.done = 0

    def progressed(self, done: int, _of: int, _doing: str) -> None:
        self.done = done

    def happened(self, text: str) -> None:
        with (self._folder / "happened").open("a") as file:
            print(text, file=file)


def profiling_config(true: Cluster, **others: Any) -> ProfilingConfig:
    spec = ModelSpec(tiny("llama"))
    workload = Workload(spec.shape, 16, 2, compute_dtype="fp32")
    names, config = tuple(node.name for node in true.nodes), spec.config.to_dict()
    node_config = ProfilingConfig(names, config, workload, compute_s=0.1, effort=QUICK, emulated=true)
    return replace(node_config, **others)


def emulated(folder: Path) -> None:
    """Four nodes, and a fifth that is killed when all have computed."""
    true = with_uploads(far_apart(5, 0.03))
    notes = Notes(folder)
    pools: list[ProcessPool] = []

    def stopped() -> bool:
        if notes.done >= 5 and pools:
            pool = pools.pop()
            pool.poll()
            os.kill(pool.pids["n4"], signal.SIGKILL)
        return False

    config = profiling_config(true)
    launcher = LocalLauncher(config.names, ROLES)
    pools.append(launcher.pool)
    found = profile_nodes(config, launcher, notes, stopped=stopped)
    save_results(folder / "cluster.json", [found])


def stopped_early(folder: Path) -> None:
    """Ctrl-C, when the first of six links is measured."""

    def progressed(_console: Any, done: int, _of: int, _doing: str) -> None:
        if done == 4:
            os.kill(os.getpid(), signal.SIGINT)

    vars(profile)["_Console"].progressed = progressed
    words = ("--model", "llama-tiny", "--sequence", "16", "--transfer", "0.1")
    command(folder, "profile", "--local", "3", *words, "-o", "c.json")


def command(folder: Path, *words: str) -> None:
    """The command line; torch's threads are its own."""
    os.chdir(folder)
    with (folder / "said").open("a") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        sys.argv = ["skippipe", *words]
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        main()


def in_a_process(target: Callable[..., None], *more: Any) -> int | None:
    process = FORKED.Process(target=target, args=more)
    process.start()
    process.join(TIMEOUT_S)
    try:
        assert process.exitcode is not None, "no end"
    finally:
        process.kill()
    return process.exitcode


# Training


class Last(Callback):
    def __init__(self) -> None:
        self.clusters: list[Cluster] = []

    def measured(self, cluster: Cluster) -> None:
        self.clusters.append(cluster)


def trained(callback: Callback, *faults: Any) -> Cluster:
    settings = CoordinatorSettings(OptimConfig(warmup=1, iterations=10), 4, recovery=RecoverySettings(drift=0.0))
    cluster = VirtualCluster(wide_plan(), settings, faults=list(faults), callback=callback)
    cluster.run()
    return wide_plan().cluster
