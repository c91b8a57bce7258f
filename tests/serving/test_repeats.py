"""Stages that take the place of missing ones, on nodes that serve: their memory, and their KV caches when nodes are
lost in the middle of answers."""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from skippipe.codecs import EncodedTensor, encode
from skippipe.inference.checkpoint_loader import CheckpointOutline, fingerprint, load, load_stage, read_outline
from skippipe.inference.engine import TokenByToken
from skippipe.inference.request import GenerationRequest, SamplingParams
from skippipe.model import spread_layers
from skippipe.model.spread_layers import weight_bytes
from skippipe.runtime.node.interfaces import JoinConfig
from skippipe.serving.executor import ServingExecutor
from skippipe.serving.node import ServingConfig, build_executor
from skippipe.serving.routing import ServingRoute
from skippipe.serving.scheduler import Scheduler, ServingSettings, ServingStep
from skippipe.serving.sequence import SequenceRequest, SequenceState
from skippipe.serving.step_protocol import (
    ForwardStep,
    FreeSlots,
    InputRow,
    NodeInfo,
    SampleTokens,
    StepInput,
    StepOutput,
    StepRefused,
    parse_step,
    step_messages,
)
from skippipe.stage_subset import StageSubset, Visits, hops_of
from tests.helpers.healed_folders import REPEATS, healed
from tests.helpers.model_folders import LAYERS, TOKENIZER, export_to
from tests.helpers.staged_models import output_tokens, prompts

torch.set_num_threads(1)
CACHE_TOKENS = 512
STAGES = (0, 1, 2)


