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
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from skippipe.errors import UserError, first_line
from skippipe.launch.launcher import NodeEndpoints, join_config, new_keys
from skippipe.transport.addresses import free_port, is_loopback, join_address, own_address, split_address
from skippipe.transport.keys import KeyPair
from skippipe.transport.mailbox import Security

HEAD_TIMEOUT = timedelta(seconds=10)
"""Within which the head of a Ray cluster must answer."""
PLACEMENT_TIMEOUT = timedelta(minutes=2)
"""Within which Ray must find room for every node."""
START_TIMEOUT = timedelta(minutes=5)
"""Within which every actor must start: its machine may have to load everything from a slow disk."""
END_TIMEOUT = timedelta(seconds=10)
"""Within which nodes end by themselves, once they are told; then they are killed."""
NODE_RESOURCE = "skippipe:"
_ray: Any = ray  # for what it has no types for


class NodeActor:
    """A node on a machine of the Ray cluster."""

    def __init__(self) -> None:
        self._keys = KeyPair.new()

    def describe(self) -> dict[str, Any]:
        """What the coordinator must know of the node; the secret key stays here."""
        host = _ray.util.get_node_ip_address()
        return {"public": self._keys.public, "host": host, "port": free_port(host)}

    def run(self, config: dict[str, Any]) -> str:
        """Run the node until its end; gives the reason, empty if all is well. `config` is a `JoinConfig` as JSON."""
        from skippipe.runtime.node.agent import node_main
        from skippipe.runtime.train_role import ROLES

        keys = [self._keys.public, self._keys.secret] if config["security"] == "curve" else None
        return node_main(ROLES, {**config, "keys": keys, "listen": join_address(_ray.util.get_node_ip_address(), 0)})


class RayLauncher:
    """One actor a node; `cpus` and `gpus` are what each of them gets."""

    def __init__(self, names: Sequence[str], cpus: int, gpus: int, security: Security = "curve") -> None:
        self.keys = new_keys(security)
        self._names = names
        self._resources = {"CPU": float(cpus), "GPU": float(gpus)}
        self._stack = contextlib.ExitStack()
        self._actors: dict[str, Any] = {}
        self._running: dict[str, Any] = {}
        """Node → the result of its `run`, to come."""

    def prepare(self) -> NodeEndpoints:
        self._stack.enter_context(_connection(self._resources, len(self._names)))
        group = self._stack.enter_context(_placement(self._names, self._resources))
        for index, name in enumerate(self._names):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            cpus, gpus = self._resources["CPU"], self._resources["GPU"]
            actor = ray.remote(NodeActor).options(num_cpus=cpus, num_gpus=gpus, scheduling_strategy=place)
            self._actors[name] = actor.remote()
        found = _descriptions(self._actors)
        first, hosts = found[self._names[0]], [each["host"] for each in found.values()]
        far = next((host for host in hosts if not is_loopback(host)), hosts[0])
        return NodeEndpoints(
            {name: each["public"] for name, each in found.items()},
            own_address(far),
            join_address(first["host"], first["port"]),
        )

    def start(self, address: str) -> None:
        devices = {"devices": "cuda"} if self._resources["GPU"] else {}  # the one that Ray lets an actor see
        for name, actor in self._actors.items():
            self._running[name] = actor.run.remote({**join_config(name, address, self.keys), **devices})

    def ended(self) -> list[tuple[str, str]]:
        if not self._running:
            return []
        done, _ = ray.wait(list(self._running.values()), num_returns=len(self._running), timeout=0)
        found = []
        for name, result in list(self._running.items()):
            if result in done:
                del self._running[name]
                try:
                    found.append((name, _result(name, result) or "it was told to stop"))
                except UserError as error:
                    found.append((name, str(error)))
        return found

    def close(self) -> None:
        if self._running:
            running = list(self._running.values())
            ray.wait(running, num_returns=len(running), timeout=END_TIMEOUT.total_seconds())
        for actor in self._actors.values():
            ray.kill(actor)
        self._stack.close()


@contextlib.contextmanager
def _connection(resources: Mapping[str, float], count: int) -> Iterator[None]:
    """Connect to the cluster at RAY_ADDRESS; without one, start a Ray of this machine alone with room for all nodes."""
    if ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS")
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": True}
    try:
        if address:
            _check_head(address)
            ray.init(address=address, **quiet)
        else:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            wanted = max(count * int(resources["CPU"]), os.cpu_count() or 1)
            ray.init(address="local", num_cpus=wanted, include_dashboard=False, _node_ip_address="127.0.0.1", **quiet)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        raise UserError(f"Ray{f' at {address}' if address else ''}: {first_line(error)}") from None
    try:
        yield
    finally:
        ray.shutdown()


def _check_head(address: str) -> None:
    """OSError if nothing listens there: Ray itself would try for minutes."""
    if address.rpartition(":")[2].isdigit():  # else a name that Ray knows, such as "auto"
        where = split_address(address.removeprefix("ray://"))
        socket.create_connection(where, HEAD_TIMEOUT.total_seconds()).close()


@contextlib.contextmanager
def _placement(names: Sequence[str], resources: Mapping[str, float]) -> Iterator[PlacementGroup]:
    """Reserve room for every node at once, spread over the machines."""
    known = _ray.cluster_resources()
    room = {kind: amount for kind, amount in resources.items() if amount}
    bundles = [{**room, **({NODE_RESOURCE + name: 1.0} if NODE_RESOURCE + name in known else {})} for name in names]
    group = placement_group(bundles, strategy="SPREAD")
    try:
        if not group.wait(PLACEMENT_TIMEOUT.total_seconds()):
            has = ", ".join(
                f"{_ray.available_resources().get(kind, 0):g} of {known.get(kind, 0):g} {kind}" for kind in room
            )
            needs = " and ".join(f"{amount:g} {kind}" for kind, amount in room.items())
            raise UserError(
                f"waited {PLACEMENT_TIMEOUT.total_seconds():.0f} s for Ray to find room for {len(names)} nodes of "
                f"{needs} each; free are {has}"
            )
        yield group
    finally:
        remove_placement_group(group)


def _descriptions(actors: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    results = {name: actor.describe.remote() for name, actor in actors.items()}
    done, missing = ray.wait(list(results.values()), num_returns=len(results), timeout=START_TIMEOUT.total_seconds())
    if missing:
        late = ", ".join(name for name, result in results.items() if result not in done)
        raise UserError(f"waited {START_TIMEOUT.total_seconds():.0f} s for Ray to start the actors of {late}")
    return {name: _result(name, result) for name, result in results.items()}


def _result(name: str, result: Any) -> Any:
    try:
        return ray.get(result)
    except RayError as error:
        raise UserError(f"node '{name}': its Ray actor failed: {first_line(error)}") from None
