"""A subset of a model's stages as the lm-evaluation-harness sees a model: `SubsetLM` is an `LM` of the harness.

    model = SubsetLM(staged, StageSubset((0, 2, 3), 6))
    lm_eval.simple_evaluate(model=model, tasks=[...])

Texts become tokens as they do for the harness's own class for Hugging Face models, so whole models score the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from skippipe.errors import UserError, require
from skippipe.inference.checkpoint_loader import StagedModel
from skippipe.inference.likelihood import CountProgress, LikelihoodRequest, SubsetModel
from skippipe.lm_harness.tasks import HarnessTask, config_of, metrics_of
from skippipe.stage_subset import StageSubset

_harness: Any = require("lm_eval", "harness", "scoring on tasks")
_Language: Any = import_module("lm_eval.api.model").TemplateLM
GENERATED_TOKENS = 256  # at most, where a task does not say
TOKEN_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # as tasks have called it
GENERATED_ROWS = 16  # at a time
BOOTSTRAPS = 1000  # for the standard error of a perplexity


class SubsetLM(_Language):  # type: ignore[misc]
    def __init__(
        self,
        staged: StagedModel,
        subset: StageSubset,
        progress: CountProgress = lambda done, of: None,
        replicas: Sequence[StagedModel] = (),
    ) -> None:
        """`progress` is called with the number of requests that are done. `replicas` are the same model on other
        devices, which take a part of the requests; text is generated on the first device alone."""
        super().__init__()
        self.subset = SubsetModel(staged, subset, replicas=replicas)
        self.tokenizer = staged.tokenizer
        self._staged = staged
        self._progress = progress

    @property
    def eot_token_id(self) -> int:
        found: int | None = self.tokenizer.eos_token_id
        return self._staged.prefix if found is None else found

    @property
    def prefix_token_id(self) -> int:
        return self._staged.prefix

    @property
    def max_length(self) -> int:
        return self.subset.staged.context

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_others: Any) -> list[int]:
        if add_special_tokens is None and string.startswith(self.tokenizer.decode([self.prefix_token_id])):
            add_special_tokens = False  # it is there already
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        found: list[int] = self.tokenizer.encode(string, **options)
        return found

    def loglikelihood(self, requests: Sequence[Any], **_others: Any) -> list[tuple[float, bool]]:
        """Log-likelihoods of continuations after their contexts, and whether they are the greedy ones."""
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return found

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_others: Any) -> list[tuple[float, bool]]:
        questions = [LikelihoodRequest(context, continuation) for _, context, continuation in requests]
        return [(each.log, each.greedy) for each in self.subset.likelihoods(questions, self._progress)]

    def loglikelihood_rolling(self, requests: Sequence[Any], **_others: Any) -> list[float]:
        """Log-likelihoods of whole texts, in windows as long as the model's context."""
        windows = import_module("lm_eval.utils")
        questions, owners = [], []
        for owner, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for pair in windows.get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                questions.append(LikelihoodRequest(*windows.make_disjoint_window(pair)))
                owners.append(owner)
        sums = [0.0] * len(requests)
        for owner, found in zip(owners, self.subset.likelihoods(questions, self._progress), strict=True):
            sums[owner] += found.log
        return sums

    def generate_until(self, requests: Sequence[Any], **_others: Any) -> list[str]:
        """Greedy texts, without a KV cache: every token takes a whole forward pass."""
        generations = [self._begin(*request.args) for request in requests]
        for start in range(0, len(generations), GENERATED_ROWS):
            active = generations[start : start + GENERATED_ROWS]
            while active := [each for each in active if not each.ended]:
                for each, token in zip(active, self.subset.most_likely([one.row for one in active]), strict=True):
                    each.add(token)
            self._progress(min(start + GENERATED_ROWS, len(generations)), len(generations))
        return [each.text for each in generations]

    def _begin(self, context: str, settings: dict[str, Any]) -> _Generation:
        if settings.get("do_sample") or (settings.get("do_sample") is None and settings.get("temperature")):
            raise UserError("text is generated greedily here; the task wants it drawn at random")
        until = settings.get("until") or []
        max_tokens = int(
            next((settings[name] for name in TOKEN_LIMITS if settings.get(name) is not None), GENERATED_TOKENS)
        )
        room = self.max_length - max_tokens
        if room < 1:
            raise UserError(f"{max_tokens} tokens to generate leave none of {self.max_length} for the context")
        row = (self.tok_encode(context) or [self.prefix_token_id])[-room:]
        return _Generation(self, row, [until] if isinstance(until, str) else list(until), max_tokens)


class _Generation:
    """A text that is being generated."""

    def __init__(self, model: SubsetLM, row: list[int], until: list[str], max_tokens: int) -> None:
        self.row = row
        self.text = ""
        self.ended = max_tokens < 1
        self._model = model
        self._end_tokens = {*model.subset.staged.end_tokens, model.eot_token_id}
        self._until = [stop for stop in until if stop]
        self._prompt_tokens, self._max_tokens = len(row), max_tokens

    def add(self, token: int) -> None:
        if token in self._end_tokens:
            self.ended = True
            return
        self.row.append(token)
        new = self.row[self._prompt_tokens :]
        self.text = self._model.tokenizer.decode(new, skip_special_tokens=True)
        self.ended = len(new) == self._max_tokens or any(stop in self.text for stop in self._until)
        for stop in self._until:
            self.text = self.text.partition(stop)[0]


class Score(NamedTuple):
    metric: str
    value: float
    error: float | None
    """Standard error; None: the harness gives none."""


def score(model: SubsetLM, tasks: Sequence[HarnessTask], folder: Path) -> dict[str, list[Score]]:
    """The harness's scores of a model on tasks that were written to this folder."""
    task_type = import_module("lm_eval.api.task").ConfigurableTask
    loaded = {
        task.harness_name: task_type(config=config_of(task, folder.resolve() / f"{task.harness_name}.jsonl"))
        for task in tasks
    }
    try:
        with redirect_stdout(StringIO()):  # it prints lines about bootstrapping
            found = _harness.evaluate(lm=model, task_dict=loaded, bootstrap_iters=BOOTSTRAPS, log_samples=False)
    except OverflowError:
        raise UserError(
            "the model is so unsure of the right words that their perplexity is beyond the range of numbers"
        ) from None
    scores: dict[str, list[Score]] = {}
    for task in tasks:
        results = found["results"][task.harness_name]
        for metric in metrics_of(task.name):
            error = results.get(f"{metric}_stderr,none")
            score = Score(metric, float(results[f"{metric},none"]), error if isinstance(error, float) else None)
            scores.setdefault(task.name, []).append(score)
    return scores
