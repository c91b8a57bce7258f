"""Machines that cannot be called, or not at every address, on networks of their own: what `skippipe invite`, `node` and
`doctor` make of a home router, closed ports and addresses of one kind only.

make test-reach    # Linux, with iproute2; ten minutes

A kernel need not be able to filter: routing rules drop what a firewall would, and a program of the tests translates
addresses as a home router does.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.namespaces import ROOT, Machine, Terminal, neighbours
from tests.helpers.processes import MODEL

SKIPPIPE = f"{sys.executable} -m skippipe"
ADDRESSES = "10.0.0.1:5555,[fd00::1]:5555"
READY_S = 120.0
ITERATIONS = 6
JOB = f"""
output = "run"
iterations = {ITERATIONS}
cluster = "cluster.json"
model.config = "."
data = {{ texts = ["text.txt"], vocabulary = 300, folder = "tokens" }}
batch = {{ sequence = 16, samples = 1, microbatches = 4 }}
pipeline = {{ stages = 2, skip = "0", budget_s = 0.2 }}
[transport]
listen = "[::]:5555"
peers = "cluster/peers.json"
key = "cluster/coordinator.key"
"""


@dataclass
class Street:
    """Ann has the coordinator; Bob and Erin are at home, behind one router; Carol and Dan are in the open."""

    ann: Machine
    bob: Machine
    carol: Machine
    dan: Machine
    erin: Machine

    def job(self, *names: str) -> None:
        node = {"location": "here", "flops_per_s": 1e11, "memory_bytes": 2**33}
        every = range(len(names))
        cluster = {
            "format": "skippipe-cluster",
            "version": 1,
            "name": "street",
            "nodes": [{"name": name, **node} for name in names],
            "latency_s": [[0.0 if one == other else 0.001 for other in every] for one in every],
            "bandwidth_bytes_per_s": [[0.0 if one == other else 1e8 for other in every] for one in every],
        }
        home = self.ann.home
        (home / "cluster.json").write_text(json.dumps(cluster))
        (home / "config.json").write_text(json.dumps(MODEL))
        (home / "text.txt").write_text("".join(f"The fox jumps over {each} dogs.\n" for each in range(300)))
        (home / "job.toml").write_text(JOB)

    def invite(self, name: str, address: str = ADDRESSES) -> str:
        said = self.ann.run(f"{SKIPPIPE} invite cluster --name {name} --address {address}")
        return next(line for line in said.splitlines() if line.startswith("skippipe:"))

    def node(self, machine: Machine, invitation: str, options: str = "") -> Terminal:
        """A node that joins, with a copy of the text."""
        shutil.copytree(self.ann.home / "tokens", machine.home / "tokens", dirs_exist_ok=True)
        return machine.start(f"{SKIPPIPE} node '{invitation}' --tokens tokens {options}")

    def events(self, kind: str) -> list[str]:
        lines = (self.ann.home / "run" / "events.jsonl").read_text().splitlines()
        return [each["text"] for each in map(json.loads, lines) if each["kind"] == kind]

    def is_trained(self, run: Terminal, *nodes: Terminal) -> None:
        run.ends()
        for node in nodes:
            node.ends()
        assert len((self.ann.home / "run" / "metrics.jsonl").read_text().splitlines()) == ITERATIONS


@pytest.fixture
def street(tmp_path: Path) -> Iterator[Street]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("XDG")}
    environment = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SKIPPIPE_PURE_PYTHON": "1"}
    with neighbours(
        tmp_path, ["ann", "bob", "carol", "dan", "erin"], environment, at_home=[["bob", "erin"]]
    ) as machines:
        yield Street(*machines)


def finding(said: str, check: str) -> str:
    """The one line of this check."""
    (line,) = [line for line in said.splitlines() if re.match(rf"\w+ +{check}: ", line)]
    return line


def test_a_machine_behind_a_home_router_joins_by_invitation_and_trains(street: Street) -> None:
    """It is found out that Bob cannot be called. Between Ann and Carol IPv4 does not work: they meet over IPv6, and
    Bob, who has IPv4 alone, calls Carol at her other address."""
    street.ann.root("ip rule add to 10.0.0.3 blackhole")
    street.job("bob", "carol")
    invited = {name: street.invite(name) for name in ("bob", "carol")}
    run = street.ann.start(f"{SKIPPIPE} train job.toml")
    run.says("waiting for 2 nodes", within_s=READY_S)
    said = street.bob.run(f"{SKIPPIPE} doctor '{invited['bob']}'")
    assert "warning  port: the coordinator cannot reach this machine at 192.168.1.2:" in finding(said, "port")
    assert finding(said, "mtu").startswith("ok ")
    bob, carol = street.node(street.bob, invited["bob"]), street.node(street.carol, invited["carol"])
    street.is_trained(run, bob, carol)
    assert [each for each in street.events("joined") if "cannot be called at 192.168.1.2:" in each]
    assert not [each for each in street.events("joined") if "cannot be called at" in each and "fd00::3" in each]


def test_two_machines_behind_one_router_reach_each_other_without_a_relay(street: Street) -> None:
    """Neither can be called from outside, and every stage has one node alone: each microbatch goes from one to the
    other and back."""
    street.job("bob", "erin")
    invited = {name: street.invite(name) for name in ("bob", "erin")}
    run = street.ann.start(f"{SKIPPIPE} train job.toml")
    run.says("waiting for 2 nodes", within_s=READY_S)
    bob, erin = street.node(street.bob, invited["bob"]), street.node(street.erin, invited["erin"])
    street.is_trained(run, bob, erin)
    for address in ("192.168.1.2:", "192.168.1.3:"):
        assert [each for each in street.events("joined") if f"cannot be called at {address}" in each]


def test_a_closed_port_and_a_blocked_coordinator(street: Street) -> None:
    """Dan's port is closed to all: doctor says so, and he takes part by calling. Ann's machine drops what comes from
    Carol: one line for doctor, and one at join."""
    street.ann.root("ip rule add to 10.0.0.3 blackhole")
    street.dan.root("ip rule add ipproto tcp sport 5556 blackhole")
    street.job("carol", "dan")
    invited = {name: street.invite(name, "10.0.0.1:5555") for name in ("carol", "dan")}
    run = street.ann.start(f"{SKIPPIPE} train job.toml")
    run.says("waiting for 2 nodes", within_s=READY_S)
    dan = street.node(street.dan, invited["dan"], "--listen 5556")
    dan.says(r"warning: port: the coordinator cannot reach this machine at 10\.0\.0\.4:5556: nothing came back in")
    said = street.carol.start(f"{SKIPPIPE} doctor '{invited['carol']}'").ends(1)
    assert re.match(
        r"wrong +coordinator: 10\.0\.0\.1:5555: nothing came back in 5 s; is that machine on, and do its firewall and "
        r"router let TCP ports 5554 and 5555 through\?",
        finding(said, "coordinator"),
    )
    said = street.carol.start(f"{SKIPPIPE} node '{invited['carol']}' --coordinator-timeout 2").ends(2)
    assert re.search(r"^error: waited 2 s for the coordinator: 10\.0\.0\.1:5554: nothing came back", said, re.MULTILINE)
    street.ann.root("ip rule del to 10.0.0.3 blackhole")
    carol = street.node(street.carol, invited["carol"])
    street.is_trained(run, dan, carol)
    assert [each for each in street.events("joined") if "cannot be called at 10.0.0.4:5556" in each]
