"""How much of a search should go into detours where links are missing: plans by share, as lines of JSON.

python -m benchmarks.missing_links published20 --missing 0.05 --shares 0,0.1,0.5
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace

import numpy as np

from skippipe.cluster import Cluster
from skippipe.errors import Infeasible
from skippipe.model_shape import MODELS
from skippipe.planner import strategies
from skippipe.planner.problem import PlanRequest, Strategy, iteration_ns
from skippipe.planner.problem_spec import PlanSpec, cluster_named, problem_of
from skippipe.workload import Workload


def without_links(cluster: Cluster, missing: float, seed: int, *, out_only: bool) -> Cluster:
    """A share of all pairs without links, or one for 0; or those between a share of the nodes, which only call out."""
    draw, nodes = np.random.default_rng(seed), len(cluster)
    bandwidth = cluster.bandwidth_bytes_per_s.copy()
    if out_only:
        chosen = draw.permutation(nodes)[: round(missing * nodes)]
        bandwidth[np.ix_(chosen, chosen)] = 0
    else:
        pairs = [(a, b) for a in range(nodes) for b in range(a)]
        for number in draw.permutation(len(pairs))[: max(1, round(missing * len(pairs)))]:
            a, b = pairs[number]
            bandwidth[a, b] = bandwidth[b, a] = 0
    return replace(cluster, bandwidth_bytes_per_s=bandwidth)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cluster")
    parser.add_argument("--missing", type=float, default=0.0, help="share of the links; 0: one")
    parser.add_argument("--out-only", action="store_true", help="the share is of nodes, which only call out")
    parser.add_argument("--shares", default="0,0.5", help="of the search, for detours; empty: as the planner has it")
    parser.add_argument("--changes", type=float, default=30_000)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    over_detours = strategies._over_detours
    whole, example = cluster_named(options.cluster)
    workload = example.workload if example else Workload(MODELS["llama-1.5b"])
    for seed in range(options.seeds):
        cluster = without_links(whole, options.missing, seed, out_only=options.out_only)
        problem = problem_of(cluster, workload, PlanSpec(), example)
        for share in options.shares.split(","):
            if share:  # in place of the planner's own rule
                vars(strategies)["detours_share"] = lambda _cluster, share=float(share): share
                vars(strategies)["_over_detours"] = over_detours if float(share) else lambda *_: []
            request = PlanRequest(seed=seed, budget_s=math.inf, changes=options.changes)
            try:
                found = iteration_ns(strategies.make_plan(problem, Strategy.BEST, request)) / 1e9
            except Infeasible:
                found = None
            print(json.dumps({**vars(options), "seed": seed, "share": share, "iteration_s": found}), flush=True)


if __name__ == "__main__":
    main()
