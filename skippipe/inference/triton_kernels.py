# ruff: noqa: N803 — constants of a kernel are in capitals, as in Triton
"""Kernels of decoding, in Triton: a product of a few rows with a large matrix, and attention of one token of each row.

`decode_kernels` launches them and says what they are for. This module alone imports Triton, which a machine without a
GPU need not have.

Where a result is split over several programs, each leaves its part in a scratch tensor, and the one that arrives last
adds all parts in the order of their numbers: so the result does not depend on which one that is. Arrivals are counted
by an integer, which the last one sets back to 0.

`EARLY`: a kernel starts while the one before it still runs (programmatic dependent launch). Until `gdc_wait` returns,
which is when the kernel before has ended, it may read nothing but weights: it fetches some of them into the L2 cache.
The next kernel may start when all programs of this one have read what they need; if it might when they have begun, both
would be slower.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROWS = tl.constexpr(16)  # the least that a product on tensor cores has
LINE = tl.constexpr(64)  # values of 2 bytes in a line of the caches
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _fetch(addresses):
    """Have the lines of 128 bytes at these addresses brought to the L2 cache; nothing waits for it."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [addresses.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _finish(
    total,
    up,
    squares,
    kept,
    bias,
    out,
    scaled,
    sums,
    following,
    columns,
    rows,
    epsilon,
    dtype: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """From sums over all inputs to what is stored; `kept` is the residual, or 0. `sums` is this block's."""
    row = tl.arange(0, ROWS)
    if NORM:
        scale = tl.rsqrt(squares / INPUTS + epsilon)[:, None]
        total *= scale
        up *= scale
    if BIAS:
        total += tl.load(bias + columns, mask=columns < OUTPUTS, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias + OUTPUTS + columns, mask=columns < OUTPUTS, other=0.0).to(tl.float32)[None, :]
    if GATED:
        total = total * tl.sigmoid(total) * up
    real = (row < rows)[:, None] & (columns < OUTPUTS)[None, :]
    values = (total + kept).to(dtype)  # rounded, also if what is stored is fp32
    place = row[:, None] * OUTPUTS + columns[None, :]
    tl.store(out + place, values, mask=real)
    if AHEAD:
        exact = tl.where(real, values.to(tl.float32), 0.0)
        gains = tl.load(following + columns, mask=columns < OUTPUTS, other=0.0).to(tl.float32)
        tl.store(scaled + place, (exact * gains[None, :]).to(dtype), mask=real)
        tl.store(sums + row, tl.sum(exact * exact, 1))


