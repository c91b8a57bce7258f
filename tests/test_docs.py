"""What the pages say: commands that exist, links that lead somewhere, a tutorial that works."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer

from skippipe.cli.app import app
from tests.commands import Command

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("studies/*.md")])
BLOCK = re.compile(r"^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?)$", re.MULTILINE)
BEFORE_A_COMMAND = {"", "|", "&&", "do"}
AFTER_A_COMMAND = {"|", "&&", "&", ">"}

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def _commands(text: str) -> Iterator[list[str]]:
    """What stands behind `skippipe` in blocks for a shell."""
    for block in BLOCK.finditer(text):
        if block["kind"] not in ("console", "bash"):
            continue
        for line in block["text"].replace("\\\n", " ").splitlines():
            try:
                words = shlex.split(line.removeprefix("$ "), comments=True)
            except ValueError:  # a quotation over several lines, or what a command prints
                assert "skippipe " not in line, line
                continue
            for at, word in enumerate(words):
                if word == "skippipe" and ["", *words][at] in BEFORE_A_COMMAND:
                    rest = words[at + 1 :]
                    end = next((place for place, word in enumerate(rest) if word in AFTER_A_COMMAND), len(rest))
                    yield rest[:end]


@cache
def _all_commands() -> Any:
    return typer.main.get_command(app)


def _parse(words: list[str]) -> None:
    """As the command line would, but nothing is run."""
    command = _all_commands()
    context = command.make_context("skippipe", [], resilient_parsing=True)
    while hasattr(command, "commands"):
        name, *words = words
        if name.startswith("-"):
            assert any(name in param.opts for param in command.get_params(context)), f"no option {name}"
            return
        assert name in command.commands, f"no command '{name}'"
        command = command.commands[name]
    command.make_context(name, words)


def _without_blocks(page: Path) -> str:
    return BLOCK.sub("", page.read_text())


def _on_the_repository(heading: str) -> str:
    kept = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower())
    return kept.replace(" ", "-")


def _on_the_site(heading: str) -> str:
    """As mkdocs does it: Markdown's own way."""
    plain = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


@every_page
def test_commands_exist_and_parse(page: Path) -> None:
    for words in _commands(page.read_text()):
        try:
            _parse(list(words))
        except Exception as error:
            pytest.fail(f"skippipe {shlex.join(words)}: {error}")


@every_page
def test_commands_within_sentences_exist(page: Path) -> None:
    named = set(re.findall(r"`skippipe ([a-z]+)", _without_blocks(page)))
    assert named <= set(_all_commands().commands)


def test_commands_are_found_at_all() -> None:
    found = [words[0] for page in PAGES for words in _commands(page.read_text())]
    assert len(found) > 80
    assert {"plan", "profile", "train", "node", "keys", "export", "serve", "study"} <= set(found)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("skippipe plan cluster.json --bugdet 3", "--bugdet"),
        ("skippipe plan cluster.json --budget much", "valid number"),
        ("skippipe plane cluster.json", "no command 'plane'"),
        ("cat a.txt | skippipe generate", "checkpoint"),
        ("skippipe --verzion", "--verzion"),
    ],
)
def test_wrong_commands_would_be_noticed(line: str, error: str) -> None:
    (words,) = _commands(f"```console\n{line}  # why\n```")
    with pytest.raises(Exception, match=re.escape(error)):
        _parse(words)


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.finditer(_without_blocks(page)):
        place, _, heading = link["target"].partition("#")
        if ":" in place:
            continue
        target = page.parent / place if place else page
        assert target.exists(), link[0]
        if heading:
            headings = HEADING.findall(_without_blocks(target))
            assert heading in map(_on_the_repository, headings), link[0]
            assert heading in map(_on_the_site, headings), link[0]


def test_every_page_is_on_the_site() -> None:
    site = (ROOT / "mkdocs.yml").read_text()
    for page in ROOT.glob("docs/*.md"):
        assert f": {page.name}\n" in site, "mkdocs.yml: put it into 'nav'"


def test_tutorial_on_one_machine(skippipe: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As written, but with little to train. Left out is what other tests run, which would take more than seconds."""
    text = (ROOT / "docs" / "tutorial.md").read_text()
    part = text[text.index("## One machine") : text.index("## Two machines")]
    job = next(block["text"] for block in BLOCK.finditer(part) if block["kind"] == "toml")
    shorter = {"iterations = 40": "iterations = 1", "budget_s = 3.0": "budget_s = 0.1", "every = 10": "every = 1"}
    for long, short in shorter.items():
        assert long in job
        job = job.replace(long, short)
    monkeypatch.chdir(tmp_path)
    Path("first.toml").write_text(job)
    assert skippipe("cluster", "datacentre:4", "-o", "laptop.json").code == 0
    smaller = {"--max-tokens": "3", "--tokens": "256"}
    ran = []
    for words in _commands(part):
        if words[0] in ("profile", "plan", "why", "serve", "compare") or "--resume" in words:
            continue
        if "--drill" in words:
            at = words.index("--drill")
            del words[at : at + 2]
        words = [smaller.get(before, word) for before, word in pairwise(["", *words])]
        if words[0] == "train":  # in a process of its own, because it forks
            line = [sys.executable, "-m", "skippipe", *words]
            done = subprocess.run(line, capture_output=True, text=True, timeout=180)
            assert done.returncode == 0, done.stderr
        else:
            assert skippipe(*words).code == 0, words
        ran.append(words[0])
    assert ran == ["train", "generate", "generate", "eval", "export"]
    assert Path("first-model/config.json").exists()
