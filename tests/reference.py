"""Slow integer quantization from first principles, to hold the real one against. Shares no code with the package.

Everything is `[out, in]`; clips are one flat list, group after group along a row, row after row. `ranges` says which weights a group holds.
"""

from dataclasses import dataclass

import numpy
import numpy.typing
import torch
from torch import Tensor

Array = numpy.typing.NDArray[numpy.float32]
SMALLEST_SCALE = 1e-5


def ranges(out_features: int, in_features: int, group_size: int) -> list[tuple[slice, slice]]:
    """Rows and columns of each group, in order: -1 takes a row, 0 the whole weight, the last group of a row may be short."""
    if group_size == 0:
        return [(slice(0, out_features), slice(0, in_features))]
    step = in_features if group_size == -1 else group_size
    return [
        (slice(row, row + 1), slice(start, min(start + step, in_features)))
        for row in range(out_features)
        for start in range(0, in_features, step)
    ]


@dataclass(frozen=True)
class Quantized:
    """`codes` and `dequantized` `[out, in]`; `scales` and `zeros` one a group."""

    codes: list[list[int]]
    scales: list[float]
    zeros: list[int]
    dequantized: Array


def quantize_by_loops(
    weight: Array, bits: int, group_size: int, symmetric: bool, offset: Array | None = None, clips: list[tuple[float, float]] | None = None
) -> Quantized:
    """One weight after another, in float32 scalars, each scale through numpy's float16."""
    out_features, in_features = weight.shape
    top, middle = 2**bits - 1, 2 ** (bits - 1)
    codes = [[0] * in_features for _ in range(out_features)]
    dequantized = numpy.zeros_like(weight)
    scales, zeros = [], []
    for number, (rows, columns) in enumerate(ranges(out_features, in_features, group_size)):
        places = [(row, column) for row in range(*rows.indices(out_features)) for column in range(*columns.indices(in_features))]
        low_clip, high_clip = (numpy.float32(clip) for clip in (clips[number] if clips else (1.0, 1.0)))
        low = min(min(weight[place] for place in places), numpy.float32(0)) * low_clip
        high = max(max(weight[place] for place in places), numpy.float32(0)) * high_clip
        if symmetric:
            extreme = low if -low > high else high  # a tie goes to the positive side
            scale = _stored(-extreme / numpy.float32(middle))
            zero = middle
        else:
            scale = _stored((high - low) / numpy.float32(top))
            zero = min(max(round(float(-low / scale)), 0), top)
        scales.append(float(scale))
        zeros.append(zero)
        for place in places:
            moved = weight[place] / scale + (numpy.float32(0) if offset is None else offset[place])
            code = min(max(round(float(moved)) + zero, 0), top)  # Python rounds halves to even
            codes[place[0]][place[1]] = code
            dequantized[place] = numpy.float32(code - zero) * scale
    return Quantized(codes, scales, zeros, dequantized)


def _stored(scale: numpy.float32) -> numpy.float32:
    """As a checkpoint holds it: float16, at least 1e-5 away from zero on its side, plus if it is zero."""
    half = numpy.float16(scale)
    least = numpy.float16(SMALLEST_SCALE)
    if abs(half) < least:
        half = -least if half < 0 else least
    return numpy.float32(half)


@dataclass(frozen=True)
class Smooth:
    """A differentiable W' `[out, in]`, and how far the nearest decision (rounding, clipping, which end sets the scale) is from flipping."""

    dequantized: Tensor
    margin: float


def straight_through(
    weight: Tensor, offset: Tensor, low_clips: Tensor, high_clips: Tensor, bits: int, group_size: int, symmetric: bool, half: bool
) -> Smooth:
    """W' in float64, with autograd all the way and rounding taken for the identity in backward. Clips are flat `[groups]`.

    `half`: scales are rounded to float16, straight through as well.
    """
    out_features, in_features = weight.shape
    top, middle = 2**bits - 1, 2 ** (bits - 1)
    result = torch.zeros_like(weight)
    margins = [1.0]
    for number, (rows, columns) in enumerate(ranges(out_features, in_features, group_size)):
        part, moved = weight[rows, columns], offset[rows, columns]
        low = part.min().clamp(max=0) * low_clips[number]
        high = part.max().clamp(min=0) * high_clips[number]
        if symmetric:
            extreme = low if -low > high else high
            if high > low and high != -low:
                margins.append(_value((high + low) / (high - low)))
            scale, zero = -extreme / middle, torch.tensor(float(middle), dtype=torch.float64)
        else:
            scale, zero = (high - low) / top, None
        if half:
            margins.append(float((scale * 0.999999).half() == (scale * 1.000001).half()))
            scale = _straight(scale, scale.half().double())
        margins.append(float(not SMALLEST_SCALE * 0.99 < _value(scale) < SMALLEST_SCALE * 1.02))
        scale = _away_from_zero(scale, float(numpy.float16(SMALLEST_SCALE)) if half else SMALLEST_SCALE)
        if zero is None:
            margins.append(_from_half(-low / scale))
            zero = _rounded(-low / scale).clamp(0, top)
        level = part / scale + moved
        inside = (level > -2 * top) & (level < 2 * top)
        if inside.any():
            margins.append(_from_half(level[inside]))
        codes = (_rounded(level) + zero).clamp(0, top)
        result[rows, columns] = (codes - zero) * scale
    return Smooth(result, min(margins))


def _straight(value: Tensor, instead: Tensor) -> Tensor:
    """`instead`, with the gradient of `value`."""
    return instead.detach() + (value - value.detach())


def _rounded(value: Tensor) -> Tensor:
    return _straight(value, value.round())


def _from_half(value: Tensor) -> float:
    """Distance of the closest value to the middle between two integers."""
    value = value.detach()
    return float((value - value.floor() - 0.5).abs().min())


def _away_from_zero(scale: Tensor, least: float) -> Tensor:
    """At least `least` on its side of zero; a constant where it had to be moved."""
    if _value(scale) >= least:
        return scale
    return torch.full_like(scale.detach(), -least if scale < 0 else least)


def _value(scalar: Tensor) -> float:
    """Its magnitude."""
    return abs(float(scalar.detach()))
