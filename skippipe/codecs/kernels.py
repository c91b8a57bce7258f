"""Codecs on one core of a CPU, compiled by numba where it is there: the bytes and values of the torch form, sooner.

Kernels encode whole blocks of BLOCK values; of a shorter one at the end the torch form takes care. bf16 comes as its
bits. All arithmetic is fp32 with one rounding for each operation, in the order of the torch form.

What is done to a rotated tile is written in LLVM's own terms, as operations on one vector of its values, which LLVM
cuts into the registers of the processor: in loops over so few values, checks and what is carried between memory and
registers would take as long as the work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from skippipe.jit import kernel

if TYPE_CHECKING:
    from torch import Tensor

Array = NDArray[Any]

BLOCK = 128
SMALLEST_SCALE = np.float32(2.0**-126)
FLOAT, BYTE, SHORT, WORD = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32)
SIGN = 0x80000000
MAGNITUDE = np.uint32(0x7FFFFFFF)
NAN_BITS = np.uint32(0x7FC00000)
ROUNDING = np.float32(
    1.5 * 2**23
)  # added to a float, it leaves the nearest whole number in the lowest bits, ties to even

_SIGNS = np.array([1 - 2 * ((i & i >> 1).bit_count() & 1) for i in range(BLOCK)], np.float32)


def as_array(tensor: Tensor) -> Array:
    """The memory of a tensor, bf16 as its bits; a copy where it is not contiguous, and for fp64 and fp16 as fp32."""
    import torch

    if tensor.dtype == torch.bfloat16:
        return tensor.detach().contiguous().view(torch.int16).numpy().view(np.uint16)
    if tensor.is_floating_point():
        tensor = tensor.to(torch.float32)
    return tensor.detach().contiguous().numpy()


# Operations on a tile as one vector


def _vector(element: ir.Type, values: Any = None) -> Any:
    """The type of a vector of BLOCK elements; with values, a constant."""
    kind = ir.VectorType(element, BLOCK)
    if values is None:
        return kind
    every = values if isinstance(values, list) else [values] * BLOCK
    return ir.Constant(kind, [ir.Constant(element, each) for each in every])


def _memory(context: Any, builder: Any, array_type: Any, array: Any, element: ir.Type, start: Any = None) -> Any:
    """The address of BLOCK elements of an array."""
    data = context.make_array(array_type)(context, builder, array).data
    if start is not None:
        data = builder.gep(data, [start])
    return builder.bitcast(data, _vector(element).as_pointer())


def _load(builder: Any, address: Any) -> Any:
    found = builder.load(address)
    found.align = 1
    return found


def _store(builder: Any, vector: Any, address: Any) -> None:
    builder.store(vector, address).align = 1


def _chosen(builder: Any, one: Any, other: Any, places: list[int]) -> Any:
    mask = ir.Constant(ir.VectorType(WORD, len(places)), [ir.Constant(WORD, place) for place in places])
    return builder.shuffle_vector(one, other, mask)


def _spread(builder: Any, number: Any) -> Any:
    """A vector of one number."""
    first = builder.insert_element(ir.Constant(_vector(number.type), ir.Undefined), number, ir.Constant(WORD, 0))
    return _chosen(builder, first, first, [0] * BLOCK)


def _hadamard(builder: Any, vector: Any, add: Callable[..., Any], sub: Callable[..., Any]) -> Any:
    """H of a tile: sums and differences of neighbours first, then of pairs, and so on."""
    distance = 1
    while distance < BLOCK:
        left = [place for place in range(BLOCK) if not place & distance]
        ones = _chosen(builder, vector, vector, left)
        others = _chosen(builder, vector, vector, [place + distance for place in left])
        at = {place: number for number, place in enumerate([*left, *(place + distance for place in left)])}
        back = [at[place] for place in range(BLOCK)]
        vector = _chosen(builder, add(ones, others), sub(ones, others), back)
        distance *= 2
    return vector


def _reader(rotated: bool) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def read(typing: Any, values: Any, start: Any, block: Any) -> Any:  # noqa: ARG001
        """BLOCK values from `start` on as fp32; returns the bits of the largest magnitude, NaN above all."""

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = WORD if signature.args[0].dtype == types.float32 else SHORT
            bits = _load(builder, _memory(context, builder, signature.args[0], args[0], kind, args[1]))
            if kind is SHORT:
                bits = builder.shl(builder.zext(bits, _vector(WORD)), _vector(WORD, 16))
            if rotated:
                bits = builder.xor(bits, _vector(WORD, [SIGN if sign < 0 else 0 for sign in _SIGNS]))
                tile = _hadamard(builder, builder.bitcast(bits, _vector(FLOAT)), builder.fadd, builder.fsub)
                bits = builder.bitcast(tile, _vector(WORD))
            _store(builder, bits, _memory(context, builder, signature.args[2], args[2], WORD))
            largest = ir.FunctionType(WORD, [_vector(WORD)])
            reduce = cgutils.get_or_insert_function(builder.module, largest, f"llvm.vector.reduce.umax.v{BLOCK}i32")
            return builder.call(reduce, [builder.and_(bits, _vector(WORD, SIGN - 1))])

        return types.uint32(values, start, block), code

    return read


_read, _rotate = _reader(rotated=False), _reader(rotated=True)


def _mixed_number(number: int) -> int:
    """As `_mixed`."""
    number = (number ^ number >> 16) * 0x21F0AAAD % 2**32
    number = (number ^ number >> 15) * 0x735A2D97 % 2**32
    return number ^ number >> 15


def _quantizer(stochastic: bool) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def whole_parts(typing: Any, tile: Any, factor: Any, offset: Any, key: Any, codes: Any) -> Any:  # noqa: ARG001
        """Whole parts of a tile of fp32, times a factor, plus an offset, and with noise if asked for, as bytes."""

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            given = _load(builder, _memory(context, builder, signature.args[0], args[0], FLOAT))
            steps = builder.fadd(builder.fmul(given, _spread(builder, args[1])), _spread(builder, args[2]))
            if stochastic:
                places = _vector(WORD, [_mixed_number(place) for place in range(BLOCK)])
                noise = builder.xor(places, _spread(builder, args[3]))
                noise = builder.add(noise, builder.mul(builder.add(noise, noise), noise))
                noise = builder.sitofp(builder.ashr(noise, _vector(WORD, 16)), _vector(FLOAT))
                steps = builder.fadd(steps, builder.fmul(noise, _vector(FLOAT, 2.0**-16)))
            whole = builder.trunc(builder.fptosi(steps, _vector(WORD)), _vector(BYTE))
            _store(builder, whole, _memory(context, builder, signature.args[4], args[4], BYTE))
            return context.get_dummy_value()

        return types.void(tile, types.float32, types.float32, types.uint32, codes), code

    return whole_parts


_whole_parts, _whole_parts_by_chance = _quantizer(stochastic=False), _quantizer(stochastic=True)


@intrinsic  # type: ignore[untyped-decorator]
def _nearest(typing: Any, block: Any, factor: Any, codes: Any, start: Any) -> Any:  # noqa: ARG001
    """The nearest whole numbers to fp32 values times a factor, ties to even, as bytes."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        given = _load(builder, _memory(context, builder, signature.args[0], args[0], FLOAT))
        rounded = builder.fadd(builder.fmul(given, _spread(builder, args[1])), _vector(FLOAT, ROUNDING))
        whole = builder.trunc(builder.bitcast(rounded, _vector(WORD)), _vector(BYTE))
        _store(builder, whole, _memory(context, builder, signature.args[2], args[2], BYTE, args[3]))
        return context.get_dummy_value()

    return types.void(block, types.float32, codes, start), code


