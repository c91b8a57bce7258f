"""Real processes on this machine: they train what one process would, and none outlives its run.

Runs fork, and a process that has seen other tests may have threads; so every run has an owner of its own, forked from a
fresh process that has imported much and done nothing else.
"""

from __future__ import annotations

import gc
import json
import math
import os
import resource
import signal
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from skippipe.checkpoint.format import Checkpoints, verified
from skippipe.checkpoint.hf_export import ModelFolder
from skippipe.codecs import encode
from skippipe.data.prepare import prepare
from skippipe.errors import UserError
from skippipe.launch import fork_server
from skippipe.launch.fork_server import ProcessPool
from skippipe.model.model_spec import ModelSpec
from skippipe.optim.config import OptimConfig
from skippipe.plan import Lane, Plan, Stage
from skippipe.runtime.coordinator.interfaces import Callback, Event, IterationReport
from skippipe.runtime.coordinator.settings import CoordinatorSettings, RecoverySettings
from skippipe.runtime.node.ops import Op, OpThreads, OptimizerStep
from skippipe.runtime.node_config import NodeConfig
from skippipe.runtime.state_source import MalformedWeights
from skippipe.simulator import simulate
from skippipe.training.reference import ReferenceTrainer
from skippipe.training.run import Run
from skippipe.transport.mailbox import Security
from skippipe.transport.message import Hop, Message
from skippipe.workload import Workload
from tests.helpers.exact_training import LowRankReference
from tests.helpers.models import tiny
from tests.helpers.plans import uniform_cluster
from tests.helpers.processes import alive, owner, wait_for
from tests.helpers.quick import MOST_FAMILIES_SLOW, others_slow

TIMEOUT_S = 60.0  # for a whole run on a machine that is busy with others
ITERATIONS = 3
LOST_ITERATIONS = 8
FULL_BYTES = 20_000  # that a file may have on a full disk: enough for a journal, too little for a stage
LEARNING = OptimConfig(rate=3e-3, warmup=1, iterations=ITERATIONS)
TEXT = "It is a truth universally acknowledged, that a node in possession of a good stage must be in want of a lane. "


