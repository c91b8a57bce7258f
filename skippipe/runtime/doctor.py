"""What is wrong with a machine that is to join, found before it does: each finding is one line with what to do.

Some checks look at this machine alone: software, device, disk. The others ask the coordinator's admission how it sees
this one: whether the key is known, the clocks agree, the port can be reached from there, and large packets get through.
A node runs them in brief whenever it joins, and the coordinator has the result in its event log.
"""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from skippipe import __version__
from skippipe.errors import UserError
from skippipe.json_fields import write_bytes
from skippipe.transport.addresses import (
    OUT_ONLY,
    join_address,
    listen_address,
    listening_socket,
    split_address,
    split_all,
    tcp_server,
)
from skippipe.transport.enrolment import (
    CALLED_PREFIX,
    CONNECT_S,
    MOST_BACK,
    PIECE_BYTES,
    REACH_IN_BRIEF_S,
    RETRY_S,
    AdmissionClient,
    Call,
    Called,
    Check,
    Checked,
    Finding,
    NoConversation,
    Reach,
    Refusal,
    Report,
    Taken,
    admission_address,
    plain,
    reach_all,
)
from skippipe.transport.keys import KeyPair

CLOCK_WRONG_S = 60.0
LITTLE_DISK_BYTES = 2**30
SLOW_BYTES_PER_S = 1e5
PACKETS_BYTES = 8192  # of several packets, whatever the MTU
LARGE_S = 5.0  # for them to arrive, on a line of 2 kB/s
CALL_BACK_S = 8.0
CALLED_BYTES = len(CALLED_PREFIX) + 32
MEASURED_S = 1.0
MEASURED = [(2**14, 1), (2**16, 1), (PIECE_BYTES, 1), (PIECE_BYTES, 4), (PIECE_BYTES, 16), (PIECE_BYTES, 48)]
"""Bytes of a piece, and pieces at once, until it takes long enough to be measured."""
DRIVER = Path("/proc/driver/nvidia/version")
PREVENTS = ("version", "key", "invitation", "name", "device")
"""Checks that a node cannot take part without."""


@dataclass(frozen=True)
class Examined:
    """A machine that is to join: who it is, whom it joins, and what it brings."""

    folder: Path
    """Where it keeps its key."""
    addresses: tuple[str, ...] = ()
    """host:port of the coordinator."""
    keys: KeyPair | None = None
    """Key pair of a member, or of an invitation; none: the coordinator can be reached, but not asked."""
    coordinator: str = ""
    """The coordinator's public key."""
    listen: str = "0"
    address: str | None = None
    devices: str | None = None
    """Devices as in `JoinConfig`; none: the job's."""
    clock: Callable[[], float] = time.time
    connect_s: float = CONNECT_S
    """How long a connection may take."""


def examine(machine: Examined, *, brief: bool = False) -> list[Finding]:
    """All findings, in the order in which problems are best solved."""
    findings, checked = [], None
    if machine.addresses:
        network = _Network(machine, brief=brief)
        findings = list(network.findings())
        checked = network.checked
    device = machine.devices or (checked.device if checked else "") or "cpu"
    return [
        _software(checked),
        *findings,
        _device(device),
        _memory(device, checked.memory_bytes if checked else 0),
        _disk(machine.folder),
    ]


def _ok(check: str, text: str) -> Finding:
    return Finding(check, "ok", text)


def _wrong(check: str, text: str) -> Finding:
    return Finding(check, "wrong", text)


def _warning(check: str, text: str) -> Finding:
    return Finding(check, "warning", text)


# This machine


def _software(checked: Checked | None) -> Finding:
    if checked is not None and checked.version != __version__:
        return _wrong(
            "version",
            f"skippipe {__version__} here, {checked.version} at the coordinator; use one version: "
            "install here what is installed there",
        )
    import torch
    import zmq

    versions = f"Python {platform.python_version()}, torch {torch.__version__}, ZeroMQ {zmq.zmq_version()}"
    return _ok("version", f"skippipe {__version__}, {versions}")


