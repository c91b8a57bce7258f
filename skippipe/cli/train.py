"""Commands that train: job, train, node, keys."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from skippipe.cli import plan as plan_command
from skippipe.errors import UserError
from skippipe.value_ranges import ITERATIONS, WAIT_S

if TYPE_CHECKING:
    from skippipe.cluster import Cluster
    from skippipe.runtime.coordinator.state_machine import Callback, Event, IterationReport
    from skippipe.training.backends import Backend
    from skippipe.training.build_run import RunSetup
    from skippipe.training.job_config import JobConfig
    from skippipe.training.metrics import IterationMetrics
    from skippipe.training.run_folder import RunFolder

LINES = 25  # of progress at most, where there is no terminal
UNLIKE = 1.25  # times the promise, or less than that part of it: worth a word


def job(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write it to this file.")] = None,
) -> None:
    """Print a job file with every field, its default and what it is for.

    Example: skippipe job -o job.toml
    """
    from skippipe.json_fields import write_text
    from skippipe.toml_config import example
    from skippipe.training.job_config import JobConfig

    text = f"# A job for `skippipe train`. Every field may be left out; these are the defaults.\n\n{example(JobConfig)}"
    if output is None:
        print(text, end="")
    elif output.exists():
        raise UserError(f"{output}: is there already; name another file")
    else:
        write_text(output, text)


def train(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="A job file; 'skippipe job' prints one.")],
    iterations: Annotated[int | None, ITERATIONS, typer.Option(help="Instead of the job's.")] = None,
    out: Annotated[str | None, typer.Option(help="Output folder, instead of the job's.")] = None,
    engine: Annotated[
        str,
        typer.Option(
            help="processes: every node as a process here, or, with transport.peers, wherever it joins from. "
            "one-process: no nodes, the same paths and data in this process. virtual: every node's own code on real "
            "tensors in one thread, in the seconds that the plan gives. ray: one Ray actor a node."
        ),
    ] = "processes",
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in the output folder.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Begin anew where a run is already: its folder is renamed, to NAME.old-TIME."),
    ] = False,
    rescue: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where model and last checkpoint go if the output folder cannot be written in the end. While a run "
            "waits for room, the same command with --rescue in another terminal tells it.",
        ),
    ] = None,
    drill: Annotated[
        list[int] | None,
        ITERATIONS,
        typer.Option(help="Kill a node's process when so many iterations are done, to see the repair."),
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(help="host:port of a Ray cluster, for --engine ray; none: RAY_ADDRESS, or a Ray of this machine."),
    ] = None,
    dashboard: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT",
            help="Show the run in the browser at this port of 127.0.0.1, as 'skippipe dashboard' would.",
        ),
    ] = None,
) -> None:
    """Train a model along planned paths.

    On one machine this starts every node itself. With transport.peers in the job it waits for nodes that join from
    other machines ('skippipe node'). The output folder gets the plan, metrics.jsonl, traces and the trained model.

    Nodes may be lost and come back: training goes on, and events.jsonl says what was done about it.

    A folder that holds a run is not trained into: --resume goes on with that run, --force sets it aside whole.

    Ctrl-C stops, and keeps the model as far as it was trained. --resume goes on from the last checkpoint; or, if the
    coordinator was killed and its nodes still wait for it, from where they are.

    Example: skippipe train job.toml --iterations 20
    """
    wanted = wanted_job(job, iterations, out)
    from skippipe.training.backends import BACKENDS

    if engine not in BACKENDS:
        raise UserError(f"--engine: '{engine}' is none of {', '.join(BACKENDS)}")
    if ray_address is not None:
        if engine != "ray":
            raise UserError(f"--ray-address: goes with --engine ray, not with '{engine}'")
        os.environ["RAY_ADDRESS"] = ray_address
    if drill and (engine != "processes" or wanted.transport.peers):
        raise UserError("--drill: is for nodes that are processes of this machine")
    if resume and force:
        raise UserError("--force: begins anew, and --resume goes on; give one of them")
    if rescue is not None and _told_to_rescue(Path(wanted.output), rescue):
        return
    nodes_here = engine != "ray" and not wanted.transport.peers
    with _shown(Path(wanted.output), dashboard, resume):
        drills = frozenset(drill or ())
        run_job(
            wanted, BACKENDS[engine], nodes_here=nodes_here, resumed=resume, drills=drills, force=force, rescue=rescue
        )


def _told_to_rescue(output: Path, rescue: Path) -> bool:
    """Whether a run is going on there, which now knows where its model may go."""
    from skippipe.training.run_folder import tell_rescue

    process = tell_rescue(output, rescue)
    if process is not None:
        print(f"{output}: the run that is going on (process {process}) was told; what it cannot write goes to {rescue}")
    return process is not None


def _shown(folder: Path, at: str | None, resumed: bool) -> AbstractContextManager[None]:
    """In the browser, if that is asked for."""
    if at is None:
        return nullcontext()
    from skippipe.dashboard.side_process import dashboard_process

    return dashboard_process(folder, at, resumed=resumed)


def wanted_job(path: Path, iterations: int | None, out: str | None) -> JobConfig:
    """The job, with what the command line says instead; torch must not be imported before."""
    from skippipe.training.job_config import load_job

    wanted = load_job(path)
    if iterations is not None:
        wanted = replace(wanted, iterations=iterations)
    if out is not None:
        wanted = replace(wanted, output=out)
    os.environ.setdefault("OMP_NUM_THREADS", str(wanted.compute.threads))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    return wanted


def run_job(
    wanted: JobConfig,
    engine: Backend,
    nodes_here: bool = True,
    resumed: bool = False,
    drills: frozenset[int] = frozenset(),
    force: bool = False,
    rescue: Path | None = None,
) -> None:
    import torch

    from skippipe.runs.tail import checkpoints_in
    from skippipe.training.backends import BACKENDS
    from skippipe.training.run_folder import held_run_folder

    torch.set_num_threads(wanted.compute.threads)
    output = Path(wanted.output)
    with (
        plan_command.interruptible(2) as stopped,
        held_run_folder(output, resumed=resumed, force=force, rescue=rescue) as folder,
    ):
        run_setup = assembled(wanted, stopped, nodes_here, resumed, drills, folder)
        if stopped:
            raise KeyboardInterrupt
        run_setup.check_room(rescue)
        begin(folder, run_setup)
        run_setup.save_plans()
        _announce(run_setup)
        if engine is not BACKENDS["one-process"]:
            _announce_backup(run_setup)
        with _watching(run_setup) as callback:
            engine(run_setup, callback, lambda: len(stopped))
    _sum_up(output / "metrics.jsonl")
    model = run_setup.run.models.place
    if stopped:
        more = "--resume goes on" if checkpoints_in(output) else "there is no checkpoint to go on from"
        print(f"stopped; the model as it was then is in {model}; {more}", file=sys.stderr)
        raise SystemExit(130)
    print(f"done; the model is in {model}, figures in {output}/metrics.jsonl")


def begin(folder: RunFolder, run_setup: RunSetup) -> None:
    """From here on the folder is the new run's; if it was another's, that one is told of."""
    aside = folder.begin(run_setup.read_while_training)
    if aside is not None:
        print(f"{folder.path}: the run that was there is in {aside}", file=sys.stderr)


def node(
    join: Annotated[
        str,
        typer.Option(
            help="host:port of the coordinator; several with commas between them, if it may come back elsewhere."
        ),
    ],
    key: Annotated[Path, typer.Option(help="This node's key file, made by 'skippipe keys'.")],
    listen: Annotated[
        str,
        typer.Option(
            help="host:port of this machine at which other nodes reach it; a port alone: at the address that this "
            "machine has on the way to the coordinator; 0: any port."
        ),
    ] = "0",
    address: Annotated[
        str | None,
        typer.Option(help="host:port at which others reach this node, if it listens elsewhere (behind a router)."),
    ] = None,
    tokens: Annotated[
        Path | None, typer.Option(help="Where this machine keeps the token folder, if elsewhere than the coordinator.")
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Where this machine keeps the model that is served, if elsewhere than the gateway."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N, instead of the job's.")] = None,
    patience: Annotated[
        float,
        WAIT_S,
        typer.Option(help="Seconds to wait for the coordinator, before training and whenever it is gone."),
    ] = 900,
) -> None:
    """Join a run, or a gateway that serves, from another machine and work until it is over.

    Example: skippipe node --join 10.0.0.1:5555 --key berlin-1.key --listen 5556
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("SKIPPIPE_PURE_PYTHON", "1")  # a node decides a few times a second: no compiler needed
    from skippipe.runtime.node.agent import JoinConfig, NodeAgent
    from skippipe.transport.addresses import listen_address
    from skippipe.transport.keys import KeyFile

    mine = KeyFile.load(key)
    if mine.coordinator is None:
        raise UserError(f"{key}: this is the coordinator's key; a node needs its own")
    if device is not None:
        from skippipe.runtime.train_role import check_device

        check_device(device)
    member = NodeAgent(
        JoinConfig(
            name=mine.node,
            coordinator=join,
            keys=mine.keys,
            coordinator_public=mine.coordinator,
            listen=listen_address(listen, join.split(",")[0], address),
            address=address,
            data_folder=tokens,
            checkpoint=checkpoint,
            device=device,
            patience=timedelta(seconds=patience),
        )
    )
    print(f"node '{mine.node}' joins {join}", file=sys.stderr)
    reason = member.run()
    if reason:
        raise UserError(reason)


