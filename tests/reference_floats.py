"""Slow floating point quantization from first principles, to hold the real one against. Shares no code with the package.

Elements are sorted tables of exact numbers; the index of a number is its code without the sign. Rounding looks for the nearest entry and
takes the even code of two that are equally near. float32 arithmetic is Python's, rounded after each operation, which gives the same:
float64 has more than twice the digits.
"""

import ctypes
import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from reference import ranges

Group = int | tuple[int, int]


def single(value: float) -> float:
    """The nearest float32, infinity beyond its range."""
    return ctypes.c_float(value).value


# ---------------------------------------------------------------------------------------------------------------------------------------
# Elements


@dataclass(frozen=True)
class Table:
    """Numbers ≥ 0 of an element in order of their codes, and the bit of the sign."""

    numbers: tuple[float, ...]
    sign: int

    @property
    def largest(self) -> float:
        return self.numbers[-1]

    def nearest(self, value: float) -> int:
        """Code of the nearest number, of the largest beyond it; -0.0 and what rounds to it have the sign."""
        size = abs(value)
        above = bisect_right(self.numbers, size)
        if above == len(self.numbers):
            code = above - 1
        else:
            code = above - 1
            down, up = size - self.numbers[code], self.numbers[above] - size  # exact, or far from a tie
            if up < down or (up == down and above % 2 == 0):
                code = above
        return code + (self.sign if math.copysign(1, value) < 0 else 0)

    def number(self, code: int) -> float:
        size = self.numbers[code & (self.sign - 1)]
        return -size if code & self.sign else size

    def edges(self) -> list[float]:
        """Numbers at which the gap changes."""
        return [
            at for below, at, above in zip(self.numbers, self.numbers[1:], self.numbers[2:], strict=False) if at - below != above - at
        ] or [1.0]

    def gap(self, value: float) -> float:
        """Between the two numbers around `value`, upwards of one of them, the last two beyond the largest."""
        at = min(bisect_right(self.numbers, abs(value)), len(self.numbers) - 1)
        return self.numbers[at] - self.numbers[at - 1]


def floats(exponent_bits: int, mantissa_bits: int, bias: int, count: int) -> Table:
    """The first `count` numbers of a binary floating point format with subnormals."""
    numbers = []
    for code in range(count):
        exponent, mantissa = code >> mantissa_bits, code % 2**mantissa_bits
        leading = 1 if exponent else 0
        numbers.append((leading + mantissa / 2**mantissa_bits) * 2.0 ** (max(exponent, 1) - bias))
    return Table(tuple(numbers), 2 ** (exponent_bits + mantissa_bits))


E2M1 = floats(2, 1, bias=1, count=8)
E4M3 = floats(4, 3, bias=7, count=127)  # the 128th is NaN
INT4 = Table(tuple(number / 4 for number in range(8)), 8)


# ---------------------------------------------------------------------------------------------------------------------------------------
# Weights


def tiles(out_features: int, in_features: int, group_size: Group) -> list[tuple[slice, slice]]:
    """Rows and columns of each group or tile, in order."""
    if not isinstance(group_size, tuple):
        return ranges(out_features, in_features, group_size)
    down, across = group_size
    return [
        (slice(row, min(row + down, out_features)), slice(column, min(column + across, in_features)))
        for row in range(0, out_features, down)
        for column in range(0, in_features, across)
    ]


def fp8_scale(magnitude: float) -> float:
    return max(single(magnitude / 448), single(1 / (448 * 512)))


def mx_exponent(magnitude: float, table: Table, up: bool) -> int:
    """Of the power of two that a block is divided by. down: the largest gets the exponent of the table's last; up: it fits."""
    if magnitude == 0:
        magnitude = 2.0
    if up:
        exponent = -150
        while magnitude > table.largest * 2.0**exponent:
            exponent += 1
    else:
        exponent = floor_log2(magnitude) - floor_log2(table.largest)
    return max(-127, min(127, exponent))


def floor_log2(value: float) -> int:
    exponent = 0
    while value >= 2:
        value, exponent = value / 2, exponent + 1
    while value < 1:
        value, exponent = value * 2, exponent - 1
    return exponent


def nv_global(magnitude: float) -> float:
    """Through the reciprocal, as torch divides a number by a tensor, and thus compressed-tensors and auto-round."""
    whole = single(2688 * single(1 / magnitude)) if magnitude else 1.0
    return whole if math.isfinite(whole) else 1.0


def nv_block_code(magnitude: float, whole: float) -> int:
    """E4M3 code, never that of zero."""
    wanted = single(whole * single(magnitude / 6))
    return max(1, E4M3.nearest(min(wanted, 448.0)))


@dataclass(frozen=True)
class Quantized:
    """`codes` `[out][in]`, `dequantized` `[out, in]`, and `stored` one a group: a float32, an exponent + 127, or an E4M3 code."""

    codes: list[list[int]]
    stored: list[float]
    dequantized: Tensor
    whole: float | None


def table_of(dtype: str, bits: int) -> Table:
    return INT4 if dtype == "mx_int" else E2M1 if bits == 4 else E4M3


