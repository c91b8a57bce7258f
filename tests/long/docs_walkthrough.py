"""README and tutorial from the first line to the last: every command runs as it is written, in fresh folders, on
machines with the addresses that the text names. Not part of the suite, since it takes some twenty minutes:

make test-docs    # Linux, with iproute2 and curl

A command that is new on a page fails here until the walk runs it, and so does one that has gone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.doc_pages import ROOT, lines, pieces, sections, without_remark
from tests.helpers.namespaces import Machine, Terminal, neighbours

README, TUTORIAL = ROOT / "README.md", ROOT / "docs" / "tutorial.md"
PEOPLE = ["ann", "bob", "carol", "dan", "eve"]  # 10.0.0.1 to 10.0.0.5

SMALLER: dict[str, dict[str, str]] = {
    "README": {
        "--budget 30": "--budget 2",  # a search that ends sooner goes the same way
        "--budget 10": "--budget 1",
        "iterations = 100": "iterations = 4",
        "budget_s = 10.0": "budget_s = 1.0",
        "Qwen/Qwen3-0.6B": "model",  # the one that was exported before
        "iterations = 500": "iterations = 2",
        'cluster = "cluster.json"': 'cluster = "regions:9"',
        "sequence = 2048": "sequence = 64",
        'device = "cuda"': 'device = "cpu"',
        "run model/ --best": "tuned tuned-model/ --best",
    },
    "Install": {},
    "One machine": {
        "iterations = 40": "iterations = 18",  # six after the drill
        "--iterations 60": "--iterations 22",
        "--iterations 12": "--iterations 3",
        "--budget 5": "--budget 1",
        "--budget 10": "--budget 1",
        "--tokens 4096": "--tokens 512",
    },
    "Two machines": {
        "iterations = 200": "iterations = 40",
        "every = 20": "every = 5",
    },
    "Many machines": {
        "--model llama-1.5b --device cuda --dtype bf16": "--model llama-tiny --sequence 128",  # no GPU here
        "--model llama-1.5b": "--model llama-tiny",  # which fits on what was measured
        "--budget 30": "--budget 1",
        "--budget 120": "--budget 2",
    },
}
"""Part → what is made smaller there. Each must be found, or the walk fails."""

NOT_RUN = {
    "make test": "it is what .ci/run does",
    "make docs": "part of make test",
}

PROGRESS = r"^iteration +(\d+)/"
BEYOND_A_CHECKPOINT = r"^iteration +([7-9]|\d\d)/"
MORE_S = 240.0  # for a run to go on after a loss; one or two minutes, says the tutorial


class Reader:
    """Goes through a part of a page, piece by piece, and must come to its end."""

    def __init__(self, part: str, text: str) -> None:
        self._part = part
        self._left = [piece for piece in pieces(text) if piece.text not in NOT_RUN]
        self._told: set[str] = set()
        self._known: set[str] = set()
        self._to_find = set(SMALLER[part])

    def smaller(self, text: str) -> str:
        for long, short in SMALLER[self._part].items():
            text, found = re.subn(rf"{re.escape(long)}(?![\w./])", short, text)
            if found:
                self._to_find.discard(long)
        return text

    def console(self) -> list[str]:
        """The lines of the next block."""
        typed = [line for line in lines(self._next("console")) if without_remark(line) not in NOT_RUN]
        self._known.update(without_remark(line) for line in typed)
        smaller = [self.smaller(line) for line in typed]
        self._told.update(smaller)
        return smaller

    def sentence(self) -> str:
        """The next command within a sentence."""
        smaller = self.smaller(self._next(""))
        self._told.add(smaller)
        return smaller

    def sentence_for_another_part(self) -> str:
        return self._next("")

    def toml(self) -> str:
        return self.smaller(self._next("toml"))

    def end(self, *machines: Machine) -> None:
        """All that was read was run there."""
        self._pass_over()
        assert self._left == [], f"{self._part}: never read"
        assert self._to_find == set(), f"{self._part}: SMALLER has what is not in the text"
        assert self._told <= {line for machine in machines for line in machine.ran}, f"{self._part}: read and not run"

    def _next(self, kind: str) -> str:
        self._pass_over()
        piece = self._left.pop(0)
        assert piece.kind == kind, f"{self._part}: the walk expected {kind or 'a sentence'}, and here is {piece}"
        return piece.text

    def _pass_over(self) -> None:
        """Sentences that come back to a command of a block above."""
        while self._left and not self._left[0].kind and self._left[0].text in self._known:
            self._left.pop(0)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of a machine without SkipPipe. What pip would fetch is there, in the environment of the tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VIRTUAL_ENV", "PYTHON", "XDG"))}
    ours = str(Path(sys.executable).parent)
    path = ":".join(each for each in kept["PATH"].split(":") if each != ours)
    python = tmp_path_factory.mktemp("python")
    (python / "python3").symlink_to(Path(sys.executable).resolve())  # the version that those packages are for
    more = {"PATH": f"{python}:{path}", "PYTHONPATH": sysconfig.get_path("purelib"), "OMP_NUM_THREADS": "1"}
    return {**kept, **more, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


@pytest.fixture(scope="module")
def street(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Iterator[dict[str, Machine]]:
    """Machines on which SkipPipe has been installed as the tutorial says."""
    checkout = checked_out(tmp_path_factory.mktemp("tutorial"))
    here = Machine(checkout, environment)
    read = Reader("Install", sections(TUTORIAL.read_text())[""])
    said = here.run("set -e\n" + "\n".join(read.console()))
    read.end(here)
    assert re.search(r"^skippipe \d", said, re.MULTILINE)
    assert "completion installed" in said
    installed = {**environment, "PATH": f"{checkout}/.venv/bin:{environment['PATH']}"}
    with neighbours(tmp_path_factory.mktemp("street"), PEOPLE, installed) as machines:
        found = dict(zip(PEOPLE, machines, strict=True))
        where = found["ann"].run("python3 -c 'import skippipe; print(skippipe.__file__)'")
        assert where.startswith(f"{checkout}/.venv/"), "not what the tests themselves use"
        yield found


def checked_out(folder: Path) -> Path:
    """A copy of the working tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def changed(file: Path, changes: dict[str, str]) -> None:
    """What the text tells the reader to change."""
    text = file.read_text()
    for before, after in changes.items():
        assert before in text, f"{file}: no {before}"
        text = text.replace(before, after)
    file.write_text(text)


