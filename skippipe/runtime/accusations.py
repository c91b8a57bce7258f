"""Who says that it cannot reach whom, and what that costs whoever says it.

That a link is down only its two ends can tell, and either may be wrong or lie. So a word about a link is believed, but
not for ever: whoever has work begun again over links to nodes that nobody else complains of is itself badly connected,
or worse. After a few such complaints it is the one that leaves, and it takes part again only after a while, which is
longer each time.
"""

from __future__ import annotations

from collections.abc import Iterator

MOST_BELIEVED = 2  # complaints of one node that cost the others work; with the next it leaves
REMEMBERED_NS = 600 * 10**9  # how long a complaint counts
FIRST_BAR_NS = 60 * 10**9  # that a node is left out for
LONGEST_BAR_NS = 480 * 10**9  # less than a run waits for nodes to join


class Accusations:
    def __init__(self) -> None:
        self._said: dict[tuple[int, int], int] = {}
        """Who complains of whom → when it last did."""
        self._cost: dict[tuple[int, int], int] = {}
        """The same → when that last cost the others work."""
        self._bars: dict[int, tuple[int, int]] = {}
        """Node → until when it is left out, and for how long it was."""

    def hear(self, accuser: int, accused: int, now_ns: int) -> None:
        self._said[accuser, accused] = now_ns

    def is_shared(self, accuser: int, accused: int, now_ns: int) -> bool:
        """Does anybody else complain of that node?"""
        return any(other != accuser for other, whom in self._recent(self._said, now_ns) if whom == accused)

    def charge(self, accuser: int, accused: int, now_ns: int) -> list[int]:
        """The others lose work if this is believed: of whom the accuser has complained at that price, and nobody
        else."""
        self._cost[accuser, accused] = now_ns
        charged = [whom for who, whom in self._recent(self._cost, now_ns) if who == accuser]
        return sorted(whom for whom in charged if not self.is_shared(accuser, whom, now_ns))

    def bar(self, node: int, now_ns: int) -> int:
        """Leave a node out for a while, and forget what it said; for how many nanoseconds."""
        _, span_ns = self._bars.get(node, (0, FIRST_BAR_NS // 2))
        span_ns = min(2 * span_ns, LONGEST_BAR_NS)
        self._bars[node] = now_ns + span_ns, span_ns
        for book in (self._said, self._cost):
            for pair in [pair for pair in book if pair[0] == node]:
                del book[pair]
        return span_ns

    def is_barred(self, node: int, now_ns: int) -> bool:
        return self._bars.get(node, (0, 0))[0] > now_ns

    @staticmethod
    def _recent(book: dict[tuple[int, int], int], now_ns: int) -> Iterator[tuple[int, int]]:
        return (pair for pair, at_ns in book.items() if at_ns + REMEMBERED_NS > now_ns)
