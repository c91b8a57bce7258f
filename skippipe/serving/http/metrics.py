"""What is counted, as Prometheus reads it."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from skippipe.serving.engine_client import StageCoverage

BOUNDS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass
class Metrics:
    prompt_tokens: int = 0
    answer_tokens: int = 0
    in_flight: int = 0
    """Requests."""
    _requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Endpoint and status → how many."""
    _within: dict[str, list[int]] = field(default_factory=dict)
    """Endpoint → how many requests took up to each bound and no less than the one before; last, those beyond all."""
    _seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Endpoint → in all."""

    def answered(self, endpoint: str, status: int, took_s: float) -> None:
        self._requests[endpoint, status] += 1
        self._within.setdefault(endpoint, [0] * (len(BOUNDS_S) + 1))[bisect_left(BOUNDS_S, took_s)] += 1
        self._seconds[endpoint] += took_s

    def text(self, share: StageCoverage, figures: Mapping[str, float]) -> str:
        lines = [
            *_family("requests_total", "counter", "Requests by endpoint and status.", self._request_lines()),
            *_family("request_seconds", "histogram", "From a request to the end of its answer.", self._second_lines()),
            *_single("requests_in_flight", "gauge", "Requests that are being answered.", self.in_flight),
            *_single("prompt_tokens_total", "counter", "Tokens that were asked.", self.prompt_tokens),
            *_single("answer_tokens_total", "counter", "Tokens that were answered.", self.answer_tokens),
            *_single("stages", "gauge", "Stages of the model.", share.total),
            *_single("stages_there", "gauge", "Stages that somebody holds.", share.stages),
        ]
        for name, value in sorted(figures.items()):
            lines += _single(
                f"gateway_{name}", "counter" if name.endswith("_total") else "gauge", "Of the gateway.", value
            )
        return "\n".join(lines) + "\n"

    def _request_lines(self) -> Iterator[str]:
        for (endpoint, status), count in sorted(self._requests.items()):
            yield f'skippipe_requests_total{{endpoint="{endpoint}",status="{status}"}} {count}'

    def _second_lines(self) -> Iterator[str]:
        for endpoint, counts in sorted(self._within.items()):
            so_far = 0
            for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), counts, strict=True):
                so_far += count
                yield f'skippipe_request_seconds_bucket{{endpoint="{endpoint}",le="{bound}"}} {so_far}'
            yield f'skippipe_request_seconds_sum{{endpoint="{endpoint}"}} {self._seconds[endpoint]}'
            yield f'skippipe_request_seconds_count{{endpoint="{endpoint}"}} {so_far}'


def _single(name: str, kind: str, what: str, value: float) -> list[str]:
    return _family(name, kind, what, [f"skippipe_{name} {value}"])


def _family(name: str, kind: str, what: str, lines: Iterable[str]) -> list[str]:
    return [f"# HELP skippipe_{name} {what}", f"# TYPE skippipe_{name} {kind}", *lines]
