"""Text to microbatches: nothing is lost on the way, nothing comes twice, and two machines can tell that they agree."""

from __future__ import annotations

import json
import lzma
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import resources
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skippipe import errors
from skippipe.data import prepare
from skippipe.data.batch_sampler import BatchSampler, permute
from skippipe.data.documents import END, PIECE_CHARACTERS, Piece, cut, source
from skippipe.data.token_file import HEADER, TokenFile, cache_folder
from skippipe.data.tokenizer import FILE, SETTINGS, TextTokenizer, train_bpe
from skippipe.errors import UserError

pytest.importorskip("tokenizers")

STORY = "It was the best of times,\n\nit was the worst of times. Ünïcödé, 漢字 and 🙂 too.\n"


def joined(pieces: Iterator[Piece]) -> list[str]:
    documents, text = [], ""
    for piece in pieces:
        text += piece.text
        if piece.last:
            documents.append(text)
            text = ""
    assert not text, "the last piece ends a document"
    return documents


@pytest.fixture(scope="module")
def bpe() -> TextTokenizer:
    return train_bpe((piece.text for piece in source("classics-val").pieces()), 512)


@pytest.fixture
def story(tmp_path: Path) -> Path:
    path = tmp_path / "story.txt"
    path.write_text(f"{STORY}{END}\nThe end.\n{END}\n", encoding="utf-8")
    return path


# Sampler


@given(st.integers(1, 3000), st.integers(), st.integers(0, 2**40))
@settings(max_examples=30, deadline=None)
def test_permutation_is_a_bijection(n: int, seed: int, epoch: int) -> None:
    assert sorted(permute(seed, epoch, offset, n) for offset in range(n)) == list(range(n))


def test_permutations_look_random() -> None:
    n, epochs = 50, 4000
    landed = Counter((offset, permute(1, epoch, offset, n)) for epoch in range(epochs) for offset in range(n))
    expected = epochs / n
    chi2 = sum((landed[i, j] - expected) ** 2 / expected for i in range(n) for j in range(n))
    assert abs(chi2 - n * n) < 6 * (2 * n * n) ** 0.5
    steps = [permute(1, 0, offset, 10_000) for offset in range(10_000)]
    assert abs(float(np.corrcoef(steps[:-1], steps[1:])[0, 1])) < 0.05
    assert sum(b - a == 1 for a, b in pairwise(steps)) < 10


def test_permutation_is_the_same_in_every_release() -> None:
    """A checkpoint goes on where it stopped: these numbers must not change."""
    assert [permute(7, 0, offset, 10) for offset in range(10)] == [0, 7, 5, 9, 4, 2, 3, 8, 1, 6]
    assert permute(2**70, 3, 123_456, 10**9) == 231_498_297


