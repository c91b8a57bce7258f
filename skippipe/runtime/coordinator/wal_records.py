"""The coordinator's records in the write-ahead log, and what a restarted coordinator reads from them.

Two kinds of record: a plan, with the nodes that still fetch their state under it; and a commit, of an iteration that
all nodes have averaged and may step. Both are durable before any node is told. A plan that is used again is named by
the length of its paths, or by the list of their lengths. A coordinator that takes over logs its term first. One that
ends in order logs that last: the run is done, or it was stopped and its nodes wait for another coordinator.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skippipe.plan import Plan
from skippipe.runtime.coordinator.recovery import StageProgress
from skippipe.runtime.messages import Commit
from skippipe.skip_schedule import PathLength

WalRecord = Mapping[str, Any]


@dataclass(frozen=True)
class RecoveredLog:
    """Where the run is by the write-ahead log."""

    plan: Plan
    recovering: frozenset[int]
    """Nodes of the plan that did not have the state of their stage."""
    commit: WalRecord | None
    """The last commit."""
    progress: StageProgress
    visited: PathLength
    """Stages on a path of the plan, when no stage is missing."""
    term: int = 0
    """Coordinators that this run had before; each logs its term before it sends anything."""

    @property
    def iteration(self) -> int | None:
        """The last iteration that was committed."""
        return self.commit["commit"] if self.commit else None

    @property
    def last_commit(self) -> Commit:
        """The last commit, for nodes that have not received it; they wait afterwards."""
        assert self.commit is not None
        return Commit(self.commit["commit"], self.commit["rate"], self.commit["scale"], wait=True)

    @classmethod
    def read(cls, wal: Sequence[WalRecord], plan: Plan, plans: Mapping[PathLength, Plan]) -> RecoveredLog:
        """`plan`: the plan to start with if the log is empty; `plans` has it too, if its paths differ in length."""
        if not wal:
            visited = next((length for length, each in plans.items() if each == plan), plan.visited)
            return cls(plan, frozenset(), None, StageProgress.nothing(len(plan.stages)), visited)
        commits = [record for record in wal if "commit" in record]
        last = plan_records(wal)[-1]
        newest = [record for record in wal if "steps" in record][-1]
        return cls(
            plan=Plan.from_json(last["plan"]),
            recovering=frozenset(last["recovering"]),
            commit=commits[-1] if commits else None,
            progress=StageProgress(list(newest["steps"]), list(newest["norms"])),
            visited=_path_length(last["visited"]),
            term=max((record["term"] for record in wal if "term" in record), default=0) + 1,
        )


def plan_records(wal: Iterable[WalRecord]) -> list[WalRecord]:
    """The plans that were in use one after another, also those that were used again."""
    found: list[WalRecord] = []
    newest: dict[PathLength, WalRecord] = {}
    for record in wal:
        if "plan" in record:
            newest[_path_length(record["visited"])] = record
            found.append(record)
        elif "turn" in record:
            found.append(newest[_path_length(record["turn"])])
    return found


def _path_length(value: Any) -> PathLength:
    return tuple(value) if isinstance(value, Sequence) else int(value)


def plan_record(plan: Plan, recovering: Iterable[int], progress: StageProgress, visited: PathLength) -> dict[str, Any]:
    return {"plan": plan.to_json(), "recovering": sorted(recovering), **vars(progress), "visited": visited}


def commit_record(
    iteration: int, rate: float, scale: float, loss: float, stage_microbatches: Sequence[int], progress: StageProgress
) -> dict[str, Any]:
    return {
        "commit": iteration,
        "rate": rate,
        "scale": scale,
        "loss": loss if math.isfinite(loss) else str(loss),
        "visits": list(stage_microbatches),
        **vars(progress),
    }