@triton.jit(do_not_specialize=["rows"])
def product(
    x,
    weight,
    gain,
    bias,
    residual,
    given,
    out,
    scaled,
    sums,
    following,
    scratch,
    arrivals,
    rows,
    epsilon,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    AHEAD: tl.constexpr,
    GIVEN: tl.constexpr,
    GIVEN_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    SLICES: tl.constexpr,
    SQUARES: tl.constexpr,
    SPLITS: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    FETCHED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """x [rows, INPUTS] by weight [OUTPUTS, INPUTS], transposed. Programs: [blocks of COLUMNS outputs, SPLITS].

    A step takes INNER inputs, of which each warp adds a slice: one sum of few outputs would be a long chain of products
    that wait for one another.
    NORM: x is normalized by its root mean square, times `gain`. It is multiplied by `gain` as it is read; the sum is
    divided by the root afterwards, as this is the same for all inputs: so x is read once, and nothing waits. SQUARES
    is the type that squares are rounded to before they are added: of bf16's range, as they do not fit fp16's.
    AHEAD: the work of the next product's norm is done here: `scaled` is the result times `following`, that norm's gain,
    and `sums` [blocks, ROWS] has the sum of squares of each block of outputs. If x is such a `scaled`, `given` are its
    sums, of GIVEN blocks (else 0), and the loop has neither squares nor gains. GIVEN_SIZE: the next power of two.
    GATED: weight is [2 · OUTPUTS, INPUTS], gates and then values; silu(gate) · value is stored.
    """
    block, part = tl.program_id(0), tl.program_id(1)
    size: tl.constexpr = INNER // SLICES
    row = tl.arange(0, ROWS)
    inner = tl.arange(0, SLICES)[:, None] * size + tl.arange(0, size)[None, :]
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    start = part * STEPS * INNER
    # beyond the end the last output is computed again, which spares a mask
    known = tl.minimum(columns, OUTPUTS - 1)
    weights = weight + known[None, None, :] * INPUTS
    if EARLY:
        lines = tl.minimum(start + LINE * tl.arange(0, FETCHED), INPUTS - 1)[:, None]
        _fetch(weight + known[None, :] * INPUTS + lines)
        if GATED:
            _fetch(weight + (OUTPUTS + known)[None, :] * INPUTS + lines)
        tl.extra.cuda.gdc_wait()
    real = (row < rows)[:, None] & (columns < OUTPUTS)[None, :]
    kept = tl.zeros((ROWS, COLUMNS), tl.float32)
    if RESIDUAL:  # now, so that nothing waits for it at the end
        kept = tl.load(residual + row[:, None] * OUTPUTS + columns[None, :], mask=real, other=0.0).to(tl.float32)
    total = tl.zeros((SLICES, ROWS, COLUMNS), tl.float32)
    up = tl.zeros((SLICES, ROWS, COLUMNS), tl.float32)
    squares = tl.zeros((SLICES, ROWS, 16), tl.float32)
    ones = tl.full((SLICES, size, 16), 1.0, SQUARES)
    if GIVEN:  # also now; they are added after the loop
        part_of = tl.arange(0, GIVEN_SIZE)[:, None]
        squares_given = tl.load(given + part_of * ROWS + row[None, :], mask=part_of < GIVEN, other=0.0)
    if NORM and not GIVEN:
        gains = tl.load(gain + start + inner, mask=start + inner < INPUTS, other=0.0)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        at = start + step * INNER + inner
        place = x + row[None, :, None] * INPUTS + at[:, None, :]
        if SPLITS * STEPS * INNER == INPUTS:
            values = tl.load(place, mask=(row < rows)[None, :, None], other=0.0)
            tile = tl.load(weights + at[:, :, None])
        else:
            values = tl.load(place, mask=(row < rows)[None, :, None] & (at < INPUTS)[:, None, :], other=0.0)
            tile = tl.load(weights + at[:, :, None], mask=(at < INPUTS)[:, :, None], other=0.0)
        if NORM and not GIVEN:
            exact = values.to(tl.float32)
            # also a product: x in two layouts would cost more than these few columns
            squares = tl.dot((exact * exact).to(SQUARES), ones, squares)
            values = (exact * gains.to(tl.float32)[:, None, :]).to(values.dtype)
            # of the next step: too few bytes a thread for Triton to load them ahead by itself
            gains = tl.load(gain + at + INNER, mask=at + INNER < INPUTS, other=0.0)
        total = tl.dot(values, tile, total)
        if GATED:
            if SPLITS * STEPS * INNER == INPUTS:
                second = tl.load(weights + OUTPUTS * INPUTS + at[:, :, None])
            else:
                second = tl.load(weights + OUTPUTS * INPUTS + at[:, :, None], mask=(at < INPUTS)[:, :, None], other=0.0)
            up = tl.dot(values, second, up)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    total, up = tl.sum(total, 0), tl.sum(up, 0)
    if GIVEN:  # noqa: SIM108 — Triton compiles one of the two only if they are statements
        squares = tl.sum(squares_given, 0)
    else:
        squares = tl.sum(tl.sum(squares, 2), 0) / 16
    sums += block * ROWS
    if SPLITS == 1:
        _finish(total, up, squares, kept, bias, out, scaled, sums, following, columns, rows, epsilon,
                x.dtype.element_ty, OUTPUTS, INPUTS, NORM, GATED, BIAS, AHEAD)  # fmt: skip
    else:
        numbers: tl.constexpr = ROWS * (2 * COLUMNS + 1)
        place = row[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        mine = scratch + (block * SPLITS + part) * numbers
        tl.store(mine + place, total)
        if GATED:
            tl.store(mine + ROWS * COLUMNS + place, up)
        if NORM and not GIVEN:
            tl.store(mine + 2 * ROWS * COLUMNS + row, squares)
        tl.debug_barrier()  # all threads have stored before one of them counts
        if tl.atomic_add(arrivals + block, 1, sem="acq_rel") == SPLITS - 1:
            total = tl.zeros((ROWS, COLUMNS), tl.float32)
            up = tl.zeros((ROWS, COLUMNS), tl.float32)
            if not GIVEN:
                squares = tl.zeros((ROWS,), tl.float32)
            for other in tl.static_range(SPLITS):
                theirs = scratch + (block * SPLITS + other) * numbers
                total += tl.load(theirs + place, cache_modifier=".cg")
                if GATED:
                    up += tl.load(theirs + ROWS * COLUMNS + place, cache_modifier=".cg")
                if NORM and not GIVEN:
                    squares += tl.load(theirs + 2 * ROWS * COLUMNS + row, cache_modifier=".cg")
            _finish(total, up, squares, kept, bias, out, scaled, sums, following, columns, rows, epsilon,
                    x.dtype.element_ty, OUTPUTS, INPUTS, NORM, GATED, BIAS, AHEAD)  # fmt: skip
            tl.store(arrivals + block, 0)


@triton.jit
def _halves(heads, real, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Queries or keys that begin at the addresses `heads` [n], and of each value the one that it is rotated with, of
    the other half of its head, which is read a second time: both [n, WIDTH]."""
    dim = tl.arange(0, WIDTH)
    other = tl.where(dim < DIM // 2, dim + DIM // 2, dim - DIM // 2)
    mask = real[:, None] & (dim < DIM)[None, :]
    values = tl.load(heads[:, None] + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    return values, tl.load(heads[:, None] + other[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _rotated(
    values,
    others,
    norm,
    cosine,
    sine,
    epsilon,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_NORM: tl.constexpr,
):
    """Queries or keys, as `_halves` read them, normalized if asked for, at their position: [n, WIDTH]."""
    dim = tl.arange(0, WIDTH)
    other = tl.where(dim < DIM // 2, dim + DIM // 2, dim - DIM // 2)
    if HEAD_NORM:
        scale = tl.rsqrt(tl.sum(values * values, 1) / DIM + epsilon)[:, None]
        values *= scale * tl.load(norm + dim, mask=dim < DIM, other=0.0).to(tl.float32)[None, :]
        others *= scale * tl.load(norm + other, mask=dim < DIM, other=0.0).to(tl.float32)[None, :]
    return values * cosine[None, :] + tl.where(dim < DIM // 2, -sine, sine)[None, :] * others


@triton.jit(do_not_specialize=["room"])
def attention(
    qkv,
    query_norm,
    key_norm,
    cosines,
    sines,
    keys,
    values,
    slots,
    positions,
    out,
    scratch,
    arrivals,
    room,
    scaling,
    epsilon,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Rotate the queries and the key of each row's token, write key and value to the cache, and attend to all tokens
    before it and to itself. Programs: [rows, KV_HEADS, SPLITS], each for the queries that share a head of keys.

    The token's own key and value are used as they are, not read back: all else in the cache is older than the kernel.
    """
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = HEADS // KV_HEADS
    dim, query_row = tl.arange(0, WIDTH), tl.arange(0, ROWS)
    inside, real = dim < DIM, query_row < group
    if EARLY:
        tl.extra.cuda.gdc_wait()
    slot, position = tl.load(slots + row), tl.load(positions + row)
    # nothing of these depends on the position: they are read while it is
    token = qkv + row * ((HEADS + 2 * KV_HEADS) * DIM)
    one = tl.arange(0, 1)
    query, query_other = _halves(token + (head * group + query_row) * DIM, real, DIM, WIDTH)
    key, key_other = _halves(token + (HEADS + head + one) * DIM, one == 0, DIM, WIDTH)
    value = tl.load(token + (HEADS + KV_HEADS + head) * DIM + dim, mask=inside, other=0.0)
    first = tl.maximum(position - WINDOW + 1, 0) if WINDOW else position * 0
    span = tl.cdiv(tl.cdiv(position - first, BLOCK), SPLITS) * BLOCK
    begin = first + part * span
    end = tl.minimum(begin + span, position)
    stored = (slot * KV_HEADS + head) * room * DIM  # 64 bits: caches are large
    cosine = tl.load(cosines + position * DIM + dim, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sines + position * DIM + dim, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = qkv.dtype.element_ty
    query = _rotated(query, query_other, query_norm, cosine, sine, epsilon, DIM, WIDTH, HEAD_NORM)
    key = _rotated(key, key_other, key_norm, cosine, sine, epsilon, DIM, WIDTH, HEAD_NORM)
    key = tl.sum(key, 0).to(dtype)  # the one row
    if part == 0:
        tl.store(keys + stored + position * DIM + dim, key, mask=inside)
        tl.store(values + stored + position * DIM + dim, value, mask=inside)

    query = query.to(dtype)
    factor = scaling * LOG2_E
    own = tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], 1) * factor
    highest = tl.where(part == 0, own, float("-inf"))
    weight = tl.where(part == 0, tl.full((ROWS,), 1.0, tl.float32), 0.0)
    total = tl.zeros((ROWS, WIDTH), tl.float32) + tl.where(part == 0, value.to(tl.float32), 0.0)[None, :]
    for at in tl.range(begin, end, BLOCK, num_stages=STAGES):
        seen = at + tl.arange(0, BLOCK)
        mask = seen < end
        old_keys = tl.load(
            keys + stored + seen[None, :] * DIM + dim[:, None], mask=mask[None, :] & inside[:, None], other=0.0
        )
        scores = tl.where(mask[None, :], tl.dot(query, old_keys) * factor, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        shares = tl.exp2(scores - higher[:, None])
        faded = tl.exp2(highest - higher)
        weight = weight * faded + tl.sum(shares, 1)
        old_values = tl.load(
            values + stored + seen[:, None] * DIM + dim[None, :], mask=mask[:, None] & inside[None, :], other=0.0
        )
        total = tl.dot(shares.to(dtype), old_values, total * faded[:, None])
        highest = higher

    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    heads = head * group + query_row
    place = out + row * (HEADS * DIM) + heads[:, None] * DIM + dim[None, :]
    stored_mask = real[:, None] & inside[None, :]
    if SPLITS == 1:
        tl.store(place, (total / weight[:, None]).to(dtype), mask=stored_mask)
    else:
        size: tl.constexpr = ROWS * (WIDTH + 2)
        block = row * KV_HEADS + head
        mine, within = scratch + (block * SPLITS + part) * size, query_row[:, None] * WIDTH + dim[None, :]
        tl.store(mine + within, total)
        tl.store(mine + ROWS * WIDTH + query_row, highest)
        tl.store(mine + ROWS * (WIDTH + 1) + query_row, weight)
        tl.debug_barrier()
        if tl.atomic_add(arrivals + block, 1, sem="acq_rel") == SPLITS - 1:
            # part 0 has at least the token itself, so its highest score is finite, and parts of nothing weigh nothing
            highest = tl.full((ROWS,), float("-inf"), tl.float32)
            weight = tl.zeros((ROWS,), tl.float32)
            total = tl.zeros((ROWS, WIDTH), tl.float32)
            for other in tl.static_range(SPLITS):
                theirs = scratch + (block * SPLITS + other) * size
                their_highest = tl.load(theirs + ROWS * WIDTH + query_row, cache_modifier=".cg")
                higher = tl.maximum(highest, their_highest)
                faded, scale = tl.exp2(highest - higher), tl.exp2(their_highest - higher)
                their_weight = tl.load(theirs + ROWS * (WIDTH + 1) + query_row, cache_modifier=".cg")
                weight = weight * faded + their_weight * scale
                their_total = tl.load(theirs + within, cache_modifier=".cg")
                total = total * faded[:, None] + their_total * scale[:, None]
                highest = higher
            tl.store(place, (total / weight[:, None]).to(dtype), mask=stored_mask)
            tl.store(arrivals + block, 0)
