"""How the code is laid out: what a newcomer may rely on when looking for a file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_LINES = 500


def modules_of(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found
    return found


def imports_of(file: Path) -> Iterator[str]:
    """Every module that a file imports, by its full name; also inside of functions and in texts that are programs."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            lines = node.value.splitlines()
            yield from (line.split()[1] for line in lines if line.startswith(("from tests.", "import tests.")))


def test_no_test_file_imports_another() -> None:
    imported = {(file.name, name) for file in modules_of("tests") for name in imports_of(file) if "tests." in name}
    assert any(name.startswith("tests.helpers.plans.") for _, name in imported), "imports are found"
    assert [each for each in imported if ".test_" in each[1]] == [], "move what they share to tests/helpers"


def test_every_package_has_a_folder_of_tests() -> None:
    packages = {file.parent.name for file in ROOT.glob("skippipe/*/__init__.py")}
    tested = {file.parent.name for file in ROOT.glob("tests/*/test_*.py")}
    assert len(packages) > 10
    assert packages <= tested


def test_no_module_is_too_long() -> None:
    files = [file for folder in ("skippipe", "tests", "benchmarks") for file in modules_of(folder)]
    lines = {str(file.relative_to(ROOT)): len(file.read_bytes().splitlines()) for file in files}
    assert [name for name, count in lines.items() if count > MOST_LINES] == [], "split them"


def test_files_and_tests_that_pages_name_exist() -> None:
    """Such as `transport/mailbox.py`, or `test_mailbox.py::test_oversize_is_refused`."""
    files = [
        file.relative_to(ROOT).as_posix()
        for folder in ("skippipe", "tests", "benchmarks", "examples")
        for file in modules_of(folder)
    ]
    tests = {line for file in modules_of("tests") for line in re.findall(r"^def (test_\w+)", file.read_text(), re.M)}
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    named = {
        (page.name, *found) for page in pages for found in re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", page.read_text())
    }
    assert len(named) > 50, "they are found"
    missing = [
        each
        for each in named
        if not any(f"/{file}".endswith(f"/{each[1]}") for file in files) or each[2] not in {"", *tests}
    ]
    assert missing == []
