"""A run: start nodes with a launcher, coordinate them, store the model."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from skippipe.checkpoint.adapters import BASE
from skippipe.checkpoint.format import CheckpointOrigin, Checkpoints
from skippipe.checkpoint.hf_export import ModelFolder
from skippipe.checkpoint.manager import CheckpointManager, essence, no_checkpoint, origin_of
from skippipe.checkpoint.storage import ModelStore, Rescue, WriteFailures
from skippipe.constraints import lanes_through
from skippipe.data.tokenizer import TextTokenizer
from skippipe.errors import UserError
from skippipe.launch.fork_server import ProcessPool
from skippipe.launch.launcher import Launcher, LocalLauncher, NodeEndpoints
from skippipe.model.model_files import GENERATION
from skippipe.model.model_spec import ModelSpec
from skippipe.plan import Plan
from skippipe.runs.wal import WriteAheadLog
from skippipe.runtime.admission import Admission
from skippipe.runtime.coordinator.failure_detector import WRITE_RETRY_S
from skippipe.runtime.coordinator.interfaces import Callback, Event, IterationReport, StopRequests, WriteFailed
from skippipe.runtime.coordinator.server import CoordinatorServer
from skippipe.runtime.coordinator.settings import CoordinatorSettings
from skippipe.runtime.node_config import NodeConfig
from skippipe.runtime.rendezvous import EndedNodes
from skippipe.runtime.train_role import ROLES
from skippipe.training.metrics import CallbackList
from skippipe.training.run_folder import journal_run_id
from skippipe.transport.addresses import join_address, split_all
from skippipe.transport.keys import KeyPair
from skippipe.transport.mailbox import Security


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a run is started, beside its job."""

    resumed: bool = False
    """Continue from the newest checkpoint in the output folder."""
    drills: frozenset[int] = frozenset()
    """Numbers of iterations after which a node is killed, as a drill."""
    run_id: str = ""
    """Id of the run, which all its files repeat; files with another one are not touched."""
    rescue: Rescue = lambda: None
    """Where the model and the last checkpoint go if the output folder cannot be written."""
    leaves_nodes: Callable[[], bool] = lambda: False
    """Whether nodes that joined by themselves wait for another coordinator when this one ends by request."""
    has_grown: bool = False
    """The model has had fewer layers before: a checkpoint of so many is read as that of the deeper one."""


def check_resumable(checkpoints: Checkpoints, iterations: int) -> None:
    """UserError if no checkpoint leaves any of so many iterations to do. What can be told at once, without a plan and
    without reading a checkpoint that will be read later."""
    found = checkpoints.complete()
    if not found:
        raise UserError(no_checkpoint(checkpoints))
    if int(found[0].name) >= iterations and (origin := checkpoints.newest_sound()):
        _check_iterations(origin, iterations)


def _check_iterations(origin: CheckpointOrigin, wanted: int) -> None:
    done = origin.manifest.iterations
    if done >= wanted:
        raise UserError(
            f"{origin.place}: has {done} iterations already, and the job wants {wanted}: set a higher number"
        )


