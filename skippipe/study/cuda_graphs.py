"""Passes recorded as CUDA graphs and replayed: small models are otherwise held up by Python, not by the card."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

MOST_SHAPES = 32  # recorded; what comes in ever new shapes is not worth it
WARM_UP = 3  # passes of a shape before it is recorded: they compile, and libraries allocate their memory
Given = tuple[Tensor, ...]
Passes = Callable[..., Tensor]


class GraphCache:
    """CUDA graphs of passes, one for every shape; inputs are copied to the tensors that they were recorded with."""

    def __init__(self, device: str) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # one for all: autograd remembers it
        self._seen: Counter[Hashable] = Counter()
        self._recorded: dict[Hashable, tuple[Any, Given, Tensor]] = {}

    def run(self, shape: Hashable, passes: Passes, given: Given) -> Tensor:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            loss = self._run(shape, passes, given)
        torch.cuda.current_stream().wait_stream(self._stream)
        return loss

    def _run(self, shape: Hashable, passes: Passes, given: Given) -> Tensor:
        self._seen[shape] += 1
        if shape not in self._recorded:
            if self._seen[shape] <= WARM_UP or len(self._recorded) >= MOST_SHAPES:
                for each in given:
                    each.record_stream(self._stream)
                return passes(shape, *given)
            self._record(shape, passes, given)
        graph, places, loss = self._recorded[shape]
        for place, each in zip(places, given, strict=True):
            place.copy_(each)
        graph.replay()
        return loss.clone()

    def _record(self, shape: Hashable, passes: Passes, given: Given) -> None:
        places = tuple(each.clone() for each in given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            loss = passes(shape, *places)
        self._recorded[shape] = graph, places, loss
