"""Quantize-dequantize of weights, as SignRound tunes it (arXiv 2309.05516), for every data type by one path.

Shapes: a weight is `[out, in]`; its groups are rows of `[groups, size]` (`numerics.grouping`); a scale, limit or clip factor is
`[groups, 1]`. All arithmetic is float32 (float64 for float64 weights). Scales are rounded to what files hold before they are used, because
that is what every reader multiplies with: float16 for `int`, powers of two for `mx`, E4M3 over a float32 for `nv`; `fp` has float32 ones.

Each group has limits (known from the weight, or searched: `numerics.search`) and clip factors, which tuning moves:

  int symmetric ("full range"): limits low ≤ 0 ≤ high. The limit of larger magnitude maps to -2^(b-1), so the scale carries its sign's
    opposite; asymmetric: scale = (high - low) / (2^b - 1), zero point = round(-low / scale).
  others: one limit, the magnitude that the element's largest number stands for.

The rounding offset V counts in steps of the grid where the weight lies. For integers that is SignRound's V; for floating point elements,
whose steps grow with magnitude, auto-round adds V to the scaled weight instead, so that large weights can hardly move to a neighbour.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from evenround.numerics.elements import E2M1, E4M3, Element, element_of
from evenround.numerics.grouping import chunks, from_groups, to_groups
from evenround.numerics.quantized import MX_BIAS, QuantizedWeight
from evenround.scheme import WeightScheme

MIN_SCALE = 1e-5
"""Integer scales are kept at least this far from zero; smaller ones drown in float16's subnormals."""

MIN_FP8_SCALE = 1 / (448 * 512)
"""Scales of `fp` are at least this, as in vLLM."""

MIN_BLOCK_SCALE = 2.0**-9
"""Smallest positive E4M3: block scales of `nv` are not zero, so that nothing is divided by it."""

NV_RANGE = E4M3.largest * E2M1.largest
"""2688: what the largest magnitude of a tensor maps to under `nv`'s global scale."""

Parameters = Sequence[Tensor | float]


def group_limits(rows: Tensor, scheme: WeightScheme) -> tuple[Tensor, ...]:
    """Limits of each row of `[groups, size]`, float32 `[groups, 1]`: (smallest ≤ 0, largest ≥ 0) for `int`, else (largest magnitude,)."""
    low = rows.amin(-1, keepdim=True).clamp(max=0).to(_wide(rows))
    high = rows.amax(-1, keepdim=True).clamp(min=0).to(_wide(rows))
    return (low, high) if scheme.dtype == "int" else (torch.maximum(high, -low),)


def global_scale(magnitude: Tensor) -> Tensor:
    """`nv`'s float32 factor for tensors of largest `magnitude`: 2688 / magnitude, 1 for zeros and what is so small that it overflows."""
    factor = (NV_RANGE / magnitude).to(torch.float32)
    return torch.where((magnitude > 0) & torch.isfinite(factor), factor, 1.0)


def clip_count(scheme: WeightScheme) -> int:
    """How many clip factors a group has: as many as limits."""
    return 2 if scheme.dtype == "int" else 1


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _keep_from_zero(scale: Tensor) -> Tensor:
    """Round to float16 and keep |scale| ≥ 1e-5 with its sign; float64 (tests of gradients) skips the rounding."""
    if scale.dtype == torch.float64:
        return torch.where(scale < 0, scale.clamp(max=-MIN_SCALE), scale.clamp(min=MIN_SCALE))
    half = scale.to(torch.float16)
    return torch.where(half < 0, half.clamp(max=-MIN_SCALE), half.clamp(min=MIN_SCALE)).to(torch.float32)


@dataclass(frozen=True, slots=True)
class Grid:
    """The grid of each group: W' = scale * (code - zero), code from `lowest` to `highest`, or numbers of `element`.

    `scale` and `zero` are `[groups, 1]`.
    """

    scale: Tensor
    zero: Tensor | float
    lowest: float
    highest: float
    element: Element | None = None

    def at(self, part: slice) -> "Grid":
        """The grid of these groups."""
        zero = self.zero if isinstance(self.zero, float) else self.zero[part]
        return Grid(self.scale[part], zero, self.lowest, self.highest, self.element)

    def round(self, ratio: Tensor, offset: Tensor | None) -> Tensor:
        """round(W / scale + V) + zero from `ratio` = W / scale, which is overwritten: codes (float) before clipping, `[groups, size]`."""
        if self.element is not None:
            if offset is not None:
                ratio += offset * self.element.spacing(ratio)
            return self.element.round(ratio)
        if offset is not None:
            ratio += offset
        ratio.round_()
        return ratio if isinstance(self.zero, float) else ratio.add_(self.zero)


def make_grid(limits: Parameters, clips: Parameters, scheme: WeightScheme, whole: Tensor | None = None) -> Grid:
    """The grid over limits times clip factors, everything `[groups, 1]`. whole: `nv`'s global scale, `[1]`."""
    if scheme.dtype == "int":
        return _integer_grid(limits, clips, scheme)
    element = element_of(scheme)
    magnitude = limits[0] * clips[0]
    assert isinstance(magnitude, Tensor)
    return Grid(_float_scale(magnitude, element, scheme, whole), 0.0, -element.largest, element.largest, element)


