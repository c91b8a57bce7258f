"""Wheel and sdist, built and installed into an empty environment: `make test-package`. Takes a minute or two."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import skippipe

ROOT = Path(__file__).parents[2]
DATA = {
    file.relative_to(ROOT).as_posix()
    for file in (ROOT / "skippipe").rglob("*")
    if file.is_file() and file.suffix != ".py" and file.parent.name != "__pycache__"
}
ELSEWHERE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # not this checkout


def _run(*words: str | Path, folder: Path) -> str:
    done = subprocess.run(list(words), cwd=folder, env=ELSEWHERE, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, and the wheel made of it."""
    folder = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "build", "--outdir", folder, ROOT, folder=folder)
    return folder


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the commands of an environment that has the wheel, and what it needs to plan."""
    place = tmp_path_factory.mktemp("fresh")
    venv.create(place, with_pip=True)
    (wheel,) = built.glob("*.whl")
    quietly = ["install", "--quiet", "--disable-pip-version-check"]
    _run(place / "bin" / "python", "-m", "pip", *quietly, "-c", ROOT / "constraints.txt", wheel, folder=place)
    return place / "bin"


def test_the_wheel_has_data_types_and_licence(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert wheel.name == f"skippipe-{skippipe.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
        about = next(name for name in names if name.endswith("/METADATA"))
        metadata = packed.read(about).decode()
    sources = {str(file.relative_to(ROOT)) for file in (ROOT / "skippipe").rglob("*.py")}
    assert sources | DATA <= names
    assert {name.split("/")[0] for name in names} == {"skippipe", about.split("/")[0]}, "nothing beside the package"
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert "License-Expression: Apache-2.0" in metadata
    assert "Classifier: Typing :: Typed" in metadata


def test_the_sdist_has_what_the_wheel_is_made_of(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", *DATA} <= names


def test_it_runs_where_nothing_else_is(installed: Path, tmp_path: Path) -> None:
    command = installed / "skippipe"
    assert _run(command, "--version", folder=tmp_path).strip() == f"skippipe {skippipe.__version__}"
    words = ["--stages", "2", "--skip", "0", "--budget", "0", "--strategy", "dtfm", "-o", "plan.json"]
    _run(command, "plan", "datacentre:4", *words, folder=tmp_path)
    assert ": holds every rule" in _run(command, "check", "plan.json", folder=tmp_path)
    _run(command, "simulate", "published20", "--paths", "skippipe", folder=tmp_path)  # an example that is data


def test_what_is_missing_is_said_in_one_line(installed: Path, tmp_path: Path) -> None:
    """Training and serving need extras."""
    _run(installed / "skippipe", "job", "-o", "job.toml", folder=tmp_path)
    commands = ["train job.toml", "node --join a:1 --key k", "serve austen", "eval austen --text classics-val"]
    for line in commands:
        words = [str(installed / "skippipe"), *line.split()]
        done = subprocess.run(words, cwd=tmp_path, env=ELSEWHERE, capture_output=True, text=True)
        assert done.returncode == 2, line
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert "pip install 'skippipe[" in done.stderr


def test_its_types_are_seen(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text("from skippipe.plan import Plan\nreveal_type(Plan.load)\n")
    python = ["--python-executable", str(installed / "python")]
    said = _run(sys.executable, "-m", "mypy", *python, "--cache-dir", tmp_path / "cache", "user.py", folder=tmp_path)
    assert "-> skippipe.plan.Plan" in said
