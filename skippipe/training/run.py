"""A run on this machine: start every node, coordinate, collect the model.

An exercise: a node's process is killed in the middle of training, to see what becomes of it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from skippipe.checkpoint.format import CheckpointOrigin, Checkpoints
from skippipe.checkpoint.hf_export import ModelFolder
from skippipe.checkpoint.manager import CheckpointManager, origin_of
from skippipe.checkpoint.storage import ModelStore, Rescue, WriteFailures
from skippipe.constraints import lanes_through
from skippipe.data.tokenizer import TextTokenizer
from skippipe.errors import UserError
from skippipe.launch.fork_server import ProcessPool, how_ended, log_file
from skippipe.model.model_spec import ModelSpec
from skippipe.plan import Plan
from skippipe.runs.wal import WriteAheadLog
from skippipe.runtime.coordinator.failure_detector import WRITE_RETRY_S
from skippipe.runtime.coordinator.interfaces import Callback, Event, IterationReport, StopRequests, WriteFailed
from skippipe.runtime.coordinator.server import CoordinatorServer
from skippipe.runtime.coordinator.settings import CoordinatorSettings
from skippipe.runtime.node.agent import node_process
from skippipe.runtime.node_config import NodeConfig
from skippipe.runtime.rendezvous import EndedNodes
from skippipe.runtime.train_role import ROLES
from skippipe.training.metrics import CallbackList
from skippipe.training.run_folder import journal_run_id
from skippipe.transport.keys import KeyFile, KeyPair, PeerList
from skippipe.transport.mailbox import Security


@dataclass(frozen=True)
class Run:
    """What it takes, beside the brief that nodes get."""

    node_config: NodeConfig
    spec: ModelSpec
    tokenizer: TextTokenizer
    output: Path
    settings: CoordinatorSettings
    security: Security = "curve"
    listen: str = "127.0.0.1:0"
    peers: Path | None = None
    """Who may join, and …"""
    key: Path | None = None
    """… the coordinator's own key, if nodes join by themselves."""
    drills: frozenset[int] = frozenset()
    """After how many iterations a node is killed, for exercise."""
    restarts: int = 0
    """How often a node that was started here is started again."""
    kept: int = 2
    """How many checkpoints stay."""
    resumed: bool = False
    """Go on from the newest checkpoint in the output folder."""
    run_id: str = ""
    """Every file of the run repeats it; what has another one is not touched."""
    rescue: Rescue = lambda: None
    """Where the model and the last checkpoint go if the output folder cannot be written."""

    @cached_property
    def origin(self) -> CheckpointOrigin | None:
        """Where to go on from; found, and checked, when it is first asked for."""
        if not self.resumed or (self.memories and not self.checkpoints.complete()):
            return None
        origin = origin_of(self.checkpoints, self.node_config)
        if origin.manifest.iterations >= self.iterations and not self.memories:
            raise UserError(
                f"{origin.place}: is {origin.manifest.iterations} iterations on already; "
                f"{self.iterations} are asked for: ask for more"
            )
        return origin

    @property
    def first(self) -> int:
        """The iteration to begin with."""
        return self.origin.manifest.iterations if self.origin else 0

    @property
    def iterations(self) -> int:
        return self.settings.iterations

    @property
    def resumed_settings(self) -> CoordinatorSettings:
        """The settings, with the checkpoint that the run starts from."""
        return replace(self.settings, resumed_from=self.first if self.origin else None)

    @cached_property
    def wal(self) -> WriteAheadLog:
        return WriteAheadLog(self.output / "journal")

    @cached_property
    def memories(self) -> list[dict[str, Any]]:
        """What an earlier coordinator has noted, if its nodes may still be there: those that join by themselves."""
        found = self.wal.records
        if self.resumed and found and journal_run_id(found) != self.run_id:
            raise UserError(f"{self.wal.path}: was written by another run; move it away to go on from a checkpoint")
        planned = any("plan" in record for record in found)
        if self.resumed and self.peers is not None and planned and "done" not in found[-1]:
            noted = [
                node["name"] for record in found if "plan" in record for node in record["plan"]["cluster"]["nodes"]
            ]
            ours = [node.name for node in self.node_config.plan.cluster.nodes]
            if noted[: len(ours)] != ours or len(noted) % len(ours):
                raise UserError(
                    f"{self.wal.path}: was written for another cluster; give the job that one, "
                    "or remove the file to go on from a checkpoint"
                )
            return list(found)
        self.wal.rewrite([{"run": self.run_id}] if self.run_id else [])
        return []

    @cached_property
    def noting(self) -> WalWriter:
        return WalWriter(self.wal)

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.output / "checkpoints", self.kept, self.run_id)

    def listening(self, listen: str, rendezvous: str | None) -> Run:
        """The same, at another address; what was opened or read already stays so."""
        other = replace(self, node_config=replace(self.node_config, rendezvous=rendezvous), listen=listen)
        kept = ("wal", "memories", "origin")
        vars(other).update({name: value for name, value in vars(self).items() if name in kept}, models=self.models)
        return other

    @property
    def names(self) -> list[str]:
        """Of the nodes that the plan uses, in its order."""
        return [self.node_config.plan.cluster.nodes[number].name for number in sorted(self.node_config.plan.stage_of)]

    def new_keys(self) -> KeyPair | None:
        return KeyPair.new() if self.security == "curve" else None

    def told(
        self, name: str, desk: CoordinatorServer, own: KeyPair | None, pair: KeyPair | None = None
    ) -> dict[str, Any]:
        """A node's invitation as JSON, for `birth`; without `pair` it has keys of its own."""
        return {
            "name": name,
            "coordinator": desk.address,
            "keys": [pair.public, pair.secret] if pair else None,
            "coordinator_public": own.public if own else None,
            "security": self.security,
        }

    def here(
        self,
        callback: Callback,
        started: Callable[[ProcessPool], None] = lambda pool: None,
        asked: StopRequests = lambda: 0,
    ) -> None:
        """Every node as a process of this machine. Forks first, so call it before threads are started."""
        pool = ProcessPool(partial(node_process, ROLES), self.output / "logs")
        desk = None
        try:
            pairs = {name: self.new_keys() for name in self.names}
            own = self.new_keys()
            publics = {name: pair.public if pair else None for name, pair in pairs.items()}
            desk = self.desk(own, publics)
            told = {name: self.told(name, desk, own, pair) for name, pair in pairs.items()}
            for name in told:
                pool.start(name, told[name])
            started(pool)
            if self.drills:
                callback = CallbackList([callback, KillDrill(self.node_config.plan, self.drills, pool, callback)])
            self.coordinate(desk, callback, asked, lambda: self.ended(pool, told))
        finally:
            pool.close()
            if desk is not None:
                desk.close()

    def joined(self, callback: Callback, asked: StopRequests = lambda: 0) -> None:
        """Nodes come from wherever they are, if their keys are on the list."""
        assert self.peers is not None
        assert self.key is not None
        publics = PeerList.load(self.peers).peers
        unknown = [name for name in self.names if name not in publics]
        if unknown:
            raise UserError(f"{self.peers}: has no key of {', '.join(unknown)}, which the plan uses")
        desk = self.desk(KeyFile.load(self.key).keys, publics)
        print(f"waiting for {len(self.names)} nodes to join {desk.address}: {', '.join(self.names)}", file=sys.stderr)
        self.coordinate(desk, callback, asked)

    def desk(self, own: KeyPair | None, publics: Mapping[str, str | None]) -> CoordinatorServer:
        return CoordinatorServer(
            self.node_config,
            own,
            publics,
            listen=self.listen,
            security=self.security,
            store=self.models.store,
            checkpoint_store=self.keeper,
            append_wal=self.noting.note,
        )

    @cached_property
    def keeper(self) -> CheckpointManager:
        return CheckpointManager(
            self.checkpoints, self.node_config, self.spec, self.tokenizer, self.origin, self.rescue
        )

    def coordinate(
        self, desk: CoordinatorServer, callback: Callback, asked: StopRequests, gone: EndedNodes = lambda: ()
    ) -> None:
        from skippipe.planner.repair.repair import compile_repair

        threading.Thread(target=compile_repair, name="compile", daemon=True).start()  # before it is needed in a hurry
        desk.run(self.resumed_settings, callback, wal=self.memories, ended=gone, stop_requests=asked)
        self.close(callback)
        self.wal.close()

    def close(self, callback: Callback) -> None:
        """When checkpoints are on disk; if the last one could not be written, that is said."""
        self.keeper.close()
        if self.keeper.lacking:
            callback.happened(Event("checkpoint", self.iterations - 1, self.keeper.lacking))

    @cached_property
    def models(self) -> ModelStore:
        folder = ModelFolder(
            self.output / "model", self.node_config.plan.layers, self.spec, self.tokenizer, run_id=self.run_id
        )
        return ModelStore(folder, self.rescue, self._ways_on)

    def _ways_on(self) -> str:
        """When the model cannot be written in the end, and nobody has made room."""
        if self.peers is not None:
            return "nodes wait for a while: make room, or add --rescue DIR, and go on with --resume"
        done = self.checkpoints.complete()
        if not done:
            return "there is no checkpoint to go on from; start anew with --rescue DIR, a folder on another disk"
        return f"--resume goes on from {done[0]}; with --rescue DIR the model goes to a folder on another disk"

    def store(self, stages: Iterable[tuple[int, Iterable[Any]]], callback: Callback, asked: StopRequests) -> None:
        """The pieces of every stage, None after the last, from the memory of this process. Waits for room if need be,
        unless somebody asks for the end meanwhile; UserError if there is none in the end."""
        for stage, pieces in stages:
            for number, piece in enumerate(pieces):
                self._store_one(stage, number, piece, callback, asked)

    def _store_one(self, stage: int, number: int, piece: Any, callback: Callback, asked: StopRequests) -> None:
        wait_s = self.settings.deadlines.disk_space.total_seconds()
        deadline, before, said = time.monotonic() + wait_s, asked(), False
        while True:
            try:
                self.models.store(stage, number, piece)
            except WriteFailed as error:
                if asked() > before or time.monotonic() > deadline:
                    raise UserError(f"{error}; {error.ways}") from None
                if not said:
                    text = f"{error}; disk space is waited for, {wait_s / 60:.0f} minutes at most"
                    callback.happened(Event("storage", self.iterations - 1, text))
                said = True
                time.sleep(WRITE_RETRY_S)  # a disk does not say when it has room
            else:
                break
        if said:
            callback.happened(Event("storage", self.iterations - 1, "the model can be written again"))

    def ended(self, pool: ProcessPool, told: Mapping[str, dict[str, Any]] | None = None) -> list[tuple[str, str]]:
        """Nodes that are no more, and how they ended; those in `told` are started again, a few times."""
        pool.look()
        found = []
        for name, status in pool.ended.items():
            found.append((name, f"{how_ended(status)}; its last words are in {log_file(self.output / 'logs', name)}"))
        pool.ended.clear()
        for name, _ in found:
            if told and pool.started[name] <= self.restarts:
                pool.start(name, told[name])
        return found


