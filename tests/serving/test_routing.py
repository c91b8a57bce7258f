"""Broken links: when they are probed, and which answers count."""

from __future__ import annotations

from math import inf

from skippipe.serving.routing import LinkProbe, LinkStates, UniformCost


def test_a_broken_link_is_used_again_when_its_newest_probe_came_through() -> None:
    links = LinkStates(UniformCost())
    links.broken(5, 4, inf)
    assert links.due_probes(10**18) == [], "nothing has changed"
    links.retry(4, 5)
    links.retry(3, 5)  # which is not broken
    assert links.due_probes(0) == [LinkProbe(1, 4, 5)]
    assert links.due_probes(int(59e9)) == []
    assert links.due_probes(int(60e9)) == [LinkProbe(2, 4, 5)]
    assert links.due_probes(int(179e9)) == []
    for number, node in ((1, 4), (2, 5), (3, 4)):
        assert links.probed(number, node) is None, "not the newest one, or of another node"
    assert links.hop_s(4, 5) == inf
    assert links.probed(2, 4) == LinkProbe(2, 4, 5)
    links.broken(4, 5, inf)
    assert links.probed(2, 4) is None, "it broke after that"
    links.mended(4, 5)
    assert links.hop_s(4, 5) == 1


def test_a_node_that_comes_again_may_be_elsewhere() -> None:
    links = LinkStates(UniformCost())
    links.broken(4, 5, 0)
    links.broken(4, 6, 0)
    assert len(links.due_probes(0)) == 2
    links.node_joined(5)
    assert links.hop_s(4, 5) == 1
    assert [links.probed(number, 4) for number in (1, 2)] == [None, LinkProbe(2, 4, 6)]
    assert links.due_probes(int(60e9)) == [LinkProbe(3, 4, 6)]
