"""The relays of a run, as its coordinator knows them: where each is, what it may carry, and which one a pair meets at.

A relay says every RELAY_HELLO_S that it is there. One that is silent for RELAY_SILENT_S, or whose connection is lost,
is not used any more until it speaks again. A pair goes to the relay that has the fewest streams; if it asks again soon,
because nothing came of it, to the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from skippipe.errors import UserError
from skippipe.runtime.messages import Hello
from skippipe.transport.addresses import split_all

RELAY_HELLO_S = 1.0  # from one hello of a relay to the next
RELAY_SILENT_S = 5.0
LONGEST_ADDRESS = 300  # characters, of all addresses of a relay together
SAME_ATTEMPT_S = 5.0  # a request of the same pair within that time says that the last one was in vain


@dataclass(frozen=True)
class RelayInfo:
    """What a relay says of itself."""

    address: str
    """host:port; several with commas between them."""
    bytes_per_s: float
    """What all nodes together may send through it; infinite without a limit, as is the next."""
    node_bytes_per_s: float
    streams: int

    @classmethod
    def of(cls, hello: Hello) -> RelayInfo:
        """UserError if it is not the hello of a relay."""
        if len(hello.relay) != 3 or not all(rate > 0 for rate in hello.relay[:2]) or not 0 <= hello.relay[2] < inf:
            raise UserError("this cluster knows it as a relay: start it with 'skippipe relay'")
        if len(hello.address) > LONGEST_ADDRESS:
            raise UserError(f"its addresses have {len(hello.address)} characters; at most {LONGEST_ADDRESS} are taken")
        split_all(hello.address)
        return cls(hello.address, hello.relay[0], hello.relay[1], int(hello.relay[2]))


class RelayPool:
    def __init__(self) -> None:
        self._relays: dict[str, RelayInfo] = {}
        self._seen_at: dict[str, float] = {}
        self._attempts: dict[frozenset[str], tuple[int, float]] = {}
        """Pair → how often it has asked in a row, and when it did last."""

    @property
    def relays(self) -> Mapping[str, RelayInfo]:
        """Relays that are there, by name."""
        return self._relays

    def heard(self, name: str, info: RelayInfo, now: float) -> bool:
        """A relay has said hello; was it away before?"""
        new = name not in self._relays
        self._relays[name], self._seen_at[name] = info, now
        return new

    def remove(self, name: str) -> bool:
        """A relay is lost; False if it was not there."""
        return self._relays.pop(name, None) is not None

    def silent(self, now: float) -> list[str]:
        return [name for name in self._relays if now > self._seen_at[name] + RELAY_SILENT_S]

    def choose(self, a: str, b: str, now: float) -> str:
        """Where two nodes are to meet; empty if there is no relay."""
        pair = frozenset((a, b))
        count, last = self._attempts.get(pair, (0, -inf))
        count = count + 1 if now < last + SAME_ATTEMPT_S else 0
        self._attempts[pair] = count, now
        order = sorted(self._relays, key=lambda name: (self._relays[name].streams, name))
        return order[count % len(order)] if order else ""
