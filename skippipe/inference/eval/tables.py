"""An evaluation as tables for people, and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from skippipe.inference.eval.evaluate import BEST, Evaluation, SizeSummary
from skippipe.inference.eval.perplexity import EXPONENTS
from skippipe.report.summary import NOTHING, Table
from skippipe.stage_subset import StageSubset


def tables(evaluation: Evaluation) -> list[Table]:
    """All tables that have rows; each names the codec, since a table is what people copy."""
    found = [subsets_table(evaluation), sizes_table(evaluation), ablation_table(evaluation), order_table(evaluation)]
    codec = f", with codec {evaluation.wire} between stages" if evaluation.wire else ""
    return [replace(table, title=table.title + codec) for table in found if table.rows]


def subsets_table(evaluation: Evaluation) -> Table:
    rows = [
        [
            subset.name,
            f"{len(subset.stages) / evaluation.total:.0%}",
            f"{evaluation.share_of_parameters(subset):.1%}",
        ]
        + [cell for text in evaluation.texts for cell in _measured(evaluation, subset, text.text)]
        for subset in evaluation.wanted
    ]
    headings = ["subset", "stages", "parameters", *_by_text(evaluation, ["loss", "perplexity", "increase"])]
    return Table("Subsets", "Increase: of the perplexity, against the whole model's.", headings, rows)


def sizes_table(evaluation: Evaluation) -> Table:
    """Perplexities by size; empty where no two subsets have the same size."""
    by_text = {text.text: {size.kept: size for size in evaluation.sizes(text.text)} for text in evaluation.texts}
    first = by_text[evaluation.texts[0].text]
    rows = [
        [_of(evaluation, kept), str(size.subsets)]
        + [cell for text, sizes in by_text.items() for cell in _summary(evaluation, sizes.get(kept), text)]
        for kept, size in first.items()
    ]
    several = any(size.subsets > 1 for size in first.values())
    headings = ["kept", "subsets", *_by_text(evaluation, ["mean", "best", "worst"])]
    return Table("By share", "Perplexities of subsets of the same size.", headings, rows if several else [])


def ablation_table(evaluation: Evaluation) -> Table:
    rows = [
        [str(stage), str(evaluation.layers[stage]), f"{1 - evaluation.share_of_parameters(subset):.1%}"]
        + [cell for text in evaluation.texts for cell in _measured(evaluation, subset, text.text)[1:]]
        for stage, subset in evaluation.single_ablations()
    ]
    headings = ["lost", "layers", "parameters", *_by_text(evaluation, ["perplexity", "increase"])]
    return Table("Losing one stage", "The costliest first; stage 0 cannot be lost.", headings, rows)


def order_table(evaluation: Evaluation) -> Table:
    """The greedy order of ablation, and beside it the best subset of every size, if all were measured."""
    texts = [text.text for text in evaluation.texts]
    best_by_size = evaluation.best_by_size(texts[0])
    rows = []
    for ablation in evaluation.order:
        subset = evaluation.subset(ablation.remaining)
        row = [_of(evaluation, len(ablation.remaining)), str(ablation.stage), subset.name]
        row += [cell for text in texts for cell in _measured(evaluation, subset, text)[1:]]
        if best_by_size:
            best = best_by_size[len(ablation.remaining)]
            row.append(NOTHING if best == subset else f"{best.name}: {_perplexity(evaluation, best, texts[0])}")
        rows.append(row)
    headings = ["kept", "dropped", "left", *_by_text(evaluation, ["perplexity", "increase"])]
    note = "Always the stage without which the rest loses least"
    note += f" on '{texts[0]}'." if len(texts) > 1 else "."
    if best_by_size:
        headings.append("better")
        note += f" Better: the best subset of that size, if it is another ({NOTHING}: it is not)."
    return Table("Dropping one after another", note, headings, rows)


def notes(evaluation: Evaluation) -> list[str]:
    """How the evaluation was measured, line by line."""
    found = []
    for text in evaluation.texts:
        done = evaluation.loss(evaluation.whole, text.text)
        begun = f"{done.tokens:,} of " if done and done.tokens < text.tokens else "" if done else "none of "
        where = f"spread over its {len(text.ids):,}, in windows of {text.length:,}"
        found.append(f"{text.text}: {begun}{text.tokens:,} tokens, {where}")
    exponents = evaluation.scaling.exponents
    if exponents:
        took = ", ".join(f"{exponent:g} for {kept}" for kept, exponent in sorted(exponents.items(), reverse=True))
        tried = ", ".join(f"{exponent:g}" for exponent in EXPONENTS)
        found.append(
            f"residual scale ((S−1)/(L−1))^e, where e is {took} stages: the best of {tried} on "
            f"{evaluation.scaling.tokens:,} tokens of {evaluation.texts[0].text}"
        )
    if evaluation.interrupted:
        found.append("interrupted: this is what was found until then")
    return found


def as_json(evaluation: Evaluation) -> dict[str, Any]:
    alone = [{"stage": stage, **_subset_json(evaluation, subset)} for stage, subset in evaluation.single_ablations()]
    order = [
        {"dropped": ablation.stage, **_subset_json(evaluation, evaluation.subset(ablation.remaining))}
        for ablation in evaluation.order
    ]
    exact = [_subset_json(evaluation, subset) for subset in evaluation.best_by_size(evaluation.texts[0].text).values()]
    return {
        "complete": not evaluation.interrupted,
        "layers": list(evaluation.layers),
        "parameters": list(evaluation.parameters),
        "wire": evaluation.wire or None,
        "residual_scale": evaluation.scaling.mode,
        **({"exponents": dict(evaluation.scaling.exponents)} if evaluation.scaling.mode == BEST else {}),
        "texts": [
            {"name": text.text, "tokens": text.tokens, "of": len(text.ids), "window": text.length}
            for text in evaluation.texts
        ],
        "parts": [_subset_json(evaluation, subset) for subset in evaluation.losses],
        "sizes": {
            text.text: [_size_json(evaluation, size, text.text) for size in evaluation.sizes(text.text)]
            for text in evaluation.texts
        },
        **({"ablation": {"alone": alone, "order": order, "best": exact}} if evaluation.ablation else {}),
    }


def _subset_json(evaluation: Evaluation, subset: StageSubset) -> dict[str, Any]:
    return {
        "stages": list(subset.stages),
        "residual_scale": subset.residual_scale,
        "share_of_stages": len(subset.stages) / subset.total,
        "share_of_parameters": evaluation.share_of_parameters(subset),
        "texts": {
            text: {
                "loss": loss.mean,
                "perplexity": loss.perplexity,
                "increase": evaluation.increase(subset, text),
                "tokens": loss.tokens,
            }
            for text, loss in evaluation.losses[subset].items()
        },
    }


def _size_json(evaluation: Evaluation, size: SizeSummary, text: str) -> dict[str, Any]:
    best, worst = (evaluation.losses[subset][text].perplexity for subset in (size.best, size.worst))
    return {"kept": size.kept, "parts": size.subsets, "mean": size.mean, "best": best, "worst": worst}


def _by_text(evaluation: Evaluation, headings: Sequence[str]) -> list[str]:
    texts = [text.text for text in evaluation.texts]
    return [f"{text}\n{heading}" if len(texts) > 1 else heading for text in texts for heading in headings]


def _of(evaluation: Evaluation, kept: int) -> str:
    return f"{kept} of {evaluation.total}"


def _measured(evaluation: Evaluation, subset: StageSubset, text: str) -> list[str]:
    """Cells of a subset: loss, perplexity, and its increase."""
    loss, increase = evaluation.loss(subset, text), evaluation.increase(subset, text)
    if loss is None or increase is None:
        return [NOTHING] * 3
    more = "" if subset == evaluation.whole else f"{100 * increase:+,.1f}%".replace("-", "−")
    return [f"{loss.mean:.4f}", number(loss.perplexity), more]


def _perplexity(evaluation: Evaluation, subset: StageSubset, text: str) -> str:
    loss = evaluation.loss(subset, text)
    return number(loss.perplexity) if loss else NOTHING


def _summary(evaluation: Evaluation, size: SizeSummary | None, text: str) -> list[str]:
    """Cells of a size: mean, best and worst perplexity."""
    if size is None:
        return [NOTHING] * 3
    cells = [number(size.mean)]
    for subset in (size.best, size.worst):
        named = f" ({','.join(map(str, subset.stages))})" if size.subsets > 1 else ""
        cells.append(_perplexity(evaluation, subset, text) + named)
    return cells


def number(perplexity: float) -> str:
    if perplexity < 1000:
        return f"{perplexity:.2f}"
    return f"{perplexity:,.0f}" if perplexity < 1e9 else f"{perplexity:.3g}"
