"""`skippipe study run` for machines that have torch and little else: plain lines, no terminal.

python -m skippipe.study study.toml --results results.jsonl --device cuda --compiled
"""

from __future__ import annotations

import math
import sys
import time
from argparse import ArgumentParser, RawTextHelpFormatter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from skippipe.cli import politely
from skippipe.errors import UserError
from skippipe.study.config import Study, load_study

if TYPE_CHECKING:
    from skippipe.study.runner import RunProgress

PARTS = 10  # of a run, with a line for each


class LineProgress:
    """A line for every tenth of a run."""

    def __init__(self) -> None:
        self._last = ("", 0)

    def __call__(self, run: str, share: float, how: str) -> None:
        part = run, int(PARTS * share)
        if part != self._last and part[1]:
            print(f"{run:<40} {share:>4.0%}  {how}", flush=True)
        self._last = part


def run_study(
    study: Study,
    results: Path,
    device: str,
    compiled: bool,
    progress: RunProgress,
    models: Path | None = None,
    minutes: float = math.inf,
) -> None:
    """All runs that are not in the results yet; an interrupted one is done again from its start.

    None is begun that would not be over after so many minutes, counted from now.
    """
    ends_at = time.monotonic() + 60 * minutes
    import torch

    from skippipe.study.config import read_results
    from skippipe.study.runner import Device, Runner

    if not device.startswith("cpu") and not torch.cuda.is_available():
        raise UserError(f"--device: there is no '{device}' that torch could use here; use cpu")

    def left() -> int:
        done = {result["key"] for result in read_results(results)}
        return sum(run.key not in done for run in study.runs)

    print(f"{study.name}: {left()} of {len(study.runs)} runs to do, on {device}", flush=True)
    try:
        Runner(study, results, Device(device, compiled), progress, models, ends_at=ends_at).run()
    except KeyboardInterrupt:
        print(f"stopped; {left()} runs are left, and the same command goes on with them", file=sys.stderr)
        raise SystemExit(130) from None
    if left():
        print(f"{left()} runs are left: {minutes:g} minutes are too short for them; the same command goes on with them")
    else:
        print(f"done; all {len(study.runs)} runs are in {results}")


def chosen(study: Study, names: list[str] | None) -> Study:
    """The study with only these variants, in their order; None: with all."""
    if names is None:
        return study
    variants = {each.name: each for each in study.variant}
    for name in names:
        if name not in variants:
            raise UserError(f"--only: the study has no variant '{name}', but {', '.join(variants)}")
    return replace(study, variant=[variants[name] for name in dict.fromkeys(names)])


def main() -> None:
    parser = ArgumentParser("python -m skippipe.study", description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("study", type=Path, metavar="FILE", help="a study file (TOML)")
    parser.add_argument("--results", type=Path, default=Path("results.jsonl"), help="default: %(default)s")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N; default: %(default)s")
    parser.add_argument("--compiled", action="store_true", help="compile layers: slow to start, faster from then on")
    parser.add_argument("--models", type=Path, help="folder to keep the trained models in")
    parser.add_argument("--only", action="append", metavar="VARIANT", help="only this variant; may be said repeatedly")
    parser.add_argument(
        "--stop-after",
        type=float,
        default=math.inf,
        metavar="MINUTES",
        help="begin no run that would take longer than this from now on, by what runs before it took",
    )
    said = parser.parse_args()
    politely(
        lambda: run_study(
            chosen(load_study(said.study), said.only),
            said.results,
            said.device,
            said.compiled,
            LineProgress(),
            said.models,
            said.stop_after,
        )
    )


if __name__ == "__main__":
    main()
