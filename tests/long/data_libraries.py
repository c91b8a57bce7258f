"""Parquet, .zst and datasets with the real libraries: pyarrow and datasets, which quick tests do without."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from skippipe.data.documents import END, source
from skippipe.data.prepare import prepare
from skippipe.data.tokenizer import train_bpe
from skippipe.errors import UserError
from tests.helpers.chats import chat_tokenizer, chats

DOCUMENTS = [f"Document {number}, with ünïcödé.\nAnd 漢字." for number in range(1000)]
WHOLE = "".join(each + END for each in DOCUMENTS)
BPE = train_bpe(DOCUMENTS, 400)


def decoded(name: str | Path, folder: Path, field: str = "text") -> str:
    found = prepare(name, BPE, folder, field=field, overwrite=True)
    return found.tokenizer().decode(found.ids.tolist())


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "some.parquet"
    table = pyarrow.table({"n": list(range(1000)), "body": DOCUMENTS})
    parquet.write_table(table, path, row_group_size=300)
    assert decoded(path, tmp_path / "tokens", "body") == WHOLE
    read: list[int] = []
    list(source(path).pieces(read.append, "body"))
    assert 0.9 * path.stat().st_size < sum(read) <= path.stat().st_size
    with pytest.raises(UserError, match=r"some.parquet: row 1: no text in field 'text'; fields with text: body"):
        decoded(path, tmp_path / "tokens")
    with pytest.raises(UserError, match=r"row 1: no text in field 'n'"):
        decoded(path, tmp_path / "tokens", "n")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"some.parquet: not a whole Parquet file: .*; copy or write it again"):
        decoded(path, tmp_path / "tokens", "body")


def test_conversations_are_the_same_in_parquet(tmp_path: Path) -> None:
    conversations = chats(30)
    records = [{"messages": each, "id": "x"} for each in conversations]
    conversations[3][0]["name"] = "Anne"  # in Parquet the others then have a null there
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "some.parquet")
    lines, rows = (
        prepare(tmp_path / name, chat_tokenizer(), tmp_path / f"tokens-{name}", loss_on="")
        for name in ("some.jsonl", "some.parquet")
    )
    assert lines.marks is not None
    assert lines.fingerprint == rows.fingerprint


def test_zst(tmp_path: Path) -> None:
    path = tmp_path / "some.txt.zst"
    half = len(WHOLE) // 2
    parts = [pyarrow.compress(part.encode(), "zstd", asbytes=True) for part in (WHOLE[:half], WHOLE[half:])]
    path.write_bytes(b"".join(parts))  # files may be joined
    assert decoded(path, tmp_path / "tokens") == WHOLE
    for bad in (b"not compressed", parts[0][:-20]):
        path.write_bytes(bad)
        with pytest.raises(UserError, match=r"not a whole \.zst file"):
            decoded(path, tmp_path / "tokens")


def test_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is a dataset for the library, as one on the hub is; without a network, the latter is one line."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    folder = tmp_path / "set"
    folder.mkdir()
    for split in ("train", "test"):
        lines = "".join(json.dumps({"text": f"{split} {each}"}) + "\n" for each in DOCUMENTS)
        (folder / f"{split}.jsonl").write_text(lines)
    expected = "".join(f"test {each}{END}" for each in DOCUMENTS[:7])
    assert decoded(f"hf:{folder}::test[:7]", tmp_path / "tokens") == expected

    def no_network(*_: Any) -> Any:
        raise OSError("no network here")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    with pytest.raises(UserError, match="hf:some-lab/books: the dataset cannot be read here: ") as caught:
        list(source("hf:some-lab/books").pieces())
    assert "\n" not in str(caught.value)
