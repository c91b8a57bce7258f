"""The embedding backup: lost data nodes, lost backups, lost coordinators, and weights that are never made up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch

from skippipe.cluster import Cluster
from skippipe.codecs import encode
from skippipe.model.model_spec import ModelSpec
from skippipe.plan import Lane, Plan
from skippipe.runtime import stage_executor
from skippipe.runtime.coordinator.interfaces import CoordinatorState
from skippipe.runtime.coordinator.recovery import best_pair
from skippipe.runtime.coordinator.settings import CoordinatorSettings, RecoverySettings
from skippipe.runtime.messages import (
    BackupRequest,
    BackupStored,
    FetchBackup,
    MakeBackup,
    Ready,
    Recover,
    Recovered,
    StateDigest,
    StateRequest,
)
from skippipe.runtime.node.ops import (
    CopyBackup,
    Op,
    OpenBackup,
    PlanTransfer,
    ReadState,
    StageTask,
    StoreBackup,
    WriteState,
)
from skippipe.runtime.simulation.fault_injection import Fault, kill, kill_coordinator
from skippipe.runtime.simulation.symbolic_executor import SymbolicExecutor
from skippipe.runtime.simulation.virtual_cluster import VirtualCluster
from skippipe.runtime.stage_executor import StageExecutor
from skippipe.runtime.state_source import StateSource
from skippipe.training.build_run import RunSetup
from skippipe.training.job_config import JobConfig
from skippipe.training.job_tables import CheckpointConfig, RecoveryConfig
from skippipe.transport.message import BackupPiece, Message, StatePiece
from tests.helpers import exact_training
from tests.helpers.exact_training import plan_of, tensors_of
from tests.helpers.executors import computer_of, noise, stepped
from tests.helpers.fault_scenarios import plan_over
from tests.helpers.single_coordinator import HELLO, coordinating, is_now
from tests.helpers.single_node import Bench
from tests.helpers.virtual_chaos import LEARNING, MemoryStore

torch.set_num_threads(1)

ITERATIONS = 8
ONE = (((0,), (1, 2), (3, 4)), [((0, 1, 3), 2), ((0, 2, 4), 2)])
TWO = (((0, 1), (2, 3), (4, 5)), [((0, 2, 4), 2), ((1, 3, 5), 2)])


def recovery(every: int = 2, **others: Any) -> RecoverySettings:
    return RecoverySettings(planning=timedelta(0), backup_every=every, **others)


def trained(
    shape: tuple[Any, Any],
    *faults: Fault,
    every: int = 2,
    executors: dict[int, SymbolicExecutor] | None = None,
    **others: Any,
) -> VirtualCluster:
    plan = plan_over(*shape, False, "ring")
    lost_stage, checkpoint_every = others.pop("lost_stage", "checkpoint"), others.pop("checkpoint_every", 0)
    cluster = VirtualCluster(
        plan,
        CoordinatorSettings(
            LEARNING,
            ITERATIONS,
            checkpoint_every=checkpoint_every,
            recovery=recovery(every, lost_stage=lost_stage),
        ),
        executors or {node: SymbolicExecutor(node, plan) for node in plan.stage_of},
        faults=faults,
        **others,
    )
    for machine in cluster.executor_of.values():
        if isinstance(machine, Killing):
            machine.cluster = cluster
    return cluster


class Killing(SymbolicExecutor):
    """Ends another node when it does some work."""

    cluster: VirtualCluster
    victims: tuple[int, ...] = ()
    when: Callable[[VirtualCluster, Op], bool]

    def run(self, work: Op) -> Any:
        if self.victims and self.when(self.cluster, work):
            victims, self.victims = self.victims, ()
            for victim in victims:
                self.cluster.after(0, lambda victim=victim: self.cluster.kill(victim))  # type: ignore[misc]
        return super().run(work)


def killing(
    node: int, victims: tuple[int, ...], when: Callable[[VirtualCluster, Op], bool]
) -> dict[int, SymbolicExecutor]:
    """Executors of the plan with one data node; this node's ends the victims."""
    plan = plan_over(*ONE, False, "ring")
    killer = Killing(node, plan)
    killer.victims, killer.when = victims, when
    return {each: SymbolicExecutor(each, plan) for each in plan.stage_of} | {node: killer}


def holder_of(shape: tuple[Any, Any], without: Sequence[int] = ()) -> int:
    plan = plan_over(*shape, False, "ring")
    pair = best_pair(plan, [node for node in plan.stage_of if node not in without])
    assert pair is not None
    return pair[1]


def data_nodes(cluster: VirtualCluster) -> list[int]:
    membership = cluster.coordinator.membership
    return [node for node in membership.active if membership[node].stage == 0]


