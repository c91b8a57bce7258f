"""A coordinator's admission for tests: in this process, or as a program in a network namespace.

python -m tests.helpers.local_admission FOLDER HOST:PORT prints an invitation and admits until its input ends.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import zmq

from skippipe import __version__
from skippipe.errors import UserError
from skippipe.transport.addresses import bind, free_port, split_address
from skippipe.transport.admission import AdmissionEvent, AdmissionServer, NodeNeeds
from skippipe.transport.enrolment import AdmissionClient, enrol
from skippipe.transport.invitation import Invitation
from skippipe.transport.keys import KeyPair
from skippipe.transport.members import MemberStore, cluster_keys

HOUR_S = 3600.0


class Clock:
    def __init__(self) -> None:
        self.now_s = time.time()

    def __call__(self) -> float:
        return self.now_s


class LocalAdmission:
    """A coordinator's admission at a port of this machine, and the folder of its cluster."""

    def __init__(self, folder: Path, stack: ExitStack, address: str = "") -> None:
        self.folder = folder
        self.clock = Clock()
        self.keys = cluster_keys(folder)
        self.store = MemberStore.of_folder(folder, self.clock)
        self.address = address or f"127.0.0.1:{free_port('127.0.0.1') + 1}"
        self.at_work: dict[str, str] = {}
        self.needs: Callable[[str], NodeNeeds] = lambda name: NodeNeeds()
        self._stack = stack
        listening = stack.enter_context(zmq.Context()).socket(zmq.PULL)  # as if a coordinator listened
        stack.callback(listening.close, linger=0)
        bind(listening, *split_address(self.address))
        self.open()

    def open(self) -> None:
        self.server = AdmissionServer(
            MemberStore.of_folder(self.folder, self.clock),
            self.keys,
            self.address,
            clock=self.clock,
            needs=lambda name: self.needs(name),
            at_work=lambda: self.at_work,
        )
        self.server.start()
        self._stack.callback(self.server.close)

    def invite(self, name: str = "bob", lasting_s: float = HOUR_S) -> Invitation:
        return self.store.invite(name, self.keys.public, lasting_s, (self.address,))

    def enrol(self, invitation: Invitation, public: str | None = None) -> str:
        """What is said: nothing if it went well."""
        try:
            enrol(invitation, public or KeyPair.new().public, __version__, 0.0, lambda why: None)
        except UserError as error:
            return str(error)
        return ""

    def client(self, keys: KeyPair, public: str | None = None) -> AdmissionClient:
        return AdmissionClient(self.address, keys, public or self.keys.public)

    def event(self) -> AdmissionEvent:
        (found,) = self.server.events()
        return found


def main() -> None:
    with ExitStack() as stack:
        admission = LocalAdmission(Path(sys.argv[1]), stack, sys.argv[2])
        print(admission.invite().to_text(), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
