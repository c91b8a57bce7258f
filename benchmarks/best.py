"""What `best` gives with everything open, beside the published method, full pipelines and what is proven.

    python -m benchmarks.best [published20] [full-timing] [sandwiches] [teacher] [codecs] [settings] [first] [sizes]
                              [random] [--seeds N] [--budget S] [--keep FILE] [--codecs HOPS,BACK,GRADIENTS …]

Without names, all nine. `codecs` has bytes, seconds and samples a second of smaller codecs in full timing, with sizes
open and given by hand; `--codecs` chooses which, as int8,int4-stochastic,int4: of activations, of their gradients, of
weight gradients. `first` has the time until there is a valid plan; the others compare seconds of an iteration.
`full-timing` counts averaging and queues on links, and holds the search against sizes that are given by hand.
`sandwiches` are iterations with whole paths and halves, against iterations of one kind by turns. `teacher` is what it
takes that microbatches which leave stages out also learn from the whole model.
With `--keep` a run over random clusters that was cut short goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from skippipe.cluster import Cluster
from skippipe.codecs import gradient_codec
from skippipe.errors import Infeasible
from skippipe.model_shape import MODELS
from skippipe.plan import Plan
from skippipe.planner.problem import DecisionVariables, PlanRequest, Problem, Strategy, lane_unit
from skippipe.planner.published import EXAMPLES, Example
from skippipe.planner.strategies import (
    compile_kernels,
    compile_search,
    make_plan,
    make_plan_for,
    turns_s,
    with_paths_of,
)
from skippipe.presets import preset, random_cluster
from skippipe.simulator import simulate
from skippipe.skip_schedule import path_length_text
from skippipe.timeline import Timing
from skippipe.workload import TEACHERS, LinkDtypes, Workload

RIVALS = (Strategy.SKIPPIPE, Strategy.NO_TC2, Strategy.DTFM_SKIP, Strategy.DTFM)
ALL = DecisionVariables()
SIZES_BY_HAND = ((5, 3, 3, 3, 3, 3), (4, 2, 2, 2, 2, 2), (3, 2, 2, 2, 2, 2), (2, 2, 2, 2, 2, 2), (2, 1, 1, 1, 1, 1))
HANDS = 30  # sizes that are drawn for a random cluster
CODECS_USED = (
    "bf16,bf16,fp32",
    "int8,int8,int8",
    "int8,int4-stochastic,int4",
    "int8,int4-stochastic,rank-16",
    "int6,int4-stochastic,int4",
    "int4,int4-stochastic,int4",
    "int4,int4-stochastic,int2",
)
"""Of activations, their gradients and weight gradients."""
FEWER_SEEDS = 3  # where bytes are fewer, and the search easier
WHOLE_BACKWARD = DecisionVariables(split_backward=False)
SANDWICHES = ((6, 3, 3), (6, 3), (6, 6, 3), (6, 6, 6, 6, 6, 3))  # stages on the paths of equal parts of an iteration


def problem_of(example: Example, decision_variables: DecisionVariables = ALL) -> Problem:
    return Problem(
        example.cluster,
        example.workload,
        example.stages,
        example.visited,
        example.sizes,
        timing=example.timing,
        decision_variables=decision_variables,
    )


def full(problem: Problem) -> Problem:
    return replace(problem, visited=problem.stages, sizes=(), swaps=0)


def planned(problem: Problem, strategy: Strategy, budget_s: float, seed: int = 0, bound_s: float = 0) -> Plan:
    return make_plan(problem, strategy, PlanRequest(seed=seed, budget_s=budget_s, bound_s=bound_s))


def iteration_s(plan: Plan) -> float:
    return plan.promise.iteration_s


def published20(seeds: int, _: float) -> None:
    print("| what | budget | seed | iteration | proven | gap |\n|---|---|---|---|---|---|")
    example = EXAMPLES["published20"]()
    open_, whole = problem_of(example), problem_of(example, WHOLE_BACKWARD)
    print(f"| the published method | 30 s | 0 | {iteration_s(planned(whole, Strategy.SKIPPIPE, 30)):.2f} s | | |")
    rows = [("all open", open_), ("whole backward", whole)]
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


def full_timing(seeds: int, budget_s: float) -> None:
    """published20 with averaging and queues counted: ours and a full pipeline, each with as much search."""
    example = EXAMPLES["published20"]()
    problem = replace(problem_of(example), timing=Timing.FULL)
    kinds = {
        "fp32 gradients, bf16 activations": {},
        "bf16 gradients": {"gradient_dtype": "bf16"},
        "int8 gradients and activations": {"gradient_dtype": "int8", "wire_dtype": "int8"},
    }
    print("| setting | seed | iteration | proven | gap | nodes | at work | full pipeline | ratio |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, changed in kinds.items():
        work = replace(problem.workload, **changed)  # type: ignore[arg-type]
        found = []
        for seed in range(seeds if not changed else min(seeds, FEWER_SEEDS)):
            open_ = replace(problem, workload=work)
            ours = planned(open_, Strategy.BEST, budget_s, seed, bound_s=budget_s / 3)
            whole_s = iteration_s(planned(full(open_), Strategy.BEST, budget_s, seed))
            found.append(iteration_s(ours))
            proven = f"{ours.lower_bound_ns / 1e9:.2f} s | {ours.gap:.0%}" if ours.lower_bound_ns else "|"
            print(
                f"| {name} | {seed} | {found[-1]:.2f} s | {proven} | {len(ours.stage_of)} | {at_work(ours):.0%} "
                f"| {whole_s:.2f} s | {found[-1] / whole_s:.2f} |",
                flush=True,
            )
        figures = f"{statistics.median(found):.2f} s; {max(found) / min(found):.2f}"
        print(f"| {name} | median; worst / best | {figures} | | | | | | |", flush=True)
    print(f"\nsizes given by hand, {budget_s:g} s each, seed 0 (fp32 gradients)\n| sizes | iteration |\n|---|---|")
    for sizes in SIZES_BY_HAND:
        fixed = replace(problem, sizes=sizes, decision_variables=replace(ALL, sizes=False))
        print(
            f"| {','.join(map(str, sizes))} | {iteration_s(planned(fixed, Strategy.BEST, budget_s)):.2f} s |",
            flush=True,
        )


def codecs(seeds: int, budget_s: float, used: Sequence[str] = CODECS_USED) -> None:
    """published20 in full timing with smaller codecs on all hops and in all averaging; bytes are of the same plan."""
    problem = replace(problem_of(EXAMPLES["published20"]()), timing=Timing.FULL)
    print("| there, back, gradients | microbatches | slots | sizes | seed | iteration | samples/s | GB ", end="")
    print("| of bf16 and fp32 | at work |\n|---|---|---|---|---|---|---|---|---|---|")
    by_hand = SIZES_BY_HAND[0]
    for microbatches, slots in ((30, 3), (120, 8)):
        work = replace(problem.workload, microbatches=microbatches, max_slots=slots)
        for each in used:
            small = replace(problem, workload=with_codecs(work, problem.cluster, *each.split(",")))
            fixed = replace(small, sizes=by_hand, decision_variables=replace(ALL, sizes=False))
            for name, chosen in (("open", small), (" ".join(map(str, by_hand)), fixed)):
                for seed in range(seeds):
                    plan = planned(chosen, Strategy.BEST, budget_s, seed)
                    usual = simulate(replace(plan, workload=work), Timing.FULL)
                    moved = plan.promise.bytes_moved
                    print(
                        f"| {each.replace(',', ', ')} | {microbatches} | {slots} | {name} | {seed} "
                        f"| {iteration_s(plan):.2f} s | {plan.samples_per_s:.2f} | {moved / 1e9:.2f} "
                        f"| {moved / usual.bytes_moved:.3f} | {at_work(plan):.0%} |",
                        flush=True,
                    )


def with_codecs(work: Workload, cluster: Cluster, there: str, back: str, gradient: str) -> Workload:
    """The same codecs on all links and stages."""
    names = [node.name for node in cluster.nodes]
    links = [LinkDtypes(a, b, there, back) for a in names for b in names if a != b]
    rows = () if back == gradient_codec(there) else tuple(links)
    return replace(work, wire_dtype=there, wire_dtypes=rows, gradient_dtype=gradient)


def at_work(plan: Plan) -> float:
    """The share of the iteration in which the plan's nodes compute, on average."""
    return statistics.mean(node.worker_busy_ns for node in plan.promise.nodes) / plan.promise.iteration_ns


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


