"""How fast codecs are: encode and decode, in GB/s of bf16 input, on one CPU core or on a GPU.

python -m benchmarks.codecs [--device cuda] [--compiled] [--mib 16,128] [codec ...]

`round trip` is both, one after the other, as bytes of bf16 for each second; goals: 1 GB/s on a core of a CPU and
100 GB/s, compiled, on an H200. With --compiled codecs are compiled as those of a node with `compute.compiled`. A call
takes tens of microseconds before the GPU begins, which counts for encode, decode and round trip: less for a larger
tensor, and not for `rounded`, which on a GPU is replayed as a CUDA graph. `feedback` is what averaging does
to an fp32 gradient if the codec asks for error feedback: encode it, copy the bytes to the host, decode it again, keep
the difference; as if it was bf16, too. `error` is the root of the mean square error of Gaussian values, in their root
mean squares. The fastest of several rounds counts: other work on the machine shows. On a GPU, `unlike a CPU` has the
share of the bytes that a CPU would encode otherwise, and of the values that it would decode otherwise, which is to be
0: of one sample, in bf16 and in fp32.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from skippipe.codecs import CODECS, Codec, compile_on_device, encode_and_decode
from skippipe.errors import first_line

ROUNDS = 9
SAMPLE_TOKENS, CHANNELS = 512, 1024  # a MiB of bf16 each


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
    torch.sub(gradient, encode_and_decode(gradient, codec)[1], out=remainder)


def unlike_cpu(codec: Codec, sample: Tensor) -> str:
    """Shares of bytes and of values."""
    shape = tuple(sample.shape)
    there, here = codec.encode_tensor(sample).cpu(), codec.encode_tensor(sample.cpu())
    back, expected = codec.decode_tensor(here.to(sample.device), shape).cpu(), codec.decode_tensor(here, shape)
    values = (back != expected) & ~(back.isnan() & expected.isnan())
    return f"{(there != here).double().mean():.1g}, {values.double().mean():.1g}"


def rates(name: str, given: Tensor) -> str:
    """A line of the table."""
    codec, device, size, shape = CODECS[name], given.device.type, 2 * given.numel() / 1e9, tuple(given.shape)
    raw = codec.encode_tensor(given)
    back = codec.decode_tensor(raw, shape)
    error = float((back.float() - given.float()).square().mean().sqrt() / given.float().square().mean().sqrt())
    bits = 8 * codec.tensor_bytes(shape) / given.numel()
    encode_s = seconds(partial(codec.encode_tensor, given), device)
    decode_s = seconds(partial(codec.decode_tensor, raw, shape), device)
    call = captured(codec.rounded, given) if device == "cuda" else partial(codec.rounded, given)
    rounded_s = seconds(call, device)
    each = (size / taken_s for taken_s in (encode_s, decode_s, encode_s + decode_s, rounded_s))
    columns = "".join(f"{rate:{width}.2f}" for rate, width in zip(each, (9, 9, 12, 9), strict=True))
    if codec.error_feedback:
        gradient = given.float().flatten()
        feedback_s = seconds(partial(fed_back, name, gradient, torch.empty_like(gradient)), device)
        columns += f"{size / feedback_s:10.2f}"
    if device == "cuda":
        columns += f"{'' if codec.error_feedback else ' ' * 10}  {unlike_cpu(codec, given[:1])}"
        columns += f"; {unlike_cpu(codec, given[:1].float() * 1.1)}"
    return f"{name:23}{bits:14.3f}{error:9.4f}{columns}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("codecs", nargs="*", default=list(CODECS), metavar="codec")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--compiled", action="store_true", help="on a GPU; on a CPU codecs always are")
    parser.add_argument("--mib", type=lambda sizes: [*map(int, sizes.split(","))], default=[16], help="of bf16 input")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if options.compiled:
        compile_on_device()
    tensors = [torch.randn(mib, SAMPLE_TOKENS, CHANNELS, device=options.device).bfloat16() for mib in options.mib]
    print(
        f"{'GB/s of bf16':23}{'bits a value':>14}{'error':>9}{'encode':>9}{'decode':>9}{'round trip':>12}{'rounded':>9}"
        f"{'feedback':>10}{'  unlike a CPU' if options.device == 'cuda' else ''}"
    )
    failed = 0
    for name in options.codecs:
        for mib, given in zip(options.mib, tensors, strict=True):
            try:
                line = rates(name, given)
            except RuntimeError as error:  # of a compiler, or for want of memory: others may do
                failed, line = failed + 1, f"{name:23}failed: {first_line(error)}"
            print(line + (f"  {mib} MiB" if len(tensors) > 1 else ""), flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
