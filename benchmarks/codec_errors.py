"""What codecs take away from activations as training has them, early on: errors on what is sent after each stage.

python -m benchmarks.codec_errors [--study studies/hops.toml] [--after 10 25 50] [codec ...]

Trains the first variant of a study and rounds the hidden states of the whole model after so many iterations. `common`
is the part of their energy that is the same for all tokens, `in 8` that and what lies in the eight principal directions
around it. Errors are roots of mean squares: of all there is, and of what differs between tokens, which is what later
stages can learn from.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from skippipe.codecs import CODECS
from skippipe.data.batch_sampler import BatchSampler
from skippipe.study.config import load_study
from skippipe.study.path_sampling import iteration_paths
from skippipe.study.runner import Runner, StudyDevice

SHOWN = ("int8", "fp8", "int6", "int4", "int4-tile32", "int4-rank8")


def row(hidden: Tensor, codecs: list[str]) -> str:
    values = hidden.flatten(0, -2).double()
    apart = values - values.mean(0)
    energies = torch.linalg.eigvalsh(apart.T @ apart)
    energy = values.square().sum()
    common = 1 - energies.sum() / energy
    found = [f"{common:.1%}", f"{common + energies[-8:].sum() / energy:.1%}"]
    for codec in codecs:
        error = (CODECS[codec].rounded(hidden) - hidden).double().norm()
        found.append(f"{error / values.norm():.2%}, {error / apart.norm():.1%}")
    return " | ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("codecs", nargs="*", choices=[*CODECS, []], default=[])
    parser.add_argument("--study", type=Path, default=Path("studies/hops.toml"))
    parser.add_argument("--after", type=int, nargs="+", default=[10, 25, 50])
    asked = parser.parse_args()
    codecs = asked.codecs or [*SHOWN]
    study = load_study(asked.study)
    study = replace(study, tokens=max(study.tokens, (max(asked.after) + 1) * study.batch.tokens))
    runner = Runner(study, Path("none"), StudyDevice(), lambda *_: None)
    run, batch = study.runs[0], study.batch
    engine = runner._engine(run)
    sampler = BatchSampler(runner.train.ids, batch.sequence, run.seed, batch.microbatches, batch.samples)
    print(f"| after | stage | common | in 8 | {' | '.join(codecs)} |\n|---" + "|---" * (3 + len(codecs)) + "|")
    for number, paths in enumerate(iteration_paths(run)):
        if number in asked.after:
            for stage, hidden in enumerate(engine._whole_states(runner._text.iteration(sampler, number)[0])):
                print(f"| {number} | {stage} | {row(hidden, codecs)} |", flush=True)
        if number == max(asked.after):
            break
        engine.iteration(number, *runner._text.iteration(sampler, number), paths.visits, rate=run.rate(number))


if __name__ == "__main__":
    main()
