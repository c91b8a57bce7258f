"""Ten wrong setups, each named in one line by `skippipe doctor` or at join: real sockets, and a real MTU."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from math import inf
from pathlib import Path
from typing import Any

import pytest

from skippipe import __version__
from skippipe.errors import UserError
from skippipe.runtime.doctor import Examined, check_at_join, examine
from skippipe.runtime.node.interfaces import JoinConfig
from skippipe.transport.addresses import free_port, join_address, split_address
from skippipe.transport.admission import NodeNeeds
from skippipe.transport.enrolment import Finding, admission_address
from skippipe.transport.keys import KeyFile, KeyPair
from skippipe.transport.relay import RelayLimits
from tests.helpers.disks import full_disk
from tests.helpers.local_admission import HOUR_S, LocalAdmission
from tests.helpers.processes import Command, only_error

MTU = 1000
END_S = 300.0  # two Pythons import all that they need; 20 s on an idle machine


@pytest.fixture
def admission(tmp_path: Path) -> Iterator[LocalAdmission]:
    with ExitStack() as stack:
        yield LocalAdmission(tmp_path / "cluster", stack)


@pytest.fixture
def machine(admission: LocalAdmission, tmp_path: Path) -> Examined:
    """One that was invited as 'bob' and is well."""
    invitation = admission.invite()
    return Examined(tmp_path / "home", (admission.address,), invitation.keys, admission.keys.public, connect_s=1.0)


def found(machine: Examined, check: str) -> Finding:
    (only,) = [each for each in examine(machine, brief=True) if each.check == check]
    assert "\n" not in only.text
    return only


def wrong(machine: Examined, check: str) -> str:
    finding = found(machine, check)
    assert finding.level == "wrong"
    return finding.text


def test_a_machine_that_is_well(machine: Examined, admission: LocalAdmission) -> None:
    admission.needs = lambda name: NodeNeeds("cpu", 2**20)
    findings = examine(machine)
    assert [each for each in findings if each.level == "wrong"] == []
    checks = "version coordinator key clock port mtu bandwidth device memory disk"
    assert [each.check for each in findings] == checks.split()
    assert admission.store.load().peers == {}, "the invitation is not used up by this"


# Ten wrong setups


def test_a_closed_port(machine: Examined) -> None:
    closed = f"127.0.0.1:{free_port('127.0.0.1')}"
    finding = found(replace(machine, address=closed), "port")
    assert finding.level == "warning"
    assert f"cannot reach this machine at {closed}: nothing listens at this port; open or forward" in finding.text
    with socket.create_server(("127.0.0.1", 0)) as other:  # a port that leads to another program
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        assert "another machine answers there" in found(replace(machine, address=taken), "port").text
        assert f"{taken}: cannot listen there: address already in use" in wrong(replace(machine, listen=taken), "port")


def test_the_port_is_free_afterwards(machine: Examined) -> None:
    """The node listens there at once; a thread that waited for calls would keep it for seconds."""
    port = free_port("127.0.0.1")
    findings = examine(replace(machine, listen=str(port)), brief=True)
    assert [each.level for each in findings if each.check == "port"] == ["ok"]
    with socket.create_server(("127.0.0.1", port)):
        pass


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
def test_a_port_at_addresses_of_both_kinds(machine: Examined) -> None:
    both = found(replace(machine, listen="127.0.0.1:0,[::1]:0"), "port")
    assert both.level == "ok"
    assert re.search(r"reaches this machine at 127\.0\.0\.1:\d+, \[::1\]:\d+$", both.text)
    four, six = (join_address(host, free_port(host)) for host in ("127.0.0.1", "::1"))
    half = found(replace(machine, listen=six, address=f"{four},{six}"), "port")
    assert half.level == "ok"
    assert half.text.endswith(f"reaches this machine at {six} (not at {four}: nothing listens at this port)")


def test_a_wrong_key(machine: Examined, admission: LocalAdmission) -> None:
    stranger = replace(machine, keys=KeyPair.new())
    assert wrong(stranger, "key").startswith(
        f"{admission.address} does not know this key: it was revoked, or is of another"
    )
    elsewhere = replace(machine, coordinator=KeyPair.new().public)
    assert "is not the coordinator that this key or invitation is for" in wrong(elsewhere, "key")


def test_an_expired_invitation(machine: Examined, admission: LocalAdmission) -> None:
    admission.clock.now_s += HOUR_S
    assert wrong(machine, "invitation").startswith("the invitation of 'bob' has expired at 20")


def test_a_clock_that_is_off_by_an_hour(machine: Examined) -> None:
    fast = replace(machine, clock=lambda: time.time() + HOUR_S)
    assert wrong(fast, "clock").startswith("3,600 s ahead of the coordinator's; set one of them: timedatectl")
    assert "3,600 s behind" in wrong(replace(machine, clock=lambda: time.time() - HOUR_S), "clock")


def test_two_nodes_with_one_name(machine: Examined, admission: LocalAdmission) -> None:
    with socket.create_server(("127.0.0.1", 0)) as first:
        admission.at_work["bob"] = f"127.0.0.1:{first.getsockname()[1]}"
        assert f"another node works as 'bob' at {admission.at_work['bob']}" in wrong(machine, "name")
        with pytest.raises(UserError, match=r"^name: another node works as 'bob' at .*; stop one of the two"):
            check_at_join(machine, 1.0, print)
        (event,) = admission.server.events()
        assert (event.kind, event.name) == ("checked", "bob")
        assert event.text.startswith("name: another node works as 'bob'"), "the coordinator's log has it too"
    assert "name" not in [each.check for each in examine(machine, brief=True)], "that one is gone: this takes its place"
    admission.at_work["bob"] = "none"
    out_only = replace(machine, listen="none")
    assert found(out_only, "port").text == "this machine only calls out, as --listen says"


def test_another_version(machine: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skippipe.transport.admission.__version__", "9.9.9")
    line = (
        f"skippipe {__version__} here, 9.9.9 at the coordinator; use one version: install here what is installed there"
    )
    assert wrong(machine, "version") == line
    with pytest.raises(UserError, match=r"^version: "):
        check_at_join(machine, 1.0, print)


def test_a_blocked_coordinator(machine: Examined) -> None:
    """A port whose queue is full: the kernel drops packets, as a firewall does."""
    with ExitStack() as stack:
        port = free_port("127.0.0.1")
        for each in (port, port + 1):
            server = stack.enter_context(socket.socket())
            server.bind(("127.0.0.1", each))
            server.listen(0)
            for _ in range(3):
                filling = stack.enter_context(socket.socket())
                filling.setblocking(False)
                with suppress(BlockingIOError):
                    filling.connect(("127.0.0.1", each))
        blocked = replace(machine, addresses=(f"127.0.0.1:{port + 1}",))
        line = wrong(blocked, "coordinator")
    assert line.startswith(f"127.0.0.1:{port + 1}: nothing came back in 1 s; is that machine on")
    assert f"let TCP ports {port} and {port + 1} through?" in line
    nobody = replace(machine, addresses=(f"127.0.0.1:{port + 1}", "no.such.host.invalid:5555"))
    line = wrong(nobody, "coordinator")
    assert "nothing listens at this port" in line and "no machine of this name is known" in line


def test_another_program_where_a_coordinator_should_be(machine: Examined) -> None:
    web = ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    try:
        at = f"127.0.0.1:{web.server_port}"
        line = wrong(replace(machine, addresses=(at,), connect_s=0.5), "coordinator")
    finally:
        web.shutdown()
        web.server_close()
    assert line == (
        f"{at}: what listens at this port is no SkipPipe coordinator; name the address of the coordinator: the one in "
        "the invitation, or transport.listen of its job"
    )


class Narrow:
    """A way to a port over which large packets do not get through: whatever is sent at once beyond a size is lost,
    with all that follows."""

    def __init__(self, port: int, largest: int) -> None:
        self._port, self._largest = port, largest
        self.server = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self.server]
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self.server.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                self._sockets += [near, far]
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while 0 < len(data := source.recv(65536)) <= self._largest:
                sink.sendall(data)


def test_large_packets_that_do_not_get_through(
    machine: Examined, admission: LocalAdmission, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skippipe.runtime.doctor.LARGE_S", 1.0)
    narrow = Narrow(split_address(admission_address(admission.address))[1], MTU)
    try:
        at = f"127.0.0.1:{narrow.server.getsockname()[1] + 1}"
        assert wrong(replace(machine, addresses=(at,)), "mtu").startswith(
            "small packets get through and large ones do not"
        )
    finally:
        narrow.close()


def test_a_full_disk(machine: Examined, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with full_disk(0):
        line = wrong(machine, "disk")
    assert line == f"{machine.folder}: file too large; make room, or name another folder"
    (tmp_path / "file").write_text("")
    assert "not a directory" in wrong(replace(machine, folder=tmp_path / "file" / "home"), "disk")
    monkeypatch.setattr("skippipe.runtime.doctor.LITTLE_DISK_BYTES", 2**62)
    assert "MiB are free; make room" in found(machine, "disk").text


def test_no_driver(
    machine: Examined, admission: LocalAdmission, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skippipe.runtime.doctor.DRIVER", tmp_path / "none")
    admission.needs = lambda name: NodeNeeds("cuda")
    line = "cuda: no NVIDIA driver is loaded; install it, or use --devices cpu"
    assert wrong(machine, "device") == line
    with pytest.raises(UserError, match=f"^device: {line}"):
        check_at_join(machine, 1.0, print)
    assert found(replace(machine, devices="cpu"), "device").level == "ok"


def test_too_little_memory(machine: Examined, admission: LocalAdmission) -> None:
    admission.needs = lambda name: NodeNeeds("cpu", 2**50)
    assert "the plan needs 1048576.0 GiB here" in wrong(machine, "memory")


# The command


def test_the_command(
    admission: LocalAdmission, tmp_path: Path, skippipe: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    invitation = admission.invite()
    ran = skippipe("doctor", invitation.to_text())
    assert ran.code == 0, ran
    assert "ok       key: known to the coordinator as 'bob'\n" in ran.out
    pair = KeyPair.new()
    assert admission.enrol(invitation, pair.public) == ""
    KeyFile("bob", pair, admission.keys.public, (admission.address,)).save(tmp_path / ".skippipe" / "node.key")
    assert skippipe("doctor").code == 0
    assert skippipe("doctor", tmp_path / ".skippipe").code == 0
    admission.store.revoke("bob")
    ran = skippipe("doctor", "--json")
    assert ran.code == 1
    (finding,) = [each for each in ran.json["findings"] if each["level"] == "wrong"]
    assert finding["check"] == "key"
    assert not ran.json["well"]
    ran = skippipe("doctor", admission.address)
    assert ran.code == 0
    assert "warning  key: not checked" in ran.out
    assert "copy the whole string again" in only_error(skippipe("doctor", invitation.to_text()[:-3]).err)


@pytest.fixture
def joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[JoinConfig]:
    """With what nodes would have joined, whose home this is."""
    found: list[JoinConfig] = []

    class Agent:
        def __init__(self, config: JoinConfig, _: object) -> None:
            found.append(config)

        def run(self) -> str:
            return ""

    monkeypatch.setattr("skippipe.runtime.node.agent.NodeAgent", Agent)
    monkeypatch.setenv("HOME", str(tmp_path))
    return found


def test_a_node_remembers(admission: LocalAdmission, skippipe: Command, joined: list[JoinConfig]) -> None:
    assert "this machine was not invited yet" in only_error(skippipe("node").err)
    first = admission.invite().to_text()
    for words in ([first], [], [first]):  # the string a second time, on the same machine, does no harm
        ran = skippipe("node", *words)
        assert ran.code == 0, ran
    assert {(each.name, each.coordinator, each.keys) for each in joined} == {("bob", admission.address, joined[0].keys)}
    assert admission.store.load().peers == {"bob": joined[0].keys.public if joined[0].keys else ""}
    other = admission.invite("carol").to_text()
    assert "is the key of node 'bob'; to be 'carol' as well" in only_error(skippipe("node", other).err)
    admission.store.revoke("bob")
    assert "does not know this key" in only_error(skippipe("node").err)
    assert "was used at" in only_error(skippipe("node", first).err)
    assert skippipe("node", admission.invite().to_text()).code == 0, "invited anew"
    assert joined[-1].keys != joined[0].keys


def test_a_node_remembers_the_options_of_its_invitation(
    admission: LocalAdmission,
    tmp_path: Path,
    skippipe: Command,
    joined: list[JoinConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And no others; `doctor` examines the machine for them."""
    monkeypatch.chdir(tmp_path)
    asked = {"--listen": "none", "--tokens": "words", "--devices": "cpu:2", "--join": admission.address}
    given = [word for pair in asked.items() for word in pair]
    invitation = admission.invite().to_text()
    for words in ([invitation, *given], [], ["--devices", "cpu", "--coordinator-timeout", "9"], []):
        assert skippipe("node", *words).code == 0
    first, second, third, fourth = joined
    assert (first.listen, first.data_folder, first.devices) == ("none", tmp_path / "words", "cpu:2")
    assert second == fourth == first
    assert (third.listen, third.devices) == ("none", "cpu")
    assert "port: this machine only calls out, as --listen says" in skippipe("doctor").out
    assert skippipe("node", invitation).code == 0
    assert joined[-1].listen != "none" and joined[-1].data_folder is None


