"""Codecs of few bits: tiles of values are rotated, and a rotated tile is rounded to few levels of one scale.

Consecutive values, TILE of them or as many as the codec says, are a tile x, the last one filled up with zeros. It
becomes y = HDx, where H is the Hadamard matrix with the entries (−1)^(bits that i and j share), and D changes signs as
the Rudin-Shapiro sequence does: −1 where a number has an odd count of neighbouring ones. So an outlier is spread over
the whole tile, and so is what is constant in it, and y is nearly Gaussian whatever x was. H and D are their own
inverses, but for the factor TILE.

Of each coefficient of y a codec keeps a code of few bits, which stands for a whole number, its level. With the tile's
scale s what comes back is D(H · levels) · s. The sums are whole numbers, exact in fp32, in any order; so the same bytes
give the same bits on every device.

All codes come first, tile by tile, then all scales, as bf16: two bytes for 128 values, and a level is not much finer
than its 8 bits. With n codes a byte, byte k of a tile holds those of coefficients k, k + TILE/n, …, the first one in
the lowest bits. Codes of six bits do not fill bytes: their lower four bits come first, then their upper two. A tile
with NaN or an infinity in it, or with sums beyond fp32 (magnitudes of 10³⁶), gets the scale NaN and comes back as NaN
throughout.
"""

from __future__ import annotations

from abc import abstractmethod
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from skippipe.codecs.interface import SMALLEST_SCALE, BlockCodec, bytes_of, divided, kernels_for, words_of

if TYPE_CHECKING:
    from torch import Tensor

TILE = 128  # values that are rotated together and share one scale
SCALE_BYTES = 2
CHUNK_TILES = 2**12  # that a CPU works on at a time, to stay in its cache


