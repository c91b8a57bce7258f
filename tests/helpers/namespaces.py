"""Several machines on one: each has an address in a network of their own, and a home that the others cannot see.

Made of Linux namespaces; whoever is not root starts with `unshare --map-root-user`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.helpers.processes import END_S, ProcessOutput

ROOT = Path(__file__).parents[2]
DONE_S = 300.0  # for a command to end on a busy machine


class Terminal(ProcessOutput):
    """A line in a shell of its own, which may go on while others run."""

    def __init__(self, line: str, within: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self.line = line
        # SIGINT may be ignored where we were started; and a shell becomes the last command that it is told
        words = [*within, "env", f"--chdir={folder}", "--default-signal=INT", "bash", "-c", f"{line}\nexit $?"]
        self.process = subprocess.Popen(
            words,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert self.process.stdout is not None
        super().__init__(self.process.stdout)

    def ends(self, code: int = 0, within_s: float = DONE_S) -> str:
        """All that it has said."""
        try:
            found = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.line}\nstill there after {within_s} s:\n" + "\n".join(self.lines)) from None
        said = "\n".join(self.all_lines())
        assert found == code, f"{self.line}\nended with {found}, not {code}:\n{said}"
        return said

    def interrupt(self) -> None:
        """Ctrl-C: all that it has started hears it too."""
        os.killpg(self.process.pid, signal.SIGINT)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(END_S)


class Machine:
    """Without namespaces it is the one that tests run on."""

    def __init__(self, home: Path, environment: Mapping[str, str], within: Sequence[str] = ()) -> None:
        self.home = self.folder = home
        self.environment = {**environment, "HOME": str(home)}
        self.ran: set[str] = set()
        """All lines so far."""
        self._within = within
        self._started: list[Terminal] = []

    def start(self, line: str) -> Terminal:
        """Another terminal."""
        self.ran.update(line.splitlines())
        self._started.append(Terminal(line, self._within, self.folder, self.environment))
        return self._started[-1]

    def run(self, line: str, within_s: float = DONE_S) -> str:
        return self.start(line).ends(within_s=within_s)

    def enter(self, folder: str) -> None:
        self.folder = self.home / folder
        self.folder.mkdir(exist_ok=True)

    def network(self, state: str) -> None:
        """Up or down."""
        self.root(f"ip link set eth0 {state}")

    def root(self, line: str) -> None:
        """As the owner of the machine: routes and rules."""
        subprocess.run([*self._within, *line.split()], check=True)

    def switch_off(self) -> None:
        for terminal in self._started:
            terminal.kill()


@contextmanager
def neighbours(
    root: Path, names: Sequence[str], environment: Mapping[str, str], at_home: Sequence[Sequence[str]] = ()
) -> Iterator[list[Machine]]:
    """Machines that reach each other: 10.0.0.1, 10.0.0.2, … in the order of their names, and fd00::1, fd00::2, …

    Those of one home are 192.168.1.2, 192.168.1.3, … behind a router, which has the address of the first of them: they
    can call the others, and each other, and the others cannot call them.
    """
    homes = {name: root / name for name in names}
    with ExitStack() as stack:
        switch = _namespace(stack, ["ip link add switch type bridge", "ip link set switch up"])
        machines = []
        routers = {people: _namespace(stack, ["ip link set lo up"]) for people in map(tuple, at_home)}
        for people, router in routers.items():
            number = names.index(people[0]) + 1
            _plug_in(switch, f"home{number}", router, "wan", f"10.0.0.{200 + number}/24")
            _run(switch, f"ip link set home{number} master switch up")
            for line in ("link add lan type bridge", "addr add 192.168.1.1/24 dev lan", "link set lan up"):
                _run(router, f"ip {line}")
            _translate(stack, router, f"10.0.0.{number}")
        for number, (name, home) in enumerate(homes.items(), 1):
            home.mkdir(exist_ok=True)
            hidden = [f"mkdir -p {each} && mount -t tmpfs none {each}" for each in homes.values() if each != home]
            inside = _namespace(stack, ["ip link set lo up", *hidden])
            for people, router in routers.items():
                if name in people:
                    _plug_in(router, name, inside, "eth0", f"192.168.1.{2 + people.index(name)}/24")
                    _run(router, f"ip link set {name} master lan up")
                    _run(inside, "ip route add default via 192.168.1.1")
                    break
            else:
                _plug_in(switch, name, inside, "eth0", f"10.0.0.{number}/24", f"fd00::{number}/64")
                _run(switch, f"ip link set {name} master switch up")
            machines.append(Machine(home, environment, _entering(inside)))
            stack.callback(machines[-1].switch_off)
        yield machines


def _plug_in(network: int, name: str, other: int, device: str, *addresses: str) -> None:
    """A wire from one network to another, which has these addresses at its end."""
    _run(network, f"ip link add {name} type veth peer name {device} netns {other}")
    for address in addresses:
        _run(other, f"ip addr add {address} dev {device}" + " nodad" * (":" in address))
    _run(other, f"ip link set {device} up")


def _run(inside: int, line: str) -> None:
    subprocess.run([*_entering(inside), *line.split()], check=True)


def _translate(stack: ExitStack, router: int, public: str) -> None:
    program = [sys.executable, "-m", "tests.helpers.home_router", public]
    found = {**os.environ, "PYTHONPATH": str(ROOT)}  # nsenter may begin in the root folder
    command = [*_entering(router), *program]
    running = subprocess.Popen(command, env=found, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    stack.callback(running.wait, END_S)
    stack.callback(running.kill)
    assert running.stdout is not None
    assert running.stdout.readline() == b"routes\n"


def _namespace(stack: ExitStack, lines: Sequence[str]) -> int:
    """The process that holds a network and a view of the disk."""
    script = " && ".join([*lines, "echo here", "exec sleep infinity"])
    holder = subprocess.Popen(
        ["unshare", "--net", "--mount", "sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    stack.callback(holder.wait, END_S)
    stack.callback(holder.kill)
    assert holder.stdout is not None
    said = holder.stdout.readline()
    assert said == "here\n", f"{said.strip()}: namespaces need root, or unshare --map-root-user"
    return holder.pid


def _entering(pid: int) -> list[str]:
    return ["nsenter", f"--target={pid}", "--net", "--mount"]