def events_of(cluster: VirtualCluster, kind: str) -> list[str]:
    return [event.text for _, event in cluster.events if event.kind == kind]


def assert_goes_on_with_trained_ends(cluster: VirtualCluster, before: SymbolicExecutor, lost_in: int) -> int:
    """Age in iterations of the backup that was used."""
    assert cluster.coordinator.state is CoordinatorState.DONE, (cluster.coordinator.failure, cluster.events)
    (learned,) = (text for text in events_of(cluster, "recovering") if "iterations old" in text)
    age = int(learned.split(" iterations old")[0].split()[-1])
    copied = lost_in - age
    assert copied > 0
    for node in data_nodes(cluster):
        machine = cluster.executor_of[node]
        assert isinstance(machine, SymbolicExecutor)
        assert machine is not before
        assert machine.ends[:copied] == before.ends[:copied], "as they were after so many iterations"
        assert len(machine.ends) == copied + ITERATIONS - lost_in, "and trained further from there"
    return age


@pytest.mark.parametrize(("shape", "lost"), [(ONE, (0,)), (TWO, (0, 1))])
@pytest.mark.parametrize("during", ["forward", "head", "averaging"])
def test_all_data_nodes_are_lost_and_their_trained_weights_are_not(
    shape: Any, lost: tuple[int, ...], during: Any
) -> None:
    cluster = trained(shape, *(kill(node).at(4, during) for node in lost))
    before = cluster.executor_of[0]
    assert isinstance(before, SymbolicExecutor)
    cluster.run()
    assert assert_goes_on_with_trained_ends(cluster, before, 4) <= 2


def test_when_the_holder_is_lost_another_node_gets_a_backup() -> None:
    first = holder_of(TWO)
    cluster = trained(TWO, kill(first).at(2), kill(0).at(5), kill(1).at(5), every=20)
    before = cluster.executor_of[0]
    assert isinstance(before, SymbolicExecutor)
    cluster.run()
    assert assert_goes_on_with_trained_ends(cluster, before, 5) <= 2
    assert f"'n{first}'" not in next(text for text in events_of(cluster, "recovering") if "iterations old" in text)


def test_a_data_node_that_is_lost_while_its_backup_is_fetched_leaves_the_one_before() -> None:
    computers = killing(
        holder_of(ONE), (0,), lambda cluster, work: isinstance(work, StoreBackup) and len(cluster.reports) >= 3
    )
    cluster = trained(ONE, kill(4).at(100), executors=computers)
    before = cluster.executor_of[0]
    assert isinstance(before, SymbolicExecutor)
    cluster.run()
    lost_in = next(event.iteration for _, event in cluster.events if event.kind == "lost")
    assert assert_goes_on_with_trained_ends(cluster, before, lost_in) >= 2, "the new backup was not complete"


def test_a_backup_that_is_complete_when_its_data_node_is_lost_is_used() -> None:
    def complete(cluster: VirtualCluster, work: Op) -> bool:
        return isinstance(work, StoreBackup) and work.part.at == 1 and len(cluster.reports) >= 3

    computers = killing(holder_of(ONE), (0,), complete)
    cluster = trained(ONE, kill(4).at(100), executors=computers)
    before = cluster.executor_of[0]
    assert isinstance(before, SymbolicExecutor)
    cluster.run()
    lost_in = next(event.iteration for _, event in cluster.events if event.kind == "lost")
    assert assert_goes_on_with_trained_ends(cluster, before, lost_in) < 2


@pytest.mark.parametrize("both_at_once", [False, True])
def test_a_restarted_coordinator_learns_which_node_has_the_backup(both_at_once: bool) -> None:
    cluster = trained(ONE, kill_coordinator().at(4 if both_at_once else 3), kill(0).at(4), every=20)
    before = cluster.executor_of[0]
    assert isinstance(before, SymbolicExecutor)
    cluster.run()
    assert events_of(cluster, "coordinator-restarted")
    assert_goes_on_with_trained_ends(cluster, before, 4)


@pytest.mark.parametrize("restarted", [False, True])
def test_without_a_backup_the_run_pauses_and_says_what_is_lost(restarted: bool) -> None:
    faults = [kill(0).at(4).back_after(3.0), *([kill_coordinator().at(4)] if restarted else [])]
    cluster = trained(ONE, *faults, every=0)
    cluster.run()
    coordinator = cluster.coordinator
    assert coordinator.state is CoordinatorState.FAILED
    assert "stage 0 is lost: no node has its embedding, final norm and head" in coordinator.failure
    (paused,) = (text for text in events_of(cluster, "paused") if "is lost" in text)
    assert "checkpoint.every" in paused
    assert len(cluster.reports) == 4, "nothing is trained with new ones"
    assert not events_of(cluster, "recovering")
    assert [coordinator.membership[node].stage for node in (1, 2, 3, 4)] == [1, 1, 2, 2], (
        "and no node gives up what it has"
    )


