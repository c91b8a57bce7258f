"""Nodes that torchrun starts, one rank a node:

    torchrun --nproc-per-node 9 -m skippipe.training.torchrun job.toml

Rank r is the r-th node of the plan. Rank 0 reads the job, plans and coordinates; its own node is a child process. All
others need no job file. Every rank makes its own keys; public keys and the coordinator's address travel over
torchrun's store, which must be trusted: who can write to it can take part.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skippipe.errors import UserError, run_command
from skippipe.transport.addresses import free_port, is_loopback, join_address, own_address, split_address

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from skippipe.runtime.coordinator.interfaces import Callback, StopRequests
    from skippipe.training.build_run import RunSetup
    from skippipe.training.run import Run

STORE_PATIENCE = timedelta(minutes=5)
"""For torchrun's store to answer."""
RANK_PATIENCE = timedelta(minutes=10)
"""For every rank to say that it is there, once rank 0 has a plan."""
PLAN_PATIENCE = timedelta(hours=1)
"""For rank 0 to read its text and to plan."""


@dataclass(frozen=True)
class Rank:
    number: int
    world: int
    local: int
    """Its number on its machine."""
    master: str
    """Name or address of the machine with the store."""

    @classmethod
    def here(cls) -> Rank:
        try:
            number, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
            return cls(number, world, local, os.environ["MASTER_ADDR"])
        except (KeyError, ValueError):
            raise UserError(
                "this is for torchrun to start: torchrun --nproc-per-node NODES -m skippipe.training.torchrun JOB"
            ) from None

    def store(self) -> Store:
        """Torchrun's own; or, with these variables set by something else, one that rank 0 serves."""
        from torch._C._distributed_c10d import PrefixStore
        from torch.distributed import DistError
        from torch.distributed.rendezvous import rendezvous

        try:
            store: Store = next(rendezvous("env://", timeout=STORE_PATIENCE))[0]
        except DistError as error:
            raise UserError(f"rank {self.number}: torchrun's store at {self.master}: {_first_line(error)}") from None
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # a run that torchrun starts again exchanges anew
        return PrefixStore(f"skippipe/{attempt}", store)

    def device(self, asked: str) -> str:
        return f"cuda:{self.local}" if asked == "cuda" else asked


def train(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="A job file; only rank 0 reads it.")],
    iterations: Annotated[int | None, typer.Option(min=1, help="Instead of the job's.")] = None,
    out: Annotated[str | None, typer.Option(help="Output folder, instead of the job's.")] = None,
    tokens: Annotated[
        Path | None, typer.Option(help="Where this machine keeps the token folder, if elsewhere than rank 0.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="As for 'skippipe train'.")] = False,
    force: Annotated[bool, typer.Option("--force", help="As for 'skippipe train'.")] = False,
    rescue: Annotated[Path | None, typer.Option(help="As for 'skippipe train'.")] = None,
) -> None:
    """Train with one rank of torchrun a node.

    Example: torchrun --nproc-per-node 9 -m skippipe.training.torchrun job.toml
    """
    rank = Rank.here()
    if rank.number > 0:
        follow(rank, tokens)
        return
    from skippipe.training.train_job import run_job, wanted_job

    wanted = wanted_job(job, iterations, out)
    if wanted.transport.peers:
        raise UserError("transport.peers: is for nodes that join by themselves; torchrun's have keys made for the run")
    run_job(wanted, partial(lead, rank=rank, tokens=tokens), resumed=resume, force=force, rescue=rescue)


def lead(
    run_setup: RunSetup, callback: Callback, asked: StopRequests, *, rank: Rank, tokens: Path | None = None
) -> None:
    """Rank 0: coordinate, with the first node as a child."""
    from skippipe.launch.fork_server import ProcessPool
    from skippipe.runtime.node.agent import node_process
    from skippipe.runtime.train_role import ROLES

    run = run_setup.run
    if len(run.names) != rank.world:
        raise UserError(
            f"the plan uses {len(run.names)} nodes and torchrun started {rank.world} ranks: "
            f"start {len(run.names)}, or plan for {rank.world} nodes"
        )
    pool = ProcessPool(
        partial(node_process, ROLES), run.output / "logs"
    )  # forks: before the store, which may have threads
    try:
        store = rank.store()
        others = [_wait(store, f"rank {each}", "to start", RANK_PATIENCE) for each in range(1, rank.world)]
        run = reachable(run, next((own_address(each["host"]) for each in others if not is_loopback(each["host"])), ""))
        first, own = run.new_keys(), run.new_keys()
        publics = [first.public if first else None, *(each["public"] for each in others)]
        desk = run.desk(own, dict(zip(run.names, publics, strict=True)))
        try:
            for each, name in enumerate(run.names[1:], start=1):
                told = run.told(name, desk, own)
                store.set(f"invitation {each}", json.dumps({**told, "device": run.node_config.device}))
            mine = {**run.told(run.names[0], desk, own, first), "device": run.node_config.device}
            pool.start(run.names[0], _at_home(mine, rank, tokens))
            run.coordinate(desk, callback, asked, lambda: run.ended(pool))
        finally:
            desk.close()
    finally:
        pool.close()


def reachable(run: Run, host: str) -> Run:
    """The same, listening at an address of this machine that the nodes can reach; empty: all are on this machine."""
    host = host or "127.0.0.1"
    meeting = join_address(host, free_port(host)) if run.node_config.rendezvous else None
    listen = join_address(host, split_address(run.listen)[1])
    return run.listening(listen, meeting)


def follow(rank: Rank, tokens: Path | None) -> None:
    """Every other rank: a node."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("SKIPPIPE_PURE_PYTHON", "1")  # a node decides a few times a second: no compiler needed
    from skippipe.runtime.node.agent import node_main
    from skippipe.runtime.train_role import ROLES
    from skippipe.transport.keys import KeyPair

    store = rank.store()
    pair = KeyPair.new()
    store.set(f"rank {rank.number}", json.dumps({"public": pair.public, "host": own_address(rank.master)}))
    told = _wait(store, f"invitation {rank.number}", "from rank 0", PLAN_PATIENCE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every rank; rank 0 decides what it means
    keys = [pair.public, pair.secret] if told["security"] == "curve" else None
    if reason := node_main(ROLES, _at_home({**told, "keys": keys}, rank, tokens)):
        raise UserError(reason)


def _at_home(told: dict[str, Any], rank: Rank, tokens: Path | None) -> dict[str, Any]:
    """An invitation with what only this machine knows: its address, its device, its folders."""
    return {
        **told,
        "listen": join_address(own_address(split_address(told["coordinator"])[0]), 0),
        "device": rank.device(told["device"]),
        "data_folder": str(tokens) if tokens else None,
    }


def _wait(store: Store, key: str, what: str, patience: timedelta) -> dict[str, Any]:
    from torch.distributed import DistNetworkError, DistStoreError

    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)  # a store that waits does not notice Python's handlers
    try:
        store.wait([key], patience)
        return dict(json.loads(store.get(key)))
    except DistNetworkError as error:
        raise UserError(f"{key}: torchrun's store is gone: {_first_line(error)}") from None
    except DistStoreError:
        raise UserError(f"waited {patience.total_seconds():.0f} s for {key} {what}") from None
    finally:
        signal.signal(signal.SIGINT, handler)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def main() -> None:
    run_command(lambda: typer.run(train))


if __name__ == "__main__":
    main()
