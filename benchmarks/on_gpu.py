"""Every part of SkipPipe on a card, one after another, most valuable first; each with a time limit, its output kept.

    PYTHONPATH=gpu-bundle python -m benchmarks.on_gpu [-o on-gpu.jsonl] [--within 1200] [--mps] [--only nodes,serve]
    python -m benchmarks.on_gpu --device cpu          # the same programs at small sizes, without a card

A part is a command. Its line of JSON is written when it ends: name, command, exit status (124: past its limit),
seconds, and the end of what it printed. A part that fails does not keep the others from running. All is over after
`--within` seconds: a part that has less than a third of its limit left is not begun, and named at the end; one that has
less than its limit is ended then. With `--mps` NVIDIA's Multi-Process Service runs meanwhile: without it processes have
the card in turns. Only the standard library is needed here.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

KEPT_CHARACTERS = 6_000  # of a part's output
TIMED_OUT = 124
END_S = 10.0  # for a process to end after SIGINT
LEAST_SHARE = 1 / 3  # of its limit that a part is begun with: limits are two to three times what parts take
PYTHON = sys.executable
ABOUT = """
import importlib.util, platform, torch
wanted = "zmq msgspec typer cryptography fastapi uvicorn scipy numba transformers tokenizers safetensors triton".split()
missing = [name for name in wanted if importlib.util.find_spec(name) is None]
card = torch.cuda.get_device_name() if torch.cuda.is_available() else "no card"
print(platform.python_version(), platform.machine(), "torch", torch.__version__, card)
print("missing:", *missing or ["nothing"])
"""
PLAN = """
import sys
from pathlib import Path
from benchmarks.gpu import full_pipeline
from skippipe.model_shape import MODELS
from skippipe.workload import Workload
from dataclasses import replace
model, sequence, samples, device, to = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(sys.argv[5])
full_pipeline(Workload(replace(MODELS[model], vocab=2048), sequence, samples, 12), 2, device).save(to)
"""
JOB = """
output = "{folder}/run"
iterations = {iterations}
[model]
config = "{model}"
[data]
vocabulary = 2048
[pipeline]
plan = "{folder}/plan.json"
[compute]
device = "{device}"
dtype = "{dtype}"
compiled = {compiled}
[report]
recorded = 10
"""


class Part(NamedTuple):
    name: str
    limit_s: float
    commands: tuple[Sequence[str], ...]
    """One after another; the first that fails ends the part."""


def module(name: str, *words: str) -> list[str]:
    return [PYTHON, "-m", name, *words]


def parts_of(device: str, folder: Path) -> list[Part]:
    """All parts, at the sizes of a card or at small ones."""
    card = device == "cuda"
    on = ("--device", device)
    small = ("--model", "llama-tiny", "--stages", "2", "--samples", "1", "--sequence", "64") if not card else ()
    model, sequence, samples = ("llama-300m", 1024, 8) if card else ("llama-tiny", 64, 2)
    dtype, compiled, iterations = ("bf16", "true", 30) if card else ("fp32", "false", 3)
    job = folder / "job.toml"
    plan = [PYTHON, "-c", PLAN, model, str(sequence), str(samples), device, str(folder / "plan.json")]
    fields = {"folder": folder, "model": model, "device": device, "dtype": dtype, "compiled": compiled}
    job.write_text(JOB.format(**fields, iterations=iterations), encoding="utf-8")
    two = ("--processes", "--stages", "2", "--seconds", "25" if card else "1", *on)
    profiled = ("--model", "llama-1.5b" if card else model, "--sequence", "2048" if card else "64")
    evaluated = ("--draws", "4", "--tokens", "20000" if card else "1000")
    cluster = str(folder / "cluster.json")
    codecs = ("fp32", "bf16", "int8", "fp8", "int6", "int4", "int2", "--mib", "16,128" if card else "1")
    compiled_here = ("--compiled",) if card else ()
    return [
        Part("about", 60, ([PYTHON, "-c", ABOUT],)),
        Part("nodes", 240, (module("benchmarks.gpu", *two, *small),)),
        *(  # before decoding: what they print are the tile sizes that it should have
            Part(f"kernels-{shape}", 120, (module("benchmarks.decoding", *words, "--only", "kernels"),))
            for shape, words in (decodings(device) if card else ())
        ),
        *(
            Part(f"decoding-{shape}", 180, (module("benchmarks.decoding", *words, "--only", "static"),))
            for shape, words in decodings(device)
        ),
        Part("train", 150, (plan, module("skippipe", "train", str(job), "--force"))),
        Part("serve", 100, (module("benchmarks.on_gpu", "serve", *on, "--dtype", dtype),)),
        Part(
            "optimizers",
            240,
            (module("benchmarks.optimizers", *on, *(compiled_here or ("--parameters", "1e6", "--tokens", "128"))),),
        ),
        Part("codecs", 200, (module("benchmarks.codecs", *codecs, *on, *compiled_here),)),
        Part(
            "largest",
            200,
            (module("benchmarks.largest", *on, *(small or ()), *(compiled_here or ("--iterations", "4"))),),
        ),
        Part(
            "eval",
            90,
            (module("skippipe", "eval", "austen", "--text", "classics-val", "--keep", "1/2", *evaluated, *on),),
        ),
        Part("generate", 60, (module("skippipe", "generate", "austen", "It is a truth", "--stats", *on),)),
        Part(
            "profile",
            90,
            (module("skippipe", "profile", "--local", "2", *profiled, *on, "--dtype", dtype, "-o", cluster),),
        ),
        Part("nodes-not-encrypted", 200, (module("benchmarks.gpu", *two, *small, "--security", "none"),)),
        Part("nodes-in-one-process", 200, (module("benchmarks.gpu", "--seconds", two[4], *on, *small),)),
    ]


def decodings(device: str) -> list[tuple[str, list[str]]]:
    if device != "cuda":
        return [("small", ["--device", device, "--tokens", "8", "--rounds", "1"])]
    words = ["--device", device, "--dtype", "bf16", "--rounds", "3"]
    return [("500m", [*words, "--model", "llama-500m"]), ("1.5b", [*words, "--model", "llama-1.5b"])]


def run_part(part: Part, environment: Mapping[str, str], limit_s: float) -> dict[str, object]:
    """What becomes of a part, as it is written down."""
    began, status = time.monotonic(), 0
    with tempfile.TemporaryFile() as output:  # no pipe: a process that a part leaves behind would keep that open
        for command in part.commands:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
            try:
                status = process.wait(max(1.0, limit_s - (time.monotonic() - began)))
            except subprocess.TimeoutExpired:
                status = TIMED_OUT
                process.send_signal(signal.SIGINT)  # what a process says when it is interrupted is kept, too
                with suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # also what it has left behind: the card is for others
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            if status:
                break
        output.seek(0)
        said = output.read().decode(errors="replace")
    return {
        "part": part.name,
        "mps": "CUDA_MPS_PIPE_DIRECTORY" in environment,
        "command": [" ".join(each) for each in part.commands],
        "status": status,
        "seconds": round(time.monotonic() - began, 1),
        "output": said[-KEPT_CHARACTERS:],
    }


@contextmanager
def multi_process_service(folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """Programs with this environment compute on the card at the same time; in turns, if the service does not start."""
    for name in ("pipe", "log"):
        (folder / f"mps-{name}").mkdir()
    variables = {f"CUDA_MPS_{name.upper()}_DIRECTORY": str(folder / f"mps-{name}") for name in ("pipe", "log")}
    served, control = {**environment, **variables}, "nvidia-cuda-mps-control"
    try:
        subprocess.run([control, "-d"], env=served, check=True, timeout=END_S)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"without MPS: {error}", flush=True)
        yield
        return
    environment |= variables
    try:
        yield
    finally:
        with suppress(subprocess.TimeoutExpired):
            subprocess.run([control], input="quit\n", text=True, env=served, timeout=END_S, check=False)


def run_all(asked: argparse.Namespace) -> int:
    """How many parts failed."""
    began, failed, left = time.monotonic(), 0, []
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "160"}
    found_in = [str(Path(each).resolve()) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    environment["PYTHONPATH"] = os.pathsep.join([*found_in, str(Path(__file__).resolve().parent.parent)])
    with tempfile.TemporaryDirectory() as folder, asked.output.open("a", encoding="utf-8") as lines:
        kept = Path(tempfile.gettempdir()) / "skippipe-on-gpu"  # what one part compiles others find, also the next time
        environment.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{kept}/inductor")
        environment.setdefault("XDG_CACHE_HOME", f"{kept}/cache")
        parts = parts_of(asked.device, Path(folder))
        if unknown := set(asked.only or ()) - {part.name for part in parts}:
            sys.exit(f"--only: there is no {min(unknown)}, but {', '.join(part.name for part in parts)}")
        with multi_process_service(Path(folder), environment) if asked.mps else nullcontext():
            for part in parts:
                if asked.only and part.name not in asked.only:
                    continue
                limit_s = min(part.limit_s, asked.within - END_S - (time.monotonic() - began))
                if limit_s < LEAST_SHARE * part.limit_s:
                    left.append(part.name)
                    continue
                found = run_part(part, environment, limit_s)
                failed += bool(found["status"])
                lines.write(json.dumps(found) + "\n")
                lines.flush()
                print(f"== {part.name}: status {found['status']}, {found['seconds']} s\n{found['output']}", flush=True)
    print(f"{failed} parts failed; not begun, to be over after {asked.within:.0f} s: {', '.join(left) or 'none'}")
    return failed


def serve(asked: argparse.Namespace) -> None:
    """`skippipe serve` over two nodes on the device, and clients that ask for texts side by side."""
    from concurrent.futures import ThreadPoolExecutor
    from urllib.request import Request, urlopen

    command = module("skippipe", "serve", "austen", "--nodes", "2", "--port", "0", "--no-access-log")
    command += ["--cut", "2", "--device", asked.device, "--dtype", asked.dtype]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert server.stdout is not None
        address = ""
        for line in server.stdout:
            print(line, end="", flush=True)
            if " is served at " in line:
                address = line.split(" is served at ")[1].split("/v1")[0]
                break

        def ask(number: int) -> int:
            body = {"model": "austen", "prompt": "It is a truth", "max_tokens": 256, "temperature": 0.8, "seed": number}
            request = Request(
                f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urlopen(request, timeout=60) as response:
                return int(json.load(response)["usage"]["completion_tokens"])

        for clients in (1, 1, 8, 8):  # of each the first warms up
            began = time.monotonic()
            with ThreadPoolExecutor(clients) as pool:
                tokens = sum(pool.map(ask, range(clients)))
            print(f"{clients} clients: {tokens / (time.monotonic() - began):,.0f} tokens/s", flush=True)
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(END_S)
        except subprocess.TimeoutExpired:
            server.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=("serve",), help="this part alone, here")
    parser.add_argument("-o", "--output", type=Path, default=Path("on-gpu.jsonl"))
    parser.add_argument("--within", type=float, default=1200, help="seconds after which all is over")
    parser.add_argument("--only", type=lambda names: names.split(","), help="names of parts")
    parser.add_argument("--mps", action="store_true", help="processes on the card at the same time, not in turns")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    asked = parser.parse_args()
    if asked.part == "serve":
        serve(asked)
    else:
        for number in (
            signal.SIGTERM,
            signal.SIGINT,
        ):  # as Ctrl-C: no part outlives this. Also in the background, where
            signal.signal(number, signal.default_int_handler)  # a shell has parts ignore that they are interrupted
        sys.exit(1 if run_all(asked) else 0)


if __name__ == "__main__":
    main()
