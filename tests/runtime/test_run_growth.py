"""How a coordinator ends a run whose model is to grow."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from msgspec import structs

from skippipe.runtime.coordinator.interfaces import CoordinatorState
from skippipe.runtime.coordinator.settings import CoordinatorSettings, Deadlines
from skippipe.runtime.coordinator.state_machine import Coordinator
from skippipe.runtime.fencing import first_id
from skippipe.runtime.messages import Failed, Ready, Stepped, Stop
from tests.helpers.single_coordinator import (
    HELLO,
    CoordinatorHarness,
    RecordingEnv,
    RecordingStore,
    coordinating,
    gathering,
    is_now,
    send_all,
)
from tests.helpers.single_node import LEARNING, small_plan


def growing(store: RecordingStore, **others: Any) -> CoordinatorHarness:
    """After the last iteration of the smaller model, nodes are asked for a checkpoint of it."""
    return gathering(3, checkpoint_every=2, store=store, grows=True, **others)


def test_a_model_that_grows_needs_its_last_checkpoint_and_no_weights() -> None:
    store = RecordingStore()
    harness = growing(store)
    send_all(harness, 0, 2, 3, kept=True)
    assert store.done == [(2, (2, 2, 2))], "of an earlier iteration"
    assert not harness.coordinator.over
    send_all(harness, 0, 2, 3, kept=True)
    assert store.done[1:] == [(3, (3, 3, 3))]
    assert is_now(harness.coordinator, CoordinatorState.DONE)
    assert harness.coordinator.has_grown
    assert harness.env.stored == []
    assert harness.env.wal[-1] == {"grown": 2}
    again = Stop("the model grows", again=True)
    assert all(controls[-1] == again for controls in harness.env.new_messages().values())
    assert sorted(harness.env.logged("disconnect")) == [(node,) for node in range(6)]
    other = Coordinator(small_plan(), CoordinatorSettings(LEARNING, 9), harness.env, harness.env, first_term=4)
    assert other.term == 4 and harness.env.wal[-1] == {"term": 4}, "so nodes know it for a newer one"
    assert other._commits.current.first_epoch == first_id(4), "and what comes late of the former is of an epoch before"


def test_nodes_keep_their_state_until_the_checkpoint_is_on_disk() -> None:
    store = RecordingStore(lacking="no space left")
    harness = growing(store, deadlines=Deadlines(disk_space=timedelta(seconds=90), gather=timedelta(seconds=7)))
    for _ in range(2):
        send_all(harness, 0, 2, 3, kept=True)
    harness.wait(20)
    assert is_now(harness.coordinator, CoordinatorState.GATHERING)
    assert [event.kind for event in harness.env.events].count("storage") == 1
    send_all(harness, 0, 2, 3, kept=True)
    assert not harness.coordinator.over, "there still is no room"
    store.lacking = ""
    harness.wait(3)
    harness.coordinator.node_lost(5, "its process ended")
    send_all(harness, 0, 2, 3, kept=True)
    assert harness.coordinator.has_grown
    assert store.moved == 0
    texts = [event.text for event in harness.env.events if event.kind == "storage"]
    assert "the checkpoint from which the model grows cannot be written: no space left" in texts[0]
    assert texts[1:] == ["the model can be written again"]


def test_without_room_for_that_checkpoint_nodes_are_left_where_they_are() -> None:
    store = RecordingStore(lacking="no space left")
    harness = growing(store, deadlines=Deadlines(disk_space=timedelta(seconds=30)))
    for _ in range(2):
        send_all(harness, 0, 2, 3, kept=True)
    harness.env.new_messages()
    harness.wait(40)
    assert "waited 30 s for disk space; make room, and go on with --resume" in harness.coordinator.failure
    sent = [control for controls in harness.env.new_messages().values() for control in controls]
    assert not any(isinstance(control, Stop) for control in sent)


@pytest.mark.parametrize("lacking", ["", "no space left"])
def test_a_run_that_is_stopped_does_not_grow(lacking: str) -> None:
    store = RecordingStore(lacking=lacking)
    harness = growing(store)
    send_all(harness, 0, 2, 3, kept=True)
    if lacking:
        send_all(harness, 0, 2, 3, kept=True)
    harness.coordinator.on_stop_requests(2)
    send_all(harness, 0, 2, 3, kept=False)
    assert is_now(harness.coordinator, CoordinatorState.DONE)
    assert not harness.coordinator.has_grown
    assert {stage for stage, *_ in harness.env.stored} == {0, 1, 2}
    harness = coordinating(3, checkpoint_every=2, store=RecordingStore(), grows=True)
    harness.coordinator.on_stop_requests(1)
    harness.iterate()
    for node in range(6):
        harness.send(node, Stepped(0))
    send_all(harness, 0, 2, 3, kept=True)
    send_all(harness, 0, 2, 3, kept=False)
    assert harness.env.wal[-1] == {"done": 0}
    assert not harness.coordinator.has_grown


@pytest.mark.parametrize("state", ["stepping", "gathering"])
def test_the_last_checkpoint_is_completed_if_the_run_is_to_stop(state: str) -> None:
    store = RecordingStore()
    harness = coordinating(3, checkpoint_every=50, store=store, grows=True)
    harness.iterate(3)
    nodes = range(6) if state == "gathering" else range(5)
    for node in nodes:
        harness.send(node, Stepped(2))
    harness.coordinator.on_stop_requests(1)
    assert not harness.coordinator.over
    harness.send(5, Stepped(2))
    send_all(harness, 0, 2, 3, kept=True)
    assert store.done == [(3, (3, 3, 3))]
    send_all(harness, 0, 2, 3, kept=False)
    assert is_now(harness.coordinator, CoordinatorState.DONE)
    assert not harness.coordinator.has_grown
    assert {stage for stage, *_ in harness.env.stored} == {0, 1, 2}


def test_a_node_that_fails_when_it_begins_anew_does_not_end_the_run() -> None:
    env = RecordingEnv(checkpoint_store=RecordingStore(made=3))
    settings = CoordinatorSettings(LEARNING, 9, resumed_from=3, nodes_are_there=True)
    harness = CoordinatorHarness(Coordinator(small_plan(), settings, env, env, first_term=1), env)
    harness.send(0, structs.replace(HELLO, version="0.0.0"))
    for node in range(6):
        harness.send(node, HELLO)
    assert is_now(harness.coordinator, CoordinatorState.PREPARING)
    harness.send(1, Failed("no memory is left"))
    for node in (0, 2, 3, 4, 5):
        harness.send(node, Ready())
    assert is_now(harness.coordinator, CoordinatorState.TRAINING)
    assert [(event.kind, event.node) for event in env.events][:2] == [("refused", "n0"), ("lost", "n1")]
