"""What is measured is what is there: on links in virtual time to the microsecond, on emulated ones nearly so."""

from __future__ import annotations

import itertools
import json
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from math import inf
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skippipe.cli import main
from skippipe.cli.profile import _print_result
from skippipe.cluster import Cluster, Node
from skippipe.launch.launcher import JoinLauncher
from skippipe.model_shape import MODELS
from skippipe.planner.problem_spec import PlanSpec, cluster_named, problem_of
from skippipe.profiling.compute_bench import free_bytes
from skippipe.profiling.coordinator import ProfilingDeadlines, profile_nodes, round_robin_pairs
from skippipe.profiling.node import ROLES, ProfilingNode
from skippipe.profiling.results import ProfileResult, load_results, merge_results, unreachable
from skippipe.runtime.messages import Computed, Failed, Hello, Probe, ProbeRate, Stop
from skippipe.runtime.node.agent import NodeAgent
from skippipe.runtime.node.interfaces import JoinConfig
from skippipe.runtime.simulation.fault_injection import slow_link, slow_node
from skippipe.training.metrics import CallbackList, ClusterFile
from skippipe.transport.addresses import free_port
from skippipe.transport.keys import KeyFile
from skippipe.transport.message import GradientPiece, Message, ProbePiece
from skippipe.workload import Workload
from tests.helpers.doc_pages import documented
from tests.helpers.processes import MODEL
from tests.helpers.profiling import (
    QUICK,
    TIMEOUT_S,
    UPLOAD,
    Last,
    Net,
    Notes,
    VirtualNodeEnv,
    agrees,
    command,
    emulated,
    far_apart,
    in_a_process,
    profiling_config,
    stopped_early,
    trained,
    with_uploads,
)

# The order


@given(st.integers(1, 60))
def test_everybody_meets_everybody_once(nodes: int) -> None:
    schedule = round_robin_pairs(nodes)
    for matches in schedule:
        taking_part = [node for match in matches for node in match]
        assert len(taking_part) == len(set(taking_part)), "nobody is measured twice at once"
    both_ways = [way for matches in schedule for a, b in matches for way in ((a, b), (b, a))]
    assert sorted(both_ways) == list(itertools.permutations(range(nodes), 2))
    assert len(schedule) <= nodes


# Many nodes, in virtual time


@pytest.mark.parametrize("nodes", [1, 2, 5, 8])
def test_what_is_measured_is_what_is_there(nodes: int) -> None:
    net = Net(far_apart(nodes))
    for node in range(nodes):
        net.join(node)
    found = net.run()
    assert len(found.links) == nodes * (nodes - 1)
    agrees(merge_results([found], "found"), net.true, 1e-3, 1e-5)
    assert net.most_at_once == nodes // 2
    assert all(node.upload_bytes_per_s == (inf if nodes > 2 else None) for node in found.nodes.values())
    assert not net.heard
    assert not found.missing


@pytest.mark.parametrize("seed", range(3))
def test_rates_that_links_share_are_found(seed: int) -> None:
    """Home lines of known rates beside machines without a limit, over links that carry more."""
    random = np.random.default_rng(seed)
    true = far_apart(7)
    nodes = tuple(
        replace(
            node,
            upload_bytes_per_s=float(random.uniform(2.5e6, 2.5e7)) if at < 5 else None,
            download_bytes_per_s=float(random.uniform(2.5e7, 5e7)) if at < 3 else None,
        )
        for at, node in enumerate(true.nodes)
    )
    net = Net(replace(true, nodes=nodes, bandwidth_bytes_per_s=np.full((7, 7), 6e7)))
    for node in range(7):
        net.join(node)
    found = merge_results([net.run()], "found")
    for now, was in zip(found.nodes, nodes, strict=True):
        assert (now.upload_bytes_per_s or 0) == pytest.approx(was.upload_bytes_per_s or 0, rel=0.02)
        assert (now.download_bytes_per_s or 0) == pytest.approx(was.download_bytes_per_s or 0, rel=0.02)
    assert net.heard == []


def test_rates_are_measured_without_a_node_that_dies_meanwhile() -> None:
    true = far_apart(5)
    nodes = tuple(replace(node, upload_bytes_per_s=2e6) for node in true.nodes)
    net = Net(replace(true, nodes=nodes, bandwidth_bytes_per_s=np.full((5, 5), 1e7)))
    for node in range(5):
        net.join(node)
    net.run(lambda: any(len(nodes) > 2 for nodes in net.busy.values()))
    net.die(3)
    found = merge_results([net.run()], "found")
    assert [node.upload_bytes_per_s for node in found.nodes] == pytest.approx([2e6] * 4, rel=0.02)
    assert net.heard == ["'n3' is left out: it was killed"]


