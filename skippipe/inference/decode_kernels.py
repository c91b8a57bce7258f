"""A decoder layer for one token of each of a few rows as five Triton kernels, which read the weights at close to the
memory's rate.

With at most 16 rows a product takes as long as reading its matrix, if enough of that is under way at any moment and
nothing stands between one matrix and the next. cuBLAS leaves processors idle where a matrix has few outputs, and a norm
or an activation is a kernel of its own, which takes longer to start than to run. Here a layer is

    norm and product with queries, keys and values
    rotation, cache write and attention, up to the position of each token
    product with the output matrix, and residual
    norm, product with gate and up, silu(gate) · up
    product with the down matrix, and residual

Each kernel's grid covers all processors: over outputs and, where these are few, over parts of the inputs. Tile sizes
come from `TUNED`, which `python -m benchmarks.decoding --only kernels` measures on a card, else from a rule.

Sums are fp32, in a fixed order: the same input gives the same output, bit by bit. It differs from that of `layer_step`
by rounding: what that rounds between a norm and a product, or a product and an activation, stays fp32 here. The first
layer that runs is compared with `layer_step`; if it differs by more than that, or a kernel does not compile, the step
is as without Triton, after a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from importlib.util import find_spec
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from skippipe.inference.fused_layer import FusedLayer, Layer, LayerSettings

MOST_ROWS = 16  # of a batch: a tile of tensor cores
PROCESSORS = 132  # of an H100 or H200
SHARED_BYTES = 227 * 1024  # that a program may have there, for what is under way
FULL = 0.9  # share of the processors that have a program each when a grid is large enough
READ_BYTES_PER_S = 4.25e12  # of an H200's memory
ADD_S = 0.7e-9  # of each input, in one program of four warps, with what a step of its loop takes beside
SHORT_S = 2.6e-6  # that adding may take in any case: a second round of programs would take as long
MOST_SPLITS = 8
PIPELINE_BYTES = 64 * 1024  # of a program that are under way: 130 of them hide a microsecond at twice 4 TB/s
LINE = 64  # values of 2 bytes that a line of the cache holds
FETCHED_LINES = 256  # that a program fetches before the kernel before it has ended
SCRATCH = 2**22  # numbers
ARRIVALS = 2**13
EARLY_BYTES = 50 * 2**20
"""Of a layer, at most, where a kernel starts before the one before it has ended: what it fetches meanwhile must find
room in the L2 cache."""
AHEAD = True  # a product with a residual does the work of the norm that follows it
SUPPORTED = torch.bfloat16, torch.float16
failures: list[str] = []
"""Why kernels are not used in this process any more: each route has its own, and would wait for a compiler again."""


class Tiles(NamedTuple):
    """How a product is cut into programs."""

    columns: int
    """Outputs of a program; of a gated product, pairs."""
    inner: int
    """Inputs of one step of its loop; each warp adds its share of them."""
    splits: int
    """Programs that share the inputs."""
    stages: int
    """Steps of the loop that are loaded at once."""
    warps: int = 4

    def steps(self, inputs: int) -> int:
        """Steps of one program's loop."""
        return ceil(ceil(inputs / self.inner) / self.splits)


Product = tuple[int, int, bool]
"""Outputs, inputs, gated: then outputs are pairs."""
TUNED: dict[Product, Tiles] = {
    (6144, 2048, False): Tiles(16, 256, 1, 3, 2),
    (2048, 2048, False): Tiles(16, 256, 1, 9, 4),
    (5632, 2048, True): Tiles(16, 256, 1, 3, 2),
    (2048, 5632, False): Tiles(16, 256, 1, 8, 4),
    (50257, 2048, False): Tiles(32, 512, 1, 3, 4),
    (3072, 1024, False): Tiles(16, 256, 1, 5, 4),
    (1024, 1024, False): Tiles(16, 256, 1, 5, 4),
    (2816, 1024, True): Tiles(32, 256, 1, 3, 4),
    (1024, 2816, False): Tiles(16, 256, 1, 8, 4),
    (50257, 1024, False): Tiles(64, 256, 1, 3, 4),
}
"""What `benchmarks.decoding --only kernels` found best on an H200; the rule is for all others."""