@pytest.mark.parametrize("repeats", [True, False])
def test_a_node_counts_adapters_and_a_cache_for_every_turn(
    tmp_path: Path, repeats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it chooses its devices by is what it holds where all stages after its own are missing."""
    sizes: list[int] = []

    def noted(_device: str, needed_bytes: int, _first: int) -> list[str]:
        sizes.append(needed_bytes)
        return ["cpu"]

    monkeypatch.setattr(spread_layers, "inference_devices", noted)
    plain_bytes = [weight_bytes(stage) for stage in export_to(tmp_path / "plain")[1]]
    if repeats:
        healed(tmp_path / "model", REPEATS)
    else:
        export_to(tmp_path / "model")
    place = tmp_path / "model"
    config = ServingConfig(
        str(place),
        LAYERS,
        {"a": 0, "b": 1, "c": 2},
        TOKENIZER.size,
        fingerprint(place),
        wire_dtype="fp32",
        cache_tokens=CACHE_TOKENS,
    )
    rows = tuple(InputRow(slot, 0, CACHE_TOKENS // 8) for slot in range(8))
    for stage, path in enumerate([(0,), (0, 1), (0, 2)]):
        executor = build_executor(config, stage, JoinConfig("abc"[stage], "127.0.0.1:1"))
        step = StepInput(0, 1, path, rows, (), (), (), hops_of(path, 3)[stage])
        tokens = ((1,) * rows[0].count,) * len(rows)
        executor.run(ForwardStep(step, stage, encode(torch.zeros(CACHE_TOKENS, 32), "fp32") if stage else tokens))
        caches = executor._routes[1]._caches
        held = sum(each.nbytes for cache in caches for each in cache._tensors())
        assert sizes[stage] == weight_bytes(executor._model) + held
        assert len(caches) == (3 - stage if repeats else 1)
        assert (weight_bytes(executor._model) > plain_bytes[stage]) == repeats


class Cluster:
    """A scheduler and its nodes, one for each stage at first, which compute a step when they are told to."""

    def __init__(self, outline: CheckpointOutline) -> None:
        self.outline = outline
        self.started: deque[ServingStep] = deque()
        self.nodes: dict[int, ServingExecutor] = {}
        self.stages_of_token: dict[int, list[Visits]] = {}
        """Sequence → the stages by which each token of its answer was computed."""
        self.scheduler = Scheduler(
            len(STAGES),
            self,
            ServingSettings(
                max_sequences=2, max_prompt_tokens=7, cache_tokens=CACHE_TOKENS, grace=timedelta(), routes_per_head=3
            ),
        )
        for node in STAGES:
            self.join(node)

    def now_ns(self) -> int:
        return 0

    def start_step(self, step: ServingStep) -> None:
        self.started.append(step)

    def close_route(self, route: ServingRoute) -> None:
        self.started = deque(step for step in self.started if step.route is not route)
        for node in route.path:
            if node in self.nodes:
                self.nodes[node].run(FreeSlots(route.number))

    def probe_link(self, number: int, prober: int, peer: int) -> None: ...

    def updated(self, sequence: SequenceState) -> None: ...

    def join(self, node: int) -> None:
        """A node's number is that of its stage."""
        model = load_stage(self.outline, node)
        self.nodes[node] = ServingExecutor(node, model, cache_tokens=CACHE_TOKENS, wire_dtype="fp32")
        self.scheduler.node_joined(node, node)

    def kill(self, node: int) -> None:
        """While a step is half done: the nodes before it have computed their part."""
        del self.nodes[node]
        self.compute(self.started[0])
        self.scheduler.node_lost(node)

    def submit(self, requests: list[SequenceRequest]) -> list[SequenceState]:
        return [self.scheduler.submit(each) for each in requests]

    def run(self, steps: int | None = None) -> None:
        while self.started and steps != 0:
            step = self.started.popleft()
            before = {row.sequence.number: len(row.sequence.tokens) for row in step.rows}
            output = self.compute(step)
            assert output is not None
            self.scheduler.sampled(step.number, output.tokens, step.route.path[0])
            for row in step.rows:
                if len(row.sequence.tokens) > before[row.sequence.number]:
                    self.stages_of_token.setdefault(row.sequence.number, []).append(step.route.path)
            steps = None if steps is None else steps - 1

    def compute(self, step: ServingStep) -> StepOutput | None:
        """The next tokens; None: a node of the path is gone."""
        messages, given = step_messages(step), None
        for position, node in enumerate(step.route.path):
            if node not in self.nodes:
                return None
            told = self._told(messages[node], node)
            given = self.nodes[node].run(ForwardStep(told, position, given or told.tokens))
        first = step.route.path[0]
        output = self.nodes[first].run(SampleTokens(self._told(messages[first], first), given))
        assert isinstance(output, StepOutput)
        return output

    def _told(self, message: Any, node: int) -> StepInput:
        return parse_step(message, NodeInfo(node, len(STAGES), STAGES, TOKENIZER.size, CACHE_TOKENS))


def test_answers_go_on_as_on_the_stages_that_are_left(tmp_path: Path) -> None:
    """Every part of an answer is what a fresh generation on the same stages makes after the tokens before. Routes with
    different stages missing go through the same nodes at once."""
    healed(tmp_path, REPEATS)
    cluster, staged = Cluster(read_outline(tmp_path)), load(tmp_path)
    sampling = [SamplingParams(temperature=0), SamplingParams(temperature=0.9, seed=5)]
    asked = [SequenceRequest(each, 11, sampling=sampling[at % 2]) for at, each in enumerate(prompts(6))]
    sequences = cluster.submit(asked[:3])
    cluster.run(8)
    cluster.kill(1)  # stage 0 takes its place
    cluster.run(8)
    cluster.kill(2)  # stage 0 takes the place of both
    cluster.run(8)
    cluster.join(1)  # where stages 0 and 1 are left, stage 1 takes the place of stage 2
    sequences += cluster.submit(asked[3:5])
    cluster.run(8)
    cluster.join(2)
    sequences += cluster.submit(asked[5:])
    cluster.run()
    assert [len(each.output_tokens) for each in sequences] == [11] * 6
    seen, different = set[Visits](), set[Visits]()
    for sequence in sequences:
        request, tokens = sequence.request, list(sequence.request.prompt)
        for stages, group in groupby(cluster.stages_of_token[sequence.number]):
            count = len(list(group))
            again = GenerationRequest(tuple(tokens), count, request.sampling)
            expected, whole = (
                output_tokens(staged, TokenByToken(staged, StageSubset(each, 3), 100), [again])[0]
                for each in (stages, STAGES)
            )
            assert sequence.tokens[len(tokens) : len(tokens) + count] == expected, (sequence.number, stages)
            seen.add(stages)
            different |= {stages} if expected != whole else set()
            tokens += expected
    assert seen == {(0, 1, 2), (0, 2), (0,), (0, 1)}
    assert different == seen - {STAGES}, "stages that are missing make a difference"
    assert not any(node._routes for node in cluster.nodes.values()), "nothing is held for answers that have ended"


def test_a_route_that_goes_another_way_is_refused(tmp_path: Path) -> None:
    """Its caches are of the way before; the node goes on."""
    healed(tmp_path, REPEATS)
    executor = ServingExecutor(0, load_stage(read_outline(tmp_path), 0), cache_tokens=CACHE_TOKENS, wire_dtype="fp32")

    def run(path: Visits, start: int, count: int) -> Any:
        step = StepInput(0, 1, path, (InputRow(0, start, count),), (), (), (), hops_of(path, 3).get(0))
        return executor.run(ForwardStep(step, 0, ((5,) * count,)))

    whole, half = [run(STAGES, 0, 4), run(STAGES, 4, 1)], run((0, 2), 5, 1)
    assert half == StepRefused("route 1 goes another way than before", bad_input=False)
    executor.run(FreeSlots(1))
    assert isinstance(run((0, 2), 0, 4), EncodedTensor)
    executor.run(FreeSlots(1))
    assert [each.data for each in (run(STAGES, 0, 4), run(STAGES, 4, 1))] == [each.data for each in whole]