def node_config_in(folder: Path, **others: Any) -> tuple[NodeConfig, ModelSpec]:
    """Five nodes: stage 0 on two, stage 1 on one, stage 2 on two. One lane skips stage 1, one swaps 1 and 2."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text(" ".join(f"{number} {TEXT}" for number in range(200)))
    tokens = prepare(text, 300, folder / "tokens")
    spec = ModelSpec(tiny("llama", vocab_size=tokens.vocabulary), seed=4)
    workload = Workload(spec.shape, 16, 2, 4, wire_dtype="fp32", compute_dtype="fp32")
    stages = (Stage(2, (0, 1), (0, 1)), Stage(1, (2,), (2,)), Stage(2, (3, 4), (4, 3)))
    lanes = (Lane((0, 2, 3), 2), Lane((1, 4), 1), Lane((1, 3, 2), 1))
    cluster = uniform_cluster(5, latency_s=0.002, bandwidth=1e8, flops_per_s=1e9)
    plan = Plan(cluster, workload, stages, lanes)
    node_config = NodeConfig(plan, spec.config.to_dict(), 4, LEARNING, str(tokens.folder), tokens.fingerprint)
    return replace(node_config, **others), spec


class Watching(Callback):
    """Notes what it is told in a file, then does something."""

    def __init__(self, folder: Path, then: Callable[[IterationReport], None] = lambda report: None) -> None:
        self.pool: ProcessPool | None = None
        self._folder = folder
        self._then = then

    def started(self, pool: ProcessPool) -> None:
        self.pool = pool

    def iteration_done(self, report: IterationReport) -> None:
        assert self.pool is not None
        self.pool.poll()
        with (self._folder / "iterations").open("a") as file:
            print(json.dumps([report.loss, report.seconds, len(report.tasks), self.pool.pids]), file=file)
        self._then(report)

    def happened(self, event: Event) -> None:
        with (self._folder / "events").open("a") as file:
            print(json.dumps([event.kind, event.node, event.text]), file=file)


def told(folder: Path) -> list[list[Any]]:
    """What a `Watching` was told so far."""
    file = folder / "iterations"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def events(folder: Path) -> list[tuple[str, str, str]]:
    """Kind, node and text of what happened to a `Watching`."""
    file = folder / "events"
    return [tuple(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def who_did_what(folder: Path) -> list[tuple[str, str]]:
    return [(kind, node) for kind, node, _ in events(folder)]


def run_in(folder: Path, iterations: int = 10**6, security: Security = "none", **others: Any) -> Run:
    node_config, spec = node_config_in(folder, **others)
    tokenizer = prepare(folder / "text.txt", 300, folder / "tokens").tokenizer()
    return Run(
        node_config,
        spec,
        tokenizer,
        folder / "run",
        CoordinatorSettings(LEARNING, iterations, recorded=frozenset({1})),
        security,
    )


# What owners do, each in a process of its own


def train(folder: Path) -> None:
    watching = Watching(folder)
    run = run_in(folder, ITERATIONS, "curve", emulated=True)
    run.launch_local(watching, watching.started)


def at_low_rank(plan: Plan) -> Plan:
    return replace(plan, workload=replace(plan.workload, gradient_dtype="rank-4"))


def train_at_low_rank(folder: Path) -> None:
    watching, plan = Watching(folder), at_low_rank(node_config_in(folder)[0].plan)
    run_in(folder, ITERATIONS, "curve", plan=plan).launch_local(watching, watching.started)


def with_checkpoints(run: Run, every: int) -> Run:
    return replace(run, settings=replace(run.settings, checkpoint_every=every))


def lose_a_node(folder: Path, by: int = signal.SIGKILL, **others: Any) -> None:
    def kill(report: IterationReport) -> None:
        if report.iteration == 1:
            assert watching.pool is not None
            os.kill(watching.pool.pids["n3"], by)

    watching = Watching(folder, kill)
    run = replace(run_in(folder, LOST_ITERATIONS), **others)
    complain(
        folder,
        lambda: run.launch_local(watching, watching.started, lambda: ("recovered", "n3") in who_did_what(folder)),
    )


def lose_a_node_and_give_up(folder: Path) -> None:
    settings = CoordinatorSettings(LEARNING, LOST_ITERATIONS, recovery=RecoverySettings(fault_tolerant=False))
    lose_a_node(folder, settings=settings)


def lose_the_fork_server_and_a_node_of_it(folder: Path) -> None:
    def kill(report: IterationReport) -> None:
        assert watching.pool is not None
        if report.iteration == 1:
            os.kill(watching.pool.servers[0], signal.SIGKILL)
        if report.iteration == 2:
            os.kill(watching.pool.pids["n3"], signal.SIGKILL)

    watching = Watching(folder, kill)
    run = replace(run_in(folder), restarts=1)
    complain(
        folder,
        lambda: run.launch_local(watching, watching.started, lambda: ("recovered", "n3") in who_did_what(folder)),
    )


def lose_a_node_and_start_it_again(folder: Path) -> None:
    lose_a_node(folder, restarts=1, settings=CoordinatorSettings(LEARNING, 10**6))


def end_a_node_and_start_it_again(folder: Path) -> None:
    fork_server.GROUP_S = 0.1  # the others train all the time that the node takes to end
    lose_a_node(folder, signal.SIGTERM, restarts=1, settings=CoordinatorSettings(LEARNING, 10**6))


def be_asked_to_end(folder: Path) -> None:
    watching = Watching(folder)
    run = with_checkpoints(run_in(folder), 100)
    complain(folder, lambda: run.launch_local(watching, watching.started, lambda: len(told(folder)) >= 2))


def run_out_of_room(folder: Path) -> None:
    """No file can grow from the second iteration on, until the run says that it waits for room."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(report: IterationReport) -> None:
        if report.iteration == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_BYTES, most))

    class Freeing(Watching):
        def happened(self, event: Event) -> None:
            super().happened(event)
            if event.kind == "storage":
                resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    watching = Freeing(folder, fill)
    run = replace(with_checkpoints(run_in(folder, 4), 1), run_id="00c0ffee00c0ffee")
    complain(folder, lambda: run.launch_local(watching, watching.started))


def lack_the_text(folder: Path) -> None:
    watching = Watching(folder)
    complain(folder, lambda: run_in(folder, data_fingerprint="0" * 64).launch_local(watching, watching.started))


