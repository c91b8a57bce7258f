"""Nodes that are not started by the coordinator: those that join with a key, and torchrun's. Real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_group

from skippipe.cli import main
from skippipe.cli.app import app
from skippipe.cluster import Cluster
from skippipe.errors import UserError
from skippipe.launch.torchrun import Rank
from skippipe.presets import preset
from skippipe.runs.history import read_history
from skippipe.training import torchrun
from skippipe.training.job_config import load_job
from skippipe.transport.addresses import free_port, listen_address, own_address
from skippipe.transport.keys import KeyFile, KeyPair, PeerList
from tests.helpers.processes import FORKED, NODES, RUN_END_S, Command, Place, end, only_error, start, wait_for


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("launch"))


@pytest.fixture
def names(place: Place, skippipe: Command) -> list[str]:
    keys = place.folder / "keys"
    if not keys.exists():
        assert skippipe("keys", f"regions:{NODES}", keys).code == 0
    return list(PeerList.load(keys / "peers.json").peers)


def live(words: list[str], log: str) -> None:
    """A command in a process group of its own, with what it says in a file."""
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.argv = ["skippipe", *words]
    main()


@pytest.fixture
def many(tmp_path: Path) -> Iterator[Callable[..., list[BaseProcess]]]:
    """Starts many commands; forked from a process that has torch, since importing it takes longer than training."""
    started: list[BaseProcess] = []

    def begin(*commands: list[object]) -> list[BaseProcess]:
        for words in commands:
            log = str(tmp_path / f"{len(started)}.log")
            started.append(FORKED.Process(target=live, args=([str(word) for word in words], log), daemon=True))
            started[-1].start()
        return started

    yield begin
    for process in started:
        if process.is_alive():
            process.kill()


@pytest.fixture
def refused(skippipe: Command) -> Callable[..., str]:
    """Runs a command here that must end with exit code 2; gives what it says is wrong."""

    def run(*words: object) -> str:
        ran = skippipe(*words)
        assert ran.code == 2, ran
        return only_error(ran.err)

    return run


# Joining


def test_nodes_join_and_strangers_do_not(
    place: Place, names: list[str], many: Callable[..., list[BaseProcess]], tmp_path: Path
) -> None:
    port = free_port("127.0.0.1")
    at = f"127.0.0.1:{port}"
    keys = place.folder / "keys"
    stolen = KeyFile.load(keys / f"{names[0]}.key")
    KeyFile(names[0], KeyPair.new(), stolen.coordinator).save(tmp_path / "other.key")
    KeyFile(names[0], stolen.keys, KeyPair.new().public).save(tmp_path / "elsewhere.key")
    strangers = [["node", "--join", at, "--key", tmp_path / f"{each}.key"] for each in ("other", "elsewhere")]
    coordinator, *refused = list(many(["train", place.joining("joined", port)], *strangers))
    for process in refused:  # answered as soon as the coordinator listens
        process.join(RUN_END_S)
    nodes = many(*(["node", "--join", at, "--key", keys / f"{name}.key"] for name in names))[3:]
    for process in (*nodes, coordinator):
        process.join(RUN_END_S)
    said = [(tmp_path / f"{number}.log").read_text() for number in range(3 + NODES)]
    codes = [process.exitcode for process in (coordinator, *refused, *nodes)]
    assert codes == [0, 2, 2, *[0] * NODES], "".join(said)
    assert only_error(said[1]).startswith(f"key: {at} does not know this key: it was revoked, or is of another")
    assert only_error(said[2]).startswith(f"key: {at} is not the coordinator that this key or invitation is for")
    assert f"waiting for {NODES} nodes to join {at}: {', '.join(sorted(names))}" in said[0]
    assert place.is_trained("joined")
    assert len(place.losses("joined")) == 2


@pytest.mark.slow
def test_nodes_that_only_call_out(
    place: Place, names: list[str], many: Callable[..., list[BaseProcess]], tmp_path: Path
) -> None:
    """Half of the nodes listen nowhere: nobody is lost, and losses are those of a run in which all can be called."""
    for name, listen in (("called", []), ("calling", ["--listen", "none"])):
        at = f"127.0.0.1:{free_port('127.0.0.1')}"
        nodes = [["node", "--join", at, "--key", place.folder / "keys" / f"{each}.key"] for each in names]
        whole = many(
            ["train", place.joining(name, int(at.rpartition(":")[2]))],
            *([*words, *listen] if number % 2 else words for number, words in enumerate(nodes)),
        )
        processes = whole[-1 - NODES :]
        for process in processes:
            process.join(RUN_END_S)
        said = (tmp_path / f"{len(whole) - 1 - NODES}.log").read_text()
        assert [process.exitcode for process in processes] == [0] * (1 + NODES), said
        assert said.count("cannot be called: it calls the others") == (2 if listen else 0) and "lost:" not in said, said
    assert place.losses("calling") == pytest.approx(place.losses("called"), rel=1e-5)


@pytest.mark.slow
def test_nodes_that_only_call_out_meet_at_a_relay(
    place: Place, skippipe: Command, many: Callable[..., list[BaseProcess]], tmp_path: Path
) -> None:
    """No node can be called. The relay is killed in the middle of the run, and comes back: nobody is lost, and losses
    are those of a run in which all can be called, so nothing was lost or done twice."""
    keys, iterations = tmp_path / "keys", 40
    assert skippipe("keys", f"regions:{NODES}", keys, "--relays", "hub").code == 0
    names = [each for each in PeerList.load(keys / "peers.json").peers if each != "hub"]
    hub = f"127.0.0.1:{free_port('127.0.0.1')}"
    for name, listen in (("directly", []), ("relayed", ["--listen", "none"])):
        port = free_port("127.0.0.1")
        at = ["--join", f"127.0.0.1:{port}"]
        job = place.joining(name, port, keys / "peers.json", keys / "coordinator.key")
        job.write_text(job.read_text().replace("iterations = 2", f"iterations = {iterations}"))
        nodes = [["node", *at, "--key", keys / f"{each}.key", *listen] for each in names]
        processes = many(["train", job], *nodes)[-1 - NODES :]
        if listen:
            relaying = ["relay", *at, "--key", keys / "hub.key", "--listen", hub]
            first = many(relaying)[-1]
            wait_for(lambda: place.has_trained("relayed", 5))
            first.kill()
            first.join(RUN_END_S)
            second = many(relaying)[-1]
        for process in processes:
            process.join(RUN_END_S)
        said = (tmp_path / f"{(1 + NODES) * bool(listen)}.log").read_text()
        assert [process.exitcode for process in processes] == [0] * (1 + NODES), said
    assert said.count("cannot be called: it calls the others") == NODES, said
    assert "lost: relay 'hub'" in said and not re.search(r"  lost: (?!relay)", said), said
    assert len(place.losses("relayed")) == iterations
    assert place.losses("relayed") == pytest.approx(place.losses("directly"), rel=1e-5)
    assert second.is_alive(), "it waits for the next run"


def test_nodes_are_invited_and_one_is_revoked_while_training(
    place: Place, skippipe: Command, many: Callable[..., list[BaseProcess]], tmp_path: Path
) -> None:
    port = free_port("127.0.0.1")
    cluster, events = tmp_path / "cluster", place.folder / "invited" / "events.jsonl"
    keys = {node.name: tmp_path / f"{node.name}.key" for node in preset(f"regions:{NODES}").nodes}
    at = ("--address", f"127.0.0.1:{port}")
    strings = {name: skippipe("invite", cluster, "--name", name, *at).out.strip() for name in keys}
    job = place.joining("invited", port, peers=cluster / "peers.json", key=cluster / "coordinator.key")
    job.write_text(job.read_text().replace("iterations = 2", "iterations = 5000"))
    joining = (["node", string, "--key", keys[name]] for name, string in strings.items())
    coordinator, *nodes = many(["train", job], *joining)
    out, *others = keys
    wait_for(lambda: place.has_trained("invited", 3))
    new = skippipe("node", skippipe("invite", cluster, "--name", "dora").out.strip(), "--key", tmp_path / "dora.key")
    assert new.code == 2
    assert only_error(new.err) == (
        "name: the cluster of the run that goes on has no 'dora': put 'dora' into the cluster file, stop the run with "
        "Ctrl-C, and go on with --resume"
    )
    assert skippipe("revoke", cluster, out).out == f"'{out}' is shut out: its key is void\n"
    nodes[0].join(RUN_END_S)
    assert "this node was revoked by the owner of the cluster" in only_error((tmp_path / "1.log").read_text())
    assert f"that is not there ({out}); or put" in only_error(skippipe("node", "--key", tmp_path / "dora.key").err)
    done = len(place.losses("invited"))
    wait_for(lambda: place.has_trained("invited", done + 3), RUN_END_S)
    stolen = ["node", strings[others[0]], "--key", tmp_path / "thief.key"]
    again, second = many(["node", "--key", keys[out]], stolen)[-2:]
    again.join(RUN_END_S)
    second.join(RUN_END_S)
    assert "does not know this key" in only_error((tmp_path / f"{NODES + 1}.log").read_text())
    assert "was used at" in only_error((tmp_path / f"{NODES + 2}.log").read_text())
    assert not (tmp_path / "thief.key").exists()
    os.kill(coordinator.pid or 0, signal.SIGINT)
    for process in (*nodes, coordinator):
        process.join(RUN_END_S)
    assert [process.exitcode for process in (coordinator, *nodes)] == [130, 2, *[0] * (NODES - 1)]
    found = [json.loads(line) for line in events.read_text().splitlines()]
    kinds = {(each["kind"], each["node"]) for each in found}
    assert {("admitted", name) for name in keys} | {("checked", name) for name in keys} <= kinds
    assert {("revoked", out), ("lost", out), ("refused", out), ("refused", others[0])} <= kinds
    rows = {row["name"]: row for row in skippipe("members", cluster, "--json").json}
    assert [rows[name]["state"] for name in keys] == ["revoked", *["member"] * (NODES - 1)]
    assert all(rows[name]["seen_s"] >= rows[name]["since_s"] > 0 for name in others)


def test_sigterm_saves_what_was_trained(place: Place, many: Callable[..., list[BaseProcess]], tmp_path: Path) -> None:
    """A spot machine is taken away: every process of the run gets the signal."""
    job = place.job("taken away", NODES, 2, "checkpoint.every = 100000\n")
    job.write_text(job.read_text().replace("iterations = 2", "iterations = 100000"))
    (run,) = many(["train", job])
    wait_for(lambda: place.has_trained("taken away", 3))
    os.killpg(run.pid or 0, signal.SIGTERM)
    run.join(RUN_END_S)
    said = (tmp_path / "0.log").read_text()
    assert run.exitcode == 143, said
    assert "lost: " not in said
    assert "--resume goes on" in said
    assert place.saved("taken away") == len(place.losses("taken away"))


def test_a_coordinator_that_gets_sigterm_saves_and_leaves_its_nodes_to_the_next(
    place: Place, names: list[str], many: Callable[..., list[BaseProcess]], tmp_path: Path
) -> None:
    port = free_port("127.0.0.1")
    job = place.joining("moved", port)
    job.write_text(job.read_text().replace("iterations = 2", "iterations = 100000") + "checkpoint.every = 100000\n")
    keys = place.folder / "keys"
    joining = (["node", "--join", f"127.0.0.1:{port}", "--key", keys / f"{name}.key"] for name in names)
    first, *nodes = many(["train", job], *joining)
    wait_for(lambda: place.has_trained("moved", 3))
    os.kill(first.pid or 0, signal.SIGTERM)
    first.join(RUN_END_S)
    assert first.exitcode == 143, (tmp_path / "0.log").read_text()
    done = len(place.losses("moved"))
    assert place.saved("moved") == done
    assert read_history(place.folder / "moved").ended, "stopped on request, not broken off"
    assert all(node.is_alive() for node in nodes)
    second = many(["train", job, "--resume", "--iterations", str(done + 2)])[-1]
    for process in (second, *nodes):
        process.join(RUN_END_S)
    said = (tmp_path / f"{1 + NODES}.log").read_text()
    assert [process.exitcode for process in (second, *nodes)] == [0] * (1 + NODES), said
    assert len(place.losses("moved")) == done + 2
    assert f"{NODES} nodes are where they were, 0 are new" in said


def test_nobody_answers(place: Place, names: list[str], refused: Callable[..., str]) -> None:
    at = f"127.0.0.1:{free_port('127.0.0.1')}"
    key = place.folder / "keys" / f"{names[0]}.key"
    why = refused("node", "--join", at, "--key", key, "--coordinator-timeout", "0.5")
    assert why.startswith(f"waited 0.5 s for the coordinator: no answer from {at}; is it started")


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_node_cannot_start(place: Place, names: list[str], refused: Callable[..., str], taken: int) -> None:
    keys = place.folder / "keys"
    mine = keys / f"{names[0]}.key"
    at = ("--join", "127.0.0.1:5")
    assert f"127.0.0.1:{taken}: cannot listen there" in refused("node", *at, "--key", mine, "--listen", taken)
    assert "cannot reach 0.0.0.0" in refused("node", *at, "--key", mine, "--listen", "0.0.0.0:5556")
    assert "this is the coordinator's key" in refused("node", *at, "--key", keys / "coordinator.key")
    assert "expected host:port" in refused("node", "--join", "somewhere", "--key", mine)
    mine.chmod(0o644)
    assert "chmod 600" in refused("node", *at, "--key", mine)
    mine.chmod(0o600)


def test_the_coordinator_cannot_start(place: Place, names: list[str], refused: Callable[..., str], taken: int) -> None:
    assert f"127.0.0.1:{taken}: cannot listen there" in refused("train", place.joining("taken", taken))
    known = dict(PeerList.load(place.folder / "keys" / "peers.json").peers)
    del known[names[1]]
    PeerList(known).save(place.folder / "short.json")
    lacking = place.joining("short", 0, peers=place.folder / "short.json")
    assert f"short.json: has neither a key nor an open invitation of {names[1]}" in refused("train", lacking)
    assert "--engine: 'warp' is none of processes" in refused("train", lacking, "--engine", "warp")
    assert "goes with --engine ray" in refused("train", lacking, "--ray-address", "127.0.0.1:6379")


def test_where_a_node_listens() -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert listen_address("5556", "127.0.0.1:5555", None) == "127.0.0.1:5556"
    assert listen_address("5556", "localhost:5555", None) == "127.0.0.1:5556"
    assert listen_address("10.0.0.7:5556", "10.0.0.1:5555", None) == "10.0.0.7:5556"
    assert listen_address("0.0.0.0:5556", "10.0.0.1:5555", "home.example:5556") == "0.0.0.0:5556"
    with pytest.raises(UserError, match=r"'no\.such\.host\.invalid': no way there"):
        listen_address("0", "no.such.host.invalid:5555", None)


# torchrun


def test_every_rank_takes_its_own_gpu() -> None:
    rank = Rank(number=5, world=8, local=1, master="10.0.0.1")
    assert [rank.device(asked) for asked in ("cuda", "cuda:0", "cpu")] == ["cuda:1", "cuda:0", "cpu"]


@pytest.mark.slow
def test_torchrun(place: Place) -> None:
    job = place.job("ranks", nodes=3, stages=3)
    words = ("--standalone", "--nproc-per-node", 3, "-m", "skippipe.training.torchrun", job)
    code, out, err = end(start(*words, module="torch.distributed.run"))
    assert code == 0, f"{out}{err}"
    assert "on 3 nodes of 'regions:3'" in out
    assert place.is_trained("ranks")
    assert len(place.losses("ranks")) == 2


@pytest.mark.parametrize(
    ("ranks", "more", "wrong"),
    [
        (2, "", "the plan uses 3 nodes and torchrun started 2 ranks: start 3, or plan for 2 nodes"),
        (3, 'transport = { peers = "p", key = "k" }\n', "transport.peers: is for nodes that join by themselves"),
        (0, "", "this is for torchrun to start: torchrun --nproc-per-node NODES"),
    ],
)
def test_torchrun_cannot_start(
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ranks: int,
    more: str,
    wrong: str,
) -> None:
    environment: dict[str, Any] = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1"}
    for name, value in environment.items() if ranks else ():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(sys, "argv", ["torchrun", str(place.job("cannot", nodes=3, stages=3, more=more))])
    with pytest.raises(SystemExit) as ended:
        torchrun.main()
    assert ended.value.code == 2
    assert only_error(capsys.readouterr().err).startswith(wrong)


# What the documentation tells people to type


def blocks(kind: str) -> list[str]:
    text = (Path(__file__).parents[2] / "docs" / "many-machines.md").read_text()
    found = re.findall(rf"^```{kind}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    assert found
    return found


def test_recipes_are_well_formed(tmp_path: Path) -> None:
    for script in blocks("bash"):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        for command, options in re.findall(r"^ *(?:exec )?skippipe (\w+) (.*)$", script, flags=re.MULTILINE):
            taken = {name for each in commands()[command].params for name in each.opts}
            assert set(re.findall(r"--[\w-]+", options)) <= taken, command
    for job in blocks("toml"):
        (tmp_path / "job.toml").write_text(job)
        load_job(tmp_path / "job.toml")
    for cluster in blocks("json"):
        (tmp_path / "cluster.json").write_text(cluster)
        assert [node.name for node in Cluster.load(tmp_path / "cluster.json").nodes] == ["ann", "bob"]
    yaml: Any = pytest.importorskip("yaml")
    made = [each for text in blocks("yaml") for each in yaml.safe_load_all(text)]
    assert [each["kind"] for each in made] == ["Service", "Job", "Job"]
    for each in made[1:]:
        pod = each["spec"]["template"]["spec"]
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        assert {volume["secret"]["defaultMode"] for volume in pod["volumes"] if "secret" in volume} == {0o400}
        _, command, *options = pod["containers"][0]["command"]
        taken = {name for param in commands()[command].params for name in param.opts}
        assert {word for word in options if word.startswith("--")} <= taken


def commands() -> dict[str, Any]:
    return dict(get_group(app).commands)
