"""Tables of what is left of a model when stages are missing.

parts         what is lost in perplexity when stages are left out, after training
parts_by_wire what codecs on hops cost then
questions     how many questions it answers, whole and without stages
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from skippipe.report.summary import Table
from skippipe.study.results import Result, Runs, Seeds, spread

QUESTION_METRICS = {"cloze": "acc", "choice": "acc_mutual_info", "order": "acc"}
"""The metric of each kind of question that is shown."""


@dataclass(frozen=True)
class Increase:
    """Increase of the perplexity when only so many stages are kept: 0.1 is 10% more than the same model has whole."""

    text: str
    kept: int
    stages: int
    drive: float
    """The exponent that was best on the first text."""
    means: list[float]
    """Over the parts of this size, for each seed; likewise of the best and of the worst part."""
    bests: list[float]
    worsts: list[float]
    undriven: list[float]
    """The means if stages are not driven."""


def increases(seeds: Seeds) -> list[Increase]:
    """For every text and number of stages, by the parts of those runs that measured the whole among them."""
    models = [parts for result in seeds.values() if (parts := _Parts(result)).whole]
    found = []
    for kept in sorted({kept for parts in models for kept in parts.sizes}, reverse=True):
        measured = [parts for parts in models if kept in parts.sizes]
        first = measured[0]
        drive = min(first.drives(kept), key=lambda drive: fmean(each.mean(kept, drive) for each in measured))
        for text in first.whole:
            driven = [parts.increases(text, kept, drive) for parts in measured]
            undriven = [fmean(parts.increases(text, kept, 0.0)) for parts in measured]
            means, bests, worsts = ([kind(each) for each in driven] for kind in (fmean, min, max))
            found.append(Increase(text, kept, first.stages, drive, means, bests, worsts, undriven))
    return found


class _Parts:
    """The losses of all parts of one model, and of the whole on the same windows."""

    def __init__(self, result: Result, parts: Sequence[Mapping[str, Any]] | None = None) -> None:
        self.stages: int = result["settings"]["variant"]["stages"]
        self._losses: dict[tuple[str, int, float], list[float]] = {}
        for part in result["parts"] if parts is None else parts:
            self._losses.setdefault((part["text"], len(part["stages"]), part["drive"]), []).append(part["loss"])
        self.whole = {text: losses[0] for (text, kept, _), losses in self._losses.items() if kept == self.stages}
        self.sizes = {kept for _, kept, _ in self._losses} - {self.stages}

    def drives(self, kept: int) -> list[float]:
        return sorted({drive for _, size, drive in self._losses if size == kept})

    def mean(self, kept: int, drive: float) -> float:
        """On the first text, which is the one to choose by."""
        return fmean(self._losses[next(iter(self.whole)), kept, drive])

    def increases(self, text: str, kept: int, drive: float) -> list[float]:
        return [math.expm1(loss - self.whole[text]) for loss in self._losses[text, kept, drive]]

    def increase_to(self, other: _Parts, text: str, kept: int) -> float:
        """From these losses to others of the same parts, at the drive that is best for these."""
        drive = min(self.drives(kept), key=lambda drive: self.mean(kept, drive))
        pairs = zip(self._losses[text, kept, drive], other._losses[text, kept, drive], strict=True)
        return fmean(math.expm1(after - before) for before, after in pairs)


def parts(runs: Runs) -> Table | None:
    rows = [
        (
            name,
            each.text,
            f"{each.kept} of {each.stages}",
            f"{each.drive:g}",
            *(spread(values, "+.1%") for values in (each.means, each.bests, each.worsts, each.undriven)),
        )
        for name, seeds in runs.items()
        for each in increases(seeds)
    ]
    note = (
        "Increase of the perplexity against the same model whole, when stages are left out after training: mean over "
        "the parts that were drawn, best and worst of them. Stages that are kept are driven by ((S−1)/(L−1)) to the "
        "power of the exponent, the one with the lowest mean loss on the first text; undriven: exponent 0."
    )
    headings = ("variant", "text", "kept stages", "exponent", "mean", "best part", "worst part", "mean, undriven")
    return Table("Parts of the model", note, headings, rows) if rows else None


def parts_by_wire(runs: Runs) -> Table | None:
    rows = []
    for name, seeds in runs.items():
        measured: dict[tuple[str, str, int, int], list[float]] = {}
        for result in seeds.values():
            plain = _Parts(result)
            for wire, losses in result.get("parts_by_wire", {}).items():
                rounded = _Parts(result, losses)
                for text in plain.whole:
                    for kept in sorted({plain.stages, *plain.sizes}, reverse=True):
                        more = plain.increase_to(rounded, text, kept)
                        measured.setdefault((wire, text, kept, plain.stages), []).append(more)
        for (wire, text, kept, stages), increase in measured.items():
            rows.append((name, wire, text, f"{kept} of {stages}", spread(increase, "+.2%")))
    note = "Increase of the perplexity against the same stages without a codec, mean over the parts that were drawn."
    headings = ("variant", "codec of hops", "text", "stages", "increase")
    return Table("Codecs on hops after training", note, headings, rows) if rows else None


def questions(runs: Runs) -> Table | None:
    asked = [result["questions"] for seeds in runs.values() for result in seeds.values() if result.get("questions")]
    if not asked:
        return None
    rows = []
    for name, seeds in runs.items():
        shares: dict[tuple[str, str], dict[str, list[float]]] = {}
        for result in seeds.values():
            groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
            for part in result.get("questions", {}).get("parts", []):
                stages = f"{len(part['stages'])} of {result['settings']['variant']['stages']}"
                groups.setdefault((part["text"], stages), []).append(part["scores"])
            for group, scores in groups.items():
                for kind, metric in QUESTION_METRICS.items():
                    values = [each[kind][metric] for each in scores if kind in each]
                    shares.setdefault(group, {}).setdefault(kind, []).extend([fmean(values)] if values else [])
        rows += [(name, *group, *(spread(each, ".3f") for each in kinds.values())) for group, kinds in shares.items()]
    counts = "; ".join(
        f"{text}: "
        + ", ".join(f"{each['count']} {kind} (guessing: {each['chance']:.2f})" for kind, each in kinds.items())
        for text, kinds in asked[0]["asked"].items()
    )
    fewest = min(each["count"] for kinds in asked[0]["asked"].values() for each in kinds.values())
    error = 0.5 / math.sqrt(fewest)
    note = (
        "Share of the questions made of held-out text that is answered rightly (docs/scoring.md): cloze by the greedy "
        "word, choice by mutual information, order by likelihood. Mean over the parts that were drawn, driven as is "
        f"best for their loss. Questions: {counts}. By their number, a share of one part has a standard error of up to "
        f"{error:.3f}."
    )
    return Table("Questions", note, ("variant", "text", "stages", *QUESTION_METRICS), rows)
