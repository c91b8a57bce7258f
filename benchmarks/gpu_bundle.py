"""What a GPU machine without a package index lacks, unpacked into one folder that is carried there.

    python -m benchmarks.gpu_bundle [--output gpu-bundle] [--python 3.12] [--machine x86_64]

It has Python, torch, transformers, tokenizers and safetensors. The wheels of all else that `skippipe train`,
`serve`, `profile`, `eval` and `generate` import are downloaded for its Python, in the versions of constraints.txt, and
unpacked. There, `PYTHONPATH=gpu-bundle python -m skippipe` needs no installation. Planning needs scipy, and is slow
without numba: both are too large, so plans are made before.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

COMMAND = ("typer", "click", "rich", "markdown-it-py", "mdurl", "Pygments", "shellingham", "annotated-doc")
TRANSPORT = ("pyzmq", "msgspec", "cryptography", "cffi", "pycparser")
SERVER = (
    *("fastapi", "starlette", "uvicorn", "h11", "anyio", "idna", "prometheus_client", "opentelemetry-api"),
    *("pydantic", "pydantic_core", "annotated-types", "typing-inspection", "typing_extensions"),
)
PACKAGES = (*COMMAND, *TRANSPORT, *SERVER)
LARGEST_BYTES = 40 * 2**20  # of the folder: a working tree travels with it
UNUSED = ("tests", "test", "include", "__pycache__")
"""Folders of packages that nothing imports."""
UNUSED_FILES = (".pyi", ".pyx", ".pxd", ".c", ".h", ".exe")
PLATFORMS = ("manylinux2014", "manylinux_2_17", "manylinux_2_26", "manylinux_2_28", "manylinux_2_34")


def download(folder: Path, python: str, machine: str) -> None:
    constraints = Path(__file__).parent.parent / "constraints.txt"
    platforms = [f"--platform={each}_{machine}" for each in PLATFORMS]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", f"--python-version={python}", *platforms]
    subprocess.run([*command, "-c", str(constraints), "-d", str(folder), *PACKAGES], check=True)


def unpack(wheels: Path, output: Path) -> int:
    """Bytes of what was unpacked."""
    total = 0
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.infolist():
                path = Path(entry.filename)
                if path.suffix in UNUSED_FILES or any(part in UNUSED for part in path.parts[1:-1]):
                    continue
                archive.extract(entry, output)
                total += entry.file_size
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu-bundle"))
    parser.add_argument("--python", default="3.12")
    parser.add_argument("--machine", default="x86_64")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        download(Path(folder), asked.python, asked.machine)
        shutil.rmtree(asked.output, ignore_errors=True)
        size = unpack(Path(folder), asked.output)
    print(
        f"{asked.output}: {len(PACKAGES)} packages for Python {asked.python} on {asked.machine}, {size / 2**20:.1f} MiB"
    )
    if size > LARGEST_BYTES:
        sys.exit(f"{asked.output}: more than {LARGEST_BYTES / 2**20:.0f} MiB; leave packages out of PACKAGES")


if __name__ == "__main__":
    main()