def _to_fp8(mantissa: int) -> Any:
    bias, shift = 2 ** (6 - mantissa) - 1, 23 - mantissa
    smallest = (128 - bias) << 23  # bits of the smallest normal float
    grid = 2.0 ** (24 - bias - mantissa)  # adding it rounds to multiples of the smallest float, and counts them
    half = (
        (1 << (shift - 1)) - 1 - ((127 - bias) << 23)
    )  # added before the last bits are cut, with one more for odd ones

    @intrinsic  # type: ignore[untyped-decorator]
    def to_fp8(typing: Any, block: Any, factor: Any, codes: Any, start: Any) -> Any:  # noqa: ARG001
        """The nearest 8-bit floats to fp32 values times a factor, ties to even; none is beyond the largest."""

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            given = _load(builder, _memory(context, builder, signature.args[0], args[0], FLOAT))
            bits = builder.bitcast(builder.fmul(given, _spread(builder, args[1])), _vector(WORD))
            magnitude = builder.and_(bits, _vector(WORD, SIGN - 1))
            odd = builder.and_(builder.lshr(magnitude, _vector(WORD, shift)), _vector(WORD, 1))
            normal = builder.add(builder.add(magnitude, _vector(WORD, half % 2**32)), odd)
            tiny = builder.fadd(builder.bitcast(magnitude, _vector(FLOAT)), _vector(FLOAT, grid))
            found = builder.select(
                builder.icmp_unsigned(">=", magnitude, _vector(WORD, smallest)),
                builder.lshr(normal, _vector(WORD, shift)),
                builder.bitcast(tiny, _vector(WORD)),
            )
            sign = builder.and_(builder.lshr(bits, _vector(WORD, 24)), _vector(WORD, 0x80))
            found = builder.trunc(builder.or_(builder.and_(found, _vector(WORD, 0x7F)), sign), _vector(BYTE))
            _store(builder, found, _memory(context, builder, signature.args[2], args[2], BYTE, args[3]))
            return context.get_dummy_value()

        return types.void(block, types.float32, codes, start), code

    return to_fp8


