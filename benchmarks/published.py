"""The paper's settings, planned and simulated here, beside the seconds it published.

    python -m benchmarks.published [BUDGET_S]

Prints a table in Markdown: seconds of an iteration, and in brackets the ratio to the full pipeline of the same row.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from benchmarks.best import planned, problem_of
from skippipe.planner.problem import Strategy
from skippipe.planner.published import Example, published18, published20, published42
from skippipe.timeline import Timing

ORDER = (Strategy.DTFM, Strategy.DTFM_SKIP, Strategy.NO_TC2, Strategy.SKIPPIPE)

# full pipeline, DT-FM-skip, without TC2, SkipPipe; None: not published
SETTINGS: tuple[tuple[str, Example, tuple[float | None, ...]], ...] = (
    ("18 nodes, 25% skipped, 4K tokens", published18(samples=1), (29.8, 17.0, 16.7, 15.4)),
    ("18 nodes, 25% skipped, 8K tokens", published18(samples=2), (45.5, 34.4, 33.1, 25.7)),
    ("18 nodes, 25% skipped, 16K tokens", published18(samples=4), (91.9, 65.7, 63.2, 55.5)),
    ("20 nodes, 33% skipped, real runs", published20(), (141.7, 71.7, 59.4, 52.6)),
    ("20 nodes, 33% skipped, the paper's estimate", published20(), (79.94, 48.92, 35.43, 33.31)),
    ("42 nodes, 25% skipped, real runs", published42(), (141.0, 1176.0, None, 108.0)),
)


def row(seconds: list[float | None]) -> str:
    full = seconds[0]
    assert full is not None
    return " | ".join("–" if each is None else f"{each:.1f} ({each / full:.2f})" for each in seconds)


def main() -> None:
    budget_s = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    print("| setting | | full pipeline | DT-FM-skip | without TC2 | SkipPipe |")
    print("|---|---|---|---|---|---|")
    ours: dict[str, dict[Timing, list[float | None]]] = {}
    for setting, example, published in SETTINGS:
        print(f"| {setting} | published | {row(list(published))} |")
        key = f"{example.cluster.name} {example.workload.samples_per_microbatch}"
        if key not in ours:
            ours[key] = {}
            for timing in (Timing.CONTENTION_ONLY, Timing.FULL):
                problem = replace(problem_of(example), timing=timing)
                plans = [planned(problem, strategy, budget_s) for strategy in ORDER]
                ours[key][timing] = [plan.promise.iteration_s for plan in plans]
        print(f"| | ours, contention-only | {row(ours[key][Timing.CONTENTION_ONLY])} |")
        print(f"| | ours, with link queues and averaging | {row(ours[key][Timing.FULL])} |", flush=True)


if __name__ == "__main__":
    main()
