"""What training survives, and how soon it goes on: random faults on real processes and under virtual time.

python -m benchmarks.chaos virtual [--plans 10000] [--seed 0] [--processes 2] [--only SEED]
python -m benchmarks.chaos processes [--plans 200] [--seed 0] [--only SEED] [--out-only]
python -m benchmarks.chaos recovery [--repetitions 20] [--heartbeat 5] [--joined]
python -m benchmarks.chaos long [--iterations 200] [--seeds 3]
python -m benchmarks.chaos detection [--repetitions 3] [--heartbeat 5]

`virtual` and `processes` draw fault plans, print each that was not survived, and end with status 1 if there was one; a
plan follows from its seed alone, so `--only` plays it again and tells the whole story. With `--out-only`, four of nine
nodes cannot be called, others with every seed, and meet at a relay, which is killed in the middle and comes back.
`recovery` kills one of nine nodes in every role and phase and takes the time until the iteration is done. `long` trains
with nodes lost and coming back all the time, beside the same without. `detection` takes the time from a fault until it
is noticed, over real sockets in network namespaces, where links drop packets without a word; it needs root, or unshare
--map-root-user.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from random import Random
from statistics import mean, median, pstdev
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from benchmarks.detection import detection
from skippipe.heartbeat import TIMEOUT_S
from skippipe.plan import Plan
from skippipe.planner.repair.repair import compile_repair
from skippipe.runtime.messages import COORDINATOR
from skippipe.runtime.simulation.fault_injection import DURING, RELAY, During, Fault, drawn, kill
from tests.helpers.chaos import HEARTBEAT_S, NODES, ONLY, Chaos, CheckFailed, Outcome, RunSetup
from tests.helpers.fault_scenarios import scenario
from tests.helpers.virtual_chaos import Hang, plans_of, play, staged

ITERATIONS = 6
SHORTER = HEARTBEAT_S / 5.0  # what lasts for seconds under virtual time, where the heartbeat is 5 s
ROLES = {"data node": 0, "one of two": 3, "alone on its stage": ONLY, "one of three": 7}
LAST = 10  # iterations that the final loss is the mean of


# Virtual time

TOLD_EVERY = 500  # plans, with a line of progress for each


@dataclass(frozen=True)
class Verdict:
    seed: int
    flaw: str
    """What is wrong, in a line; empty if nothing."""
    story: str
    took_s: float
    events: Counter[str]
    nothing_left: bool


def judged(seed: int) -> Verdict:
    logging.disable(logging.WARNING)  # nodes say what they drop, which is a lot
    played = staged(scenario(seed))
    flaw, began = "", time.perf_counter()
    try:
        play(played)
    except Hang as error:
        flaw = f"hang: {error}"
    except Exception as error:
        flaw = f"{type(error).__name__}: {error}"
    return Verdict(
        seed,
        flaw,
        str(played.scenario),
        time.perf_counter() - began,
        Counter(event.kind for _, event in played.cluster.events),
        played.nothing_left,
    )


def virtual(asked: argparse.Namespace) -> int:
    compile_repair()  # once for all: or it would count as time of the first plan of each process
    if asked.only is not None:
        played = staged(scenario(asked.only))
        try:
            play(played)
        finally:
            print(played.timeline())
        return 0
    began = time.perf_counter()
    verdicts = []
    with multiprocessing.get_context("forkserver").Pool(asked.processes) as pool:
        for verdict in pool.imap_unordered(judged, range(asked.seed, asked.seed + asked.plans), chunksize=20):
            verdicts.append(verdict)
            if verdict.flaw:
                print(f"{verdict.flaw}\n{verdict.story}\n", flush=True)
            if len(verdicts) % TOLD_EVERY == 0:
                print(f"{len(verdicts)} of {asked.plans}", file=sys.stderr, flush=True)
    took_s = time.perf_counter() - began
    failed = sorted(each.seed for each in verdicts if each.flaw)
    events: Counter[str] = sum((each.events for each in verdicts), Counter())
    slowest = max(verdicts, key=lambda each: each.took_s)
    print(f"{len(verdicts)} fault plans from seed {asked.seed}, {took_s:.0f} s, {len(verdicts) / took_s:.1f} a second")
    print(f"{len(failed)} not survived: {failed or 'none'}")
    hangs = sum(each.flaw.startswith("hang") for each in verdicts)
    print(f"{hangs} hangs; the slowest took {slowest.took_s:.1f} s (seed {slowest.seed})")
    print(f"{sum(each.nothing_left for each in verdicts)} in which all who had any state were lost at once")
    print("events:", ", ".join(f"{count} {kind}" for kind, count in events.most_common()))
    return bool(failed)


# Real processes


@dataclass
class Tally:
    """Of many runs."""

    runs: int = 0
    failed: list[int] = field(default_factory=list)
    flaws: Counter[str] = field(default_factory=Counter)
    recoveries: list[tuple[float, int]] = field(default_factory=list)
    """Seconds, and the seed."""
    iterations_s: list[float] = field(default_factory=list)
    strikes: Counter[str] = field(default_factory=Counter)

    def take(self, seed: int, outcome: Outcome) -> None:
        self.recoveries += [(took_s, seed) for took_s in outcome.recoveries_s]
        self.iterations_s.append(quiet_s(outcome))
        self.strikes.update(
            fault.kind for fault, at in zip(outcome.scene.faults, outcome.strikes, strict=True) if at is not None
        )

    def print(self, heartbeat_s: float) -> None:
        print(f"{self.runs} fault plans; not survived: {self.failed or 'none'}")
        for flaw in ("hang", "lost or doubled microbatches", "orphans", "other"):
            print(f"  {flaw}: {self.flaws[flaw]}")
        print("strikes:", ", ".join(f"{count} {kind}" for kind, count in self.strikes.most_common()))
        if self.recoveries:
            iteration_s = median(self.iterations_s)
            print(f"an undisturbed iteration: {iteration_s:.2f} s (median of the runs' medians)")
            usual_s, (worst_s, seed) = median(took_s for took_s, _ in self.recoveries), max(self.recoveries)
            print(f"recovery, median: {usual_s:.2f} s, {in_units(usual_s, heartbeat_s, iteration_s)}")
            print(f"recovery, worst: {worst_s:.2f} s (seed {seed}), {in_units(worst_s, heartbeat_s, iteration_s)}")


def in_units(took_s: float, heartbeat_s: float, iteration_s: float) -> str:
    """The most heartbeats that fit, and the rest in iterations."""
    heartbeats, rest_s = divmod(took_s, heartbeat_s)
    return f"{heartbeats:.0f} heartbeats of {heartbeat_s:g} s + {rest_s / iteration_s:.1f} iterations"


def quiet_s(outcome: Outcome) -> float:
    """An iteration in which nothing happened; the first warms up."""
    loud = {event["iteration"] for event in outcome.events}
    quiet = [row["seconds"] for row in outcome.metrics[1:] if row["iteration"] not in loud]
    return float(median(quiet or [row["seconds"] for row in outcome.metrics]))


def kind_of(flaw: str) -> str:
    if flaw.startswith("not over after"):
        return "hang"
    if "visits" in flaw.partition("\n")[0] or "on stage 0" in flaw.partition("\n")[0]:
        return "lost or doubled microbatches"
    return "orphans" if "are left" in flaw or "somebody listens" in flaw else "other"


def half_of(random: Random, plan: Plan) -> frozenset[int]:
    """Nodes that cannot be called: half of all, and never all of a stage."""
    kept = {random.choice(stage.nodes) for stage in plan.stages}
    return frozenset(random.sample([node for node in plan.stage_of if node not in kept], NODES // 2))


def drawn_chaos(seed: int, run_setup: RunSetup, folder: Path, *, out_only: bool = False) -> Chaos:
    random = Random(seed)
    faults = drawn(random, Plan.load(run_setup.plan_file), ITERATIONS)
    faults = [replace(fault, lasts_s=fault.lasts_s and fault.lasts_s * SHORTER) for fault in faults]
    joined = any(COORDINATOR in fault.nodes for fault in faults) or random.random() < 0.3
    choices = {"kept_every": random.choice([0, 2]), "lost_stage": random.choice(["checkpoint", "neighbours"])}
    faults = [replace(fault, silent=fault.kind.startswith("cut") and random.random() < 0.5) for fault in faults]
    if not out_only:
        return Chaos(run_setup, folder, faults, ITERATIONS, joined=joined, choices=choices)
    half = half_of(random, Plan.load(run_setup.plan_file))
    lost = kill(RELAY).at(random.randrange(1, ITERATIONS - 1), random.choice(DURING[:5]))
    faults.append(lost.back_after(SHORTER * random.choice([0.01, 3.0, 12.0, 40.0])))
    return Chaos(run_setup, folder, faults, ITERATIONS, joined=True, choices=choices, out_only=half, relay=True)


def processes(asked: argparse.Namespace) -> int:
    compile_repair()  # once for all: or the first loss of a node waits for it
    seeds = range(asked.seed, asked.seed + asked.plans) if asked.only is None else [asked.only]
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="chaos") as name:
        run_setup = made(Path(name) / "run_setup")
        for seed in seeds:
            chaos = drawn_chaos(seed, run_setup, Path(name) / str(seed), out_only=asked.out_only)
            tally.runs += 1
            try:
                outcome = chaos.run()
                outcome.check()
                tally.take(seed, outcome)
                if asked.only is not None:
                    print(outcome.timeline())
            except CheckFailed as error:
                tally.failed.append(seed)
                tally.flaws[kind_of(str(error))] += 1
                print(f"seed {seed}: {'; '.join(map(str, chaos.faults))}\n{error}\n", flush=True)
            else:
                shutil.rmtree(Path(name) / str(seed))
    tally.print(HEARTBEAT_S)
    return bool(tally.failed)


def made(folder: Path, text: str | None = None, **sizes: Any) -> RunSetup:
    folder.mkdir(parents=True)
    return RunSetup.made(folder, text, **sizes)


# How soon


def recovery(asked: argparse.Namespace) -> int:
    """Of one loss, in every role and phase."""
    phases: tuple[During, ...] = ("forward", "backward", "averaging", "step")
    cases = [(role, node, phase) for phase in phases for role, node in ROLES.items()]
    cases += [
        ("data node", 1, "head"),
        ("data node", 2, "head"),
        ("one of two", 4, "checkpoint"),
        ("one of three", 8, "checkpoint"),
    ]
    took, within = [], 0
    print(f"{'killed':<20} {'during':<12} {'iteration':>10} {'recovery':>10} {'limit':>8}")
    with tempfile.TemporaryDirectory(prefix="chaos") as name:
        run_setup = made(Path(name) / "run_setup")
        for number, (role, node, phase) in enumerate(islice(cycle(cases), asked.repetitions)):
            fault = kill(node).at(iteration=3, during=phase).back_after(0.5)
            choices = {"heartbeat_s": asked.heartbeat, "kept_every": 2 if phase == "checkpoint" else 0}
            outcome = Chaos(run_setup, Path(name) / str(number), [fault], 8, joined=asked.joined, choices=choices).run()
            outcome.check()
            iteration_s, recovered_s = quiet_s(outcome), outcome.recoveries_s[0]
            limit_s = asked.heartbeat + 2 * iteration_s
            took.append(recovered_s)
            within += recovered_s <= limit_s
            print(f"{role:<20} {phase:<12} {iteration_s:>8.2f} s {recovered_s:>8.2f} s {limit_s:>6.2f} s", flush=True)
    print(f"{within} of {len(took)} within one heartbeat and two iterations")
    print(f"recovery: median {median(took):.2f} s, worst {max(took):.2f} s")
    return within < len(took)


# How well


def losses_of(seed: int, iterations: int) -> list[Fault]:
    """A tenth of the nodes for every twenty iterations, somewhere in them; they come back after a second."""
    random = Random(seed)
    faults = []
    for start in range(5, iterations - 10, 20):
        for node in random.sample(range(NODES), max(1, round(NODES / 10))):
            phase: During = random.choice(DURING[:5])
            faults.append(kill(node).at(start + random.randrange(10), phase).back_after(1.0))
    return faults


def missing(outcome: Outcome) -> Counter[int]:
    """Stage → microbatches that were planned to count there, and did not."""
    found: Counter[int] = Counter()
    for plan, row in zip(plans_of(outcome.wal), outcome.metrics, strict=True):
        found.update(
            {stage: most - count for stage, (most, count) in enumerate(zip(plan.exposure, row["visits"], strict=True))}
        )
    return found


def final(outcome: Outcome) -> float:
    return float(mean(row["loss"] for row in outcome.metrics[-LAST:]))


def summary(outcome: Outcome) -> str:
    lost, struck = missing(outcome), sum(at is not None for at in outcome.strikes)
    counted = sum(sum(row["visits"]) for row in outcome.metrics)
    return (
        f"loss {outcome.metrics[0]['loss']:.3f} to {final(outcome):.4f}, {struck} of {len(outcome.scene.faults)} nodes "
        f"lost, {len(outcome.said('able'))} came back; {lost.total()} of {counted + lost.total()} visits were lost "
        f"with them {dict(sorted(lost.items()))}; {outcome.took_s:.0f} s"
    )


def long(asked: argparse.Namespace) -> int:
    rows = []
    with tempfile.TemporaryDirectory(prefix="chaos") as name:
        run_setup = made(Path(name) / "run_setup", "classics", sequence=32, samples=2)
        for seed in range(asked.seeds):
            outcomes = []
            for what, faults in (("quiet", []), ("chaos", losses_of(seed, asked.iterations))):
                chaos = Chaos(
                    run_setup,
                    Path(name) / f"{what}{seed}",
                    faults,
                    asked.iterations,
                    joined=False,
                    patience_s=60 + 5 * asked.iterations,
                    choices={"seed": seed, "kept_every": 20},
                )
                outcome = chaos.run()
                outcome.check()
                outcomes.append(outcome)
                print(f"seed {seed}, {what}: {summary(outcome)}", flush=True)
            rows.append((final(outcomes[0]), final(outcomes[1])))
    return told(rows)


def told(rows: Sequence[tuple[float, float]]) -> int:
    quiet, chaotic = zip(*rows, strict=True)
    differences = [b - a for a, b in rows]
    spread = pstdev(quiet)
    print(
        f"final losses (mean of the last {LAST} iterations), undisturbed: {', '.join(f'{each:.4f}' for each in quiet)}"
    )
    print(f"                                             disturbed: {', '.join(f'{each:.4f}' for each in chaotic)}")
    print(f"differences: {', '.join(f'{each:+.4f}' for each in differences)}, mean {mean(differences):+.4f}")
    print(f"standard deviation between undisturbed seeds: {spread:.4f}")
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True)
    for name, run, plans in (("virtual", virtual, 10_000), ("processes", processes, 200)):
        each = kinds.add_parser(name)
        each.add_argument("--plans", type=int, default=plans)
        each.add_argument("--seed", type=int, default=0, help="of the first plan; the others follow")
        each.add_argument("--only", type=int, metavar="SEED", help="play this plan alone and tell its story")
        if name == "virtual":
            each.add_argument("--processes", type=int, default=2)
        else:
            each.add_argument("--out-only", action="store_true", help="four of nine nodes cannot be called")
        each.set_defaults(run=run)
    each = kinds.add_parser("recovery")
    each.add_argument("--repetitions", type=int, default=20)
    each.add_argument("--heartbeat", type=float, default=TIMEOUT_S)
    each.add_argument("--joined", action="store_true", help="nodes join by themselves")
    each.set_defaults(run=recovery)
    each = kinds.add_parser("long")
    each.add_argument("--iterations", type=int, default=200)
    each.add_argument("--seeds", type=int, default=3)
    each.set_defaults(run=long)
    each = kinds.add_parser("detection")
    each.add_argument("--repetitions", type=int, default=3)
    each.add_argument("--heartbeat", type=float, default=TIMEOUT_S)
    each.set_defaults(run=detection)
    asked = parser.parse_args()
    sys.exit(asked.run(asked))


if __name__ == "__main__":
    main()
