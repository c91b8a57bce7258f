"""Every kind of file with text in it gives the same documents; what holds no text is refused in one line."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skippipe.data import readers
from skippipe.data.documents import END, source
from skippipe.data.prepare import prepare
from skippipe.data.token_file import TokenFile
from skippipe.data.tokenizer import TextTokenizer, train_bpe
from skippipe.errors import UserError
from tests.helpers.processes import Command

pytest.importorskip("tokenizers")

DOCUMENTS = ["One line.\nAnother {brace}.", "Ünïcödé, 漢字 and 🙂\u2028too.", "The end."]
TEXT = "".join(f"{each}{END}\n" for each in DOCUMENTS)
PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


@pytest.fixture(scope="module")
def bpe() -> TextTokenizer:
    return train_bpe([TEXT], 300)


def lines(field: str = "text", documents: list[str] = DOCUMENTS) -> bytes:
    return "".join(json.dumps({"n": 1, field: each}) + "\n" for each in documents).encode()


def decoded(tokens: TokenFile) -> str:
    return tokens.tokenizer().decode(tokens.ids.tolist())


@pytest.mark.parametrize("packed", PACKED)
def test_every_kind_of_file_gives_the_same_documents(packed: str, bpe: TextTokenizer, tmp_path: Path) -> None:
    kinds = {
        "a.txt": TEXT.encode(),
        "b.md": TEXT.encode(),
        "c.jsonl": lines(),
        "d.NDJSON": lines().replace(b"\n", b"\r\n\n"),
        "e.json": json.dumps([{"text": each} for each in [*DOCUMENTS, "", None]], indent=1).encode(),
    }
    expected = "".join(each + END for each in DOCUMENTS)
    for name, content in kinds.items():
        path = tmp_path / (name + packed)
        path.write_bytes(PACKED[packed](content))
        assert decoded(prepare(path, bpe, tmp_path / "tokens" / name)) == expected, name
    all_of_them = tmp_path / "folder"
    (all_of_them / "inner").mkdir(parents=True)
    for name in kinds:
        (tmp_path / (name + packed)).rename(all_of_them / ("inner" if name == "a.txt" else "") / (name + packed))
    (all_of_them / ".hidden").write_bytes(b"\0")
    assert decoded(prepare(all_of_them, bpe, tmp_path / "all")) == expected * len(kinds)


def test_other_fields_and_their_errors(bpe: TextTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_bytes(lines("body"))
    found = prepare(path, bpe, tmp_path / "tokens", field="body")
    assert decoded(found) == "".join(each + END for each in DOCUMENTS)
    assert json.loads((found.folder / "tokens.json").read_text())["reading"] == "field body"
    assert prepare(path, bpe, found.folder, field="body") == found
    with pytest.raises(UserError, match=r"some.jsonl: line 1: no text in field 'text'; fields with text: body$"):
        prepare(path, bpe, tmp_path / "more")
    with pytest.raises(UserError, match="line 1: no text in field 'n'"):
        prepare(path, bpe, tmp_path / "more", field="n")


def test_tokens_of_braces_are_not_used_again(bpe: TextTokenizer, tmp_path: Path) -> None:
    """A release that did not know records has made them; their header is of version 1."""
    path, folder = tmp_path / "some.jsonl", tmp_path / "tokens"
    path.write_bytes(lines())
    prepare(path, bpe, folder)
    header = json.loads((folder / "tokens.json").read_text())
    assert header.pop("reading") == "field text"
    (folder / "tokens.json").write_text(json.dumps({**header, "version": 1}))
    assert TokenFile.open(folder).inputs.reading == ""
    with pytest.raises(UserError, match="holds the tokens of other texts"):
        prepare(path, bpe, folder)
    assert prepare(path, bpe, folder, overwrite=True).inputs.reading == "field text"


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.csv", b"text\nhello\n", "tables in .csv, .tsv are not read; write it as JSON lines or Parquet"),
        ("a.txt", lines(), "holds records of JSON, by its first line; name it .jsonl"),
        ("a.txt", gzip.compress(TEXT.encode()), "by its first bytes it is a .gz file: name it so, or unpack it"),
        ("a.bin", b"MZ\x01\x02\0\0", "not text: a byte 0 at byte 4"),
        ("a.txt", b"PAR1\x15\0", "by its first bytes it is a .parquet file: name it so"),
        ("a.parquet.gz", b"x", "Parquet is compressed inside"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a.jsonl: line 2: not JSON \("),
        ("a.jsonl", b'"text"\n', "line 1: not a record but a str"),
        ("a.json", b"[1]", "record 1: not a record but a int"),
        ("a.json", b'{\n"text": "a"}', "line 1: not JSON"),
        ("a.jsonl", b"[" * 100_000, "not JSON"),
        ("a.jsonl", b'{"text": ""}\n{"text": null}', "there is no text in it"),
        ("a.txt.gz", b"not compressed", "not a whole .gz file"),
        ("a.txt.gz", gzip.compress(TEXT.encode())[:-9], "not a whole .gz file"),
        ("a.txt.bz2", b"not compressed", "not a whole .bz2 file"),
        ("a.txt.bz2", bz2.compress(TEXT.encode())[:-9], "not a whole .bz2 file"),
    ],
)
def test_what_is_refused(name: str, content: bytes, complaint: str, bpe: TextTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "texts" / name
    path.parent.mkdir()
    path.write_bytes(content)
    for named in (path, path.parent):
        with pytest.raises(UserError, match=complaint) as caught:
            prepare(named, bpe, tmp_path / "tokens")
        assert str(caught.value).startswith(f"{path}: ")
        assert "\n" not in str(caught.value)


def test_folders_without_text(bpe: TextTokenizer, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty: there is no file in this folder"):
        prepare(tmp_path / "empty", bpe, tmp_path / "tokens")
    prepare("classics-val", bpe, tmp_path / "tokens")
    with pytest.raises(UserError, match=r"holds tokens, not text; .* as data.folder"):
        prepare(tmp_path / "tokens", bpe, tmp_path / "again")


def test_lines_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MOST_LINE_CHARACTERS", 2**20)
    path = tmp_path / "long.jsonl"
    for content in (b'{"text": "' + b"a" * 2**22, b"[\n" + b"1,\n" * 2**20):
        path.write_bytes(content)
        with pytest.raises(UserError, match="of more than 1,048,576 characters; write each record as a line"):
            list(source(path).pieces())


def test_halves_of_characters_are_replaced(bpe: TextTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "half.jsonl"
    path.write_text('{"text": "a \\ud83d b"}')
    assert decoded(prepare(path, bpe, tmp_path / "tokens")) == f"a ? b{END}"


class Hub(SimpleNamespace):
    """Stands in for the package `datasets`, which quick tests do without; `make test-data` has the real one."""

    asked: tuple[Any, ...] = ()

    def load_dataset(self, *given: Any, **options: Any) -> Any:
        self.asked = (*given, *options.values())
        if given[0] == "lab/none":
            raise ConnectionError("Couldn't reach\nthe hub")
        return ({"text": f"Row {number}."} for number in range(1000))


def test_datasets_of_the_hub_are_streamed(bpe: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", hub := Hub())
    name = "hf:lab/books:en:test[:3]"
    found = prepare(name, bpe, tmp_path / "tokens")
    assert decoded(found) == "".join(f"Row {number}.{END}" for number in range(3))
    assert list(hub.asked) == ["lab/books", "en", "test", True]
    assert found.inputs.sources == ((name, 0, "streamed"),)
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert prepare(name, bpe, tmp_path / "tokens") == found, "what was streamed once is kept under its name"
    monkeypatch.setitem(sys.modules, "datasets", hub)
    assert [piece.text for piece in source("hf:books::dev[:1]").pieces()] == ["Row 0."]
    assert list(hub.asked) == ["books", None, "dev", True]
    with pytest.raises(UserError, match=r"hf:lab/none: the dataset cannot be read here: Couldn't reach the hub$"):
        list(source("hf:lab/none").pieces())
    with pytest.raises(UserError, match=r"hf:a:b:c:d: expected hf:NAME\[:CONFIG\]\[:SPLIT\]"):
        source("hf:a:b:c:d")


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name in ("a.parquet", "a.txt.zst"):
        (tmp_path / name).write_bytes(b"PAR1")
        with pytest.raises(UserError, match=r"a\..*: reading .* needs the package 'pyarrow': .*skippipe\[parquet\]"):
            list(source(tmp_path / name).pieces())


def test_command(skippipe: Command, tmp_path: Path) -> None:
    (tmp_path / "some.jsonl").write_bytes(lines("body"))
    asked = ("prepare", tmp_path / "some.jsonl", "--vocabulary", 300, "--output", tmp_path / "tokens")
    done = skippipe(*asked)
    assert done.code == 2
    assert done.err.splitlines()[-1].endswith("no text in field 'text'; fields with text: body")
    assert skippipe(*asked, "--field", "body").code == 0
    assert decoded(TokenFile.open(tmp_path / "tokens")) == "".join(each + END for each in DOCUMENTS)