def test_a_rate_that_cannot_be_measured_is_not_known() -> None:
    """A peer does not answer any more when several links are measured."""
    net = Net(far_apart(3))
    for node in range(3):
        net.join(node)
    net.run(lambda: any(len(nodes) > 2 for nodes in net.busy.values()))
    net.alive[2].receive = lambda sender, message: None  # type: ignore[method-assign]
    found = net.run()
    assert len(found.links) == 6 and all(found.links.values())
    assert {(node.upload_bytes_per_s, node.download_bytes_per_s) for node in found.nodes.values()} == {(None, None)}
    assert "the upload of 'n0' is not known: its links do not answer when several are in use" in net.heard


def test_those_who_cannot_reach_each_other_have_no_link() -> None:
    true = far_apart(4)
    bandwidth = true.bandwidth_bytes_per_s.copy()
    bandwidth[1, 2] = 0  # one way is enough
    net = Net(replace(true, bandwidth_bytes_per_s=bandwidth))
    for node in range(4):
        net.join(node)
    found = net.run()
    assert {ends for ends, link in found.links.items() if link is None} == {("n1", "n2"), ("n2", "n1")}
    assert net.heard == ["'n1' does not reach 'n2': they have no link"]
    cluster = merge_results([found], "found")
    assert cluster.bandwidth_bytes_per_s[1, 2] == cluster.bandwidth_bytes_per_s[2, 1] == 0
    assert (cluster.bandwidth_bytes_per_s > 0).sum() == 10
    assert sorted(unreachable([found])) == [("n1", "n2"), ("n2", "n1")]


def test_whoever_does_not_answer_is_not_waited_for_for_ever() -> None:
    net = Net(far_apart(3))
    for node in range(3):
        net.join(node)
    net.run(lambda: bool(net.busy))
    net.alive[2].receive = lambda sender, message: None  # type: ignore[method-assign]
    found = net.run()
    assert {ends for ends, link in found.links.items() if link is None} >= {("n2", "n0"), ("n2", "n1")}
    assert found.links["n0", "n1"] and found.links["n1", "n0"]


def test_a_node_that_dies_is_left_out() -> None:
    net = Net(far_apart(5))
    for node in range(5):
        net.join(node)
    net.later(2.5, lambda: net.die(3))
    found = net.run()
    assert net.heard == ["'n3' is left out: it was killed"]
    assert found.missing == ("n3",)
    assert len(found.links) == 4 * 3
    agrees(merge_results([found], "found"), net.true, 1e-3, 1e-5)


def test_a_node_that_comes_back_is_measured_after_all() -> None:
    net = Net(far_apart(4))
    for node in range(4):
        net.join(node)
    net.later(2.5, lambda: net.die(3))
    net.later(2.6, lambda: net.join(3))
    found = net.run()
    assert not found.missing
    agrees(merge_results([found], "found"), net.true, 1e-3, 1e-5)


def test_nodes_that_do_not_come_are_not_waited_for_for_ever() -> None:
    net = Net(far_apart(3), ProfilingDeadlines(joining=timedelta(seconds=30)))
    net.join(0)
    net.join(2)
    found = net.run()
    assert net.heard == ["going on without n1: they have not joined in time"]
    assert found.missing == ("n1",)
    assert set(found.links) == {("n0", "n2"), ("n2", "n0")}


def test_a_node_that_cannot_compute_is_left_out() -> None:
    net = Net(far_apart(3), ProfilingDeadlines(computing=timedelta(seconds=20)))
    net.join(0)
    net.join(1, Computed([[0.0, -1.0]], 2**30, "cpu", "m1"))
    net.alive[2] = ProfilingNode(2, 3, QUICK, VirtualNodeEnv(net, 2))
    net.coordinator.joined(2)
    net.later(0.1, lambda: net.coordinator.handle(2, Failed("device 'cuda': this machine has 0 CUDA devices")))
    found = net.run()
    assert found.missing == ("n1", "n2")
    assert "n2' is left out: device 'cuda'" in net.heard[0]


def test_nodes_of_one_machine_share_its_memory() -> None:
    net = Net(far_apart(4))
    for node, (machine, device) in enumerate([("a", "cpu"), ("a", "cpu"), ("a", "cuda:0"), ("b", "cpu")]):
        net.join(node, Computed([[0.01, 0.02]], 1000, device, machine))
    found = net.run()
    assert [node.memory_bytes for node in found.nodes.values()] == [500, 500, 1000, 1000]
    assert [node.location for node in found.nodes.values()] == ["a", "a", "a", "b"]


