"""An exercise: a node's process is killed in the middle of training, to see what becomes of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection

from skippipe.plan import Plan
from skippipe.rules import lanes_through
from skippipe.runtime.surroundings import Event, IterationReport, Watcher
from skippipe.training.nursery import Nursery


class Drill(Watcher):
    """Strikes when so many iterations are done; each time another node, those with the most lanes first."""

    def __init__(self, plan: Plan, done: Collection[int], nursery: Nursery, told: Watcher) -> None:
        self._done = set(done)
        self._nursery = nursery
        self._told = told
        lanes = lanes_through([lane.path for lane in plan.lanes])
        inner = [node for node, stage in plan.stage_of.items() if stage > 0]
        ranked = sorted(inner, key=lambda node: (-len(lanes.get(node, ())), node))
        self._names = [plan.cluster.nodes[node].name for node in ranked]

    def iteration_done(self, report: IterationReport) -> None:
        if report.iteration + 1 not in self._done:
            return
        self._nursery.look()
        name = self._names.pop(0)
        self._names.append(name)
        self._told.happened(Event("drill", report.iteration + 1, "is killed, for exercise", name))
        os.kill(self._nursery.pids[name], signal.SIGKILL)