def test_when_data_node_and_backup_are_lost_together_the_run_pauses() -> None:
    computers = killing(
        0, (0, holder_of(ONE)), lambda _cluster, work: isinstance(work, StageTask) and work.iteration == 4
    )
    cluster = trained(ONE, kill(4).at(100), executors=computers)
    cluster.run()
    assert "stage 0 is lost" in cluster.coordinator.failure
    assert len(cluster.reports) == 4


def test_before_the_first_step_the_seed_is_as_good_as_a_backup() -> None:
    cluster = trained(ONE, kill(0).at(0))
    cluster.run()
    assert cluster.coordinator.state is CoordinatorState.DONE, cluster.coordinator.failure
    for node in data_nodes(cluster):
        machine = cluster.executor_of[node]
        assert isinstance(machine, SymbolicExecutor)
        assert len(machine.ends) == ITERATIONS


@pytest.mark.parametrize(("lost_stage", "every", "origin"), [
    ("neighbours", 0, "from the newest checkpoint"),
    ("checkpoint", 2, "from the newest checkpoint"),
    ("neighbours", 2, "iterations old"),
])  # fmt: skip
def test_a_checkpoint_or_a_backup(lost_stage: str, every: int, origin: str) -> None:
    store = MemoryStore(3)
    cluster = trained(
        ONE, kill(0).at(5), every=every, lost_stage=lost_stage, checkpoint_store=store, checkpoint_every=2
    )
    cluster.run()
    assert cluster.coordinator.state is CoordinatorState.DONE, cluster.coordinator.failure
    assert any(origin in text for text in events_of(cluster, "recovering")), cluster.events
    for node in data_nodes(cluster):
        machine = cluster.executor_of[node]
        assert isinstance(machine, SymbolicExecutor)
        assert len(machine.ends) >= ITERATIONS - 5 + 2


# A coordinator by itself, and a node


def test_a_backup_is_made_fetched_and_made_again() -> None:
    harness = coordinating(9, plan_over(*ONE, False, "ring"), recovery=recovery(2))
    harness.iterate()
    target = holder_of(ONE)
    assert MakeBackup(1) in harness.env.new_messages()[0]
    harness.send(0, BackupStored(1))
    assert harness.env.new_messages() == {target: [FetchBackup(0, 1)]}
    harness.iterate()
    assert not any(isinstance(each, MakeBackup) for each in harness.env.new_messages()[0]), "one is on its way"
    harness.send(target, BackupStored(1))
    assert harness.coordinator.membership[target].backup == 1
    harness.iterate()
    assert MakeBackup(3) in harness.env.new_messages()[0]


def test_a_node_that_fetches_a_replaced_backup_gets_the_next() -> None:
    harness = coordinating(9, plan_over(*ONE, False, "ring"), recovery=recovery(1))
    target = holder_of(ONE)
    harness.iterate()
    harness.send(0, BackupStored(1))
    harness.send(target, BackupStored(1))
    harness.iterate()
    harness.send(0, BackupStored(2))
    harness.coordinator.node_lost(0, "its process ended")
    assert is_now(harness.coordinator, CoordinatorState.PAUSED)
    (moved,) = (node for node, stage, _ in harness.env.logged("welcome")[5:] if stage == 0)
    assert moved != target, "the holder of the backup stays"
    harness.send(moved, Ready())
    (recover,) = (each for each in harness.env.new_messages()[moved] if isinstance(each, Recover))
    assert recover.origin.backup == (target, 1)
    harness.send(target, BackupStored(2))
    (recover,) = (each for each in harness.env.new_messages()[moved] if isinstance(each, Recover))
    assert recover.origin.backup == (target, 2)
    harness.send(target, BackupStored(0))
    assert harness.coordinator._commits.lacking.startswith("stage 0 is lost")


