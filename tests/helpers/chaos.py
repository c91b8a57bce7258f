"""Real nodes under real faults: processes, sockets with CURVE, tensors, checkpoints, and something that goes wrong.

The faults are those of `fault_injection`, and strike from within (see `faulty_node`). This is the outside: it starts a
run, ends what is to end (wakes the frozen, mends links, which run through relays, starts the coordinator again), and
checks what must hold of every run.

A coordinator that is to be killed is a process of its own, and its nodes join by themselves; else it starts them.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import LlamaForCausalLM

from skippipe.data.prepare import prepare
from skippipe.model.model_spec import ModelSpec, config_named
from skippipe.optim.config import OptimConfig
from skippipe.plan import Lane, Plan, Stage
from skippipe.runs.wal import WriteAheadLog
from skippipe.runtime.coordinator.interfaces import Event, IterationReport
from skippipe.runtime.messages import COORDINATOR
from skippipe.runtime.simulation.fault_injection import RELAY, Fault
from skippipe.simulator import simulate
from skippipe.timeline import Timing
from skippipe.training.job_config import JobConfig
from skippipe.training.job_tables import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    PipelineConfig,
    RecoveryConfig,
    ReportConfig,
    TransportConfig,
)
from skippipe.transport.addresses import OUT_ONLY, free_port, split_all
from skippipe.transport.keys import THE_COORDINATOR, KeyFile, KeyPair, PeerList
from skippipe.workload import Workload
from tests.helpers.faulty_node import HUB, LOOK_S, Scene, name_of, run_coordinator, run_nodes, run_relay
from tests.helpers.plans import uniform_cluster
from tests.helpers.processes import FORKED, MODEL
from tests.helpers.relay import Wire
from tests.helpers.virtual_chaos import check_visits

PATIENCE_S = 120.0  # for a whole run, on a machine that is busy with others
GONE_S = 8.0  # for all processes to be gone after a run
HEARTBEAT_S = 1.0
RESTARTS = 50
VOCABULARY = 300
STAGES = ((0, 1, 2), (3, 4), (5,), (6, 7, 8))
PATHS = ((0, 3, 5), (1, 4, 5), (2, 3, 6), (0, 4, 7), (1, 5, 8), (2, 5, 6))
NODES = sum(map(len, STAGES))
ONLY = 5
"""The node that has its stage to itself."""


# What all runs share


@dataclass(frozen=True)
class RunSetup:
    """A folder with a tiny model, its text, keys, and a plan for nine nodes: made once for many runs."""

    folder: Path
    text: str

    @classmethod
    def made(cls, folder: Path, text: str | None = None, *, sequence: int = 16, samples: int = 1) -> RunSetup:
        (folder / "config.json").write_text(json.dumps(MODEL))
        if text is None:
            own = folder / "text.txt"
            own.write_text("".join(f"The quick brown fox jumps over {each} lazy dogs.\n" for each in range(400)))
            text = str(own)
        run_setup = cls(folder, text)
        tokens = prepare(text, VOCABULARY, run_setup.tokens)
        shape = ModelSpec(config_named(str(folder), tokens.vocabulary), 0).shape
        workload = Workload(
            shape, sequence, samples, 2 * len(PATHS), wire_dtype="fp32", compute_dtype="fp32", max_slots=4
        )
        plan = Plan(
            uniform_cluster(NODES, latency_s=0.0001, bandwidth=1e8, flops_per_s=1e9),
            workload,
            tuple(Stage(1, nodes, nodes) for nodes in STAGES),
            tuple(Lane(path, 2) for path in PATHS),
        )
        plan.promising(simulate(plan, Timing.FULL)).save(run_setup.plan_file)
        coordinator = KeyPair.new()
        KeyFile(THE_COORDINATOR, coordinator).save(run_setup.keys / "coordinator.key")
        pairs = {name: KeyPair.new() for name in (*plan.cluster.number, HUB)}
        for name, pair in pairs.items():
            KeyFile(name, pair, coordinator.public).save(run_setup.keys / f"{name}.key")
        publics = {name: pair.public for name, pair in pairs.items()}
        PeerList(publics, relays=(HUB,)).save(run_setup.keys / "peers.json")
        return run_setup

    @property
    def tokens(self) -> Path:
        return self.folder / "tokens"

    @property
    def keys(self) -> Path:
        return self.folder / "keys"

    @property
    def plan_file(self) -> Path:
        return self.folder / "plan.json"

    def job(
        self,
        output: Path,
        iterations: int,
        *,
        seed: int = 0,
        kept_every: int = 0,
        heartbeat_s: float = HEARTBEAT_S,
        lost_stage: Literal["checkpoint", "neighbours"] = "checkpoint",
        listen: str | None = None,
    ) -> JobConfig:
        """`listen`: nodes join there by themselves."""
        transport = TransportConfig()
        if listen is not None:
            keys = str(self.keys / "peers.json"), str(self.keys / "coordinator.key")
            transport = TransportConfig(listen=listen, peers=keys[0], key=keys[1])
        return JobConfig(
            output=str(output),
            iterations=iterations,
            seed=seed,
            model=ModelConfig(config=str(self.folder)),
            data=DataConfig([self.text], vocabulary=VOCABULARY, folder=str(self.tokens)),
            pipeline=PipelineConfig(plan=str(self.plan_file)),
            learning=OptimConfig(rate=3e-3, warmup=2),
            transport=transport,
            checkpoint=CheckpointConfig(every=kept_every),
            survive=RecoveryConfig(
                heartbeat_s, restarts=0 if listen else RESTARTS, lost_stage=lost_stage, planning_s=0.05
            ),
            report=ReportConfig(recorded=0),
        )


# A run


class CheckFailed(AssertionError):
    """A run that is not what it should be."""


@dataclass
class Chaos:
    """From the outside: starts it, ends what is to end, and sees that all are gone in the end."""

    run_setup: RunSetup
    folder: Path
    faults: Sequence[Fault] = ()
    iterations: int = 5
    joined: bool | None = None
    """Nodes join by themselves; None: if the coordinator is to be killed."""
    step_s: float = 0.0
    build_s: float = 0.0
    full_disk: int | None = None
    out_only: frozenset[int] = frozenset()
    """All four as in `Scene`."""
    relay: bool = False
    """There is one; nodes join by themselves then."""
    patience_s: float = PATIENCE_S
    choices: Mapping[str, Any] = field(default_factory=dict)
    """For the job (see `RunSetup.job`)."""

    def run(self) -> Outcome:
        kills = any(COORDINATOR in fault.nodes for fault in self.faults)
        joined = self.relay or (kills if self.joined is None else self.joined)
        self._places = [f"127.0.0.1:{free_port('127.0.0.1')}" for _ in range(2)] if joined else []
        """Of the coordinator: whenever it is started again, it is at the other one."""
        self._wires = {
            pair: tuple(Wire((self.folder / "at" / end).read_text) for end in _ends(*pair))
            for pair in sorted(_failing(self.faults))
        }
        self._scene = Scene(
            self.folder,
            self.run_setup.job(
                self.folder / "run", self.iterations, listen=next(iter(self._places), None), **self.choices
            ),
            tuple(self.faults),
            {pair: (wire.address, back.address) for pair, (wire, back) in self._wires.items()},
            self.step_s,
            self.build_s,
            self.full_disk,
            self.out_only,
        )
        self._scene.make_folders()
        self._ended: set[int] = set()
        self._begun: set[int] = set()
        self._deaths = 0
        began = time.monotonic()
        nodes = None
        if joined:
            nodes = FORKED.Process(target=run_nodes, args=(self._scene, self.run_setup.keys, ",".join(self._places)))
            nodes.start()
        coordinator = self._coordinator(resumed=False)
        self._hub_at = f"127.0.0.1:{free_port('127.0.0.1')}"
        self._hub = self._relay() if self.relay else None
        try:
            while coordinator.exitcode != 0:
                coordinator = self._look(coordinator)
                if time.monotonic() > began + self.patience_s:
                    raise CheckFailed(f"not over after {self.patience_s:g} s\n{self.timeline()}")
        finally:
            self._let_go(coordinator, nodes)
        outcome = Outcome(self._scene, self.run_setup, self.iterations, time.monotonic() - began)
        outcome.check_gone()
        return outcome

    def _relay(self) -> ForkServerProcess:
        places = self._scene, self.run_setup.keys, ",".join(self._places), self._hub_at
        process = FORKED.Process(target=run_relay, args=places)
        process.start()
        return process

    def _coordinator(self, *, resumed: bool) -> ForkServerProcess:
        scene = self._scene
        if resumed:
            transport = replace(scene.job.transport, listen=self._places[self._deaths % 2])
            scene = replace(scene, job=replace(scene.job, transport=transport))
        process = FORKED.Process(target=run_coordinator, args=(scene, resumed))
        process.start()
        return process

    def _look(self, coordinator: ForkServerProcess) -> ForkServerProcess:
        """What has begun, what is to end, and is the coordinator still there?"""
        for index, fault in enumerate(self.faults):
            if index not in self._begun and self._scene.struck_at(index) is not None:
                self._begun.add(index)
                self._begin(fault)
            if index in self._begun - self._ended and not self._scene.lasts(index):
                self._ended.add(index)
                self._end(fault)
        coordinator.join(LOOK_S)
        gone = self._hub is not None and self._hub.exitcode is not None
        if gone and not any(RELAY in fault.nodes and self._scene.lasts(each) for each, fault in enumerate(self.faults)):
            self._hub = self._relay()
        if coordinator.exitcode in (None, 0):
            return coordinator
        kills = [index for index in self._begun if self.faults[index].nodes == (COORDINATOR,)]
        if coordinator.exitcode != -signal.SIGKILL or len(kills) <= self._deaths:
            raise CheckFailed(f"the coordinator ended with {coordinator.exitcode}\n{self.timeline()}")
        if any(self._scene.lasts(index) for index in kills):
            time.sleep(LOOK_S)
            return coordinator
        self._deaths = len(kills)
        return self._coordinator(resumed=True)

    def _begin(self, fault: Fault) -> None:
        for wire in self._along(fault):
            if fault.kind == "slow link":
                wire.times = fault.times
            else:
                wire.cut(silent=fault.silent)

    def _end(self, fault: Fault) -> None:
        if fault.kind == "freeze":
            with suppress(FileNotFoundError, ProcessLookupError):
                os.kill(self._scene.pid_of(fault.nodes[0]), signal.SIGCONT)
        for wire in self._along(fault):
            if fault.kind == "slow link":
                wire.times = 1.0
            else:
                wire.mend()

    def _along(self, fault: Fault) -> list[Wire]:
        return [wire for pair in _links(fault) for wire in self._wires[pair]]

    def _let_go(self, coordinator: ForkServerProcess, nodes: ForkServerProcess | None) -> None:
        for index in self._begun - self._ended:
            self._end(self.faults[index])
        self._scene.path("over").touch()
        for process in (coordinator, nodes, self._hub):
            if process is not None:
                process.join(0 if process is coordinator else GONE_S)
                process.kill()
                process.join(GONE_S)
        for wire in chain.from_iterable(self._wires.values()):
            wire.cut()

    def timeline(self) -> str:
        return Outcome(self._scene, self.run_setup, self.iterations, 0.0).timeline()


def _ends(sender: int, receiver: int) -> tuple[str, str]:
    """The files that say where a link ends: at the receiver, and where that one calls for it."""
    return name_of(receiver), f"{name_of(sender)}-{name_of(receiver)}"


def _links(fault: Fault) -> list[tuple[int, int]]:
    if fault.kind not in ("cut", "cut one way", "slow link"):
        return []
    a, b = fault.nodes
    return [(a, b)] if fault.kind == "cut one way" else [(a, b), (b, a)]


def _failing(faults: Sequence[Fault]) -> set[tuple[int, int]]:
    return {pair for fault in faults for pair in _links(fault)}


# What must hold


@dataclass(frozen=True)
class Outcome:
    scene: Scene
    run_setup: RunSetup
    iterations: int
    took_s: float

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        return self._lines("metrics.jsonl")

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        return self._lines("events.jsonl")

    @cached_property
    def wal(self) -> list[dict[str, Any]]:
        wal = WriteAheadLog(Path(self.scene.job.output) / "journal")
        wal.close()
        return wal.records

    def _lines(self, name: str) -> list[dict[str, Any]]:
        """The lines of a file, with iterations from 0, as faults and the journal count them."""
        path = Path(self.scene.job.output) / name
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [{**row, "iteration": row["iteration"] - 1} for row in rows]

    def said(self, kind: str, node: int | None = None) -> list[str]:
        """Texts of events of a kind."""
        return [
            event["text"]
            for event in self.events
            if event["kind"] == kind and (node is None or event["node"] == name_of(node))
        ]

    @property
    def strikes(self) -> list[float | None]:
        """When each fault began."""
        return [self.scene.struck_at(index) for index in range(len(self.scene.faults))]

    @property
    def recoveries_s(self) -> list[float]:
        """From every strike until its iteration is done, or the next if that is; a coordinator's from its return."""
        found = []
        for index, fault in enumerate(self.scene.faults):
            struck = self.scene.struck(index)
            if struck is None:
                continue
            at = struck[0] + ((fault.lasts_s or 0.0) if COORDINATOR in fault.nodes else 0.0)
            least = struck[1] + (fault.during in ("step", "checkpoint"))
            after = [row["time"] - at for row in self.metrics if row["time"] > at and row["iteration"] >= least]
            found += [min(after)] if after else []
        return found

    def timeline(self) -> str:
        """What was done and what came of it, for people."""
        faults = [
            f"  {fault}: {'struck' if at else 'never'}"
            for fault, at in zip(self.scene.faults, self.strikes, strict=True)
        ]
        rows = [
            (row["time"], f"iteration {row['iteration']} done, loss {row['loss']:.3f}, visits {row['visits']}")
            for row in self.metrics
        ]
        rows += [
            (each["time"], f"{each['kind']:10} it{each['iteration']} {each['node']:5} {each['text']}")
            for each in self.events
        ]
        rows += [
            (at, f"STRIKE     {fault}")
            for fault, at in zip(self.scene.faults, self.strikes, strict=True)
            if at is not None
        ]
        start = min((at for at, _ in rows), default=0.0)
        story = [f"{at - start:8.2f}  {text}" for at, text in sorted(rows)]
        log = self.scene.path("coordinator.log")
        last = log.read_text().splitlines()[-12:] if log.exists() else []
        return "\n".join(["faults:", *faults, *story, "coordinator:", *last])

    def check(self) -> None:
        """Everything that must hold of every run."""
        try:
            self._check()
        except AssertionError as error:
            raise CheckFailed(f"{error}\n{self.timeline()}") from error

    def _check(self) -> None:
        wanted = list(range(self.iterations))
        assert [row["iteration"] for row in self.metrics] == wanted, "metrics of every iteration, once"
        commits = [record["commit"] for record in self.wal if "commit" in record]
        assert commits == wanted, f"noted were {commits}"
        assert "done" in self.wal[-1]
        told: list[tuple[float, Event | IterationReport]] = [(row["time"], _report(row)) for row in self.metrics]
        told += [
            (each["time"], Event(each["kind"], each["iteration"], each["text"], each["node"])) for each in self.events
        ]
        check_visits(self.wal, [each for _, each in sorted(told, key=lambda pair: pair[0])])
        model = LlamaForCausalLM.from_pretrained(Path(self.scene.job.output) / "model")
        tokens = torch.arange(32).reshape(2, 16) % VOCABULARY
        with torch.no_grad():
            assert math.isfinite(model(input_ids=tokens, labels=tokens).loss.item()), "the loss of what was exported"

    def check_gone(self) -> None:
        """No process is left, not even as a zombie, and nobody listens any more."""
        rows = [line.split() for line in self.scene.path("pids").read_text().splitlines()]
        pids = {int(pid) for _, pid, *_ in rows} | {
            int(parent) for name, _, parent, *_ in rows if name not in (THE_COORDINATOR, HUB)
        }
        ports = {port for _, _, _, *at in rows for each in at if each != OUT_ONLY for _, port in split_all(each)}
        pids -= {os.getpid()}
        deadline = time.monotonic() + GONE_S
        while (left := [pid for pid in pids if _is_there(pid)]) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        if left:
            raise CheckFailed(f"processes {left} are left\n{self.timeline()}")
        if open_ports := ports & _listening():
            raise CheckFailed(f"somebody listens at {open_ports}\n{self.timeline()}")


def _report(row: dict[str, Any]) -> IterationReport:
    return IterationReport(
        row["iteration"], row["loss"], 0.0, 0.0, row["seconds"], {}, {}, stage_microbatches=tuple(row["visits"])
    )


def _is_there(pid: int) -> bool:
    """A zombie counts, unless it is for somebody else to look after (process 1)."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return not (state == "Z" and parent == "1")


def _listening() -> set[int]:
    found = set()
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(name).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == "0A":
                found.add(int(local.rpartition(":")[2], 16))
    return found
