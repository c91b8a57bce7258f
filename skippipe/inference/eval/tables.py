"""What an evaluation found, as tables for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skippipe.inference.eval.evaluate import BEST, Evaluation, Size
from skippipe.inference.eval.perplexity import EXPONENTS
from skippipe.report.summary import NOTHING, Table
from skippipe.stage_subset import StageSubset


def tables(evaluation: Evaluation) -> list[Table]:
    found = [parts_table(evaluation), sizes_table(evaluation), alone_table(evaluation), order_table(evaluation)]
    return [table for table in found if table.rows]


def parts_table(evaluation: Evaluation) -> Table:
    rows = [
        [part.name, _share(evaluation, part), f"{evaluation.share_of_parameters(part):.1%}"]
        + [cell for text in evaluation.texts for cell in _measured(evaluation, part, text.text)]
        for part in evaluation.wanted
    ]
    headings = ["part", "stages", "parameters", *_by_text(evaluation, ["loss", "perplexity", "increase"])]
    return Table("Parts", "Increase: of the perplexity, against the whole model's.", headings, rows)


def sizes_table(evaluation: Evaluation) -> Table:
    """Nothing, where no two parts have the same size."""
    by_text = {text.text: {size.kept: size for size in evaluation.sizes(text.text)} for text in evaluation.texts}
    first = by_text[evaluation.texts[0].text]
    rows = [
        [_of(evaluation, kept), str(size.parts)]
        + [cell for text, sizes in by_text.items() for cell in _summary(evaluation, sizes.get(kept), text)]
        for kept, size in first.items()
    ]
    several = any(size.parts > 1 for size in first.values())
    headings = ["kept", "parts", *_by_text(evaluation, ["mean", "best", "worst"])]
    return Table("By share", "Perplexities of parts of the same size.", headings, rows if several else [])


def alone_table(evaluation: Evaluation) -> Table:
    rows = [
        [str(stage), str(evaluation.layers[stage]), f"{1 - evaluation.share_of_parameters(part):.1%}"]
        + [cell for text in evaluation.texts for cell in _measured(evaluation, part, text.text)[1:]]
        for stage, part in evaluation.alone()
    ]
    headings = ["lost", "layers", "parameters", *_by_text(evaluation, ["perplexity", "increase"])]
    return Table("Losing one stage", "The costliest first; stage 0 cannot be lost.", headings, rows)


def order_table(evaluation: Evaluation) -> Table:
    """The best part of every size stands beside it, if all are known."""
    texts = [text.text for text in evaluation.texts]
    exact = evaluation.exact(texts[0])
    rows = []
    for drop in evaluation.drops:
        part = evaluation.part(drop.left)
        row = [_of(evaluation, len(drop.left)), str(drop.stage), part.name]
        row += [cell for text in texts for cell in _measured(evaluation, part, text)[1:]]
        if exact:
            best = exact[len(drop.left)]
            row.append(NOTHING if best == part else f"{best.name}: {_perplexity(evaluation, best, texts[0])}")
        rows.append(row)
    headings = ["kept", "dropped", "left", *_by_text(evaluation, ["perplexity", "increase"])]
    note = "Always the stage without which the rest loses least"
    note += f" on '{texts[0]}'." if len(texts) > 1 else "."
    if exact:
        headings.append("better")
        note += f" Better: the best part of that size, if it is another ({NOTHING}: it is not)."
    return Table("Dropping one after another", note, headings, rows)


def notes(evaluation: Evaluation) -> list[str]:
    """How it was measured."""
    found = []
    for text in evaluation.texts:
        done = evaluation.loss(evaluation.whole, text.text)
        begun = f"{done.tokens:,} of " if done and done.tokens < text.tokens else "" if done else "none of "
        where = f"spread over its {len(text.ids):,}, in windows of {text.length:,}"
        found.append(f"{text.text}: {begun}{text.tokens:,} tokens, {where}")
    exponents = evaluation.driving.exponents
    if exponents:
        took = ", ".join(f"{exponent:g} for {kept}" for kept, exponent in sorted(exponents.items(), reverse=True))
        tried = ", ".join(f"{exponent:g}" for exponent in EXPONENTS)
        found.append(
            f"driven by ((S−1)/(L−1))^e, where e is {took} stages: the best of {tried} on "
            f"{evaluation.driving.tokens:,} tokens of {evaluation.texts[0].text}"
        )
    if evaluation.interrupted:
        found.append("interrupted: this is what was found until then")
    return found


def as_json(evaluation: Evaluation) -> dict[str, Any]:
    alone = [{"stage": stage, **_part_json(evaluation, part)} for stage, part in evaluation.alone()]
    order = [{"dropped": drop.stage, **_part_json(evaluation, evaluation.part(drop.left))} for drop in evaluation.drops]
    exact = [_part_json(evaluation, part) for part in evaluation.exact(evaluation.texts[0].text).values()]
    return {
        "complete": not evaluation.interrupted,
        "layers": list(evaluation.layers),
        "parameters": list(evaluation.parameters),
        "drive": evaluation.driving.said,
        **({"exponents": dict(evaluation.driving.exponents)} if evaluation.driving.said == BEST else {}),
        "texts": [
            {"name": text.text, "tokens": text.tokens, "of": len(text.ids), "window": text.length}
            for text in evaluation.texts
        ],
        "parts": [_part_json(evaluation, part) for part in evaluation.losses],
        "sizes": {
            text.text: [_size_json(evaluation, size, text.text) for size in evaluation.sizes(text.text)]
            for text in evaluation.texts
        },
        **({"losing": {"alone": alone, "order": order, "best": exact}} if evaluation.losing else {}),
    }


def _part_json(evaluation: Evaluation, part: StageSubset) -> dict[str, Any]:
    return {
        "stages": list(part.stages),
        "drive": part.drive,
        "share_of_stages": len(part.stages) / part.total,
        "share_of_parameters": evaluation.share_of_parameters(part),
        "texts": {
            text: {
                "loss": loss.mean,
                "perplexity": loss.perplexity,
                "increase": evaluation.increase(part, text),
                "tokens": loss.tokens,
            }
            for text, loss in evaluation.losses[part].items()
        },
    }


def _size_json(evaluation: Evaluation, size: Size, text: str) -> dict[str, Any]:
    best, worst = (evaluation.losses[part][text].perplexity for part in (size.best, size.worst))
    return {"kept": size.kept, "parts": size.parts, "mean": size.mean, "best": best, "worst": worst}


def _by_text(evaluation: Evaluation, headings: Sequence[str]) -> list[str]:
    texts = [text.text for text in evaluation.texts]
    return [f"{text}\n{heading}" if len(texts) > 1 else heading for text in texts for heading in headings]


def _share(evaluation: Evaluation, part: StageSubset) -> str:
    return f"{len(part.stages) / evaluation.total:.0%}"


def _of(evaluation: Evaluation, kept: int) -> str:
    return f"{kept} of {evaluation.total}"


def _measured(evaluation: Evaluation, part: StageSubset, text: str) -> list[str]:
    """Loss, perplexity, and its increase."""
    loss, increase = evaluation.loss(part, text), evaluation.increase(part, text)
    if loss is None or increase is None:
        return [NOTHING] * 3
    more = "" if part == evaluation.whole else f"{100 * increase:+,.1f}%".replace("-", "−")
    return [f"{loss.mean:.4f}", number(loss.perplexity), more]


def _perplexity(evaluation: Evaluation, part: StageSubset, text: str) -> str:
    loss = evaluation.loss(part, text)
    return number(loss.perplexity) if loss else NOTHING


def _summary(evaluation: Evaluation, size: Size | None, text: str) -> list[str]:
    """Mean, best and worst of a size."""
    if size is None:
        return [NOTHING] * 3
    cells = [number(size.mean)]
    for part in (size.best, size.worst):
        named = f" ({','.join(map(str, part.stages))})" if size.parts > 1 else ""
        cells.append(_perplexity(evaluation, part, text) + named)
    return cells


def number(perplexity: float) -> str:
    if perplexity < 1000:
        return f"{perplexity:.2f}"
    return f"{perplexity:,.0f}" if perplexity < 1e9 else f"{perplexity:.3g}"
