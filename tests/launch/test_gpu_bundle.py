"""What is carried to a GPU machine is all that the commands import there."""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from subprocess import run

import pytest

from benchmarks.gpu_bundle import PACKAGES

THERE = ("torch", "transformers", "tokenizers", "safetensors", "numpy")  # with all that they need
LIBRARIES = Path(sys.modules["pytest"].__file__ or "").parents[1]
IMPORTS = """
import skippipe.cli.app, skippipe.training.run, skippipe.training.train_job, skippipe.runtime.train_role
import skippipe.serving.launcher, skippipe.serving.http.routes, skippipe.profiling.coordinator, skippipe.profiling.node
import skippipe.inference.static_decoding, skippipe.inference.eval.evaluate, skippipe.launch.local
import skippipe.transport.mailbox, benchmarks.on_gpu, benchmarks.largest, benchmarks.optimizers, benchmarks.codecs
import skippipe.planner.repair.repair
from skippipe.transport import aead
assert aead.AVAILABLE
"""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needs(names: tuple[str, ...]) -> set[str]:
    """These packages, and what they need without extras, as far as it is installed here."""
    found: set[str] = set()
    waiting = [normal(name) for name in names]
    while waiting:
        name = waiting.pop()
        try:
            wanted = distribution(name).requires or ()
        except PackageNotFoundError:
            continue
        if name not in found:
            found.add(name)
            waiting += [normal(re.split(r"[^\w.-]", each)[0]) for each in wanted if "extra ==" not in each]
    return found


def test_nothing_is_missing_that_a_package_of_the_bundle_needs() -> None:
    assert needs(PACKAGES) <= {normal(each) for each in PACKAGES} | needs(THERE)


@pytest.mark.slow
def test_commands_import_with_nothing_else(tmp_path: Path) -> None:
    for name in needs((*PACKAGES, *THERE)):
        for file in distribution(name).files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (tmp_path / top).exists():
                (tmp_path / top).symlink_to(LIBRARIES / top)
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-S", "-c", f"import sys; sys.path[1:1] = {[str(tmp_path), root]}\\n{IMPORTS}"]
    ended = run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr[-2000:]
