"""Kernels of decoding on a GPU: each one of a layer, for several tile sizes, against the time to read its weights.

    python -m benchmarks.decoding --only kernels --model llama-1.5b [--seconds 45]

Each kernel runs over copies of its matrix that the caches cannot hold, one after another in one CUDA graph, so its time
is that between two kernels of a step. Results are compared with torch's. 'Prepared': the kernel before has done the
norm's work, as it does where kernels are `ahead`; a layer's tiles are chosen for that. Then all layers, with the
best tiles found; 'early': kernels start before the one before them has ended. The last lines are for `TUNED` and
`ATTENTION` in `decode_kernels.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from skippipe.inference import decode_kernels
from skippipe.inference.decode_kernels import (
    MOST_ROWS,
    SHARED_BYTES,
    TUNED,
    AttentionTiles,
    DecodeKernels,
    Prepared,
    Tiles,
    agree,
    tiles_for,
)
from skippipe.inference.fused_layer import FusedLayer, LayerSettings, layer_step, position_mask
from skippipe.model_shape import ModelShape

ROWS, ROOM, POSITION = 8, 256, 160
COLD_BYTES = 200 * 2**20  # that copies of a matrix have together: four times an H200's L2 cache
REPLAYS = 5
MOST_CANDIDATES = 12  # of a product
NEAR: dict[str, list[tuple[int, int, int, int, int]]] = {
    # as many programs fit a processor at once as make one round, where stages are few enough
    "qkv": [
        (16, 256, 1, 4, 4), (32, 256, 1, 5, 2), (16, 256, 1, 4, 2), (16, 256, 1, 3, 2), (32, 256, 1, 4, 2),
        (32, 256, 1, 3, 2), (16, 512, 1, 3, 2), (32, 512, 1, 3, 2), (16, 256, 1, 5, 4), (64, 256, 1, 4, 4),
        (32, 256, 1, 5, 4),
    ],
    "out": [
        (16, 256, 1, 8, 4), (16, 256, 1, 9, 4), (16, 512, 1, 5, 4), (16, 256, 1, 5, 4), (16, 256, 1, 8, 2),
        (16, 128, 1, 12, 4), (16, 512, 1, 4, 4), (16, 256, 1, 8, 8),
    ],
    "gate_up": [
        (32, 256, 1, 3, 2), (16, 256, 1, 3, 2), (16, 256, 1, 4, 2), (16, 512, 1, 3, 2), (16, 256, 1, 5, 2),
        (32, 128, 1, 4, 2), (32, 256, 1, 3, 1), (16, 256, 1, 3, 1), (16, 128, 1, 5, 2), (32, 256, 1, 4, 2),
        (16, 256, 1, 3, 4),
    ],
    "down": [
        (16, 256, 1, 8, 4), (16, 256, 1, 7, 4), (16, 256, 1, 6, 4), (16, 256, 2, 6, 4), (16, 256, 2, 5, 2),
        (32, 256, 2, 5, 4), (16, 512, 1, 5, 4), (16, 256, 1, 10, 4), (16, 512, 2, 3, 4),
    ],
    "head": [
        (64, 256, 1, 3, 4), (32, 256, 1, 4, 4), (32, 256, 1, 5, 4), (64, 256, 1, 4, 4), (64, 128, 1, 4, 4),
        (32, 256, 1, 3, 4), (128, 128, 1, 3, 4), (64, 256, 1, 3, 8), (32, 512, 1, 3, 4),
    ],
}  # fmt: skip
ATTENTION_TILES = [
    AttentionTiles(32, 6, 2), AttentionTiles(256, 1, 8), AttentionTiles(256, 1, 4), AttentionTiles(32, 8, 2),
    AttentionTiles(64, 4, 2), AttentionTiles(128, 2, 4), AttentionTiles(16, 8, 1), AttentionTiles(32, 6, 1),
    AttentionTiles(64, 3, 8), AttentionTiles(64, 3, 2),
]  # fmt: skip


class Product(NamedTuple):
    name: str
    outputs: int
    inputs: int
    gated: bool
    norm: bool
    residual: bool


PRODUCTS = "qkv", "out", "gate_up", "down", "head"


def products(shape: ModelShape) -> list[Product]:
    heads, joined = shape.heads * shape.head_dim, (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    sizes = (
        (joined, shape.hidden, False, True, False),
        (shape.hidden, heads, False, False, True),
        (shape.intermediate, shape.hidden, True, True, False),
        (shape.hidden, shape.intermediate, False, False, True),
        (shape.vocab, shape.hidden, False, True, False),
    )
    return [Product(name, *each) for name, each in zip(PRODUCTS, sizes, strict=True)]


def candidates(name: str, outputs: int, inputs: int, gated: bool) -> list[Tiles]:
    """Those in use first, then others near them, the most promising first, that fit a program's shared memory."""
    found = [tiles_for(outputs, inputs, gated)]
    for each in (Tiles(*sizes) for sizes in NEAR[name]):
        loaded = (each.stages - 1) * 2 * each.inner * (each.columns * (2 if gated else 1) + 16)
        if loaded < SHARED_BYTES and each.inner <= inputs and each.stages <= 1 + ceil(inputs / each.inner):
            found.append(each)
    return list(dict.fromkeys(found))[:MOST_CANDIDATES]


