"""How a node measures the link to another: small round trips, then transfers that grow until one takes long enough,
then more of that size. A probe says what to send next and is told how long that took; it has no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SMALL_BYTES = 4  # of a message that takes nothing but latency
FIRST_BYTES = 2**14
GROWTH = 8.0  # from one amount to the next, at most
FEWEST = 3  # round trips, where each takes long
MOST = 5  # times as many as usual, where all of them together …
LITTLE_S = 0.3  # … take less than this
ENOUGH = 0.8  # of the time that a transfer is to take


@dataclass(frozen=True)
class ProbeSettings:
    """How thoroughly a link is measured, in one direction."""

    round_trips: int = 10
    transfers: int = 5
    """Transfers of the size that takes long enough."""
    transfer_s: float = 0.25
    """Seconds that one of them should take, beside the round trip."""
    most_bytes: int = 2**26
    """The largest transfer."""
    most_s: float = 15.0
    """Seconds for the whole probe; the transfer that runs then is the last."""
    patience_s: float = 20.0
    """Seconds to wait for one answer."""


@dataclass
class LinkProbe:
    effort: ProbeSettings
    samples: list[tuple[int, float]] = field(default_factory=list)
    """Bytes there and seconds there and back, of every message that was answered except the first."""
    _connected: bool = False
    _bytes: int = FIRST_BYTES
    _transfers_done: int = 0
    """Transfers of the final size."""
    _spent_s: float = 0.0

    def next_bytes(self) -> int | None:
        """Bytes to send next; None: the probe is over."""
        if self._more_round_trips:
            return SMALL_BYTES
        late = self._spent_s > self.effort.most_s
        return None if self._transfers_done >= (1 if late else self.effort.transfers) else self._bytes

    @property
    def _more_round_trips(self) -> bool:
        """Are more round trips needed? More of them where they are short: there, a small disturbance counts much."""
        trips, effort = len(self.samples), self.effort
        if trips and self.samples[-1][0] != SMALL_BYTES:
            return False
        least = FEWEST if 2 * self._spent_s > effort.most_s else effort.round_trips
        return trips < least or (trips < MOST * effort.round_trips and self._spent_s < LITTLE_S)

    def took(self, seconds: float) -> None:
        """The answer to what was sent came after so many seconds."""
        sent = self.next_bytes()
        self._spent_s += seconds
        if not self._connected:  # it waited for the connection
            self._connected = True
            self._spent_s = 0.0
        elif sent is not None:
            self.samples.append((sent, seconds))
            if sent != SMALL_BYTES:
                self._grow(seconds)

    def _grow(self, seconds: float) -> None:
        effort = self.effort
        beyond_s = seconds - min(each for sent, each in self.samples if sent == SMALL_BYTES)
        if self._transfers_done or self._bytes >= effort.most_bytes or beyond_s >= ENOUGH * effort.transfer_s:
            self._transfers_done += 1
            return
        factor = min(GROWTH, 1.2 * effort.transfer_s / max(beyond_s, 1e-9))
        self._bytes = min(effort.most_bytes, int(self._bytes * factor) // 4 * 4)
