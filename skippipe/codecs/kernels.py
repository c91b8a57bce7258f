"""Codecs on one core of a CPU, compiled by numba where it is there: the bytes and values of the torch form, sooner.

Kernels encode whole blocks of BLOCK values; of a shorter one at the end the torch form takes care. bf16 comes as its
bits. All arithmetic is fp32 with one rounding for each operation, in the order of the torch form.

What is done to a rotated tile is written in LLVM's own terms, as operations on one vector of its values, which LLVM
cuts into the registers of the processor: in loops over so few values, checks and what is carried between memory and
registers would take as long as the work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from skippipe.codecs.vectors import (
    BLOCK,
    BYTE,
    COLUMNS,
    FLOAT,
    ROW,
    SHORT,
    WORD,
    address_of,
    chosen,
    hadamard,
    joined,
    load,
    parts,
    spread,
    store,
    vector_of,
)
from skippipe.jit import inner_kernel, kernel

if TYPE_CHECKING:
    from torch import Tensor

Array = NDArray[Any]

SMALLEST_SCALE = np.float32(2.0**-126)
SIGN = 0x80000000
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


def _reader(rotated: bool) -> Any:
    @intrinsic
    def read(typing: Any, values: Any, start: Any, block: Any) -> Any:  # noqa: ARG001
        """BLOCK values from `start` on as fp32; returns the bits of the largest magnitude, NaN above all."""

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = WORD if signature.args[0].dtype == types.float32 else SHORT
            rows = []
            for place in range(0, BLOCK, ROW):
                first = builder.add(args[1], ir.Constant(args[1].type, place))
                address = address_of(context, builder, signature.args[0], args[0], vector_of(kind, count=ROW), first)
                bits = load(builder, address)
                if kind is SHORT:
                    bits = builder.shl(builder.zext(bits, vector_of(WORD, count=ROW)), vector_of(WORD, 16, ROW))
                if rotated:
                    signs = [SIGN if sign < 0 else 0 for sign in _SIGNS[place : place + ROW]]
                    bits = builder.bitcast(builder.xor(bits, vector_of(WORD, signs, ROW)), vector_of(FLOAT, count=ROW))
                rows.append(bits)
            if rotated:
                columns = hadamard(builder, rows, builder.fadd, builder.fsub)
            else:
                columns = [[*each] for each in zip(*(parts(builder, row, COLUMNS) for row in rows), strict=True)]
            small = vector_of(WORD, count=COLUMNS)
            name, binary = f"llvm.umax.v{COLUMNS}i32", ir.FunctionType(small, [small, small])
            larger = cgutils.get_or_insert_function(builder.module, binary, name)  # type: ignore[no-untyped-call]
            largest = vector_of(WORD, 0, COLUMNS)
            for number, column in enumerate(columns):
                for row, part in enumerate(column):
                    bits = builder.bitcast(part, small)
                    place = ir.Constant(args[1].type, row * ROW + number * COLUMNS)
                    store(builder, bits, address_of(context, builder, signature.args[2], args[2], small, place))
                    magnitudes = builder.and_(bits, vector_of(WORD, SIGN - 1, COLUMNS))
                    largest = builder.call(larger, [largest, magnitudes])
            name, unary = f"llvm.vector.reduce.umax.v{COLUMNS}i32", ir.FunctionType(WORD, [small])
            reduce = cgutils.get_or_insert_function(builder.module, unary, name)  # type: ignore[no-untyped-call]
            return builder.call(reduce, [largest])

        return types.uint32(values, start, block), code

    return read


_read, _rotate = _reader(rotated=False), _reader(rotated=True)


def _mixed_number(number: int) -> int:
    """As `_mixed`."""
    number = (number ^ number >> 16) * 0x21F0AAAD % 2**32
    number = (number ^ number >> 15) * 0x735A2D97 % 2**32
    return number ^ number >> 15


def _widths(bits: int) -> tuple[int, ...]:
    return (4, 2) if bits == 6 else (bits,)


def _quantizer(bits: int, stochastic: bool = False) -> Any:
    @intrinsic
    def quantize(typing: Any, tile: Any, factor: Any, key: Any, packed: Any, start: Any) -> Any:  # noqa: ARG001
        """The codes of a rotated tile: whole parts of its values times a factor, plus half of all codes, and with
        noise if asked for; packed, to the bytes from `start` on."""

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            given = load(builder, address_of(context, builder, signature.args[0], args[0], vector_of(FLOAT)))
            scaled = builder.fmul(given, spread(builder, args[1]))
            steps = builder.fadd(scaled, vector_of(FLOAT, 2.0 ** (bits - 1)))
            if stochastic:
                places = vector_of(WORD, [_mixed_number(place) for place in range(BLOCK)])
                noise = builder.xor(places, spread(builder, args[2]))
                noise = builder.add(noise, builder.mul(builder.add(noise, noise), noise))
                noise = builder.sitofp(builder.ashr(noise, vector_of(WORD, 16)), vector_of(FLOAT))
                steps = builder.fadd(steps, builder.fmul(noise, vector_of(FLOAT, 2.0**-16)))
            codes = builder.fptosi(steps, vector_of(WORD))
            if bits == 2:  # levels do not reach as far as the values
                least, most = vector_of(WORD, 0), vector_of(WORD, 3)
                codes = builder.select(builder.icmp_signed("<", codes, least), least, codes)
                codes = builder.select(builder.icmp_signed(">", codes, most), most, codes)
            codes = builder.trunc(codes, vector_of(BYTE))
            shift, start = 0, args[4]
            for width in _widths(bits):
                row = BLOCK * width // 8
                part = builder.and_(builder.lshr(codes, vector_of(BYTE, shift)), vector_of(BYTE, 2**width - 1))
                packed = vector_of(BYTE, 0, row)
                for plane in range(8 // width):
                    few = chosen(builder, part, part, list(range(plane * row, (plane + 1) * row)))
                    packed = builder.or_(packed, builder.shl(few, vector_of(BYTE, plane * width, row)))
                address = address_of(context, builder, signature.args[3], args[3], vector_of(BYTE, count=row), start)
                store(builder, packed, address)
                shift, start = shift + width, builder.add(start, ir.Constant(start.type, row))
            return context.get_dummy_value()

        return types.void(tile, types.float32, types.uint32, packed, start), code

    return quantize


_quantize2, _quantize4, _quantize6 = _quantizer(2), _quantizer(4), _quantizer(6)
_quantize4_by_chance, _quantize6_by_chance = _quantizer(4, stochastic=True), _quantizer(6, stochastic=True)


def _leveller(bits: int) -> Any:
    @intrinsic
    def rotate_levels(typing: Any, packed: Any, start: Any, scale: Any, values: Any, first: Any) -> Any:  # noqa: ARG001
        """DH of the levels of a tile, whose codes are in the bytes from `start` on, times its scale, to the values from
        `first` on."""

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            codes, shift, start = vector_of(BYTE, 0), 0, args[1]
            for width in _widths(bits):
                row = BLOCK * width // 8
                address = address_of(context, builder, signature.args[0], args[0], vector_of(BYTE, count=row), start)
                given = load(builder, address)
                mask = vector_of(BYTE, 2**width - 1, row)
                shifts = [vector_of(BYTE, plane * width, row) for plane in range(8 // width)]
                part = joined(builder, [builder.and_(builder.lshr(given, each), mask) for each in shifts])
                codes = builder.or_(codes, builder.shl(part, vector_of(BYTE, shift)))
                shift, start = shift + width, builder.add(start, ir.Constant(start.type, row))
            if bits == 2:
                levels = builder.sub(builder.mul(codes, vector_of(BYTE, 7)), builder.lshr(codes, vector_of(BYTE, 1)))
                levels = builder.sub(levels, vector_of(BYTE, 10))
            else:
                levels = builder.sub(builder.add(codes, codes), vector_of(BYTE, 2**bits - 1))
            rows = parts(builder, builder.sext(levels, vector_of(SHORT)), ROW)
            scales: dict[tuple[float, ...], Any] = {}  # with the signs of as many neighbours: there are four
            for number, column in enumerate(hadamard(builder, rows, builder.add, builder.sub)):
                for row, part in enumerate(column):
                    place = row * ROW + number * COLUMNS
                    signs = tuple(_SIGNS[place : place + COLUMNS].tolist())
                    if signs not in scales:
                        every = vector_of(FLOAT, list(signs), COLUMNS)
                        scales[signs] = builder.fmul(every, spread(builder, args[2], COLUMNS))
                    found = builder.fmul(builder.sitofp(part, vector_of(FLOAT, count=COLUMNS)), scales[signs])
                    at = builder.add(args[4], ir.Constant(args[4].type, place))
                    kind = vector_of(FLOAT, count=COLUMNS)
                    store(builder, found, address_of(context, builder, signature.args[3], args[3], kind, at))
            return context.get_dummy_value()

        return types.void(packed, start, types.float32, values, first), code

    return rotate_levels


_rotate_levels2, _rotate_levels4, _rotate_levels6 = _leveller(2), _leveller(4), _leveller(6)


@intrinsic
def _sum_of_squares(typing: Any, tile: Any, factor: Any) -> Any:  # noqa: ARG001
    """Of a tile times a factor: the second half is added to the first until one number is left."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        given = load(builder, address_of(context, builder, signature.args[0], args[0], vector_of(FLOAT)))
        scaled = builder.fmul(given, spread(builder, args[1]))
        squares, half = builder.fmul(scaled, scaled), BLOCK // 2
        while half:
            first, second = list(range(half)), list(range(half, 2 * half))
            squares = builder.fadd(chosen(builder, squares, squares, first), chosen(builder, squares, squares, second))
            half //= 2
        return builder.extract_element(squares, ir.Constant(WORD, 0))

    return types.float32(tile, types.float32), code


