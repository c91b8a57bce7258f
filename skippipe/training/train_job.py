"""A job from its file to a trained model: the output folder, the plan, the run, and what is printed about it."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

from skippipe.errors import UserError
from skippipe.terminal import ProgressBar, interruptible, plan_progress

if TYPE_CHECKING:
    from skippipe.cluster import Cluster
    from skippipe.model.model_spec import ModelSpec
    from skippipe.runs.records import MetricsLine
    from skippipe.runtime.coordinator.interfaces import Callback, Event, IterationReport, ValidationReport
    from skippipe.training.backends import Backend
    from skippipe.training.build_run import RunSetup
    from skippipe.training.job_config import JobConfig
    from skippipe.training.metrics import IterationMetrics
    from skippipe.training.run_folder import RunFolder

MOST_LINES = 25  # of progress, where there is no terminal
NOTABLE_RATIO = 1.25  # of measured and promised seconds: more, or less than its inverse, is remarked on


def wanted_job(path: Path, iterations: int | None, out: str | None) -> JobConfig:
    """The job file with options of the command line; torch must not be imported before."""
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
    """Train as the job says, on this engine, and print how it goes."""
    import torch

    from skippipe.runs.tail import checkpoints_in
    from skippipe.training.backends import BACKENDS
    from skippipe.training.run_folder import open_run_folder

    output = Path(wanted.output)
    if resumed and engine is BACKENDS["one-process"] and any(checkpoints_in(output)):
        raise UserError("--resume: one process does not go on from checkpoints; use --engine virtual or processes")
    torch.set_num_threads(wanted.compute.threads)
    started_here = nodes_here and engine is not BACKENDS["ray"]
    for note in start_notes(wanted, nodes_here=started_here, listens=engine is BACKENDS["processes"]):
        print(note, file=sys.stderr)
    with interruptible(2) as stopped, open_run_folder(output, resumed=resumed, force=force, rescue=rescue) as folder:
        run_setup = build_setup(wanted, stopped, nodes_here, folder, resumed=resumed, drills=drills)
        if stopped:
            raise KeyboardInterrupt
        run_setup.check_room(rescue)
        begin_run(folder, run_setup)
        run_setup.save_plans()
        promised = _promises(run_setup, engine, nodes_here)
        _announce(run_setup, promised)
        if promised and not resumed:
            _announce_turns(run_setup, stopped)
        if run_setup.job.model.weights and not resumed:
            run_setup = run_setup.with_first_checkpoint()
        if engine is not BACKENDS["one-process"]:
            _announce_backup(run_setup)
        with _callbacks(run_setup, promised) as callback:
            engine(run_setup, callback, lambda: len(stopped))
    _print_summary(output / "metrics.jsonl")
    models = run_setup.reached.run.models
    if stopped:
        more = "--resume goes on" if checkpoints_in(output) else "there is no checkpoint to go on from"
        is_written = models.folder.is_written
        what = (
            f"the model as it was then is in {models.place}"
            if is_written
            else "no model was written, as stages were missing"
        )
        print(f"stopped; {what}; {more}", file=sys.stderr)
        raise SystemExit(130)
    print(f"done; the model is in {models.place}, figures in {output}/metrics.jsonl")


def plan_job(wanted: JobConfig, nodes_here: bool = True, listens: bool = True) -> None:
    """Print what a run of the job would come to on the machines of its cluster. Its output folder stays as it is."""
    from skippipe.report.run.summary import duration

    for note in start_notes(wanted, nodes_here=nodes_here, listens=listens):
        print(note, file=sys.stderr)
    with interruptible(2) as stopped, TemporaryDirectory() as folder:
        run_setup = build_setup(replace(wanted, output=folder), stopped, nodes_here, None)
        if stopped:
            raise KeyboardInterrupt
        _announce(run_setup, promised=True)
        _announce_turns(run_setup, stopped)
        _announce_backup(run_setup)
        print(
            f"{wanted.iterations:,} iterations would take {duration(_promised_left(run_setup)(0))} on the machines of "
            f"'{run_setup.plan.cluster.name}', as planned, and more with held-out text, checkpoints and lost nodes"
        )


def start_notes(job: JobConfig, *, nodes_here: bool, listens: bool) -> Iterator[str]:
    """What the job may not mean as it is, a line each. With `listens`, nodes connect to transport.listen."""
    import torch

    from skippipe.training.job_tables import ComputeConfig
    from skippipe.transport.addresses import is_loopback, split_all

    transport = job.transport
    is_local = all(is_loopback(host) for host, _ in split_all(transport.listen))
    if listens and transport.peers and is_local:
        yield (
            f"warning: transport.listen: nodes on other machines cannot reach {transport.listen}, unless by a tunnel; "
            'set transport.listen = "[::]:5555"'
        )
    if listens and not transport.peers and not is_local:
        yield (
            f"warning: transport.listen: is {transport.listen}, but without transport.peers all nodes are started on "
            "this machine"
        )
    if nodes_here and job.compute.device == ComputeConfig.device and (gpus := torch.cuda.device_count()):
        yield (
            f"note: this machine has {gpus} GPU{'s' * (gpus > 1)} and the job uses none; to use them: [compute] device "
            '= "cuda"'
        )


def _promises(run_setup: RunSetup, engine: Backend, nodes_here: bool) -> bool:
    """Whether the plan's promise means something: it is for the machines that run it. These are emulated, or virtual;
    or they are in a cluster file; or, if all nodes are on this machine, it was measured here ('skippipe profile')."""
    from skippipe.json_fields import exists
    from skippipe.training.backends import BACKENDS

    job, plan = run_setup.job, run_setup.plan
    if engine is BACKENDS["one-process"]:
        return False
    if engine is BACKENDS["virtual"] or job.emulation.enabled:
        return True
    if nodes_here:
        here = socket.gethostname()
        return all(plan.cluster.nodes[node].location == here for node in plan.stage_of)
    return bool(job.pipeline.plan) or exists(Path(job.cluster))


def begin_run(folder: RunFolder, run_setup: RunSetup) -> None:
    """Take the folder for the new run; if the folder of an earlier one was renamed, that is printed."""
    aside = folder.begin(run_setup.read_while_training)
    if aside is not None:
        print(f"{folder.path}: the run that was there is in {aside}", file=sys.stderr)


def build_setup(
    wanted: JobConfig,
    stopped: list[int],
    nodes_here: bool,
    folder: RunFolder | None,
    *,
    resumed: bool = False,
    drills: frozenset[int] = frozenset(),
) -> RunSetup:
    """Text, model and plans of a job, to be run in this folder; None: not to be run."""
    from skippipe.planner.problem import PlanRequest, Strategy
    from skippipe.training.build_run import build_run
    from skippipe.training.run import RunOptions

    options = RunOptions(resumed=resumed, drills=drills, leaves_nodes=lambda: signal.SIGTERM in stopped)
    if folder is not None:
        options = replace(options, run_id=folder.run_id, rescue=folder.rescue)
    with plan_progress(Strategy(wanted.pipeline.strategy)) as progress:
        request = PlanRequest(wanted.seed, wanted.pipeline.budget_s, None, progress, stopped=lambda: bool(stopped))
        return build_run(
            wanted,
            reading=lambda what, share: progress(what, share, None),
            request=request,
            nodes_here=nodes_here,
            options=options,
        )


def _announce(run_setup: RunSetup, promised: bool) -> None:
    from skippipe.planner.codec_prices import plan_nats
    from skippipe.report.summary import codecs_text
    from skippipe.training.metrics import timetable_text

    plan, expected = run_setup.plan, run_setup.plan.expected
    parameters = plan.workload.model.parameters
    promise = f", {expected.iteration_s:.2f} s an iteration promised" if expected and promised else ""
    print(
        f"{plan.workload.model.name} with {parameters / 1e6:.1f}M weights on {len(plan.stage_of)} nodes of "
        f"'{plan.cluster.name}': {len(plan.stages)} stages, {plan.skipped:.0%} skipped{promise}"
    )
    if (budget := run_setup.job.codec_budget) and not run_setup.job.pipeline.plan:
        print(f"codecs for {plan_nats(plan, budget.prices):.2g} nats: {codecs_text(plan)}")
    if run_setup.job.model.weights and not run_setup.resumed:
        unsaid = (
            "" if run_setup.job.sets_paths else "; no stage is skipped, as neither recipe.skip nor pipeline.skip is set"
        )
        print(f"begins with the weights in {run_setup.job.model.weights}{unsaid}")
    if run_setup.sampler.summary:
        print(run_setup.sampler.summary)
    print(run_setup.sampler.epochs_text(run_setup.whole_job.iterations))
    if run_setup.spec.frozen:
        trained = sum(plan.workload.trained_parameters(stage, each) for stage, each in enumerate(plan.layers))
        print(
            f"{_trained_text(run_setup.spec)}: {trained / 1e6:.2f}M weights, {trained / parameters:.2%} of the "
            "model's, which stay as they are"
        )
    if teacher := _teacher_text(run_setup.job):
        print(teacher)
    for each in run_setup.depths:
        if (deeper := each.grows_into) is not None:
            now, then = each.plan, deeper.plan
            promise = f", {now.promise.iteration_s:.2f} s an iteration" if promised else ""
            print(
                f"until iteration {each.job.iterations} it has {sum(now.layers)} layers in {len(now.stages)} "
                f"stages{promise}; then {sum(then.layers)} in {len(then.stages)}: "
                + timetable_text(deeper.lengths, deeper.plans, len(then.stages), promised=promised)
            )
    job, first = run_setup.job, run_setup.run.first
    left = job.followed.path_lengths(job.iterations, len(plan.stages), plan.visited, first)
    if left.keys() != {plan.visited}:
        print(timetable_text(left, run_setup.plans, len(plan.stages), promised=promised))


def _teacher_text(job: JobConfig) -> str:
    """From what microbatches that leave stages out learn, beside the text; empty: from nothing, and that is usual."""
    recipe = job.recipe
    if recipe.teacher:
        more = ", and its hidden states" if recipe.distill_hidden else ""
        return f"the whole model teaches microbatches that leave stages out: {recipe.distill:.0%} of their loss{more}"
    return "note: it learns from the text alone; a teacher makes parts much better: recipe.distill" * bool(recipe.heal)


def _trained_text(spec: ModelSpec) -> str:
    """What is trained beside a model that stays as it is."""
    if not spec.heals:
        return f"trains adapters of rank {spec.lora.rank} ({', '.join(spec.lora.targets)})"
    repeats = f" with {spec.repeats} repeat{'s' * (spec.repeats > 1)}" if spec.repeats else ""
    return f"heals: trains bridges of rank {spec.bridges} and adapters of rank {spec.adapters}{repeats}"


def _announce_turns(run_setup: RunSetup, stopped: list[int]) -> None:
    """Print which iterations with paths of several lengths take longer than iterations of each length would, by
    turns on the same nodes."""
    from skippipe.errors import Infeasible
    from skippipe.planner.problem import PlanRequest, Strategy
    from skippipe.planner.strategies import turns_s
    from skippipe.training.metrics import turn_text

    job, turns = run_setup.job, {}
    strategy = Strategy(job.pipeline.strategy)
    request = PlanRequest(job.seed, job.pipeline.budget_s, stopped=lambda: bool(stopped))
    for length, plan in run_setup.plans.items():
        if isinstance(length, tuple):
            with suppress(Infeasible), plan_progress(strategy) as progress:
                progress("comparing with turns", 0, None)
                turns[length] = turns_s(plan, length, strategy, request)
    for length, mean_s in turns.items():
        plan = run_setup.plans[length]
        if mean_s < plan.promise.iteration_s:
            print(
                f'note: by turns, "{turn_text(length, len(plan.stages))}", an iteration would take {mean_s:.2f} s on '
                f"average instead of {plan.promise.iteration_s:.2f} s"
            )


def _announce_backup(run_setup: RunSetup) -> None:
    """Print which node keeps a backup of what only stage 0 holds, or what is at risk."""
    plan, every = run_setup.plan, run_setup.job.survive.backup_every
    size = f"{plan.workload.backup_bytes / 1e6:.1f} MB"
    if run_setup.backup is not None:
        source, target = (plan.cluster.nodes[node].name for node in run_setup.backup)
        print(f"every {every} iterations '{target}' gets a copy of what only stage 0 holds: {size} from '{source}'")
    elif every and run_setup.collective.elastic and not run_setup.spec.frozen:
        print(f"no node has memory for a copy of what only stage 0 holds ({size}), so none is kept")
    if run_setup.risk:
        print(f"warning: {run_setup.risk}", file=sys.stderr)


def _metrics_in(file: Path) -> list[MetricsLine]:
    """What metrics.jsonl has of every iteration; nothing if there is no such file."""
    from skippipe.runs.records import metrics_of

    lines = file.read_bytes().split(b"\n") if file.exists() else []
    return [found for line in lines if (found := metrics_of(line)) is not None]


def _print_summary(metrics: Path) -> None:
    """The run in one line."""
    rows = [each.row for each in _metrics_in(metrics) if each.row.loss is not None]
    if not rows:
        return
    typical_s = median(row.seconds or 0.0 for row in (rows[1:] or rows))  # the first one warms up
    promised = [row.promised_s for row in rows if row.promised_s is not None]
    promise = f", {median(promised):.2f} s promised" if promised else ""
    ratio = typical_s / median(promised) if promised else 1.0
    if ratio >= NOTABLE_RATIO:
        promise += f": {ratio:.2g} times that. Machines were busy, or are slower than the cluster file has them"
    elif ratio <= 1 / NOTABLE_RATIO:
        promise += f": {ratio:.2g} times that. Machines or links are faster than the cluster file has them"
    speeds = [row.tokens_per_s for row in (rows[1:] or rows) if row.tokens_per_s is not None]
    speed = f", {median(speeds):,.0f} tokens/s" if speeds else ""
    print(
        f"loss {rows[0].loss:.3f} to {rows[-1].loss:.3f} in {len(rows)} iterations; "
        f"{typical_s:.2f} s an iteration{speed} (medians){promise}"
    )


@contextmanager
def _callbacks(run_setup: RunSetup, promised: bool = True) -> Iterator[Callback]:
    """Files, reporters and console; made at the first call, when nodes are forked and threads may start."""
    from skippipe.training import metrics
    from skippipe.training.trackers import trackers_of

    folder, iterations = Path(run_setup.job.output), run_setup.whole_job.iterations
    computed = metrics.IterationMetrics(
        run_setup.plan,
        iterations,
        _elapsed_before(folder / "metrics.jsonl", run_setup),
        _promised_left(run_setup),
        promised=promised,
    )
    console = ConsoleCallback(computed, iterations)

    def create() -> list[Callback]:
        written: dict[str, Any] = {"resumed": run_setup.resumed, "run_id": run_setup.run_id}
        callbacks: list[Callback] = [
            metrics.MetricsFile(folder / "metrics.jsonl", computed, iterations, **written),
            metrics.EventsFile(folder / "events.jsonl", **written),
            metrics.TraceFiles(folder / "traces", run_setup.run_id),
            metrics.ClusterFile(folder / "cluster.json"),
        ]
        return [*callbacks, *trackers_of(run_setup.job, run_setup.run_id, computed), cast("Callback", console)]

    callback = metrics.CallbackList(create)
    try:
        yield callback
    finally:
        callback.close()
        console.close()


def _promised_left(run_setup: RunSetup) -> Callable[[int], float]:
    """Gives the promised seconds of all iterations of the run that are left when so many are done."""
    from skippipe.training.metrics import promised_left

    return promised_left([(each.job, each.plan, each.plans) for each in run_setup.depths])


def _elapsed_before(metrics: Path, run_setup: RunSetup) -> float:
    """Seconds that a resumed run has taken up to the checkpoint that it goes on from."""
    if not run_setup.resumed:
        return 0.0
    rows = [each.row for each in _metrics_in(metrics) if each.run == run_setup.run_id]
    return next((row.elapsed_s or 0.0 for row in reversed(rows) if row.iteration < run_setup.run.first), 0.0)


class ConsoleCallback:
    """A progress bar on a terminal, a few lines elsewhere."""

    def __init__(self, metrics: IterationMetrics, iterations: int) -> None:
        self._metrics = metrics
        self._iterations = iterations
        self._every = -(-iterations // MOST_LINES)
        self._bar = ProgressBar()

    def iteration_done(self, report: IterationReport) -> None:
        from skippipe.report.run.summary import duration

        found = self._metrics.of(report)
        promise = f" (promised {found['promised_s']:.2f})" if "promised_s" in found else ""
        text = f"loss {found['loss']:.4f}  {found['tokens_per_s']:,.0f} tokens/s  {found['seconds']:.2f} s{promise}"
        text += f"  lr {found['learning_rate']:.2g}  {duration(found['elapsed_s'])}, {duration(found['left_s'])} left"
        if sys.stderr.isatty():
            self._bar.show(report.iteration + 1, self._iterations, text)
        elif report.iteration % self._every == 0 or report.iteration + 1 == self._iterations:
            print(f"iteration {report.iteration + 1:>5}/{self._iterations}  {text}", flush=True)

    def validated(self, report: ValidationReport) -> None:
        best = ", the lowest so far" if report.is_best else ""
        line = f"iteration {report.iteration + 1:>5}/{self._iterations}  held-out loss {report.loss:.4f}{best}"
        if sys.stderr.isatty():
            self._bar.print(f"{line}  ({report.seconds:.2f} s)")
        else:
            print(f"{line}  ({report.seconds:.2f} s)", flush=True)

    def happened(self, event: Event) -> None:
        node = f"'{event.node}' " if event.node else ""
        self._bar.print(f"iteration {event.iteration + 1:>5}  {event.kind}: {node}{event.text}")

    def measured(self, cluster: Cluster) -> None:
        pass

    def close(self) -> None:
        self._bar.close()