def _device(device: str) -> Finding:
    import torch

    from skippipe.model.model_spec import parse_devices

    if device.startswith("cuda") and torch.version.hip is None:
        if not DRIVER.exists():
            return _wrong("device", f"{device}: no NVIDIA driver is loaded; install it, or use --devices cpu")
        if torch.version.cuda is None:
            return _wrong("device", f"{device}: torch {torch.__version__} is built without CUDA; install one with CUDA")
    try:
        devices = parse_devices(device)
    except UserError as error:
        return _wrong("device", str(error))
    times = f"{len(devices)} × " if len(devices) > 1 else ""
    if device.startswith("cuda"):
        return _ok("device", f"{times}{torch.cuda.get_device_name(devices[0])}, CUDA {torch.version.cuda}")
    return _ok("device", f"{times}cpu, {os.cpu_count()} cores")


def _memory(device: str, needed: int) -> Finding:
    import torch

    from skippipe.model.model_spec import parse_devices

    if device.startswith("cuda") and torch.cuda.is_available():
        free = min(torch.cuda.mem_get_info(each)[0] for each in parse_devices(device))
    else:
        free = _free_memory()
    shown = f"{free / 2**30:.1f} GiB free"
    if free < needed:
        return _wrong(
            "memory",
            f"{shown}, and the plan needs {needed / 2**30:.1f} GiB here; end other programs, or plan with the memory "
            "that there is ('skippipe profile')",
        )
    return _ok("memory", f"{shown}, the plan needs {needed / 2**30:.1f} GiB" if needed else shown)


def _free_memory() -> int:
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _disk(folder: Path) -> Finding:
    if folder.is_dir() and not os.access(folder, os.W_OK):
        return _ok("disk", f"{folder} is read-only, as a folder of keys may be")
    probe = folder / f"probe-{secrets.token_hex(4)}"
    try:
        write_bytes(probe, bytes(4096), private=True)
    except UserError as error:
        return _wrong("disk", f"{folder}: {str(error).rpartition(': ')[2].lower()}; make room, or name another folder")
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
    free = shutil.disk_usage(folder).free
    if free < LITTLE_DISK_BYTES:
        return _warning("disk", f"{folder}: only {free / 2**20:,.0f} MiB are free; make room")
    return _ok("disk", f"{free / 2**30:,.0f} GiB free")


# The coordinator, and this machine as it sees it


