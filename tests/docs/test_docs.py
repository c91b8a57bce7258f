"""What the pages say: commands that exist, links that lead somewhere, a tutorial that works."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import unicodedata
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer

from skippipe.cli.app import app
from tests.helpers.doc_pages import PAGES, ROOT, commands, lines, pieces, sections, without_blocks, without_remark
from tests.helpers.processes import Command
from tests.long.docs_walkthrough import NOT_RUN, README, SMALLER, TUTORIAL

LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?)$", re.MULTILINE)

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


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


def _on_the_repository(heading: str) -> str:
    kept = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower())
    return kept.replace(" ", "-")


def _on_the_site(heading: str) -> str:
    """As mkdocs does it: Markdown's own way."""
    plain = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


@every_page
def test_commands_exist_and_parse(page: Path) -> None:
    for words in commands(page.read_text()):
        try:
            _parse(list(words))
        except Exception as error:
            pytest.fail(f"skippipe {shlex.join(words)}: {error}")


@every_page
def test_commands_within_sentences_exist(page: Path) -> None:
    named = set(re.findall(r"`skippipe ([a-z]+)", without_blocks(page.read_text())))
    assert named <= set(_all_commands().commands)


def test_commands_are_found_at_all() -> None:
    found = [words[0] for page in PAGES for words in commands(page.read_text())]
    assert len(found) > 80
    assert {"plan", "profile", "train", "node", "keys", "export", "serve", "study"} <= set(found)
    assert sum(len(LINK.findall(without_blocks(page.read_text()))) for page in PAGES) > 80
    assert len(PAGES) > 15


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("skippipe plan cluster.json --bugdet 3", "--bugdet"),
        ("skippipe plan cluster.json --budget much", "is not a number"),
        ("skippipe plane cluster.json", "no command 'plane'"),
        ("cat a.txt | skippipe generate", "checkpoint"),
        ("skippipe --verzion", "--verzion"),
    ],
)
def test_wrong_commands_would_be_noticed(line: str, error: str) -> None:
    (words,) = commands(f"```console\n{line}  # why\n```")
    with pytest.raises(Exception, match=re.escape(error)):
        _parse(words)


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.finditer(without_blocks(page.read_text())):
        place, _, heading = link["target"].partition("#")
        if ":" in place:
            continue
        target = page.parent / place if place else page
        assert target.exists(), link[0]
        if heading:
            headings = HEADING.findall(without_blocks(target.read_text()))
            assert heading in map(_on_the_repository, headings), link[0]
            assert heading in map(_on_the_site, headings), link[0]


def test_every_page_is_on_the_site() -> None:
    site = (ROOT / "mkdocs.yml").read_text()
    for page in ROOT.glob("docs/*.md"):
        assert f": {page.name}\n" in site, "mkdocs.yml: put it into 'nav'"


def test_the_walk_goes_through_all_there_is() -> None:
    """What takes long is run by `make test-docs`; that it still fits the text is seen here."""
    parts = sections(TUTORIAL.read_text())
    assert ["README", "Install", *list(parts)[1:]] == list(SMALLER)
    for heading, text in list(parts.items())[1:]:
        assert [long for long in SMALLER[heading] if long not in text] == []
    written = [piece.text for page in (README, TUTORIAL) for piece in pieces(page.read_text())]
    assert set(NOT_RUN) <= {without_remark(line) for text in written for line in lines(text)}


@pytest.mark.slow
def test_tutorial_on_one_machine(skippipe: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes seconds, with little to train; `make test-docs` walks through all of it."""
    part = sections(TUTORIAL.read_text())["One machine"]
    job = next(piece.text for piece in pieces(part) if piece.kind == "toml")
    shorter = {"iterations = 40": "iterations = 1", "budget_s = 3.0": "budget_s = 0.1", "every = 10": "every = 1"}
    for long, short in shorter.items():
        assert long in job
        job = job.replace(long, short)
    monkeypatch.chdir(tmp_path)
    Path("first.toml").write_text(job)
    Path("whole.toml").write_text(job.replace('skip = "1/4"', 'skip = "0"'))
    assert skippipe("cluster", "datacentre:4", "-o", "laptop.json").code == 0
    smaller = {"--max-tokens": "3", "--tokens": "256", "--iterations": "1"}
    ran = []
    for words in commands(part):
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
    assert ran == ["train", "show", "generate", "generate", "eval", "export", "train", "train"]
    assert Path("first-model/config.json").exists()