class AttentionTiles(NamedTuple):
    block: int
    """Tokens of one step of the loop."""
    stages: int
    warps: int = 4
    splits: int = 1
    """Programs that share the tokens of one head, at least."""


ATTENTION = AttentionTiles(32, 6, 2)


class Prepared(NamedTuple):
    """What the kernel before has done of a product's norm."""

    scaled: Tensor
    """The product's input times the norm's gain."""
    sums: Tensor
    """[blocks, 16]: of squares of the input, of each row in each block of columns; fp32."""


def tiles_for(outputs: int, inputs: int, gated: bool = False) -> Tiles:
    return TUNED.get((outputs, inputs, gated)) or default_tiles(outputs, inputs, gated)


def default_tiles(outputs: int, inputs: int, gated: bool = False) -> Tiles:
    """As few splits as fill the processors, as each costs a round of waiting; then as wide tiles, as each program reads
    the rows again."""
    widths = (32, 16) if outputs < 32 * 1024 else (64,)
    read_s = 2 * outputs * (2 if gated else 1) * inputs / READ_BYTES_PER_S
    most_inputs = max(0.6 * read_s, SHORT_S) / ADD_S
    fitting = (
        (columns, splits)
        for splits in (1, 2, 4, MOST_SPLITS)
        for columns in widths
        if inputs / splits <= most_inputs and ceil(outputs / columns) * splits >= FULL * PROCESSORS
    )
    columns, splits = next(fitting, (16, MOST_SPLITS))
    inner = 256
    splits = min(splits, ceil(inputs / inner))
    return with_stages(Tiles(columns, inner, splits, 0), inputs, gated)