class _Network:
    """The findings that need a connection; each follows from those before."""

    def __init__(self, machine: Examined, *, brief: bool) -> None:
        self._machine = machine
        self._brief = brief
        self.checked: Checked | None = None
        """What the coordinator knows of this machine."""

    def findings(self) -> Iterator[Finding]:
        machine = self._machine
        ports = {each: admission_address(each) for each in machine.addresses}
        found = {each.address: each for each in reach_all([*ports, *ports.values()], machine.connect_s, heard=True)}
        yield self._reached([found[each] for each in ports])
        answering = [each for each, port in ports.items() if not found[port].failure]
        if not answering:
            if any(not found[each].failure for each in ports):
                port = next(port for each, port in ports.items() if not found[each].failure)
                yield _warning(
                    "admission", f"{port}: {found[port].failure}; open this port too: without it nobody is admitted"
                )
            return
        if machine.keys is None:
            yield _warning("key", "not checked, nor what follows: give an invitation, or the key file of a node")
            return
        with AdmissionClient(answering[0], machine.keys, machine.coordinator) as client:
            try:
                yield from self._ask(client, answering[0])
            except UserError as error:  # too many requests, for example
                yield _warning("admission", f"{error}; what follows was not checked")

    def _reached(self, found: list[Reach]) -> Finding:
        up = [each.address for each in found if not each.failure]
        down = [f"{each.address}: {each.failure}" for each in found if each.failure]
        if up:
            return _ok("coordinator", f"{', '.join(up)} answers" + (f" ({'; '.join(down)})" if down else ""))
        ports = " and ".join(str(split_address(found[0].address)[1] - less) for less in (1, 0))
        if any(each.is_other for each in found):
            advice = "name the address of the coordinator: the one in the invitation, or transport.listen of its job"
        elif any(each.is_dropped for each in found):
            advice = f"is that machine on, and do its firewall and router let TCP ports {ports} through?"
        else:
            advice = "is the coordinator started, and is this its address?"
        return _wrong("coordinator", f"{'; '.join(down)}; {advice}")

    def _ask(self, client: AdmissionClient, coordinator: str) -> Iterator[Finding]:
        machine = self._machine
        out_only = machine.listen == OUT_ONLY
        listen = OUT_ONLY if out_only else listen_address(machine.listen, ",".join(machine.addresses), machine.address)
        began_s, asked_at_s = time.monotonic(), machine.clock()
        try:
            self.checked = checked = client.ask(Check(__version__, machine.address or listen), Checked)
        except NoConversation as error:
            yield self._no_conversation(coordinator, error.refusal)
            return
        took_s = time.monotonic() - began_s
        yield _ok("key", f"known to the coordinator as '{checked.name}'")
        if checked.closed:
            yield _wrong("invitation", checked.closed)
        if checked.unplaced:
            yield _wrong("name", checked.unplaced)
        if checked.other:
            yield _wrong(
                "name",
                f"another node works as '{checked.name}' at {checked.other}; stop one of the two, or have this machine "
                "invited under a name of its own",
            )
        yield self._clock(asked_at_s + took_s / 2 - checked.time_s)
        if checked.closed:
            return
        if out_only:
            yield _ok("port", "this machine only calls out, as --listen says")
        else:
            yield self._port(client, listen)
        yield from self._packets(client)

    def _no_conversation(self, coordinator: str, refusal: Refusal) -> Finding:
        if refusal is Refusal.KEY_UNKNOWN:
            return _wrong(
                "key", f"{coordinator} {refusal.value}: it was revoked, or is of another cluster; be invited anew"
            )
        if refusal is Refusal.OTHER_KEY:
            return _wrong("key", f"{coordinator} {refusal.value}; check the address, or be invited anew")
        return _wrong(
            "mtu",
            f"{coordinator}: connections come about, and then nothing arrives; packets may be too large for the way: "
            "ip link set dev INTERFACE mtu 1280, here and there",
        )

    def _clock(self, ahead_s: float) -> Finding:
        if abs(ahead_s) < CLOCK_WRONG_S:
            return _ok("clock", f"{abs(ahead_s):.1f} s from the coordinator's")
        which = "ahead of" if ahead_s > 0 else "behind"
        return _wrong(
            "clock", f"{abs(ahead_s):,.0f} s {which} the coordinator's; set one of them: timedatectl set-ntp true"
        )

    def _port(self, client: AdmissionClient, listen: str) -> Finding:
        """Whether the coordinator, and so perhaps others, can connect to this machine."""
        calls, where = _Calls(), list[str]()
        with ExitStack() as servers:
            for host, port in split_all(listen):
                try:
                    server = tcp_server(host, port)
                except OSError as error:
                    at, why = join_address(host, port), (error.strerror or str(error)).lower()
                    return _wrong("port", f"{at}: cannot listen there: {why}; choose another --listen")
                servers.enter_context(calls.taken_at(server))
                where.append(join_address(host, server.getsockname()[1]))
            if self._machine.address:
                where = self._machine.address.split(",")
            failures = {each: self._call(client, each, calls) for each in where}
        reached = [each for each, failure in failures.items() if not failure]
        failed = "; ".join(f"{each}: {failure}" for each, failure in failures.items() if failure)
        if not reached:
            return _warning(
                "port",
                f"the coordinator cannot reach this machine at {failed}; open or forward this TCP port, or say with "
                "--address where others reach it; until then it can only call out",
            )
        beside = f" (not at {failed})" if failed else ""
        return _ok("port", f"the coordinator reaches this machine at {', '.join(reached)}{beside}")

    def _call(self, client: AdmissionClient, where: str, calls: _Calls) -> str:
        """Why the coordinator's call to an address does not get here; empty if it does."""
        number = secrets.token_hex(16)
        try:
            failure = client.ask(Call(where, number), Called, CALL_BACK_S).failure
        except NoConversation:
            failure = "the coordinator has not said why"
        return failure or ("" if calls.came(number) else "another machine answers there")

    def _packets(self, client: AdmissionClient) -> Iterator[Finding]:
        try:
            client.send_pieces(PACKETS_BYTES, min(PACKETS_BYTES, MOST_BACK), within_s=LARGE_S)
        except NoConversation:
            yield _wrong(
                "mtu",
                "small packets get through and large ones do not: the MTU on the way is too small (a VPN or tunnel?); "
                "ip link set dev INTERFACE mtu 1280, here and there",
            )
            return
        yield _ok("mtu", "large packets get through, both ways")
        rate, most_s = 0.0, MEASURED_S / 4 if self._brief else MEASURED_S
        with suppress(NoConversation, UserError):
            for count, times in MEASURED:
                took_s = client.send_pieces(count, times=times)
                rate = count * times / took_s
                if 4 * took_s > most_s:  # the next ones would take longer than that
                    break
        line = f"{rate / 1e6:,.1f} MB/s to the coordinator"
        yield _ok("bandwidth", line) if rate > SLOW_BYTES_PER_S else _warning("bandwidth", f"only {line}; use a cable")