@given(st.integers(2, 400), st.integers(1, 9), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**63))
@settings(max_examples=30, deadline=None)
def test_every_epoch_takes_every_window_once(
    tokens: int, sequence: int, microbatches: int, samples: int, seed: int
) -> None:
    sequence = min(sequence, tokens - 1)
    sampler = BatchSampler(np.arange(tokens), sequence, seed, microbatches, samples)
    assert sampler.windows == (tokens - 1) // sequence
    iterations = -(-3 * sampler.windows // (microbatches * samples))
    taken = [
        sampler.window(iteration, microbatch, sample)
        for iteration in range(iterations)
        for microbatch in range(microbatches)
        for sample in range(samples)
    ]
    for epoch in range(3):
        part = taken[epoch * sampler.windows : (epoch + 1) * sampler.windows]
        assert sorted(part) == list(range(sampler.windows))


@given(st.permutations(range(12)), st.integers(0, 2**32), st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_it_does_not_matter_who_asks_when(order: list[int], seed: int, iteration: int) -> None:
    tokens = np.arange(1000)
    one = BatchSampler(tokens, 7, seed, microbatches=12, samples=2)
    expected = [one.batch(iteration, microbatch) for microbatch in range(12)]
    for microbatch in order:  # another process each, in any order
        inputs, labels = BatchSampler(list(tokens), 7, seed, 12, 2).batch(iteration, microbatch)
        assert np.array_equal(inputs, expected[microbatch][0])
        assert np.array_equal(labels, expected[microbatch][1])
    half = BatchSampler(tokens, 7, seed, microbatches=24, samples=1)  # the same stream of samples, cut otherwise
    assert np.array_equal(half.batch(iteration, 5)[0][0], expected[2][0][1])


def test_batch_is_a_window_and_its_successors() -> None:
    sampler = BatchSampler(np.arange(100, dtype=np.uint16), 8, 0, 3, 4)
    inputs, labels = sampler.batch(2, 1)
    assert inputs.shape == labels.shape == (4, 8)
    assert inputs.dtype == labels.dtype == np.int64
    assert np.array_equal(labels, inputs + 1)
    assert all(row[0] % 8 == 0 for row in inputs)


def test_sampler_refuses() -> None:
    assert BatchSampler(np.arange(9), 8, 0, 1, 1).windows == 1
    with pytest.raises(UserError, match=r"8 tokens is too short for a sequence of 8, which takes 9.* of 7 or less"):
        BatchSampler(np.arange(8), 8, 0, 1, 1)
    with pytest.raises(UserError, match="samples: 0 must be 1 or more"):
        BatchSampler(np.arange(9), 8, 0, 1, 0)
    with pytest.raises(ValueError, match="microbatch 3 of 3"):
        BatchSampler(np.arange(9), 8, 0, 3, 1).batch(0, 3)


# Documents


@given(
    st.lists(st.text(st.sampled_from("ab \n.<|"), max_size=40), max_size=8),
    st.lists(st.integers(0, 400), max_size=12),
)
@settings(deadline=None)
def test_documents_do_not_depend_on_blocks(documents: list[str], cuts: list[int]) -> None:
    text = "".join(document + END + "\n" for document in documents)
    places = sorted({0, len(text), *(place for place in cuts if place < len(text))})
    blocks = [text[a:b] for a, b in pairwise(places)]
    expected = [document.removeprefix("\n") for document in text.split(END) if document.strip()]
    assert list(cut(blocks)) == list(cut([text]))
    assert joined(cut(blocks)) == expected


@pytest.mark.parametrize("unit", ["many words, ", "3.14 15 92\n", "漢", " ", "."])
def test_long_documents_come_in_pieces_of_the_same_kind(unit: str, bpe: TextTokenizer) -> None:
    text = "x" + unit * (3 * PIECE_CHARACTERS // len(unit))
    pieces = list(cut([text]))
    assert pieces == list(cut(text[at : at + 777] for at in range(0, len(text), 777)))
    assert joined(iter(pieces)) == [text]
    assert max(len(piece.text) for piece in pieces) <= PIECE_CHARACTERS
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    if unit in ("many words, ", "3.14 15 92\n"):
        ids = chain.from_iterable(bpe.encode_pieces([piece.text for piece in pieces]))
        assert list(ids) == bpe.encode(text)


# Tokenizer


def test_end_of_document_is_one_special_id(bpe: TextTokenizer) -> None:
    assert bpe.size == 512
    assert bpe.encode(END) == [bpe.end_id]
    ids = bpe.encode(f"one{END}\ntwo{END}")
    assert ids.count(bpe.end_id) == 2
    assert ids[-1] == bpe.end_id
    assert bpe.end_id not in bpe.encode(STORY)


@given(text=st.text())
@settings(deadline=None)
def test_any_text_comes_back(bpe: TextTokenizer, text: str) -> None:
    for each in (text, text + END, f"{END}{text}{END}\n"):
        assert bpe.decode(bpe.encode(each)) == each


def test_training_is_deterministic(bpe: TextTokenizer) -> None:
    code = (
        "from skippipe.data.documents import source\nfrom skippipe.data.tokenizer import train_bpe\n"
        "print(train_bpe((piece.text for piece in source('classics-val').pieces()), 512).fingerprint)"
    )
    for threads in ("1", "4"):
        environment = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
        assert made.stdout.strip() == bpe.fingerprint
        assert not made.stderr


def test_tokenizer_folder_round_trip(bpe: TextTokenizer, tmp_path: Path) -> None:
    bpe.save(tmp_path)
    for place in (tmp_path, tmp_path / FILE):
        again = TextTokenizer.load(place)
        assert (again.fingerprint, again.size, again.end_id) == (bpe.fingerprint, bpe.size, bpe.end_id)
        assert again.encode(STORY) == bpe.encode(STORY)


def test_published_tokenizers_are_taken_as_text_needs_them(bpe: TextTokenizer, tmp_path: Path) -> None:
    """Limits and padding of one model, another name for the end, ids left out."""
    raw = json.loads(bpe.text.replace(END, "</s>"))
    raw["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    raw["added_tokens"].append({**raw["added_tokens"][0], "id": 600, "content": "<pad>"})
    (tmp_path / FILE).write_text(json.dumps(raw))
    with pytest.raises(UserError, match=r"no token ends a document: add '<\|endoftext\|>' .* 'eos_token'"):
        TextTokenizer.load(tmp_path)
    (tmp_path / SETTINGS).write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    found = TextTokenizer.load(tmp_path)
    assert found.encode(STORY + END) == bpe.encode(STORY + END)
    assert found.end_id not in found.encode("how to write </s> in HTML")
    assert found.size >= 513


def test_tokenizers_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such tokenizer"):
        TextTokenizer.load(tmp_path / "nowhere")
    (tmp_path / FILE).write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json: not a tokenizer that the library reads"):
        TextTokenizer.load(tmp_path)
    with pytest.raises(UserError, match="257 or more"):
        train_bpe(["text"], 256)


def test_transformers_reads_what_we_save_and_we_what_it_saves(bpe: TextTokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    bpe.save(tmp_path / "ours")
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "ours"))
    assert theirs.encode(STORY + END, add_special_tokens=False) == bpe.encode(STORY + END)
    assert theirs.eos_token_id == bpe.end_id
    theirs.save_pretrained(str(tmp_path / "theirs"))
    assert TextTokenizer.load(tmp_path / "theirs").encode(STORY) == bpe.encode(STORY)
    model = json.loads(bpe.text)["model"]
    old = tmp_path / "old"  # the form of GPT-2
    old.mkdir()
    with pytest.raises(UserError, match=r"no tokenizer\.json in it, and no other tokenizer"):
        TextTokenizer.load(old)
    (old / SETTINGS).write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (old / "vocab.json").write_text(json.dumps(model["vocab"]))
    (old / "merges.txt").write_text("\n".join(map(" ".join, model["merges"])) + "\n")
    assert TextTokenizer.load(old).encode(STORY + END) == bpe.encode(STORY + END)


# Token file


def test_round_trip(story: Path, bpe: TextTokenizer, tmp_path: Path) -> None:
    made = prepare.prepare(story, bpe, tmp_path / "tokens")
    found = TokenFile.open(tmp_path / "tokens", bpe)
    assert found == made
    assert found.type == "uint16"
    assert found.ids.tolist() == bpe.encode(f"{STORY}{END}The end.\n{END}")
    assert found.tokenizer().decode(found.ids.tolist()) == f"{STORY}{END}The end.\n{END}"
    assert len(found) == len(found.ids)
    found.check_content()
    assert sorted(file.name for file in found.folder.iterdir()) == [FILE, SETTINGS, found.data, HEADER]


def test_where_the_text_came_from_does_not_change_the_fingerprint(
    story: Path, bpe: TextTokenizer, tmp_path: Path
) -> None:
    plain = prepare.prepare([story], bpe, tmp_path / "plain")
    packed = tmp_path / "packed.txt.xz"
    packed.write_bytes(lzma.compress(b"\xef\xbb\xbf" + story.read_bytes().replace(b"\n", b"\r\n")))
    parts = [tmp_path / "one.txt", tmp_path / "two.txt"]
    parts[0].write_text(STORY, encoding="utf-8")
    parts[1].write_text("The end.\n", encoding="utf-8")
    others = (
        prepare.prepare([packed], bpe, tmp_path / "xz"),
        prepare.prepare(parts, bpe, tmp_path / "parts"),
    )
    assert {other.fingerprint for other in others} == {plain.fingerprint}
    other = prepare.prepare([story], train_bpe([STORY], 300), tmp_path / "other")
    assert other.fingerprint != plain.fingerprint


def test_large_vocabularies_take_four_bytes(story: Path, bpe: TextTokenizer, tmp_path: Path) -> None:
    raw = json.loads(bpe.text)
    end = {**raw["added_tokens"][0], "content": END}
    raw["model"]["vocab"] = {("</s>" if k == END else k): v for k, v in raw["model"]["vocab"].items()}
    raw["model"]["vocab"] |= {f"unused {n}": n for n in range(512, 70_000)}
    raw["added_tokens"] = [{**end, "id": 70_000}]
    wide = TextTokenizer(json.dumps(raw))
    found = prepare.prepare(story, wide, tmp_path / "tokens")
    assert (found.type, found.vocabulary, found.end_id) == ("uint32", 70_001, 70_000)
    assert found.ids[-1] == 70_000
    assert found.ids.tolist().count(70_000) == 2


def test_reuse_and_making_anew(
    story: Path, bpe: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    make = prepare._make

    def counted(*given: Any) -> TokenFile:
        made.append(given[2])
        return make(*given)

    monkeypatch.setattr(prepare, "_make", counted)
    folder = tmp_path / "tokens"

    def times(tokenizer: TextTokenizer | int = 300) -> int:
        before = len(made)
        found = prepare.prepare([story], tokenizer, folder, overwrite=True)
        assert found == TokenFile.open(folder)
        assert len(list(folder.iterdir())) == 4, "nothing old is left behind"
        return len(made) - before

    assert [times(), times()] == [1, 0]
    with pytest.raises(UserError, match=r"holds the tokens of other texts.* 'skippipe prepare --overwrite' replaces"):
        prepare.prepare([story], 299, folder)
    assert [times(299), times(299)] == [1, 0]
    assert [times(bpe), times(bpe)] == [1, 0]
    story.write_text("Another text, of " + "many " * 20, encoding="utf-8")
    assert [times(bpe), times(bpe)] == [1, 0]
    data = next(folder.glob("*.bin"))
    data.write_bytes(data.read_bytes()[::-1])  # bad, and of the right size
    assert [times(bpe), times(bpe)] == [1, 0]
    (folder / HEADER).write_text("{")
    assert [times(bpe), times(bpe)] == [1, 0]


def test_interrupted_making_leaves_the_old(story: Path, bpe: TextTokenizer, tmp_path: Path) -> None:
    made = prepare.prepare([story], bpe, tmp_path / "tokens")

    story.write_text(STORY.upper(), encoding="utf-8")

    def break_off(what: str, share: float) -> None:  # noqa: ARG001
        if what == "turning text into tokens":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare.prepare([story], bpe, made.folder, break_off, overwrite=True)
    assert TokenFile.open(made.folder) == made
    assert len(list(made.folder.iterdir())) == 4


def test_damaged_token_files(story: Path, bpe: TextTokenizer, tmp_path: Path) -> None:
    folder = tmp_path / "tokens"
    with pytest.raises(UserError, match=r"no token file here .*prepare a text into this folder"):
        TokenFile.open(folder)
    made = prepare.prepare(story, bpe, folder)
    with pytest.raises(UserError, match="made with another tokenizer"):
        TokenFile.open(folder, train_bpe([STORY], 300))
    data, content = folder / made.data, (folder / made.data).read_bytes()
    data.write_bytes(content[:-2])
    with pytest.raises(UserError, match=f"{len(content) - 2} bytes instead of {len(content)}"):
        TokenFile.open(folder)
    data.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(UserError, match="not those that were written"):
        TokenFile.open(folder).check_content()
    data.unlink()
    with pytest.raises(UserError, match="missing; prepare the text again"):
        TokenFile.open(folder)
    data.write_bytes(content)
    train_bpe([STORY], 300).save(folder)
    with pytest.raises(UserError, match="another tokenizer than the one that made the ids"):
        TokenFile.open(folder)
    bpe.save(folder)
    TokenFile.open(folder).check_content()


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("format", "skippipe-plan", "a 'skippipe-tokens' file is needed"),
        ("version", 3, "this release reads 1 and 2"),
        ("tokens", -1, "tokens: -1 is out of range"),
        ("type", "uint8", "none of uint16, uint32"),
        ("vocabulary", 10**6, "does not go with uint16"),
        ("data", "../tokens.bin", "not the name of a file in this folder"),
        ("content_sha256", "0", "fingerprint: not the one"),
        ("colour", "red", "unknown field"),
    ],
)
def test_headers_that_lie(
    field: str, value: object, complaint: str, story: Path, bpe: TextTokenizer, tmp_path: Path
) -> None:
    header = prepare.prepare(story, bpe, tmp_path / "tokens").folder / HEADER
    header.write_text(json.dumps({**json.loads(header.read_text()), field: value}))
    with pytest.raises(UserError, match=complaint) as caught:
        TokenFile.open(tmp_path / "tokens")
    assert str(header) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("missing.txt", None, "no such text file; .*'classics'"),
        ("empty.txt", b"", "the file is empty"),
        ("blank.txt", b" \n" + END.encode(), "there is no text in it"),
        ("latin.txt", b"x" * (2**20 - 1) + "é".encode() + b"caf\xe9 au lait", "not UTF-8 text at byte 1,048,580"),
        ("cut.txt", "né".encode()[:-1], "not UTF-8 text at byte 1;"),
        ("plain.txt.xz", b"not compressed", "not a whole .xz file"),
        ("half.txt.xz", lzma.compress(os.urandom(5000).hex().encode())[:3000], "not a whole .xz file"),
    ],
)
@pytest.mark.parametrize("trained", [True, False])
def test_texts_that_cannot_be_read(
    name: str, content: bytes | None, complaint: str, trained: bool, bpe: TextTokenizer, tmp_path: Path
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=complaint) as caught:
        prepare.prepare([path], 300 if trained else bpe, tmp_path / "tokens")
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "tokens" / HEADER).exists()