def be_interrupted(folder: Path) -> None:
    def interrupt(report: IterationReport) -> None:
        if report.iteration == 1:
            raise KeyboardInterrupt

    watching = Watching(folder, interrupt)
    complain(folder, lambda: run_in(folder).launch_local(watching, watching.started))


def go_on(folder: Path) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell ignores for what runs in its background
    watching = Watching(folder)
    complain(folder, lambda: run_in(folder).launch_local(watching, watching.started))


def complain(folder: Path, run: Callable[[], None]) -> None:
    try:
        run()
        said = "no complaint"
    except (UserError, KeyboardInterrupt) as error:
        said = f"{type(error).__name__}: {error}"
    (folder / "complaint").write_text(said)


def pids_in(folder: Path) -> list[int]:
    pids = list(told(folder)[-1][3].values())
    assert len(pids) == 5
    return pids


def test_processes_train_what_one_process_does(tmp_path: Path) -> None:
    with owner(train, tmp_path) as process:
        process.join(TIMEOUT_S)
        assert process.exitcode == 0
    node_config, spec = node_config_in(tmp_path)
    oracle = ReferenceTrainer(node_config.plan, spec, LEARNING, node_config.sampler())
    expected = [oracle.iteration(number).loss for number in range(ITERATIONS)]
    found = told(tmp_path)
    assert [row[0] for row in found] == pytest.approx(expected, rel=1e-4)
    assert [row[2] for row in found] == [0, 5, 0], "the second was to be recorded"
    promised_s = simulate(node_config.plan).iteration_s
    assert all(row[1] >= 0.95 * promised_s for row in found[1:]), "faster than the nodes and links that it emulates"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    weights = dict(model.named_parameters())
    assert weights.keys() == oracle.weights().keys()
    for name, each in oracle.weights().items():
        torch.testing.assert_close(weights[name].detach(), each, rtol=1e-4, atol=1e-6)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    logs = {path.stem: path.read_text() for path in (tmp_path / "run" / "logs").iterdir()}
    assert logs == dict.fromkeys(("n0", "n1", "n2", "n3", "n4"), ""), "a node that was let go has nothing to say"
    assert not any(alive(pid) for pid in pids_in(tmp_path))


@pytest.mark.slow
def test_processes_train_at_low_rank_what_one_process_does(tmp_path: Path) -> None:
    with owner(train_at_low_rank, tmp_path) as process:
        process.join(TIMEOUT_S)
        assert process.exitcode == 0
    node_config, spec = node_config_in(tmp_path)
    oracle = LowRankReference(at_low_rank(node_config.plan), spec, LEARNING, node_config.sampler())
    exact = ReferenceTrainer(node_config.plan, spec, LEARNING, node_config.sampler())
    expected = [(oracle.iteration(number).loss, exact.iteration(number).loss) for number in range(ITERATIONS)]
    assert expected[-1][0] != pytest.approx(expected[-1][1], rel=3e-5)
    assert [row[0] for row in told(tmp_path)] == pytest.approx([losses[0] for losses in expected], rel=1e-5)


def test_a_run_goes_on_without_a_killed_node(tmp_path: Path) -> None:
    with owner(lose_a_node, tmp_path) as process:
        process.join(TIMEOUT_S)
        assert process.exitcode == 0
    assert (tmp_path / "complaint").read_text() == "no complaint"
    losses = [row[0] for row in told(tmp_path)]
    assert len(losses) == LOST_ITERATIONS, "none is missing, none is told twice"
    assert all(map(math.isfinite, losses))
    assert next(text for kind, node, text in events(tmp_path) if (kind, node) == ("lost", "n3")).startswith("signal 9")
    assert {node for kind, node in who_did_what(tmp_path) if kind == "lost"} == {"n3"}
    kinds = {kind for kind, _ in who_did_what(tmp_path)}
    assert kinds & {"rerouted", "restarted"} and "replanned" in kinds
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").num_parameters() > 0
    assert not any(alive(pid) for pid in pids_in(tmp_path))


