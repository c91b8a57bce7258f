"""Numbers that people give: each has a range, which is shown, and checked before anything else is done."""

from __future__ import annotations

import inspect
import math
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skippipe.cli.app import app
from skippipe.cli.options import check_ranges_of
from skippipe.cluster import Node
from skippipe.errors import UserError
from skippipe.json_fields import as_integer, as_number
from skippipe.model_shape import ModelShape
from skippipe.optim.config import OptimConfig
from skippipe.presets import preset
from skippipe.skip_schedule import SkipSchedule, parse_share
from skippipe.stage_subset import parse_subsets
from skippipe.study.config import Study, load_study
from skippipe.toml_config import example
from skippipe.training.job_config import JobConfig, load_job
from skippipe.value_ranges import ITERATIONS, Range, hints_of, number_text, range_of, split_hint
from skippipe.workload import Workload
from tests.helpers.processes import Command

HUGE = 10**5000
"""More digits than Python writes, or reads."""
DOCS = Path(__file__).parents[2] / "docs"


def env(within: Range, kind: type[Any]) -> Iterator[Any]:
    """Numbers on either side, near and far."""
    step = 1 if kind is int else max(abs(within.most), abs(within.least)) * 1e-9
    yield within.least if within.above else within.least - step
    yield within.most if within.below else within.most + step
    yield from (HUGE,) if kind is int else (-1e308, 1e308, math.nan, math.inf, -math.inf)


def toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    return hex(value) if isinstance(value, int) and value > 0 else str(value)  # hex has no limit of digits


def file_with(place: str, said: str, of_study: bool) -> str:
    """A job or a study that says one thing about numbers."""
    place, said = (place.removesuffix("[]"), f"[{said}]") if place.endswith("[]") else (place, said)
    if not of_study:
        return f"{place} = {said}"
    variant = '[[variant]]\nname = "v"\nrecipe.skip = "0"\n'
    if place.startswith("variant[]."):
        return f'name = "s"\n{variant}{place.removeprefix("variant[].")} = {said}'
    return f'name = "s"\n{place} = {said}\n{variant}'


def ranges_in(dataclass_type: type[Any], place: str = "") -> Iterator[tuple[str, type[Any], Range | None]]:
    """Every field of a dataclass that takes numbers, and of those inside it: its place, int or float, its range."""
    for name, hint in hints_of(dataclass_type).items():
        at = f"{place}.{name}" if place else name
        inner, within = split_hint(hint)
        if get_origin(inner) is list:
            at, (inner, noted) = f"{at}[]", split_hint(get_args(inner)[0])
            within = within or noted
        if is_dataclass(inner):
            yield from ranges_in(inner, at)  # type: ignore[arg-type]
        elif inner in (int, float):
            yield at, inner, within if isinstance(within, Range) else None


FIELDS = [(kind, *each) for kind in (JobConfig, Study) for each in ranges_in(kind)]


@pytest.mark.parametrize(("of", "at", "kind", "within"), FIELDS, ids=[f"{of.__name__} {at}" for of, at, *_ in FIELDS])
def test_every_number_in_a_job_or_study_has_a_range_and_is_held_to_it(
    of: type[Any], at: str, kind: type[Any], within: Range | None, tmp_path: Path
) -> None:
    assert within is not None, f"{at} has no range"
    file = tmp_path / "file.toml"
    read: Callable[[Path], Any] = load_job if of is JobConfig else load_study

    def complaint(value: Any) -> str:
        file.write_text(file_with(at, toml(value), of is Study))
        with pytest.raises(UserError) as caught:
            read(file)
        said = str(caught.value)
        assert "\n" not in said
        assert len(said.removeprefix(str(file))) < 300
        assert at.removesuffix("[]").split(".")[-1] in said
        return said

    for value in env(within, kind):
        assert str(within) in (said := complaint(value)) or "not a finite number" in said
    for value in (True, "1", *([1.5, math.nan] if kind is int else [])):
        assert "expected a" in complaint(value)


