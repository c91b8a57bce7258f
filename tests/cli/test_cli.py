"""The command line as people use it: what it prints, what it writes, how it ends."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text
from typer.main import get_command

from skippipe.cli.app import app
from skippipe.cli.heal import worse_parts
from skippipe.cli.plan import Gains
from skippipe.plan import Plan
from skippipe.toml_config import example, from_table
from skippipe.training.job_config import ADVISED, SHORT, JobConfig, load_job
from tests.helpers.processes import Command


@pytest.mark.parametrize(
    ("paths", "seconds"),
    [("skippipe", 32.70), ("skippipe_no_tc2", 34.82), ("dtfm_skip", 48.21), ("full_pipeline", 78.85)],
)
def test_simulate_published(skippipe: Command, paths: str, seconds: float) -> None:
    ran = skippipe("simulate", "published20", "--paths", paths, "--contention-only", "--json")
    assert ran.code == 0
    assert ran.json["iteration_s"] == pytest.approx(seconds, abs=0.05)


def test_plan_check_simulate_show(skippipe: Command, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    ran = skippipe("plan", "regions:9", "-s", "4", "--search-steps", "500", "--budget", "1", "-o", file, "--json")
    assert ran.code == 0
    assert ran.json["plan"] == json.loads(file.read_text())
    held = skippipe("check", file)
    assert held.code == 0
    assert "  TC1: no node lies on more lanes than it has memory slots\n" in held.out
    assert skippipe("check", file, "--json").json == {"ok": True, "violations": []}
    again = skippipe("simulate", file, "--json", "--trace", tmp_path / "trace.json").json
    assert again["iteration_s"] == ran.json["iteration_s"]
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    shown = skippipe("show", file, "--html", tmp_path / "p.html", "--png", tmp_path / "p.png")
    assert shown.code == 0
    assert "belgium-0" in shown.out
    assert (tmp_path / "p.html").stat().st_size > 100_000
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert skippipe("show", file, "--json").json == ran.json["plan"]


def test_how_to_plan_for_the_codecs_of_new_jobs_is_said(skippipe: Command, tmp_path: Path) -> None:
    words = ("plan", "regions:9", "--strategy", "dtfm-skip", "--budget", "0")
    said = skippipe(*words).out
    assert "codecs: hops bf16; weight gradients fp32\n" in said
    found = re.search(r"to plan for those of 'skippipe job': (.*)", said)
    assert found is not None
    advised = found[1].split()
    planned = skippipe(*words, *advised, "--json").json["plan"]["workload"]
    assert skippipe("job", "-o", tmp_path / "job.toml").code == 0
    job = load_job(tmp_path / "job.toml")
    assert (planned["wire_dtype"], planned["gradient_dtype"]) == (job.transport.wire, job.averaging.dtype)
    assert "no codecs were named" not in skippipe(*words, *advised).out


def test_check_names_violations_and_exits_with_1(skippipe: Command, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    skippipe("plan", "published20", "--strategy", "dtfm-skip", "--budget", "0", "-o", file)
    raw = json.loads(file.read_text())
    raw["lanes"][0]["path"][1:3] = reversed(raw["lanes"][0]["path"][1:3])
    raw["lanes"][3]["microbatches"] = 1
    file.write_text(json.dumps(raw))
    ran = skippipe("check", file)
    assert ran.code == 1
    assert "CC3 (every stage but 0 is visited by the same number of microbatches): stage" in ran.out
    assert "promise: expected." in ran.out
    rules = {row["rule"] for row in skippipe("check", file, "--json").json["violations"]}
    assert {"CC3", "microbatches", "promise"} <= rules


@pytest.mark.slow
def test_compare_all_strategies(skippipe: Command, tmp_path: Path) -> None:
    ran = skippipe("compare", "published20", "--contention-only", "--budget", "2", "--output", tmp_path, "--json")
    rows = {row["strategy"]: row for row in ran.json}
    assert list(rows) == ["dtfm", "best-full", "dtfm-skip", "no-tc2", "skippipe", "best"]
    assert rows["skippipe"]["ratio"] < 0.6
    assert {row["microbatches"] for row in rows.values()} == {30}
    assert all(row["bytes_moved"] > 1e9 and row["collision_s"] >= 0 for row in rows.values())
    for name in rows:
        assert skippipe("check", tmp_path / f"{name}.json").code == 0
    table = skippipe("compare", "five-sites:6", "--budget", "1").out
    assert all(word in table for word in ("dtfm-skip", "against", "collisions", "moved"))


def test_a_short_job_has_the_fields_that_most_jobs_set(skippipe: Command) -> None:
    text = skippipe("job", "--short").out
    found = tomllib.loads(text)
    tables = {f"{table}.{name}" for table, given in found.items() if isinstance(given, dict) for name in given}
    assert tables | {name for name, value in found.items() if not isinstance(value, dict)} == SHORT | ADVISED.keys()
    assert from_table(JobConfig, found) == from_table(JobConfig, tomllib.loads(example(JobConfig, advised=ADVISED)))


def test_sweep_over_skip_ratios(skippipe: Command) -> None:
    rows = skippipe("sweep", "five-sites:9", "-s", "4", "--budget", "0", "--json").json
    assert [row["visited"] for row in rows] == [4, 3, 2]
    assert rows[0]["ratio"] == 1
    assert rows[2]["skipped"] == pytest.approx(0.5)
    assert "visited" in skippipe("sweep", "five-sites:5", "-s", "3", "--budget", "0").out


@pytest.mark.slow  # test_sweep.py
def test_sweep_over_stage_counts(skippipe: Command, tmp_path: Path) -> None:
    png, html = tmp_path / "s.png", tmp_path / "s.html"
    words = ["five-sites:9", "--stages", "3-4,10", "--budget", "0"]
    ran = skippipe("sweep", *words, "--penalty", "100", "--png", png, "--html", html)
    assert ran.code == 0
    assert "no plan for 10 stages, visiting 2–10: 10 stages need at least 10 nodes" in ran.out
    best = ran.out.splitlines()[-1]
    assert best.startswith(("best: visiting 3 of 3 stages", "best: visiting 4 of 4 stages"))
    assert png.read_bytes().startswith(b"\x89PNG")
    assert best in html.read_text()
    rows = skippipe("sweep", *words, "--json").json
    assert [(row["stages"], row["visited"]) for row in rows[:5]] == [(3, 3), (3, 2), (4, 4), (4, 3), (4, 2)]
    assert all("infeasible" in row for row in rows[5:])
    assert sum(row["best"] for row in rows[:5]) == 1
    assert any(row["efficient"] for row in rows[:5])


def test_cluster_from_preset_to_file_and_back(skippipe: Command, tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    made = skippipe("cluster", "random:7:3", "-o", file, "--json").json
    assert skippipe("cluster", file, "--json").json == made == json.loads(file.read_text())
    assert "node-6" in skippipe("cluster", file).out
    assert "down" not in skippipe("cluster", file).out
    first = skippipe("cluster", "homes:3", "--json").json["nodes"][0]
    shown = skippipe("cluster", "homes:3").out
    assert "down" in shown
    (row,) = (line for line in shown.splitlines() if "node-0" in line)
    assert f"{first['upload_bytes_per_s'] / 1e6:.1f}" in row and f"{first['download_bytes_per_s'] / 1e6:.1f}" in row
    assert skippipe("plan", file, "--search-steps", "300", "--budget", "1", "-o", tmp_path / "p.json").code == 0


def test_options_change_the_problem(skippipe: Command, tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    short = ["--search-steps", "300", "--budget", "1"]
    words = ["-m", "20", "--skip", "50%", "--wire", "int8", "--samples", "1", "--sequence", "1024", *short]
    words += ["--sizes", "8,2,2,2,2,2", "--split-backward"]
    assert skippipe("plan", "published20", *words, "-o", file).code == 0
    assert skippipe("check", file).code == 0
    plan = Plan.load(file)
    assert plan.split_backward
    assert plan.microbatches == 20
    assert plan.skipped == pytest.approx(0.5)
    assert (plan.workload.wire_dtype, plan.workload.sequence_tokens) == ("int8", 1024)
    assert len(plan.stages[0].nodes) <= 8
    kept = tmp_path / "kept.json"
    assert skippipe("plan", "published20", "--keep-stages", "published20", *short, "-o", kept).code == 0
    assert sorted(Plan.load(kept).stages[0].nodes) == [0, 3, 4, 10, 11]
    assert skippipe("plan", "published20", "--keep-stages", kept, *short).code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "nowhere.json"], "no such file, and not one of published18"),
        (["plan", "regions:3", "-s", "5"], "5 stages need at least 5 nodes"),
        (["plan", "published20", "--skip", "0.9"], "at most 67% can be skipped"),
        (["plan", "published20", "--skip", "lots"], "skip: 'lots' is not a share"),
        (["plan", "published20", "--skip", "1.5"], "skip: 1.5 is not between 0 and 1"),
        (["plan", "published20", "--skip", "0.2", "--visit", "4"], "give one of them"),
        (["plan", "published20", "-m", "31"], "use a multiple of 5"),
        (["plan", "published20", "--sizes", "a,b"], "sizes: 'a,b' is not a list"),
        (["plan", "published20", "--model", "gpt"], "model 'gpt': neither a preset"),
        (
            ["plan", "regions:6", "--model", "Qwen/Qwen3-0.6B"],
            "hf download Qwen/Qwen3-0.6B config.json --local-dir qwen",
        ),
        (["plan", "published18", "--keep-stages", "published20"], "is for the cluster 'published20'"),
        (["plan", "published18", "--keep-stages", "published18"], "were not published"),
        (["plan", "regions:6", "--model", "llama-8b", "--samples", "8"], "GiB"),
        (["plan", "published20", "-s", "0"], "--stages: 0 is out of range; give 1 to 10,000"),
        (["plan", "published20", "-o", "."], "this is a folder"),
        (["plan", "x" * 300], "no such file"),
        (["plan", "regions:9", "--model", "x" * 300], "neither a preset"),
        (["plan", "regions:9", "--sequence", str(10**200)], "--sequence: a number of some 201 digits is out of range"),
        (["plan", "regions:9", "-m", "-5"], "--microbatches: -5 is out of range; give 1 to 100,000"),
        (["plan", "published20", "--keep-stages", "published20", "--sizes", "1,2"], "give one of them"),
        (["simulate", "published20"], "--paths: say which"),
        (["sweep", "regions:6", "--stages", "6-4"], "stages: '6-4': give numbers from 2 to"),
        (["plan", "regions:6", "--strategy", "dtfm", "--robust", "0.2"], "--robust chooses among plans"),
        (["simulate", "published20", "--paths", "best"], "paths 'best'"),
        (["simulate", "nothing.json"], "nothing.json: no such file"),
        (["simulate", "nothing.json", "--paths", "x"], "go with a built-in example"),
        (["check", "nothing.json"], "nothing.json: no such file"),
        (["why", "."], ".: this is a folder; name a file in it"),
        (["cluster", "regions:many"], "write regions:NODES"),
        (["serve", "x", "--heartbeat", "0"], "--heartbeat: 0 is out of range; give 0.1 to 3,600"),
        (["profile", "--local", "2", "--heartbeat", "7200"], "--heartbeat: 7,200 is out of range; give 0.1 to 3,600"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(skippipe: Command, words: list[str], message: str) -> None:
    ran = skippipe(*words)
    assert ran.code == 2
    assert ran.out == ""
    assert message in ran.err
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1


def test_what_a_configuration_leaves_out_of_its_text_model_is_as_transformers_has_it(
    skippipe: Command, tmp_path: Path
) -> None:
    """As the published Gemma 3 of 4B does: no heads, no vocabulary, and nobody says that embeddings are tied."""
    text = {"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    words = (
        "datacentre:6",
        "--model",
        tmp_path,
        "-s",
        "3",
        "--sequence",
        "64",
        "--search-steps",
        "10",
        "-o",
        tmp_path / "p.json",
    )
    done = skippipe("plan", *words)
    assert done.code == 0, done.err
    shape = Plan.load(tmp_path / "p.json").workload.model
    assert (shape.heads, shape.kv_heads, shape.vocab, shape.tied_embeddings) == (8, 4, 262208, True)


def test_unwritable_output_is_one_line(skippipe: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ran = skippipe("cluster", "regions:3", "-o", tmp_path / "file" / "c.json")
    assert ran.code == 2
    assert "cannot be written" in ran.err


def test_a_promise_that_is_not_true_is_neither_drawn_nor_believed(skippipe: Command, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    skippipe("plan", "regions:6", "-s", "3", "--budget", "0", "-o", file)
    raw = json.loads(file.read_text())
    raw["expected"]["tasks"][0][0] = 99
    file.write_text(json.dumps(raw))
    ran = skippipe("show", file, "--png", tmp_path / "p.png", "--trace", tmp_path / "t.json")
    assert ran.code == 0
    assert "promises another timeline" in ran.err
    assert skippipe("check", file).code == 1
    raw["expected"]["iteration_s"] = 1e305
    file.write_text(json.dumps(raw))
    assert "expected.iteration_s: 1e+305 is out of range; give 0 to 3,200,000,000" in skippipe("check", file).err


def test_output_never_replaces_its_own_input(skippipe: Command, tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    skippipe("cluster", "regions:6", "-o", file)
    ran = skippipe("plan", file, "-o", file)
    assert (ran.code, "this is the input" in ran.err) == (2, True)


def test_names_are_text_not_markup(skippipe: Command, tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    raw = skippipe("cluster", "regions:3", "--json").json
    raw["nodes"][0] |= {"name": "a[b]", "location": "a[/b]"}
    file.write_text(json.dumps(raw))
    said = skippipe("cluster", file).out
    assert "a[b]" in said and "a[/b]" in said


@pytest.mark.slow
def test_a_home_that_cannot_be_written_and_a_terminal_without_arrows(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    clean = {name: value for name, value in os.environ.items() if name != "XDG_CACHE_HOME"}
    places = {
        "HOME": str(tmp_path / "file"),
        "PYTHONIOENCODING": "ascii",
        "NUMBA_CACHE_DIR": str(tmp_path / "file" / "x"),
    }
    kernel = "from skippipe.dispatch import steps; print(steps(3), len(steps.signatures))"
    assert python("-c", kernel, env={**clean, **places}).stdout == "7 1\n", "compiled all the same"
    places["SKIPPIPE_PURE_PYTHON"] = "1"  # compiling all that a plan takes would be half a minute
    ran = python("-m", "skippipe", "plan", "datacentre:4", "--budget", "0", env={**clean, **places})
    assert ran.returncode == 0, ran.stderr
    assert "lane" in ran.stdout


def python(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120, check=False, **more)


def test_help_of_every_command_imports_nothing_heavy() -> None:
    """One process for all: what one of them imports stays, and the first line that is not empty names it."""
    code = (
        "import sys; from skippipe.cli import main\n"
        "heavy = 'numba', 'scipy', 'plotly', 'matplotlib', 'torch', 'numpy'\n"
        "for command in sys.argv[1:]:\n"
        "    sys.argv = ['skippipe', *command.split(), '--help']\n"
        "    try: main()\n"
        "    except SystemExit: pass\n"
        "    print('after', command, [name for name in heavy if name in sys.modules])"
    )
    commands = ("", "cluster", "plan", "check", "simulate", "compare", "sweep", "show")
    ran = python("-c", code, *commands)
    assert ran.stdout.count("Usage") == len(commands), ran.stderr
    lines = [line for line in ran.stdout.splitlines() if line.startswith("after ")]
    assert lines == [f"after {command} []" for command in commands]


def test_helps_lose_no_text_and_wrap_at_any_width(skippipe: Command) -> None:
    group: Any = get_command(app)
    commands = [*group.commands.values(), *group.commands["study"].commands.values()]
    assert len(commands) > 25
    for command in commands:
        for text in filter(None, [command.help, *(each.help for each in command.params if hasattr(each, "help"))]):
            assert Text.from_markup(text).plain == text.replace("\\[", "["), "brackets are markup"
        for paragraph in command.help.split("\n\n"):
            assert "\n" not in paragraph or paragraph.startswith("    "), "lines of the source, not of the terminal"
    for words in ((), ("study",), ("check",), ("relay",), ("plan",)):
        assert "<bool>" not in skippipe(*words, "--help").out, "a flag takes no value"
    assert "0 or more" in skippipe("plan", "--help").out


def test_plans_messages_and_tensors_do_not_import_torch() -> None:
    code = (
        "import sys; sys.modules['zmq'] = sys.modules['msgspec'] = None  # what machines with GPUs may lack\n"
        "import skippipe.planner.strategies, skippipe.report.html, skippipe.report.png\n"
        "import skippipe.transport.message, skippipe.codecs, skippipe.runtime.node.ops\n"
        "assert 'torch' not in sys.modules"
    )
    assert python("-c", code).returncode == 0


def test_the_core_works_without_numba() -> None:
    """The training runtime shares constraints and dispatch with the planner, on machines that have no numba."""
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "from skippipe import constraints, dispatch\n"
        "from skippipe.planner.published import published20, published_plan\n"
        "from skippipe.simulator import simulate\n"
        "from skippipe.timeline import Timing\n"
        "print(simulate(published_plan(published20(), 'skippipe'), Timing.CONTENTION_ONLY).iteration_ns)"
    )
    assert python("-c", code).stdout.strip() == "32703790024"


def test_ctrl_c_keeps_the_best_plan(tmp_path: Path) -> None:
    """On a terminal, so that the progress bar tells when the search is under way."""
    file = tmp_path / "plan.json"
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "skippipe", "plan", "published18", "--budget", "600", "-o", str(file)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=theirs) as running:
        os.close(theirs)
        shown = b""
        try:
            deadline = time.monotonic() + 120
            while b"interrupted" not in shown:
                assert select.select([ours], [], [], deadline - time.monotonic())[0], shown
                shown += os.read(ours, 65536)
                if b"placing nodes" in shown and running.poll() is None:
                    running.send_signal(signal.SIGINT)
                    break
            running.wait(timeout=60)
            while select.select([ours], [], [], 0)[0]:
                shown += os.read(ours, 65536)
        except OSError:
            pass  # the other end of a terminal is gone
        finally:
            running.kill()
            os.close(ours)
    assert running.returncode == 0, shown
    assert b"interrupted: this is the best plan so far" in shown
    assert Plan.load(file).microbatches == 36


@pytest.mark.slow
def test_commands_of_the_readme(skippipe: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As written, but with no time to search and little to train."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    monkeypatch.chdir(tmp_path)
    lines = [line.split("#")[0].split() for line in readme.splitlines() if line.startswith("skippipe ")]
    assert len(lines) >= 6
    for words in lines:
        if "--budget" in words:
            words[words.index("--budget") + 1] = "0"
        if words[1] == "train":  # in a process of its own, because it forks
            job = Path(words[2])
            job.write_text(job.read_text().replace("budget_s = 10.0", "budget_s = 0.1"))
            trained = subprocess.run(
                [sys.executable, "-m", *words, "--iterations", "2"], capture_output=True, text=True, timeout=180
            )
            assert trained.returncode == 0, trained.stderr
            continue
        ran = skippipe(*words[1:])
        assert ran.code == 0, (words, ran.err)
    assert {"cluster.json", "plan.json", "plan.html", "plan.png", "run"} <= {file.name for file in tmp_path.iterdir()}


def test_version(skippipe: Command) -> None:
    import skippipe as package

    assert skippipe("--version").out.strip() == f"skippipe {package.__version__}"


def test_prepare_text_once_for_training_and_once_to_measure_with(skippipe: Command, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a lane has one microbatch in flight; when one is back, the next sets out " * 20)
    first = skippipe("prepare", text, "--vocabulary", "280", "--output", tmp_path / "train")
    assert (first.code, first.out.split(":")[0]) == (0, str(tmp_path / "train"))
    second = skippipe("prepare", text, "--tokenizer", tmp_path / "train", "--output", tmp_path / "held-out")
    assert second.out.split(":")[1] == first.out.split(":")[1], "as many tokens"
    neither = skippipe("prepare", text, "--output", tmp_path / "other")
    assert neither.code != 0
    assert "--vocabulary" in neither.err


def test_a_search_that_still_found_better_plans_says_so() -> None:
    shown = []
    gains = Gains(lambda *said: shown.append(said))
    for share, best_s in ((0.0, None), (0.2, 9.0), (0.6, 8.0), (0.7, 7.0), (1.0, 6.0)):
        gains("searching", share, best_s)
    assert gains.late == 0.25, "of what it had after two thirds"
    assert len(shown) == 5
    assert Gains(print).late == 0.0


def test_parts_that_healing_has_made_worse_are_named() -> None:
    rows = [{"missing": 0, "before": 2.0, "after": 2.0}, {"missing": 1, "before": 3.0, "after": 2.5}]
    assert worse_parts({"perplexity": rows}) == ""
    rows.append({"missing": 2, "before": 4.0, "after": 5.0})
    assert worse_parts({"perplexity": rows}).startswith(
        "with 2 stages missing, perplexity is higher than before healing"
    )
