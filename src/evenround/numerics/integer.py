"""Integer quantize-dequantize, as SignRound tunes it (arXiv 2309.05516) and as auto-round stores it.

Shapes: a weight is `[out, in]`; its groups are rows of `[groups, size]` (see `to_groups`); a scale or zero point is `[groups, 1]`
there and `[out, in / size]` in a `QuantizedWeight`. All arithmetic is float32 (float64 for float64 weights), scales are rounded to
float16 before they are used, because that is what every reader of these formats multiplies with.

Rounding rules:
  symmetric ("full range"): the element of largest magnitude maps to -2^(b-1), so the scale carries its sign's opposite;
  asymmetric: scale = (max - min) / (2^b - 1), zero point = round(-min / scale).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from evenround.scheme import PER_CHANNEL, PER_TENSOR, WeightScheme

MIN_SCALE = 1e-5
"""Scales are kept at least this far from zero; smaller ones drown in float16's subnormals."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A quantized `[out, in]` weight, independent of any file format. W' = scale * (codes - zero_point)."""

    codes: Tensor
    """uint8 `[out, in]`, 0 … 2^bits - 1. Symmetric codes carry the offset 2^(bits-1) already."""
    scale: Tensor
    """float16 `[out, groups]`, or `[1, 1]` per tensor. Negative scales occur in symmetric schemes."""
    zero_point: Tensor
    """uint8, same shape as `scale`, 0 … 2^bits - 1; 2^(bits-1) everywhere if symmetric."""
    scheme: WeightScheme

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """`[out, in]` in `dtype`, multiplied in float32."""
        result = torch.empty(self.codes.shape, dtype=dtype, device=self.codes.device)
        whole = self.scheme.group_size == PER_TENSOR
        for at in chunks(self.codes):
            zero, scale = (values if whole else values[at] for values in (self.zero_point, self.scale))
            centred = self.codes[at].to(torch.float32).sub_(self._per_element(zero))
            result[at] = centred.mul_(self._per_element(scale))
        return result

    def _per_element(self, per_group: Tensor) -> Tensor:
        """float32, one value an element of the rows; `[rows, 1]` where these share one."""
        wide = per_group.to(torch.float32)
        if self.scheme.group_size in (PER_CHANNEL, PER_TENSOR):
            return wide
        return wide.repeat_interleave(self.scheme.group_size, dim=1)[:, : self.codes.shape[1]]

    def to(self, device: torch.device) -> "QuantizedWeight":
        """The same on `device`."""
        return QuantizedWeight(self.codes.to(device), self.scale.to(device), self.zero_point.to(device), self.scheme)


def to_groups(weight: Tensor, group_size: int) -> Tensor:
    """`[out, in]` → `[groups, size]`, a view unless the last group of a row is ragged (zeros fill it, which move no limit of a group)."""
    out_features, in_features = weight.shape
    if group_size == PER_TENSOR:
        return weight.reshape(1, -1)
    size = in_features if group_size == PER_CHANNEL else group_size
    ragged = in_features % size
    if ragged:
        weight = torch.nn.functional.pad(weight, (0, size - ragged))
    return weight.reshape(-1, size)


def from_groups(rows: Tensor, shape: tuple[int, int]) -> Tensor:
    """Inverse of `to_groups` for a weight of `shape` `[out, in]`."""
    out_features, in_features = shape
    return rows.reshape(out_features, -1)[:, :in_features] if rows.numel() else rows.reshape(shape)


def group_range(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest (≤ 0) and largest (≥ 0) value of each row of `[groups, size]`, each float32 `[groups, 1]`."""
    low = rows.amin(-1, keepdim=True).clamp(max=0)
    high = rows.amax(-1, keepdim=True).clamp(min=0)
    return low.to(_wide(rows)), high.to(_wide(rows))


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
    """The grid of each group: W' = scale * (code - zero), code from `lowest` to `highest`. `scale` and `zero` are `[groups, 1]`."""

    scale: Tensor
    zero: Tensor | float
    lowest: int
    highest: int


