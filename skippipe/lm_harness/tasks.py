"""Questions made of a text (`data.questions`) as tasks of the lm-evaluation-harness: the files that it reads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from skippipe.data.questions import QUESTION_KINDS, Prose, Question, questions_of
from skippipe.errors import UserError
from skippipe.json_fields import json_text, write_text
from skippipe.value_ranges import Choices

PREFIX = "skippipe_"
"""Prefix of the tasks' names in the harness, which has thousands of others."""


@dataclass(frozen=True)
class HarnessTask:
    name: str
    items: list[Question]
    chance: float
    """Accuracy of guessing; for cloze, among the passage's words of four letters or more."""

    @property
    def harness_name(self) -> str:
        return PREFIX + self.name


def build_tasks(names: list[str], prose: Prose, seed: int = 0, limit: int | None = None) -> list[HarnessTask]:
    """Tasks of at most `limit` questions each."""
    tasks = []
    for name in names:
        items = questions_of(name, prose, seed, limit)
        if not items:
            raise UserError(
                f"no question of the kind '{name}' can be made of this text: give a longer one, in sentences"
            )
        tasks.append(HarnessTask(name, items, fmean(map(QUESTION_KINDS[name].chance, items))))
    return tasks


def parse_names(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        Choices(QUESTION_KINDS).check(name, "--tasks")
    return names


def write_tasks(tasks: list[HarnessTask], folder: Path) -> None:
    """Writes a file with the questions of each task, and one that describes it to the harness."""
    for task in tasks:
        questions = folder.resolve() / f"{task.harness_name}.jsonl"
        write_text(questions, "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in task.items))
        write_text(questions.with_suffix(".yaml"), json_text(config_of(task, questions)) + "\n")  # YAML holds all JSON


def config_of(task: HarnessTask, questions: Path) -> dict[str, Any]:
    """The harness's configuration of a task."""
    return {
        "task": task.harness_name,
        "tag": "skippipe",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(questions)}, "cache_dir": str(questions.parent / "cache")},
        "test_split": "test",
        "num_fewshot": 0,
        **TASK_SETTINGS[task.name],
        "metadata": {"version": 1.0, "chance": task.chance},
    }


def metrics_of(name: str) -> list[str]:
    """Metrics of a task that the harness gives."""
    return [each["metric"] for each in TASK_SETTINGS[name]["metric_list"]]


def _metric(name: str, aggregation: str = "mean") -> dict[str, Any]:
    return {"metric": name, "aggregation": aggregation, "higher_is_better": aggregation == "mean"}


MULTIPLE_CHOICE = {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "label"}
TASK_SETTINGS: dict[str, dict[str, Any]] = {
    "cloze": {
        "output_type": "loglikelihood",
        "doc_to_text": "context",
        "doc_to_target": "target",
        "metric_list": [_metric("acc"), _metric("perplexity", "perplexity")],
    },
    "choice": {
        **MULTIPLE_CHOICE,
        "doc_to_text": "context",
        "metric_list": [_metric("acc"), _metric("acc_norm"), _metric("acc_mutual_info")],
    },
    "order": {**MULTIPLE_CHOICE, "doc_to_text": "", "target_delimiter": "", "metric_list": [_metric("acc")]},
}
"""The harness's settings for questions of each kind."""
