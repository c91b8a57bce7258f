"""`skippipe study run` for machines that have torch and little else: plain lines, no terminal.

python -m skippipe.study study.toml --results results.jsonl --device cuda --compiled
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, RawTextHelpFormatter
from pathlib import Path
from typing import TYPE_CHECKING

from skippipe.cli import politely
from skippipe.errors import UserError
from skippipe.study.settings import Study, load_study

if TYPE_CHECKING:
    from skippipe.study.runner import Progress

PARTS = 10  # of a run, with a line for each


class Lines:
    """A line for every tenth of a run."""

    def __init__(self) -> None:
        self._last = ("", 0)

    def __call__(self, run: str, share: float, how: str) -> None:
        part = run, int(PARTS * share)
        if part != self._last and part[1]:
            print(f"{run:<40} {share:>4.0%}  {how}", flush=True)
        self._last = part


def run_study(
    study: Study, results: Path, device: str, compiled: bool, progress: Progress, models: Path | None = None
) -> None:
    """All runs that are not in the results yet; an interrupted one is done again from its start."""
    import torch

    from skippipe.study.runner import Device, Runner
    from skippipe.study.settings import read_results

    if not device.startswith("cpu") and not torch.cuda.is_available():
        raise UserError(f"--device: there is no '{device}' that torch could use here; use cpu")

    def left() -> int:
        done = {result["key"] for result in read_results(results)}
        return sum(run.key not in done for run in study.runs)

    print(f"{study.name}: {left()} of {len(study.runs)} runs to do, on {device}", flush=True)
    try:
        Runner(study, results, Device(device, compiled), progress, models).run()
    except KeyboardInterrupt:
        print(f"stopped; {left()} runs are left, and the same command goes on with them", file=sys.stderr)
        raise SystemExit(130) from None
    print(f"done; all {len(study.runs)} runs are in {results}")


def main() -> None:
    parser = ArgumentParser("python -m skippipe.study", description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("study", type=Path, metavar="FILE", help="a study file (TOML)")
    parser.add_argument("--results", type=Path, default=Path("results.jsonl"), help="default: %(default)s")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N; default: %(default)s")
    parser.add_argument("--compiled", action="store_true", help="compile layers: slow to start, faster from then on")
    parser.add_argument("--models", type=Path, help="folder to keep the trained models in")
    said = parser.parse_args()
    study = load_study(said.study)
    politely(lambda: run_study(study, said.results, said.device, said.compiled, Lines(), said.models))


if __name__ == "__main__":
    main()
