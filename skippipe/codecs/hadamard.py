"""Codecs of few bits: tiles of values are rotated, and a rotated tile is rounded to few levels of one scale.

TILE consecutive values are a tile x, the last one filled up with zeros. It becomes y = HDx, where H is the Hadamard
matrix with the entries (−1)^(bits that i and j share), and D changes signs as the Rudin-Shapiro sequence does: −1 where
a number has an odd count of neighbouring ones. So an outlier is spread over the whole tile, and so is what is constant
in it, and y is nearly Gaussian whatever x was. H and D are their own inverses, but for the factor TILE.

Of each coefficient of y a codec keeps a code of few bits, which stands for a whole number, its level. With the tile's
scale s what comes back is D(H · levels) · s. The sums are whole numbers, exact in fp32, in any order; so the same bytes
give the same bits on every device.

All codes come first, tile by tile, then all scales, as bf16: two bytes for 128 values, and a level is not much finer
than its 8 bits. With n codes a byte, byte k of a tile holds those of coefficients k, k + TILE/n, …, the first one in
the lowest bits. A tile with NaN or an infinity in it, or with sums beyond fp32 (magnitudes of 10³⁶), gets the scale NaN
and comes back as NaN throughout.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from skippipe.codecs.interface import SMALLEST_SCALE, Codec

if TYPE_CHECKING:
    from torch import Tensor

TILE = 128  # values that are rotated together and share one scale
SCALE_BYTES = 2
CHUNK_TILES = 2**12  # that a CPU works on at a time, to stay in its cache


class HadamardCodec(Codec):
    """A codec that rounds the coefficients of rotated tiles."""

    bits: ClassVar[int]
    """Of a code."""

    @abstractmethod
    def quantized(self, rotated: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Codes as uint8 [TILE, tiles] and scales as fp32 [tiles], of which bf16 holds all digits, for rotated tiles
        [TILE, tiles], which may be overwritten. `first` is the number of the first tile in its tensor. Where a
        coefficient is not finite, its code does not matter."""

    @abstractmethod
    def levels(self, codes: Tensor) -> Tensor:
        """What codes stand for, as int8 or int16, whose sums over a tile fit into int16."""

    def expected_bytes(self, values: int) -> int:
        return -(-values // TILE) * (TILE * self.bits // 8 + SCALE_BYTES)

    def encode(self, flat: Tensor) -> Tensor:
        import torch

        tiles, row = -(-flat.numel() // TILE), TILE * self.bits // 8
        raw = torch.empty(self.expected_bytes(flat.numel()), dtype=torch.uint8, device=flat.device)
        packed, scales = raw[: tiles * row].view(tiles, row), raw[tiles * row :].view(torch.bfloat16)
        for first, count in _chunks(tiles, flat):
            part = flat[first * TILE : (first + count) * TILE]
            if part.numel() < count * TILE:
                part = torch.nn.functional.pad(part, (0, count * TILE - part.numel()))
            codes, scale = self.quantized(_rotated(part.view(count, TILE)), first)
            planes = codes.view(8 // self.bits, row, count)
            together = planes[0]
            for number in range(1, len(planes)):
                together = together + (planes[number] << number * self.bits)
            packed[first : first + count].copy_(together.t())
            scales[first : first + count].copy_(scale)
        return raw

    def decode(self, raw: Tensor, values: int) -> Tensor:
        import torch

        tiles, row = -(-values // TILE), TILE * self.bits // 8
        packed, scales = raw[: tiles * row].view(tiles, row), raw[tiles * row :].view(torch.bfloat16)
        flat = torch.empty(tiles, TILE, device=raw.device)
        for first, count in _chunks(tiles, raw):
            together = packed[first : first + count].t().contiguous()
            planes = [(together >> place) & (2**self.bits - 1) for place in range(0, 8, self.bits)]
            rotated_back = _rotated_back(self.levels(torch.cat(planes)))
            torch.mul(rotated_back, scales[first : first + count].float().unsqueeze(1), out=flat[first : first + count])
        return flat.view(-1)[:values]


def sound_scales(scale: Tensor) -> Tensor:
    """Scales as bf16 can hold them, in fp32: NaN for what is not finite, and 0 where fp32 runs out of digits."""
    import torch

    scale = scale.to(torch.bfloat16).float()
    return scale.where(scale.isfinite(), torch.nan).where(~(scale < SMALLEST_SCALE), 0.0)


def inverse(scale: Tensor, factor: float) -> Tensor:
    """1 / (scale · factor), and 0 where the scale is 0 or NaN."""
    return (1 / (scale * factor)).where(scale > 0, 0.0)


def _chunks(tiles: int, where: Tensor) -> list[tuple[int, int]]:
    """(first tile, number of tiles): all at once but on a CPU."""
    size = CHUNK_TILES if where.device.type == "cpu" else tiles
    return [(first, min(size, tiles - first)) for first in range(0, tiles, size)]


def _rotated(tiles: Tensor) -> Tensor:
    """HD of each row, as columns, in fp32."""
    import torch

    if tiles.device.type == "cpu":
        return _butterflies((tiles * _signs(tiles).float()).t().contiguous())
    with torch.autocast(tiles.device.type, enabled=False):
        return torch.mm(_matrix(tiles), tiles.float().t())


def _rotated_back(levels: Tensor) -> Tensor:
    """DH of each column, as rows of whole numbers."""
    import torch

    if levels.device.type == "cpu":
        return (_butterflies(levels.to(torch.int16)) * _signs(levels).to(torch.int16).unsqueeze(1)).t().contiguous()
    with torch.autocast(levels.device.type, enabled=False):
        return torch.mm(levels.float().t(), _matrix(levels))


def _butterflies(columns: Tensor) -> Tensor:
    """H of each column, which may be overwritten; which sums are taken first is fixed, so all CPUs have the same
    bits."""
    import torch

    result = torch.empty_like(columns)
    for _ in range(7):  # sums and differences of neighbours go to the two halves, so places are in order in the end
        torch.add(columns[0::2], columns[1::2], out=result[: TILE // 2])
        torch.sub(columns[0::2], columns[1::2], out=result[TILE // 2 :])
        columns, result = result, columns
    return columns


def _signs(like: Tensor) -> Tensor:
    """The diagonal of D."""
    import torch

    index = torch.arange(TILE, dtype=torch.int32, device=like.device)
    return _sign_of_parity(index & (index >> 1))


def _matrix(like: Tensor) -> Tensor:
    """HD, computed on the device: a copy from the host could not be part of a CUDA graph."""
    import torch

    index = torch.arange(TILE, dtype=torch.int32, device=like.device)
    return _sign_of_parity((index.unsqueeze(1) & index) ^ (index & (index >> 1))).float()


def _sign_of_parity(numbers: Tensor) -> Tensor:
    """−1 where the number of ones among 8 bits is odd, else 1."""
    for shift in (4, 2, 1):
        numbers = numbers ^ (numbers >> shift)
    return 1 - 2 * (numbers & 1)