def make_grid(low: Tensor, high: Tensor, min_clip: Tensor | float, max_clip: Tensor | float, scheme: WeightScheme) -> Grid:
    """The grid over `[low * min_clip, high * max_clip]`, everything `[groups, 1]`. Symmetric codes run from -2^(b-1) around zero 0."""
    if scheme.symmetric:
        half = 2 ** (scheme.bits - 1)
        below, above = -low * min_clip, high * max_clip
        return Grid(_keep_from_zero(torch.where(above < below, below, -above) / half), 0.0, -half, half - 1)
    highest = 2**scheme.bits - 1
    bottom = low * min_clip
    scale = _keep_from_zero((high * max_clip - bottom) / highest)
    return Grid(scale, torch.round(-bottom / scale).clamp(0, highest), 0, highest)


def round_to_grid(rows: Tensor, offset: Tensor | None, grid: Grid) -> Tensor:
    """Codes (float, `[groups, size]`) before clipping: round(W / scale + V) + zero."""
    codes = rows / grid.scale
    if offset is not None:
        codes += offset
    codes.round_()
    return codes if isinstance(grid.zero, float) else codes.add_(grid.zero)


CHUNK = 1 << 16
"""Elements a CPU works on at once: 256 KiB of float32 stay in the L2 cache over the dozen passes of one QDQ."""

ACCELERATOR_CHUNK = 1 << 25
"""Elements an accelerator works on at once: large enough to fill it, and a temporary takes 128 MiB, not an output head's 2 GB."""


