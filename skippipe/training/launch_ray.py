"""Nodes as Ray actors. Ray finds them a place, starts them and notices when one dies; what nodes say to each other goes
over their own encrypted connections and never through Ray.

A Ray machine that has the resource "skippipe:NAME" (ray start --resources '{"skippipe:berlin-1": 1}') gets the plan's
node NAME; the others are spread over the cluster as Ray likes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from skippipe.errors import UserError
from skippipe.runtime.coordinator.interfaces import Callback, StopRequests
from skippipe.training.build_run import RunSetup
from skippipe.training.run import Run
from skippipe.transport.addresses import free_port, is_loopback, join_address, own_address, split_address
from skippipe.transport.keys import KeyPair

KNOCK_PATIENCE = timedelta(seconds=10)
"""For the head of a Ray cluster to answer."""
PLACE_PATIENCE = timedelta(minutes=2)
"""For Ray to find room for every node."""
START_PATIENCE = timedelta(minutes=5)
"""For every actor to start: its machine may have to load everything from a slow disk."""
END_PATIENCE = timedelta(seconds=10)
"""For nodes to end by themselves, once they are told."""
PINNED = "skippipe:"
_ray: Any = ray  # for what it has no types for


class Actor:
    """A node's life on a machine of the Ray cluster."""

    def __init__(self) -> None:
        self._keys = KeyPair.new()

    def introduce(self) -> dict[str, Any]:
        """What the coordinator must know of it; the secret key stays here."""
        host = _ray.util.get_node_ip_address()
        return {"public": self._keys.public, "host": host, "port": free_port(host)}

    def live(self, told: dict[str, Any]) -> str:
        """Why it ended; empty if all is well."""
        from skippipe.runtime.node.agent import node_main
        from skippipe.runtime.train_role import ROLES

        keys = [self._keys.public, self._keys.secret] if told["security"] == "curve" else None
        return node_main(ROLES, {**told, "keys": keys, "listen": join_address(_ray.util.get_node_ip_address(), 0)})


def train_on_ray(run_setup: RunSetup, callback: Callback, asked: StopRequests) -> None:
    job = run_setup.job
    if job.transport.peers:
        raise UserError("transport.peers: is for nodes that join by themselves; Ray's have keys made for the run")
    run = run_setup.run
    each = {"CPU": float(job.compute.threads), "GPU": float(job.compute.device.startswith("cuda"))}
    with _connected(each, len(run.names)), _placed(run.names, each) as group:
        actors = {name: _actor(group, index, each) for index, name in enumerate(run.names)}
        met = _introduced(actors)
        run = _reachable(run, met)
        own = run.new_keys()
        desk = run.desk(own, {name: met[name]["public"] for name in run.names})
        device = {"device": "cuda"} if each["GPU"] else {}  # the one that Ray lets an actor see
        lives = {name: actor.live.remote({**run.told(name, desk, own), **device}) for name, actor in actors.items()}
        try:
            run.coordinate(desk, callback, asked, lambda: _ended(lives))
            if lives:
                ray.wait(list(lives.values()), num_returns=len(lives), timeout=END_PATIENCE.total_seconds())
        finally:
            desk.close()
            for actor in actors.values():
                ray.kill(actor)


@contextlib.contextmanager
def _connected(each: Mapping[str, float], count: int) -> Iterator[None]:
    """To the cluster at RAY_ADDRESS; without one, a Ray of this machine alone that has room for all."""
    if ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS")
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": True}
    try:
        if address:
            _knock(address)
            ray.init(address=address, **quiet)
        else:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            wanted = max(count * int(each["CPU"]), os.cpu_count() or 1)
            ray.init(address="local", num_cpus=wanted, include_dashboard=False, _node_ip_address="127.0.0.1", **quiet)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        raise UserError(f"Ray{f' at {address}' if address else ''}: {_first_line(error)}") from None
    try:
        yield
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Ray itself tries for minutes; OSError if nobody listens."""
    host, _, port = address.rpartition(":")
    if port.isdigit():  # else a name that Ray knows, such as "auto"
        socket.create_connection((host.removeprefix("ray://"), int(port)), KNOCK_PATIENCE.total_seconds()).close()


@contextlib.contextmanager
def _placed(names: list[str], each: Mapping[str, float]) -> Iterator[PlacementGroup]:
    """Room for every node at once, spread over the machines."""
    known = _ray.cluster_resources()
    room = {kind: amount for kind, amount in each.items() if amount}
    bundles = [{**room, **({PINNED + name: 1.0} if PINNED + name in known else {})} for name in names]
    group = placement_group(bundles, strategy="SPREAD")
    try:
        if not group.wait(PLACE_PATIENCE.total_seconds()):
            has = ", ".join(
                f"{_ray.available_resources().get(kind, 0):g} of {known.get(kind, 0):g} {kind}" for kind in room
            )
            needs = " and ".join(f"{amount:g} {kind}" for kind, amount in room.items())
            raise UserError(
                f"waited {PLACE_PATIENCE.total_seconds():.0f} s for Ray to find room for {len(names)} nodes of {needs} "
                f"each; free are {has}"
            )
        yield group
    finally:
        remove_placement_group(group)


def _actor(group: PlacementGroup, index: int, each: Mapping[str, float]) -> Any:
    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    return ray.remote(Actor).options(num_cpus=each["CPU"], num_gpus=each["GPU"], scheduling_strategy=place).remote()


def _introduced(actors: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    asked = {name: actor.introduce.remote() for name, actor in actors.items()}
    done, missing = ray.wait(list(asked.values()), num_returns=len(asked), timeout=START_PATIENCE.total_seconds())
    if missing:
        late = ", ".join(name for name, answer in asked.items() if answer not in done)
        raise UserError(f"waited {START_PATIENCE.total_seconds():.0f} s for Ray to start the actors of {late}")
    return {name: _result(name, answer) for name, answer in asked.items()}


def _result(name: str, answer: Any) -> Any:
    try:
        return ray.get(answer)
    except RayError as error:
        raise UserError(f"node '{name}': its Ray actor failed: {_first_line(error)}") from None


def _reachable(run: Run, met: Mapping[str, Mapping[str, Any]]) -> Run:
    """The same, listening where all actors reach it; torch.distributed meets at the first node."""
    first = met[run.names[0]]
    hosts = [each["host"] for each in met.values()]
    far = next((host for host in hosts if not is_loopback(host)), hosts[0])
    listen = join_address(own_address(far), split_address(run.listen)[1])
    meeting = join_address(first["host"], first["port"]) if run.node_config.rendezvous else None
    return run.listening(listen, meeting)


def _ended(lives: dict[str, Any]) -> list[tuple[str, str]]:
    """Nodes that are no more, and what is known of how they ended; each is told once."""
    if not lives:
        return []
    done, _ = ray.wait(list(lives.values()), num_returns=len(lives), timeout=0)
    found = []
    for name, answer in list(lives.items()):
        if answer in done:
            del lives[name]
            try:
                found.append((name, _result(name, answer) or "it was told to stop"))
            except UserError as error:
                found.append((name, str(error)))
    return found


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