def test_a_relay_remembers_the_options_of_its_invitation(
    admission: LocalAdmission, tmp_path: Path, skippipe: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is started again keeps to its limits."""
    opened: list[tuple[str, RelayLimits]] = []
    places: list[str] = []

    class Opened:
        def __init__(self, listen: str, limits: RelayLimits) -> None:
            opened.append((listen, limits))
            self.address = listen

    class Agent:
        def __init__(self, *given: Any) -> None:
            places.append(given[-1])

        def run(self, tell: object) -> None:
            pass

    monkeypatch.setattr("skippipe.transport.relay.Relay", Opened)
    monkeypatch.setattr("skippipe.runtime.relay.RelayAgent", Agent)
    monkeypatch.setenv("HOME", str(tmp_path))
    given = ["--listen", "127.0.0.1:7", "--address", "hub:7", "--rate", "9", "--node-streams", "5"]
    for words in ([admission.invite("hub").to_text(), *given], [], ["--rate", "3"], []):
        ran = skippipe("relay", *words)
        assert ran.code == 0, ran
    assert opened[0] == ("127.0.0.1:7", RelayLimits(9e6, inf, 4096, 5, 600))
    assert opened[1] == opened[3] == opened[0]
    assert opened[2][1].bytes_per_s == 3e6
    assert set(places) == {"hub:7"}
    path = tmp_path / ".skippipe" / "relay.key"
    mine = KeyFile.load(path)
    for name, edited, why in (
        ("rate", "fast", "'fast' is not a number; give 1e-06 to 1,000,000,000"),
        ("rate", "nan", "nan is out of range; give"),
        ("node_streams", "5.5", "'5.5' is not a whole number; give"),
        ("streams", "0", "0 is out of range; give"),
        ("idle", "", "'' is not a number; give"),
    ):
        replace(mine, options={**mine.options, name: edited}).save(path)
        ran = skippipe("relay")
        assert (ran.code, f"{path}: options.{name}: {why}" in only_error(ran.err)) == (2, True), ran.err


@pytest.mark.slow
def test_a_real_mtu_that_is_too_small(tmp_path: Path) -> None:
    """Two machines of their own, and a switch between them with a small MTU that tells nobody."""
    script = f"""
set -e
ip link add middle type bridge
ip link set middle up
for i in 1 2; do
  unshare --net sleep {END_S:g} &
  pid=$!
  eval "pid$i=$pid"
  until [ "$(readlink /proc/$pid/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do :; done
  ip link add port$i type veth peer name eth0 netns $pid
  ip link set port$i master middle up
  nsenter -t $pid -n ip addr add 10.0.0.$i/24 dev eth0
  nsenter -t $pid -n ip link set lo up
  nsenter -t $pid -n ip link set eth0 gso_max_segs 1 up
done
trap "kill $pid1 $pid2" EXIT
ip link set port1 mtu {MTU}
mkfifo {tmp_path}/in
nsenter -t $pid1 -n {sys.executable} -m tests.helpers.local_admission {tmp_path}/door 10.0.0.1:5555 \
  < {tmp_path}/in > {tmp_path}/out &
exec 3> {tmp_path}/in
until [ -s {tmp_path}/out ]; do sleep 0.1; done
HOME={tmp_path} nsenter -t $pid2 -n {sys.executable} -m skippipe doctor "$(cat {tmp_path}/out)" --json || true
exec 3>&-
wait %3 || true
"""
    command = ["unshare", "--map-root-user", "--net", "bash", "-c", script]
    if subprocess.run([*command[:3], "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespaces here")
    ran = subprocess.run(command, capture_output=True, text=True, timeout=END_S, check=False)
    assert ran.stdout, ran.stderr
    findings: dict[str, Any] = {each["check"]: each for each in json.loads(ran.stdout)["findings"]}
    assert findings["key"]["level"] == "ok"
    assert findings["mtu"]["level"] == "wrong"
    assert findings["mtu"]["text"].startswith("small packets get through and large ones do not")