def test_a_node_stores_only_what_it_requested_and_says_what_it_has() -> None:
    bench = Bench(2)
    bench.begin(3)
    bench.hear(FetchBackup(0, 3))
    bench.work()
    assert bench.asked == [(0, BackupRequest(3, 0, 1, 3))]
    bench.node.handle_peer_control(0, StateDigest(0, "sound", 3))
    bench.take(0, replace(bench_loan((((0, 0),),)), header=StatePiece(0, 0, 3)))
    assert bench.work() == [], "a piece of a state is none of a backup"
    for first, steps in enumerate(((((0, 0),),), (((1, 1),), ((2, 2),)))):
        assert bench.heard() == []
        bench.node.handle_peer_control(0, StateDigest(first, "sound", 3))
        bench.take(0, bench_loan(steps, first))
        bench.work()
    assert bench.heard() == [BackupStored(3)]
    assert bench.node.hello("here", "1").backup == 3
    bench.node.handle_peer_control(4, BackupRequest(2, 0, 1, 2))
    bench.work()
    assert bench.heard() == [BackupStored(3)], "it has another than the one that is asked for"
    assert not bench.sent_messages


def bench_loan(steps: Any, first: int = 0) -> Any:
    return Message(BackupPiece(first, 3), steps)


# Memory and links


def test_the_holder_has_memory_for_the_backup_and_if_possible_a_link_of_its_own() -> None:
    plan = plan_over(ONE[0], [((0, 1, 3), 2), ((0, 2, 3), 2)], False)
    assert best_pair(plan, plan.stage_of) == (0, 4), "microbatches take the other links"
    everywhere = plan_over(((0,), (1,)), [((0, 1), 2)], False)
    assert best_pair(everywhere, everywhere.stage_of) == (0, 1), "there is no other"
    bandwidth = plan.cluster.bandwidth_bytes_per_s.copy()
    bandwidth[0, 4] = 0
    cut = replace(plan, cluster=replace(plan.cluster, bandwidth_bytes_per_s=bandwidth), expected=None)
    assert best_pair(cut, cut.stage_of) == (0, 1), "rather over such a link than over one that is not there"
    assert best_pair(cut, (0, 4)) is None
    workload = plan.workload
    stage_bytes = workload.fixed_bytes(1, plan.layers[1]) + 3 * workload.held_bytes(plan.layers[1])
    needed = stage_bytes + 2 * workload.backup_bytes
    for memory, found in ((needed, True), (needed - 1, False)):
        nodes = tuple(replace(each, memory_bytes=memory) if at else each for at, each in enumerate(plan.cluster.nodes))
        cluster = Cluster("small", nodes, plan.cluster.latency_s, plan.cluster.bandwidth_bytes_per_s)
        small = replace(plan, cluster=cluster, expected=None)
        assert small.slots[1] == 3
        assert (best_pair(small, (0, 1, 2)) is not None) == found


@pytest.mark.parametrize(("shape", "kept_every", "every", "warned"), [
    (ONE, 0, 0, "so is the model; set checkpoint.every, survive.backup_every = 10, or plan two data nodes"),
    (ONE, 0, 10, "go back some 10 iterations"),
    (ONE, 50, 0, ""),
    (TWO, 0, 0, ""),
])  # fmt: skip
def test_a_run_that_the_loss_of_one_node_would_set_back_is_warned_of(
    shape: tuple[Any, Any], kept_every: int, every: int, warned: str
) -> None:
    job = JobConfig(checkpoint=CheckpointConfig(every=kept_every), survive=RecoveryConfig(backup_every=every))
    risk = RunSetup(job, plan_over(*shape, False, "ring"), None, None, {}, {}).risk  # type: ignore[arg-type]
    assert warned in risk
    assert bool(risk) == bool(warned)


# Real tensors


def ends_of(executor: StageExecutor) -> dict[str, torch.Tensor]:
    named = executor.tasks.model.named_weights()
    return {name: each.detach().clone() for name, each in named if ".layers." not in name}


@pytest.mark.parametrize("tied", [False, True])
def test_the_ends_come_back_bit_for_bit(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_executor, "BACKUP_VALUES", 777)
    config = {"tie_word_embeddings": tied}
    data, holder = computer_of(0, config=config), computer_of(2, config=config)
    lost = computer_of(0, config=config, seed=9)
    size = len(data.tasks.weights.gradient)
    for number in range(2):
        data.tasks.weights.gradient.copy_(noise(number, size))
        stepped(data, 2)
    data.run(CopyBackup(2))
    expected = ends_of(data)
    assert len(expected) == (2 if tied else 3)
    copy_from(data, holder, 2)
    data.tasks.weights.gradient.copy_(noise(5, size))
    stepped(data, 2)
    data.run(CopyBackup(3))
    (first, *_) = holder.run(OpenBackup(0, 3))
    assert holder.run(StoreBackup(first, *data.run(ReadState(first.first, first.count, 2, backup=3)))) is True
    assert holder.run(StoreBackup(first, encode(torch.zeros(first.count), "fp32"), "0" * 64)) is False
    assert data.run(ReadState(0, 1, 2, backup=2)).payload is None, "it has a later one"
    origin = StateSource("neighbours", (5,), (1,), (1.0,), 0, backup=(2, 2))
    neighbour = computer_of(1, config=config, seed=3)
    for part in lost.run(PlanTransfer(origin)):
        loan = (holder if part.backup else neighbour).run(ReadState(part.first, part.count, 1, backup=part.backup))
        assert lost.run(WriteState(part, *loan)) is True
    for name, each in ends_of(lost).items():
        assert torch.equal(each, expected[name]), name
    assert not lost.tasks.weights.optimizer.state["exp_avg"].any()


