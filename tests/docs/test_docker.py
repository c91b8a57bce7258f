"""Image and compose file of examples/docker where there is no Docker: their form, and their steps in folders."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from skippipe.cluster import Cluster
from skippipe.training.job_config import load_job
from skippipe.transport.addresses import free_port

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "docker"
NODES = ("ann", "bob", "carol")
END_S = 240.0


def steps() -> list[tuple[str, list[str]]]:
    """Instructions of the Dockerfile, and their words."""
    text = (FOLDER / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.split(None, 1) for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(name, shlex.split(rest)) for name, rest in lines]


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    return found


def test_the_compose_file_is_of_a_coordinator_and_three_nodes() -> None:
    services, volumes = compose()["services"], compose()["volumes"]
    assert set(services) == {"coordinator", *NODES}
    for name, service in services.items():
        assert (FOLDER / service["build"]["context"] / service["build"]["dockerfile"]).samefile(FOLDER / "Dockerfile")
        assert (FOLDER / service["entrypoint"][1]).is_file()
        mounted = dict(each.split(":")[:2] for each in service["volumes"])
        assert all(each in volumes or each.startswith("./") for each in mounted)
        assert ("cluster" in mounted) == (name == "coordinator"), "nobody else sees the coordinator's key"
        if name in NODES:
            assert service["entrypoint"][2:] == [name]
            assert mounted[name] == "/root/.skippipe", "its key outlives the container"
    job = load_job(FOLDER / "job.toml")
    assert job.transport.listen.endswith(services["coordinator"]["environment"]["COORDINATOR"].partition(":")[2])
    assert tuple(node.name for node in Cluster.load(FOLDER / "cluster.json").nodes) == NODES
    assert "for name in ann bob carol;" in (FOLDER / "coordinator.sh").read_text()


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the Dockerfile makes, but for the packages that are here already: a folder instead of a root."""
    root, place = tmp_path_factory.mktemp("image"), Path()
    for name, words in steps():
        if name == "WORKDIR":
            place = root / words[0].removeprefix("/")
            place.mkdir(parents=True)
        elif name == "COPY":
            *sources, target = words
            for source in sources:
                found = ROOT / source
                if found.is_dir():
                    shutil.copytree(found, place / target, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(found, place / target)
        elif name == "RUN":
            assert words[:2] == ["pip", "install"] and words[-1] == ".[train]", words
            offline = ["--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--quiet"]
            pip = [sys.executable, "-m", "pip", "install", *offline, "--target", str(root / "packages"), "."]
            subprocess.run(pip, cwd=place, check=True, timeout=END_S, env=environment())
    return root


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # not this checkout


@pytest.mark.slow
def test_the_image_has_the_command(image: Path) -> None:
    entry = next(words for name, words in steps() if name == "ENTRYPOINT")
    assert entry == ["[skippipe]"]
    ran = subprocess.run(
        [image / "packages" / "bin" / "skippipe", "--version"],
        env={**environment(), "PYTHONPATH": str(image / "packages")},
        capture_output=True,
        text=True,
        timeout=END_S,
        check=True,
    )
    assert re.fullmatch(r"skippipe [\d.]+\n", ran.stdout)
    exposed = next(words for name, words in steps() if name == "EXPOSE")
    assert {"5554", "5555"} <= set(exposed)


@pytest.mark.slow
def test_what_compose_starts_trains(image: Path, tmp_path: Path) -> None:
    """Each service as a process with its own home; volumes are folders that they share."""
    work, port = tmp_path / "work", free_port("127.0.0.1")
    shutil.copytree(image / "work", work)
    job = work / "job.toml"
    text = job.read_text().replace("0.0.0.0:5555", f"127.0.0.1:{port}")
    job.write_text(text.replace("iterations = 20", "iterations = 2").replace("sequence = 64", "sequence = 16"))
    with ExitStack() as stack:
        started = {}
        for name, service in compose()["services"].items():
            (home := tmp_path / name).mkdir()
            said = stack.enter_context((tmp_path / f"{name}.log").open("w"))
            started[name] = subprocess.Popen(
                service["entrypoint"],
                cwd=work,
                stdout=said,
                stderr=said,
                env={
                    **environment(),
                    "PYTHONPATH": str(image / "packages"),
                    "PATH": f"{image / 'packages' / 'bin'}:{os.environ['PATH']}",
                    "HOME": str(home),
                    "COORDINATOR": f"127.0.0.1:{port}",
                    "OMP_NUM_THREADS": "1",
                },
            )
            stack.callback(started[name].wait)
            stack.callback(started[name].kill)
        codes = {name: process.wait(END_S) for name, process in started.items()}
    said_all = "".join((tmp_path / f"{name}.log").read_text() for name in started)
    assert set(codes.values()) == {0}, said_all
    assert len((work / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    events = [json.loads(line) for line in (work / "run" / "events.jsonl").read_text().splitlines()]
    assert {each["node"] for each in events if each["kind"] == "admitted"} == set(NODES)
    assert all((tmp_path / name / ".skippipe" / "node.key").exists() for name in NODES)
