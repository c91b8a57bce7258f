"""A job of a tiny model on a tiny text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from skippipe.toml_config import from_table
from skippipe.training.job_config import JobConfig
from tests.helpers.models import tiny

WORDS = "It was the best of links, it was the worst of links, it was the age of wisdom and of foolishness. "


def tiny_job(folder: Path, **fields: Any) -> JobConfig:
    """In a folder that gets its text and model; `fields` are the others of the job."""
    (folder / "text.txt").write_text(WORDS * 50)
    (folder / "model.json").write_text(json.dumps(tiny("llama").to_dict()))
    table = {
        "output": str(folder / "run"),
        "model": {"config": str(folder / "model.json")},
        "data": {"texts": str(folder / "text.txt"), "vocabulary": 300, "folder": str(folder / "tokens")},
        "batch": {"sequence": 16, "samples": 1},
    }
    return from_table(JobConfig, {**table, **fields})
