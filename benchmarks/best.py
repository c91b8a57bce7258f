"""What the planner with all freedoms gives, beside the published method, full pipelines and what is proven.

    python -m benchmarks.best [published20] [settings] [first] [random] [--seeds N] [--budget S]

Without names, all four. `first` is the time until there is a valid plan; the others compare seconds of an iteration.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

from skippipe.errors import Infeasible
from skippipe.examples import EXAMPLES, Example
from skippipe.plan import Plan
from skippipe.planner.problem import Freedoms, Problem, lane_unit
from skippipe.planner.strategies import Request, Strategy, compile_kernels, compile_search, make_plan
from skippipe.presets import preset, random_cluster
from skippipe.timeline import Timing
from skippipe.workload import MODELS, Workload

RIVALS = (Strategy.SKIPPIPE, Strategy.NO_TC2, Strategy.DTFM_SKIP, Strategy.DTFM)
ALL = Freedoms()
WHOLE_BACKWARD = Freedoms(split_backward=False)


def problem_of(example: Example, freedoms: Freedoms = ALL) -> Problem:
    return Problem(
        example.cluster,
        example.workload,
        example.stages,
        example.visited,
        example.sizes,
        timing=example.timing,
        freedoms=freedoms,
    )


def full(problem: Problem) -> Problem:
    return replace(problem, visited=problem.stages, sizes=(), swaps=0)


def planned(problem: Problem, strategy: Strategy, budget_s: float, seed: int = 0, bound_s: float = 0) -> Plan:
    return make_plan(problem, strategy, Request(seed=seed, budget_s=budget_s, bound_s=bound_s))


def iteration_s(plan: Plan) -> float:
    assert plan.expected is not None
    return plan.expected.iteration_s


def published20(seeds: int, _: float) -> None:
    print("| what | budget | seed | iteration | proven | gap |\n|---|---|---|---|---|---|")
    example = EXAMPLES["published20"]()
    open_, whole = problem_of(example), problem_of(example, WHOLE_BACKWARD)
    print(f"| the published method | 30 s | 0 | {iteration_s(planned(whole, Strategy.SKIPPIPE, 30)):.2f} s | | |")
    rows = [("all freedoms", open_), ("whole backward", whole)]
    rows += [(f"full pipeline, {name}", full(problem)) for name, problem in rows]
    for name, problem in rows:
        for budget_s in (2.0, 30.0):
            for seed in range(seeds):
                plan = planned(problem, Strategy.BEST, budget_s, seed, bound_s=30.0 if budget_s > 2 else 0.0)
                proven, gap = "", ""
                if plan.lower_bound_ns and plan.gap is not None:
                    proven, gap = f"{plan.lower_bound_ns / 1e9:.2f} s", f"{plan.gap:.1%}"
                print(
                    f"| {name} | {budget_s:.0f} s | {seed} | {iteration_s(plan):.2f} s | {proven} | {gap} |", flush=True
                )


def settings(_: int, budget_s: float) -> None:
    print("| setting | published method | best | ratio | whole backward | ratio | full pipeline, best |")
    print("|---|---|---|---|---|---|---|")
    for name in ("published18", "published20", "published42"):
        example = EXAMPLES[name]()
        open_, whole = problem_of(example), problem_of(example, WHOLE_BACKWARD)
        theirs = iteration_s(planned(whole, Strategy.SKIPPIPE, budget_s))
        ours = [iteration_s(planned(each, Strategy.BEST, budget_s)) for each in (open_, whole, full(open_))]
        print(
            f"| {name} | {theirs:.2f} s | {ours[0]:.2f} s | {ours[0] / theirs:.2f} | {ours[1]:.2f} s "
            f"| {ours[1] / theirs:.2f} | {ours[2]:.2f} s |",
            flush=True,
        )


def first(_: int, __: float) -> None:
    print("| nodes | first valid plan after | iteration | after as much again |\n|---|---|---|---|")
    for nodes in (20, 100, 1000):
        example = EXAMPLES["published20"]()
        data_nodes = nodes // 4
        work = replace(example.workload, microbatches=6 * data_nodes // 5 * 5)
        problem = Problem(preset(f"regions:{nodes}"), work, 6, 4, timing=Timing.FULL)
        began = time.perf_counter()
        plan = planned(problem, Strategy.BEST, 0)
        took_s = time.perf_counter() - began
        more = planned(problem, Strategy.BEST, took_s)
        print(f"| {nodes} | {took_s:.2f} s | {iteration_s(plan):.1f} s | {iteration_s(more):.1f} s |", flush=True)


def random(seeds: int, budget_s: float) -> None:
    """Unequal nodes and links, some missing, averaging included."""
    ratios: dict[Strategy, list[float]] = {rival: [] for rival in RIVALS}
    worse = 0
    for seed in range(seeds):
        nodes = 10 + (seed * 7919) % 51
        stages, visited = ((4, 3), (6, 4), (5, 4))[seed % 3]
        microbatches = 6 * max(1, nodes // 4) // lane_unit(stages, visited) * lane_unit(stages, visited)
        work = Workload(
            MODELS["llama-500m"], microbatches=max(microbatches, 2 * lane_unit(stages, visited)), max_slots=3
        )
        problem = Problem(random_cluster(nodes, seed), work, stages, visited)
        ours = iteration_s(planned(problem, Strategy.BEST, budget_s))
        for rival in RIVALS:
            try:
                theirs = iteration_s(planned(problem, rival, budget_s))
            except Infeasible:
                continue
            ratios[rival].append(ours / theirs)
            worse += ours > theirs
    print(f"{seeds} random clusters of 10 to 60 nodes, {budget_s:g} s for each plan; worse than another: {worse}")
    print("| against | median ratio | best | worst |\n|---|---|---|---|")
    for rival, found in ratios.items():
        print(f"| {rival} | {statistics.median(found):.2f} | {min(found):.2f} | {max(found):.2f} |", flush=True)


PARTS = {"published20": published20, "settings": settings, "first": first, "random": random}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[], metavar="PART")
    parser.add_argument("--seeds", type=int, help="3, and 50 random clusters")
    parser.add_argument("--budget", type=float, help="seconds for a plan: 30, and 3 for random clusters")
    asked = parser.parse_args()
    compile_search()
    compile_kernels()
    for name in asked.parts or PARTS:
        print(f"\n{name}", flush=True)
        many = name == "random"
        PARTS[name](asked.seeds or (50 if many else 3), asked.budget or (3.0 if many else 30.0))


if __name__ == "__main__":
    main()
