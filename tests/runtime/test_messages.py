"""Control messages on the wire: what is written is what is read."""

from __future__ import annotations

import pytest

from skippipe.errors import UserError
from skippipe.runtime.message_json import from_json, to_json
from skippipe.runtime.messages import (
    COORDINATOR,
    Average,
    Averaged,
    BackupRequest,
    BackupStored,
    Begin,
    Commit,
    ControlMessage,
    Devices,
    Drain,
    DrainAck,
    Failed,
    FetchBackup,
    GatherState,
    Heartbeat,
    Hello,
    LinkDown,
    MakeBackup,
    MicrobatchDone,
    NewPlan,
    PeerUpdate,
    Ready,
    Recover,
    Recovered,
    Reroute,
    StateDigest,
    StateRequest,
    Stepped,
    Stop,
    Welcome,
)
from skippipe.runtime.state_source import StateSource


@pytest.mark.parametrize(
    "control",
    [
        Hello("[::1]:5", "1.0"),
        Hello("[::1]:5", "1.0", 3, 4, "RUNNING"),
        Welcome({"plan": {"deep": [1]}}, {"n0": ["127.0.0.1:1", None]}, StateSource("replica", (3,), (1,), (1.0,), 4)),
        PeerUpdate({"n0": ["127.0.0.1:1", None]}),
        Ready(),
        Heartbeat("averaging", 1.5),
        Begin(3, 2, True),
        MicrobatchDone(2, 1, 0, 1, float("nan")),
        DrainAck(2, 5, [[0, 1], [1, 0]]),
        Averaged(2, 1, float("inf"), [[0, 1]], [[0, 1, 2, 3, 4, 5]], [[1, 10**12]], [[0, 2, 99]], [[1.0, -0.5]]),
        Recover(StateSource("checkpoint", (COORDINATOR,), (1,), (1.0,), 4), 6),
        Recovered(2, 0),
        LinkDown(4),
        StateRequest(0, 2**40, 5, 6),
        StateDigest(2**40, "ab12", 6),
        BackupRequest(4, 2**40, 5, 6),
        MakeBackup(4),
        BackupStored(4),
        FetchBackup(0, 4),
        Reroute(2, 3, [4], [[0, 1, 0, 2, 5]], [[0, 1]]),
        Drain(2, 3, True),
        Average(2, 3, [4, 4, 3]),
        NewPlan({"lanes": []}),
        Commit(3, 1e-4, 0.5, wait=True, snapshot=True),
        GatherState(0, from_snapshot=False, collection=6),
        Stepped(4),
        Stop(""),
        Stop("the run was ended", again=True),
        Failed("über 5 GB"),
    ],
    ids=lambda control: type(control).__name__,
)
def test_control_there_and_back(control: ControlMessage) -> None:
    assert repr(from_json(to_json(control))) == repr(control)  # a NaN is no other's equal


def test_reasons_of_many_lines_arrive_in_one() -> None:
    assert from_json(to_json(Failed("one\ntwo\x1b[2J"))) == Failed("one two [2J")


def test_names_of_fields_on_the_wire_stay() -> None:
    assert [to_json(each)["visits"] for each in (DrainAck(2, 5, [[0, 1]]), Average(2, 3, [4]))] == [[[0, 1]], [4]]


@pytest.mark.parametrize("working", [0, 65, 2**53])
def test_devices_as_no_node_has_them_are_no_message(working: int) -> None:
    """A plan for such a node would end the run."""
    with pytest.raises(UserError, match=r"message\.working: expected int [<>]= \d+, found "):
        from_json(to_json(Devices(working, "it is hot", 1)))