def newest_section(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a journal has of the model as it is now: since it has grown."""
    begins = [place for place, record in enumerate(records) if "run" in record]
    return list(records[begins[-1] if begins else 0 :])


def _is_over(records: Sequence[dict[str, Any]]) -> bool:
    return "done" in records[-1] or "grown" in records[-1]


def layers_in_use(journal: Path) -> int | None:
    """Layers of the model that nodes may still hold, by the journal of a coordinator; None: it ended in order."""
    wal = WriteAheadLog(journal)
    wal.close()
    section = newest_section(wal.records)
    planned = [record for record in section if "plan" in record]
    return sum(Plan.from_json(planned[-1]["plan"]).layers) if planned and not _is_over(section) else None


COORDINATORS = (
    *("learning.rate", "learning.warmup", "learning.iterations", "learning.hold", "learning.floor", "learning.clip"),
    *("recipe.skip", "recipe.grow", "recipe.exposure", "recipe.swaps"),
)
"""Settings that the coordinator alone follows: another one may have others."""


def _settings_of(node_config: NodeConfig) -> dict[str, Any]:
    """What all nodes must have alike beside the plan, by the names of a job's fields."""
    tables: dict[str, Any] = {"learning": node_config.learning, "recipe": node_config.recipe, "lora": node_config.lora}
    tables |= {"validation": node_config.held_out} if node_config.held_out else {}
    fields = {f"{table}.{name}": value for table, given in tables.items() for name, value in asdict(given).items()}
    found = {
        "seed": node_config.seed,
        "data": node_config.data_fingerprint[:12],
        "data.packing": node_config.packing,
        "model": essence(node_config.config),
        **{name: value for name, value in fields.items() if name not in COORDINATORS},
    }
    plain: dict[str, Any] = json.loads(json.dumps(found))  # as it looks after a file: lists, not tuples
    return plain


def _check_settings(journal: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """A node that joins would follow the job, and its replicas what they were told before."""
    for name in theirs:
        if theirs[name] != ours.get(name):
            raise UserError(
                f"{journal}: its nodes may still be there, with another {name}"
                + (f" ({theirs[name]}, not {ours.get(name)})" if name != "model" else "")
                + ": go on with the job as it was, or remove the file to go on from a checkpoint"
            )


@dataclass(frozen=True)
class Run(RunOptions):
    """All that the coordinator of a run needs, beside the configuration that nodes get."""

    node_config: NodeConfig
    spec: ModelSpec
    tokenizer: TextTokenizer
    output: Path
    settings: CoordinatorSettings
    security: Security = "curve"
    listen: str = "127.0.0.1:0"
    nodes_join: bool = False
    """Nodes join by themselves, and may outlive the coordinator."""
    restarts: int = 0
    """How often the launcher restarts a node of this machine."""
    kept: int = 2
    """How many checkpoints stay."""
    later_plans: tuple[Plan, ...] = ()
    """Plans of the deeper models that the run goes on with."""

    @cached_property
    def origin(self) -> CheckpointOrigin | None:
        """The checkpoint to continue from; found and checked at the first access."""
        if not self.resumed or (self.recovered_records and not self.checkpoints.complete()):
            return None
        origin = origin_of(self.checkpoints, self.node_config, grown=self.has_grown)
        if not self.recovered_records:
            _check_iterations(origin, self.iterations)
        return origin

    @property
    def first(self) -> int:
        """The first iteration to do."""
        return self.origin.manifest.iterations if self.origin else 0

    @property
    def iterations(self) -> int:
        return self.settings.iterations

    @property
    def resumed_settings(self) -> CoordinatorSettings:
        """The settings, with the checkpoint that the run starts from."""
        best = self.checkpoints.best() if self.resumed else None
        known = (best.manifest.iterations, best.manifest.validation_loss or 0.0) if best else None
        if known and best and sum(best.manifest.layers) < sum(self.node_config.plan.layers):
            known = self.first, known[1]  # a model that has grown is worse at first
        validation = replace(self.settings.validation, best=known)
        return replace(self.settings, resumed_from=self.first if self.origin else None, validation=validation)

    @cached_property
    def wal(self) -> WriteAheadLog:
        return WriteAheadLog(self.output / "journal")

    @cached_property
    def recovered_records(self) -> list[dict[str, Any]]:
        """The journal of an earlier coordinator, if its nodes may still be there: those that join by themselves. Empty:
        this run begins a journal of its own."""
        found = self.wal.records
        if self.resumed and found and journal_run_id(found) != self.run_id:
            raise UserError(f"{self.wal.path}: was written by another run; move it away to go on from a checkpoint")
        found = newest_section(found)
        planned = [record for record in found if "plan" in record]
        if self.resumed and self.nodes_join and planned and not _is_over(found):
            planned_names = [node["name"] for record in planned for node in record["plan"]["cluster"]["nodes"]]
            ours = [node.name for node in self.node_config.plan.cluster.nodes]
            if planned_names[: len(ours)] != ours or len(planned_names) % len(ours):
                raise UserError(
                    f"{self.wal.path}: was written for another cluster; give the job that one, "
                    "or remove the file to go on from a checkpoint"
                )
            theirs, layers = Plan.from_json(planned[-1]["plan"]).layers, self.node_config.plan.layers
            if self.has_grown and sum(theirs) < sum(layers):
                return []  # nodes that are still there begin anew
            if theirs != layers:
                there, here = (",".join(map(str, each)) for each in (theirs, layers))
                raise UserError(
                    f"{self.wal.path}: its nodes may still be there, with stages of {there} layers, and the plan has "
                    f'{here}: set pipeline.layers = "{there}", or remove the file to go on from a checkpoint'
                )
            _check_settings(self.wal.path, found[0].get("settings", {}), _settings_of(self.node_config))
            done = [record["commit"] + 1 for record in found if "commit" in record]
            if done and done[-1] > self.iterations:  # as many: it ended while the model was written
                raise UserError(
                    f"{self.wal.path}: has {done[-1]} iterations already, and the job wants {self.iterations}: set a "
                    "higher number"
                )
            return list(found)
        return []

    def begin_journal(self) -> None:
        """Replace the journal of an earlier coordinator by an empty one, unless this run goes on with it. When the
        model has grown, a new section follows."""
        if self.recovered_records:
            return
        first = {"run": self.run_id, "settings": _settings_of(self.node_config)}
        if self.settings.nodes_are_there or (self.has_grown and self.wal.records and "grown" in self.wal.records[-1]):
            self.wal_writer.write(first)
        else:
            self.wal.rewrite([first] if self.run_id else [])

    @property
    def first_term(self) -> int:
        """The term of a coordinator that does not go on by a journal: more than those of all that its nodes may know.
        If their journal is lost, a clock is a good guess."""
        if self.recovered_records or not (self.has_grown or (self.nodes_join and self.first)):
            return 0
        terms = [record["term"] for record in self.wal.records if "term" in record]
        return 1 + max(terms, default=0) if self.wal.records else int(time.time())

    @cached_property
    def wal_writer(self) -> WalWriter:
        return WalWriter(self.wal)

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.output / "checkpoints", self.kept, self.run_id)

    @property
    def names(self) -> list[str]:
        """Names of the nodes that the plan uses, in its order."""
        return [self.node_config.plan.cluster.nodes[number].name for number in sorted(self.node_config.plan.stage_of)]

    def launch_local(
        self,
        callback: Callback,
        started: Callable[[ProcessPool], None] = lambda pool: None,
        stop_requests: StopRequests = lambda: 0,
        deeper: Iterable[Run] = (),
        names: Sequence[str] = (),
    ) -> None:
        """Train with every node as a process of this machine, those of the plan or all with these names. Forks first:
        call it before threads are started."""
        launcher = LocalLauncher(names or self.names, ROLES, self.output / "logs", self.security, self.restarts)
        started(launcher.pool)
        self.launch(launcher, callback, stop_requests, deeper)

    def launch(
        self,
        launcher: Launcher,
        callback: Callback,
        stop_requests: StopRequests = lambda: 0,
        deeper: Iterable[Run] = (),
    ) -> None:
        """Train with the nodes of a launcher, which is closed in the end. Whenever the model grows, they go on with the
        next of the `deeper` runs, which is made then."""
        server, following = None, iter(deeper)
        try:
            endpoints = launcher.prepare()
            run = self._listening(endpoints)
            server = run.server(launcher.keys, endpoints.public_keys, endpoints.admission)
            launcher.start(server.address)
            while run.coordinate(server, run._with_drills(callback, launcher), stop_requests, launcher.ended):
                run = next(following)._listening(endpoints)
                server.adopt(run.node_config, run.models.store, run.checkpoint_manager, run.wal_writer.write)
        finally:
            launcher.close()
            if server is not None:
                server.close()

    def _with_drills(self, callback: Callback, launcher: Launcher) -> Callback:
        if not self.drills or not isinstance(launcher, LocalLauncher):
            return callback
        return CallbackList([callback, KillDrill(self.node_config.plan, self.drills, launcher.kill, callback)])

    def _listening(self, endpoints: NodeEndpoints) -> Run:
        """The same run, at an address that its nodes can reach; what was opened or read already stays so."""
        if not endpoints.coordinator_host:
            return self
        rendezvous = endpoints.torch_address if self.node_config.rendezvous else None
        listen = join_address(endpoints.coordinator_host, split_all(self.listen)[0][1])
        other = replace(self, node_config=replace(self.node_config, rendezvous=rendezvous), listen=listen)
        kept = ("wal", "recovered_records", "origin")
        vars(other).update({name: value for name, value in vars(self).items() if name in kept}, models=self.models)
        return other

    def server(
        self, keys: KeyPair | None, public_keys: Mapping[str, str | None], admission: Admission | None = None
    ) -> CoordinatorServer:
        return CoordinatorServer(
            self.node_config,
            keys,
            public_keys,
            listen=self.listen,
            security=self.security,
            store=self.models.store,
            checkpoint_store=self.checkpoint_manager,
            append_wal=self.wal_writer.write,
            admission=admission,
            later_plans=self.later_plans,
        )

    @cached_property
    def checkpoint_manager(self) -> CheckpointManager:
        return CheckpointManager(
            self.checkpoints, self.node_config, self.spec, self.tokenizer, self.origin, self.rescue
        )

    def report_growth(self, callback: Callback) -> None:
        """Say how the model grows if the checkpoint that the run goes on from is of a smaller one."""
        if (grown := self.checkpoint_manager.grown) is not None:
            callback.happened(Event("grown", self.first, grown.summary))

    def coordinate(
        self, server: CoordinatorServer, callback: Callback, stop_requests: StopRequests, ended: EndedNodes = lambda: ()
    ) -> bool:
        """Train with the nodes that join the server; whether the model is to grow now."""
        from skippipe.planner.repair.repair import compile_repair

        threading.Thread(target=compile_repair, name="compile", daemon=True).start()  # before it is needed in a hurry
        first_term = self.first_term
        if not self.recovered_records:
            self.report_growth(callback)
        self.begin_journal()
        has_grown = server.run(
            self.resumed_settings,
            callback,
            wal=self.recovered_records,
            first_term=first_term,
            ended=ended,
            stop_requests=stop_requests,
            leaves_nodes=lambda: self.nodes_join and self.leaves_nodes(),
        )
        self.close(callback)
        self.wal.close()
        return has_grown

    def close(self, callback: Callback) -> None:
        """Wait until checkpoints are on disk; if the last one could not be written, there is an event."""
        self.checkpoint_manager.close()
        if self.checkpoint_manager.lacking:
            callback.happened(Event("checkpoint", self.iterations - 1, self.checkpoint_manager.lacking))

    @cached_property
    def models(self) -> ModelStore:
        folder = ModelFolder(
            self.output / "model",
            self.node_config.plan.layers,
            self.spec,
            self.tokenizer,
            run_id=self.run_id,
            run=self.output,
            base=self.checkpoints.folder / BASE if self.spec.frozen else None,
            generation=self.checkpoints.folder / GENERATION,
        )
        return ModelStore(folder, self.rescue, self._what_to_do)

    def _what_to_do(self) -> str:
        """Advice for when the model cannot be written, and no room was made in time."""
        if self.nodes_join:
            return "nodes wait for a while: make room, or add --rescue DIR, and go on with --resume"
        done = self.checkpoints.complete()
        if not done:
            return "there is no checkpoint to go on from; start anew with --rescue DIR, a folder on another disk"
        return f"--resume goes on from {done[0]}; with --rescue DIR the model goes to a folder on another disk"

    def store(
        self, stages: Iterable[tuple[int, Iterable[Any]]], callback: Callback, stop_requests: StopRequests
    ) -> None:
        """Write the pieces of every stage, None after the last, from the memory of this process. Waits for room on the
        disk until there is a stop request; UserError if there is none in the end."""
        for stage, pieces in stages:
            for number, piece in enumerate(pieces):
                self._store_one(stage, number, piece, callback, stop_requests)

    def _store_one(self, stage: int, number: int, piece: Any, callback: Callback, stop_requests: StopRequests) -> None:
        wait_s = self.settings.deadlines.disk_space.total_seconds()
        deadline, before, waiting = time.monotonic() + wait_s, stop_requests(), False
        while True:
            try:
                self.models.store(stage, number, piece)
            except WriteFailed as error:
                if stop_requests() > before or time.monotonic() > deadline:
                    raise UserError(f"{error}; {error.ways}") from None
                if not waiting:
                    text = f"{error}; disk space is waited for, {wait_s / 60:.0f} minutes at most"
                    callback.happened(Event("storage", self.iterations - 1, text))
                waiting = True
                time.sleep(WRITE_RETRY_S)  # a disk does not report when it has room
            else:
                break
        if waiting:
            callback.happened(Event("storage", self.iterations - 1, "the model can be written again"))


class WalWriter:
    """Writes records to the journal. Those that cannot be written wait, so that none is ever left out between others: a
    coordinator that is restarted finds all up to some record, or continues from a checkpoint."""

    def __init__(self, wal: WriteAheadLog) -> None:
        self._wal = wal
        self._waiting: list[dict[str, Any]] = []
        self._failures = WriteFailures()

    def write(self, record: dict[str, Any]) -> None:
        self._waiting.append(record)
        meanwhile = "a coordinator that is killed now goes on from the newest checkpoint, not from where it was"
        with self._failures.tolerated(self._wal.path, meanwhile):
            while self._waiting:
                self._wal.write(self._waiting[0])
                del self._waiting[0]


class KillDrill(Callback):
    """Kills a node when so many iterations are done; each time another one, those with the most lanes first."""

    def __init__(self, plan: Plan, done: Collection[int], kill: Callable[[str], None], callback: Callback) -> None:
        self._done = set(done)
        self._kill = kill
        self._callback = callback
        lanes = lanes_through([lane.path for lane in plan.lanes])
        inner = [node for node, stage in plan.stage_of.items() if stage > 0]
        ranked = sorted(inner, key=lambda node: (-len(lanes.get(node, ())), node))
        self._names = [plan.cluster.nodes[node].name for node in ranked]

    def iteration_done(self, report: IterationReport) -> None:
        if report.iteration + 1 not in self._done:
            return
        name = self._names.pop(0)
        self._names.append(name)
        self._callback.happened(Event("drill", report.iteration + 1, "is killed, for exercise", name))
        self._kill(name)
