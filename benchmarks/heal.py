"""`skippipe heal` on a model that was trained without skipping: what is lost without stages, before and after.

    python -m benchmarks.heal studies/robust-105m.toml --device cuda --compiled      # some 6 minutes on one H200
    python -m benchmarks.heal studies/healing.toml --variant "never skipped" --rank 128 --epochs 8 --sequence 128

Trains the model as the study does, unless its folder is there, and runs the command itself: on the beginning of the
training text, gone over several times, with the study's held-out text to measure on. Options that are not
below go to the command.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from skippipe.data.prepare import prepare
from skippipe.data.token_file import HEADER, TokenFile
from skippipe.study.config import Study, load_study
from skippipe.study.runner import LineProgress, chosen, run_study


def trained(study: Study, models: Path, device: str, compiled: bool) -> Path:
    """The folder of the model, which is trained if it is not there."""
    folder = models / f"{study.name}-{study.variant[0].name}-0".replace("/", "-")
    if not folder.exists():
        run_study(study, models / "results.jsonl", device, compiled, LineProgress(), models)
    return folder


def beginning(study: Study, tokens: int, file: Path) -> Path:
    """The first tokens of the training text, as plain text."""
    folder = Path(study.train[0])
    ready = (folder / HEADER).exists()
    made = TokenFile.open(folder) if ready else prepare(study.train, study.vocabulary)
    file.write_text(made.tokenizer().decode(made.ids[:tokens].tolist()))
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--variant", default="full", help="of the study, with seed 0; default: %(default)s")
    parser.add_argument("--models", type=Path, default=Path("models"), help="default: %(default)s")
    parser.add_argument("--share", type=float, default=0.05, help="of the training tokens; default: %(default)s")
    parser.add_argument("--epochs", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--rank", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compiled", action="store_true", help="of training; the command does not compile")
    given, others = parser.parse_known_args()
    study = chosen(load_study(given.study), [given.variant])
    tokens = round(given.share * (study.variant[0].tokens or study.tokens))
    folder = trained(study, given.models, given.device, given.compiled)
    text, output = beginning(study, tokens, folder.with_suffix(".txt")), folder.with_name(f"{folder.name}-healed")
    held_out = study.tests[0].rpartition("=")[2]
    what = [sys.executable, "-m", "skippipe", "heal", str(folder), "--data", str(text), "--held-out", held_out]
    what += ["-o", str(output), "--rank", str(given.rank), "--tokens", str(tokens * given.epochs)]
    subprocess.run([*what, "--device", given.device, *others], check=True)


if __name__ == "__main__":
    main()
