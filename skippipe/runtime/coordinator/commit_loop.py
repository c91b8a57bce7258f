"""The loop over iterations: how one begins, continues when nodes or links are lost, starts over, and is committed.

Microbatches of a lost node are rerouted within the iteration (`iteration`); at its end the plan is repaired for the
nodes that are left (`replanner`), and nodes that joined meanwhile take part and fetch their state (`recovery`). If
there is no plan for the nodes that are there, training pauses until others join.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

from skippipe.runtime.coordinator.failure_detector import FailureDetector
from skippipe.runtime.coordinator.interfaces import Callback, CoordinatorEnv, CoordinatorState, EventKind
from skippipe.runtime.coordinator.iteration import Iteration
from skippipe.runtime.coordinator.membership import MAX_COSTLY_REPORTS, Membership, MemberState
from skippipe.runtime.coordinator.recovery import LOST, RecoverySourceSelector
from skippipe.runtime.coordinator.replanner import Replanner
from skippipe.runtime.coordinator.settings import CoordinatorSettings
from skippipe.runtime.coordinator.state_gather import CheckpointGather
from skippipe.runtime.coordinator.validation import Validation
from skippipe.runtime.coordinator.wal_records import commit_record
from skippipe.runtime.messages import (
    Averaged,
    Begin,
    Commit,
    ControlMessage,
    Devices,
    DrainAck,
    LinkDown,
    MicrobatchDone,
    Validated,
)

RELAY_GRACE_NS = 5 * 10**9  # for two nodes to meet at a relay that has just come
WAYS_ON = "start anew, with checkpoint.every, survive.backup_every or a second data node"


class CommitContext(Protocol):
    """What the commit loop sees of the coordinator."""

    @property
    def state(self) -> CoordinatorState: ...

    def enter(self, state: CoordinatorState) -> None: ...

    def gather_weights(self) -> None: ...

    def fail(self, reason: str) -> None: ...

    def evict(self, node: int, reason: str) -> None: ...

    def log_event(self, kind: EventKind, text: str, node: int | None = None) -> None: ...


@dataclass
class CommitLoop:
    context: CommitContext
    settings: CoordinatorSettings
    membership: Membership
    replanner: Replanner
    recovery: RecoverySourceSelector
    gather: CheckpointGather
    detector: FailureDetector
    validation: Validation
    env: CoordinatorEnv
    callback: Callback
    epoch: int = 0
    end: int = field(init=False)
    """Number of iterations, counted from the very first, after which the run ends."""
    current: Iteration = field(init=False)
    pause_reason: str = field(init=False, default="")
    """Why there was no plan for the nodes that were there, when training was paused last."""
    _loss_reported: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.end = self.settings.iterations

    @property
    def nodes(self) -> list[int]:
        """Nodes of the plan that average and step."""
        return [node for node in self.membership.stepping if node in self.replanner.plan.stage_of]

    @property
    def lacking(self) -> str:
        """Why training is paused, and cannot go on."""
        if self.recovery.backup.is_lost:
            return LOST
        if lost := self.membership.lost_stages(len(self.replanner.plan.stages)):
            return f"no node holds stage {', '.join(map(str, lost))}"
        return f"no plan is possible with those that are there ({self.pause_reason})"

    def open(self, number: int) -> None:
        """Start the books of an iteration."""
        plan, nodes = self.replanner.plan, set(self.nodes)
        self.current = Iteration(number, plan, self.epoch, nodes, self._broadcast, self.context.evict)
        self.recovery.backup.completed = number

    def on_message(self, node: int, control: MicrobatchDone | DrainAck | Averaged) -> None:
        self.detector.progress()
        if self.current.on_message(node, control):
            self._commit()

    # Lost nodes, lost links, and nodes that join

    def reroute(self, node: int) -> None:
        """Within the iteration, send the microbatches of a lost node another way."""
        self.detector.progress()
        self.replanner.changed = True
        change = self.current.reroute(node, self.membership.active)
        if change is None:
            self.restart(f"there is no way around '{self.membership.name(node)}'")
            return
        lanes, skipped = change
        left_out = f", {skipped} times a stage is left out" if skipped else ""
        text = f"{lanes} lanes go on another way{left_out}" if lanes else "no microbatch needs it any more"
        self.context.log_event("rerouted", text, node)
        self.recovery.replace_lost_sources()

    def on_devices(self, node: int, control: Devices) -> None:
        """A node with fewer devices is a slower one. What a device has lost within the iteration is done again."""
        self.replanner.estimator.devices[node] = control.working
        self.replanner.changed |= self.settings.recovery.fault_tolerant
        if not control.lost:
            return
        why, name = f"a device has failed, {control.working} are left: {control.lost}", self.membership.name(node)
        training = self.context.state is CoordinatorState.TRAINING and node in self.current.nodes
        if training and control.epoch is not None and control.epoch >= self.current.first_epoch:
            if not self.settings.recovery.fault_tolerant:
                self.context.fail(f"node '{name}': {why}")
                return
            self.context.log_event("slow", why, node)
            self.restart(f"what a device of '{name}' has computed is lost")
        else:
            self.context.log_event("slow", why, node)

    def link_down(self, node: int, report: LinkDown) -> None:
        """A node cannot reach a peer. One that has not seen the last change reports it again if it still holds."""
        current = node not in self.current.nodes or report.epoch >= self.current.epoch
        needed = MemberState.SPARE not in (self.membership[node].state, self.membership[report.peer].state)
        if needed and (current or self.context.state is CoordinatorState.PAUSED):
            self._exclude_link(node, report.peer)

    def _exclude_link(self, node: int, peer: int) -> None:
        """Two nodes cannot reach each other, though both are alive: whatever needs the link goes on without it.

        If work is lost by that, it counts against the node that reported it (see `LinkReports`)."""
        now_ns, estimator, membership = self.env.now_ns(), self.replanner.estimator, self.membership
        reports, paused = estimator.link_reports, self.context.state is CoordinatorState.PAUSED
        used = not paused and self.current.uses(node, peer)
        same_stage = membership[node].stage == membership[peer].stage
        if estimator.is_down(node, peer, now_ns) and not used:
            return
        pair, relayed = frozenset({node, peer}), estimator.relayed_pairs()
        if pair in relayed and membership.relays and now_ns < membership.relay_since_ns + RELAY_GRACE_NS:
            return  # they have lost each other with a relay that is back, or with another: they meet again
        reports.add(node, peer, now_ns)
        cut_off = [receiver for receiver in (node, peer) if {node, peer} & set(membership[receiver].sources)]
        is_costly = bool(cut_off) or (not paused and (used or same_stage))
        # no fault of the reporter
        known = pair in relayed and (not membership.relays or pair in membership.relay_only_pairs)
        if pair in estimator.unreachable_pairs() and membership.lacks_relay:  # it was there before: nobody is at fault
            self.replanner.changed = True
            if not paused and (used or same_stage):
                self.context.log_event("link-down", f"cannot reach '{membership.name(peer)}' without a relay", node)
                self.restart("no relay is there")
            return
        costly = reports.add_costly(node, peer, now_ns) if is_costly and not known else []
        if len(costly) > MAX_COSTLY_REPORTS:
            self._evict_reporter(node, costly, now_ns)
            return
        self.context.log_event("link-down", f"cannot reach '{membership.name(peer)}'", node)
        estimator.exclude(node, peer, now_ns)
        self.replanner.changed = True
        for receiver in cut_off:
            membership[receiver].sources = ()
        if not paused and same_stage:  # they cannot average
            newcomer = peer not in membership.active and len(costly) <= 1  # a node that reports again is doubted more
            doubtful = reports.is_corroborated(node, peer, now_ns) or newcomer
            evicted = peer if doubtful and node in membership.active else node
            self.context.evict(evicted, "it cannot average with the others of its stage")
        elif used:
            self.restart(f"'{membership.name(node)}' cannot reach '{membership.name(peer)}'")
        else:
            self.recovery.replace_lost_sources()

    def _evict_reporter(self, node: int, peers: list[int], now_ns: int) -> None:
        """The reports of a node have cost the others too much work: it is evicted, and they go on."""
        names = ", ".join(f"'{self.membership.name(each)}'" for each in peers)
        ban_s = self.replanner.estimator.link_reports.ban(node, now_ns) / 1e9
        reason = f"it says that it cannot reach {len(peers)} nodes of which no other node complains ({names})"
        self.context.evict(node, f"{reason}; it may take part again after {ban_s:g} s")

    def restart(self, why: str) -> None:
        """Begin the iteration, or start it over, with a plan for the nodes that are there; or pause for others."""
        self.epoch = max(self.epoch, self.current.epoch) + 1
        if why and not self.replanner.renew(self.current.number):
            self.pause(why)
            return
        if why:
            self.context.log_event("restarted", why)
        self.context.enter(CoordinatorState.TRAINING)
        self.open(self.current.number)
        for node in self.nodes:
            if why:
                self.env.send_plan(node, self.replanner.plan)
            self._begin(node)
        self._admit_ready()

    def pause(self, why: str) -> None:
        self.pause_reason = why
        reported, self._loss_reported = self._loss_reported, self.recovery.backup.is_lost
        if self._loss_reported and not reported:
            self.context.log_event("paused", f"{LOST}; training does not go on with new ones: {WAYS_ON}")
            self.context.enter(CoordinatorState.PAUSED)
        elif self.context.state is not CoordinatorState.PAUSED:
            coming = self.membership.in_state(MemberState.BUILDING, MemberState.READY, MemberState.RECOVERING)
            names = ", ".join(f"'{self.membership.name(node)}'" for node in coming)
            what = f"{names} will take the place" if coming else "no node can take the place; waiting for nodes to join"
            self.context.log_event("paused", f"{why}, and {what}")
            self.context.enter(CoordinatorState.PAUSED)
        self._recover_ready()

    def _begin(self, node: int) -> None:
        number = self.current.number
        self.env.send(node, Begin(number, self.epoch, number in self.settings.recorded))

    def _admit_ready(self) -> None:
        """Nodes that have built their stage average and step from now on, and fetch their state."""
        self._recover_ready()
        self.current.nodes = set(self.nodes)

    def _recover_ready(self) -> None:
        for node in self.membership.in_state(MemberState.READY):
            if self.context.state is CoordinatorState.TRAINING and node in self.replanner.plan.stage_of:
                self.env.send_plan(node, self.replanner.plan)
                self._begin(node)
            elif self.context.state is not CoordinatorState.PAUSED:
                continue
            if self.recovery.is_initial:
                self.membership[node].state = MemberState.ACTIVE
                self.replanner.changed = True
                self.context.log_event("recovered", "nothing is trained yet: its stage is as the seed has it", node)
                continue
            if not self.recovery.start(node):
                stage = self.membership[node].stage
                self.context.fail(f"no node is left to fetch stage {stage} from, and there is no checkpoint")
                return
        self.recovery.replace_lost_sources()

    def _broadcast(self, control: ControlMessage) -> None:
        for node in self.nodes:
            self.env.send(node, control)

    # Held-out samples

    def validate(self, iteration: int) -> None:
        """All nodes take the step of this iteration and wait: they evaluate held-out samples meanwhile."""
        self.context.enter(CoordinatorState.VALIDATING)
        if not self.validation.begin(iteration, self.epoch, self.replanner.plan, self.membership.active):
            self.give_up_validation("no path leads through every stage")

    def on_validated(self, node: int, control: Validated) -> None:
        self.detector.progress()
        if not self.validation.on_message(node, control):
            return
        report = self.validation.finish()
        done = report.iteration + 1
        self.gather.validated = done, report.loss
        self.callback.validated(report)
        if self.validation.is_hopeless and done < self.end:
            self.end = done
            patience = self.settings.validation.patience
            self.context.log_event("ending", f"the held-out loss has not become lower in {patience} evaluations")
        self._end_validation(done, report.is_best)

    def give_up_validation(self, why: str, *, lost: bool = False) -> None:
        """Training goes on without: with a new plan, if a node was lost."""
        iteration = self.validation.give_up()
        self.context.log_event("validation", f"given up: {why}")
        self._end_validation(iteration + 1, False, why if lost else "")

    def _end_validation(self, done: int, is_best: bool, lost: str = "") -> None:
        """A checkpoint of weights that are the best so far is made now: after the next step they are gone."""
        self.detector.committed()  # the next iteration begins now
        if done >= self.end:
            self.context.gather_weights()
            return
        best = is_best and self.gather.lacks(done) and not self.gather.busy
        holders = self.membership.holders(self.replanner.plan) if best or self.gather.is_due(done) else {}
        if holders:
            self.gather.snapshot_and_gather(done, self.replanner.progress.steps, holders)
            self.callback.measured(self.replanner.estimator.measured_cluster())
        self.restart(lost)

    # Commit

    def _commit(self) -> None:
        """All nodes have the mean gradient. The decision is logged before any node is told."""
        current, progress = self.current, self.replanner.progress
        stage_microbatches, norms = current.stage_microbatches, current.norms
        if current.not_finite:
            bad = ", ".join(map(str, current.not_finite))
            self.context.log_event("not-finite", f"the gradient of stage {bad}; the node that made it has left it out")
        norm, scale = self.settings.optim.clipping(norms)
        if math.isfinite(norm):
            progress.stepped(stage_microbatches, norms)
        else:
            scale = 0.0
            self.context.log_event("not-finite", "the gradient is still not finite: no step is taken")
        rate = self.settings.optim.rate_at(current.number)
        report = current.report(rate, norm, self.detector.iteration_s)
        self.callback.iteration_done(report)  # before it is logged: rather twice than never
        self.env.append_wal(commit_record(current.number, rate, scale, report.loss, stage_microbatches, progress))
        self.epoch, self.recovery.backup.completed = current.epoch, current.number + 1
        self.detector.committed()
        self.replanner.estimator.update(current.reports)
        self._proceed(rate, scale, last=current.number + 1 == self.end)

    def _proceed(self, rate: float, scale: float, *, last: bool) -> None:
        replanner, done, before = self.replanner, self.current.number + 1, set(self.nodes)
        outdated = not last and replanner.is_outdated(done)
        possible = not outdated or replanner.renew(done)
        new_plan = outdated or (not last and replanner.switch_length(done))
        validates = possible and not last and self.validation.is_due(done, last=False)
        due = not last and not validates and self.gather.is_due(done)  # the last one is made when all have stepped
        holders = self.membership.holders(replanner.plan) if due else {}
        for node in sorted(before & set(self.membership.stepping)):
            if new_plan and possible:
                self.env.send_plan(node, replanner.plan)
            waits = last or validates or not possible or node not in replanner.plan.stage_of
            snapshot = node in holders.values()
            recorded = done in self.settings.recorded
            self.env.send(
                node, Commit(self.current.number, rate, scale, wait=waits, snapshot=snapshot, recorded=recorded)
            )
        if last:
            self.context.enter(CoordinatorState.STEPPING)
        else:
            self.open(done)
            if validates:
                self.validate(done - 1)
            elif possible:
                self.context.enter(CoordinatorState.TRAINING)
                self._admit_ready()
            else:
                self.pause("nodes are gone")
        if possible and not last:
            self.recovery.backup.committed(replanner.plan)
        if holders or last:
            self.callback.measured(replanner.estimator.measured_cluster())
        if holders:
            self.gather.checkpoint(done, replanner.progress.steps, holders)