def chunks(rows: Tensor) -> list[slice]:
    """Slices of the rows of `[groups, size]` to work on one after another: cache-sized on a CPU, much larger on an accelerator."""
    count, size = rows.shape
    host = rows.device.type == "cpu" and rows.device.index is None  # `cpu:0` is a simulated accelerator, and works as one
    step = max(1, (CHUNK if host else ACCELERATOR_CHUNK) // max(1, size))
    return [slice(start, start + step) for start in range(0, count, step)]


def _part(grid: Grid, at: slice) -> Grid:
    return Grid(grid.scale[at], grid.zero if isinstance(grid.zero, float) else grid.zero[at], grid.lowest, grid.highest)


def quantize_dequantize(rows: Tensor, offset: Tensor | None, grid: Grid, dtype: torch.dtype) -> Tensor:
    """W' `[groups, size]` in `dtype` for weights `rows` and rounding offsets V of the same shape."""
    result = torch.empty(rows.shape, dtype=dtype, device=rows.device)
    for at in chunks(rows):
        part = _part(grid, at)
        codes = round_to_grid(rows[at], None if offset is None else offset[at], part).clamp_(part.lowest, part.highest)
        if not isinstance(part.zero, float):
            codes -= part.zero
        torch.mul(codes, part.scale, out=result[at])
    return result


def _gradients(grad: Tensor, rows: Tensor, offset: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
    """Straight-through gradients: of V `[groups, size]`, of scale and of zero `[groups, 1]`, from the gradient of W' `[groups, size]`.

    With t = W/s, r = round(t + V) + z, inside = (lowest ≤ r ≤ highest), q = clip(r):
    dW'/dV = s·inside, dW'/ds = (q - z) - t·inside, dW'/dz = s·(inside - 1).
    """
    wide = _wide(rows)
    grad_offset = torch.empty(rows.shape, dtype=wide, device=rows.device)
    grad_scale, grad_zero = torch.empty_like(grid.scale), torch.empty_like(grid.scale)
    for at in chunks(rows):
        part = _part(grid, at)
        ratio = rows[at] / part.scale
        codes = (ratio + offset[at]).round_()
        if not isinstance(part.zero, float):
            codes += part.zero
        clipped = codes.clamp(part.lowest, part.highest)
        inside = codes.eq_(clipped)
        if not isinstance(part.zero, float):
            clipped -= part.zero
        given = grad[at].to(wide)
        kept = inside.mul_(given)
        scale_gradient = (given * clipped).sum(-1, keepdim=True)
        grad_scale[at] = scale_gradient.sub_((ratio.mul_(kept)).sum(-1, keepdim=True))
        grad_zero[at] = (kept.sum(-1, keepdim=True) - given.sum(-1, keepdim=True)).mul_(part.scale)
        torch.mul(kept, part.scale, out=grad_offset[at])
    return grad_offset, grad_scale, grad_zero


def _clip_gradients(
    grad_scale: Tensor, grad_zero: Tensor, low: Tensor, high: Tensor, min_clip: Tensor, max_clip: Tensor, grid: Grid, scheme: WeightScheme
) -> tuple[Tensor, Tensor]:
    """Gradients of the two clip factors, `[groups, 1]`, from those of scale and zero; zero where the scale sits at its minimum."""
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
    min_clip: Tensor,
    max_clip: Tensor,
    low: Tensor,
    high: Tensor,
    scheme: WeightScheme,
    dtype: torch.dtype,
) -> Tensor:
    """W' `[groups, size]` in `dtype` of weights `rows` and V of the same shape; clip factors and limits are `[groups, 1]`."""
    return quantize_dequantize(rows, offset, make_grid(low, high, min_clip, max_clip, scheme), dtype)


def parameter_gradients(
    grad: Tensor, rows: Tensor, offset: Tensor, min_clip: Tensor, max_clip: Tensor, low: Tensor, high: Tensor, scheme: WeightScheme
) -> tuple[Tensor, Tensor, Tensor]:
    """Straight-through gradients of V `[groups, size]` and of both clip factors `[groups, 1]`, from that of W' `[groups, size]`.

    Needs nothing from the forward pass but its arguments: codes, masks and the grid are computed again, as 12 elementwise passes are
    cheaper than 5 bytes kept per weight while the block runs.
    """
    grid = make_grid(low, high, min_clip, max_clip, scheme)
    grad_offset, grad_scale, grad_zero = _gradients(grad, rows, offset, grid)
    return grad_offset, *_clip_gradients(grad_scale, grad_zero, low, high, min_clip, max_clip, grid, scheme)


def quantize(
    weight: Tensor,
    scheme: WeightScheme,
    offset: Tensor | None = None,
    min_clip: Tensor | float = 1.0,
    max_clip: Tensor | float = 1.0,
) -> QuantizedWeight:
    """Quantize `weight` `[out, in]` with tuned parameters (`offset` `[groups, size]`, clips `[groups, 1]`), or by plain rounding without.

    Bit for bit what `qdq` gives: same grid, same rounding. A float64 weight is rounded to float32 first.
    Raises `OverflowError` when a scale does not fit float16.
    """
    rows = to_groups(weight.float() if weight.dtype == torch.float64 else weight, scheme.group_size)
    low, high = group_range(rows)
    grid = make_grid(low, high, min_clip, max_clip, scheme)
    if not torch.isfinite(grid.scale).all():
        widest = torch.maximum(high, -low) / 2 ** (scheme.bits - 1) if scheme.symmetric else (high - low) / (2**scheme.bits - 1)
        raise OverflowError(f"a scale of magnitude {float(widest.max()):.3g} does not fit float16")
    shift = 2 ** (scheme.bits - 1) if scheme.symmetric else 0
    codes = torch.empty(rows.shape, dtype=torch.uint8, device=rows.device)
    for at in chunks(rows):
        part = _part(grid, at)
        found = round_to_grid(rows[at], None if offset is None else offset[at], part).clamp_(part.lowest, part.highest)
        codes[at] = found.add_(shift).to(torch.uint8)
    shape = (weight.shape[0], weight.shape[1])
    per_group = scheme.scale_shape(shape)
    zero = torch.full_like(grid.scale, shift) if isinstance(grid.zero, float) else grid.zero
    return QuantizedWeight(
        codes=from_groups(codes, shape).contiguous(),
        scale=grid.scale.to(torch.float16).reshape(per_group),
        zero_point=zero.to(torch.uint8).reshape(per_group),
        scheme=scheme,
    )