class WalWriter:
    """Records on their way to the journal. Those that cannot be written wait, so that none is ever left out between
    others: a coordinator that is started again finds all up to some record, or goes on from a checkpoint."""

    def __init__(self, wal: WriteAheadLog) -> None:
        self._wal = wal
        self._waiting: list[dict[str, Any]] = []
        self._failures = WriteFailures()

    def note(self, record: dict[str, Any]) -> None:
        self._waiting.append(record)
        meanwhile = "a coordinator that is killed now goes on from the newest checkpoint, not from where it was"
        with self._failures.tolerated(self._wal.path, meanwhile):
            while self._waiting:
                self._wal.write(self._waiting[0])
                del self._waiting[0]


class KillDrill(Callback):
    """Strikes when so many iterations are done; each time another node, those with the most lanes first."""

    def __init__(self, plan: Plan, done: Collection[int], pool: ProcessPool, told: Callback) -> None:
        self._done = set(done)
        self._pool = pool
        self._told = told
        lanes = lanes_through([lane.path for lane in plan.lanes])
        inner = [node for node, stage in plan.stage_of.items() if stage > 0]
        ranked = sorted(inner, key=lambda node: (-len(lanes.get(node, ())), node))
        self._names = [plan.cluster.nodes[node].name for node in ranked]

    def iteration_done(self, report: IterationReport) -> None:
        if report.iteration + 1 not in self._done:
            return
        self._pool.look()
        name = self._names.pop(0)
        self._names.append(name)
        self._told.happened(Event("drill", report.iteration + 1, "is killed, for exercise", name))
        os.kill(self._pool.pids[name], signal.SIGKILL)