@intrinsic
def _nearest(typing: Any, block: Any, factor: Any, codes: Any, start: Any) -> Any:  # noqa: ARG001
    """The nearest whole numbers to fp32 values times a factor, ties to even, as bytes."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        given = load(builder, address_of(context, builder, signature.args[0], args[0], vector_of(FLOAT)))
        rounded = builder.fadd(builder.fmul(given, spread(builder, args[1])), vector_of(FLOAT, ROUNDING))
        whole = builder.trunc(builder.bitcast(rounded, vector_of(WORD)), vector_of(BYTE))
        store(builder, whole, address_of(context, builder, signature.args[2], args[2], vector_of(BYTE), args[3]))
        return context.get_dummy_value()

    return types.void(block, types.float32, codes, start), code


def _to_fp8(mantissa: int) -> Any:
    bias, shift = 2 ** (6 - mantissa) - 1, 23 - mantissa
    smallest = (128 - bias) << 23  # bits of the smallest normal float
    grid = 2.0 ** (24 - bias - mantissa)  # adding it rounds to multiples of the smallest float, and counts them
    half = (
        (1 << (shift - 1)) - 1 - ((127 - bias) << 23)
    )  # added before the last bits are cut, with one more for odd ones

    @intrinsic
    def to_fp8(typing: Any, block: Any, factor: Any, codes: Any, start: Any) -> Any:  # noqa: ARG001
        """The nearest 8-bit floats to fp32 values times a factor, ties to even; none is beyond the largest."""

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            given = load(builder, address_of(context, builder, signature.args[0], args[0], vector_of(FLOAT)))
            bits = builder.bitcast(builder.fmul(given, spread(builder, args[1])), vector_of(WORD))
            magnitude = builder.and_(bits, vector_of(WORD, SIGN - 1))
            odd = builder.and_(builder.lshr(magnitude, vector_of(WORD, shift)), vector_of(WORD, 1))
            normal = builder.add(builder.add(magnitude, vector_of(WORD, half % 2**32)), odd)
            tiny = builder.fadd(builder.bitcast(magnitude, vector_of(FLOAT)), vector_of(FLOAT, grid))
            found = builder.select(
                builder.icmp_unsigned(">=", magnitude, vector_of(WORD, smallest)),
                builder.lshr(normal, vector_of(WORD, shift)),
                builder.bitcast(tiny, vector_of(WORD)),
            )
            sign = builder.trunc(builder.lshr(bits, vector_of(WORD, 24)), vector_of(BYTE))
            found = builder.or_(builder.trunc(found, vector_of(BYTE)), builder.and_(sign, vector_of(BYTE, 0x80)))
            store(builder, found, address_of(context, builder, signature.args[2], args[2], vector_of(BYTE), args[3]))
            return context.get_dummy_value()

        return types.void(block, types.float32, codes, start), code

    return to_fp8


_to_e4m3, _to_e5m2 = _to_fp8(3), _to_fp8(2)


# Codecs of rotated tiles


@inner_kernel
def _bf16_scale(scale: Any) -> Any:
    """As the bits of a bf16: NaN for what is not finite, and 0 where fp32 runs out of digits."""
    bits = np.float32(scale).view(np.uint32)
    if bits >= np.uint32(0x7F800000):
        return np.uint16(0x7FC0)
    bits = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    if bits >= np.uint32(0x7F80):
        return np.uint16(0x7FC0)
    return np.uint16(bits) if bits >= np.uint32(0x80) else np.uint16(0)


@inner_kernel
def _fp32(bits: Any) -> Any:
    return np.uint32(bits << np.uint32(16)).view(np.float32)


@inner_kernel
def _mixed(number: Any) -> Any:
    number = np.uint32((number ^ (number >> np.uint32(16))) * np.uint32(0x21F0AAAD))
    number = np.uint32((number ^ (number >> np.uint32(15))) * np.uint32(0x735A2D97))
    return np.uint32(number ^ (number >> np.uint32(15)))


@kernel
def encode_levels(values: Array, bits: int, unit: float, stochastic: bool, packed: Array, scales: Array) -> None:
    """int4, int6 and their stochastic forms: scales are the largest magnitudes times `unit`."""
    rotated = np.empty(BLOCK, np.float32)
    for tile in range(len(scales)):
        largest = np.uint32(_rotate(values, tile * BLOCK, rotated)).view(np.float32)
        scales[tile] = _bf16_scale(largest * np.float32(unit))
        scale = _fp32(scales[tile])
        factor = np.float32(1) / (scale * np.float32(2 * BLOCK)) if scale > 0 else np.float32(0)
        key = np.uint32(0)
        if stochastic:
            key = _mixed(np.float32(scale).view(np.uint32) ^ _mixed(np.uint32(tile + BLOCK)))
        if bits == 4 and stochastic:
            _quantize4_by_chance(rotated, factor, key, packed, tile * 64)
        elif bits == 4:
            _quantize4(rotated, factor, key, packed, tile * 64)
        elif stochastic:
            _quantize6_by_chance(rotated, factor, key, packed, tile * 96)
        else:
            _quantize6(rotated, factor, key, packed, tile * 96)


@kernel
def encode_int2(values: Array, unit: float, border: float, packed: Array, scales: Array) -> None:
    rotated = np.empty(BLOCK, np.float32)
    for tile in range(len(scales)):
        largest = np.uint32(_rotate(values, tile * BLOCK, rotated)).view(np.float32)
        inverse = np.float32(1) / largest if largest >= SMALLEST_SCALE else np.float32(0)
        squares = np.sqrt(_sum_of_squares(rotated, inverse))  # type: ignore[call-arg]
        scales[tile] = _bf16_scale(largest * squares * np.float32(unit))
        scale = _fp32(scales[tile])
        factor = np.float32(1) / (scale * np.float32(border)) if scale > 0 else np.float32(0)
        _quantize2(rotated, factor, np.uint32(0), packed, tile * 32)


@kernel
def decode_levels(packed: Array, scales: Array, bits: int, values: Array) -> None:
    """Of int2, int4, int6 and their stochastic forms."""
    last = np.empty(BLOCK, np.float32)
    for tile in range(len(scales)):
        first, scale = tile * BLOCK, _fp32(scales[tile])
        short = first + BLOCK > len(values)
        back, place = (last, 0) if short else (values, first)
        if bits == 4:
            _rotate_levels4(packed, tile * 64, scale, back, place)
        elif bits == 6:
            _rotate_levels6(packed, tile * 96, scale, back, place)
        else:
            _rotate_levels2(packed, tile * 32, scale, back, place)
        if short:
            values[first:] = last[: len(values) - first]


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
        _nearest(block, inverse, codes, start)  # type: ignore[call-arg]


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
        scale: Any = max(((largest + 0x1FFFFF) >> 23) - largest_exponent, 1)
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


# Factors


@kernel
def multiply_factors(left: Array, right: Array, product: Array) -> None:
    """[matrix, row, 8] times [matrix, 8, column], one direction after the other."""
    for matrix in range(len(product)):
        for row in range(product.shape[1]):
            for column in range(product.shape[2]):
                total = left[matrix, row, 0] * right[matrix, 0, column]
                for at in range(1, 8):
                    total += left[matrix, row, at] * right[matrix, at, column]
                product[matrix, row, column] = total
