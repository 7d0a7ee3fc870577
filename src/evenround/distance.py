"""How far quantized weights may be from their originals. Two bounds hold for rounding, tuned or not:

* each code is W / scale + V rounded, plus the zero point, clipped to the range, and V cannot travel further than the sum of its steps:
  about 0.5 with a step size of 1 / iters. V counts in steps of the grid, which for floating point codes are those around the number. It
  finds single damaged codes. It does not hold for methods that move weights before they round them (GPTQ, AWQ);
* the RMS error of a layer is at most 0.6 of the RMS step of the grid that plain rounding of the original would use (rounding each weight up
  or down by chance gives 0.58, plain rounding 0.29), and never above 1.1 times the RMS of the weights: another layer's weights give 1.4.
  The first part is no theorem: clip factors far below 1 could exceed it, and no tuning that helps does.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from evenround.numerics.elements import element_of
from evenround.numerics.grouping import chunks, per_element, to_groups
from evenround.numerics.quantized import QuantizedWeight
from evenround.numerics.weights import Grid, global_scale, group_limits, make_grid
from evenround.scheme import WeightScheme

PIECE = 1 << 22
"""Weights looked at once by `far_codes`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerError:
    """How far a quantized layer is from the original."""

    name: str
    scheme: str
    relative_rmse: float
    """RMS of W' - W over RMS of W (over the grid's step for a layer of zeros)."""
    bound: float
    """What the scheme allows."""


def layer_error(name: str, scheme: WeightScheme, found: Tensor, original: Tensor) -> LayerError:
    """The error of `found` against `original`, both float32 `[out, in]`."""
    rows = to_groups(original, scheme.group_size)
    limits = group_limits(rows, scheme)
    whole = global_scale(limits[0].amax()).reshape(1) if scheme.dtype == "nv_fp" else None
    grid = make_grid(limits, (1.0, 1.0), scheme, whole)
    filled = None if rows.numel() == original.numel() else to_groups(torch.ones_like(original), scheme.group_size)
    step = _rms_step(rows, grid, filled)
    rms, error = (float(part.double().square().mean().sqrt()) for part in (original, found - original))
    bound = min(0.6 * step / rms, 1.1) if rms else 1.0
    return LayerError(name=name, scheme=scheme.label, relative_rmse=error / (rms or step), bound=bound)


def _rms_step(rows: Tensor, grid: Grid, filled: Tensor | None) -> float:
    """RMS over the elements of `[groups, size]` of the distance between neighbours on the grid; `filled`: 0 where a group is padded."""
    if grid.element is None:
        return float(grid.scale.double().square().mean().sqrt())
    total = 0.0
    for at in chunks(rows):
        steps = grid.element.spacing(rows[at] / grid.scale[at]).mul_(grid.scale[at])
        total += float((steps if filled is None else steps.mul_(filled[at])).double().square().sum())
    return (total / (rows.numel() if filled is None else float(filled.sum()))) ** 0.5


def far_codes(quantized: QuantizedWeight, original: Tensor, *, travel: float, exact: bool, whole_steps: bool = True) -> int:
    """Number of codes that are no rounding of W / scale + V + zero point, for `original` float32 `[out, in]`.

    `travel`: the largest V, 0 for plain rounding. `exact`: weights were rounded as they are in `original`; else
    they may have passed through bfloat16 before. `whole_steps`: V of floating point codes counts in their steps; False: as auto-round adds
    it, to W / scale itself, so that small numbers travel over many steps.
    """
    slack = 0.0 if exact else 2.0**-8
    count = 0
    for at, ratio in _ratios(quantized, original):
        if quantized.zero_point is not None:
            zero = _of_rows(quantized.zero_point, quantized.scheme, at, original).float()
            wanted = (ratio + zero).clamp_(0, 2**quantized.scheme.bits - 1)
            distance, allowed = (quantized.codes[at] - wanted).abs_(), torch.full_like(ratio, 0.501 + travel)
        else:
            element = element_of(quantized.scheme)
            found = element.decode(quantized.codes[at])
            step = element.spacing(ratio)
            reach = travel * (step if whole_steps else step.clamp(min=1.0))
            allowed = reach + 0.501 * torch.maximum(step, element.spacing(found))  # V may reach where steps are longer
            distance = (found - ratio.clamp(-element.largest, element.largest)).abs_()
        count += int((~(distance <= allowed + slack * ratio.abs())).sum())
    return count


def _ratios(quantized: QuantizedWeight, original: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """W / scale, piece by piece of the rows."""
    scales, step = quantized.scales(), max(1, PIECE // max(1, original.shape[1]))
    for start in range(0, original.shape[0], step):
        at = slice(start, start + step)
        yield at, original[at] / _of_rows(scales, quantized.scheme, at, original)


def _of_rows(per_group: Tensor, scheme: WeightScheme, at: slice, original: Tensor) -> Tensor:
    return per_element(per_group, scheme.group_size, at, (original.shape[0], original.shape[1]))
