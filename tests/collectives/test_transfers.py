"""The transfers of averaging, as the planner lists them, are those of the schedules that nodes follow."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

from skippipe.collectives.transfers import Columns, columns_of_ring, columns_of_schedule, columns_of_stars
from tests.helpers.plans import ALL_AVERAGING_KINDS, averaging_of


def without_joins(columns: Columns) -> list[tuple[int, int]]:
    """Each transfer with each that waits for it."""
    transfers, found = len(columns.own), []
    before, after = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for here, there in columns.pairs.tolist():
        after[here].append(there)
        before[there].append(here)
    for number, waits_for in enumerate([*columns.missing.tolist(), *columns.joins.tolist()]):
        assert len(before[number]) == waits_for
    for number in range(transfers):
        if any(each >= transfers for each in after[number]):
            (join,) = after[number]  # it leads to nothing else
            found += [(number, each) for each in after[join]]
        else:
            found += [(number, each) for each in after[number]]
    return found


@pytest.mark.parametrize("kind", ["direct exchange", "direct exchange with relays"])
@pytest.mark.parametrize("seed", range(20))
def test_an_exchange_has_the_same_transfers_in_both_ways(seed: int, kind: str) -> None:
    averaging = averaging_of(seed, kind, 2 + seed % 6)
    quick, general = columns_of_stars(averaging), columns_of_schedule(averaging)
    for mine, theirs in zip(quick[:7], general[:7], strict=True):
        assert mine.tolist() == theirs.tolist()
    assert sorted(without_joins(quick)) == sorted(without_joins(general))
    assert len(quick.own) == 2 * (len(averaging.order) - 1) * len(averaging.pieces) + len(averaging.schedule.forwarded)


@pytest.mark.parametrize("size", range(2, 12))
def test_a_ring_has_the_same_transfers_in_both_ways(size: int) -> None:
    averaging = averaging_of(size, "ring", size)
    for mine, theirs in zip(columns_of_ring(averaging), columns_of_schedule(averaging), strict=True):
        assert mine.tolist() == theirs.tolist()


@pytest.mark.parametrize("kind", ALL_AVERAGING_KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_links_carry_what_the_transfers_of_the_schedule_add_up_to(seed: int, kind: str) -> None:
    averaging = averaging_of(seed, kind, 2 + seed)
    sizes, nodes = averaging.piece_bytes(10_007), averaging.nodes
    expected = Counter[tuple[int, int]]()
    for each in averaging.schedule.transfers:
        expected[nodes[each.sender], nodes[each.receiver]] += sizes[each.piece]
    assert averaging.link_bytes(10_007) == expected
    assert averaging.links == set(expected)
