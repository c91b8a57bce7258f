"""What a coordinator notes of its decisions, and what one that is started again makes of the notes.

Two kinds of record: a plan, with those who still learn under it; and the end of an iteration, which all nodes have
averaged and which may be stepped. Both are written before anybody is told. A plan whose turn comes again is named by
the length of its paths. A coordinator that takes over notes its term first.
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
    plan: Plan
    learning: frozenset[int]
    """Nodes of the plan that did not have the state of their stage."""
    commit: WalRecord | None
    """The last."""
    trained: StageProgress
    visited: int
    """Stages on a path, when none is missing."""
    term: int = 0
    """How many coordinators this run had before; each is noted before it says anything."""

    @property
    def iteration(self) -> int | None:
        """The last that was done."""
        return self.commit["commit"] if self.commit else None

    @property
    def proceed(self) -> Commit:
        """For those who have not heard of it; then they wait."""
        assert self.commit is not None
        return Commit(self.commit["commit"], self.commit["rate"], self.commit["scale"], True, False, False)

    @classmethod
    def nothing(cls, plan: Plan) -> RecoveredLog:
        """At the beginning of a run."""
        return cls(plan, frozenset(), None, StageProgress.nothing(len(plan.stages)), plan.visited)

    @classmethod
    def of(cls, wal: Sequence[WalRecord]) -> RecoveredLog:
        commits = [record for record in wal if "commit" in record]
        last = plan_records(wal)[-1]
        newest = [record for record in wal if "steps" in record][-1]
        return cls(
            plan=Plan.from_json(last["plan"]),
            learning=frozenset(last["learning"]),
            commit=commits[-1] if commits else None,
            trained=StageProgress(list(newest["steps"]), list(newest["norms"])),
            visited=last["visited"],
            term=max((record["term"] for record in wal if "term" in record), default=0) + 1,
        )


def plan_records(wal: Iterable[WalRecord]) -> list[WalRecord]:
    """That hold one after another, also those whose turn has come again."""
    found: list[WalRecord] = []
    newest: dict[int, WalRecord] = {}
    for record in wal:
        if "plan" in record:
            newest[record["visited"]] = record
            found.append(record)
        elif "turn" in record:
            found.append(newest[record["turn"]])
    return found


def plan_record(plan: Plan, learning: Iterable[int], trained: StageProgress, visited: int) -> dict[str, Any]:
    return {
        "plan": plan.to_json(),
        "learning": sorted(learning),
        "steps": trained.steps,
        "norms": trained.norms,
        "visited": visited,
    }


def commit_record(
    iteration: int, rate: float, scale: float, loss: float, visits: Sequence[int], trained: StageProgress
) -> dict[str, Any]:
    return {
        "commit": iteration,
        "rate": rate,
        "scale": scale,
        "loss": loss if math.isfinite(loss) else str(loss),
        "visits": list(visits),
        "steps": trained.steps,
        "norms": trained.norms,
    }
