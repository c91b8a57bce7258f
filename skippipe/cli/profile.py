"""The command that measures: profile."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from skippipe.cli.options import Json, Keys, nodes_option, option, with_given, work_option, workload_option
from skippipe.errors import UserError
from skippipe.json_fields import check_output, check_writable
from skippipe.terminal import ProgressBar, interruptible
from skippipe.value_ranges import HEARTBEAT_S, NODES, SAMPLES, SEQUENCE, THREADS, WAIT_S, Range

if TYPE_CHECKING:
    from skippipe.cluster import Cluster
    from skippipe.profiling.coordinator import ProfilingCallback
    from skippipe.profiling.node import ProfilingConfig
    from skippipe.profiling.results import ProfileResult
    from skippipe.training.job_config import JobConfig

MERGING = "Merging"
NAMED = 8  # outliers and pairs that are printed; the files have all of them


def profile(
    local: Annotated[int | None, NODES, nodes_option("So many nodes, as processes of this machine.")] = None,
    keys: Keys = None,
    listen: Annotated[str | None, nodes_option("host:port where nodes join.", "[::]:5555")] = None,
    join_timeout: Annotated[
        float | None,
        Range(1, WAIT_S.most),
        nodes_option("Seconds to wait for nodes that join; then it goes on without them.", "600"),
    ] = None,
    heartbeat: Annotated[
        float | None,
        HEARTBEAT_S,
        nodes_option(
            "Seconds in which a node sends several heartbeats; three times as long without one, and it is left out.",
            "5",
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The cluster file.")] = Path("cluster.json"),
    merge: Annotated[
        Path | None,
        option(
            MERGING,
            "Put together with this cluster file: with all that was measured for it, if that is kept beside it.",
            metavar="FILE",
        ),
    ] = None,
    fresh: Annotated[
        bool, option(MERGING, "Forget what was measured before for the output file.", None, "--fresh")
    ] = False,
    job: Annotated[
        Path | None,
        workload_option(
            "A job file, for model, batch, device, threads, and where nodes join; other options override it."
        ),
    ] = None,
    model: Annotated[
        str | None, workload_option("A preset, a Hugging Face config.json, or its folder.", "llama-1.5b")
    ] = None,
    sequence: Annotated[int | None, SEQUENCE, workload_option("Tokens of a sample.", "4096")] = None,
    samples: Annotated[int | None, SAMPLES, workload_option("Samples of a microbatch.", "2")] = None,
    checkpointing: Annotated[
        bool, workload_option("Recompute activations in the backward pass.", None, "--checkpointing")
    ] = False,
    device: Annotated[str | None, work_option("cpu, cuda or cuda:N.", "cpu")] = None,
    dtype: Annotated[Literal["fp32", "bf16"] | None, work_option("What layers compute in.", "fp32")] = None,
    threads: Annotated[int | None, THREADS, work_option("Threads of a node.", "1")] = None,
    transfer: Annotated[
        float, Range(0.01, 10), work_option("Seconds that a transfer takes: longer is more exact.")
    ] = 0.25,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace a cluster file that was not measured, which is refused otherwise."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure nodes and links, and write the cluster file that 'skippipe plan' reads.

    Every node computes one layer of the model, forward and backward, and says how much memory it has. Then every two
    nodes measure latency and bandwidth in both directions, over the connections that training uses; no node is measured
    twice at once. Last, every node sends to several others at once, and receives from several: if its links carry
    clearly less together than one at a time, its upload or download gets a rate of its own. What takes part is started
    here (--local), or joins from other machines as for training:

    \b
        skippipe keys ann,bob,carol keys/
        skippipe profile --keys keys/ --model llama-1.5b -o cluster.json
        skippipe node --join 10.0.0.1:5555 --key ann.key          # on every machine

    Run it again, and the figures are put together: cluster.profile.json, beside the cluster file, has them all. What
    repeats do not agree on, and what is far from what it was, is printed. Ctrl-C keeps what was measured so far.

    Example: skippipe profile --local 4 --model llama-tiny --sequence 128 -o cluster.json
    """
    check_writable(output)
    for name, value in (("--listen", listen), ("--join-timeout", join_timeout)):
        if local is not None and value is not None:
            raise UserError(f"{name}: is for nodes that join, and --local starts them here: leave one out")
    from skippipe.training.job_config import JobConfig, load_job
    from skippipe.training.job_tables import BatchConfig, ModelConfig

    usual = JobConfig(model=ModelConfig("llama-1.5b"), batch=BatchConfig(sequence=4096, samples=2))
    base = load_job(job) if job else usual
    wanted = replace(
        base,
        model=with_given(base.model, config=model, checkpointing=checkpointing or None),
        batch=with_given(base.batch, sequence=sequence, samples=samples),
        compute=with_given(base.compute, device=device, dtype=dtype, threads=threads),
    )
    if local is not None and keys is not None:
        raise UserError("--local says that nodes are processes of this machine, --keys that they join: leave one out")
    peers, key = (None, None) if local is not None else _keys(keys, wanted)
    os.environ.setdefault("OMP_NUM_THREADS", str(wanted.compute.threads))
    import torch

    torch.set_num_threads(1)  # nodes are forked from here
    from skippipe.cluster import Cluster
    from skippipe.launch.launcher import JoinLauncher, Launcher, LocalLauncher
    from skippipe.model.model_spec import parse_devices
    from skippipe.profiling.coordinator import ProfilingDeadlines, profile_nodes
    from skippipe.profiling.node import ROLES
    from skippipe.profiling.results import ProfileResult, load_results, merge_results, save_results
    from skippipe.transport.keys import PeerList

    known = [Cluster.load(path) for path in (output, merge) if path is not None and (path is merge or path.exists())]
    measured = load_results(output)
    if not measured and merge != output:  # else it is put together with what was measured before
        check_output(output, overwrite=overwrite)
    before = [] if fresh else measured
    if merge is not None:
        others = load_results(merge) or [ProfileResult.of_cluster(known[-1])]
        before += [each for each in others if each not in before]
        before.sort(key=lambda result: result.when)
    if local is not None:
        parse_devices(wanted.compute.device)
    local_names = (f"node-{number}" for number in range(local or 0))
    names = tuple(PeerList.load(peers).expected(time.time()) if peers else local_names)
    node_config = _node_config(wanted, names, transfer, heartbeat)
    console = _Console(transient=True)
    with interruptible() as stopped:
        launcher: Launcher
        if peers is None or key is None:
            launcher, where = LocalLauncher(node_config.names, ROLES), "127.0.0.1:0"
        else:
            launcher = JoinLauncher(node_config.names, key, peers)
            where = listen or (wanted.transport.listen if job and wanted.transport.peers else "[::]:5555")
        found = profile_nodes(
            node_config,
            launcher,
            cast("ProfilingCallback", console),
            listen=where,
            deadlines=ProfilingDeadlines(joining=timedelta(seconds=join_timeout or 600)),
            stopped=lambda: bool(stopped),
        )
    console.close()
    if stopped and not found.nodes:
        raise KeyboardInterrupt
    results = [*before, _located(found, known)]
    cluster = merge_results(results, known[0].name if known else output.stem)
    cluster.save(output)
    save_results(output, results)
    _print_result(output, cluster, results, as_json=as_json)
    if stopped:
        print(f"stopped; what was measured so far is in {output}", file=sys.stderr)
        raise SystemExit(130)