def copy_from(data: StageExecutor, holder: StageExecutor, iterations: int) -> None:
    parts = holder.run(OpenBackup(0, iterations))
    assert len(parts) > 2
    for part in parts:
        assert holder.run(ReadState(0, 1, 1, backup=iterations)).payload is None, "it is not whole"
        assert (
            holder.run(StoreBackup(part, *data.run(ReadState(part.first, part.count, 2, backup=part.backup)))) is True
        )


@pytest.mark.slow
def test_the_loss_goes_on_near_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Much nearer than with a new embedding and head, which are worth nothing."""
    monkeypatch.setattr(exact_training, "TEXT", np.tile(np.arange(0, 97, 8), 300))
    plan, spec = plan_of((Lane((0, 1, 3), 2), Lane((0, 2, 4), 2)), (1, 2, 2), stages=((0,), (1, 2), (3, 4)))
    cluster, copied = with_tensors(plan, spec, 30, kill(0).at(24))
    losses = [report.loss for report in cluster.reports]
    assert cluster.coordinator.state is CoordinatorState.DONE, cluster.coordinator.failure
    assert any("iterations old" in text for text in events_of(cluster, "recovering"))
    learned = losses[0] - losses[23]
    assert learned > 0.5, losses
    assert losses[24] < losses[23] + learned / 2, losses
    assert losses[-1] < losses[0] - learned / 2
    assert copied, "the embedding that was rebuilt is the backup"


def with_tensors(plan: Plan, spec: ModelSpec, iterations: int, *faults: Fault) -> tuple[VirtualCluster, list[bool]]:
    learning = replace(LEARNING, rate=1e-2, iterations=iterations)
    matches: list[bool] = []

    def built(node: int, plan: Plan) -> StageExecutor:
        machine = tensors_of(plan, spec, learning)[node]
        run = machine.run

        def watched(work: Op) -> Any:
            result = run(work)
            if isinstance(work, WriteState) and work.part.backup:
                holder = cluster.executor_of[work.part.source]
                assert isinstance(holder, StageExecutor)
                assert holder._backup is not None
                here = machine.tasks.weights.values[work.part.at : work.part.at + work.part.count]
                there = holder._backup[1][work.part.first : work.part.first + work.part.count]
                matches.append(torch.equal(here, there))
                assert matches[-1]
            return result

        machine.run = watched  # type: ignore[method-assign]
        return machine

    cluster = VirtualCluster(
        plan,
        CoordinatorSettings(learning, iterations, recovery=recovery(4)),
        tensors_of(plan, spec, learning),
        faults=faults,
        builder=built,
    )
    cluster.run()
    return cluster, matches


def test_a_node_told_to_recover_while_it_steps_has_nothing_yet() -> None:
    bench = Bench(3)
    bench.begin(0)
    bench.hear(Recover(StateSource("replica", (4,), (2,), (1.0,), 0), 1))
    bench.begin(1)
    assert not any(isinstance(each, Recovered) for each in bench.heard())
    bench.work()
    assert bench.asked == [(4, StateRequest(2, 0, 1, 1))]


def test_of_two_nodes_for_a_lost_stage_one_rebuilds_it_and_the_other_fetches_it_there() -> None:
    harness = coordinating(9, plan_over(*ONE, False, "ring"), recovery=recovery(1))
    harness.iterate()
    harness.coordinator.node_lost(1, "its process ended")
    harness.coordinator.node_lost(2, "its process ended")
    harness.coordinator.node_lost(0, "its process ended")
    harness.send(3, BackupStored(1))
    for node in (0, 1, 2):
        harness.send(node, HELLO)
        harness.send(node, Ready())
    stages = [harness.coordinator.membership[node].stage for node in (0, 1, 2)]
    recoveries = [each for _, each in harness.env.sent if isinstance(each, Recover)]
    rebuilt = [each.origin.kind for each in recoveries if each.origin.kind != "replica"]
    assert len(rebuilt) == len({stage for stage in stages if stage in (0, 1)}), (stages, recoveries)