def _integer_grid(limits: Parameters, clips: Parameters, scheme: WeightScheme) -> Grid:
    low, high = limits[0] * clips[0], limits[1] * clips[1]
    assert isinstance(low, Tensor) and isinstance(high, Tensor)
    if scheme.symmetric:
        half = 2 ** (scheme.bits - 1)
        return Grid(_keep_from_zero(torch.where(high < -low, -low, -high) / half), 0.0, -half, half - 1)
    highest = 2**scheme.bits - 1
    scale = _keep_from_zero((high - low) / highest)
    return Grid(scale, torch.round(-low / scale).clamp(0, highest), 0, highest)


def _float_scale(magnitude: Tensor, element: Element, scheme: WeightScheme, whole: Tensor | None) -> Tensor:
    """float32 `[groups, 1]`."""
    if scheme.dtype == "fp":
        return (magnitude / element.largest).clamp(min=MIN_FP8_SCALE)
    if scheme.dtype == "nv_fp":
        assert whole is not None
        return block_scale(magnitude, whole).to(magnitude.dtype) / whole
    return power_scale(magnitude, element, up=scheme.dtype == "mx_fp_rceil")


def block_scale(magnitude: Tensor, whole: Tensor) -> Tensor:
    """`nv`'s scale of blocks with this largest magnitude, float8_e4m3fn of the same shape; zero is avoided."""
    return (whole * (magnitude / E2M1.largest)).clamp(MIN_BLOCK_SCALE, E4M3.largest).to(torch.float32).to(torch.float8_e4m3fn)


def power_scale(magnitude: Tensor, element: Element, up: bool) -> Tensor:
    """`mx`'s scale of blocks with this largest magnitude, a power of two of the same shape and dtype.

    2^(floor(log2 magnitude) - largest exponent of the element), under which the largest may saturate; `up`: the smallest under which it
    does not. Blocks of zeros have auto-round's scale for magnitude 2.
    """
    largest, width = math.frexp(element.largest)
    mantissa, exponent = torch.frexp(torch.where(magnitude > 0, magnitude, 2.0))
    exponent = exponent - width + (mantissa > largest).to(exponent.dtype) if up else exponent - width
    return torch.ldexp(torch.ones_like(magnitude), exponent.clamp(-MX_BIAS, MX_BIAS))


def quantize_dequantize(rows: Tensor, offset: Tensor | None, grid: Grid, dtype: torch.dtype) -> Tensor:
    """W' `[groups, size]` in `dtype` for weights `rows` and rounding offsets V of the same shape."""
    result = torch.empty(rows.shape, dtype=dtype, device=rows.device)
    for at in chunks(rows):
        part = grid.at(at)
        codes = part.round(rows[at] / part.scale, None if offset is None else offset[at]).clamp_(part.lowest, part.highest)
        if not isinstance(part.zero, float):
            codes -= part.zero
        torch.mul(codes, part.scale, out=result[at])
    return result


