"""How a run ends: when its last iteration is done, on request, or because its model grows.

First the last checkpoint is gathered, and then the weights. A model that grows needs no more than the checkpoint: when
that is on disk, nodes are told to begin anew, and another coordinator goes on from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from skippipe.runtime.coordinator.commit_loop import CommitLoop
from skippipe.runtime.coordinator.failure_detector import FailureDetector
from skippipe.runtime.coordinator.interfaces import Callback, CoordinatorEnv, CoordinatorState, EventKind
from skippipe.runtime.coordinator.membership import Membership
from skippipe.runtime.coordinator.replanner import Replanner
from skippipe.runtime.coordinator.settings import CoordinatorSettings
from skippipe.runtime.coordinator.state_gather import CheckpointGather
from skippipe.runtime.coordinator.validation import Validation
from skippipe.runtime.messages import Stop


class RunEndContext(Protocol):
    """What the end of a run sees of the coordinator."""

    leaves_nodes: bool

    @property
    def state(self) -> CoordinatorState: ...

    @property
    def over(self) -> bool: ...

    @property
    def iteration(self) -> int: ...

    def enter(self, state: CoordinatorState) -> None: ...

    def fail(self, reason: str) -> None: ...

    def finish(self, stop: Stop | None) -> None: ...

    def log_event(self, kind: EventKind, text: str, node: int | None = None) -> None: ...


@dataclass
class RunEnd:
    context: RunEndContext
    settings: CoordinatorSettings
    membership: Membership
    gather: CheckpointGather
    commits: CommitLoop
    validation: Validation
    replanner: Replanner
    detector: FailureDetector
    env: CoordinatorEnv
    callback: Callback
    is_disk_full: bool = field(init=False, default=False)
    """What has arrived cannot be written."""
    lacks_stage: bool = field(init=False, default=False)
    """All iterations are done, and a stage is missing for the final weights."""
    has_grown: bool = field(init=False, default=False)
    """The run has ended, and its model is to grow."""
    _stepped: set[int] = field(init=False, default_factory=set)
    """Nodes that have taken the last step."""
    _stops_after_iteration: bool = field(init=False, default=False)
    _aborts: bool = field(init=False, default=False)
    """The run is to stop at once."""

    @property
    def awaits_step(self) -> list[int]:
        """Nodes that have not taken the last step."""
        return sorted(set(self.commits.nodes) - self._stepped)

    @property
    def grows(self) -> bool:
        """Whether the model grows after the last iteration. One that is stopped does not."""
        at_its_end = self.commits.end == self.settings.iterations
        return self.settings.grows and at_its_end and not (self._aborts or self._stops_after_iteration)

    def on_stop_requests(self, requests: int) -> None:
        if requests > 1:
            self._stop_now()
        elif requests:
            self._stop_after_iteration()

    def _stop_after_iteration(self) -> None:
        """Make the current iteration the last, as if no more had been asked for. If none is under way, stop now."""
        if self._stops_after_iteration or self.context.over:
            return
        self._stops_after_iteration = True
        if self.context.state in (CoordinatorState.TRAINING, CoordinatorState.VALIDATING):
            order = self.validation.order  # after which its iteration is the last
            last = self.context.iteration if order is None else order.iteration
            self.commits.end = min(self.commits.end, last + 1)
            self.context.log_event("ending", "after this iteration, as was asked; Ctrl-C again ends it at once")
        elif not self._makes_last_checkpoint:
            self._stop_now()

    @property
    def _makes_last_checkpoint(self) -> bool:
        """Whether nodes take the last step, or the checkpoint is made from which the model would grow: that is
        completed if the run is to stop, and the weights follow it."""
        ending = self.context.state in (CoordinatorState.STEPPING, CoordinatorState.GATHERING)
        return self.settings.grows and ending and self.gather.weights is None and self.gather.unwritten is None

    def _stop_now(self) -> None:
        """Give up the current iteration, and gather the weights as they are; before training there are none."""
        if self._aborts or self.context.over:
            return
        self._aborts = True
        self.detector.hurry()
        state = self.context.state
        if state in (CoordinatorState.TRAINING, CoordinatorState.VALIDATING):
            self.validation.give_up()
            self.callback.measured(self.replanner.estimator.measured_cluster())
            self.gather_weights()
        elif state is CoordinatorState.GATHERING and self.gather.weights is None:
            self.gather.unwritten_checkpoint, self.is_disk_full = None, False
            self.detector.progress()
            self.gather_weights()
        elif state is CoordinatorState.PAUSED and self.membership.holders(self.replanner.plan):
            self.gather_weights()
        elif state not in (CoordinatorState.STEPPING, CoordinatorState.GATHERING):
            self._finish()

    def await_last_step(self, stepped: set[int]) -> None:
        """All iterations are committed: wait until all nodes have taken the last step; some have."""
        self._stepped = stepped
        self.context.enter(CoordinatorState.STEPPING)
        self._gather_if_stepped()

    def stepped(self, node: int) -> None:
        """A node has taken the last step."""
        self._stepped.add(node)
        self._gather_if_stepped()

    def node_lost(self) -> None:
        """A node is lost after the last iteration."""
        if self.context.state is CoordinatorState.STEPPING:
            self._gather_if_stepped()
        elif self.gather.is_fetched:
            self._continue()
        else:
            self.gather_weights()

    def on_piece(self, requested: bool) -> None:
        """A piece has arrived while all is gathered."""
        if requested and not self._aborts:
            self.detector.progress()
        self._continue()

    def _gather_if_stepped(self) -> None:
        if not self._stepped >= set(self.commits.nodes):
            return
        if self.validation.is_due(self.commits.end, last=not self.grows) and not self._aborts:
            self.commits.validate(self.commits.end - 1)
        else:
            self.gather_weights()

    def gather_weights(self) -> None:
        """Gather the last checkpoint and then the weights. In this order, because a stage that is lost with the last
        node that holds it comes from the newest checkpoint."""
        plan, gather, end = self.replanner.plan, self.gather, self.commits.end
        holders = self.membership.holders(plan)
        if not holders:
            lost = ", ".join(map(str, self.membership.lost_stages(len(plan.stages))))
            if self._aborts:
                self.context.fail(f"no node is left that has the weights of stage {lost}; resume from a checkpoint")
            else:
                self.lacks_stage = self.replanner.changed = True
                self.replanner.renew(self.context.iteration, finishing=True)
                self.commits.pause(f"no node is left that has the weights of stage {lost}")
            return
        if self.context.state is not CoordinatorState.GATHERING:
            self.context.enter(CoordinatorState.GATHERING)
        if not self._aborts and gather.lacks(end):
            if not gather.busy:
                gather.snapshot_and_gather(end, self.replanner.progress.steps, holders)
        elif not self.grows:
            gather.gather_weights(holders)
        elif gather.unwritten_checkpoint is None:
            self._finish()

    def _continue(self) -> None:
        gather, end, steps = self.gather, self.commits.end, self.replanner.progress.steps
        self._report_disk()
        if self.is_disk_full:
            return  # nodes keep their state meanwhile
        if gather.over and (self._aborts or not gather.busy):
            holders = {} if self._aborts else self.membership.holders(self.replanner.plan)
            if not gather.repeat_last(end, steps, holders):
                self._finish()
        elif gather.weights is None and not gather.busy:
            self.gather_weights()

    def retry_write(self) -> None:
        """The disk was full: try again."""
        gather, holders = self.gather, self.membership.holders(self.replanner.plan)
        gather.retry_write()
        if gather.unwritten_checkpoint is not None and not gather.busy and holders:
            gather.snapshot_and_gather(self.commits.end, self.replanner.progress.steps, holders)
        self._continue()

    def _report_disk(self) -> None:
        """Report it once when weights cannot be written, and once when they can be written again."""
        unwritten = self.gather.unwritten
        if self.is_disk_full == (unwritten is not None):
            return
        self.is_disk_full = unwritten is not None
        self.detector.progress()
        deadlines = self.settings.deadlines
        wait_s = (deadlines.abort if self._aborts else deadlines.disk_space).total_seconds()
        waits = f"{unwritten}; nodes keep their state, and disk space is waited for, {wait_s / 60:.0f} minutes at most"
        self.context.log_event("storage", waits if unwritten else "the model can be written again")

    def _finish(self) -> None:
        """All is on disk, or given up."""
        context, iteration = self.context, self.context.iteration
        if self.grows:
            self.has_grown = True
            self.env.append_wal({"grown": iteration})
            context.finish(Stop("the model grows", again=True))
            return
        if self._stepped and self.gather.lacks(self.commits.end):
            context.log_event("checkpoint", "none of the last iteration: the run was ended before it was made")
        self.env.append_wal({"stopped" if context.leaves_nodes else "done": iteration})
        context.finish(None if context.leaves_nodes else Stop(""))