def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or a run's output folder: its newest one.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the model goes.")],
) -> None:
    """Make a Hugging Face folder of a checkpoint, which transformers loads.

    Example: skippipe export run model/
    """
    from skippipe.checkpoint.format import MANIFEST, Checkpoints
    from skippipe.checkpoint.manager import export as exported

    place = checkpoint
    if not (checkpoint / MANIFEST).is_file():
        checkpoints = Checkpoints.of_run(checkpoint)
        checkpoints.warn_of_others()
        found = checkpoints.complete()
        if not found:
            raise UserError(f"{checkpoint}: neither a checkpoint nor the output folder of a run that has one")
        place = found[0]
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder}: is not empty; name another folder")
    manifest = exported(place, folder)
    print(f"{place}: the model after {manifest.iterations} iterations is in {folder}/")


def keys(
    cluster: Annotated[
        str,
        typer.Argument(
            metavar="CLUSTER|NAMES",
            help="A cluster file, an example or a preset, as for 'skippipe plan'; or the names of nodes, with commas.",
        ),
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the key files go.")],
) -> None:
    """Make a key for the coordinator and one for every node of a cluster.

    Give each node its own file and nothing else; keep coordinator.key and peers.json, and name both in the job
    ([transport] key and peers). Before there is a cluster file, names will do: 'skippipe profile' makes the file.

    \b
        skippipe keys ann,bob,carol keys/

    Example: skippipe keys cluster.json keys/
    """
    from skippipe.runtime.node.agent import THE_COORDINATOR
    from skippipe.transport.keys import KeyFile, KeyPair, PeerList

    names = _node_names(cluster)
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder}: is not empty; keys are never overwritten")
    own = KeyPair.new()
    KeyFile(THE_COORDINATOR, own).save(folder / "coordinator.key")
    peers = {}
    for name in names:
        pair = KeyPair.new()
        peers[name] = pair.public
        KeyFile(name, pair, own.public).save(folder / f"{name.replace(os.sep, '_')}.key")
    PeerList(peers).save(folder / "peers.json")
    print(f"{len(peers)} node keys, coordinator.key and peers.json are in {folder}/")


