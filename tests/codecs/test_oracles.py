"""Codecs of few bits beside others that are written from docs/formats.md in plain numpy; and what the page promises."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from skippipe.codecs import CODECS, EncodedTensor, decode, encode, gradient_codec, interface
from skippipe.codecs.hadamard import HadamardCodec, _butterflies, _matrix, _signs
from skippipe.codecs.int4 import _noise
from skippipe.codecs.interface import CastCodec
from tests.helpers.executors import noise

torch.set_num_threads(1)
TILE = 128
F32 = np.float32
Floats = npt.NDArray[np.float32]
ROTATED = [
    "int4",
    "int4-stochastic",
    "int2",
    "int6",
    "int6-stochastic",
    "int4-tile32",
    "int4-tile32-stochastic",
    "int4-rank8",  # without factors, as tensors of these tests are
    "int4-rank8-stochastic",
]
FEW_BITS = ["fp8", "fp8-e5m2", *ROTATED]
TRACED = ["int4-stochastic"]  # the others in slow tests


def tile_of(codec: str) -> int:
    return 32 if "tile32" in codec else 128


def bits_of(codec: str) -> int:
    return int(codec[3])


# As the page says


def rotation() -> npt.NDArray[np.int64]:
    """HD."""
    span = range(TILE)
    return np.array([[(-1) ** ((k & i).bit_count() + (i & i >> 1).bit_count()) for i in span] for k in span])


HD = rotation()
"""Its first rows and columns are those of smaller tiles."""


def bf16(value: F32) -> F32:
    """The nearest one, ties to even."""
    bits = int(F32(value).view(np.uint32))
    return np.uint32((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).view(F32)


def fp8_values(mantissa_bits: int, bias: int) -> list[float]:
    """By byte, of those from 0 on that are numbers."""
    exponents = 2 ** (7 - mantissa_bits)
    found = [
        (e > 0) * 2.0 ** (e - bias) + m / 2**mantissa_bits * 2.0 ** (max(e, 1) - bias)
        for e in range(exponents)
        for m in range(2**mantissa_bits)
    ]
    return found[:-1] if mantissa_bits == 3 else found[:-4]  # the last one is NaN; infinity and three NaN


def fp8_oracle(tensor: Floats, mantissa_bits: int, bias: int) -> bytes:
    grid = fp8_values(mantissa_bits, bias)
    values, scales = [], []
    for start in range(0, len(tensor), TILE):
        block = tensor[start : start + TILE].astype(np.float64)
        b = 1
        while np.abs(block).max() / 2.0 ** (b - 127) > grid[-1]:
            b += 1
        scales.append(b)
        scaled = block / 2.0 ** (b - 127)
        distance = np.abs(np.abs(scaled)[:, None] - grid)
        nearest = distance == distance.min(1, keepdims=True)
        even = nearest & (nearest.sum(1, keepdims=True) == 1) | nearest & (np.arange(len(grid)) % 2 == 0)
        values += (even.argmax(1) + 128 * np.signbit(scaled)).tolist()
    return bytes(values + scales)


def mixed(number: int) -> int:
    number = (number ^ number >> 16) * 0x21F0AAAD % 2**32
    number = (number ^ number >> 15) * 0x735A2D97 % 2**32
    return number ^ number >> 15


def packed_oracle(codes: npt.NDArray[np.float32], bits: int) -> list[int]:
    """A tile; of six bits the lower four, then the upper two."""
    found, shift = [], 0
    for width in (4, 2) if bits == 6 else (bits,):
        row = len(codes) * width // 8
        part = [(int(code) >> shift) % 2**width for code in codes]
        found += [sum(part[at + row * n] << n * width for n in range(8 // width)) for at in range(row)]
        shift += width
    return found


def rotated_oracle(tensor: Floats, codec: str) -> bytes:
    """Of values whose sums over a tile are exact in fp32."""
    size, bits = tile_of(codec), bits_of(codec)
    tiles = np.pad(tensor, (0, -len(tensor) % size)).reshape(-1, size)
    packed, scales = [], []
    for number, tile in enumerate(tiles):
        y = (HD[:size, :size] @ tile.astype(np.float64)).astype(F32)
        largest = np.abs(y).max()
        if codec == "int2":
            squares = ((y * (F32(1) / largest)) if largest else y) ** 2
            while len(squares) > 1:
                squares = squares[: len(squares) // 2] + squares[len(squares) // 2 :]
            scale = bf16(largest * np.sqrt(squares[0]) * F32(0.151 / TILE**1.5))
            inverse = F32(1) / (scale * F32(TILE * 6.5)) if scale else F32(0)
            codes = np.clip(np.floor(y * inverse + F32(2)), 0, 3)
        else:
            scale = bf16(largest * F32((1 + 2**-8) / ((2**bits - 1) * size)))
            inverse = F32(1) / (scale * F32(2 * size)) if scale else F32(0)
            steps = y * inverse + F32(2 ** (bits - 1))
            if codec.endswith("stochastic"):
                key = mixed(int(scale.view(np.uint32)) ^ mixed(number + size))
                high = [(z + 2 * z * z) % 2**32 >> 16 for z in (mixed(i) ^ key for i in range(size))]
                steps += np.array([h - 2**16 * (h >= 2**15) for h in high], F32) * F32(2**-16)
            codes = np.floor(steps)
        packed += packed_oracle(codes, bits)
        scales.append(scale)
    return bytes(packed) + (np.array(scales, F32).view(np.uint32) >> 16).astype("<u2").tobytes()


def rotated_back(data: bytes, values: int, codec: str) -> Floats:
    size, bits = tile_of(codec), bits_of(codec)
    levels = [-10, -3, 3, 10] if codec == "int2" else list(range(1 - 2**bits, 2**bits, 2))
    tiles, row = -(-values // size), size * bits // 8
    found = []
    for number in range(tiles):
        part = data[number * row : (number + 1) * row]
        codes, shift = [0] * size, 0
        for width in (4, 2) if bits == 6 else (bits,):
            few, part = part[: size * width // 8], part[size * width // 8 :]
            above = [byte >> n * width & 2**width - 1 for n in range(8 // width) for byte in few]
            codes = [code + (more << shift) for code, more in zip(codes, above, strict=True)]
            shift += width
        at = tiles * row + 2 * number
        scale = np.uint32(int.from_bytes(data[at : at + 2], "little") << 16).view(F32)
        found.append((HD[:size, :size].T @ np.array([levels[code] for code in codes])).astype(F32) * scale)
    return np.concatenate(found)[:values]


def oracle(tensor: Floats, codec: str) -> bytes:
    if codec.startswith("fp8"):
        return fp8_oracle(tensor, *((3, 7) if codec == "fp8" else (2, 15)))
    return rotated_oracle(tensor, codec)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Whole numbers times a power of two, so that sums are exact: many, few or none of them zero."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    size = draw(st.integers(1, 300))
    whole = torch.randint(-4000, 4001, (size,), generator=generator)
    kept = torch.rand(size, generator=generator) < draw(st.sampled_from([0.0, 0.05, 1.0]))
    return (whole * kept).float() * 2.0 ** draw(st.integers(-100, 90))


@pytest.mark.parametrize("codec", FEW_BITS)
@given(tensors())
@example(torch.ones(130))
@example(torch.tensor([-1.75, 1.8, 1.5]))
def test_bytes_and_values_are_those_of_the_page(codec: str, tensor: torch.Tensor) -> None:
    sent = encode(tensor, codec)
    assert bytes(sent.data) == oracle(tensor.numpy(), codec)
    if codec in ROTATED:
        np.testing.assert_array_equal(decode(sent).numpy(), rotated_back(bytes(sent.data), len(tensor), codec))


@pytest.mark.parametrize(("codec", "mantissa_bits", "bias"), [("fp8", 3, 7), ("fp8-e5m2", 2, 15)])
def test_every_byte_of_fp8_comes_back_as_its_value(codec: str, mantissa_bits: int, bias: int) -> None:
    grid = fp8_values(mantissa_bits, bias)
    found = decode(EncodedTensor(codec, (len(grid),), bytes([*range(len(grid)), 124]))).tolist()
    assert found == [value / 8 for value in grid]


# What the page promises


def ordinary(seed: int, *shape: int) -> torch.Tensor:
    """Of a few magnitudes, with outliers."""
    values = noise(seed, *shape) * torch.logspace(-2, 2, shape[-1])
    values[..., ::37] *= 30
    return values


def in_tiles(tensor: torch.Tensor, size: int) -> torch.Tensor:
    flat = tensor.reshape(-1).double()
    return torch.nn.functional.pad(flat, (0, -len(flat) % size)).view(-1, size)


@pytest.mark.parametrize("shape", [(1,), (127,), (128,), (2, 3, 129), (40, 1000)])
@pytest.mark.parametrize("codec", FEW_BITS)
def test_errors_stay_within_their_bound(codec: str, shape: tuple[int, ...]) -> None:
    tensor = ordinary(len(shape), *shape)
    size = tile_of(codec)
    tiles, back = in_tiles(tensor, size), in_tiles(decode(encode(tensor, codec)), size)
    if codec.startswith("fp8"):
        relative, least = (1 / 16, 2**-17) if codec == "fp8" else (1 / 8, 2**-31)
        bound = (relative * tiles.abs()).maximum(least * tiles.abs().amax(1, keepdim=True))
        assert bool(((back - tiles).abs() <= bound).all())
        return
    short = torch.arange(tiles.numel()).view(-1, size) >= tensor.numel()  # what comes back there is not looked at
    error = (back - tiles).masked_fill_(short, 0).square().mean(1).sqrt()
    largest = (tiles @ torch.from_numpy(HD[:size, :size].T).double()).abs().amax(1) / math.sqrt(size)
    part = {4: 14, 6: 62}.get(bits_of(codec), 1) / (2 if codec.endswith("stochastic") else 1)
    bound = 0.98 * tiles.square().mean(1).sqrt() if codec == "int2" else largest / part
    assert bool((error <= bound).all())
    if shape[-1] == 1000:
        most = 0.13 if codec == "int2" else 0.014 * (15 / (2 ** bits_of(codec) - 1)) ** 2
        assert error.square().sum() / tiles.square().mean(1).sum() < most * (2.1 if codec.endswith("stochastic") else 1)


def test_int2_takes_away_less_than_all_of_any_tile() -> None:
    """The worst is one large coefficient among nothing; without this, error feedback would not end."""
    worst = torch.from_numpy(HD[5]).float().unsqueeze(0) + 1e-3 * noise(1, 1, TILE)
    left = (decode(encode(worst, "int2")) - worst).norm() / worst.norm()
    assert 0.9 < left < 0.98


def test_stochastic_rounding_is_right_in_the_mean() -> None:
    """Of one tile at many places of a tensor; and the noise of two places is not the same."""
    tile, count = ordinary(3, TILE), 20_000
    back = decode(encode(tile.repeat(count, 1), "int4-stochastic")).double()
    step = 2 * float((torch.from_numpy(HD).double() @ tile.double()).abs().max()) / 15 / math.sqrt(TILE)
    assert (back.mean(0) - tile).abs().max() < 5 * step / 2 / math.sqrt(count)
    nearest = decode(encode(tile, "int4")).double()
    assert (nearest - tile).abs().max() > 10 * (back.mean(0) - tile).abs().max()
    noise = _noise(TILE, torch.full((count,), 3.25), 0) * 2.0**-16
    assert -0.5 <= noise.min() < -0.499 and 0.499 < noise.max() < 0.5
    assert torch.corrcoef(noise).fill_diagonal_(0).abs().max() < 6 / math.sqrt(count)
    beside = torch.corrcoef(torch.stack([noise[:, 1:], noise[:, :-1]]).view(2, -1))[0, 1]
    assert beside.abs() < 6 / math.sqrt(noise.numel())


def test_stochastic_rounding_depends_on_content_alone() -> None:
    """And not on last digits, in which sums of another order differ."""
    tensor = ordinary(4, 2, 500)
    first = bytes(encode(tensor, "int4-stochastic").data)
    torch.manual_seed(1)
    assert bytes(encode(tensor.clone().view(1000), "int4-stochastic").data) == first
    differ = sum(a != b for a, b in zip(bytes(encode(tensor * (1 + 1e-6), "int4-stochastic").data), first, strict=True))
    assert differ < 20
    moved = decode(encode(tensor * 1.01, "int4-stochastic"))
    assert (moved - decode(encode(tensor, "int4-stochastic"))).abs().max() > 1e-3, "noise did not change with content"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("codec", FEW_BITS)
def test_a_block_that_is_not_finite_comes_back_as_nan(codec: str, bad: float) -> None:
    tensor = ordinary(5, 4 * TILE + 3)
    tensor[TILE + 9], tensor[-1] = bad, bad
    back = decode(encode(tensor, codec))
    hurt = torch.zeros(len(tensor), dtype=torch.bool)
    hurt[TILE : TILE + tile_of(codec)], hurt[4 * TILE :] = True, True
    assert torch.equal(back.isnan(), hurt) and bool(back[~hurt].isfinite().all())


@pytest.mark.parametrize("codec", ROTATED)
def test_both_ways_to_rotate_are_one(codec: str) -> None:
    """Butterflies on a CPU, a matrix elsewhere: whole numbers come out alike, so bytes mean the same everywhere."""
    coder = CODECS[codec]
    assert isinstance(coder, HadamardCodec)
    size = coder.block
    codes = torch.randint(0, 2**coder.bits, (size, 50), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    levels = coder.levels(codes)
    matrix = _matrix(size, levels)
    assert np.array_equal(matrix.numpy(), HD[:size, :size])
    by_butterflies = _butterflies(levels.to(torch.int16)).t() * _signs(size, levels)
    assert torch.equal(by_butterflies.float(), torch.mm(levels.float().t(), matrix))


@pytest.mark.parametrize(
    ("codec", "shape"),
    [
        *(pytest.param(codec, (3, 150), marks=() if codec in TRACED else pytest.mark.slow) for codec in CODECS),
        pytest.param("int4-rank8", (1, 128, 130), marks=pytest.mark.slow),
    ],
)
def test_a_codec_can_be_traced_whole_and_gives_the_same_bytes(codec: str, shape: tuple[int, ...]) -> None:
    """No branch on what is in the tensor, so that it can be compiled, and captured in a CUDA graph. What is traced adds
    up in the order of a CPU: the same bits for sums that are rounded."""
    torch.compiler.reset()  # or the function counts as one that is compiled anew too often
    tensor, coder = ordinary(2, *shape), CODECS[codec]

    def there_and_back(given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        raw = coder.encode_tensor(given)
        return raw, coder.decode_tensor(raw, tuple(given.shape)), coder.rounded(given)

    traced = torch.compile(there_and_back, backend="eager", fullgraph=True)
    for one, other in zip(traced(tensor), there_and_back(tensor), strict=True):
        assert torch.equal(one, other)


def activations(seed: int, samples: int, tokens: int, channels: int) -> torch.Tensor:
    """As early in training: nearly the same for all tokens, but for a few directions, and a little of everything."""
    few = noise(seed, samples, tokens, 3) @ noise(seed + 1, 3, channels)
    return 10 * noise(seed + 2, channels) + few + 0.1 * noise(seed + 3, samples, tokens, channels)


def with_factors(data: bytes, shape: tuple[int, int, int]) -> Floats:
    """What comes back, as the page says."""
    samples, rows, columns = shape
    rest = -(-samples * rows * columns // TILE) * 66
    found = rotated_back(data[:rest], samples * rows * columns, "int4").reshape(shape)
    for sample in range(samples):
        part = data[rest + 8 * (rows + columns + 4) * sample :][: 8 * (rows + columns + 4)]
        left = np.frombuffer(part, np.int8, 8 * rows).reshape(8, rows).astype(F32)
        right = np.frombuffer(part, np.int8, 8 * columns, 8 * rows).reshape(8, columns).astype(F32)
        scales = np.frombuffer(part[-32:], "<f4")
        low = np.zeros((rows, columns), F32)
        for k in range(8):
            low += (left[k] * scales[k])[:, None] * right[k]
        found[sample] += low
    return found


@pytest.mark.parametrize("codec", ["int4-rank8", "int4-rank8-stochastic"])
def test_factors_take_what_tokens_have_in_common(codec: str) -> None:
    shape = (2, 128, 131)
    tensor = activations(1, *shape)
    sent = encode(tensor, codec)
    assert sent.nbytes == CODECS[codec].tensor_bytes(shape) == 66 * 262 + 2 * 8 * (128 + 131 + 4)
    back = decode(sent)
    np.testing.assert_array_equal(back.numpy(), with_factors(bytes(sent.data), shape))
    plain = codec.replace("-rank8", "")
    assert (back - tensor).norm() < 0.03 * (decode(encode(tensor, plain)) - tensor).norm()
    alone = decode(encode(tensor[:1], codec))
    assert (back[:1] - alone).norm() < 0.1 * (alone - tensor[:1]).norm(), "a sample depends on the next one"
    for scale in (0.0, 1e-30, 1e30):
        some = tensor * scale
        assert (decode(encode(some, codec)) - some).norm() <= 0.02 * some.norm()
    tensor[1, 3, 5] = math.nan
    assert torch.equal(decode(encode(tensor, codec)).isnan().flatten(1).all(1), torch.tensor([False, True]))
    assert bool(decode(encode(tensor, codec))[0].isfinite().all())


def test_gradients_of_a_hop_have_the_size_of_its_activations() -> None:
    for codec in CODECS:
        back = gradient_codec(codec)
        for shape in ((1000,), (3, 200, 160)):
            assert CODECS[back].tensor_bytes(shape) == CODECS[codec].tensor_bytes(shape)
        assert gradient_codec(back) == back
    assert gradient_codec("int4") == "int4-stochastic"
    assert gradient_codec("int6") == "int6-stochastic"


@pytest.mark.parametrize("codec", [each for each in CODECS if not isinstance(CODECS[each], CastCodec)])
def test_kernels_and_torch_give_the_same_bytes(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where sums are rounded, too; for values that are large, small, or have no digits left, and for any float."""
    coder = CODECS[codec]
    assert interface._kernels() is not None, "without numba this test compares nothing"
    tensors = [ordinary(6, 80, 131).reshape(-1), noise(7, 2**14), torch.zeros(9000)]
    tensors += [tensors[0] * 2.0**power for power in (-147, -133, -120, 110)]
    tensors[0][1000:1600] = 0
    given = [each.to(kind) for each in tensors for kind in (torch.float32, torch.bfloat16, torch.float16)]
    pairs = [(each, step) for each in given for step in (1, 2) if bool(each.isfinite().all())]
    compiled = [coder.encode(each[::step]) for each, step in pairs]
    values = [coder.decode(raw, len(each[::step])) for raw, (each, step) in zip(compiled, pairs, strict=True)]
    anything = torch.randint(256, (coder.expected_bytes(5000),), dtype=torch.uint8, generator=torch.Generator())
    of_anything = coder.decode(anything, 5000)
    monkeypatch.setattr(interface, "_kernels", lambda: None)
    for raw, back, (each, step) in zip(compiled, values, pairs, strict=True):
        assert torch.equal(coder.encode(each[::step]), raw)
        assert torch.equal(coder.decode(raw, len(each[::step])), back)
    torch.testing.assert_close(coder.decode(anything, 5000), of_anything, rtol=0, atol=0, equal_nan=True)