def _keys(folder: Path | None, job: JobConfig) -> tuple[Path, Path]:
    """The list of peers and the coordinator's own key."""
    if folder is not None:
        return folder / "peers.json", folder / "coordinator.key"
    if job.transport.peers:
        return Path(job.transport.peers), Path(job.transport.key)
    raise UserError("say where nodes are: --local N for processes of this machine, --keys FOLDER if they join")


def _node_config(
    job: JobConfig, names: tuple[str, ...], transfer_s: float, heartbeat_s: float | None
) -> ProfilingConfig:
    from skippipe.model.model_spec import ModelSpec, config_named
    from skippipe.profiling.estimators import ProbeSettings
    from skippipe.profiling.node import ProfilingConfig
    from skippipe.workload import Workload

    spec = ModelSpec(config_named(job.model.config, layers=job.model.layers))
    workload = Workload(
        spec.shape,
        sequence_tokens=job.batch.sequence,
        samples_per_microbatch=job.batch.samples,
        compute_dtype=job.compute.dtype,
        activation_checkpointing=job.model.checkpointing,
    )
    return ProfilingConfig(
        names=names,
        config=spec.config.to_dict(),
        workload=workload,
        device=job.compute.device,
        compiled=job.compute.compiled,
        threads=job.compute.threads,
        effort=ProbeSettings(transfer_s=transfer_s),
        heartbeat_s=heartbeat_s or job.survive.heartbeat_s,
    )


