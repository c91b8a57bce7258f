"""Copies beside computing: the same bytes and bits as without, nothing is sent too early, and what is lost is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import copy_wait_s
from skippipe.codecs import CODECS, EncodedTensor, decode, encode
from skippipe.model_shape import MODELS
from skippipe.plan import Lane, Plan, Stage
from skippipe.runs.records import recorded_of
from skippipe.runtime import device_copies
from skippipe.runtime.coordinator.interfaces import IterationReport
from skippipe.runtime.device_copies import MOST_AHEAD, BackgroundCopies, DirectCopies
from skippipe.runtime.node.copies import TO_DEVICE, TO_HOST, Copy, MovingTensor, Outbox
from skippipe.runtime.node.ops import StageTask
from skippipe.training.metrics import TraceFiles
from skippipe.transport.message import Hop, Message
from skippipe.workload import Workload
from tests.helpers.executors import computer_of, gradient_of, noise
from tests.helpers.plans import uniform_cluster

torch.set_num_threads(1)
HOP = Hop(0, 0, 0, 1)


@pytest.mark.parametrize("codec", CODECS)
def test_bytes_and_values_are_those_of_a_copy_that_is_waited_for(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copies, "PIECE_BYTES", 256)
    values = torch.randn(3, 5, 100, generator=torch.Generator().manual_seed(0))
    direct, beside = DirectCopies(), BackgroundCopies("cpu")
    expected, found = direct.encode(values, codec), beside.encode(values, codec)
    assert isinstance(found, MovingTensor)
    found.wait()
    if not codec.endswith("stochastic"):
        assert bytes(found.data) == bytes(expected.data)
    assert (found.dtype, found.shape, found.nbytes) == (expected.dtype, expected.shape, expected.nbytes)
    came = EncodedTensor(codec, found.shape, bytes(found.data))
    for each in (came, beside.bring(came), found):
        assert torch.equal(beside.decode(each), decode(came))
        assert torch.equal(direct.decode(each), decode(came))


def test_a_task_gives_the_same_with_copies_beside_it() -> None:
    results = []
    for copies in (DirectCopies(), BackgroundCopies("cpu")):
        executor = computer_of(1, copies=copies)
        bodies = []
        for step, seed in ((1, 1), (5, 2)):
            given = executor.prefetch(encode(noise(seed), "fp32"))
            payload = executor.run(StageTask(0, 0, 0, step, 3, 0, given)).payload
            if isinstance(payload, MovingTensor):
                assert isinstance(given, MovingTensor)
                assert given.copy is not None
                payload.wait()
            bodies.append(bytes(payload.data))
        results.append((bodies, gradient_of(executor)))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


def test_few_tensors_are_on_the_device_before_their_tasks() -> None:
    copies, body = BackgroundCopies("cpu"), encode(torch.ones(4), "fp32")
    coming = [copies.bring(body) for _ in range(MOST_AHEAD + 1)]
    assert [isinstance(each, MovingTensor) for each in coming] == [True] * MOST_AHEAD + [False]
    copies._threads[TO_DEVICE].submit(len, ()).result(10)  # all have come, and no thread holds on to one
    coming.pop(0)
    found = copies.bring(body)
    assert isinstance(found, MovingTensor), "the place of one that was dropped"


def test_a_message_goes_out_when_its_tensor_has_been_copied() -> None:
    sent: list[tuple[int, Message]] = []
    woken: list[bool] = []
    outbox = Outbox(lambda to, message: sent.append((to, message)), lambda: woken.append(True))
    copy = Copy(TO_HOST)
    slow = Message(HOP, MovingTensor("fp32", (1,), bytes(4), copy=copy))
    quick = Message(HOP, EncodedTensor("fp32", (1,), bytes(4)))
    outbox.send(1, slow)
    outbox.send(2, quick)
    outbox.flush()
    assert sent == [(2, quick)]
    assert not woken
    copy.arrive()
    assert woken
    outbox.flush()
    outbox.send(3, slow)  # again, to another node
    assert sent == [(2, quick), (1, slow), (3, slow)]


def test_a_copy_that_fails_is_an_error_of_the_node() -> None:
    outbox = Outbox(lambda to, message: pytest.fail("sent"), lambda: None)
    copy = Copy(TO_HOST)
    outbox.send(1, Message(HOP, MovingTensor("fp32", (1,), bytes(4), copy=copy)))
    copy.fail(RuntimeError("the device is gone"))
    with pytest.raises(RuntimeError, match="gone"):
        outbox.flush()
    copies = BackgroundCopies("cpu")
    with pytest.raises(TypeError):
        copies.decode(copies.bring(EncodedTensor("fp32", (1,), None)))  # type: ignore[arg-type]


def test_copies_are_in_the_trace_beside_tasks(tmp_path: Path) -> None:
    stages = (Stage(6, (0,), (0,)), Stage(6, (1,), (1,)))
    plan = Plan(uniform_cluster(2), Workload(MODELS["llama-tiny"], 64, 1, 2), stages, (Lane((0, 1), 2),))
    tasks = {1: [[0, 0, 1, 0, 1_000, 9_000], [0, 1, 1, 0, 9_000, 20_000]]}
    copies = {
        1: [[0, 0, 1, TO_DEVICE, 500, 3_000], [0, 1, 1, TO_DEVICE, 2_000, 4_000], [0, 0, 1, TO_HOST, 9_000, 9_500]]
    }
    report = IterationReport(0, 1.0, 1.0, 1.0, 1.0, {}, tasks, plan=plan, copies=copies)
    assert copy_wait_s(report) == {1: pytest.approx(2e-6)}, "the first task was begun before its tensor was there"
    TraceFiles(tmp_path).iteration_done(report)
    (file,) = tmp_path.iterdir()
    trace = json.loads(file.read_text())
    found = [event for event in trace["traceEvents"] if event.get("cat") == "copy"]
    assert [(event["ts"], event["dur"]) for event in found] == [(0.5, 2.5), (2.0, 2.0), (9.0, 0.5)]
    assert len({event["tid"] for event in found}) == 2, "a row for each direction"
    assert len(recorded_of(trace, 0).measured) == 2, "readers of traces take tasks alone"