class _Calls:
    """Takes calls in threads of its own, and tells whether one was the one that was asked for."""

    def __init__(self) -> None:
        self._heard: set[bytes] = set()
        self._changed = threading.Condition()

    @contextmanager
    def taken_at(self, server: socket.socket) -> Iterator[None]:
        """Its port is free afterwards: a socket that is closed keeps it while a thread still waits for a call."""
        server.settimeout(CALL_BACK_S)
        thread = threading.Thread(target=self._take, args=(server,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            thread.join(CALL_BACK_S)
            server.close()

    def _take(self, server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(CALL_BACK_S)
                    said = b""
                    while len(said) < CALLED_BYTES and (more := connection.recv(CALLED_BYTES - len(said))):
                        said += more
                with self._changed:
                    self._heard.add(said)
                    self._changed.notify()

    def came(self, number: str) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: CALLED_PREFIX + number.encode() in self._heard, 1.0)


def report(machine: Examined, findings: list[Finding]) -> None:
    """Have the findings noted by the coordinator; if that is not possible, they are not."""
    if machine.keys is not None:
        for address in machine.addresses:
            with suppress(NoConversation, UserError):
                with AdmissionClient(address, machine.keys, machine.coordinator) as client:
                    client.ask(Report([replace(each, text=plain(each.text)) for each in findings]), Taken, LARGE_S)
                return


def check_at_join(machine: Examined, patience_s: float, say: Callable[[str], None]) -> None:
    """Examine a machine in brief once the coordinator is there: it notes the findings, and `say` gets what is not as it
    should be. UserError if the node could not take part. A coordinator that admits nobody is not asked."""
    if machine.listen != OUT_ONLY:
        for place in split_all(listen_address(machine.listen, ",".join(machine.addresses), machine.address)):
            listening_socket(*place).close()  # an error is known before anybody is waited for
    deadline = time.monotonic() + patience_s
    ports = [admission_address(each) for each in machine.addresses]
    looks = 2  # at a coordinator that listens: its admission begins a moment later
    while True:
        up = {each.address for each in reach_all([*ports, *machine.addresses], REACH_IN_BRIEF_S) if not each.failure}
        looks -= bool(up)
        if up.intersection(ports) or not looks:
            break
        if time.monotonic() > deadline:
            raise UserError(
                f"waited {patience_s:g} s for the coordinator: no answer from {', '.join(machine.addresses)}; is it "
                "started, and does a firewall let this node through?"
            )
        time.sleep(RETRY_S)  # nobody is there who could wake us
    if not up.intersection(ports):
        return
    findings = examine(machine, brief=True)
    report(machine, findings)
    for each in findings:
        if each.level == "wrong" and each.check in PREVENTS:
            raise UserError(f"{each.check}: {each.text}")
        if each.level != "ok":
            say(f"{each.level}: {each.check}: {each.text}")