def test_a_tokenizer_is_trained_on_the_beginning_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "TRAINED_ON_CHARACTERS", 100)
    text = "".join(f"{number} bottles of beer on the wall{END}" for number in range(99))
    (tmp_path / "beer.txt").write_text(text)
    found = prepare.prepare(tmp_path / "beer.txt", 300, tmp_path / "tokens")
    assert found.tokenizer().decode(found.ids.tolist()) == text


def test_classics_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    heard: list[tuple[str, float]] = []
    found = prepare.prepare("classics-val", 512, progress=lambda what, share: heard.append((what, share)))
    assert found.folder.parent == cache_folder("x").parent == tmp_path / "skippipe" / "tokens"
    assert found.folder.name.startswith("classics-val-")
    assert found.ids.tolist().count(found.end_id) == 6
    assert heard[0] == ("training a tokenizer of 512 tokens", 0.0)
    assert heard[-1] == ("turning text into tokens", 1.0)
    assert prepare.prepare("classics-val", 512) == found
    data = resources.files("skippipe").joinpath("data")
    for name in ("classics", "classics-val"):
        assert source(name).name in [file.name for file in data.iterdir()]


def test_sampling_needs_numpy_alone(story: Path, bpe: TextTokenizer, tmp_path: Path) -> None:
    prepare.prepare(story, bpe, tmp_path / "tokens")
    code = (
        "import sys; from pathlib import Path\n"
        "from skippipe.data import documents, prepare\n"
        "from skippipe.data.batch_sampler import BatchSampler; from skippipe.data.token_file import TokenFile\n"
        "BatchSampler(TokenFile.open(Path(sys.argv[1])).ids, 4, 0, 1, 1).batch(0, 0)\n"
        "print({'torch', 'tokenizers', 'transformers', 'datasets', 'numba'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code, tmp_path / "tokens"], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"


def test_missing_packages_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named '{name}'", name=name)

    monkeypatch.setattr(errors, "import_module", missing)
    with pytest.raises(UserError, match=r"needs the package 'datasets': .*skippipe\[datasets\]"):
        list(source("hf:some/dataset").pieces())
    with pytest.raises(UserError, match=r"needs the package 'tokenizers': .*skippipe\[train\]"):
        train_bpe(["text"], 300)
