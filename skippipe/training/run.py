"""A run on this machine: start every node, coordinate, collect the model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skippipe.errors import UserError
from skippipe.model.blueprint import Blueprint
from skippipe.runtime.coordinator import Deadlines, Watcher
from skippipe.runtime.desk import Desk
from skippipe.runtime.member import Invitation, Member
from skippipe.training.brief import Brief
from skippipe.training.export import ModelFolder
from skippipe.training.nursery import Nursery, log_file
from skippipe.transport.keys import KeyFile, KeyPair, PeerList
from skippipe.transport.mailbox import Security


@dataclass(frozen=True)
class Run:
    """What it takes, beside the brief that nodes get."""

    brief: Brief
    blueprint: Blueprint
    tokenizer: Any
    output: Path
    iterations: int
    recorded: frozenset[int] = frozenset()
    security: Security = "curve"
    listen: str = "127.0.0.1:0"
    peers: Path | None = None
    """Who may join, and …"""
    key: Path | None = None
    """… the coordinator's own key, if nodes join by themselves."""
    deadlines: Deadlines = field(default_factory=Deadlines)

    def here(
        self,
        watcher: Watcher,
        started: Callable[[Nursery], None] = lambda nursery: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Every node as a process of this machine. Forks first, so call it before threads are started."""
        nursery = Nursery(birth, self.output / "logs")
        desk = None
        try:
            names = [node.name for node in self.brief.plan.cluster.nodes]
            mine = [names[number] for number in sorted(self.brief.plan.stage_of)]
            curve = self.security == "curve"
            pairs = {name: KeyPair.new() if curve else None for name in mine}
            own = KeyPair.new() if curve else None
            publics = {name: pair.public if pair else None for name, pair in pairs.items()}
            desk = self._desk(own, publics)
            for name, pair in pairs.items():
                nursery.start(
                    name,
                    {
                        "name": name,
                        "coordinator": desk.address,
                        "keys": [pair.public, pair.secret] if pair else None,
                        "coordinator_public": own.public if own else None,
                        "security": self.security,
                    },
                )
            started(nursery)
            self._coordinate(desk, watcher, stopped, lambda: self._gone(nursery))
        finally:
            nursery.close()
            if desk is not None:
                desk.close()

    def joined(self, watcher: Watcher, stopped: Callable[[], bool] = lambda: False) -> None:
        """Nodes come from wherever they are, if their keys are on the list."""
        assert self.peers is not None
        assert self.key is not None
        publics = PeerList.load(self.peers).peers
        names = [self.brief.plan.cluster.nodes[number].name for number in sorted(self.brief.plan.stage_of)]
        unknown = [name for name in names if name not in publics]
        if unknown:
            raise UserError(f"{self.peers}: has no key of {', '.join(unknown)}, which the plan uses")
        desk = self._desk(KeyFile.load(self.key).keys, publics)
        print(f"waiting for {len(names)} nodes to join {desk.address}: {', '.join(names)}", file=sys.stderr)
        self._coordinate(desk, watcher, stopped)

    def _desk(self, own: KeyPair | None, publics: Mapping[str, str | None]) -> Desk:
        return Desk(self.brief, own, publics, listen=self.listen, security=self.security, store=self.folder().store)

    def _coordinate(
        self, desk: Desk, watcher: Watcher, stopped: Callable[[], bool], gone: Callable[[], str] = lambda: ""
    ) -> None:
        desk.run(
            self.brief.learning,
            self.iterations,
            watcher,
            recorded=self.recorded,
            deadlines=self.deadlines,
            gone=gone,
            stopped=stopped,
        )

    def folder(self) -> ModelFolder:
        return ModelFolder(self.output / "model", self.brief.plan, self.blueprint, self.tokenizer)

    def _gone(self, nursery: Nursery) -> str:
        nursery.look()
        for name, status in nursery.ended.items():
            how = f"exit status {status}" if status >= 0 else f"signal {-status}"
            return f"node '{name}' ended ({how}); its last words are in {log_file(self.output / 'logs', name)}"
        return ""


def birth(told: dict[str, Any]) -> int:
    """A node's life in its own process."""
    keys = told.pop("keys")
    reason = Member(Invitation(**told, keys=KeyPair(*keys) if keys else None)).run()
    if reason:
        print(reason)
    return 1 if reason else 0
