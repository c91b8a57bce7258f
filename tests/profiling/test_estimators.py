"""What follows from the probes of a link and from the passes of a node."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skippipe.cost_model import cost_model_of
from skippipe.profiling.estimators import (
    SMALL_BYTES,
    STEADY,
    LinkProbe,
    ProbeSettings,
    estimate_link,
    estimate_node,
    spread,
)
from skippipe.profiling.results import ProfileResult, merge_results
from tests.helpers.profiling import QUICK, WORK


def probed(took_s: Callable[[int], float], effort: ProbeSettings = QUICK) -> LinkProbe:
    """All that is sent over a link, on which so many bytes take so long, there and back."""
    probing = LinkProbe(effort)
    while (size := probing.next_bytes()) is not None:
        probing.took(took_s(size))
    return probing


@given(st.floats(0, 0.5), st.floats(1e4, 1e9))
def test_a_link_is_what_it_takes(latency_s: float, bandwidth: float) -> None:
    probing = probed(lambda size: 2 * latency_s + size / bandwidth)
    found = estimate_link(probing.samples)
    assert found is not None
    assert found.latency_s == pytest.approx(latency_s, abs=SMALL_BYTES / bandwidth)
    assert found.bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=1e-3)
    largest, took_s = probing.samples[-1]
    assert largest <= QUICK.most_bytes
    assert took_s - 2 * latency_s > 0.5 * QUICK.transfer_s or largest == QUICK.most_bytes
    assert sum(size for size, _ in probing.samples) < 20 * max(largest, 2**14), "no more bytes than are needed"


def test_one_transfer_that_is_held_up_does_not_count() -> None:
    disturbed = iter([1.0] * 4 + [9.0] + [1.0] * 99)
    samples = probed(
        lambda size: 0.02 + size / 1e6 * (next(disturbed) if size > SMALL_BYTES else 1), replace(QUICK, transfers=5)
    ).samples
    found = estimate_link(samples)
    assert found is not None
    assert found.bandwidth_bytes_per_s == pytest.approx(1e6, rel=0.01)
    assert found.spread <= STEADY


def test_transfers_that_disagree_are_marked() -> None:
    speeds = itertools.cycle([1e6, 3e6, 2e6, 5e5])
    found = estimate_link(probed(lambda size: 0.02 + size / next(speeds), replace(QUICK, transfers=5)).samples)
    assert found is not None
    assert found.spread > STEADY


def test_a_slow_link_takes_no_longer_than_it_may() -> None:
    probing = probed(lambda size: 0.1 + size / 4000, replace(QUICK, transfers=50, most_s=10))
    assert sum(took_s for _, took_s in probing.samples) < 10 + 2 * 4.2
    assert estimate_link(probing.samples) is not None


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [[4.0, 0.1]],
        [[1e6, 1.0]],
        [[4.0, 0.1, 3.0], [1e6]],
        [[4.0, -1.0], [1e6, 1.0]],
        [[4.0, float("nan")], [1e6, 1.0]],
        [[4.0, 1e-300], [1e300, 1e-300]],
    ],
)
def test_too_little_is_no_figure(rows: list[list[float]]) -> None:
    assert estimate_link(rows) is None


def test_spread_is_that_of_the_middle_half() -> None:
    assert spread([3.0]) == spread([]) == 0
    assert spread([2.0, 2.0, 2.0, 2.0, 50.0]) == 0
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)


def test_the_planner_counts_on_what_a_layer_took() -> None:
    rows = [[0.02, 0.05], [0.02, 0.06], [9.0, 9.0]]
    figures = estimate_node(rows, "here", 2**30, WORK)
    assert (figures.forward_s, figures.backward_s) == (0.02, 0.06)
    cluster = merge_results([ProfileResult("", "", {"n0": figures}, {})], "one")
    costs = cost_model_of(cluster, WORK, (1, 1))
    assert (costs.forward_ns[0, 0] + costs.backward_ns[0, 0]) / 1e9 == pytest.approx(0.08)