def _node_names(said: str) -> list[str]:
    """Those of a cluster, or a list of them."""
    from skippipe.json_fields import exists
    from skippipe.planner.problem_spec import cluster_named
    from skippipe.runtime.node.agent import THE_COORDINATOR

    if "," not in said or exists(Path(said)):
        return [node.name for node in cluster_named(said)[0].nodes]
    names = [name.strip() for name in said.split(",")]
    odd = [name for name in names if not name or not name.isprintable() or name == THE_COORDINATOR]
    if odd or len(set(names)) < len(names):
        raise UserError(f"'{said}': {len(names)} different names of nodes are needed, with commas between them")
    return names


def assembled(
    wanted: JobConfig, stopped: list[bool], nodes_here: bool, resumed: bool, drills: frozenset[int], folder: RunFolder
) -> RunSetup:
    from skippipe.planner.strategies import PlanRequest, Strategy
    from skippipe.training.build_run import build_run

    with plan_command.progress_bar(Strategy(wanted.pipeline.strategy)) as progress:
        request = PlanRequest(wanted.seed, wanted.pipeline.budget_s, None, progress, stopped=lambda: bool(stopped))
        return build_run(
            wanted,
            reading=lambda what, share: progress(what, share, None),
            request=request,
            nodes_here=nodes_here,
            resumed=resumed,
            drills=drills,
            run_id=folder.run_id,
            rescue=folder.rescue,
        )


def _announce(run_setup: RunSetup) -> None:
    from skippipe.training.build_run import in_words, timetable

    plan, expected = run_setup.plan, run_setup.plan.expected
    parameters = plan.workload.model.parameters
    promise = f", {expected.iteration_s:.2f} s an iteration promised" if expected else ""
    print(
        f"{plan.workload.model.name} with {parameters / 1e6:.1f}M weights on {len(plan.stage_of)} nodes of "
        f"'{plan.cluster.name}': {len(plan.stages)} stages, {plan.skipped:.0%} skipped{promise}"
    )
    if len(run_setup.lengths) > 1:
        print(in_words(timetable(run_setup.lengths, run_setup.plans), len(plan.stages)))


