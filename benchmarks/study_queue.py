"""The queue of studies/queue.toml, on a GPU that is there for a while.

    python -m benchmarks.study_queue                                     # what is left to run, and why
    python -m benchmarks.study_queue run --minutes 25 --processes 3      # as much of it as fits

Several processes share the card: each takes the next run that is not done, and that no other does. Under NVIDIA's MPS
(`nvidia-cuda-mps-control -d`) three at a time take four fifths of the time of one after another. Results are appended
to studies/results. A run is begun only if it would be over in time: the first of an entry by its minutes in the queue,
times SLOWDOWN, and those after it by what the first took.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from skippipe.errors import UserError
from skippipe.study.config import Study, load_study
from skippipe.study.runner import LineProgress, chosen, run_study, runs_left
from skippipe.toml_config import read_toml

STUDIES = Path(__file__).parent.parent / "studies"
SLOWDOWN = {1: 1.0, 2: 1.7, 3: 2.4}
"""How much longer a run takes beside others, by processes on the card."""


@dataclass(frozen=True)
class Entry:
    study: str
    variants: list[str]
    minutes: float
    """Of one run, alone on one H200."""
    why: str

    def load(self) -> Study:
        return chosen(load_study(STUDIES / self.study), self.variants)

    @property
    def results(self) -> Path:
        return STUDIES / "results" / f"{Path(self.study).stem}.jsonl"

    def left(self) -> int:
        return runs_left(self.load(), self.results)


@dataclass(frozen=True)
class Queue:
    entry: list[Entry]


def show(entries: list[Entry]) -> None:
    for entry in entries:
        left = entry.left()
        if left:
            names = "".join(f"\n  - {name}" for name in entry.variants)
            print(f"{entry.study}: {left} runs of up to {entry.minutes:g} minutes\n  {entry.why}{names}")


def work(entries: list[Entry], device: str, frozen: Path, ends_at: float, slowdown: float) -> None:
    """Go through the queue, and do what no other process does."""
    for entry in entries:
        left_minutes = (ends_at - time.time()) / 60
        if not entry.left() or entry.minutes * slowdown > left_minutes:
            continue
        try:
            run_study(entry.load(), entry.results, device, device != "cpu", LineProgress(), None, left_minutes, frozen)
        except UserError as error:
            print(f"{entry.study}: {error}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", nargs="?", choices=["list", "run", "work"], default="list")
    parser.add_argument("--queue", type=Path, default=STUDIES / "queue.toml")
    parser.add_argument("--minutes", type=float, default=25.0, help="default: %(default)s")
    parser.add_argument("--processes", type=int, choices=SLOWDOWN, default=3, help="default: %(default)s")
    parser.add_argument("--device", default="cuda", help="default: %(default)s")
    parser.add_argument("--frozen", type=Path, default=Path("frozen"), help="folder of weights before healing")
    parser.add_argument("--ends-at", type=float, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    entries = read_toml(Queue, asked.queue).entry
    if asked.action == "list":
        show(entries)
    elif asked.action == "work":
        work(entries, asked.device, asked.frozen, asked.ends_at, SLOWDOWN[asked.processes])
    else:
        ends_at = time.time() + 60 * asked.minutes
        command = [sys.executable, "-m", "benchmarks.study_queue", "work", "--ends-at", str(ends_at)]
        command += ["--queue", asked.queue, "--device", asked.device, "--frozen", asked.frozen]
        workers = [subprocess.Popen([*command, "--processes", str(asked.processes)]) for _ in range(asked.processes)]
        sys.exit(max(worker.wait() for worker in workers))


if __name__ == "__main__":
    main()
