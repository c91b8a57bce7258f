"""Who is measured with whom, and when: a round-robin tournament.

The circle method: one stays where it is, the others move on by a place from round to round, and whoever faces each
other is measured. n nodes take n − 1 rounds, or n if n is odd: then one of them rests in each.
"""

from __future__ import annotations

Match = tuple[int, int]
"""Two nodes, measured in this direction first and then in the other."""


def rounds(nodes: int) -> list[list[Match]]:
    """Every two nodes once, nobody twice in a round."""
    places = nodes + nodes % 2  # with an odd number, whoever faces the last place rests
    circle = list(range(places))
    found = []
    for turn in range(places - 1):
        pairs = [(circle[at], circle[-1 - at]) for at in range(places // 2)]
        swapped = [pair[::-1] if turn % 2 else pair for pair in pairs]  # nobody is always the first
        found.append([(a, b) for a, b in swapped if a < nodes and b < nodes])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return [matches for matches in found if matches]
