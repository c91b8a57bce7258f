"""Tensors that came before the step they are of was told: kept for a while, so much from each sender."""

from __future__ import annotations

from typing import Any

MOST = 256
MOST_BYTES = 2**28


class Early:
    def __init__(self) -> None:
        self._kept: dict[int, dict[tuple[int, int], Any]] = {}
        """Sender → step and place on its path → what came, the oldest first."""

    def put(self, sender: int, key: tuple[int, int], body: Any) -> None:
        """Steps that are given up are never told: what is too much, the oldest makes room for."""
        kept = self._kept.setdefault(sender, {})
        kept.pop(key, None)
        kept[key] = body
        while len(kept) > 1 and (len(kept) > MOST or sum(map(_bytes, kept.values())) > MOST_BYTES):
            del kept[next(iter(kept))]

    def take(self, sender: int, key: tuple[int, int]) -> Any:
        """None: it has not come."""
        return self._kept.get(sender, {}).pop(key, None)

    def clear(self) -> None:
        self._kept.clear()


def _bytes(body: Any) -> int:
    return int(getattr(body, "nbytes", 0))
