"""`skippipe study run` for machines that have torch and little else: plain lines, no terminal.

python -m skippipe.study study.toml -o results.jsonl --device cuda --compiled
"""

from __future__ import annotations

import math
from argparse import ArgumentParser, RawTextHelpFormatter
from pathlib import Path

from skippipe.errors import run_command
from skippipe.study.config import load_study
from skippipe.study.runner import LineProgress, chosen, run_study


def main() -> None:
    parser = ArgumentParser("python -m skippipe.study", description=__doc__, formatter_class=RawTextHelpFormatter)
    parser.add_argument("study", type=Path, metavar="FILE", help="a study file (TOML)")
    parser.add_argument("-o", "--output", type=Path, default=Path("results.jsonl"), help="default: %(default)s")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N; default: %(default)s")
    parser.add_argument("--compiled", action="store_true", help="compile layers: slow to start, faster from then on")
    parser.add_argument("--models", type=Path, help="folder to keep the trained models in")
    parser.add_argument(
        "--frozen",
        type=Path,
        help="folder to keep the weights in with which healing begins, for variants that share them",
    )
    parser.add_argument(
        "--only", action="append", metavar="VARIANT", help="only this variant; may be given several times"
    )
    parser.add_argument(
        "--stop-after",
        type=float,
        default=math.inf,
        metavar="MINUTES",
        help="begin no run that would take longer than this from now on, by what runs before it took",
    )
    arguments = parser.parse_args()
    run_command(
        lambda: run_study(
            chosen(load_study(arguments.study), arguments.only),
            arguments.output,
            arguments.device,
            arguments.compiled,
            LineProgress(),
            arguments.models,
            arguments.stop_after,
            arguments.frozen,
        )
    )


if __name__ == "__main__":
    main()
