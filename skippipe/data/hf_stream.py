"""Documents out of a Hugging Face dataset, one after the other, without having all of it on disk.

prepare(stream_text("HuggingFaceFW/fineweb-edu", documents=100_000), 32_000, folder)
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from skippipe.errors import UserError
from skippipe.json_fields import exists
from skippipe.optional_deps import require

EXTRA = "datasets"
READERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}


def stream_text(
    name_or_path: str | Path,
    split: str = "train",
    field: str = "text",
    subset: str | None = None,
    documents: int | None = None,
) -> Iterator[str]:
    """The texts in one field of a dataset: its name on the hub, a folder with one, or a file (see `READERS`).

    The order is the dataset's. Reading starts with the first document that is asked for.
    """
    datasets = require("datasets", EXTRA, f"streaming '{name_or_path}'")
    path = Path(name_or_path)
    if path.suffix in READERS and not exists(path):
        raise UserError(f"{path}: no such file to stream from")
    if exists(path) and path.is_file():
        if path.suffix not in READERS:
            raise UserError(f"{path}: streams come from {', '.join(READERS)}; give a text file to 'prepare' as it is")
        asked: dict[str, Any] = {"path": READERS[path.suffix], "data_files": {split: str(path)}}
    else:
        asked = {"path": str(name_or_path), "name": subset}
    return islice(_texts(datasets, str(name_or_path), field, {**asked, "split": split, "streaming": True}), documents)


def _texts(datasets: Any, name: str, field: str, asked: dict[str, Any]) -> Iterator[str]:
    try:  # a dataset that is a script is refused with a RuntimeError: from version 4 on the library runs none
        for row in datasets.load_dataset(**asked):
            if not isinstance(row.get(field), str):
                known = ", ".join(key for key, value in row.items() if isinstance(value, str))
                raise UserError(f"{name}: no text in field '{field}'; fields with text: {known or 'none'}")
            yield row[field]
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{name}: the dataset cannot be read: {reason}") from None
