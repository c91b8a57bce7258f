"""Random faults under virtual time: whatever goes wrong, training gets to its end and nothing is lost or counted twice.

`python -m benchmarks.chaos virtual` plays many more; a seed that fails here or there can be played again with --only.
"""

from __future__ import annotations

import pytest

from tests.helpers.fault_scenarios import scenario
from tests.helpers.virtual_chaos import play, staged

pytestmark = pytest.mark.usefixtures("quiet_nodes")
BLOCK = 5
ONCE_FAILED = {
    349: "a node gets another stage while a task of the one before runs",
    1035: "every node is gone while a stage is assigned",
    5331: "the coordinator is restarted after the last step, which a node has taken meanwhile",
    7205: "the only node that holds stage 0 says that it cannot reach those who fetch it",
    50229: "a node builds a lost stage by a plan in which no lane visits it, and which has a teacher",
}


@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.slow) for block in range(1, 100))])
def test_any_few_faults_are_survived(block: int) -> None:
    failed = []
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        played = staged(scenario(seed))
        try:
            play(played)
        except Exception as error:
            failed.append(f"{type(error).__name__}: {error}\n{played.timeline()}")
    assert not failed, f"{len(failed)} of {BLOCK}, the first:\n{failed[0]}"


@pytest.mark.parametrize("seed", ONCE_FAILED)
def test_what_once_was_not_survived_is_survived(seed: int) -> None:
    play(staged(scenario(seed)))


def test_a_seed_is_the_whole_story() -> None:
    tales = []
    for seed in (1, 2):
        played = [play(staged(scenario(seed))) for _ in range(2)]
        tales.append({each.timeline() for each in played})
        assert played[0].cluster.reports == played[1].cluster.reports
        assert played[0].cluster.wal == played[1].cluster.wal
    assert all(len(each) == 1 for each in tales)