def goes_on(run: Terminal) -> None:
    seen = sum(bool(re.search(PROGRESS, line)) for line in run.lines)
    run.says(PROGRESS, seen + 2, within_s=MORE_S)


def stopped(first: Terminal, *nodes: Terminal) -> None:
    """By Ctrl-C, which dismisses the nodes."""
    first.interrupt()
    first.ends(130)
    for node in nodes:
        node.ends()


def goes_on_until_stopped(run: Terminal, *nodes: Terminal) -> None:
    goes_on(run)
    stopped(run, *nodes)


def answered(said: str) -> str:
    """The text that curl has brought."""
    (answer,) = json.loads(said[said.index("{") :])["choices"]
    return str(answer["text"])


def pids(gateway: Terminal) -> list[int]:
    """Of the nodes that it has started."""
    return [int(found[1]) for line in gateway.lines if (found := re.match(r"'.+' \(process (\d+)\) holds", line))]


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def promised_tokens_per_s(folder: Path) -> float:
    """Not seconds: how many microbatches an iteration has depends on the number of data nodes."""
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    return float(last["tokens"] / (last["iteration"] + 1) / last["promised_s"])


def test_readme(street: dict[str, Machine], environment: dict[str, str], tmp_path: Path) -> None:
    ann = street["ann"]
    ann.enter("readme")
    read = Reader("README", README.read_text())
    checkout = checked_out(tmp_path)
    here = Machine(checkout, environment)
    (demo,) = read.console()
    said = here.run(demo, within_s=600)
    assert "computed by 3 of 6 stages" in said
    assert "killed, for exercise" in said
    assert (checkout / "demo" / "best.html").exists()
    here.environment["PATH"] = f"{checkout}/.venv/bin:{environment['PATH']}"
    assert "Successfully installed skippipe" in here.run(read.sentence())
    for line in read.console():
        ann.run(line)
    assert all((ann.folder / name).stat().st_size for name in ("plan.json", "plan.html", "plan.png"))
    assert "completion installed" in ann.run(read.sentence())
    job, *train_and_export = read.console()
    ann.run(job)
    (ann.folder / "job.toml").write_text(read.smaller((ann.folder / "job.toml").read_text()))
    for line in train_and_export:
        ann.run(line)
    assert all((ann.folder / name / "config.json").exists() for name in ("run/model", "model"))
    here.run(read.sentence())  # what training needs
    assert "12 node keys" in ann.run(read.sentence())
    assert read.sentence_for_another_part() == joining()
    fine_tuned(ann, read)
    gateway = ann.start(read.sentence())
    gateway.says("is served at")
    (curl,) = read.console()
    assert answered(ann.run(curl))
    stopped(gateway)
    assert len(ann.run(read.sentence()).split()) > 20  # words of the built-in model
    read.end(here, ann)


