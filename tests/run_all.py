"""Every suite of the project, one after the other, and a table of how each ended: `make test-all`.

A suite that cannot run here (a program is missing, or the system is not Linux) is named with the reason, and does not
count as passed. Ends with status 1 if one failed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from dataclasses import dataclass

NAMESPACES = ("unshare", "ip")


@dataclass(frozen=True)
class Suite:
    target: str
    what: str
    programs: tuple[str, ...] = ()
    """That must be there beside Python and make."""
    linux: bool = False

    def obstacle(self) -> str:
        """Why it cannot run here; empty if it can."""
        if self.linux and sys.platform != "linux":
            return f"needs Linux, this is {sys.platform}"
        missing = [program for program in self.programs if shutil.which(program) is None]
        if missing:
            return f"not installed: {', '.join(missing)}"
        if "unshare" in self.programs and not _can_unshare():
            return "this system does not let a user make network namespaces (unshare --map-root-user --net)"
        return ""


SUITES = (
    Suite("test", "linter, types, documentation, tests"),
    Suite("test-slow", "tests that take many seconds each"),
    Suite("test-package", "wheel and sdist in an empty environment"),
    Suite("test-browser", "the dashboard in a real browser", ("chromium",)),
    Suite("test-trackers", "W&B and MLflow themselves, without a network"),
    Suite("test-harness", "scores beside lm-evaluation-harness's own"),
    Suite("test-data", "Parquet, .zst and datasets, with their libraries"),
    Suite("test-peft", "training beside transformers and peft"),
    Suite("test-triton", "kernels for a GPU, interpreted and compiled"),
    Suite("test-ray", "nodes as Ray actors", NAMESPACES, linux=True),
    Suite("test-reach", "home routers, closed ports, IPv4 and IPv6", NAMESPACES, linux=True),
    Suite("test-docs", "every command of README and tutorial", (*NAMESPACES, "curl"), linux=True),
)


def _can_unshare() -> bool:
    return subprocess.run(["unshare", "--map-root-user", "--net", "true"], capture_output=True).returncode == 0


def main() -> int:
    rows, failed = [], False
    for suite in SUITES:
        reason = suite.obstacle()
        if reason:
            rows.append((suite, f"NOT RUN: {reason}"))
            continue
        print(f"== make {suite.target}", flush=True)
        began = time.monotonic()
        code = subprocess.run(["make", "--no-print-directory", suite.target]).returncode
        failed |= code != 0
        rows.append((suite, f"{'passed' if code == 0 else f'FAILED ({code})'}, {time.monotonic() - began:.0f} s"))
    print()
    for suite, ended in rows:
        print(f"{suite.target:<14}{ended:<28}{suite.what}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
