"""Kernels where the cache on disk, or the compiler, is of no use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNEL = "from skippipe.dispatch import may_start; print(may_start(0, 2, 1, 2), may_start(0, 2, 2, 2))"


def answer(cache: Path, **environment: str) -> str:
    given = {**os.environ, "XDG_CACHE_HOME": str(cache), **environment}
    ran = subprocess.run([sys.executable, "-c", KERNEL], env=given, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.mark.slow
def test_damaged_machine_code_is_compiled_anew(tmp_path: Path) -> None:
    assert answer(tmp_path) == "True False"
    for suffix in ("nbi", "nbc"):
        kept = sorted(tmp_path.rglob(f"*.{suffix}"))
        assert kept
        for file in kept:
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        assert answer(tmp_path) == "True False"
    whole = max(tmp_path.rglob("*.nbc"), key=lambda file: file.stat().st_size)
    assert whole.stat().st_size > 1000, "it is kept again"


@pytest.mark.parametrize("name", ["NUMBA_DISABLE_JIT", "SKIPPIPE_PURE_PYTHON"])
def test_nothing_is_compiled_on_request(tmp_path: Path, name: str) -> None:
    assert answer(tmp_path, **{name: "1"}) == "True False"
    assert not list(tmp_path.rglob("*.nbi"))