_to_e4m3, _to_e5m2 = _to_fp8(3), _to_fp8(2)


@intrinsic  # type: ignore[untyped-decorator]
def _rotate_levels(typing: Any, levels: Any) -> Any:  # noqa: ARG001
    """H of a tile of int16, in place."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _memory(context, builder, signature.args[0], args[0], SHORT)
        _store(builder, _hadamard(builder, _load(builder, address), builder.add, builder.sub), address)
        return context.get_dummy_value()

    return types.void(levels), code


# Codecs of rotated tiles


@kernel
def _bf16_scale(scale: Any) -> Any:
    """As the bits of a bf16: NaN for what is not finite, and 0 where fp32 runs out of digits."""
    bits = np.float32(scale).view(np.uint32)
    if bits >= np.uint32(0x7F800000):
        return np.uint16(0x7FC0)
    bits = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    if bits >= np.uint32(0x7F80):
        return np.uint16(0x7FC0)
    return np.uint16(bits) if bits >= np.uint32(0x80) else np.uint16(0)


@kernel
def _fp32(bits: Any) -> Any:
    return np.uint32(bits << np.uint32(16)).view(np.float32)


@kernel
def _mixed(number: Any) -> Any:
    number = np.uint32((number ^ (number >> np.uint32(16))) * np.uint32(0x21F0AAAD))
    number = np.uint32((number ^ (number >> np.uint32(15))) * np.uint32(0x735A2D97))
    return np.uint32(number ^ (number >> np.uint32(15)))


@kernel
def _pack(codes: Array, bits: int, packed: Array) -> None:
    if bits >= 4:
        for k in range(64):
            packed[k] = (codes[k] & np.uint8(15)) | (codes[k + 64] << np.uint8(4))
    if bits == 6:
        upper = packed[64:]
        for k in range(32):
            few = (codes[k] >> np.uint8(4)) | ((codes[k + 32] >> np.uint8(4)) << np.uint8(2))
            upper[k] = few | (codes[k + 64] & np.uint8(0x30)) | ((codes[k + 96] & np.uint8(0x30)) << np.uint8(2))
    if bits == 2:
        for k in range(32):
            few = codes[k] | (codes[k + 32] << np.uint8(2))
            packed[k] = few | (codes[k + 64] << np.uint8(4)) | (codes[k + 96] << np.uint8(6))


@kernel
def _unpack(packed: Array, bits: int, levels: Array) -> None:
    """Levels from the codes of a tile."""
    highest = np.int16((1 << bits) - 1)
    if bits >= 4:
        for k in range(64):
            levels[k] = np.int16(2) * np.int16(packed[k] & np.uint8(15)) - highest
            levels[k + 64] = np.int16(2) * np.int16(packed[k] >> np.uint8(4)) - highest
    if bits == 6:
        upper = packed[64:]
        for k in range(32):
            levels[k] += np.int16(32) * np.int16(upper[k] & np.uint8(3))
            levels[k + 32] += np.int16(32) * np.int16((upper[k] >> np.uint8(2)) & np.uint8(3))
            levels[k + 64] += np.int16(32) * np.int16((upper[k] >> np.uint8(4)) & np.uint8(3))
            levels[k + 96] += np.int16(32) * np.int16(upper[k] >> np.uint8(6))
    if bits == 2:
        for k in range(32):
            levels[k] = _int2_level(packed[k] & np.uint8(3))
            levels[k + 32] = _int2_level((packed[k] >> np.uint8(2)) & np.uint8(3))
            levels[k + 64] = _int2_level((packed[k] >> np.uint8(4)) & np.uint8(3))
            levels[k + 96] = _int2_level(packed[k] >> np.uint8(6))


@kernel
def _int2_level(code: Any) -> Any:
    return np.int16(7) * np.int16(code) - np.int16(10) - np.int16(code >> np.uint8(1))


@kernel
def encode_levels(values: Array, bits: int, unit: float, stochastic: bool, packed: Array, scales: Array) -> None:
    """int4, int6 and their stochastic forms: scales are the largest magnitudes times `unit`."""
    rotated, codes = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.uint8)
    row = BLOCK * bits // 8
    middle = np.float32(1 << (bits - 1))
    for tile in range(len(scales)):
        largest = np.uint32(_rotate(values, tile * BLOCK, rotated)).view(np.float32)
        scales[tile] = _bf16_scale(largest * np.float32(unit))
        scale = _fp32(scales[tile])
        factor = np.float32(1) / (scale * np.float32(2 * BLOCK)) if scale > 0 else np.float32(0)
        if stochastic:
            key = _mixed(np.float32(scale).view(np.uint32) ^ _mixed(np.uint32(tile + BLOCK)))
            _whole_parts_by_chance(rotated, factor, middle, key, codes)
        else:
            _whole_parts(rotated, factor, middle, np.uint32(0), codes)
        _pack(codes, bits, packed[tile * row : (tile + 1) * row])


@kernel
def encode_int2(values: Array, unit: float, border: float, packed: Array, scales: Array) -> None:
    rotated, squares, codes = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32), np.empty(BLOCK, np.uint8)
    for tile in range(len(scales)):
        largest = np.uint32(_rotate(values, tile * BLOCK, rotated)).view(np.float32)
        inverse = np.float32(1) / largest if largest >= SMALLEST_SCALE else np.float32(0)
        for i in range(BLOCK):
            part = rotated[i] * inverse
            squares[i] = part * part
        half = BLOCK // 2
        while half:
            for i in range(half):
                squares[i] += squares[half + i]
            half //= 2
        scales[tile] = _bf16_scale(largest * np.sqrt(squares[0]) * np.float32(unit))
        scale = _fp32(scales[tile])
        factor = np.float32(1) / (scale * np.float32(border)) if scale > 0 else np.float32(0)
        for i in range(BLOCK):
            codes[i] = min(max(np.int32(rotated[i] * factor + np.float32(2)), np.int32(0)), np.int32(3))
        _pack(codes, 2, packed[tile * 32 : (tile + 1) * 32])


@kernel
def decode_levels(packed: Array, scales: Array, bits: int, values: Array) -> None:
    """Of int2, int4, int6 and their stochastic forms."""
    levels = np.empty(BLOCK, np.int16)
    row = BLOCK * bits // 8
    for tile in range(len(scales)):
        _unpack(packed[tile * row : (tile + 1) * row], bits, levels)
        _rotate_levels(levels)
        scale = _fp32(scales[tile])
        given_back = values[tile * BLOCK : (tile + 1) * BLOCK]
        for i in range(BLOCK):  # one after another, or memory would be read before it is written
            given_back[i] = np.float32(levels[i]) * (_SIGNS[i] * scale)


# Codecs of blocks as they are


@kernel
def encode_int8(values: Array, codes: Array, scales: Array) -> None:
    block = np.empty(BLOCK, np.float32)
    for number in range(len(scales)):
        start = number * BLOCK
        scale = np.uint32(_read(values, start, block)).view(np.float32) / np.float32(127)
        inverse = np.float32(0)
        if not np.isfinite(scale):
            scale = np.float32(np.nan)
            block[:] = np.float32(0)
        elif scale < SMALLEST_SCALE:
            scale = np.float32(0)
        else:
            inverse = np.float32(1) / scale
        scales[number] = scale
        _nearest(block, inverse, codes, start)


@kernel
def decode_int8(codes: Array, scales: Array, values: Array) -> None:
    for number in range(len(scales)):
        scale = scales[number]
        given, back = codes[number * BLOCK : (number + 1) * BLOCK], values[number * BLOCK : (number + 1) * BLOCK]
        for i in range(len(back)):
            back[i] = np.float32(given[i]) * scale


@kernel
def encode_fp8(values: Array, mantissa: int, largest_exponent: int, codes: Array, scales: Array) -> None:
    """To floats with so many bits of mantissa, the largest of which has this exponent."""
    block = np.empty(BLOCK, np.float32)
    for number in range(len(scales)):
        start = number * BLOCK
        largest = np.int64(_read(values, start, block))
        if largest >= 0x7F800000:
            scales[number] = 255
            codes[start : start + BLOCK] = np.uint8(0x7F)
            continue
        scale = max(((largest + 0x1FFFFF) >> 23) - largest_exponent, 1)
        scales[number] = scale
        factor = np.uint32((254 - scale) << 23).view(np.float32)
        if mantissa == 3:
            _to_e4m3(block, factor, codes, start)
        else:
            _to_e5m2(block, factor, codes, start)


@kernel
def decode_fp8(codes: Array, scales: Array, table: Array, values: Array) -> None:
    """With a table of what each byte stands for."""
    for number in range(len(scales)):
        scale = np.uint32(np.uint32(scales[number]) << np.uint32(23)).view(np.float32)
        if scales[number] == 255:
            scale = np.float32(np.nan)
        given, back = codes[number * BLOCK : (number + 1) * BLOCK], values[number * BLOCK : (number + 1) * BLOCK]
        for i in range(len(back)):
            back[i] = table[given[i]] * scale
