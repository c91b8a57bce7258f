"""The connections of a node to its peers, when the way to one of them changes."""

from __future__ import annotations

import time
from contextlib import closing

import pytest

from skippipe.runtime.node.peer_links import PeerLinks
from skippipe.transport.mailbox import OUT_ONLY, Mailbox

DEADLINE_S, HEARTBEAT_S = 20.0, 0.3


@pytest.mark.parametrize("connected", [True, False])
def test_a_peer_that_is_to_be_met_elsewhere_is_met_or_reported(connected: bool) -> None:
    """All was sent that there was to send, so nothing else would make the node connect again. It has to be told that
    the way is another one, and to report the link if nothing comes of it: here nobody passes its request on."""
    reported: list[str] = []
    with (
        closing(Mailbox("ann", None, security="none")) as ann,
        closing(Mailbox("bob", None, security="none")) as bob,
    ):
        links = PeerLinks(ann, "ann")
        links.update({"bob": [bob.address if connected else OUT_ONLY, None]}, ["bob"])
        links.connect("bob")
        deadline = time.monotonic() + DEADLINE_S
        while connected and "bob" not in ann.connected:
            assert time.monotonic() < deadline
            ann.receive(0.01)
        links.update({"bob": [OUT_ONLY, None]}, ["bob"])
        asked = False
        while not (asked and reported):
            assert time.monotonic() < deadline, (asked, reported)
            ann.receive(0.01)
            asked |= any(request.peer == "bob" for request in ann.call_requests())
            links.check(HEARTBEAT_S, cut_off=False, reconnected=reported.append, report=reported.append)
