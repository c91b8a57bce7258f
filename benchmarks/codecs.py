"""How fast codecs are: encode and decode, in GB/s of bf16 input, on one CPU core or on a GPU.

python -m benchmarks.codecs [--device cuda] [--compiled] [--mib 16] [codec ...]

`round trip` is both, one after the other, as bytes of bf16 for each second; goals: 1 GB/s on a core of a CPU and
100 GB/s, compiled, on an H200. With --compiled `rounded` of each codec is compiled by torch.compile, as a whole, and
captured in a CUDA graph; the column `rounded` is that, or the plain call. `feedback` is what averaging does to an fp32
gradient if the codec asks for error feedback: encode it, decode it again, keep the difference; as if it was bf16, too.
`error` is the root of the mean square error of Gaussian values, in their root mean squares. The fastest of several
rounds counts: other work on the machine shows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from skippipe.codecs import CODECS, decode, encode

ROUNDS = 9


def seconds(run: Callable[[], object], device: str) -> float:
    """Of one run, at best."""
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best


def captured(run: Callable[[Tensor], Tensor], tensor: Tensor) -> Callable[[], object]:
    """A CUDA graph of the call, as a function."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run(tensor)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(tensor)
    return graph.replay


def fed_back(codec: str, gradient: Tensor, remainder: Tensor) -> None:
    """As `GradientAverager.contribute`."""
    torch.sub(gradient, decode(encode(gradient, codec), gradient.device), out=remainder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("codecs", nargs="*", default=list(CODECS), metavar="codec")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--mib", type=int, default=16, help="of bf16 input")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = options.device
    flat = torch.randn(options.mib * 2**19, device=device).bfloat16()
    size = 2 * flat.numel() / 1e9
    print(
        f"{'GB/s of bf16':23}{'bits a value':>14}{'error':>9}{'encode':>9}{'decode':>9}{'round trip':>12}{'rounded':>9}"
        f"{'feedback':>10}"
    )
    for name in options.codecs:
        codec = CODECS[name]
        raw = codec.encode(flat)
        back = codec.decode(raw, flat.numel())
        error = float((back.float() - flat.float()).square().mean().sqrt() / flat.float().square().mean().sqrt())
        bits = 8 * codec.expected_bytes(flat.numel()) / flat.numel()
        encode_s = seconds(partial(codec.encode, flat), device)
        decode_s = seconds(partial(codec.decode, raw, flat.numel()), device)
        rounded: Callable[[Tensor], Tensor] = codec.rounded
        if options.compiled:
            torch.compiler.reset()  # or `rounded` counts as one function that is compiled anew too often
            rounded = torch.compile(rounded, fullgraph=True)
            rounded(flat)
        call = captured(rounded, flat) if device == "cuda" else partial(rounded, flat)
        rounded_s = seconds(call, device)
        rates = (size / each for each in (encode_s, decode_s, encode_s + decode_s, rounded_s))
        columns = "".join(f"{rate:{width}.2f}" for rate, width in zip(rates, (9, 9, 12, 9), strict=True))
        if codec.error_feedback:
            gradient = flat.float()
            feedback_s = seconds(partial(fed_back, name, gradient, torch.empty_like(gradient)), device)
            columns += f"{size / feedback_s:10.2f}"
        print(f"{name:23}{bits:14.3f}{error:9.4f}{columns}")


if __name__ == "__main__":
    main()