class HadamardCodec(BlockCodec):
    """A codec that rounds the coefficients of rotated tiles."""

    block: ClassVar[int] = TILE
    """Values of a tile: a power of two."""
    scale_bytes = SCALE_BYTES
    filled_up = True

    @abstractmethod
    def quantized(self, rotated: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Codes as uint8 [tile, tiles] and scales as fp32 [tiles], of which bf16 holds all digits, for rotated tiles
        [tile, tiles], which may be overwritten. `first` is the number of the first tile in its tensor. Where a
        coefficient is not finite, its code does not matter."""

    @abstractmethod
    def levels(self, codes: Tensor) -> Tensor:
        """What codes stand for, as int8 or int16, whose sums over a tile fit into int16."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits of the parts of a code that are packed one after another."""
        return (4, 2) if self.bits == 6 else (self.bits,)

    def kernels(self, tensor: Tensor, values: int) -> ModuleType | None:
        return kernels_for(tensor, values) if self.block == TILE else None

    def decode_compiled(self, kernels: ModuleType, codes: Any, scales: Any, values: Any) -> None:
        kernels.decode_levels(codes, scales.view("uint16"), self.bits, values)

    def encode_blocks(self, blocks: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        import torch

        if not _in_chunks(blocks):
            return self._encode_tiles(blocks, first)
        size = CHUNK_TILES * TILE // self.block
        starts = range(0, len(blocks), size)
        made = [self._encode_tiles(blocks[start : start + size], first + start) for start in starts]
        codes, scales = zip(*made, strict=True)
        return torch.cat(codes), torch.cat(scales)

    def decode_blocks(self, codes: Tensor, scales: Tensor) -> Tensor:
        import torch

        if not _in_chunks(codes):
            return self._decode_tiles(codes, scales)
        flat, size = torch.empty(len(codes), self.block), CHUNK_TILES * TILE // self.block
        for start in range(0, len(codes), size):
            here = slice(start, start + size)
            flat[here] = self._decode_tiles(codes[here], scales[here])
        return flat

    def _encode_tiles(self, tiles: Tensor, first: int) -> tuple[Tensor, Tensor]:
        import torch

        codes, scale = self.quantized(_rotated(tiles), first)
        return self._packed(codes).t(), bytes_of(scale.view(torch.int32) >> 16, SCALE_BYTES)

    def _decode_tiles(self, codes: Tensor, scales: Tensor) -> Tensor:
        import torch

        levels = self.levels(self._unpacked(codes.t()))
        return _rotated_back(levels) * (words_of(scales) << 16).view(torch.float32).unsqueeze(1)

    def _packed(self, codes: Tensor) -> Tensor:
        """Codes [tile, tiles] as the bytes of each tile, in columns."""
        import torch

        parts, shift = [], 0
        for width in self.widths:
            planes = ((codes >> shift) & (2**width - 1)).view(8 // width, -1, codes.shape[1])
            together = planes[0]
            for number in range(1, len(planes)):
                together = together + (planes[number] << number * width)
            parts.append(together)
            shift += width
        return torch.cat(parts)

    def _unpacked(self, columns: Tensor) -> Tensor:
        """Codes [tile, tiles] from the bytes of each tile, in columns."""
        import torch

        codes: Tensor | None = None
        shift = 0
        parts = torch.split(columns, [self.block * width // 8 for width in self.widths])
        for width, together in zip(self.widths, parts, strict=True):
            places = torch.arange(0, 8, width, dtype=torch.uint8, device=columns.device).view(-1, 1, 1)
            part: Tensor = ((together >> places) & (2**width - 1)).reshape(self.block, -1)
            codes = part if codes is None else codes + (part << shift)
            shift += width
        assert codes is not None
        return codes


def _in_chunks(tensor: Tensor) -> bool:
    """Whether tiles are worked on a few at a time: on a CPU, to stay in its cache."""
    import torch

    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def sound_scales(scale: Tensor) -> Tensor:
    """Scales as bf16 can hold them, in fp32: NaN for what is not finite, and 0 where fp32 runs out of digits."""
    import torch

    bits = scale.view(torch.int32)  # no cast to bf16 and back: compiled for a GPU, that may be left out
    nearest = ((bits + (0x7FFF + ((bits >> 16) & 1))) & -0x10000).view(torch.float32)
    finite = scale.isfinite() & nearest.isfinite()
    return nearest.where(nearest >= SMALLEST_SCALE, 0.0).where(finite, torch.nan)


def inverse(scale: Tensor, factor: float) -> Tensor:
    """1 / (scale · factor), and 0 where the scale is 0 or NaN."""
    return divided(1.0, scale * factor).where(scale > 0, 0.0)


def _rotated(tiles: Tensor) -> Tensor:
    """HD of each row, as columns, in fp32."""
    import torch

    tile = tiles.shape[1]
    if tiles.device.type == "cpu":
        return _butterflies((tiles * _signs(tile, tiles).float()).t().contiguous())
    with torch.autocast(tiles.device.type, enabled=False):
        return torch.mm(tiles.float(), _matrix(tile, tiles).t()).t()


def _rotated_back(levels: Tensor) -> Tensor:
    """DH of each column, as rows of whole numbers."""
    import torch

    tile = len(levels)
    if levels.device.type == "cpu":
        signs = _signs(tile, levels).to(torch.int16)
        return (_butterflies(levels.to(torch.int16)) * signs.unsqueeze(1)).t().contiguous()
    with torch.autocast(levels.device.type, enabled=False):
        return torch.mm(levels.float().t(), _matrix(tile, levels))


def _butterflies(columns: Tensor) -> Tensor:
    """H of each column, which may be overwritten; which sums are taken first is fixed, so all CPUs have the same
    bits."""
    import torch

    result, half = torch.empty_like(columns), len(columns) // 2
    for _ in range(half.bit_length()):  # sums and differences of neighbours go to the two halves: in order in the end
        torch.add(columns[0::2], columns[1::2], out=result[:half])
        torch.sub(columns[0::2], columns[1::2], out=result[half:])
        columns, result = result, columns
    return columns


def _signs(tile: int, like: Tensor) -> Tensor:
    """The diagonal of D."""
    import torch

    index = torch.arange(tile, dtype=torch.int32, device=like.device)
    return _sign_of_parity(index & (index >> 1))


def _matrix(tile: int, like: Tensor) -> Tensor:
    """HD, computed on the device: a copy from the host could not be part of a CUDA graph."""
    import torch

    index = torch.arange(tile, dtype=torch.int32, device=like.device)
    return _sign_of_parity((index.unsqueeze(1) & index) ^ (index & (index >> 1))).float()


def _sign_of_parity(numbers: Tensor) -> Tensor:
    """−1 where the number of ones among 8 bits is odd, else 1."""
    for shift in (4, 2, 1):
        numbers = numbers ^ (numbers >> shift)
    return 1 - 2 * (numbers & 1)
