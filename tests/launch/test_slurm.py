"""The SLURM scripts of the documentation, run by bash with stand-ins for SLURM's programs: what every task starts."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.helpers.doc_pages import ROOT, pieces

HOSTS = ("rack1", "rack2", "rack3")
SRUN = """#!/bin/bash
# Every task in turn, with its own number; the worst exit status, as SLURM has it.
while [[ $1 == --* ]]; do echo "$1" >> srun-options; shift; done
worst=0
for number in 0 1 2; do
    SLURM_NODEID=$number SLURM_PROCID=$number "$@"
    status=$?
    (( status > worst )) && worst=$status
done
exit $worst
"""
SCONTROL = f"""#!/bin/bash
[[ "$*" == "show hostnames rack[1-3]" ]] && printf '%s\\n' {" ".join(HOSTS)}
"""
RECORDED = """#!/bin/bash
echo "$(basename "$0") $*" >> started
[[ "$*" != *"$FAILS"* ]]
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """A folder with stand-ins for the programs, and files that the scripts name."""
    for name, program in {"srun": SRUN, "scontrol": SCONTROL, "torchrun": RECORDED, "skippipe": RECORDED}.items():
        (tmp_path / name).write_text(program)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "names.txt").write_text("ann\nbob\ncarol\n")
    return tmp_path


def scripts() -> list[str]:
    page = (ROOT / "docs" / "many-machines.md").read_text()
    return [each.text for each in pieces(page) if "#SBATCH" in each.text]


def run(script: str, cluster: Path, fails: str = "nothing") -> tuple[int, list[str]]:
    """The exit status, and what was started."""
    environment = {
        "PATH": f"{cluster}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "rack[1-3]",
        "SLURM_NNODES": str(len(HOSTS)),
        "FAILS": fails,
    }
    done = subprocess.run(["bash"], input=script, text=True, cwd=cluster, env=environment, timeout=60, check=False)
    return done.returncode, (cluster / "started").read_text().splitlines()


def test_torchrun_has_its_own_rank_on_every_machine(cluster: Path) -> None:
    script, _ = scripts()
    code, started = run(script, cluster)
    assert code == 0
    assert [re.findall(r"--node-rank (\d)", line) for line in started] == [["0"], ["1"], ["2"]]
    for line in started:
        assert "--nnodes 3 " in line
        assert "--master-addr rack1 " in line
        assert line.endswith(" -m skippipe.training.torchrun job.toml")


def test_a_rank_that_fails_ends_the_job(cluster: Path) -> None:
    code, _ = run(scripts()[0], cluster, fails="--node-rank 1")
    assert code != 0
    assert "--kill-on-bad-exit=1" in (cluster / "srun-options").read_text()


def test_nodes_join_under_their_own_names_and_are_started_again(cluster: Path) -> None:
    _, script = scripts()
    code, started = run(script, cluster, fails="keys/bob.key")
    assert code != 0, "one was given up"
    joined = [re.findall(r"--key keys/(\w+)\.key", line)[0] for line in started]
    assert joined == ["ann", *["bob"] * 5, "carol"]
    assert all(line.startswith("skippipe node --join coordinator.example.org:5555 ") for line in started)
    assert "--kill-on-bad-exit=0" in (cluster / "srun-options").read_text(), "others go on"
