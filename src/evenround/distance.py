"""How far quantized weights may be from their originals. Two bounds hold for rounding, tuned or not:

* each code is W / scale + V rounded, plus the zero point, clipped to the range, and V cannot travel further than the sum of its steps:
  about 0.5 with a step size of 1 / iters. It finds single damaged codes. It does not hold for methods that move weights before they round
  them (GPTQ, AWQ);
* the RMS error of a layer is at most 0.6 of the RMS step of the grid that plain rounding of the original would use (rounding each weight up
  or down by chance gives 0.58, plain rounding 0.29), and never above 1.1 times the RMS of the weights: another layer's weights give 1.4.
  The first part is no theorem: clip factors far below 1 could exceed it, and no tuning that helps does.
"""

from dataclasses import dataclass

from torch import Tensor

from evenround.numerics.integer import QuantizedWeight, group_range, make_grid, to_groups
from evenround.scheme import PER_TENSOR, WeightScheme

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
    steps = make_grid(*group_range(to_groups(original, scheme.group_size)), 1.0, 1.0, scheme).scale
    step, rms, error = (float(part.double().square().mean().sqrt()) for part in (steps, original, found - original))
    bound = min(0.6 * step / rms, 1.1) if rms else 1.0
    return LayerError(name=name, scheme=scheme.label, relative_rmse=error / (rms or step), bound=bound)


def far_codes(quantized: QuantizedWeight, original: Tensor, *, travel: float, exact: bool) -> int:
    """Number of codes that are no rounding of W / scale + V + zero point, for `original` float32 `[out, in]`.

    `travel`: the largest V, 0 for plain rounding. `exact`: weights were rounded as they are in `original`; else
    they may have passed through bfloat16 before.
    """
    tolerance, slack = 0.501 + travel, 0.0 if exact else 2.0**-8
    groups = quantized.scale.shape[1]
    step = max(1, PIECE // max(1, original.shape[1]))
    count = 0
    for start in range(0, original.shape[0], step):
        rows = slice(start, start + step)
        of_rows = slice(None) if quantized.scheme.group_size == PER_TENSOR else rows
        scale, zero = (part[of_rows].float().unsqueeze(-1) for part in (quantized.scale, quantized.zero_point))
        ratio = original[rows].unflatten(1, (groups, -1)) / scale
        wanted = (ratio + zero).clamp_(0, 2**quantized.scheme.bits - 1)
        distance = (quantized.codes[rows].unflatten(1, (groups, -1)) - wanted).abs_()
        count += int((distance > tolerance + slack * ratio.abs_()).sum())
    return count
