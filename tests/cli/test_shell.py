"""The command in a shell: exit codes (docs/exit-codes.md), completion."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from skippipe.errors import UserError, first_line, run_command
from skippipe.terminal import SearchLog, Trend, interruptible


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (UserError("skip: 'lots' is not a share"), 2, "error: skip: 'lots' is not a share\n"),
        (FileNotFoundError(2, "No such file or directory", "a.json"), 2, "a.json"),
        (
            ModuleNotFoundError("No module named 'torch'", name="torch"),
            2,
            "pip install 'skippipe[train]', or '.[train]' in a checkout\n",
        ),
        (ModuleNotFoundError("No module named 'uvicorn'", name="uvicorn"), 2, "pip install 'skippipe[serve]'"),
        (BrokenPipeError(), 1, ""),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (SystemExit(143), 143, ""),
    ],
)
def test_how_it_ends(raised: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        raise raised

    with pytest.raises(SystemExit) as end:
        run_command(command)
    assert end.value.code == code
    shown = capsys.readouterr().err
    assert said in shown
    assert shown.count("\n") == bool(said), "one line"


@pytest.mark.parametrize("ignored", [False, True])
def test_sigterm_is_ctrl_c_but_for_the_exit_code(ignored: bool, capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        with interruptible() as stopped:
            signal.raise_signal(signal.SIGTERM)
        assert stopped == [signal.SIGTERM], "work that ends in order"
        signal.raise_signal(signal.SIGTERM)

    ctrl_c, sigterm = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
        with pytest.raises(SystemExit) as end:
            run_command(command)
    finally:
        signal.signal(signal.SIGINT, ctrl_c)
    assert end.value.code == 143
    assert capsys.readouterr().err == "interrupted\n"
    assert signal.getsignal(signal.SIGTERM) is sigterm


def test_a_module_of_ours_that_is_missing_is_a_bug() -> None:
    def command() -> None:
        raise ModuleNotFoundError("No module named 'skippipe.plam'", name="skippipe.plam")

    with pytest.raises(ModuleNotFoundError):
        run_command(command)


@pytest.mark.parametrize(
    ("shell", "asked", "offered"),
    [
        ("bash", {"COMP_WORDS": "skippipe pr", "COMP_CWORD": "1"}, {"prepare", "profile"}),
        ("bash", {"COMP_WORDS": "skippipe plan --bud", "COMP_CWORD": "2"}, {"--budget"}),
        ("fish", {"_TYPER_COMPLETE_ARGS": "skippipe exp", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}, {"export"}),
    ],
)
def test_the_shell_completes(shell: str, asked: dict[str, str], offered: set[str]) -> None:
    line = [sys.executable, "-c", "import sys; sys.argv[0] = 'skippipe'; from skippipe.cli import main; main()"]
    env = {**os.environ, "_SKIPPIPE_COMPLETE": f"complete_{shell}", **asked}
    said = subprocess.run(line, env=env, capture_output=True, text=True, timeout=60, check=True).stdout
    assert {row.split("\t")[0] for row in said.split()[: len(offered)]} == offered


WITHOUT_TORCH = """
import sys
from skippipe.cli import main

sys.modules["torch"] = sys.modules["transformers"] = None
for words in sys.argv[1:]:
    sys.argv = ["skippipe", *words.split()]
    try:
        main()
    except SystemExit as end:
        print(end.code, file=sys.stderr)
"""


def test_a_path_that_is_not_there_is_noticed_before_torch_is_imported() -> None:
    model, text = "nowhere: no such folder; 'austen' is", "nowhere.txt: no such text file; name one"
    said = {
        "generate nowhere Emma": model,
        "eval nowhere --text classics-val": model,
        "eval austen --text nowhere.txt": text,
        "score nowhere --text classics-val": model,
        "score austen --text nowhere.txt": text,
        "serve nowhere": model,
        "serve austen --cluster nowhere.json": "cluster 'nowhere.json': no such file",
        "serve austen --keys nowhere": "nowhere/peers.json: ",
        "heal nowhere --data classics -o out": model,
        "heal austen --data nowhere.txt -o out": text,
        "heal austen --data classics --held-out nowhere.txt -o out": text,
        "generate tests Emma": "tests: neither a checkpoint, nor",
    }
    line = [sys.executable, "-c", WITHOUT_TORCH, *said]
    errors = subprocess.run(line, capture_output=True, text=True, timeout=60, check=True).stderr.splitlines()
    for (words, expected), error, code in zip(said.items(), errors[::2], errors[1::2], strict=True):
        assert error.startswith(f"error: {expected}"), words
        assert code == "2", words


def test_a_search_says_in_lines_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    log = SearchLog("best", Trend(lambda: now[0]), lambda: now[0])
    for at, best_s in [(0.0, None), (4.0, 60.0), (5.0, 55.0), (7.0, 55.0), (10.0, 55.0), (21.0, 54.0), (40.0, 54.0)]:
        now[0] = at
        log("searching", at / 40, best_s)
    now[0] = 46.0
    log("searching", 0.1, 60.0)
    assert capsys.readouterr().err.splitlines() == [
        "best: searching, 12%, best 55.00 s, still improving",
        "best: searching, 25%, best 55.00 s, the same for 5 s",
        "best: searching, 52%, best 54.00 s, still improving",
        "best: searching, 100%, best 54.00 s, the same for 19 s",
        "best: searching, 10%, best 60.00 s, still improving",  # of another plan
    ]


def test_what_took_long_without_news_is_said_afterwards(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    log = SearchLog("best", Trend(lambda: now[0]), lambda: now[0])
    for at, what in [(0.0, "compiling (once on a machine)"), (98.0, "placing nodes"), (99.0, "searching")]:
        now[0] = at
        log(what, 0.0, None)
    assert capsys.readouterr().err.splitlines() == [
        "best: compiling (once on a machine) took 98 s",
        "best: placing nodes, 0%",
    ]


def test_an_error_of_another_library_is_one_line() -> None:
    assert first_line(ValueError("\n  no such thing\nat line 3")) == "no such thing"
    assert first_line(TypeError("of this field:\n  no number\n")) == "of this field: no number"
    assert first_line(KeyError()) == "KeyError", "it says nothing"
