"""The inside of a run under faults: nodes that strike themselves and each other, and their owners.

A node looks before every work whether a fault begins now, and then kills or stops itself, or whoever it is meant for.
What has struck stands in a file each, so every process knows, and a fault strikes once whatever lives and dies. A node
that was killed is started again at once by whoever started it, and waits in `node_process` until it may be back.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("OMP_NUM_THREADS", "1")

import msgspec
from transformers import LlamaForCausalLM  # noqa: F401  imported once, before owners are forked

import skippipe.runtime.node.agent
import skippipe.runtime.train_role
from skippipe.checkpoint.format import Checkpoints
from skippipe.errors import UserError
from skippipe.launch.fork_server import ProcessPool
from skippipe.runtime.coordinator.interfaces import IterationReport
from skippipe.runtime.messages import COORDINATOR, CallBack
from skippipe.runtime.node.agent import NodeAgent
from skippipe.runtime.node.interfaces import JoinConfig
from skippipe.runtime.node.ops import Op, OptimizerStep, StageTask
from skippipe.runtime.node.state_machine import TrainingNode
from skippipe.runtime.node_config import NodeConfig
from skippipe.runtime.relay import RelayAgent
from skippipe.runtime.simulation.fault_injection import RELAY, Fault, phase_of
from skippipe.runtime.stage_executor import StageExecutor
from skippipe.runtime.train_role import ROLES
from skippipe.training.backends import BACKENDS
from skippipe.training.job_config import JobConfig
from skippipe.training.metrics import MetricsFile
from skippipe.training.train_job import run_job
from skippipe.transport.addresses import OUT_ONLY
from skippipe.transport.keys import THE_COORDINATOR, KeyFile, KeyPair
from skippipe.transport.message import Message
from skippipe.transport.relay import Relay

LOOK_S = 0.01  # from one look at what has happened to the next
FULL_BYTES = 2**16  # that a file may have while the disk is full: enough for a journal, too little for a checkpoint
HUB = "hub"  # the name of the relay
COMMON = ("forward", "backward", "averaging", "step")  # what every node does, if it does anything


# What every process of a run knows


@dataclass(frozen=True)
class Scene:
    """One run: its faults, and a folder in which processes leave word for each other."""

    folder: Path
    job: JobConfig
    faults: tuple[Fault, ...] = ()
    wires: Mapping[tuple[int, int], tuple[str, str]] = field(default_factory=dict)
    """From a node to a node → the address that leads there, and the one for calls of the receiver, if the link is to
    fail."""
    step_s: float = 0.0
    """That a step takes at least: nobody comes back in time on a machine that is done with everything by then."""
    build_s: float = 0.0
    """That a stage takes at least to be built."""
    full_disk: int | None = None
    """From the first complete checkpoint until this iteration is done, no file can grow beyond a few kilobytes."""
    out_only: frozenset[int] = frozenset()
    """Nodes that cannot be called."""

    @property
    def joined(self) -> bool:
        return bool(self.job.transport.peers)

    def path(self, *names: object) -> Path:
        return self.folder.joinpath(*map(str, names))

    def make_folders(self) -> None:
        for name in ("struck", "now", "at"):
            self.path(name).mkdir(parents=True)

    def started(self, name: str, address: str = "") -> None:
        """For strikes, and for the count of processes at the end."""
        with self.path("pids").open("a") as file:
            file.write(f"{name} {os.getpid()} {os.getppid()} {address}\n")
        _put(self.path("now", name), str(os.getpid()))
        if address:
            _put(self.path("at", name), address)

    def struck(self, index: int) -> tuple[float, int] | None:
        """When a fault began, by `time.time`, and in which iteration; None: it did not yet."""
        try:
            at, iteration = self.path("struck", index).read_text().split()
        except FileNotFoundError:
            return None
        return float(at), int(iteration)

    def struck_at(self, index: int) -> float | None:
        found = self.struck(index)
        return found[0] if found else None

    def lasts(self, index: int) -> bool:
        """Has it begun, and not ended?"""
        began, lasts_s = self.struck_at(index), self.faults[index].lasts_s
        return began is not None and (lasts_s is None or time.time() < began + lasts_s)

    def look(self, number: int, work: Op, iteration: int) -> None:
        """Does anything begin now?"""
        phase = phase_of(work)
        any_node = phase not in COMMON
        for index, fault in enumerate(self.faults):
            begins = phase == fault.during and fault.strikes(number, work, iteration, any_node=any_node)
            if begins and not self.path("struck", index).exists() and self._claim(index, iteration):
                self._strike(fault)

    def _claim(self, index: int, iteration: int) -> bool:
        mine = self.path("struck", f"{index}.{os.getpid()}")
        mine.write_text(f"{time.time()} {iteration}")
        try:
            os.link(mine, self.path("struck", index))  # whole, and by one only
        except FileExistsError:
            return False
        finally:
            mine.unlink()
        return True

    def _strike(self, fault: Fault) -> None:
        if fault.kind in ("kill", "freeze"):
            number = signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP
            with suppress(FileNotFoundError, ProcessLookupError):  # it is gone already
                os.kill(self.pid_of(fault.nodes[0]), number)

    def pid_of(self, node: int) -> int:
        return int(self.path("now", name_of(node)).read_text())


def name_of(node: int) -> str:
    return {COORDINATOR: THE_COORDINATOR, RELAY: HUB}.get(node, f"n{node}")


def _put(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(path)


# Nodes


class FaultyAgent(NodeAgent):
    """A node that looks for faults before all it does, and takes detours where links are to fail."""

    def __init__(self, join_config: JoinConfig, scene: Scene) -> None:
        super().__init__(join_config, ROLES)
        self._scene = scene
        scene.started(join_config.name, self._mailbox.address)

    def start(self, work: Op) -> None:
        assert isinstance(self._machine, TrainingNode)
        self._scene.look(self._machine.number, work, self._machine.iteration)
        super().start(work)

    def _update_peers(self, peers: dict[str, Any]) -> None:
        own = int(self._join_config.name[1:])
        detours = {name_of(there): address for (here, there), (address, _) in self._scene.wires.items() if here == own}
        super()._update_peers(
            {
                name: [detours[name], found[1]] if name in detours and found[0] not in ("", OUT_ONLY) else found
                for name, found in peers.items()
            }
        )

    def _call_back(self, control: CallBack) -> None:
        """What is sent to this node comes over a stream that it opens: that takes the detour. So it does to a relay."""
        peer, own = control.peer, self._join_config.name
        wires = self._scene.wires.get((int(peer[1:]), int(own[1:])))
        if wires is not None and control.token:
            _put(self._scene.path("at", f"{peer}-{own}"), control.address)
            control = msgspec.structs.replace(control, address=wires[1])
        super()._call_back(control)


class FaultyExecutor:
    """A computer that is slow or spoils a gradient when it is told to."""

    def __init__(self, executor: StageExecutor, number: int, scene: Scene) -> None:
        self._executor = executor
        self._scene = scene
        self._slow, self._poison = (
            [index for index, fault in enumerate(scene.faults) if fault.kind == kind and number in fault.nodes]
            for kind in ("slow node", "poison")
        )

    def run(self, work: Op) -> Any:
        began = time.monotonic()
        result = self._executor.run(work)
        for index in self._slow:
            if self._scene.lasts(index):
                time.sleep((time.monotonic() - began) * (self._scene.faults[index].times - 1))
        if isinstance(work, OptimizerStep):
            time.sleep(max(0.0, began + self._scene.step_s - time.monotonic()))
        if isinstance(work, StageTask) and work.counts and phase_of(work) in ("backward", "weights"):
            self._spoil()
        return result

    def fits(self, message: Message, expected: Any) -> bool:
        return self._executor.fits(message, expected)

    def prefetch(self, given: Any, device: int) -> Any:
        return self._executor.prefetch(given, device)

    def _spoil(self) -> None:
        for index in list(self._poison):
            if self._scene.struck_at(index) is not None:
                self._poison.remove(index)
                done = self._scene.path("struck", f"{index}.done")
                if not done.exists():  # another life of this node may have
                    done.touch()
                    self._executor.tasks.weights.gradient[0] = math.nan


def node_process(scene: Scene, told: dict[str, Any]) -> int:
    """Instead of `agent.node_process`."""
    name = told["name"]
    number = int(name[1:])
    with scene.path("pids").open("a") as file:
        file.write(f"{name} {os.getpid()} {os.getppid()} {told['coordinator']}\n")
    for index, fault in enumerate(scene.faults):
        while fault.kind == "kill" and number in fault.nodes and scene.lasts(index):
            time.sleep(LOOK_S)  # until it may be back; whoever started it ends it if the run is over before
    build = skippipe.runtime.train_role.build_executor

    def build_faulty(
        number: int, node_config: NodeConfig, join_config: JoinConfig, devices: list[str]
    ) -> FaultyExecutor:
        time.sleep(scene.build_s)
        return FaultyExecutor(cast(StageExecutor, build(number, node_config, join_config, devices)), number, scene)

    skippipe.runtime.train_role.build_executor = build_faulty  # type: ignore[assignment]
    keys, listen = told["keys"], {"listen": OUT_ONLY} if number in scene.out_only else {}
    reason = FaultyAgent(JoinConfig(**{**told, **listen, "keys": KeyPair(*keys)}), scene).run()
    if reason:
        print(reason)
    return 1 if reason else 0


# Owners, each in a process of its own, forked from a fresh one


def run_coordinator(scene: Scene, resumed: bool) -> None:
    """`skippipe train`, with other nodes."""
    log = os.open(scene.path("coordinator.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    scene.started(THE_COORDINATOR, scene.job.transport.listen if scene.joined else "")
    skippipe.runtime.node.agent.node_process = lambda roles, join_config: node_process(scene, join_config)
    if scene.full_disk is not None:
        _fill_disk(scene)
    try:
        run_job(scene.job, BACKENDS["processes"], resumed=resumed)
    except UserError as error:
        print(f"UserError: {error}", file=sys.stderr, flush=True)
        os._exit(2)


def _fill_disk(scene: Scene) -> None:
    """Files of checkpoints cannot be written for some iterations."""
    assert scene.full_disk is not None
    last, checkpoints = scene.full_disk, Checkpoints(Path(scene.job.output) / "checkpoints")
    told = MetricsFile.iteration_done

    def iteration_done(self: MetricsFile, report: IterationReport) -> None:
        told(self, report)
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        if report.iteration < last and checkpoints.complete():
            resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_BYTES, most))
        elif report.iteration == last:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    MetricsFile.iteration_done = iteration_done  # type: ignore[method-assign]


def run_relay(scene: Scene, keys: Path, coordinator: str, address: str) -> None:
    """`skippipe relay`, until the harness ends it."""
    file = KeyFile.load(keys / f"{HUB}.key")
    scene.started(HUB, address)
    agent = RelayAgent(HUB, file.keys, coordinator, file.coordinator or "", Relay(address), address)
    agent.run(scene.path("over").exists)


def run_nodes(scene: Scene, keys: Path, listen: str) -> None:
    """Nodes that join by themselves. Whoever is killed is started again, until the harness says that it is over."""
    pool = ProcessPool(partial(node_process, scene), Path(scene.job.output) / "logs")
    told = {}
    for path in sorted(keys.glob("n*.key")):
        file = KeyFile.load(path)
        told[file.node] = {
            "name": file.node,
            "coordinator": listen,
            "keys": [file.keys.public, file.keys.secret],
            "coordinator_public": file.coordinator,
            "security": "curve",
        }
    for name, each in told.items():
        pool.start(name, each)
    while not scene.path("over").exists():
        pool.poll()
        for name, status in list(pool.ended.items()):
            del pool.ended[name]
            if status != 0:
                pool.start(name, told[name])
        time.sleep(LOOK_S)
    pool.close()