def fine_tuned(machine: Machine, read: Reader) -> None:
    """With a chat template for the exported tokenizer, which never chatted, and conversations."""
    tokenizer = machine.folder / "model" / "tokenizer_config.json"
    template = "{% for each in messages %}{{ each['role'] }}: {{ each['content'] }}\n{% endfor %}"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"chat_template": template}))
    chats = [{"prompt": f"Who is number {number}?", "completion": f"A truth, said {number}."} for number in range(800)]
    (machine.folder / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    (machine.folder / "tuned.toml").write_text(f'output = "tuned"\n{read.toml()}')
    machine.run("skippipe train tuned.toml")
    machine.run(read.sentence())
    assert (machine.folder / "tuned-model" / "config.json").exists()


def joining() -> str:
    (found,) = [piece.text for piece in pieces(README.read_text()) if piece.text.startswith("skippipe node")]
    return found


def test_one_machine(street: dict[str, Machine]) -> None:
    ann = street["ann"]
    ann.enter("tutorial")
    read = Reader("One machine", sections(TUTORIAL.read_text())["One machine"])
    job = ann.folder / "first.toml"
    job.write_text(read.toml())
    for line in read.console():  # profile, plan, why
        said = ann.run(line)
    assert "what limits it" in said
    (train,) = read.console()
    said = ann.run(train)
    assert [kind for kind in ("lost", "rerouted", "joined", "replanned", "recovered") if f" {kind}: " not in said] == []
    resume, show = read.console()
    ann.run(resume)
    assert len(losses(ann.folder / "first")) == 22
    assert "22 of 22" in ann.run(show)
    for line in read.console():  # generate, eval, export
        ann.run(line)
    assert (ann.folder / "first-model" / "config.json").exists()
    serve, curl = read.console()
    gateway = ann.start(serve)
    gateway.says("is served at")
    assert answered(ann.run(curl))
    asked = ann.start(curl)
    os.kill(pids(gateway)[0], 9)
    assert answered(asked.ends())
    stopped(gateway)
    # a continent on a laptop
    changed(job, {'cluster = "laptop.json"': 'cluster = "regions:9"', "samples = 2": "samples = 2\nmicrobatches = 24"})
    job.write_text(job.read_text() + read.toml())
    for line in read.console():
        ann.run(line)
    skipped, whole = (promised_tokens_per_s(ann.folder / name) for name in ("quarter-skipped", "nothing-skipped"))
    assert skipped > whole
    assert "skippipe" in ann.run(read.sentence())
    read.end(ann)


def started(street: dict[str, Machine], typed: list[str]) -> list[Terminal]:
    """Each line where its remark says."""
    return [street["bob" if re.search(r"# Bob\b", line) else "ann"].start(line) for line in typed]


def test_two_machines(street: dict[str, Machine]) -> None:
    ann, bob = street["ann"], street["bob"]
    for machine in (ann, bob):
        machine.enter("desks")
    read = Reader("Two machines", sections(TUTORIAL.read_text())["Two machines"])
    for line in read.console():  # keys, prepare
        ann.run(line)
    shutil.copy2(ann.folder / "keys" / "bob.key", bob.folder)
    shutil.copytree(ann.folder / "tokens", bob.folder / "tokens")
    (ann.folder / "job.toml").write_text(read.toml())
    measuring = read.console()
    for terminal in started(street, measuring):
        terminal.ends()
    training = read.console()
    train, at_ann, at_bob = started(street, training)
    train.says(BEYOND_A_CHECKPOINT, within_s=MORE_S)
    with closed_laptop(bob, at_bob):
        train.says("lost: 'bob' no heartbeat")
        train.says("paused: ")
    at_bob = bob.start(at_bob.line)
    goes_on(train)
    train.says("recovering: 'bob' stage . from the newest checkpoint")
    keys_for_three = read.sentence()
    train.kill()
    (resume,) = read.console()
    train = ann.start(resume)
    goes_on(train)
    ann.run(read.sentence())  # export
    for terminal in (train, at_ann, at_bob):
        terminal.ends()
    assert len(losses(ann.folder / "run")) == 40
    assert (ann.folder / "run" / "model" / "config.json").exists()
    shutil.copytree(ann.folder / "model", bob.folder / "model")
    gateway, *nodes = started(street, read.console())
    tried = gateway.says(r"(curl .*)")[1]
    assert answered(ann.run(tried))
    stopped(gateway, *nodes)
    # a second node on Ann's machine
    ann.run(keys_for_three)
    shutil.copy2(ann.folder / "three" / "bob.key", bob.folder)
    changed(ann.folder / "job.toml", {"keys/": "three/"})
    changed(ann.folder / "job.toml", {"iterations = 40": 'output = "run-3"\niterations = 40'})
    for typed in (measuring, training):
        typed = [line.replace("keys/", "three/") for line in typed]
        third = typed[1].replace("ann.key", "ann-2.key").replace("--listen 5556", "--listen 5557")
        first, *nodes = started(street, [*typed, third])
        if typed[0].startswith("skippipe profile"):
            for terminal in (first, *nodes):
                terminal.ends()
    first.says(BEYOND_A_CHECKPOINT, within_s=MORE_S)
    with closed_laptop(bob, nodes.pop(1)):
        first.says("lost: 'bob'")
        goes_on_until_stopped(first, *nodes)
    read.end(ann, bob)


@contextmanager
def closed_laptop(machine: Machine, node: Terminal) -> Iterator[None]:
    """No last word reaches the others."""
    machine.network("down")
    node.kill()
    yield
    machine.network("up")


def test_many_machines(street: dict[str, Machine]) -> None:
    for machine in street.values():
        machine.enter("cities")
    ann = street["ann"]
    read = Reader("Many machines", sections(TUTORIAL.read_text())["Many machines"])
    keys, profile, *planning = read.console()
    ann.run(keys)
    for name, machine in street.items():
        shutil.copy2(ann.folder / "keys" / f"{name}.key", machine.folder)
    for terminal in with_all(street, profile):
        terminal.ends()
    for line in planning:
        ann.run(line)
    assert all((ann.folder / name).stat().st_size for name in ("sweep.png", "plan.json", "plan.html"))
    as_with_two = pieces(sections(TUTORIAL.read_text())["Two machines"])
    ann.run(next(line for piece in as_with_two for line in lines(piece.text) if line.startswith("skippipe prepare")))
    for machine in street.values():
        if machine is not ann:
            shutil.copytree(ann.folder / "tokens", machine.folder / "tokens")
    job = ann.folder / "job.toml"
    job.write_text(next(piece.text for piece in as_with_two if piece.kind == "toml"))
    said = {"desks.json": "cluster.json", "stages = 2": "stages = 4\nbudget_s = 1.0", 'skip = "0"': 'skip = "1/4"'}
    changed(job, {**said, "iterations = 200": "iterations = 100", "every = 20": "every = 2"})
    goes_on_until_stopped(*with_all(street, "skippipe train job.toml", "--tokens tokens/"))
    copy, remove, resume, why = read.console()
    for line in (copy, remove):
        ann.run(line)
    changed(job, {'cluster = "cluster.json"': 'cluster = "measured.json"'})
    goes_on_until_stopped(*with_all(street, resume, "--tokens tokens/"))
    assert "what limits it" in ann.run(why)
    assert joining() in street["bob"].ran
    read.end(ann)


def with_all(street: dict[str, Machine], line: str, options: str = "") -> list[Terminal]:
    """One command at the coordinator's, one on every machine."""
    first = street["ann"].start(line)
    others = [
        machine.start(joining().replace("bob.key", f"{name}.key {options}").rstrip())
        for name, machine in street.items()
    ]
    return [first, *others]
