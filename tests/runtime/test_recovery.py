"""Training that goes on: real nodes are killed, frozen, cut off and spoiled, and the run gets to its end all the same.

Every run is checked for what must always hold (`chaos.Outcome.check`): all iterations, each once, with the microbatches
that it should have; a model that transformers loads; no process and no open port is left. Each test adds what is
special about it. Nine nodes: stage 0 on 0, 1 and 2, stage 1 on 3 and 4, stage 2 on 5 alone, stage 3 on 6, 7 and 8.

What also happens under virtual time, with the same coordinator and nodes, and is not about processes, sockets or files
is `slow` here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skippipe.checkpoint.format import Checkpoints
from skippipe.runtime.simulation.fault_injection import RELAY, Fault, cut, freeze, kill, kill_coordinator, poison
from tests.helpers.chaos import HEARTBEAT_S, ONLY, Chaos, Outcome, RunSetup

Play = Callable[..., Outcome]
STEP_S = 0.1


@pytest.fixture(scope="module")
def run_setup(tmp_path_factory: pytest.TempPathFactory) -> RunSetup:
    return RunSetup.made(tmp_path_factory.mktemp("run_setup"))


@pytest.fixture
def play(run_setup: RunSetup, tmp_path: Path) -> Play:
    def played(
        *faults: Fault,
        iterations: int,
        build_s: float = 0.0,
        full_disk: int | None = None,
        joined: bool = False,
        **choices: Any,
    ) -> Outcome:
        chaos = Chaos(
            run_setup,
            tmp_path / "scene",
            faults,
            iterations,
            joined=joined,
            step_s=STEP_S,
            build_s=build_s,
            full_disk=full_disk,
            choices=choices,
        )
        outcome = chaos.run()
        outcome.check()
        return outcome

    return played


def assert_struck(outcome: Outcome) -> None:
    assert None not in outcome.strikes, outcome.timeline()


@pytest.mark.slow  # test_run.py: one is killed, and started again; test_reroute.py, test_virtual_chaos.py: in any phase
def test_a_data_node_in_its_head_then_a_middle_node_in_its_backward(play: Play) -> None:
    outcome = play(
        kill(node=0).at(iteration=1, during="head").back_after(0.2),
        kill(node=3).at(iteration=5, during="backward").back_after(0.2),
        iterations=9,
    )
    assert_struck(outcome)
    for node in (0, 3):
        assert "signal 9" in outcome.said("lost", node)[0]
        assert outcome.said("rerouted", node), "their microbatches go on another way"
        assert outcome.said("joined", node), "they are started again"
    assert outcome.said("recovered", 0), outcome.timeline()
    assert not outcome.said("restarted"), "no iteration is begun again"


@pytest.mark.slow  # test_virtual_chaos.py, test_checkpoint.py
def test_the_last_replica_comes_back_to_a_checkpoint(play: Play) -> None:
    outcome = play(kill(ONLY).at(iteration=3, during="forward").back_after(0.2), iterations=12, kept_every=2)
    assert_struck(outcome)
    assert any("from the newest checkpoint" in text for text in outcome.said("recovering")), outcome.timeline()
    assert any("a stage is left out" in text for text in outcome.said("rerouted", ONLY))
    assert outcome.metrics[3]["visits"][2] == 0, "nobody had a gradient for it"
    assert outcome.metrics[-1]["visits"][2] > 0, "it is visited again"


@pytest.mark.slow  # test_state_transfer.py: the mean of neighbours; test_coordinator.py, test_virtual_chaos.py
def test_the_last_replica_is_rebuilt_from_its_neighbours(play: Play) -> None:
    outcome = play(kill(ONLY).at(iteration=2, during="backward").back_after(0.2), iterations=12)
    assert_struck(outcome)
    assert any("from its neighbours" in text for text in outcome.said("recovering")), outcome.timeline()
    assert outcome.metrics[-1]["visits"][2] > 0, "it is visited again"


@pytest.mark.slow  # test_embedding_backup.py: bit for bit, and what the coordinator does
def test_all_data_nodes_are_lost_and_their_embedding_comes_from_a_copy(play: Play) -> None:
    outcome = play(*(kill(node).at(iteration=4, during="forward").back_after(0.2) for node in (0, 1, 2)), iterations=8)
    assert_struck(outcome)
    assert any("head from the backup on" in text for text in outcome.said("recovering")), outcome.timeline()


@pytest.mark.slow  # test_averaging.py, test_virtual_chaos.py
def test_a_node_in_averaging_then_one_with_a_copy_for_a_checkpoint(play: Play) -> None:
    outcome = play(
        kill(node=7).at(iteration=1, during="averaging"),
        kill(ONLY).at(iteration=3, during="checkpoint").back_after(0.1),
        iterations=12,
        kept_every=2,
    )
    assert_struck(outcome)
    assert outcome.said("rerouted", 7), outcome.timeline()
    assert outcome.said("lost", ONLY)
    assert any("given up" in text for text in outcome.said("checkpoint"))
    kept = Checkpoints(Path(outcome.scene.job.output) / "checkpoints").complete()
    assert [place.name for place in kept] == ["000012", "000010"], "later ones are made"


@pytest.mark.slow  # test_virtual_chaos.py: its faults strike while nodes join, too
def test_one_that_is_killed_while_it_learns_learns_again(play: Play) -> None:
    outcome = play(
        kill(node=8).at(iteration=1, during="forward").back_after(0.1),
        kill(node=8).at(iteration=2, during="joining").back_after(0.1),
        iterations=10,
    )
    assert_struck(outcome)
    assert len(outcome.said("joined", 8)) == 2, outcome.timeline()
    assert len(outcome.said("lost", 8)) == 2
    assert len(outcome.said("recovered", 8)) == 1


@pytest.mark.slow  # test_fencing.py, test_virtual_chaos.py
def test_a_frozen_node_starts_over(play: Play) -> None:
    outcome = play(freeze(node=8).at(iteration=1, during="forward").back_after(1.5), iterations=13)
    assert_struck(outcome)
    assert outcome.said("lost", 8) == ["no heartbeat for 1 s"], outcome.timeline()
    assert outcome.said("joined", 8), "when it was thawed"


@pytest.mark.slow  # the next one: links that are cut without a word, which takes more to notice
def test_a_cut_link_is_done_without(play: Play) -> None:
    fault = cut(0, 4).at(iteration=1, during="forward").back_after(30)  # while the plan is the one that uses it
    outcome = play(fault, iterations=8)
    assert_struck(outcome)
    assert outcome.said("link-down"), outcome.timeline()
    assert not outcome.said("lost", 0)
    assert not outcome.said("lost", 4)


@pytest.mark.slow  # test_fencing.py, test_reroute.py
def test_a_link_that_is_cut_without_a_word_is_done_without(play: Play) -> None:
    outcome = play(
        cut(0, 4, one_way=True, silent=True).at(iteration=1, during="forward").back_after(30),
        cut(6, 7, silent=True).at(iteration=6, during="averaging").back_after(30),
        iterations=9,
        build_s=1.5 * HEARTBEAT_S,  # they speak meanwhile, or all would be gone
    )
    assert_struck(outcome)
    assert outcome.said("link-down", 0) == ["cannot reach 'n4'"], outcome.timeline()
    assert outcome.said("link-down", 6) or outcome.said("link-down", 7), outcome.timeline()
    assert not [text for text in outcome.said("restarted") if "waited" in text], "it is known before patience ends"
    assert not outcome.said("slow"), "who waits for a link is not slow"
    gone = [event["node"] for event in outcome.events if event["kind"] == "lost"]
    assert len(gone) <= 1, "one of the two who cannot average any more"
    assert set(gone) <= {"n6", "n7"}


@pytest.mark.slow  # test_virtual_chaos.py: its faults strike several nodes at once, and for good
def test_two_at_once_for_good(play: Play) -> None:
    outcome = play(
        kill(node=1).at(iteration=2, during="forward"),
        kill(node=4).at(iteration=2, during="forward"),
        iterations=6,
    )
    assert_struck(outcome)
    assert outcome.said("lost", 1)
    assert outcome.said("lost", 4)
    assert any("7 nodes take microbatches" in text for text in outcome.said("replanned")), outcome.timeline()


def test_the_coordinator_is_killed_and_started_again_elsewhere(play: Play) -> None:
    outcome = play(kill_coordinator().at(iteration=3, during="backward").back_after(0.3), iterations=6, joined=True)
    assert_struck(outcome)
    assert any("9 nodes are where they were" in text for text in outcome.said("coordinator-restarted")), (
        outcome.timeline()
    )
    assert not outcome.said("recovering"), "nobody has lost anything"


@pytest.mark.slow  # test_coordinator.py, test_virtual_chaos.py: gradients; test_run.py, test_storage.py: full disks
def test_a_spoiled_gradient_is_left_out_and_a_full_disk_costs_a_checkpoint(play: Play) -> None:
    outcome = play(
        poison(node=6).at(iteration=1, during="backward"),
        full_disk=9,
        iterations=10,
        kept_every=3,
    )
    assert_struck(outcome)
    assert any("stage 3" in text for text in outcome.said("not-finite")), outcome.timeline()
    spoiled = [row["iteration"] for row in outcome.metrics if row["visits"][3] < row["visits"][1]]
    assert spoiled == [1], "what the others have made counts"
    kept = Checkpoints(Path(outcome.scene.job.output) / "checkpoints").complete()
    assert [place.name for place in kept] == ["000010", "000003"], "while the disk was full, none was made"


@pytest.mark.slow
def test_a_relay_that_is_killed_and_comes_back(run_setup: RunSetup, tmp_path: Path) -> None:
    """Four of nine nodes cannot be called, and meet there: nobody is evicted for that."""
    fault = kill(RELAY).at(iteration=2).back_after(0.5)
    chaos = Chaos(run_setup, tmp_path / "scene", [fault], 6, out_only=frozenset({1, 2, 6, 7}), relay=True)
    outcome = chaos.run()
    outcome.check()
    assert_struck(outcome)
    assert outcome.said("lost") == ["relay 'hub'"], outcome.timeline()
    assert len([text for text in outcome.said("joined") if text.startswith("relay")]) == 2, outcome.timeline()