def _gradients(grad: Tensor, rows: Tensor, offset: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
    """Straight-through gradients: of V `[groups, size]`, of scale and of zero `[groups, 1]`, from the gradient of W' `[groups, size]`.

    With t = W/s, r = round(t + V) + z, inside = (lowest ≤ r ≤ highest), q = clip(r), and h the grid's step around t (1 for integers):
    dW'/dV = s·h·inside, dW'/ds = (q - z) - t·inside, dW'/dz = s·(inside - 1).
    """
    wide = _wide(rows)
    grad_offset = torch.empty(rows.shape, dtype=wide, device=rows.device)
    grad_scale, grad_zero = torch.empty_like(grid.scale), torch.empty_like(grid.scale)
    for at in chunks(rows):
        part = grid.at(at)
        ratio = rows[at] / part.scale
        codes = part.round(ratio.clone(), offset[at])
        clipped = codes.clamp(part.lowest, part.highest)
        inside = codes.eq_(clipped)
        if not isinstance(part.zero, float):
            clipped -= part.zero
        given = grad[at].to(wide)
        kept = inside.mul_(given)
        scale_gradient = (given * clipped).sum(-1, keepdim=True)
        grad_scale[at] = scale_gradient.sub_((kept * ratio).sum(-1, keepdim=True))
        grad_zero[at] = (kept.sum(-1, keepdim=True) - given.sum(-1, keepdim=True)).mul_(part.scale)
        if part.element is not None:
            kept *= part.element.spacing(ratio)
        torch.mul(kept, part.scale, out=grad_offset[at])
    return grad_offset, grad_scale, grad_zero


def _clip_gradients(
    grad_scale: Tensor, grad_zero: Tensor, limits: Sequence[Tensor], clips: Sequence[Tensor], grid: Grid, scheme: WeightScheme
) -> tuple[Tensor, ...]:
    """Gradients of the clip factors, `[groups, 1]`, from those of scale and zero; zero where the scale sits at its minimum.

    A scale is rounded to what files hold: straight through.
    """
    if scheme.dtype != "int":
        assert grid.element is not None
        return (grad_scale * limits[0] / grid.element.largest,)
    (low, high), (min_clip, max_clip) = limits, clips
    grad_scale = grad_scale * (grid.scale.abs() > MIN_SCALE * 1.01)
    if scheme.symmetric:
        half = 2 ** (scheme.bits - 1)
        below_decides = high * max_clip < -low * min_clip
        return grad_scale * torch.where(below_decides, -low, 0) / half, grad_scale * torch.where(below_decides, 0, -high) / half
    highest = grid.highest
    through_zero = grad_zero * low * min_clip / (grid.scale * grid.scale) * (grid.scale.abs() > MIN_SCALE * 1.01)
    total = grad_scale + through_zero
    return -total * low / highest - grad_zero * low / grid.scale, total * high / highest


def qdq(
    rows: Tensor,
    offset: Tensor,
    clips: Sequence[Tensor],
    limits: Sequence[Tensor],
    scheme: WeightScheme,
    dtype: torch.dtype,
    whole: Tensor | None = None,
) -> Tensor:
    """W' `[groups, size]` in `dtype` of weights `rows` and V of the same shape; clip factors and limits are `[groups, 1]`."""
    return quantize_dequantize(rows, offset, make_grid(limits, clips, scheme, whole), dtype)


def parameter_gradients(
    grad: Tensor,
    rows: Tensor,
    offset: Tensor,
    clips: Sequence[Tensor],
    limits: Sequence[Tensor],
    scheme: WeightScheme,
    whole: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Straight-through gradients of V `[groups, size]` and of each clip factor `[groups, 1]`, from that of W' `[groups, size]`.

    Needs nothing from the forward pass but its arguments: codes, masks and the grid are computed again, as 12 elementwise passes are
    cheaper than 5 bytes kept per weight while the block runs.
    """
    grid = make_grid(limits, clips, scheme, whole)
    grad_offset, grad_scale, grad_zero = _gradients(grad, rows, offset, grid)
    return grad_offset, *_clip_gradients(grad_scale, grad_zero, limits, clips, grid, scheme)


def quantize(
    weight: Tensor,
    scheme: WeightScheme,
    offset: Tensor | None = None,
    clips: Parameters = (1.0, 1.0),
    limits: Sequence[Tensor] | None = None,
    whole: Tensor | None = None,
) -> QuantizedWeight:
    """Quantize `weight` `[out, in]` with tuned parameters (`offset` `[groups, size]`, clips `[groups, 1]`), or by plain rounding without.

    Bit for bit what `qdq` gives: same grid, same rounding. A float64 weight is rounded to float32 first.
    limits: of each group, None: the weight's own. whole: `nv`'s global scale `[1]`, None: the weight's own.
    Raises `OverflowError` when a scale does not fit float16.
    """
    rows = to_groups(weight.float() if weight.dtype == torch.float64 else weight, scheme.group_size)
    own = group_limits(rows, scheme)
    limits = own if limits is None else limits
    if scheme.dtype == "nv_fp" and whole is None:
        whole = global_scale(own[0].amax()).reshape(1)
    grid = make_grid(limits, clips, scheme, whole)
    if scheme.dtype == "int" and not torch.isfinite(grid.scale).all():
        low, high = own
        widest = torch.maximum(high, -low) / 2 ** (scheme.bits - 1) if scheme.symmetric else (high - low) / (2**scheme.bits - 1)
        raise OverflowError(f"a scale of magnitude {float(widest.max()):.3g} does not fit float16")
    shift = 2 ** (scheme.bits - 1) if scheme.symmetric else 0
    codes = torch.empty(rows.shape, dtype=torch.uint8, device=rows.device)
    for at in chunks(rows):
        part = grid.at(at)
        found = part.round(rows[at] / part.scale, None if offset is None else offset[at]).clamp_(part.lowest, part.highest)
        codes[at] = found.add_(shift).to(torch.uint8) if part.element is None else part.element.encode(found)
    shape = (weight.shape[0], weight.shape[1])
    per_group = scheme.scale_shape(shape)
    zero = None
    if scheme.dtype == "int":
        zero = (torch.full_like(grid.scale, shift) if isinstance(grid.zero, float) else grid.zero).to(torch.uint8).reshape(per_group)
    return QuantizedWeight(
        codes=from_groups(codes, shape, scheme.group_size).contiguous(),
        scale=_stored_scale(grid.scale, limits, clips, scheme, whole).reshape(per_group),
        zero_point=zero,
        scheme=scheme,
        global_scale=whole,
    )


def _stored_scale(scale: Tensor, limits: Sequence[Tensor], clips: Parameters, scheme: WeightScheme, whole: Tensor | None) -> Tensor:
    """The grid's scale as a `QuantizedWeight` holds it."""
    if scheme.dtype == "int":
        return scale.to(torch.float16)
    if scheme.dtype == "fp":
        return scale
    if scheme.dtype == "nv_fp":
        assert whole is not None
        return block_scale(limits[0] * clips[0], whole)
    return (torch.frexp(scale)[1] - 1 + MX_BIAS).to(torch.uint8)
