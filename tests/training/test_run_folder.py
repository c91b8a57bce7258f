"""The output folder of a run: one process at a time, one run, and files that know whose they are."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skippipe.checkpoint.format import MANIFEST, Checkpoints
from skippipe.checkpoint.locate import locate_checkpoint
from skippipe.errors import UserError
from skippipe.runs.history import read_history
from skippipe.runs.tail import checkpoints_in, run_id_of
from skippipe.runs.wal import WriteAheadLog
from skippipe.training.run_folder import LOCK_FILE, RunFolder, open_run_folder, set_rescue_folder
from tests.helpers.dashboards import RunFolder as Written
from tests.helpers.dashboards import panels, plan_line, plan_of
from tests.helpers.processes import Command

ROW = '{"iteration": 3, "loss": 2.0, "seconds": 1.0}\n'


def holds(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@contextmanager
def begun(folder: Path, *, resumed: bool = False, force: bool = False) -> Iterator[RunFolder]:
    with open_run_folder(folder, resumed=resumed, force=force) as found:
        found.begin()
        yield found


def test_a_run_gets_an_id_and_keeps_it(tmp_path: Path) -> None:
    with begun(tmp_path / "run") as first:
        assert len(first.run_id) == 16
    assert run_id_of(tmp_path / "run") == first.run_id
    (tmp_path / "run" / "metrics.jsonl").write_text(ROW)
    with begun(tmp_path / "run", resumed=True) as again:
        assert again.run_id == first.run_id


def test_one_process_at_a_time_whatever_it_wants_there(tmp_path: Path) -> None:
    with begun(tmp_path) as held:
        (tmp_path / "metrics.jsonl").write_text(ROW)
        for resumed, force in ((False, False), (True, False), (False, True)):
            with pytest.raises(UserError, match=rf"a run is going on in {tmp_path} \(process {os.getpid()} of "):
                RunFolder(tmp_path, resumed=resumed, force=force)
        assert run_id_of(tmp_path) == held.run_id
    with begun(tmp_path, resumed=True):
        pass


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_nodes_that_outlive_their_coordinator_do_not_keep_the_folder(tmp_path: Path) -> None:
    waits, says = os.pipe()
    is_up, comes_up = os.pipe()
    with begun(tmp_path):
        child = os.fork()
        if child == 0:
            os.close(says)
            os.write(comes_up, b"!")
            os.read(waits, 1)  # until the parent closes its end
            os._exit(0)
        os.read(is_up, 1)
    try:
        with begun(tmp_path, resumed=True):
            pass
    finally:
        for end in (says, waits, is_up, comes_up):
            os.close(end)
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("sign", ["metrics", "checkpoint", "model"])
def test_a_run_is_not_trained_over(tmp_path: Path, sign: str) -> None:
    output = tmp_path / "run"
    with begun(output) as old:
        pass
    if sign == "metrics":
        (output / "metrics.jsonl").write_text(ROW + '{"iteration": 4, "lo')
    elif sign == "checkpoint":
        (output / "checkpoints" / "000004").mkdir(parents=True)
        (output / "checkpoints" / "000004" / MANIFEST).write_text("{}")
    else:
        (output / "model").mkdir()
        (output / "model" / "config.json").write_text("{}")
    before = holds(output)
    how = "with a model" if sign == "model" else "4 iterations on"
    with pytest.raises(UserError, match=f"holds a run, {how}; --resume goes on with it, --force sets it aside whole"):
        RunFolder(output)
    assert holds(output) == before
    with open_run_folder(output, force=True) as forced:
        assert holds(output) == before, "what is wrong with the job is found before anything is moved"
        aside = forced.begin()
        assert aside is not None
        with pytest.raises(UserError, match="is going on"):
            RunFolder(output)
    assert aside.parent == tmp_path
    assert aside.name.startswith("run.old-2")
    assert holds(aside) == before
    assert run_id_of(aside) == old.run_id != forced.run_id == run_id_of(output)
    assert holds(output) == {"run.json", LOCK_FILE}


def test_a_run_from_before_there_were_ids_is_a_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(ROW)
    with pytest.raises(UserError, match="holds a run, 4 iterations on"):
        RunFolder(tmp_path)
    with begun(tmp_path, resumed=True) as found:
        assert found.run_id == ""
    assert "run.json" not in holds(tmp_path), "it stays what it was: its files have no id"


def test_a_resumed_run_that_has_lost_its_id_has_that_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "000004").mkdir(parents=True)
    (tmp_path / "checkpoints" / "000004" / MANIFEST).write_text('{"run": "00c0ffee00c0ffee"}')
    with begun(tmp_path, resumed=True) as found:
        assert found.run_id == run_id_of(tmp_path) == "00c0ffee00c0ffee"
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "run.json").unlink()
    wal = WriteAheadLog(tmp_path / "journal")
    wal.rewrite([{"run": "00c0ffee00c0ffff"}])
    wal.close()
    with begun(tmp_path, resumed=True) as found:
        assert found.run_id == "00c0ffee00c0ffff"


def test_a_run_that_has_done_nothing_is_begun_anew(tmp_path: Path) -> None:
    with begun(tmp_path) as first:
        wal = WriteAheadLog(tmp_path / "journal")
        wal.write(plan_line(plan_of()))
        wal.close()
        (tmp_path / "events.jsonl").write_text("{}\n")
    with begun(tmp_path) as second:
        pass
    assert run_id_of(tmp_path) == second.run_id != first.run_id


def test_files_of_somebody_else_stay(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text("mine")
    (tmp_path / "plan-3.json").write_text("mine")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "traces").mkdir()
    for force in (False, True):
        with pytest.raises(UserError, match=r"holds no run, but cluster.json, plan-3.json, which a run would"):
            RunFolder(tmp_path, force=force)
        assert holds(tmp_path) == {"cluster.json", "plan-3.json", "notes.txt", "traces"}
    for name in ("cluster.json", "plan-3.json"):
        (tmp_path / name).unlink()
    with begun(tmp_path):
        pass
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_what_the_new_run_needs_is_not_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").write_text(ROW)
    with (
        open_run_folder(tmp_path, force=True) as folder,
        pytest.raises(UserError, match=rf"--force: {tmp_path}/tokens lies in {tmp_path}, which is to be set aside"),
    ):
        folder.begin([tmp_path / "tokens"])
    monkeypatch.chdir(tmp_path)
    with open_run_folder(Path(), force=True) as folder, pytest.raises(UserError, match=r"--force: .* lies in "):
        folder.begin()
    assert (tmp_path / "metrics.jsonl").read_text() == ROW


# Where the model may go instead


def test_a_run_is_told_where_its_model_may_go(tmp_path: Path) -> None:
    output, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    assert set_rescue_folder(output, elsewhere) is None
    with begun(output) as folder:
        assert folder.rescue() is None
        size = (output / LOCK_FILE).stat().st_size
        assert set_rescue_folder(output, elsewhere) == os.getpid()
        assert (output / LOCK_FILE).stat().st_size == size, "a full disk has no room for more"
        assert folder.rescue() == elsewhere
        assert run_id_of(elsewhere) == folder.run_id, "it can be resumed there"
    assert set_rescue_folder(output, elsewhere) is None, "nobody is there"
    with pytest.raises(UserError, match="elsewhere holds another run"):
        RunFolder(tmp_path / "other", rescue=elsewhere)
    with pytest.raises(UserError, match="is the output folder"):
        RunFolder(tmp_path / "other", rescue=tmp_path / "other")


# Whose files these are


def test_checkpoints_of_another_run_are_neither_read_nor_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, run in (("000002", "a"), ("000004", "a"), ("000009", "b"), ("000008", ""), ("000001", "a")):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).write_text(json.dumps({"run": run} if run else {}))
    ours = Checkpoints(tmp_path, keep=1, run_id="a")
    assert [place.name for place in ours.complete()] == ["000004", "000002", "000001"]
    assert [place.name for place in ours.others()] == ["000009", "000008"]
    assert len(Checkpoints(tmp_path).complete()) == 5, "without an id, all count"
    ours.warn_of_others()
    said = [record.getMessage().partition(": ")[0] for record in caplog.records]
    assert said == [f"{tmp_path}/000009", f"{tmp_path}/000008"]


def test_what_is_shown_is_of_this_run(tmp_path: Path) -> None:
    plan = plan_of()
    Written(tmp_path, plan).iteration(0, 9.0, recorded=True)
    other = Written(tmp_path, plan, resumed=True)
    other.iteration(7, 9.0)
    other.event("lost", "of another run")
    other.checkpoint(8)
    WriteAheadLog(tmp_path / "journal").close()
    other.wal(plan_line(plan), {"done": 7})
    (tmp_path / "run.json").write_text('{"id": "a"}')
    ours = Written(tmp_path, plan, resumed=True, run_id="a")
    ours.iteration(0, 4.0)
    ours.iteration(1, 3.0)
    ours.event("joined", "of this one", "n1")
    found = read_history(tmp_path)
    assert [(row.iteration, row.loss) for row in found.rows] == [(0, 4.0), (1, 3.0)]
    assert [event.text for event in found.events] == ["of this one"]
    assert not found.recorded
    assert found.last_plan is None
    for line in (
        "metrics.jsonl: 2 lines of another run are passed over",
        "events.jsonl: 1 line of another run are passed over",
        "journal: is of another run",
        "traces/000001.json cannot be read: it is of another run",
    ):
        assert line in found.missing
    assert checkpoints_in(tmp_path) == {}
    page = json.dumps(panels(tmp_path))
    assert "of this one" in page
    assert "of another run" not in page


def test_the_model_of_another_run_is_not_taken_for_this_one(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors.index.json").write_text('{"metadata": {"run": "b"}}')
    assert locate_checkpoint(tmp_path) == tmp_path / "model"
    (tmp_path / "run.json").write_text('{"id": "b"}')
    assert locate_checkpoint(tmp_path) == tmp_path / "model"
    (tmp_path / "run.json").write_text('{"id": "a"}')
    with pytest.raises(UserError, match=rf"{tmp_path}/model: is the model of another run than {tmp_path}"):
        locate_checkpoint(tmp_path)


def test_a_checkpoint_from_before_the_first_iteration_is_not_what_a_run_has_trained(
    tmp_path: Path, skippipe: Command
) -> None:
    run, model = tmp_path / "run", tmp_path / "run" / "model"
    begun = run / "checkpoints" / "000000"
    for folder in (begun, model):
        folder.mkdir(parents=True)
    (run / "run.json").write_text('{"id": "a"}')
    (begun / "manifest.json").write_text('{"run": "a"}')
    assert locate_checkpoint(run) == begun, "the run has not ended"
    (model / "config.json").write_text("{}")
    (model / "model.safetensors.index.json").write_text('{"metadata": {"run": "a"}}')
    assert locate_checkpoint(run) == model
    assert locate_checkpoint(begun) == begun
    refused = skippipe("export", run, tmp_path / "exported")
    assert refused.code == 2
    assert f"{begun}: is what the run began with, and there is no later checkpoint; what it has trained is in" in (
        refused.err
    )
    (run / "run.json").write_text('{"id": "b"}')  # neither is of this run
    with pytest.raises(UserError, match="is the model of another run"):
        locate_checkpoint(run)
    (run / "run.json").write_text('{"id": "a"}')
    later = run / "checkpoints" / "000002"
    begun.rename(later)
    assert locate_checkpoint(run) == later


# The whole command, in a process of its own

JOB = """
output = "run"
iterations = 4
cluster = "datacentre:3"
[model]
config = "tiny.json"
[data]
texts = "text.txt"
vocabulary = 300
folder = "tokens"
[batch]
sequence = 16
samples = 1
microbatches = 4
[pipeline]
stages = 3
skip = "0"
budget_s = 0.1
[checkpoint]
every = 1
"""
LIMIT_BYTES = 30_000  # that a file may have: enough for lines and plans, too little for a stage of the model
FULL_DISK = f"""
import resource
from skippipe.cli import main
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, ({LIMIT_BYTES}, most))
main()
"""


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.helpers.models import tiny

    folder = tmp_path_factory.mktemp("shop")
    (folder / "text.txt").write_text(" ".join(f"{number} lanes and some words" for number in range(400)))
    config = tiny("llama", num_hidden_layers=3)
    (folder / "tiny.json").write_text(json.dumps(config.to_dict()))
    (folder / "job.toml").write_text(JOB)
    return folder


def train(shop: Path, *words: str, program: tuple[str, ...] = ("-m", "skippipe")) -> subprocess.Popen[str]:
    line = [sys.executable, *program, "train", "job.toml", *words]
    return subprocess.Popen(line, cwd=shop, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def contents(folder: Path) -> dict[Path, bytes]:
    """Of all files but the lock, which names the process that had it last."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != LOCK_FILE}