def test_what_was_measured_when_it_was_stopped() -> None:
    net = Net(far_apart(4))
    for node in range(4):
        net.join(node)
    found = net.run(lambda: len(net.coordinator.result("").links) == 3)
    cluster = merge_results([found], "part of it")
    assert (cluster.bandwidth_bytes_per_s > 0).sum() == 3
    assert not unreachable([found]), "nobody knows"


def test_a_node_drops_what_it_did_not_ask_for() -> None:
    net = Net(far_apart(3))
    net.join(0)
    node = net.alive[0]
    node.receive(1, Message(GradientPiece(0, 0, 0)))
    node.receive(1, Message(ProbePiece(7, 1, 0)))
    node.handle_peer_control(1, Stop(""))
    for peer in (0, 3):
        node.handle_control(Probe(1, peer))
        node.handle_control(ProbeRate(2, receiving=True, streams=[[peer, 4096, 3, 0]]))
    node.handle_control(ProbeRate(2, receiving=True, streams=[[1, 2**40, 3, 0]]))
    assert sum(node.dropped.values()) == 8
    assert node.stopped is None
    node.handle_control(Stop(""))
    assert node.stopped is not None
    assert node.hello("here", "1") == Hello("here", "1")


# Processes


@pytest.mark.slow
def test_emulated_links_and_a_node_that_is_killed(tmp_path: Path) -> None:
    """A shared machine is noisy: the benchmark asks for more (`benchmarks/profile.py`)."""
    assert in_a_process(emulated, tmp_path) == 0
    (found,) = load_results(tmp_path / "cluster.json")
    assert found.missing == ("n4",)
    assert "'n4' is left out: " in (tmp_path / "happened").read_text()
    cluster = merge_results([found], "found")
    assert len(cluster) == 4
    assert len(found.links) == 4 * 3
    agrees(cluster, with_uploads(far_apart(5, 0.03)), 0.25, 0.005)
    assert [node.upload_bytes_per_s for node in cluster.nodes] == pytest.approx([UPLOAD] * 4, rel=0.25)


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    assert in_a_process(stopped_early, tmp_path) == 130
    assert "stopped; what was measured so far is in c.json" in (tmp_path / "said").read_text()
    cluster = Cluster.load(tmp_path / "c.json")
    assert len(cluster) == 3
    assert 1 <= (cluster.bandwidth_bytes_per_s > 0).sum() < 6


