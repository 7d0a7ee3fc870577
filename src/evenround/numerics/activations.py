"""Fake quantization of activations: what a site's input becomes in a server that quantizes it.

Tuning runs blocks on these inputs, so that weights are fitted to what they will meet. Elements and scales are those of `numerics.elements`
and `numerics.weights`; scales come from the values themselves, per token, per group or per tensor, or from calibration (`input_scale`).

Integers follow compressed-tensors 0.20 (`calculate_qparams`, `fake_quantize`), whose files carry them: symmetric scale = largest magnitude
/ (2^bits - 1) · 2, codes from -2^(bits-1) to 2^(bits-1) - 1, so that the largest positive value may be clipped by half a step; asymmetric
scale = (high - low) / (2^bits - 1) over a range that contains 0, zero point z = round(lowest code - low / scale); either way code =
round(value / scale + z). Scales of zeros are replaced by something positive.

Everything is float32, as in serving kernels, and returned in the input's dtype; compressed-tensors computes in the input's dtype. Gradients
pass as if nothing had happened, clipped or not: dynamic ranges clip nothing to speak of, and a mask of what static ones clip would be kept
for every activation of a block. We gave up tuning activation scales, and exact agreement with any one kernel: vLLM's INT8 divides the
largest magnitude by 127, and hardware may round MX scales up where data type `mx_fp` says down.
"""

from typing import Any

import torch
from torch import Tensor

from evenround.numerics.elements import E4M3, element_of
from evenround.numerics.grouping import chunks, from_groups, to_groups
from evenround.numerics.weights import MIN_FP8_SCALE, Grid, block_scale, global_scale, power_scale
from evenround.scheme import PER_CHANNEL, PER_TENSOR, ActivationScheme

ZERO_SCALE = 2.0**-23
"""Integer scale of values that are all zero, as in compressed-tensors."""


def input_scale(magnitude: Tensor, scheme: ActivationScheme) -> Tensor:
    """Scale of a calibrated scheme, float32 `[1]`, from the largest |input| seen, one number in a tensor of any shape.

    fp: magnitude / 448, at least 1 / (448 · 512); int: magnitude / (2^bits - 1) · 2; nv: the global scale 2688 / magnitude, 1 for zero.
    """
    magnitude = magnitude.reshape(1).to(torch.float32)
    return global_scale(magnitude) if scheme.dtype == "nv_fp" else _symmetric_scale(magnitude, scheme)


def fake_quantize(values: Tensor, scheme: ActivationScheme, scale: Tensor | None) -> Tensor:
    """`values` `[…, in]` quantized and dequantized, same shape and dtype; the gradient passes unchanged.

    scale: `input_scale` where `scheme.calibrated`, else None. Groups run along `in`; the last of a row may be short. NaN stays NaN, and
    may spread over its group. Allocations depend on shapes only: float32 for a piece of the values and one number a group.
    """
    result: Tensor = _StraightThrough.apply(values, scheme, scale)  # type: ignore[no-untyped-call]
    return result


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, scheme: ActivationScheme, scale: Tensor | None) -> Tensor:
        return _quantize_dequantize(values, scheme, scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0], None, None


def _quantize_dequantize(values: Tensor, scheme: ActivationScheme, scale: Tensor | None) -> Tensor:
    if not values.numel():
        return values.clone()
    in_features = values.shape[-1]
    tokens = values.reshape(-1, in_features)
    size = PER_CHANNEL if scheme.group_size == PER_TENSOR else scheme.group_size
    rows = to_groups(tokens, size)
    grid = _grid(rows, scheme, scale)
    result = torch.empty(rows.shape, dtype=values.dtype, device=values.device)
    for at in chunks(rows):
        part = grid if len(grid.scale) == 1 else grid.at(at)
        codes = rows[at].to(torch.float32) / part.scale
        if not isinstance(part.zero, float):
            codes += part.zero
        codes = (codes.round_() if part.element is None else part.element.round(codes)).clamp_(part.lowest, part.highest)
        if not isinstance(part.zero, float):
            codes -= part.zero
        torch.mul(codes, part.scale, out=result[at])
    return from_groups(result, (len(tokens), in_features), size).reshape(values.shape)


def _grid(rows: Tensor, scheme: ActivationScheme, scale: Tensor | None) -> Grid:
    """The grid of each of `rows` `[groups, size]`, or one for all of them."""
    half = 2 ** (scheme.bits - 1)
    if scheme.dtype == "int" and not scheme.symmetric:
        low, high = _limits(rows, scheme)
        step = _above_zero((high - low) / (2 * half - 1))
        return Grid(step, (-half - low / step).clamp(-half, half - 1).round(), -half, half - 1)
    if not scheme.dynamic:
        assert scale is not None
        step = scale.reshape(1, 1)
    else:
        low, high = _limits(rows, scheme)
        step = _dynamic_scale(torch.maximum(high, -low), scheme, scale)
    if scheme.dtype == "int":
        return Grid(step, 0.0, -half, half - 1)
    element = element_of(scheme)
    return Grid(step, 0.0, -element.largest, element.largest, element)


def _limits(rows: Tensor, scheme: ActivationScheme) -> tuple[Tensor, Tensor]:
    """Smallest ≤ 0 and largest ≥ 0 of each row, float32 `[groups, 1]`, or of all together, `[1, 1]`."""
    low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    if scheme.group_size == PER_TENSOR:
        low, high = low.amin(0, keepdim=True), high.amax(0, keepdim=True)
    return low.to(torch.float32).clamp_(max=0), high.to(torch.float32).clamp_(min=0)


def _dynamic_scale(magnitude: Tensor, scheme: ActivationScheme, whole: Tensor | None) -> Tensor:
    """Scale of symmetric groups of largest `magnitude`, same shape. whole: `nv`'s global scale."""
    if scheme.dtype in ("int", "fp"):
        return _symmetric_scale(magnitude, scheme)
    if scheme.dtype == "nv_fp":
        assert whole is not None
        return block_scale(magnitude, whole).to(torch.float32) / whole
    return power_scale(magnitude, element_of(scheme), up=scheme.dtype == "mx_fp_rceil")


def _symmetric_scale(magnitude: Tensor, scheme: ActivationScheme) -> Tensor:
    """`fp` and `int`."""
    if scheme.dtype == "fp":
        return (magnitude / E4M3.largest).clamp(min=MIN_FP8_SCALE)
    return _above_zero(magnitude / ((2**scheme.bits - 1) / 2))


def _above_zero(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, ZERO_SCALE, scale)