def test_a_second_run_does_not_destroy_the_first(
    shop: Path, skippipe: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shop)
    first = skippipe("train", "job.toml", "--engine", "virtual", "--output", "twice")
    assert first.code == 0, first.err
    written = contents(shop / "twice")
    for engine in ("one-process", "processes"):
        second = skippipe("train", "job.toml", "--engine", engine, "--output", "twice", "--iterations", "2")
        assert (second.code, second.out) == (2, "")
        told = "error: output: twice holds a run, 4 iterations on; --resume goes on with it, --force "
        assert second.err.startswith(told)
        assert second.err.count("\n") == 1
    assert written == contents(shop / "twice")


@pytest.mark.slow
def test_a_model_that_cannot_be_written_is_waited_for_and_given_up_in_one_line(shop: Path) -> None:
    """The disk is as good as full all along; somebody gives up with Ctrl-C."""
    run = train(shop, "--engine", "virtual", "--output", "full", program=("-c", FULL_DISK))
    assert run.stderr is not None
    said = []
    for line in run.stderr:
        said.append(line)
        if "storage: " in line:
            break
    run.send_signal(signal.SIGINT)
    _, rest = run.communicate(timeout=120)
    assert run.returncode == 2, "".join(said) + rest
    assert "Traceback" not in "".join(said) + rest
    warned = [line for line in said if "full/checkpoints: cannot be written: File too large" in line]
    assert len(warned) == 1, "four checkpoints were not written, and it was said once"
    assert "full/model: " in said[-1]
    assert "of the model cannot be written: File too large, " in said[-1]
    assert "disk space is waited for, 60 minutes at most" in said[-1]
    assert rest.startswith("error: full/model: ")
    assert "there is no checkpoint to go on from; start anew with --rescue DIR" in rest
    assert rest.count("\n") == 1
    assert not list((shop / "full").rglob("*.safetensors")), "half files would take the room"
    assert len((shop / "full" / "metrics.jsonl").read_text().splitlines()) == 4


@pytest.mark.slow
def test_a_model_that_cannot_be_written_goes_to_the_rescue_folder(shop: Path) -> None:
    first = train(shop, "--engine", "virtual", "--output", "blocked", "--iterations", "2")
    assert first.wait(120) == 0
    shutil.rmtree(shop / "blocked" / "model")
    (shop / "blocked" / "model").write_text("a file where a folder should be")
    run = train(shop, "--engine", "virtual", "--output", "blocked", "--resume", "--rescue", "safe")
    out, err = run.communicate(timeout=120)
    assert run.returncode == 0, err
    assert "the output folder cannot be written: the model goes to safe/model" in err
    assert "done; the model is in safe/model, figures in blocked/metrics.jsonl" in out
    assert locate_checkpoint(shop / "safe") == shop / "safe" / "model"
    assert run_id_of(shop / "safe") == run_id_of(shop / "blocked")