def with_stages(tiles: Tiles, inputs: int, gated: bool) -> Tiles:
    """One stage more than tiles of weights that fill the bytes under way, or than steps that there are."""
    tile_bytes = tiles.columns * (2 if gated else 1) * tiles.inner * 2
    return tiles._replace(stages=min(max(3, min(8, 1 + PIPELINE_BYTES // tile_bytes)), 1 + tiles.steps(inputs)))


def attention_splits(rows: int, kv_heads: int, room: int) -> int:
    """Programs that share the tokens of one head: more than one only where processors would be idle."""
    splits = 1
    while rows * kv_heads * splits < FULL * PROCESSORS and 2 * splits * 128 <= room:
        splits *= 2
    return splits


def supports(layers: Iterable[Layer]) -> bool:
    """Are these layers of the sizes and types that the kernels are written for?"""
    return all(_supported(*each) for each in layers)


def _supported(weights: FusedLayer, settings: LayerSettings) -> bool:
    matrices = weights.qkv, weights.out, weights.gate_up, weights.down
    return (
        settings.activation == "silu"
        and settings.heads // settings.kv_heads <= MOST_ROWS
        and settings.head_dim % 16 == 0
        and settings.head_dim <= 256
        and (weights.query_norm is None) == (weights.key_norm is None)
        and all(each.dtype == weights.norm.dtype and each.is_contiguous() for each in matrices)
        and all(each.shape[1] % 16 == 0 for each in matrices)  # so that rows begin where wide loads may
    )


def kernels_for(
    device: torch.device, layers: Iterable[Layer], *, early: bool | None = None, ahead: bool = AHEAD
) -> DecodeKernels | None:
    """`early` and `ahead`: as of `DecodeKernels`; early unless said where layers are small. None where they cannot run:
    no GPU with such tensor cores, no Triton, or one that does not load, layers of other types or sizes, or kernels that
    have failed before."""
    if device.type != "cuda" or torch.version.hip is not None or failures or find_spec("triton") is None:
        return None
    known = list(layers)
    major, _ = torch.cuda.get_device_capability(device)
    if major < 8 or not known or known[0][0].norm.dtype not in SUPPORTED or not supports(known):
        return None
    if early is None:
        early = max(sum(each.nbytes for each in weights if each is not None) for weights, _ in known) <= EARLY_BYTES
    try:
        return DecodeKernels(device, early=early and major >= 9, ahead=ahead)
    except Exception as error:  # of whatever kind a package has that is too old, or lacks a part
        warn_unused(f"{type(error).__name__}: {error}")
        return None


class DecodeKernels:
    """Launches the kernels; those of one object run one after another, as they share a scratch tensor."""

    def __init__(self, device: torch.device, *, early: bool = False, ahead: bool = AHEAD) -> None:
        """`early`: a kernel starts before the one before it has ended, and has some of its weights brought to the cache
        meanwhile. `ahead`: as AHEAD."""
        from triton import language  # need not be there

        from skippipe.inference import triton_kernels

        self._product, self._attention = triton_kernels.product, triton_kernels.attention
        # made once: graphs write where they are
        self._scratch = torch.empty(SCRATCH, dtype=torch.float32, device=device)
        self._arrivals = torch.zeros(ARRIVALS, dtype=torch.int32, device=device)
        # the interpreter's products take bf16 for whole numbers
        self._squares = language.bfloat16 if device.type == "cuda" else language.float32
        self._early, self._ahead = early, ahead
        self._options = {"launch_pdl": True} if early else {}

    def layer(
        self,
        hidden: Tensor,
        weights: FusedLayer,
        settings: LayerSettings,
        stores: tuple[Tensor, Tensor],
        slots: Tensor,
        positions: Tensor,
        rotations: tuple[Tensor, Tensor],
        window: int | None,
        *,
        prepared: Prepared | None = None,
        following: Tensor | None = None,
    ) -> tuple[Tensor, Prepared | None]:
        """As `layer_step`, but with the rotations of all positions, [1, positions, head size]; and with what the layer
        before has `prepared`. Gives also what is prepared, if `ahead`, for the next layer, whose first norm has the
        gain `following`."""
        epsilon = settings.epsilon
        qkv = self.product(
            hidden, weights.qkv, gain=weights.norm, bias=weights.qkv_bias, epsilon=epsilon, prepared=prepared
        )
        norms = weights.query_norm, weights.key_norm
        attended = self.attend(qkv, settings, norms, stores, slots, positions, rotations, window)
        hidden, ready = self._with_residual(attended, weights.out, weights.out_bias, hidden, weights.second_norm)
        inner = self.product(
            hidden, weights.gate_up, gain=weights.second_norm, bias=weights.gate_up_bias, gated=True, epsilon=epsilon,
            prepared=ready,
        )  # fmt: skip
        return self._with_residual(inner, weights.down, weights.down_bias, hidden, following)

    def _with_residual(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, following: Tensor | None
    ) -> tuple[Tensor, Prepared | None]:
        if not self._ahead or following is None:
            return self.product(x, weight, bias=bias, residual=residual), None
        ready = self.room_for(x, weight)
        return self.product(x, weight, bias=bias, residual=residual, following=following, prepare=ready), ready

    def room_for(self, x: Tensor, weight: Tensor, tiles: Tiles | None = None) -> Prepared:
        """Room for what a product of x prepares."""
        tiles = tiles or tiles_for(*weight.shape)
        blocks = ceil(len(weight) / tiles.columns)
        sums = torch.empty(blocks, MOST_ROWS, dtype=torch.float32, device=x.device)
        return Prepared(torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device), sums)

    def product(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        gain: Tensor | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        gated: bool = False,
        epsilon: float = 0.0,
        dtype: torch.dtype | None = None,
        tiles: Tiles | None = None,
        prepared: Prepared | None = None,
        following: Tensor | None = None,
        prepare: Prepared | None = None,
    ) -> Tensor:
        """x [rows, inputs] by weight [outputs, inputs]; normalized before, if there is a gain. The result is rounded to
        the type of x, and of `dtype`. `prepared`: of x and this gain. `prepare`: filled for a norm with the gain
        `following`."""
        rows, inputs = x.shape
        x = x if prepared is None else prepared.scaled
        given = 0 if prepared is None else len(prepared.sums)
        assert prepared is None or (gain is not None and x.shape == (rows, inputs))
        assert prepare is None or (following is not None and dtype is None)
        outputs = len(weight) // 2 if gated else len(weight)
        tiles = tiles or tiles_for(outputs, inputs, gated)
        assert rows <= MOST_ROWS and x.is_contiguous()
        assert weight.shape[1] == inputs and weight.is_contiguous()
        assert weight.numel() < 2**31, "places in a matrix are numbers of 32 bits"
        blocks = ceil(outputs / tiles.columns)
        assert prepare is None or len(prepare.sums) == blocks
        if tiles.splits > 1:
            assert blocks <= ARRIVALS and blocks * tiles.splits * 16 * (2 * tiles.columns + 1) <= SCRATCH
        out = torch.empty(rows, outputs, dtype=dtype or x.dtype, device=x.device)
        self._product[blocks, tiles.splits](
            x, weight, x if gain is None else gain, x if bias is None else bias, x if residual is None else residual,
            self._scratch if prepared is None else prepared.sums, out, out if prepare is None else prepare.scaled,
            self._scratch if prepare is None else prepare.sums, x if following is None else following,
            self._scratch, self._arrivals, rows, epsilon,
            AHEAD=prepare is not None, GIVEN=given, GIVEN_SIZE=1 << max(given - 1, 0).bit_length(),
            OUTPUTS=outputs, INPUTS=inputs, NORM=gain is not None, GATED=gated, BIAS=bias is not None,
            RESIDUAL=residual is not None, COLUMNS=tiles.columns, INNER=tiles.inner, SLICES=tiles.warps,
            SQUARES=self._squares, SPLITS=tiles.splits, STEPS=tiles.steps(inputs), STAGES=tiles.stages,
            FETCHED=fetched_lines(tiles, inputs, gated), EARLY=self._early,
            num_warps=tiles.warps, **self._options,
        )  # fmt: skip
        return out

    def attend(
        self,
        qkv: Tensor,
        settings: LayerSettings,
        norms: tuple[Tensor | None, Tensor | None],
        stores: tuple[Tensor, Tensor],
        slots: Tensor,
        positions: Tensor,
        rotations: tuple[Tensor, Tensor],
        window: int | None,
        *,
        tiles: AttentionTiles | None = None,
        splits: int | None = None,
    ) -> Tensor:
        """Attention of the tokens of all rows, [rows, heads · head size]; their keys and values are stored."""
        tiles, rows, room = tiles or ATTENTION, len(qkv), stores[0].shape[2]
        heads, kv_heads, dim = settings.heads, settings.kv_heads, settings.head_dim
        splits = splits or max(tiles.splits, attention_splits(rows, kv_heads, room))
        given = qkv, *stores, *rotations
        assert all(each.is_contiguous() and each.dtype == qkv.dtype for each in given) and rotations[0].shape[-1] == dim
        width = 1 << (dim - 1).bit_length()
        if splits > 1:
            assert rows * kv_heads <= ARRIVALS and rows * kv_heads * splits * 16 * (width + 2) <= SCRATCH
        query_norm, key_norm = norms
        out = torch.empty(rows, heads * dim, dtype=qkv.dtype, device=qkv.device)
        self._attention[rows, kv_heads, splits](
            qkv, qkv if query_norm is None else query_norm, qkv if key_norm is None else key_norm, *rotations, *stores,
            slots, positions, out, self._scratch, self._arrivals, room, settings.scaling, settings.epsilon,
            HEADS=heads, KV_HEADS=kv_heads, DIM=dim, WIDTH=width, WINDOW=window or 0, HEAD_NORM=query_norm is not None,
            BLOCK=tiles.block, SPLITS=splits, STAGES=tiles.stages, EARLY=self._early,
            num_warps=tiles.warps, **self._options,
        )  # fmt: skip
        return out


def fetched_lines(tiles: Tiles, inputs: int, gated: bool) -> int:
    """Lines of each of its rows of weights that a program fetches early: a power of two, as ranges of Triton are."""
    most = min(FETCHED_LINES // (tiles.columns * (2 if gated else 1)), tiles.steps(inputs) * tiles.inner // LINE)
    return 1 << max(most, 1).bit_length() - 1


def agree(found: Tensor, expected: Tensor, before: Tensor | None = None) -> bool:
    """Do two results of a layer differ by rounding alone? `before`: the residual that both contain."""
    change = expected if before is None else expected - before
    apart = (found - expected).float().norm()
    return bool(apart <= 0.05 * change.float().norm() + 0.01 * expected.float().norm())  # False for NaN


def warn_unused(reason: str) -> None:
    """Kernels have failed; from now on there are none."""
    failures.append(reason)
    warnings.warn(
        f"decoding runs without its Triton kernels, and slower: {' '.join(reason.split())[:200]}", stacklevel=3
    )