def _located(result: ProfileResult, known: list[Cluster]) -> ProfileResult:
    """Locations are as in an earlier cluster file: machines only know their own names."""
    locations = {node.name: node.location for cluster in reversed(known) for node in cluster.nodes}
    nodes = {name: replace(node, location=locations.get(name, node.location)) for name, node in result.nodes.items()}
    return replace(result, nodes=nodes)


def _print_result(output: Path, cluster: Cluster, results: list[ProfileResult], *, as_json: bool) -> None:
    from skippipe.profiling.results import outliers, unreachable

    odd, apart = outliers(results), unreachable(results)
    if as_json:
        found = {"output": str(output), "surveys": len(results), "unreachable": apart, "outliers": odd}
        print(json.dumps({**found, "cluster": cluster.to_json()}))
        return
    newest = results[-1]
    print(f"{'node':<20} {'GFLOP/s':>9} {'forward':>10} {'backward':>10} {'memory':>9}   of one layer: {newest.work}")
    for name, node in newest.nodes.items():
        print(
            f"{name:<20} {node.flops_per_s / 1e9:>9,.1f} {1000 * node.forward_s:>7,.1f} ms "
            f"{1000 * node.backward_s:>7,.1f} ms {node.memory_bytes / 2**30:>5,.1f} GiB"
            + f"   each of {node.devices} devices"
            * (node.devices > 1)
        )
    links = cluster.bandwidth_bytes_per_s > 0
    if links.any():
        latency_ms, carried = 1000 * cluster.latency_s[links], cluster.bandwidth_bytes_per_s[links] / 1e6
        print(
            f"{links.sum()} links: latency {latency_ms.min():.2f} to {latency_ms.max():.2f} ms, "
            f"bandwidth {carried.min():,.1f} to {carried.max():,.1f} MB/s"
        )
    for each in cluster.nodes:
        rates = {"sends": each.upload_bytes_per_s, "receives": each.download_bytes_per_s}
        if parts := [f"{does} {rate / 1e6:,.1f} MB/s" for does, rate in rates.items() if rate]:
            print(f"'{each.name}' {' and '.join(parts)} at most, over all its links together")
    lines = [f"no link: '{sender}' to '{receiver}'" for sender, receiver in apart]
    for some in (lines, [f"outlier: {each}" for each in odd]):
        print("".join(f"{line}\n" for line in some[:NAMED]), end="")
        if len(some) > NAMED:
            print(f"… and {len(some) - NAMED} more of these")
    together = f"; {len(results)} measurements put together" if len(results) > 1 else ""
    print(f"written to {output}{together}; next: skippipe plan {output}")


class _Console(ProgressBar):
    """A progress bar on a terminal; elsewhere only unusual events are printed."""

    def progressed(self, done: int, of: int, doing: str) -> None:
        if sys.stderr is not None and sys.stderr.isatty():
            self.show(done, of, doing)

    happened = ProgressBar.print