def test_the_command_and_the_plan_that_follows(tmp_path: Path) -> None:
    """Two nodes of this machine, twice onto the same file; then the planner takes it."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    work = ("--model", "config.json", "--sequence", "16", "--transfer", "0.05")
    assert in_a_process(command, tmp_path, "profile", "--local", "2", *work, "-o", "c.json", "--json") == 0
    told = json.loads((tmp_path / "said").read_text().splitlines()[-1])
    assert set(told) == documented("docs/formats.md", "skippipe profile")
    assert (told["output"], told["surveys"], told["unreachable"]) == ("c.json", 1, [])
    assert told["cluster"] == json.loads((tmp_path / "c.json").read_text())
    (kept,) = json.loads((tmp_path / "c.profile.json").read_text())["surveys"]
    assert set(kept) == documented("docs/formats.md", "Profile file")
    first = Cluster.load(tmp_path / "c.json")
    assert [node.name for node in first.nodes] == ["node-0", "node-1"]
    first = replace(first, nodes=tuple(replace(node, location="attic") for node in first.nodes), name="mine")
    first.save(tmp_path / "c.json")
    assert in_a_process(command, tmp_path, "profile", "--local", "2", *work, "-o", "c.json") == 0
    both = Cluster.load(tmp_path / "c.json")
    assert both.name == "mine"
    assert {node.location for node in both.nodes} == {"attic"}
    assert len(load_results(tmp_path / "c.json")) == 2
    said = (tmp_path / "said").read_text()
    assert "written to c.json; 2 measurements put together; next: skippipe plan c.json" in said
    workload = Workload(MODELS["llama-tiny"], 16, 2)
    problem = problem_of(cluster_named(str(tmp_path / "c.json"))[0], workload, PlanSpec(stages=2, visit=2))
    assert problem.cluster == both


def test_rates_of_nodes_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = ProfileResult.of_cluster(with_uploads(far_apart(3)))
    _print_result(tmp_path / "c.json", merge_results([result], "found"), [result], as_json=False)
    assert "'n1' sends 5.0 MB/s at most, over all its links together\n" in capsys.readouterr().out


def test_nodes_that_join(tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """With keys that were made from names alone; one of three never comes."""
    keys, where = tmp_path / "keys", f"127.0.0.1:{free_port('127.0.0.1')}"
    assert run("keys", "ann,bob,carol", keys) == (0, "")
    members = []
    for name in ("ann", "bob"):
        mine = KeyFile.load(keys / f"{name}.key")
        join_config = JoinConfig(
            name, where, mine.keys, mine.coordinator, coordinator_timeout=timedelta(seconds=TIMEOUT_S)
        )
        members.append(threading.Thread(target=NodeAgent(join_config, ROLES).run, daemon=True))
        members[-1].start()
    nodes = tuple(Node(name, "there", 1.0, 1) for name in ("ann", "bob", "carol"))
    node_config = profiling_config(replace(far_apart(3, 0.01), nodes=nodes))
    deadlines = ProfilingDeadlines(joining=timedelta(seconds=3))
    launcher = JoinLauncher(node_config.names, keys / "coordinator.key", keys / "peers.json")
    found = profile_nodes(node_config, launcher, Notes(tmp_path), listen=where, deadlines=deadlines)
    for member in members:
        member.join(TIMEOUT_S)
        assert not member.is_alive(), "they are dismissed"
    assert set(found.links) == {("ann", "bob"), ("bob", "ann")}
    assert found.missing == ("carol",)
    assert f"waiting for 3 nodes to join {where}: ann, bob, carol" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (("profile",), "say where nodes are: --local N"),
        (("profile", "--local", "2", "--keys", "keys"), "leave one out"),
        (("profile", "--keys", "keys"), "keys/peers.json: no such file"),
        (("profile", "--local", "2", "--model", "gpt-9"), "model 'gpt-9': neither a preset"),
        (("profile", "--local", "2", "--device", "tpu"), "device 'tpu': expected cpu"),
        (("profile", "--local", "2", "--merge", "none.json"), "none.json: no such file"),
        (("profile", "--local", "2", "-o", "."), ".: this is a folder"),
        (("keys", "ann,ann", "keys"), "2 different names of nodes are needed"),
        (("keys", "ann,coordinator", "keys"), "'coordinator' is already the name of the coordinator"),
        (
            ("keys", "ann,bob", "keys", "--relays", "Bob"),
            "--relays Bob: 'Bob' and 'bob', the name of node 'bob', would",
        ),
        (("keys", "ann,../bob", "keys"), "'../bob' would be a way to another folder"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run, words: tuple[str, ...], wrong: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, error = run(*words)
    assert code == 2
    assert wrong in error
    assert error.count("\n") == 1
    assert not any(tmp_path.iterdir())


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def called(*words: str | Path) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["skippipe", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), capsys.readouterr().err

    return called


def test_memory_is_what_is_free_within_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = free_bytes(torch.device("cpu"))
    assert 2**20 < machine < 2**50
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    monkeypatch.setattr("skippipe.profiling.compute_bench.CGROUP", tmp_path)
    assert free_bytes(torch.device("cpu")) == 2_000_000


# While training


def test_training_finds_out_what_nodes_and_links_take(tmp_path: Path) -> None:
    last = Last()
    planned = trained(
        CallbackList(lambda: [last, ClusterFile(tmp_path / "cluster.json")]),
        slow_node(3, 4.0).at(iteration=1),
        slow_link(0, 2).at(iteration=1),
    )
    found = Cluster.load(tmp_path / "cluster.json")
    assert found == last.clusters[-1]
    speeds = [new.flops_per_s / old.flops_per_s for new, old in zip(found.nodes, planned.nodes, strict=True)]
    assert speeds[3] == pytest.approx(1 / 4, rel=0.2)
    assert speeds[:3] + speeds[4:] == pytest.approx([1.0] * 7, rel=1e-3)
    assert found.bandwidth_bytes_per_s[0, 2] < planned.bandwidth_bytes_per_s[0, 2] / 1.5
    assert found.bandwidth_bytes_per_s[0, 3] == pytest.approx(planned.bandwidth_bytes_per_s[0, 3], rel=1e-3)


def test_a_run_that_takes_what_was_planned_finds_the_cluster_as_it_was() -> None:
    last = Last()
    planned = trained(last)
    (found,) = last.clusters
    assert [node.flops_per_s for node in found.nodes] == pytest.approx([node.flops_per_s for node in planned.nodes])
    agrees(found, planned, 1e-3, 0)


def test_a_cluster_file_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cluster.json").mkdir()
    last = Last()
    CallbackList([ClusterFile(tmp_path / "cluster.json"), last]).measured(far_apart(2))
    assert "cluster.json: cannot be written" in caplog.text
    assert len(last.clusters) == 1, "the others are told all the same"