class Bench:
    def __init__(self, device: str, dtype: torch.dtype, rate: float, seconds: float) -> None:
        """`rate`: bytes a second of the memory."""
        self.device, self.dtype, self.rate = torch.device(device), dtype, rate
        self._share_s, self._until = seconds / (len(PRODUCTS) + 1), time.monotonic()
        self.kernels = DecodeKernels(self.device, ahead=False)

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(0, scale)

    def next_kernel(self) -> None:
        """Each has the same share of the time; what one leaves is the next one's."""
        self._until += self._share_s

    def left(self) -> bool:
        return time.monotonic() < self._until

    def seconds(self, runs: Sequence[Callable[[], Any]]) -> float:
        """Of each, on average, in one graph."""
        if self.device.type != "cuda":  # in Triton's interpreter: to see that it runs
            began = time.perf_counter()
            for run in runs:
                run()
            return (time.perf_counter() - began) / len(runs)
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            runs[0]()  # compiles
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            for run in runs:
                run()
        graph.replay()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / REPLAYS / len(runs)  # type: ignore[no-any-return]

    def line(self, name: str, taken_s: float, read_s: float) -> None:
        print(f"  {name}: {1e6 * taken_s:.2f} us, {read_s / taken_s:.0%} of the memory rate", flush=True)

    def product(self, product: Product) -> Tiles | None:
        """The best tiles for it."""
        self.next_kernel()
        name, outputs, inputs, gated, norm, residual = product
        size = 2 * outputs * inputs * (2 if gated else 1)
        copies = max(2, min(64, COLD_BYTES // size)) if self.device.type == "cuda" else 2
        weights = [self.random(outputs * (2 if gated else 1), inputs, scale=inputs**-0.5) for _ in range(copies)]
        x, gain, before = self.random(ROWS, inputs), self.random(inputs), self.random(ROWS, outputs)
        options: dict[str, Any] = {"gated": gated, "epsilon": 1e-5}
        options |= {"gain": gain if norm else None, "residual": before if residual else None}
        expected = self._expected(x, weights[0], options)
        read_s = size / self.rate
        print(f"{name}, {len(weights[0])} x {inputs}: {1e6 * read_s:.2f} us to read", flush=True)
        self.line(
            "cuBLAS, the product alone", self.seconds([partial(functional.linear, x, w) for w in weights]), read_s
        )
        found: dict[Tiles, float] = {}
        self.try_product(tiles_for(outputs, inputs, gated), x, weights, options, expected, read_s)
        options |= {"prepared": self.prepared(x, gain)} if norm else {}
        for tiles in candidates(name, outputs, inputs, gated):
            if found and not self.left():
                print("  others: no time left")
                break
            if residual:
                options |= {"following": before[0], "prepare": self.kernels.room_for(x, weights[0], tiles)}
            taken_s = self.try_product(tiles, x, weights, options, expected, read_s)
            if taken_s is not None:
                found[tiles] = taken_s
        if not found:
            return None
        return min(found, key=found.__getitem__)

    def prepared(self, x: Tensor, gain: Tensor) -> Prepared:
        """As a product with 16 columns a program leaves it."""
        parts = x.float().square().view(len(x), -1, 16).sum(-1).T
        sums = torch.zeros(len(parts), MOST_ROWS, device=self.device)
        sums[:, : len(x)] = parts
        return Prepared((x.float() * gain.float()).to(x.dtype), sums)

    def try_product(
        self, tiles: Tiles, x: Tensor, weights: list[Tensor], options: dict[str, Any], expected: Tensor, read_s: float
    ) -> float | None:
        """Seconds; None if it does not run, or is not right."""
        name = f"{tiles}{', prepared' if options.get('prepared') else ', prepares' if options.get('prepare') else ''}"
        try:
            right = agree(self.kernels.product(x, weights[0], **options, tiles=tiles), expected)
            taken_s = self.seconds([partial(self.kernels.product, x, w, **options, tiles=tiles) for w in weights])
        except Exception as error:  # one that does not fit does not hide the others
            print(f"  {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            return None
        self.line(f"{name}{'' if right else ': WRONG'}", taken_s, read_s)
        return taken_s if right else None

    @staticmethod
    def _expected(x: Tensor, weight: Tensor, options: dict[str, Any]) -> Tensor:
        values = x.float()
        if options["gain"] is not None:
            values = functional.rms_norm(values, values.shape[-1:], options["gain"].float(), options["epsilon"])
        values = functional.linear(values, weight.float())
        if options["gated"]:
            gate, up = values.chunk(2, -1)
            values = functional.silu(gate) * up
        return values if options["residual"] is None else values + options["residual"].float()

    def stores(self, settings: LayerSettings) -> tuple[Tensor, Tensor]:
        shape = ROWS, settings.kv_heads, ROOM, settings.head_dim
        return self.random(*shape), self.random(*shape)

    def attention(self, settings: LayerSettings) -> AttentionTiles | None:
        self.next_kernel()
        joined = (settings.heads + 2 * settings.kv_heads) * settings.head_dim
        size = 2 * 2 * ROWS * settings.kv_heads * POSITION * settings.head_dim
        copies = max(2, min(64, COLD_BYTES // size)) if self.device.type == "cuda" else 2
        stores = [self.stores(settings) for _ in range(copies)]
        given = self.random(ROWS, joined), settings, (None, None)
        places = self.places(settings)
        print(f"attention, {POSITION} of {ROOM} tokens: {1e6 * size / self.rate:.2f} us to read", flush=True)
        found: dict[AttentionTiles, float] = {}
        for tiles in ATTENTION_TILES:
            if found and not self.left():
                break
            try:
                runs = [partial(self.kernels.attend, *given, each, *places, None, tiles=tiles) for each in stores]
                found[tiles] = self.seconds(runs)
            except Exception as error:
                print(f"  {tiles}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                continue
            self.line(str(tiles), found[tiles], size / self.rate)
        return min(found, key=found.__getitem__) if found else None

    def places(self, settings: LayerSettings) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Slots, positions, and rotations of all positions."""
        slots = torch.arange(ROWS, device=self.device)
        angles = torch.arange(ROOM, device=self.device)[:, None] * torch.rand(
            settings.head_dim // 2, device=self.device
        )
        both = torch.cat((angles, angles), -1)[None]
        return slots, torch.full_like(slots, POSITION), (both.cos().to(self.dtype), both.sin().to(self.dtype))

    def layer(self, shape: ModelShape) -> FusedLayer:
        matrices: dict[str, Any] = {
            each.name: self.random(each.outputs * (2 if each.gated else 1), each.inputs, scale=0.3 * each.inputs**-0.5)
            for each in products(shape)[:-1]
        }
        gains: dict[str, Any] = {name: 1 + self.random(shape.hidden, scale=0.1) for name in ("norm", "second_norm")}
        absent: dict[str, Any] = dict.fromkeys(
            ("qkv_bias", "query_norm", "key_norm", "out_bias", "gate_up_bias", "down_bias")
        )
        return FusedLayer(**matrices, **gains, **absent)

    def all_layers(self, shape: ModelShape, settings: LayerSettings) -> None:
        layers = [(self.layer(shape), self.stores(settings)) for _ in range(shape.layers)]
        slots, positions, rotations = self.places(settings)
        rotation = rotations[0][0, positions][:, None], rotations[1][0, positions][:, None]
        mask, hidden = position_mask(positions, ROOM, None, self.dtype), self.random(ROWS, shape.hidden)

        def plain() -> Tensor:
            output = hidden
            for weights, stores in layers:
                output = layer_step(output, weights, settings, stores, slots, positions, rotation, mask)
            return output

        def ours(kernels: DecodeKernels) -> Tensor:
            output, prepared = hidden, None
            following = [*(weights.norm for weights, _ in layers[1:]), None]
            for (weights, stores), gain in zip(layers, following, strict=True):
                output, prepared = kernels.layer(
                    output, weights, settings, stores, slots, positions, rotations, None,
                    prepared=prepared, following=gain,
                )  # fmt: skip
            return output

        read_s = sum(each.nbytes for weights, _ in layers for each in weights if each is not None) / self.rate
        print(f"{shape.layers} layers: {1e6 * read_s:.0f} us to read their weights", flush=True)
        forms: dict[str, dict[str, Any]] = {"ahead": {"ahead": True}, "not ahead": {"ahead": False}}
        if self.device.type == "cuda":
            forms |= {"ahead, early": {"ahead": True, "early": True}}
        ways: dict[str, Callable[[], Tensor]] = {
            f"best tiles, {name}": partial(ours, DecodeKernels(self.device, **form)) for name, form in forms.items()
        }
        ways["torch, not compiled"] = plain
        for name, way in ways.items():
            try:
                right = agree(way(), plain(), hidden)
                self.line(f"{name}{'' if right else ': WRONG'}", self.seconds([way]), read_s)
            except Exception as error:
                print(f"  {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)


@torch.inference_mode()
def measure(shape: ModelShape, device: str, dtype: torch.dtype, rate: float, seconds: float) -> None:
    """Nothing is tried beyond the seconds but the rule's tiles of each kernel, and all layers."""
    bench = Bench(device, dtype, rate, seconds)
    settings = LayerSettings(shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim**-0.5, 1e-5, "silu")
    for each in products(shape):
        best = bench.product(each)
        if best is not None:
            TUNED[each.outputs, each.inputs, each.gated] = best
    decode_kernels.ATTENTION = bench.attention(settings) or decode_kernels.ATTENTION
    bench.all_layers(shape, settings)
    for key, tiles in TUNED.items():
        print(f"    {key}: {tiles},")
    print(f"ATTENTION = {decode_kernels.ATTENTION}")
