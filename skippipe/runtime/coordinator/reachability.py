"""Who can reach whom, at any time of a run: nodes that only call out, pairs that need a relay, relays that come and go.

Two nodes that cannot call each other meet at a relay. While there is none, the link between them is down, and the plan
has to do without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Protocol

from skippipe.runtime.coordinator.interfaces import CoordinatorEnv, CoordinatorState, EventKind
from skippipe.runtime.coordinator.membership import Membership
from skippipe.runtime.coordinator.replanner import Replanner
from skippipe.runtime.relay_pool import RelayInfo


class ReachabilityContext(Protocol):
    """What this part sees of the coordinator."""

    @property
    def state(self) -> CoordinatorState: ...

    def log_event(self, kind: EventKind, text: str, node: int | None = None) -> None: ...


@dataclass
class Reachability:
    context: ReachabilityContext
    membership: Membership
    env: CoordinatorEnv
    replanner: Replanner
    go_on_if_complete: Callable[[], None]
    """Goes on with the startup if this was all that it waited for."""

    def reach_known(self, node: int, unanswered: str | None, site: str) -> None:
        """A node can be called (None), or it cannot: at the address that it announces nobody answers, or it has said so
        itself (empty). Others of its site may still reach it there."""
        joining = self.context.state is CoordinatorState.JOINING
        if unanswered is None:
            self.membership.out_only.pop(node, None)
        else:
            self.membership.out_only[node] = site
            self.replanner.changed |= not joining
            where = f" at {unanswered}" if unanswered else ""
            self.context.log_event("joined", f"cannot be called{where}: it calls the others", node)
        if unanswered != "" and node in self.membership:  # one that says so itself is just joining
            self.go_on_if_complete()

    def relay_known(self, name: str, info: RelayInfo | None) -> None:
        """A relay has come, or is gone (None)."""
        relays, joining = self.membership.relays, self.context.state is CoordinatorState.JOINING
        if info is None:
            relays.pop(name, None)
            self.context.log_event("lost", f"relay '{name}'")
        else:
            relays[name], self.membership.relay_since_ns = info, self.env.now_ns()
            self.replanner.changed |= self.replanner.estimator.relay_came() and not joining
            rate = f", at most {info.bytes_per_s / 1e6:g} MB/s" if isfinite(info.bytes_per_s) else ""
            self.context.log_event(
                "joined", f"relay '{name}' at {info.address}{rate}: nodes that only call out meet there"
            )
        if joining:
            self.go_on_if_complete()

    def relay_only_known(self, a: int, b: int, relay_only: bool) -> None:
        """Neither of two nodes can call the other: they meet at a relay. If there is none, the link is one that is
        down, for which neither is to blame. Later they try again."""
        membership, estimator = self.membership, self.replanner.estimator
        if not relay_only:
            membership.relay_only_pairs.discard(frozenset({a, b}))
            return
        membership.relay_only_pairs.add(frozenset({a, b}))
        where = "they meet at a relay" if membership.relays else "a relay would help ('skippipe relay')"
        self.context.log_event("link-down", f"can neither call '{membership.name(b)}' nor be called by it: {where}", a)
        if membership.relays:
            self.replanner.changed |= estimator.relay_came()