def quantize_by_tables(
    weight: Tensor,
    dtype: str,
    bits: int,
    group_size: Group,
    offset: Tensor | None = None,
    clips: list[float] | None = None,
    whole: float | None = None,
) -> Quantized:
    """float32 `weight` `[out, in]`, one number after another. offset: `[out, in]`, in gaps of the table. clips: one a group, in order."""
    values: list[list[float]] = weight.tolist()
    moves = None if offset is None else offset.tolist()
    out_features, in_features = weight.shape
    table = table_of(dtype, bits)
    if dtype == "nv_fp" and whole is None:
        whole = nv_global(max(abs(value) for row in values for value in row))
    codes = [[0] * in_features for _ in range(out_features)]
    dequantized = [[0.0] * in_features for _ in range(out_features)]
    stored: list[float] = []
    for number, (rows, columns) in enumerate(tiles(out_features, in_features, group_size)):
        places = [(row, column) for row in range(rows.start, rows.stop) for column in range(columns.start, columns.stop)]
        magnitude = max(abs(values[row][column]) for row, column in places)
        if clips is not None:
            magnitude = single(magnitude * clips[number])
        if dtype == "fp":
            scale = fp8_scale(magnitude)
            stored.append(scale)
        elif dtype == "nv_fp":
            assert whole is not None
            code = nv_block_code(magnitude, whole)
            scale = single(E4M3.number(code) / whole)
            stored.append(code)
        else:
            exponent = mx_exponent(magnitude, table, up=dtype.endswith("rceil"))
            scale = 2.0**exponent
            stored.append(exponent + 127)
        for row, column in places:
            ratio = single(values[row][column] / scale)
            if moves is not None:
                ratio = single(ratio + single(moves[row][column] * table.gap(ratio)))
            codes[row][column] = table.nearest(ratio)
            dequantized[row][column] = single(table.number(codes[row][column]) * scale)
    return Quantized(codes, stored, torch.tensor(dequantized, dtype=torch.float32).reshape(weight.shape), whole)


# ---------------------------------------------------------------------------------------------------------------------------------------
# Gradients


@dataclass(frozen=True)
class Smooth:
    """A differentiable W' `[out, in]`, and how far the nearest rounding is from flipping, in gaps."""

    dequantized: Tensor
    margin: float


def straight_through(
    weight: Tensor, offset: Tensor, clips: Tensor, dtype: str, bits: int, group_size: Group, scale_of: Callable[[float], float]
) -> Smooth:
    """W' of a float64 weight, with autograd all the way, rounding and the gap that V counts in taken for constants or the identity.

    The scale is magnitude · clip / largest number, and in forward what `scale_of` (magnitude · clip → scale) makes of it.
    """
    table = table_of(dtype, bits)
    result = torch.zeros_like(weight)
    margins = [1.0]
    for number, (rows, columns) in enumerate(tiles(*weight.shape, group_size)):
        part, moved = weight[rows, columns], offset[rows, columns]
        magnitude = part.abs().max() * clips[number]
        smooth = magnitude / table.largest
        scale = smooth + (scale_of(float(magnitude.detach())) - smooth).detach()
        ratio = part / scale
        gaps = torch.tensor([[table.gap(value) for value in row] for row in ratio.tolist()], dtype=torch.float64)
        level = ratio + moved * gaps
        steps = torch.tensor([[table.gap(value) for value in row] for row in level.tolist()], dtype=torch.float64)
        exact = (level / steps).detach()
        margins.append(float((exact - exact.floor() - 0.5).abs().min()))
        margins.append(min(abs(value - edge) / edge for value in ratio.detach().abs().flatten().tolist() for edge in table.edges()))
        rounded = level + (exact.round() * steps - level).detach()
        result[rows, columns] = rounded.clamp(-table.largest, table.largest) * scale
    return Smooth(result, min(margins))


# ---------------------------------------------------------------------------------------------------------------------------------------
# Inputs of goldens: integer arithmetic only, so that they are the same on every machine


def golden_weight(kind: str, shape: tuple[int, int], seed: int) -> Tensor:
    """A float32 weight `[out, in]`: `normal` (bell-shaped, about 0.02), `outliers` (one in 97 times 128), `zeros` (every third row)."""
    count = shape[0] * shape[1]
    state = torch.arange(count * 4, dtype=torch.int64) + seed * 1_000_003
    for factor, shift in ((0x45D9F3B, 16), (0x45D9F3B, 15), (0x2C1B3C6D, 13)):
        state = ((state ^ (state >> shift)) * factor) % 2**32
    uniform = state.reshape(4, count) >> 12  # 20 bits each: the sum is exact in float32
    weight = ((uniform.sum(0) - 2**21).to(torch.float32) * 2.0**-25).reshape(shape)
    if kind == "outliers":
        weight[(state[:count] % 97 == 0).reshape(shape)] *= 128
    if kind == "zeros":
        weight[::3] = 0
    return weight


def fingerprint(values: Tensor) -> str:
    """sha256 of float32 values, little-endian; -0.0 counts as 0.0."""
    plain = (values.to(torch.float32) + 0.0).contiguous().view(torch.uint8)
    return hashlib.sha256(bytes(plain.flatten().tolist())).hexdigest()