@pytest.mark.parametrize(
    "losing",
    others_slow(
        [lose_a_node_and_start_it_again, lose_the_fork_server_and_a_node_of_it], [end_a_node_and_start_it_again]
    ),
)
def test_a_killed_node_that_is_started_again_takes_part(losing: Callable[[Path], None], tmp_path: Path) -> None:
    with owner(losing, tmp_path) as process:
        process.join(TIMEOUT_S)
        assert process.exitcode == 0
    assert (tmp_path / "complaint").read_text() == "no complaint"
    life = ("lost", "joined", "recovering", "recovered")
    found = [kind for kind, node in who_did_what(tmp_path) if node == "n3" and kind in life]
    assert found == list(life)
    assert (tmp_path / "run" / "model" / "config.json").exists(), "then the run was ended, and its weights collected"
    assert not any(alive(pid) for pid in pids_in(tmp_path))


def test_a_run_that_is_asked_to_end_completes_its_iteration_and_can_go_on(tmp_path: Path) -> None:
    with owner(be_asked_to_end, tmp_path) as process:
        process.join(TIMEOUT_S)
        assert process.exitcode == 0
    assert (tmp_path / "complaint").read_text() == "no complaint"
    assert [kind for kind, _ in who_did_what(tmp_path)] == ["ending"]
    done = len(told(tmp_path))
    assert done < 100
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"{done:06d}"]
    node_config, spec = node_config_in(tmp_path)
    oracle = ReferenceTrainer(node_config.plan, spec, LEARNING, node_config.sampler())
    for number in range(done):
        oracle.iteration(number)
    weights = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").named_parameters())
    for name, each in oracle.weights().items():
        torch.testing.assert_close(weights[name].detach(), each, rtol=1e-4, atol=1e-6)


def test_a_disk_that_is_full_in_the_end_costs_nothing_but_the_wait(tmp_path: Path) -> None:
    with owner(run_out_of_room, tmp_path) as process:
        process.join(TIMEOUT_S)
        assert process.exitcode == 0
    assert (tmp_path / "complaint").read_text() == "no complaint"
    said = [text for kind, _, text in events(tmp_path) if kind == "storage"]
    assert "of the model cannot be written: File too large, " in said[0]
    assert said[1:] == ["the model can be written again"]
    node_config, spec = node_config_in(tmp_path)
    oracle = ReferenceTrainer(node_config.plan, spec, LEARNING, node_config.sampler())
    for number in range(4):
        oracle.iteration(number)
    weights = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").named_parameters())
    for name, each in oracle.weights().items():
        torch.testing.assert_close(weights[name].detach(), each, rtol=1e-4, atol=1e-6)
    kept = Checkpoints(tmp_path / "run" / "checkpoints", run_id="00c0ffee00c0ffee").complete()
    assert kept[0].name == "000004", "it was made once more"
    assert verified(kept[0]).steps == (4, 4, 4)


def test_a_killed_node_ends_a_run_that_is_not_to_survive(tmp_path: Path) -> None:
    with owner(lose_a_node_and_give_up, tmp_path) as process:
        wait_for(lambda: len(told(tmp_path)) >= 2)
        process.join(10)
        assert process.exitcode == 0, "it took more than seconds"
    complaint = (tmp_path / "complaint").read_text()
    assert complaint.startswith("UserError: node 'n3' is gone (signal 9; last log lines in ")
    assert not any(alive(pid) for pid in pids_in(tmp_path))


def test_a_node_that_cannot_begin_says_why(tmp_path: Path) -> None:
    with owner(lack_the_text, tmp_path) as process:
        process.join(TIMEOUT_S)
        assert process.exitcode == 0
    complaint = (tmp_path / "complaint").read_text()
    assert complaint.startswith(("UserError: node 'n0': ", "UserError: node 'n1': "))
    assert "copy the coordinator's folder here" in complaint


def test_an_interrupt_ends_all(tmp_path: Path) -> None:
    with owner(be_interrupted, tmp_path) as process:
        wait_for(lambda: len(told(tmp_path)) >= 2)
        process.join(10)
        assert process.exitcode == 0, "it took more than 10 s"
    assert (tmp_path / "complaint").read_text().startswith("KeyboardInterrupt")
    assert not any(alive(pid) for pid in pids_in(tmp_path))


def test_control_c_reaches_the_whole_group_and_the_owner_decides(tmp_path: Path) -> None:
    with owner(go_on, tmp_path) as process:
        wait_for(lambda: len(told(tmp_path)) >= 2)
        assert process.pid is not None
        os.killpg(process.pid, signal.SIGINT)
        process.join(10)
        assert process.exitcode == 0, "it took more than 10 s"
    assert (tmp_path / "complaint").read_text().startswith("KeyboardInterrupt")
    assert not any(alive(pid) for pid in pids_in(tmp_path))