def _announce_backup(run_setup: RunSetup) -> None:
    """Who keeps what only stage 0 holds a second time, or what is at risk."""
    plan, every = run_setup.plan, run_setup.job.survive.backup_every
    size = f"{plan.workload.backup_bytes / 1e6:.1f} MB"
    if run_setup.backup is not None:
        source, target = (plan.cluster.nodes[node].name for node in run_setup.backup)
        print(f"every {every} iterations '{target}' gets a copy of what only stage 0 holds: {size} from '{source}'")
    elif every and run_setup.job.averaging.engine == "ring":
        print(f"no node has memory for a copy of what only stage 0 holds ({size}), so none is kept")
    if run_setup.risk:
        print(f"warning: {run_setup.risk}", file=sys.stderr)


def _sum_up(metrics: Path) -> None:
    """The run in a line."""
    from skippipe.runs.records import metrics_of

    found = [metrics_of(line) for line in metrics.read_bytes().split(b"\n")] if metrics.exists() else []
    rows = [each.row for each in found if each is not None and each.row.loss is not None]
    if not rows:
        return
    typical_s = median(row.seconds or 0.0 for row in (rows[1:] or rows))  # the first one warms up
    promised = [row.promised_s for row in rows if row.promised_s is not None]
    promise = f", {median(promised):.2f} s promised" if promised else ""
    ratio = typical_s / median(promised) if promised else 1.0
    if not 1 / UNLIKE < ratio < UNLIKE:
        promise += f": {ratio:.2g} times that. Machines were busy, or are not as the cluster file has them"
    print(
        f"loss {rows[0].loss:.3f} to {rows[-1].loss:.3f} in {len(rows)} iterations; "
        f"{typical_s:.2f} s an iteration (median){promise}"
    )


@contextmanager
def _watching(run_setup: RunSetup) -> Iterator[Callback]:
    """Those who watch are made when there is something to see: by then nodes are forked, and threads may start."""
    from skippipe.training.metrics import (
        CallbackList,
        ClusterFile,
        EventsFile,
        IterationMetrics,
        LazyCallback,
        MetricsFile,
        Prometheus,
        TensorBoard,
        TraceFiles,
    )

    figures = IterationMetrics(run_setup.plan)
    folder = Path(run_setup.job.output)
    asked = run_setup.job.report
    screen = _Screen(figures, run_setup.job.iterations)

    def made() -> Callback:
        written: dict[str, Any] = {"resumed": run_setup.resumed, "run_id": run_setup.run_id}
        callbacks: list[Callback] = [
            MetricsFile(folder / "metrics.jsonl", figures, run_setup.job.iterations, **written),
            EventsFile(folder / "events.jsonl", **written),
            TraceFiles(folder / "traces", run_setup.run_id),
            ClusterFile(folder / "cluster.json"),
        ]
        if asked.tensorboard:
            callbacks.append(TensorBoard(folder / "tensorboard", figures))
        if asked.prometheus:
            callbacks.append(Prometheus(asked.prometheus, figures))
        return CallbackList([*callbacks, cast("Callback", screen)])

    try:
        yield LazyCallback(made)
    finally:
        screen.close()


class _Screen:
    """A bar on a terminal, a few lines elsewhere."""

    def __init__(self, figures: IterationMetrics, iterations: int) -> None:
        self._figures = figures
        self._iterations = iterations
        self._every = -(-iterations // LINES)
        self._bar: Any = None
        self._task: Any = None

    def iteration_done(self, report: IterationReport) -> None:
        found = self._figures.of(report)
        promise = f" (promised {found['promised_s']:.2f})" if "promised_s" in found else ""
        text = f"loss {found['loss']:.4f}  {found['tokens_per_s']:,.0f} tokens/s  {found['seconds']:.2f} s{promise}"
        if sys.stderr.isatty():
            self._show(report.iteration + 1, text)
        elif report.iteration % self._every == 0 or report.iteration + 1 == self._iterations:
            print(f"iteration {report.iteration + 1:>5}/{self._iterations}  {text}", flush=True)

    def happened(self, event: Event) -> None:
        who = f"'{event.node}' " if event.node else ""
        line = f"iteration {event.iteration + 1:>5}  {event.kind}: {who}{event.text}"
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def measured(self, cluster: Cluster) -> None:
        pass

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _show(self, done: int, text: str) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._bar.start()
            self._task = self._bar.add_task("", total=self._iterations)
        self._bar.update(self._task, completed=done, description=text)