def test_what_a_job_allows_by_default_lies_inside() -> None:
    for at, _, within in ranges_in(JobConfig):
        value: Any = JobConfig()
        for name in at.removesuffix("[]").split("."):
            value = getattr(value, name)
        assert within is not None
        assert value is None or value in within, at


def options() -> Iterator[tuple[str, str, Any]]:
    """Of every command the options that take numbers, with their types."""
    for each in app.registered_commands:
        command: Any = inspect.getattr_static(each.callback, "__wrapped__")  # without what reads numbers for it
        for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
            inner = split_hint(parameter.annotation)[0]
            if (get_args(inner)[0] if get_origin(inner) is list else inner) in (int, float):
                yield str(each.name), name, parameter.annotation


OPTIONS = list(options())
REQUIRED = {
    "eval": ["--text", "classics-val"],
    "score": ["--text", "classics-val"],
    "node": ["--join", "x:1", "--key", "k"],
    "prepare": ["--output", "t"],
}
ARGUMENTS = {"profile": 0, "node": 0, "grow": 2, "export": 2, "keys": 2}


@pytest.mark.parametrize(("command", "option", "hint"), OPTIONS, ids=[f"{c} {o}" for c, o, _ in OPTIONS])
def test_every_number_on_the_command_line_has_a_range_and_is_held_to_it(
    command: str, option: str, hint: Any, skippipe: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    inner, within = split_hint(hint)
    kind = get_args(inner)[0] if get_origin(inner) is list else inner
    assert isinstance(within, Range), f"{command}: --{option} has no range"
    words = [command, *["nothing-here"] * ARGUMENTS.get(command, 1), *REQUIRED.get(command, [])]
    name = f"--{option.replace('_', '-')}"
    wrong = [repr(value) for value in env(within, kind) if not isinstance(value, int) or abs(value) < HUGE]
    for value in [*wrong, "9" * 5000, "nan", "true", "", *(["1.5", "1e3"] if kind is int else [])]:
        ran = skippipe(*words, f"{name}={value}")
        assert ran.code == 2
        assert ran.err.startswith(f"error: {name}: "), ran.err
        assert ran.err.count("\n") == 1
        assert str(within) in ran.err
    assert list(tmp_path.iterdir()) == []


def test_the_help_shows_ranges(skippipe: Command) -> None:
    assert "1 to 1,000,000,000" in " ".join(re.sub("[│╭╮╰╯─]", " ", skippipe("train", "--help").out).split())


def test_a_command_that_takes_a_number_without_a_range_is_a_mistake_of_ours() -> None:
    def careless(number: int = 3) -> None:
        del number

    with pytest.raises(AssertionError, match="number has no range"):
        check_ranges_of(careless)


def test_the_example_of_a_job_shows_ranges() -> None:
    text = example(JobConfig)
    for _, _, within in ranges_in(JobConfig):
        assert f"# {within}." in text
    assert tomllib.loads(text)["iterations"] == JobConfig().iterations


# legal numbers do not hang


def test_the_longest_run_is_counted_at_once() -> None:
    most = int(ITERATIONS.most)
    recipe = SkipSchedule(skip="1/2 until 25%, 9 x 1/3 + 0 until 90%, 0")
    found = recipe.lengths(most, 6, 6)
    assert sum(found.values()) == most
    assert found[3] == most // 4
    assert SkipSchedule().lengths(most, 6, 4) == {4: most}


@given(
    st.integers(1, 300),
    st.integers(2, 9),
    st.sampled_from(
        ["0", "1/3", "1/3 until 90%, 0", "9 x 1/3 + 0", "1/2 until 1%, 1/3 + 0 until 33%, 2 x 1/6 + 1/2", ""]
    ),
)
def test_iterations_are_counted_as_they_come(iterations: int, stages: int, skip: str) -> None:
    recipe = SkipSchedule(skip=skip)
    one_by_one = [recipe.visited(number, iterations, stages, stages) for number in range(iterations)]
    counted = recipe.lengths(iterations, stages, stages)
    assert counted == {each: one_by_one.count(each) for each in one_by_one}
    assert list(counted) == list(dict.fromkeys(one_by_one))


@pytest.mark.parametrize("text", ["1e999999999", "1e-999999999%", f"0.{'3' * 5000}", f"1/{'9' * 5000}", "nan", "inf"])
def test_shares_that_take_for_ever_to_read(text: str) -> None:
    with pytest.raises(UserError, match="is not a share"):
        parse_share(text, "skip")


@pytest.mark.parametrize("times", ["0", "10001", "9" * 12, "9" * 5000])
def test_turns_that_fill_the_memory(times: str) -> None:
    with pytest.raises(UserError, match="a turn has from 1 to 10,000 iterations"):
        SkipSchedule(skip=f"{times} x 1/3 + 0")


@pytest.mark.parametrize("text", ["regions:0", "regions:10001", f"regions:{'9' * 5000}", f"random:3:{2**53 + 1}"])
def test_presets(text: str) -> None:
    with pytest.raises(UserError, match="is out of range; give") as caught:
        preset(text)
    assert len(str(caught.value)) < 200


def test_lists_of_numbers() -> None:
    with pytest.raises(UserError, match="--stages: '999999999…' is out of range"):
        parse_subsets(4, ["0," + "9" * 5000], [])
    with pytest.raises(UserError, match="--residual-scale: inf is out of range; give above 0 to 1,000"):
        parse_subsets(4, ["0,1"], [], "inf")


# files of JSON


@pytest.mark.parametrize("kind", [Node, ModelShape, Workload])
def test_every_number_of_clusters_and_workloads_has_a_range(kind: type[Any]) -> None:
    for at, _, within in ranges_in(kind):
        assert within is not None, f"{kind.__name__}.{at} has no range"


def test_programs_are_held_to_ranges_too() -> None:
    with pytest.raises(UserError, match="iterations: 0 is out of range"):
        replace(JobConfig(), iterations=0)
    with pytest.raises(UserError, match=r"learning\.rate: nan is out of range"):
        OptimConfig(rate=math.nan)
    with pytest.raises(UserError, match=r"workload\.microbatches: 100,001 is out of range"):
        Workload(ModelShape("m", 1, 1, 1, 1, 1, 1, 1), microbatches=100_001)


def test_whole_numbers_and_numbers() -> None:
    assert as_integer(5.0, "n") == 5
    for value in (True, "5", None, [5]):
        with pytest.raises(UserError, match="n: expected a number"):
            as_number(value, "n")
    with pytest.raises(UserError, match="n: expected a whole number, found 5"):
        as_integer(5.5, "n")
    with pytest.raises(UserError, match="n: inf is not a finite number"):
        as_integer(HUGE, "n")
    with pytest.raises(UserError, match="n: -1 is out of range; give 0 to 9,007,199,254,740,992"):
        as_integer(-1, "n")


def test_numbers_are_written_for_people() -> None:
    assert number_text(1_000_000) == "1,000,000"
    assert number_text(2.0) == "2"
    assert number_text(1e-9) == "1e-09"
    assert number_text(HUGE) == "a number of some 5,001 digits"
    assert str(Range(0, 1, above=True, below=True)) == "above 0 to below 1"


def test_the_docs_have_the_ranges_of_files() -> None:
    text = (DOCS / "formats.md").read_text(encoding="utf-8")
    of_study = text[text.index("| field of a study") : text.index("In cluster and plan files")]
    ranges = text[text.index("## Ranges") :].replace(of_study, "")
    table = dict(re.findall(r"^\| `([\w.\[\]]+)` \| ([^|]+?) \|$", ranges, re.MULTILINE))
    expected = {at: str(within) for at, _, within in ranges_in(JobConfig)}
    assert {at: said for at, said in table.items() if at in expected} == expected
    for kind, place in ((Node, "nodes[]"), (ModelShape, "workload.model"), (Workload, "workload")):
        for name in hints_of(kind):
            at = f"{place}.{name}"
            if isinstance(split_hint(hints_of(kind)[name])[1], Range):
                assert table[at] == str(range_of(kind, name))
