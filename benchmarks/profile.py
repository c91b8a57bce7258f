"""Does `skippipe profile` find out what links and nodes are like? Emulated ones, whose figures are known.

    python -m benchmarks.profile [--nodes 6] [--transfer 0.25] [--seed 0]
    python -m benchmarks.profile --homes [--nodes 6]

Every node is a process on this machine; messages take the same way as in training, and are held up as long as the
emulated link would have taken. Latencies are drawn from 0.5 to 120 ms, the same there and back, since only both
together can be measured; bandwidths from 0.5 to 60 MB/s, another one in each direction.

With --homes, links carry 20 to 40 MB/s, and those of a node share an upload of 2 to 10 MB/s and a download of 2 to 3
times that; the last node has no limit of its own.

Goals: latency within 10% or 1 ms, bandwidth and rates within 10%, and no rate where there is no limit.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from skippipe.cluster import Cluster, Node
from skippipe.launch.launcher import LocalLauncher
from skippipe.model.model_spec import ModelSpec, llama_config
from skippipe.model_shape import MODELS
from skippipe.profiling.coordinator import ProfilingCallback, profile_nodes
from skippipe.profiling.estimators import ProbeSettings
from skippipe.profiling.node import ROLES, ProfilingConfig
from skippipe.profiling.results import merge_results, outliers
from skippipe.workload import Workload

LATENCY_S = 0.0005, 0.12
BANDWIDTH = 5e5, 6e7
SHARE, ABSOLUTE_S = 0.1, 0.001


class Told(ProfilingCallback):
    def happened(self, text: str) -> None:
        print(text)


def unequal(nodes: int, seed: int) -> Cluster:
    random = np.random.default_rng(seed)
    machines = tuple(Node(f"n{index}", "here", 1e10, 2**30) for index in range(nodes))
    drawn_s, bandwidth = (
        np.exp(random.uniform(np.log(least), np.log(most), (nodes, nodes))) for least, most in (LATENCY_S, BANDWIDTH)
    )
    return Cluster("unequal", machines, np.triu(drawn_s, 1) + np.triu(drawn_s, 1).T, bandwidth)


def homes(nodes: int, seed: int) -> Cluster:
    """Nodes whose links share a line, and one that has no limit."""
    random = np.random.default_rng(seed)
    cluster = unequal(nodes, seed)
    upload = random.uniform(2e6, 1e7, nodes - 1)
    download = upload * random.uniform(2, 3, nodes - 1)
    lines = tuple(
        replace(node, upload_bytes_per_s=float(upload[index]), download_bytes_per_s=float(download[index]))
        for index, node in enumerate(cluster.nodes[:-1])
    )
    bandwidth = random.uniform(2e7, 4e7, (nodes, nodes))
    return replace(cluster, nodes=(*lines, cluster.nodes[-1]), bandwidth_bytes_per_s=bandwidth)


def print_rates(true: Cluster, found: Cluster) -> int:
    """Every rate beside the true one; gives how many miss the goal."""
    missed = 0
    print(f"{'node':<12} {'upload, MB/s':>23} {'download, MB/s':>23}")
    for node in found.nodes:
        line = f"{node.name:<12}"
        was_node = true.nodes[true.number[node.name]]
        for was, now in (
            (was_node.upload_bytes_per_s, node.upload_bytes_per_s),
            (was_node.download_bytes_per_s, node.download_bytes_per_s),
        ):
            ratio = now / was if now and was else None
            missed += abs(ratio - 1) > SHARE if ratio else was is not now
            figures = [f"{rate / 1e6:8.2f}" if rate else f"{'none':>8}" for rate in (was, now)]
            line += f" {' '.join(figures)} {f'{ratio:.3f}' if ratio else '':>6}"
        print(line)
    return missed


def brief_of(true: Cluster, effort: ProbeSettings) -> ProfilingConfig:
    shape = MODELS["llama-tiny"]
    return ProfilingConfig(
        names=tuple(node.name for node in true.nodes),
        config=ModelSpec(llama_config(shape)).config.to_dict(),
        workload=Workload(shape, 64, 2, compute_dtype="fp32"),
        compute_s=0.5,
        effort=effort,
        emulated=true,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=6)
    parser.add_argument("--transfer", type=float, default=ProbeSettings.transfer_s)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--homes", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    true = (homes if asked.homes else unequal)(asked.nodes, asked.seed)
    began = time.monotonic()
    config = brief_of(true, ProbeSettings(transfer_s=asked.transfer))
    result = profile_nodes(config, LocalLauncher(config.names, ROLES), Told())
    took_s = time.monotonic() - began
    found = merge_results([result], "measured")
    print(f"{'link':<12} {'latency, ms':>21} {'bandwidth, MB/s':>23}")
    print(f"{'':<12} {'true':>8} {'found':>8} {'off':>6} {'true':>8} {'found':>8} {'off':>6}")
    late_s, share, missed = [], [], 0
    for i, sender in enumerate(found.nodes):
        for j, receiver in enumerate(found.nodes):
            if i == j:
                continue
            was_s, was = true.hop(sender.name, receiver.name)
            is_s, now = float(found.latency_s[i, j]), float(found.bandwidth_bytes_per_s[i, j])
            late_s.append(is_s - was_s)
            share.append(now / was - 1)
            bad = abs(is_s - was_s) > max(ABSOLUTE_S, SHARE * was_s) or abs(now / was - 1) > SHARE
            missed += bad
            print(
                f"{sender.name + ' ' + receiver.name:<12} {1e3 * was_s:8.2f} {1e3 * is_s:8.2f} "
                f"{1e3 * (is_s - was_s):+6.2f} {was / 1e6:8.2f} {now / 1e6:8.2f} {now / was - 1:+6.1%}"
                + ("  missed" if bad else "")
            )
    print(f"{len(late_s)} of {len(true) * (len(true) - 1)} links in {took_s:.1f} s, start and computing included")
    print(f"worst latency {1e3 * max(late_s, key=abs):+.2f} ms; worst bandwidth {max(share, key=abs):+.1%}")
    print(f"{missed} links miss a goal (latency within 10% or 1 ms, bandwidth within 10%)")
    print(f"{print_rates(true, found)} rates miss a goal (within 10%, none where there is no limit)")
    print("\n".join(f"outlier: {each}" for each in outliers([result])))


if __name__ == "__main__":
    main()