def random_problem(seed: int) -> Problem:
    """Unequal nodes and links, some missing, averaging included."""
    nodes = 10 + (seed * 7919) % 51
    stages, visited = ((4, 3), (6, 4), (5, 4))[seed % 3]
    unit = lane_unit(stages, visited)
    microbatches = max(6 * max(1, nodes // 4) // unit * unit, 2 * unit)
    work = Workload(MODELS["llama-500m"], microbatches=microbatches, max_slots=3)
    cluster = random_cluster(nodes, seed)
    if seed % 2:  # half of them on access lines of 20 to 200 Mbit/s up, and two to ten times that down
        rng = np.random.default_rng(seed)
        upload = np.exp(rng.uniform(np.log(20e6 / 8), np.log(200e6 / 8), nodes))
        download = upload * rng.uniform(2, 10, nodes)
        rates = zip(upload.tolist(), download.tolist(), strict=True)
        limited = [
            replace(node, upload_bytes_per_s=up, download_bytes_per_s=down)
            for node, (up, down) in zip(cluster.nodes, rates, strict=True)
        ]
        cluster = replace(cluster, nodes=tuple(limited))
    return Problem(cluster, work, stages, visited)


def random(seeds: int, budget_s: float, keep: Path | None) -> None:
    rows = read_rows(keep, budget_s)
    print("| seed | nodes | best | " + " | ".join(f"of {rival}" for rival in RIVALS) + " |")
    print("|---" * (3 + len(RIVALS)) + "|")
    for seed in range(seeds):
        problem = random_problem(seed)
        if seed not in rows:
            rows[seed] = {}
            for strategy in (Strategy.BEST, *RIVALS):
                with suppress(Infeasible):
                    rows[seed][strategy] = iteration_s(planned(problem, strategy, budget_s))
            if keep:
                with keep.open("a") as file:
                    file.write(json.dumps({"seed": seed, "budget_s": budget_s, "iteration_s": rows[seed]}) + "\n")
        ours = rows[seed][Strategy.BEST]
        ratios = (f"{ours / rows[seed][rival]:.3f}" if rival in rows[seed] else "–" for rival in RIVALS)
        print(f"| {seed} | {len(problem.cluster)} | {ours:.2f} s | " + " | ".join(ratios) + " |", flush=True)
    print(f"\n{seeds} random clusters of 10 to 60 nodes, {budget_s:g} s for each plan")
    print("| against | clusters | median | best | worst | worse |\n|---|---|---|---|---|---|")
    for rival in RIVALS:
        found = [row[Strategy.BEST] / row[rival] for seed, row in rows.items() if seed < seeds and rival in row]
        figures = (statistics.median(found), min(found), max(found))
        worse = sum(ratio > 1 for ratio in found)
        print(f"| {rival} | {len(found)} | " + " | ".join(f"{each:.3f}" for each in figures) + f" | {worse} |")


def sizes(seeds: int, budget_s: float) -> None:
    """Sizes of stages left open against the best of many given by hand, with the same seconds for each."""
    print(f"| seed | nodes | open | the best of {HANDS} | its sizes | ratio |\n|---|---|---|---|---|---|")
    for seed in range(seeds):
        problem, rng = random_problem(seed), np.random.default_rng(seed)
        nodes, stages = len(problem.cluster), problem.stages
        ours = iteration_s(planned(problem, Strategy.BEST, budget_s))
        found: dict[tuple[int, ...], float] = {}
        by_hand = [problem.sizes] if problem.sizes else []
        while (
            len(by_hand) < HANDS
        ):  # a node for each stage, the others at random over some stages more than over others
            others = int(rng.integers(0, nodes - stages + 1))
            by_hand.append(tuple((1 + rng.multinomial(others, rng.dirichlet(np.full(stages, 4.0)))).tolist()))
        for each in by_hand:
            with suppress(Infeasible):
                given = replace(problem, sizes=each, decision_variables=replace(ALL, sizes=False))
                found[each] = iteration_s(planned(given, Strategy.BEST, budget_s))
        best = min(found, key=found.__getitem__)
        shown = ",".join(map(str, best))
        print(
            f"| {seed} | {nodes} | {ours:.2f} s | {found[best]:.2f} s | {shown} | {ours / found[best]:.3f} |",
            flush=True,
        )


def sandwiches(seeds: int, budget_s: float) -> None:
    """published20 in full timing, int8: paths through all six stages and through three, in one iteration or by turns on
    the same nodes; those on the nodes of a sandwich with as little search as before training."""
    problem = replace(problem_of(EXAMPLES["published20"]()), timing=Timing.FULL, sizes=())
    problem = replace(problem, workload=replace(problem.workload, gradient_dtype="int8", wire_dtype="int8"))
    headings = "seed", "paths", "placed for them", "by turns there", "on the stages of whole paths", "by turns there"
    print("| " + " | ".join(headings) + " |\n" + "|---" * len(headings) + "|")
    for seed in range(seeds):
        request = PlanRequest(seed=seed, budget_s=budget_s)
        whole = make_plan(full(problem), Strategy.BEST, request)
        half_s = iteration_s(with_paths_of(whole, 3, Strategy.BEST, request))
        print(f"| {seed} | 6 | | | {iteration_s(whole):.2f} s | |\n| {seed} | 3 | | | {half_s:.2f} s | |", flush=True)
        for lengths in SANDWICHES:
            placed = make_plan_for(problem, lengths, Strategy.BEST, request)
            kept = with_paths_of(whole, lengths, Strategy.BEST, request)
            there_s = statistics.mean(iteration_s(whole) if each == 6 else half_s for each in lengths)
            quick_s = turns_s(placed, lengths, Strategy.BEST, request)
            print(
                f"| {seed} | {path_length_text(lengths)} | {iteration_s(placed):.2f} s, "
                f"{iteration_s(placed) / iteration_s(whole):.2f} | {quick_s:.2f} s | {iteration_s(kept):.2f} s | "
                f"{there_s:.2f} s |",
                flush=True,
            )


def teacher(seeds: int, budget_s: float) -> None:
    """published20: an iteration in which a third of the microbatches visit four of six stages and the others three, by
    itself, and with a pass of the whole model for each; beside one through all stages."""
    headings = "timing", "seed", "4 & 2 x 3 stages", "taught by logits", "by hidden states too", "all stages"
    print("| " + " | ".join(headings) + " |\n" + "|---" * len(headings) + "|")
    for timing in (Timing.FULL, Timing.CONTENTION_ONLY):
        problem = replace(problem_of(EXAMPLES["published20"]()), timing=timing, sizes=())
        for seed in range(seeds):
            request = PlanRequest(seed=seed, budget_s=budget_s)
            row = [
                make_plan_for(
                    replace(problem, workload=replace(problem.workload, teacher=each)),
                    (4, 3, 3),
                    Strategy.BEST,
                    request,
                )
                for each in TEACHERS
            ]
            row.append(make_plan(full(problem), Strategy.BEST, request))
            print(
                f"| {timing} | {seed} | " + " | ".join(f"{iteration_s(each):.1f} s" for each in row) + " |", flush=True
            )


def read_rows(keep: Path | None, budget_s: float) -> dict[int, dict[str, float]]:
    """[seed][strategy], of earlier runs with this budget."""
    lines = keep.read_text().splitlines() if keep and keep.exists() else []
    found = [json.loads(line) for line in lines]
    return {row["seed"]: row["iteration_s"] for row in found if row["budget_s"] == budget_s}


PARTS = {
    "published20": published20,
    "full-timing": full_timing,
    "sandwiches": sandwiches,
    "teacher": teacher,
    "settings": settings,
    "first": first,
    "sizes": sizes,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, "codecs", "random", []], default=[], metavar="PART")
    parser.add_argument("--seeds", type=int, help="3, and 50 random clusters")
    parser.add_argument("--budget", type=float, help="seconds for a plan: 30, and 3 for random clusters")
    parser.add_argument(
        "--codecs", nargs="+", default=CODECS_USED, help="of activations, back, and of weight gradients"
    )
    parser.add_argument("--keep", type=Path, help="a file for the results of random clusters, a line each")
    asked = parser.parse_args()
    compile_search()
    compile_kernels()
    for name in asked.parts or [*PARTS, "codecs", "random"]:
        print(f"\n{name}", flush=True)
        if name == "random":
            random(asked.seeds or 50, asked.budget or 3.0, asked.keep)
        elif name == "codecs":
            codecs(asked.seeds or 3, asked.budget or 30.0, asked.codecs)
        else:
            PARTS[name](asked.seeds or 3, asked.budget or 30.0)


if __name__ == "__main__":
    main()
