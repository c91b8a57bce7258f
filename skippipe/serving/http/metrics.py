"""The server's metrics, as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from skippipe.serving.engine_client import EngineClient

BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics(Collector):
    """Counts of the HTTP server, and the engine's at the moment they are read."""

    def __init__(self, engine: EngineClient) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._engine = engine
        self.registry = own = CollectorRegistry()
        labels = ["endpoint", "status"]
        self.requests = Counter("skippipe_requests", "Requests by endpoint and status.", labels, registry=own)
        self.seconds = Histogram(
            "skippipe_request_seconds",
            "From a request to the end of its answer.",
            labels[:1],
            registry=own,
            buckets=BUCKETS_S,
        )
        self.in_flight = Gauge("skippipe_requests_in_flight", "Requests that are being answered.", registry=own)
        self.prompt_tokens = Counter("skippipe_prompt_tokens", "Tokens of prompts.", registry=own)
        self.answer_tokens = Counter("skippipe_answer_tokens", "Tokens of answers.", registry=own)
        own.register(self)

    def collect(self) -> Iterator[Metric]:
        coverage = self._engine.coverage()
        yield GaugeMetricFamily("skippipe_stages", "Stages of the model.", coverage.total)
        yield GaugeMetricFamily("skippipe_stages_there", "Stages that a live node holds.", coverage.stages)
        for name, value in sorted(self._engine.stats().items()):
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield family(f"skippipe_gateway_{name}", "Of the gateway.", value)
