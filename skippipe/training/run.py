"""A run on this machine: start every node, coordinate, collect the model."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from skippipe.errors import UserError
from skippipe.model.blueprint import Blueprint
from skippipe.plan import Plan
from skippipe.runtime.coordinator import Deadlines, Event, Survival, Watcher
from skippipe.runtime.desk import Desk
from skippipe.runtime.member import Invitation, Member
from skippipe.runtime.reception import Gone
from skippipe.runtime.surroundings import Asked
from skippipe.text.tokenizer import TextTokenizer
from skippipe.training.brief import Brief
from skippipe.training.checkpoint import Checkpoints
from skippipe.training.drill import Drill
from skippipe.training.export import ModelFolder
from skippipe.training.journal import Journal
from skippipe.training.keeping import CheckpointKeeper, Origin, origin_of
from skippipe.training.nursery import Nursery, log_file
from skippipe.training.reports import Everybody
from skippipe.transport.keys import KeyFile, KeyPair, PeerList
from skippipe.transport.mailbox import Security

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """What it takes, beside the brief that nodes get."""

    brief: Brief
    blueprint: Blueprint
    tokenizer: TextTokenizer
    output: Path
    iterations: int
    recorded: Container[int] = frozenset()
    security: Security = "curve"
    listen: str = "127.0.0.1:0"
    peers: Path | None = None
    """Who may join, and …"""
    key: Path | None = None
    """… the coordinator's own key, if nodes join by themselves."""
    deadlines: Deadlines = field(default_factory=Deadlines)
    survival: Survival = field(default_factory=Survival)
    drills: frozenset[int] = frozenset()
    """After how many iterations a node is killed, for exercise."""
    restarts: int = 0
    """How often a node that was started here is started again."""
    kept_every: int = 0
    """Iterations from one checkpoint to the next; 0: none are made."""
    kept: int = 2
    """How many checkpoints stay."""
    resumed: bool = False
    """Go on from the newest checkpoint in the output folder."""
    plans: Mapping[int, Plan] = field(default_factory=dict)
    """For paths of the lengths that the recipe asks for."""

    @cached_property
    def origin(self) -> Origin | None:
        """Where to go on from; found, and checked, when it is first asked for."""
        if not self.resumed or (self.memories and not self.checkpoints.complete()):
            return None
        origin = origin_of(self.checkpoints, self.brief)
        if origin.manifest.iterations >= self.iterations and not self.memories:
            raise UserError(
                f"{origin.place}: is {origin.manifest.iterations} iterations on already; "
                f"{self.iterations} are asked for: ask for more"
            )
        return origin

    @property
    def first(self) -> int:
        """The iteration to begin with."""
        return self.origin.manifest.iterations if self.origin else 0

    @cached_property
    def journal(self) -> Journal:
        return Journal(self.output / "journal")

    @cached_property
    def memories(self) -> list[dict[str, Any]]:
        """What an earlier coordinator has noted, if its nodes may still be there: those that join by themselves."""
        found = self.journal.records
        if self.resumed and self.peers is not None and found and "done" not in found[-1]:
            noted = [
                node["name"] for record in found if "plan" in record for node in record["plan"]["cluster"]["nodes"]
            ]
            ours = [node.name for node in self.brief.plan.cluster.nodes]
            if noted[: len(ours)] != ours or len(noted) % len(ours):
                raise UserError(
                    f"{self.journal.path}: was written for another cluster; give the job that one, "
                    "or remove the file to go on from a checkpoint"
                )
            return list(found)
        self.journal.rewrite([])
        return []

    def note(self, record: dict[str, Any]) -> None:
        try:
            self.journal.write(record)
        except OSError as error:
            log.warning(
                "%s: %s; if the coordinator is killed now, it cannot go on where it was", self.journal.path, error
            )

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
        asked: Asked = lambda: 0,
    ) -> None:
        """Every node as a process of this machine. Forks first, so call it before threads are started."""
        nursery = Nursery(birth, self.output / "logs")
        desk = None
        try:
            pairs = {name: self.new_keys() for name in self.names}
            own = self.new_keys()
            publics = {name: pair.public if pair else None for name, pair in pairs.items()}
            desk = self.desk(own, publics)
            told = {name: self.told(name, desk, own, pair) for name, pair in pairs.items()}
            for name in told:
                nursery.start(name, told[name])
            started(nursery)
            if self.drills:
                watcher = Everybody([watcher, Drill(self.brief.plan, self.drills, nursery, watcher)])
            self.coordinate(desk, watcher, asked, lambda: self.ended(nursery, told))
        finally:
            nursery.close()
            if desk is not None:
                desk.close()

    def joined(self, watcher: Watcher, asked: Asked = lambda: 0) -> None:
        """Nodes come from wherever they are, if their keys are on the list."""
        assert self.peers is not None
        assert self.key is not None
        publics = PeerList.load(self.peers).peers
        unknown = [name for name in self.names if name not in publics]
        if unknown:
            raise UserError(f"{self.peers}: has no key of {', '.join(unknown)}, which the plan uses")
        desk = self.desk(KeyFile.load(self.key).keys, publics)
        print(f"waiting for {len(self.names)} nodes to join {desk.address}: {', '.join(self.names)}", file=sys.stderr)
        self.coordinate(desk, watcher, asked)

    def desk(self, own: KeyPair | None, publics: Mapping[str, str | None]) -> Desk:
        return Desk(
            self.brief,
            own,
            publics,
            listen=self.listen,
            security=self.security,
            store=self.folder().store,
            keeper=self.keeper,
            note=self.note,
        )

    @cached_property
    def keeper(self) -> CheckpointKeeper:
        return CheckpointKeeper(self.checkpoints, self.brief, self.blueprint, self.tokenizer, self.origin)

    def coordinate(self, desk: Desk, watcher: Watcher, asked: Asked, gone: Gone = lambda: ()) -> None:
        from skippipe.planner.repair import compile_repair

        threading.Thread(target=compile_repair, name="compile", daemon=True).start()  # before it is needed in a hurry
        desk.run(
            self.brief.learning,
            self.iterations - self.first,
            watcher,
            first=self.first,
            plans=self.plans,
            resumed=self.origin is not None,
            recorded=self.recorded,
            kept_every=self.kept_every,
            deadlines=self.deadlines,
            survival=self.survival,
            journal=self.memories,
            gone=gone,
            asked=asked,
        )
        self.close(watcher)
        self.journal.close()

    def close(self, watcher: Watcher) -> None:
        """When checkpoints are on disk; if the last one could not be written, that is said."""
        self.keeper.close()
        if self.keeper.lacking:
            watcher.happened(Event("checkpoint", self.iterations - 1, self.keeper.lacking))

    def folder(self) -> ModelFolder:
        return ModelFolder(self.output / "model", self.brief.plan.layers, self.blueprint, self.tokenizer)

    def ended(self, nursery: Nursery, told: Mapping[str, dict[str, Any]] | None = None) -> list[tuple[str, str]]:
        """Nodes that are no more, and how they ended; those in `told` are started again, a few times."""
        nursery.look()
        found = []
        for name, status in nursery.ended.items():
            how = f"exit status {status}" if status >= 0 else f"signal {-status}"
            found.append((name, f"{how}; its last words are in {log_file(self.output / 'logs', name)}"))
        nursery.ended.clear()
        for name, _ in found:
            if told and nursery.started[name] <= self.restarts:
                nursery.start(name, told[name])
        return found


def birth(told: dict[str, Any]) -> int:
    """A node's life in its own process."""
    reason = life(told)
    if reason:
        print(reason)
    return 1 if reason else 0


def life(told: dict[str, Any]) -> str:
    """A node from its invitation to its end; why it ended, empty if all is well."""
    keys = told["keys"]
    folders = {each: Path(told[each]) for each in ("data_folder", "checkpoint") if told.get(each)}
    return Member(Invitation(**{**told, **folders, "keys": KeyPair(*keys) if keys else None})).run()
