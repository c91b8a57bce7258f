"""Invitations, and the coordinator's admission over real sockets: who gets in, once, and who does not."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from skippipe import __version__
from skippipe.errors import UserError
from skippipe.transport.addresses import free_port, split_address
from skippipe.transport.enrolment import (
    MOST_REQUEST_BYTES,
    Admitted,
    AnyReply,
    Call,
    Called,
    Check,
    Checked,
    Enrol,
    NoConversation,
    Refusal,
    admission_address,
    enrol,
    read_reply,
    read_request,
)
from skippipe.transport.invitation import PREFIX, Invitation
from skippipe.transport.keys import KeyPair, PeerList
from skippipe.transport.members import MemberStore, NotAdmitted, cluster_keys
from tests.helpers.local_admission import LocalAdmission

WITHIN_S = 10.0
SOMEBODY = KeyPair.new()


@pytest.fixture
def admission(tmp_path: Path) -> Iterator[LocalAdmission]:
    with ExitStack() as stack:
        yield LocalAdmission(tmp_path / "cluster", stack)


names = st.text(
    st.characters(codec="utf-8", categories=["L", "N", "P"], exclude_characters="/"), min_size=1, max_size=12
).filter(lambda name: name not in (".", ".."))
addresses = st.sampled_from(["10.0.0.1:5555", "[2001:db8::7]:5555", "coordinator.example.org:443", "[::1]:2"])


@settings(max_examples=40, deadline=None)
@given(names, st.lists(addresses, min_size=1, max_size=8, unique=True), st.integers(0, 2**32 - 1), st.data())
def test_an_invitation_is_read_as_it_was_written(
    name: str, where: list[str], expires_s: int, data: st.DataObject
) -> None:
    made = Invitation(name, SOMEBODY.public, tuple(where), expires_s)
    text = made.to_text()
    assert Invitation.from_text(f" {text[:30]}\n  {text[30:]} ") == made
    assert Invitation.from_text(text).keys == made.keys
    at = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.sampled_from("AZaz09-_"))
    for damaged in (text[:at], text[:at] + other + text[at + 1 :], text + other):
        if damaged != text:
            with pytest.raises(UserError, match=r"ask for a new one|update skippipe"):
                Invitation.from_text(damaged)


def test_an_invitation_of_one_address_fits_on_a_line() -> None:
    text = Invitation("bob", KeyPair.new().public, ("203.0.113.7:5555",), 2**31).to_text()
    assert text.startswith(PREFIX)
    assert len(text) <= 110
    assert "bob" not in repr(Invitation.from_text(text).token), "and its token is not printed by accident"
    assert "token" not in repr(Invitation.from_text(text))


def test_an_invitation_admits_one_key_once(admission: LocalAdmission) -> None:
    invitation, pair = admission.invite(), KeyPair.new()
    stored = admission.store.path.read_text()
    assert invitation.keys.public in stored
    assert invitation.keys.secret not in stored and invitation.token.hex() not in stored
    assert admission.enrol(invitation, pair.public) == ""
    assert admission.store.load().peers == {"bob": pair.public}
    event = admission.event()
    assert (event.kind, event.name) == ("admitted", "bob")
    assert "127.0.0.1" in event.text
    assert admission.enrol(invitation, pair.public) == "", "who has not heard the answer asks again"
    assert admission.server.events() == []
    assert "was used at" in admission.enrol(invitation), "another key with the same invitation"
    event = admission.event()
    assert (event.kind, event.name) == ("refused", "bob")
    assert "was used at" in event.text and "(asked from 127.0.0.1)" in event.text
    assert admission.store.load().peers == {"bob": pair.public}


def test_a_used_invitation_stays_used_when_the_coordinator_is_started_again(admission: LocalAdmission) -> None:
    invitation, pair = admission.invite(), KeyPair.new()
    assert admission.enrol(invitation, pair.public) == ""
    admission.server.close()
    admission.open()
    assert "was used at" in admission.enrol(invitation)
    with admission.client(pair) as client:
        assert client.ask(Check(__version__), Checked).name == "bob", "the member is known"


def test_who_is_not_let_in(admission: LocalAdmission) -> None:
    late = admission.invite("late", lasting_s=60)
    admission.clock.now_s += 61
    assert "has expired at" in admission.enrol(late)
    assert admission.event().kind == "refused"
    first, second = admission.invite("carol"), admission.invite("carol")
    assert "was withdrawn at" in admission.enrol(first), "a new invitation makes the one before void"
    assert admission.enrol(second) == ""
    stranger = Invitation("dave", admission.keys.public, (admission.address,), 2**31)
    assert "is not known there" in admission.enrol(stranger)
    elsewhere = Invitation("bob", KeyPair.new().public, (admission.address,), 2**31)
    assert "is not the coordinator that this" in admission.enrol(elsewhere)
    other_version = pytest.raises(UserError, match=f"skippipe 0.0.0 here, {__version__} at the coordinator")
    with admission.client(admission.invite("eve").keys) as client, other_version:
        client.ask(Enrol(KeyPair.new().public, "0.0.0"), Admitted)
    assert admission.store.load().peers.keys() == {"carol"}


def test_a_coordinator_that_ends_in_a_handshake_is_asked_again(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port('127.0.0.1') + 1}"
    invitation = MemberStore.of_folder(tmp_path).invite("bob", cluster_keys(tmp_path).public, 3600.0, (address,))
    waited: list[str] = []
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        with socket.create_server(split_address(admission_address(address))) as first:
            first.settimeout(WITHIN_S)
            done = pool.submit(enrol, invitation, KeyPair.new().public, __version__, WITHIN_S, waited.append)
            for _ in range(2):  # whether it answers, and the request
                first.accept()[0].close()
        LocalAdmission(tmp_path, stack, address)
        assert done.result(WITHIN_S) == (address,)
    assert len(waited) == 1


def test_what_an_invitation_is_good_for(admission: LocalAdmission) -> None:
    """Enrolment and looking at oneself; a closed one for nothing but to be told so."""
    invitation = admission.invite()
    with admission.client(invitation.keys) as client:
        assert client.ask(Check(__version__), Checked).closed == ""
        assert client.ask(Call("127.0.0.1:1", "0" * 32), Called).failure == "nothing listens at this port"
        assert client.send_pieces(5000, 5000) < WITHIN_S
        assert admission.enrol(invitation) == ""
        assert "was used at" in client.ask(Check(__version__), Checked).closed
        with pytest.raises(UserError, match="was used at"):
            client.ask(Call("127.0.0.1:1", "0" * 32), Called)


class DoneAtSecondLook(Future[AnyReply]):
    """A reply that is there a moment after it was looked for."""

    looks = 0

    def done(self) -> bool:
        self.looks += 1
        return self.looks > 1


def test_a_reply_that_comes_while_others_are_sent_is_sent_too(
    admission: LocalAdmission, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(work: Callable[[], AnyReply]) -> Future[AnyReply]:
        future = DoneAtSecondLook()
        future.set_result(work())
        return future

    monkeypatch.setattr(admission.server, "_pool", SimpleNamespace(submit=submit, shutdown=lambda **_: None))
    with admission.client(admission.invite().keys) as client:
        assert client.ask(Check(__version__), Checked, WITHIN_S).name == "bob"


@pytest.mark.parametrize("refusal", [Refusal.KEY_UNKNOWN, Refusal.OTHER_KEY])
def test_who_is_refused_before_it_has_asked_is_told_so(admission: LocalAdmission, refusal: Refusal) -> None:
    """A process may be held up between connecting and asking; nothing can be sent then, nor waited for."""
    own = KeyPair.new() if refusal is Refusal.KEY_UNKNOWN else admission.invite().keys
    with admission.client(own, KeyPair.new().public if refusal is Refusal.OTHER_KEY else None) as client:
        assert client._monitor.poll(round(1000 * WITHIN_S)), "it is refused"
        deadline = time.monotonic() + WITHIN_S
        while client._dealer.poll(0, zmq.POLLOUT):
            assert time.monotonic() < deadline
        client._dealer.setsockopt(zmq.SNDTIMEO, round(1000 * WITHIN_S))  # if it waits to send, the test has an end
        with pytest.raises(NoConversation) as failed:
            client.ask(Check(__version__), Checked)
        assert failed.value.refusal is refusal


def test_requests_of_a_key_are_limited(admission: LocalAdmission) -> None:
    with admission.client(admission.invite().keys) as client, pytest.raises(UserError, match="too many requests"):
        for _ in range(100):
            client.ask(Call("127.0.0.1:1", "0" * 32), Called)


def test_a_revoked_key_gets_no_further_than_the_handshake(admission: LocalAdmission) -> None:
    invitation, pair = admission.invite(), KeyPair.new()
    assert admission.enrol(invitation, pair.public) == ""
    admission.server.events()
    admission.store.revoke("bob")
    with admission.client(pair) as client, pytest.raises(NoConversation) as refused:
        client.ask(Check(__version__), Checked)
    assert refused.value.refusal is Refusal.KEY_UNKNOWN
    assert "a key that was revoked, from 127.0.0.1" in admission.event().text
    again = admission.invite()
    assert "known here already" in admission.enrol(again, pair.public), "the key cannot come back"
    assert admission.enrol(again) == "", "the name can"


def test_the_list_of_members(admission: LocalAdmission) -> None:
    admission.enrol(admission.invite("bob"))
    admission.invite("carol", lasting_s=60)
    admission.invite("dave", lasting_s=600)
    admission.enrol(admission.invite("eve"))
    admission.store.revoke("eve")
    admission.store.write_seen({"bob": 1000.0})
    admission.clock.now_s += 100
    states = {row.name: row.state for row in admission.store.rows()}
    assert states == {"bob": "member", "carol": "expired", "dave": "invited", "eve": "revoked"}
    assert admission.store.rows()[0].seen_s == 1000
    assert admission.store.load().expected(admission.clock()) == ["bob", "dave"]
    with pytest.raises(UserError, match="'frank': is neither a member nor invited; there are: bob, dave"):
        admission.store.revoke("frank")
    with pytest.raises(UserError, match="--name bob: is a member already"):
        admission.invite("bob")


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
def test_addresses_of_both_kinds_are_tried_and_the_one_that_answers_comes_first(tmp_path: Path) -> None:
    with ExitStack() as stack:
        admission = LocalAdmission(tmp_path, stack, f"[::1]:{free_port('::1') + 1}")
        nowhere = f"127.0.0.1:{free_port('127.0.0.1') + 1}"
        invitation = admission.store.invite("bob", admission.keys.public, 60, (nowhere, admission.address))
        again = Invitation.from_text(invitation.to_text())
        assert enrol(again, KeyPair.new().public, __version__, 0.0, print) == (admission.address, nowhere)
        assert "from ::1" in admission.event().text


def test_a_relay_is_a_member_and_no_node(tmp_path: Path) -> None:
    store, keys = MemberStore.of_folder(tmp_path), [KeyPair.new().public for _ in range(3)]
    for name, relay, public in (("ann", False, keys[0]), ("hub", True, keys[1])):
        invitation = store.invite(name, keys[2], 60.0, ("10.0.0.1:5555",), relay=relay)
        assert store.admit(invitation.keys.public, public) == name
    store.invite("other", keys[2], 60.0, relay=True)
    assert store.load().expected(0.0) == ["ann"] and store.load().relays == ("hub", "other")
    assert [(row.name, row.state, row.relay) for row in store.rows()] == [
        *(("ann", "member", False), ("hub", "member", True), ("other", "invited", True))
    ]
    store.invite("other", keys[2], 60.0)
    store.revoke("hub")
    assert store.load().expected(0.0) == ["ann", "other"] and store.load().relays == ()


def test_two_who_come_at_once_with_one_invitation(admission: LocalAdmission) -> None:
    """The file decides, not the process: whoever is second has the lock second."""
    invitation = admission.invite()
    stores = [MemberStore.of_folder(admission.folder) for _ in range(2)]
    assert stores[0].admit(invitation.keys.public, KeyPair.new().public) == "bob"
    with pytest.raises(NotAdmitted, match="was used at"):
        stores[1].admit(invitation.keys.public, KeyPair.new().public)


def test_lists_of_earlier_releases_are_read_and_a_revoked_key_is_not(tmp_path: Path) -> None:
    path, public = tmp_path / "peers.json", KeyPair.new().public
    PeerList({"ann": public}).save(path)
    assert json.loads(path.read_text())["version"] == 1
    store = MemberStore(path)
    assert store.current().peers == {"ann": public}
    store.revoke("ann")
    known = json.loads(path.read_text())
    known["peers"] = {"ann": public}
    path.write_text(json.dumps(known))
    with pytest.raises(UserError, match="ann: this key was revoked, and cannot come back"):
        store.current()


@pytest.mark.parametrize("reader", [read_request, read_reply])
@pytest.mark.parametrize(
    "frame",
    [b"", b"{}", b"[]", b"\xff", b'{"ask":"enrol"}', b'{"ask":"check","version":1}', b"[" * 9999, b" " * 2**20],
)
def test_odd_requests_are_refused_in_one_line(reader: Callable[[bytes], object], frame: bytes) -> None:
    with pytest.raises(UserError) as refused:
        reader(frame)
    assert len(str(refused.value)) < 200 and str(refused.value).isprintable()
    assert MOST_REQUEST_BYTES < 2**20
