"""A run on this machine: start every node, coordinate, collect the model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from skippipe.errors import UserError
from skippipe.model.blueprint import Blueprint
from skippipe.runtime.coordinator import Deadlines, Watcher
from skippipe.runtime.desk import Desk
from skippipe.runtime.member import Invitation, Member
from skippipe.text.tokenizer import TextTokenizer
from skippipe.training.brief import Brief
from skippipe.training.checkpoint import Checkpoints
from skippipe.training.export import ModelFolder
from skippipe.training.keeping import CheckpointKeeper, Origin, origin_of
from skippipe.training.nursery import Nursery, log_file
from skippipe.transport.keys import KeyFile, KeyPair, PeerList
from skippipe.transport.mailbox import Security


@dataclass(frozen=True)
class Run:
    """What it takes, beside the brief that nodes get."""

    brief: Brief
    blueprint: Blueprint
    tokenizer: TextTokenizer
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
    kept_every: int = 0
    """Iterations from one checkpoint to the next; 0: none are made."""
    kept: int = 2
    """How many checkpoints stay."""
    resumed: bool = False
    """Go on from the newest checkpoint in the output folder."""

    @cached_property
    def origin(self) -> Origin | None:
        """Where to go on from; found, and checked, when it is first asked for."""
        if not self.resumed:
            return None
        origin = origin_of(self.checkpoints, self.brief)
        if origin.manifest.iterations >= self.iterations:
            raise UserError(
                f"{origin.place}: is {origin.manifest.iterations} iterations on already; "
                f"{self.iterations} are asked for: ask for more"
            )
        return origin

    @property
    def first(self) -> int:
        """The iteration to begin with."""
        return self.origin.manifest.iterations if self.origin else 0

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.output / "checkpoints", self.kept)

    @property
    def names(self) -> list[str]:
        """Of the nodes that the plan uses, in its order."""
        return [self.brief.plan.cluster.nodes[number].name for number in sorted(self.brief.plan.stage_of)]

    def new_keys(self) -> KeyPair | None:
        return KeyPair.new() if self.security == "curve" else None

    def told(self, name: str, desk: Desk, own: KeyPair | None, pair: KeyPair | None = None) -> dict[str, Any]:
        """A node's invitation as JSON, for `birth`; without `pair` it has keys of its own."""
        return {
            "name": name,
            "coordinator": desk.address,
            "keys": [pair.public, pair.secret] if pair else None,
            "coordinator_public": own.public if own else None,
            "security": self.security,
        }

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
            pairs = {name: self.new_keys() for name in self.names}
            own = self.new_keys()
            publics = {name: pair.public if pair else None for name, pair in pairs.items()}
            desk = self.desk(own, publics)
            for name, pair in pairs.items():
                nursery.start(name, self.told(name, desk, own, pair))
            started(nursery)
            self.coordinate(desk, watcher, stopped, lambda: self.ended(nursery))
        finally:
            nursery.close()
            if desk is not None:
                desk.close()

    def joined(self, watcher: Watcher, stopped: Callable[[], bool] = lambda: False) -> None:
        """Nodes come from wherever they are, if their keys are on the list."""
        assert self.peers is not None
        assert self.key is not None
        publics = PeerList.load(self.peers).peers
        unknown = [name for name in self.names if name not in publics]
        if unknown:
            raise UserError(f"{self.peers}: has no key of {', '.join(unknown)}, which the plan uses")
        desk = self.desk(KeyFile.load(self.key).keys, publics)
        print(f"waiting for {len(self.names)} nodes to join {desk.address}: {', '.join(self.names)}", file=sys.stderr)
        self.coordinate(desk, watcher, stopped)

    def desk(self, own: KeyPair | None, publics: Mapping[str, str | None]) -> Desk:
        return Desk(
            self.brief,
            own,
            publics,
            listen=self.listen,
            security=self.security,
            store=self.folder().store,
            keeper=self.keeper,
        )

    @cached_property
    def keeper(self) -> CheckpointKeeper:
        return CheckpointKeeper(self.checkpoints, self.brief, self.blueprint, self.tokenizer, self.origin)

    def coordinate(
        self, desk: Desk, watcher: Watcher, stopped: Callable[[], bool], gone: Callable[[], str] = lambda: ""
    ) -> None:
        desk.run(
            self.brief.learning,
            self.iterations - self.first,
            watcher,
            first=self.first,
            recorded=self.recorded,
            kept_every=self.kept_every,
            deadlines=self.deadlines,
            gone=gone,
            stopped=stopped,
        )
        self.keeper.close()

    def folder(self) -> ModelFolder:
        return ModelFolder(self.output / "model", self.brief.plan.layers, self.blueprint, self.tokenizer)

    def ended(self, nursery: Nursery) -> str:
        """What is known of the first node that is no more; empty if all live."""
        nursery.look()
        for name, status in nursery.ended.items():
            how = f"exit status {status}" if status >= 0 else f"signal {-status}"
            return f"node '{name}' ended ({how}); its last words are in {log_file(self.output / 'logs', name)}"
        return ""


def birth(told: dict[str, Any]) -> int:
    """A node's life in its own process."""
    reason = life(told)
    if reason:
        print(reason)
    return 1 if reason else 0


def life(told: dict[str, Any]) -> str:
    """A node from its invitation to its end; why it ended, empty if all is well."""
    keys, folder = told["keys"], told.get("data_folder")
    known = {"keys": KeyPair(*keys) if keys else None, "data_folder": Path(folder) if folder else None}
    return Member(Invitation(**{**told, **known})).run()
