"""Nodes that torchrun starts, one rank a node. Rank r is the r-th node of the plan.

Rank 0 reads the job, plans and coordinates; its own node is a child process. Every rank makes its own keys; public keys
and the coordinator's address travel over torchrun's store, which must be trusted: who can write to it can take part.
The command is `skippipe.training.torchrun`.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skippipe.errors import UserError, first_line
from skippipe.launch.launcher import NodeEndpoints, join_config
from skippipe.transport.addresses import free_port, is_loopback, join_address, own_address, split_address
from skippipe.transport.keys import KeyPair

if TYPE_CHECKING:  # torch and kernels are imported when the command has set up their environment
    from torch._C._distributed_c10d import Store

    from skippipe.runtime.node.interfaces import Roles
    from skippipe.transport.mailbox import Security

SIGNALS = (signal.SIGINT, signal.SIGTERM)
STORE_TIMEOUT = timedelta(minutes=5)
"""Within which torchrun's store must answer."""
RANK_TIMEOUT = timedelta(minutes=10)
"""Within which every rank must have started, once rank 0 has a plan."""
PLAN_TIMEOUT = timedelta(hours=1)
"""Within which rank 0 must have read its text and planned."""


@dataclass(frozen=True)
class Rank:
    """This process among those that torchrun has started."""

    number: int
    world: int
    """How many ranks there are."""
    local: int
    """Number of the rank on its machine."""
    master: str
    """Name or address of the machine with the store."""

    @classmethod
    def from_environment(cls) -> Rank:
        try:
            number, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
            return cls(number, world, local, os.environ["MASTER_ADDR"])
        except (KeyError, ValueError):
            raise UserError(
                "this is for torchrun to start: torchrun --nproc-per-node NODES -m skippipe.training.torchrun JOB"
            ) from None

    def store(self) -> Store:
        """Torchrun's own store; or, with these variables set by something else, one that rank 0 serves."""
        from torch._C._distributed_c10d import PrefixStore
        from torch.distributed import DistError
        from torch.distributed.rendezvous import rendezvous

        try:
            store: Store = next(rendezvous("env://", timeout=STORE_TIMEOUT))[0]
        except DistError as error:
            raise UserError(f"rank {self.number}: torchrun's store at {self.master}: {first_line(error)}") from None
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # a run that torchrun starts again exchanges anew
        return PrefixStore(f"skippipe/{attempt}", store)

    def device(self, wanted: str) -> str:
        """With "cuda", every rank of a machine takes a GPU of its own."""
        return f"cuda:{self.local}" if wanted == "cuda" else wanted


class TorchrunLauncher:
    """Rank 0's view: the other ranks are there already and get their `JoinConfig` over the store."""

    def __init__(
        self,
        names: Sequence[str],
        roles: Roles,
        rank: Rank,
        log_folder: Path,
        device: str,
        security: Security = "curve",
        tokens: Path | None = None,
    ) -> None:
        """`device` is the job's, `tokens` where this machine keeps the token folder. Forks at once."""
        if len(names) != rank.world:
            raise UserError(
                f"the plan uses {len(names)} nodes and torchrun started {rank.world} ranks: "
                f"start {len(names)}, or plan for {rank.world} nodes"
            )
        from skippipe.launch.launcher import LocalLauncher

        self._first = LocalLauncher(names[:1], roles, log_folder, security)  # before the store, which may have threads
        self.keys = self._first.keys
        self._names = names
        self._rank = rank
        self._device = device
        self._tokens = tokens
        self._store: Store | None = None

    def prepare(self) -> NodeEndpoints:
        self._store = self._rank.store()
        others = [_wait(self._store, f"rank {each}", "to start", RANK_TIMEOUT) for each in range(1, self._rank.world)]
        far = next((own_address(each["host"]) for each in others if not is_loopback(each["host"])), "127.0.0.1")
        public_keys = {**self._first.prepare().public_keys}
        public_keys |= {name: each["public"] for name, each in zip(self._names[1:], others, strict=True)}
        return NodeEndpoints(public_keys, far, join_address(far, free_port(far)))

    def start(self, address: str) -> None:
        assert self._store is not None
        for number, name in enumerate(self._names[1:], start=1):
            config = {**join_config(name, address, self.keys), "devices": self._device}
            self._store.set(f"join config {number}", json.dumps(config))
        self._first.start(address, **_machine_settings(address, self._device, self._rank, self._tokens))

    def ended(self) -> list[tuple[str, str]]:
        """Only rank 0's own node is watched here; torchrun ends all ranks when one of them fails."""
        return self._first.ended()

    def close(self) -> None:
        self._first.close()


def run_rank(rank: Rank, roles: Roles, tokens: Path | None) -> None:
    """What every rank but the first does: run a node."""
    from skippipe.runtime.node.agent import node_main

    store = rank.store()
    pair = KeyPair.new()
    store.set(f"rank {rank.number}", json.dumps({"public": pair.public, "host": own_address(rank.master)}))
    config = _wait(store, f"join config {rank.number}", "from rank 0", PLAN_TIMEOUT)
    for number in SIGNALS:  # they reach every rank; rank 0 decides what they mean
        signal.signal(number, signal.SIG_IGN)
    keys = [pair.public, pair.secret] if config["security"] == "curve" else None
    settings = _machine_settings(config["coordinator"], config["devices"], rank, tokens)
    if reason := node_main(roles, {**config, **settings, "keys": keys}):
        raise UserError(reason)


def _machine_settings(coordinator: str, device: str, rank: Rank, tokens: Path | None) -> dict[str, Any]:
    """What only a node's machine knows of its `JoinConfig`: its address, its device, its folders."""
    return {
        "listen": join_address(own_address(split_address(coordinator)[0]), 0),
        "devices": rank.device(device),
        "data_folder": str(tokens) if tokens else None,
    }


def _wait(store: Store, key: str, what: str, timeout: timedelta) -> dict[str, Any]:
    from torch.distributed import DistNetworkError, DistStoreError

    # a store that waits does not notice Python's handlers
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    try:
        store.wait([key], timeout)
        return dict(json.loads(store.get(key)))
    except DistNetworkError as error:
        raise UserError(f"{key}: torchrun's store is gone: {first_line(error)}") from None
    except DistStoreError:
        raise UserError(f"waited {timeout.total_seconds():.0f} s for {key} {what}") from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
