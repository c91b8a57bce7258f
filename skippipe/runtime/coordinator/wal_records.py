"""The coordinator's records in the write-ahead log, and what a restarted coordinator reads from them.

Two kinds of record: a plan, with the nodes that still fetch their state under it; and a commit, of an iteration that
all nodes have averaged and may step. Both are durable before any node is told. A plan that is used again is named by
the length of its paths. A coordinator that takes over logs its term first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skippipe.plan import Plan
from skippipe.runtime.coordinator.recovery import StageProgress
from skippipe.runtime.messages import Commit

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
    visited: int
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
        return Commit(self.commit["commit"], self.commit["rate"], self.commit["scale"], True, False, False)

    @classmethod
    def read(cls, wal: Sequence[WalRecord], plan: Plan) -> RecoveredLog:
        """`plan`: the plan to start with if the log is empty."""
        if not wal:
            return cls(plan, frozenset(), None, StageProgress.nothing(len(plan.stages)), plan.visited)
        commits = [record for record in wal if "commit" in record]
        last = plan_records(wal)[-1]
        newest = [record for record in wal if "steps" in record][-1]
        return cls(
            plan=Plan.from_json(last["plan"]),
            recovering=frozenset(last["learning"]),
            commit=commits[-1] if commits else None,
            progress=StageProgress(list(newest["steps"]), list(newest["norms"])),
            visited=last["visited"],
            term=max((record["term"] for record in wal if "term" in record), default=0) + 1,
        )


def plan_records(wal: Iterable[WalRecord]) -> list[WalRecord]:
    """The plans that were in use one after another, also those that were used again."""
    found: list[WalRecord] = []
    newest: dict[int, WalRecord] = {}
    for record in wal:
        if "plan" in record:
            newest[record["visited"]] = record
            found.append(record)
        elif "turn" in record:
            found.append(newest[record["turn"]])
    return found


def plan_record(plan: Plan, recovering: Iterable[int], progress: StageProgress, visited: int) -> dict[str, Any]:
    return {"plan": plan.to_json(), "learning": sorted(recovering), **vars(progress), "visited": visited}


def commit_record(
    iteration: int, rate: float, scale: float, loss: float, visits: Sequence[int], progress: StageProgress
) -> dict[str, Any]:
    return {
        "commit": iteration,
        "rate": rate,
        "scale": scale,
        "loss": loss if math.isfinite(loss) else str(loss),
        "visits": list(visits),
        **vars(progress),
    }
