"""Answers of a model and of its parts to questions made of held-out text, while it is on the device.

Questions, their tokens and the metrics are those of `skippipe score`, which has the lm-evaluation-harness do it; a
study needs no harness and asks all parts in a few seconds. The same text gives the same questions in every run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from skippipe.data.questions import QUESTION_KINDS, Prose, Question, questions_of
from skippipe.data.token_file import TokenFile
from skippipe.data.tokenizer import TextTokenizer
from skippipe.errors import UserError
from skippipe.inference.likelihood import Likelihood, LikelihoodRequest, likelihood_batches, token_likelihoods
from skippipe.model.stage import StageModel
from skippipe.stage_subset import Visits, residual_scale_of
from skippipe.study.engine import Engine
from skippipe.study.evaluate import DIGITS, SubsetLoss

SEED = 0  # of the questions
BATCH_TOKENS = {"cpu": 8192, "cuda": 65_536}

Scores = dict[str, dict[str, float]]
"""Kind of question → metric → share that is right."""
Right = dict[str, bool]
"""Metric → whether a question was answered rightly."""


def metrics_of(question: Question, conditional: list[Likelihood], alone: list[Likelihood]) -> Right:
    """As the harness has them: `acc` by likelihood, `acc_norm` by likelihood per character, `acc_mutual_info` by how
    much likelier the context makes it than it is alone."""
    if "label" not in question:
        return {"acc": conditional[0].greedy}
    logs = [each.log for each in conditional]
    ranked = {"acc": logs}
    if alone:
        ranked["acc_norm"] = [log / len(text) for log, text in zip(logs, question["choices"], strict=True)]
        ranked["acc_mutual_info"] = [log - other.log for log, other in zip(logs, alone, strict=True)]
    return {name: values.index(max(values)) == question["label"] for name, values in ranked.items()}


@dataclass(frozen=True)
class _Asked:
    """A question, and the numbers of its requests."""

    kind: str
    question: Question
    conditional: range
    alone: range


class QuestionSet:
    """Questions of a text, ready for a model."""

    def __init__(self, prose: Prose, tokenizer: TextTokenizer, limit: int, context: int, device: str) -> None:
        """At most `limit` of each kind, for a model that looks at `context` tokens."""
        self.counts: dict[str, int] = {}
        self.chance: dict[str, float] = {}
        self._asked: list[_Asked] = []
        pairs: list[tuple[str, str]] = []

        def added(new: list[tuple[str, str]]) -> range:
            pairs.extend(new)
            return range(len(pairs) - len(new), len(pairs))

        for kind, settings in QUESTION_KINDS.items():
            questions = questions_of(kind, prose, SEED, limit)
            for question in questions:
                conditional, alone = pairs_of(question)
                self._asked.append(_Asked(kind, question, added(conditional), added(alone)))
            if questions:
                self.counts[kind] = len(questions)
                self.chance[kind] = fmean(map(settings.chance, questions))
        requests = encoded(tokenizer, pairs)
        tokens = BATCH_TOKENS[torch.device(device).type]
        self._batches = list(likelihood_batches(requests, context, device, tokens))
        self._requests = len(requests)

    def scores(self, ends: StageModel, hidden: Callable[[Tensor], Tensor]) -> Scores:
        """Of the model that makes these hidden states of token ids; `ends` is the stage that has the head."""
        made = [token_likelihoods(ends, hidden(batch.inputs).float(), batch) for batch in self._batches]
        known: dict[int, Likelihood] = {}
        for batch, each in zip(self._batches, made, strict=True):  # only now something waits for the device
            known |= zip(batch.requests, batch.likelihoods(*each), strict=True)
        right: dict[str, dict[str, list[bool]]] = {}
        for asked in self._asked:
            conditional, alone = ([known[number] for number in some] for some in (asked.conditional, asked.alone))
            for metric, value in metrics_of(asked.question, conditional, alone).items():
                right.setdefault(asked.kind, {}).setdefault(metric, []).append(value)
        return {
            kind: {name: round(fmean(each), DIGITS) for name, each in metrics.items()}
            for kind, metrics in right.items()
        }


def pairs_of(question: Question) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Contexts and continuations of a question, and those of its continuations alone, if they are asked for: as the
    harness asks for them, from 0.4.13 on also these with the space before them."""
    if "target" in question:
        return [(question["context"], question["target"])], []
    choices = question["choices"]
    if "context" not in question:
        return [("", choice) for choice in choices], []
    return [(question["context"], f" {choice}") for choice in choices], [("", f" {choice}") for choice in choices]


def encoded(tokenizer: TextTokenizer, pairs: list[tuple[str, str]]) -> list[LikelihoodRequest]:
    """A text and its continuation become tokens together, and those of the text alone are its context; the end of a
    document is the context of a text that has none."""
    contexts = tokenizer.encode_pieces([context for context, _ in pairs])
    both = tokenizer.encode_pieces([context + continuation for context, continuation in pairs])
    return [
        LikelihoodRequest(context or [tokenizer.end_id], whole[len(context) :])
        for context, whole in zip(contexts, both, strict=True)
    ]


def question_sets(texts: dict[str, TokenFile], limit: int, context: int, device: str) -> dict[str, QuestionSet]:
    """Of each token file; UserError if no question can be made of one."""
    found = {}
    for name, tokens in texts.items() if limit else ():
        found[name] = QuestionSet(Prose.decoded(tokens), tokens.tokenizer(), limit, context, device)
        if not found[name].counts:
            raise UserError(
                f"measuring.questions: no question can be made of '{name}': give a longer text, or leave it"
            )
    return found


def part_scores(engine: Engine, asked: dict[str, QuestionSet], losses: list[SubsetLoss]) -> list[dict[str, Any]]:
    """Scores of the whole model, and of the parts whose losses were measured, driven as is best for parts of their size
    on the first text."""
    found = []
    eager = torch.compiler.set_stance("force_eager") if engine.compiled else nullcontext()
    with eager:  # rows of many lengths: to compile for them takes longer
        for visits, drive in best_driven(losses):
            factor = residual_scale_of("scaled", len(engine.stages), len(visits)) ** drive
            for name, questions in asked.items():
                scores = questions.scores(engine.stages[0], partial(engine.hidden_of, visits=visits, drive=factor))
                found.append({"text": name, "stages": list(visits), "drive": drive, "scores": scores})
    return found


def best_driven(losses: list[SubsetLoss]) -> list[tuple[Visits, float]]:
    """Each part once, with the drive that has the lowest mean loss over parts of its size."""
    first = [each for each in losses if each.text == losses[0].text]
    means: dict[int, dict[float, list[float]]] = {}
    for each in first:
        means.setdefault(len(each.stages), {}).setdefault(each.drive, []).append(each.loss)
    best = {kept: min(drives, key=lambda drive: fmean(drives[drive])) for kept, drives in means.items()}
    return [(each.stages, each.drive) for each in first if each.drive == best[len(each.stages)]]