def test_nodes_do_not_outlive_an_owner_that_is_killed(tmp_path: Path) -> None:
    with owner(go_on, tmp_path) as process:
        wait_for(lambda: len(told(tmp_path)) >= 2)
        pids = pids_in(tmp_path)
        assert all(alive(pid) for pid in pids)
        process.kill()
        wait_for(lambda: not any(alive(pid) for pid in pids), 10)


# What is held, and for how long


class Echo:
    """A computer that gives back something that can be waited for to be gone."""

    def run(self, work: Op) -> Any:
        assert isinstance(work, OptimizerStep)
        return torch.full((3,), work.rate)

    def fits(self, message: Message, expected: Any) -> bool:
        return (message.header, expected) == (Hop(0, 0, 0, 1), 2)

    def prefetch(self, given: Any, _device: int) -> Any:
        return given


def test_a_worker_keeps_nothing_of_what_it_made() -> None:
    woken = threading.Event()
    worker = OpThreads(Echo, woken.set, None)
    worker.start(OptimizerStep(0.1, 1.0))
    deadline = time.monotonic() + TIMEOUT_S
    while not worker.done:
        assert woken.wait(deadline - time.monotonic())
        woken.clear()
    _, made = worker.done.popleft()
    gone = weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None
    assert worker.fits(Message(Hop(0, 0, 0, 1)), 2), "its computer says so"
    assert not worker.fits(Message(Hop(0, 0, 0, 2)), 2)
    worker.stop()


def test_a_worker_builds_on_its_own_thread_when_the_former_one_has_ended() -> None:
    former_may, may, woken = threading.Event(), threading.Event(), threading.Event()
    built: list[str] = []

    def build(name: str, allowed: threading.Event) -> Echo:
        assert allowed.wait(TIMEOUT_S)
        built.append(name)
        return Echo()

    former = OpThreads(lambda: build("former", former_may), lambda: None, None)
    former.stop()
    worker = OpThreads(lambda: build("worker", may), woken.set, None, former)
    may.set()
    assert not worker.built
    assert not worker.fits(Message(Hop(0, 0, 0, 1)), 2), "nobody can say yet"
    former_may.set()
    assert woken.wait(TIMEOUT_S)
    assert worker.built
    assert built == ["former", "worker"]
    worker.stop()


@pytest.mark.parametrize("family", MOST_FAMILIES_SLOW)
def test_transformers_loads_the_folder_of_every_family(family: str, tmp_path: Path) -> None:
    config = tiny(family)
    spec = ModelSpec(config, seed=8)
    stages = (Stage(2, (0,), (0,)), Stage(1, (1,), (1,)), Stage(2, (2,), (2,)))
    plan = Plan(uniform_cluster(3), Workload(spec.shape, 16, 2, 1), stages, (Lane((0, 1), 1),))

    class NoTokenizer:
        def save(self, folder: Path) -> None:
            assert folder == tmp_path / "unfinished"

    layers = tuple(stage.layers for stage in plan.stages)
    folder = ModelFolder(tmp_path, layers, spec, NoTokenizer())  # type: ignore[arg-type]
    oracle = ReferenceTrainer(plan, spec, LEARNING, None)  # type: ignore[arg-type]
    for number, stage in enumerate(oracle.stages):
        pieces = [*torch.split(stage.weights.values, 1000), None]
        folder.store(number, 0, encode(torch.ones(1000), "fp32"))  # from one that was lost: the stage begins again
        with pytest.raises(MalformedWeights, match=f"of stage {number} are not {len(stage.weights.values):,} numbers"):
            folder.store(number, 1, None)
        with pytest.raises(MalformedWeights):
            folder.store(number, 1, encode(stage.weights.values, "fp32"))
        for index, piece in enumerate(pieces):
            folder.store(number, index, None if piece is None else encode(piece, "fp32"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded).__name__ == type(spec.skeleton).__name__
    found = loaded.state_dict()
    assert found.keys() - {"lm_head.weight"} == oracle.weights().keys() - {"lm_head.weight"}
    for name, each in oracle.weights().items():
        assert torch.equal(found[name], each), name
