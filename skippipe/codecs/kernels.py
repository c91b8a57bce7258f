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


def _vector(element: ir.Type, values: Any = None, count: int = BLOCK) -> Any:
    """The type of a vector; with values, a constant."""
    kind = ir.VectorType(element, count)
    if values is None:
        return kind
    every = values if isinstance(values, list) else [values] * count
    return ir.Constant(kind, [ir.Constant(element, each) for each in every])


def _memory(context: Any, builder: Any, array_type: Any, array: Any, vector: Any, start: Any = None) -> Any:
    """The address of a vector in an array."""
    data = context.make_array(array_type)(context, builder, array).data
    if start is not None:
        data = builder.gep(data, [start])
    return builder.bitcast(data, vector.as_pointer())


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
    @intrinsic
    def read(typing: Any, values: Any, start: Any, block: Any) -> Any:  # noqa: ARG001
        """BLOCK values from `start` on as fp32; returns the bits of the largest magnitude, NaN above all."""

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = WORD if signature.args[0].dtype == types.float32 else SHORT
            bits = _load(builder, _memory(context, builder, signature.args[0], args[0], _vector(kind), args[1]))
            if kind is SHORT:
                bits = builder.shl(builder.zext(bits, _vector(WORD)), _vector(WORD, 16))
            if rotated:
                bits = builder.xor(bits, _vector(WORD, [SIGN if sign < 0 else 0 for sign in _SIGNS]))
                tile = _hadamard(builder, builder.bitcast(bits, _vector(FLOAT)), builder.fadd, builder.fsub)
                bits = builder.bitcast(tile, _vector(WORD))
            _store(builder, bits, _memory(context, builder, signature.args[2], args[2], _vector(WORD)))
            name, largest = f"llvm.vector.reduce.umax.v{BLOCK}i32", ir.FunctionType(WORD, [_vector(WORD)])
            reduce = cgutils.get_or_insert_function(builder.module, largest, name)  # type: ignore[no-untyped-call]
            return builder.call(reduce, [builder.and_(bits, _vector(WORD, SIGN - 1))])

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
            given = _load(builder, _memory(context, builder, signature.args[0], args[0], _vector(FLOAT)))
            scaled = builder.fmul(given, _spread(builder, args[1]))
            steps = builder.fadd(scaled, _vector(FLOAT, 2.0 ** (bits - 1)))
            if stochastic:
                places = _vector(WORD, [_mixed_number(place) for place in range(BLOCK)])
                noise = builder.xor(places, _spread(builder, args[2]))
                noise = builder.add(noise, builder.mul(builder.add(noise, noise), noise))
                noise = builder.sitofp(builder.ashr(noise, _vector(WORD, 16)), _vector(FLOAT))
                steps = builder.fadd(steps, builder.fmul(noise, _vector(FLOAT, 2.0**-16)))
            codes = builder.fptosi(steps, _vector(WORD))
            if bits == 2:  # levels do not reach as far as the values
                least, most = _vector(WORD, 0), _vector(WORD, 3)
                codes = builder.select(builder.icmp_signed("<", codes, least), least, codes)
                codes = builder.select(builder.icmp_signed(">", codes, most), most, codes)
            codes = builder.trunc(codes, _vector(BYTE))
            shift, start = 0, args[4]
            for width in _widths(bits):
                row = BLOCK * width // 8
                part = builder.and_(builder.lshr(codes, _vector(BYTE, shift)), _vector(BYTE, 2**width - 1))
                packed = _vector(BYTE, 0, row)
                for plane in range(8 // width):
                    few = _chosen(builder, part, part, list(range(plane * row, (plane + 1) * row)))
                    packed = builder.or_(packed, builder.shl(few, _vector(BYTE, plane * width, row)))
                address = _memory(context, builder, signature.args[3], args[3], _vector(BYTE, count=row), start)
                _store(builder, packed, address)
                shift, start = shift + width, builder.add(start, ir.Constant(start.type, row))
            return context.get_dummy_value()

        return types.void(tile, types.float32, types.uint32, packed, start), code

    return quantize


_quantize2, _quantize4, _quantize6 = _quantizer(2), _quantizer(4), _quantizer(6)
_quantize4_by_chance, _quantize6_by_chance = _quantizer(4, stochastic=True), _quantizer(6, stochastic=True)


def _leveller(bits: int) -> Any:
    @intrinsic
    def rotate_levels(typing: Any, packed: Any, start: Any, rotated: Any) -> Any:  # noqa: ARG001
        """H of the levels of a tile, whose codes are in the bytes from `start` on, as int16."""

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            codes, shift, start = _vector(BYTE, 0), 0, args[1]
            for width in _widths(bits):
                row = BLOCK * width // 8
                address = _memory(context, builder, signature.args[0], args[0], _vector(BYTE, count=row), start)
                given = _load(builder, address)
                part, mask = [], _vector(BYTE, 2**width - 1, row)
                for plane in range(8 // width):
                    part.append(builder.and_(builder.lshr(given, _vector(BYTE, plane * width, row)), mask))
                while len(part) > 1:
                    size = 2 * part[0].type.count
                    pairs = zip(part[::2], part[1::2], strict=True)
                    part = [_chosen(builder, one, other, list(range(size))) for one, other in pairs]
                codes = builder.or_(codes, builder.shl(part[0], _vector(BYTE, shift)))
                shift, start = shift + width, builder.add(start, ir.Constant(start.type, row))
            if bits == 2:
                levels = builder.sub(builder.mul(codes, _vector(BYTE, 7)), builder.lshr(codes, _vector(BYTE, 1)))
                levels = builder.sub(levels, _vector(BYTE, 10))
            else:
                levels = builder.sub(builder.add(codes, codes), _vector(BYTE, 2**bits - 1))
            tile = _hadamard(builder, builder.sext(levels, _vector(SHORT)), builder.add, builder.sub)
            _store(builder, tile, _memory(context, builder, signature.args[2], args[2], _vector(SHORT)))
            return context.get_dummy_value()

        return types.void(packed, start, rotated), code

    return rotate_levels


_rotate_levels2, _rotate_levels4, _rotate_levels6 = _leveller(2), _leveller(4), _leveller(6)


@intrinsic
def _sum_of_squares(typing: Any, tile: Any, factor: Any) -> Any:  # noqa: ARG001
    """Of a tile times a factor: the second half is added to the first until one number is left."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        given = _load(builder, _memory(context, builder, signature.args[0], args[0], _vector(FLOAT)))
        scaled = builder.fmul(given, _spread(builder, args[1]))
        squares, half = builder.fmul(scaled, scaled), BLOCK // 2
        while half:
            first, second = list(range(half)), list(range(half, 2 * half))
            squares = builder.fadd(
                _chosen(builder, squares, squares, first), _chosen(builder, squares, squares, second)
            )
            half //= 2
        return builder.extract_element(squares, ir.Constant(WORD, 0))

    return types.float32(tile, types.float32), code


@intrinsic
def _nearest(typing: Any, block: Any, factor: Any, codes: Any, start: Any) -> Any:  # noqa: ARG001
    """The nearest whole numbers to fp32 values times a factor, ties to even, as bytes."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        given = _load(builder, _memory(context, builder, signature.args[0], args[0], _vector(FLOAT)))
        rounded = builder.fadd(builder.fmul(given, _spread(builder, args[1])), _vector(FLOAT, ROUNDING))
        whole = builder.trunc(builder.bitcast(rounded, _vector(WORD)), _vector(BYTE))
        _store(builder, whole, _memory(context, builder, signature.args[2], args[2], _vector(BYTE), args[3]))
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
            given = _load(builder, _memory(context, builder, signature.args[0], args[0], _vector(FLOAT)))
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
            sign = builder.trunc(builder.lshr(bits, _vector(WORD, 24)), _vector(BYTE))
            found = builder.or_(builder.trunc(found, _vector(BYTE)), builder.and_(sign, _vector(BYTE, 0x80)))
            _store(builder, found, _memory(context, builder, signature.args[2], args[2], _vector(BYTE), args[3]))
            return context.get_dummy_value()

        return types.void(block, types.float32, codes, start), code

    return to_fp8


_to_e4m3, _to_e5m2 = _to_fp8(3), _to_fp8(2)


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
    rotated = np.empty(BLOCK, np.int16)
    for tile in range(len(scales)):
        if bits == 4:
            _rotate_levels4(packed, tile * 64, rotated)
        elif bits == 6:
            _rotate_levels6(packed, tile * 96, rotated)
        else:
            _rotate_levels2(packed, tile * 32, rotated)
        scale = _fp32(scales[tile])
        for i in range(BLOCK):  # from first to last, or memory is read before it is written
            values[tile * BLOCK + i] = np.float32(rotated[i]) * (_SIGNS[i] * scale)


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
