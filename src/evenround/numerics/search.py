"""Scales that a search finds best for a weight and the inputs that it meets: opt-RTN's scales, and what tuning may begin from.

For each group the candidate is kept under which eᵀ M e is smallest, e = W' - W of the group and M the second moments x xᵀ of its input
channels: the expected squared error of the output, if groups were independent. auto-round takes the diagonal of M alone, which misleads:
clipping a group's large weights shrinks all of them together, and inputs that go together make that a large error (docs/log.md: opt-RTN by
the diagonal is worse than plain rounding on the shipped model, by M far better).

Candidates are tried for all groups at once: shares of the plain scale for integers, with either sign where the range is lopsided; half, the
same and twice the power of two for `mx`; all E4M3 block scales from half to one and a half times the plain one for `nv`.
"""

import torch
from torch import Tensor

from evenround.numerics.elements import E2M1, E4M3
from evenround.numerics.grouping import ACCELERATOR_CHUNK, to_groups
from evenround.numerics.weights import MIN_SCALE, Grid, block_scale, make_grid
from evenround.scheme import PER_CHANNEL, PER_TENSOR, WeightScheme

SHARES = tuple(0.8 + 0.0125 * step for step in range(37))
"""Symmetric integer scales tried, of the plain one: 0.8 to 1.25."""

ENDS = tuple(1.1 - 0.05 * step for step in range(8))
"""Shares of each end of the range tried for asymmetric integers."""

DAMPING = 1e-2
"""Added to the diagonal of M, of its mean: a channel that no calibration text excites still counts."""

WIDEST = 128
"""Channels whose moments are taken together, where groups are wider."""

PIECE = 1 << 20
"""Weights that a CPU works on at once."""


def searchable(scheme: WeightScheme) -> bool:
    """Whether a search makes sense: FP8 codes and 8-bit integers lose nothing to their scale."""
    return scheme.dtype != "fp" and not (scheme.dtype == "int" and scheme.bits == 8) and scheme.group_size != PER_TENSOR


def moment_shape(scheme: WeightScheme, in_features: int) -> tuple[int, int, int]:
    """`[squares, size, size]`: of the squares of M that are kept, which cover whole groups."""
    assert isinstance(scheme.group_size, int)
    group = in_features if scheme.group_size == PER_CHANNEL else scheme.group_size
    size = next(size for size in range(min(group, WIDEST), 0, -1) if group % size == 0)
    return scheme.groups(in_features) * (group // size), size, size


def moments(inputs: Tensor, into: Tensor) -> None:
    """Add Σ x xᵀ of neighbouring channels of `inputs` `[tokens, in]` to `into` `[squares, size, size]`."""
    squares, size, _ = into.shape
    missing = squares * size - inputs.shape[1]
    if missing:
        inputs = torch.nn.functional.pad(inputs, (0, missing))
    by_square = inputs.reshape(len(inputs), -1, size).transpose(0, 1)
    torch.baddbmm(into, by_square.transpose(1, 2), by_square, out=into)


def search_limits(
    weight: Tensor,
    limits: tuple[Tensor, ...],
    scheme: WeightScheme,
    seen: Tensor,
    whole: Tensor | None = None,
    tries: int | None = None,
) -> tuple[Tensor, ...]:
    """Limits, `[groups, 1]` each, under which `make_grid` with clip factors 1 gives the best scales found.

    weight: `[out, in]`. limits: its own. seen: M, `[squares, size, size]` as `moments` adds it up. whole: `nv`'s global scale.
    tries: only so many candidates, as many as it takes to see all memory (None: all).
    """
    rows = to_groups(weight, scheme.group_size)
    groups = scheme.groups(weight.shape[1])
    mean = seen.diagonal(dim1=1, dim2=2).mean()
    damped = seen + torch.eye(seen.shape[1], device=seen.device) * (DAMPING * mean + torch.finfo(torch.float32).tiny)
    error = _Error(damped, groups)
    result = tuple(torch.empty_like(limit) for limit in limits)
    host = rows.device.type == "cpu" and rows.device.index is None
    step = max(1, (PIECE if host else ACCELERATOR_CHUNK) // (groups * rows.shape[1])) * groups
    for start in range(0, len(rows), step):
        at = slice(start, start + step)
        found = _best(rows[at].to(limits[0].dtype), tuple(limit[at] for limit in limits), scheme, error, whole, tries)
        for into, values in zip(result, found, strict=True):
            into[at] = values
    return result


class _Error:
    """eᵀ M e of groups under a grid."""

    def __init__(self, moments: Tensor, groups: int) -> None:
        self.moments, self.groups = moments, groups

    def __call__(self, rows: Tensor, grid: Grid) -> Tensor:
        """`[groups, 1]` for rows `[groups, size]` of whole output channels."""
        codes = grid.round(rows / grid.scale, None).clamp_(grid.lowest, grid.highest)
        if not isinstance(grid.zero, float):
            codes -= grid.zero
        squares, side, _ = self.moments.shape
        error = codes.mul_(grid.scale).sub_(rows).reshape(-1, squares, side).transpose(0, 1)
        per_square = torch.bmm(error, self.moments).mul_(error).sum(-1)  # [squares, out]
        return per_square.reshape(self.groups, -1, per_square.shape[1]).sum(1).t().reshape(-1, 1)


def _best(
    rows: Tensor, limits: tuple[Tensor, ...], scheme: WeightScheme, error: _Error, whole: Tensor | None, tries: int | None
) -> tuple[Tensor, ...]:
    if scheme.dtype == "int":
        return _symmetric(rows, limits, scheme, error, tries) if scheme.symmetric else _asymmetric(rows, limits, scheme, error, tries)
    candidates = _magnitudes(limits[0], scheme, whole)[: None if tries is None else tries + 1]
    best, least = candidates[0], error(rows, make_grid((candidates[0],), (1.0,), scheme, whole))
    for candidate in candidates[1:]:
        found = error(rows, make_grid((candidate,), (1.0,), scheme, whole))
        better = found < least
        best, least = torch.where(better, candidate, best), torch.where(better, found, least)
    return (best,)


def _magnitudes(plain: Tensor, scheme: WeightScheme, whole: Tensor | None) -> list[Tensor]:
    if scheme.dtype != "nv_fp":
        return [plain, plain * 0.5, plain * 2.0]
    assert whole is not None
    code = block_scale(plain, whole).view(torch.uint8).to(torch.int16)
    highest = int(E4M3.encode(torch.tensor(E4M3.largest)))
    shifted = [(code + shift).clamp(1, highest).to(torch.uint8) for shift in (0, *(shift for shift in range(-8, 6) if shift))]
    return [E4M3.decode(scale) * E2M1.largest / whole for scale in shifted]


def _as_half(scale: Tensor) -> Tensor:
    """A scale as float16 holds it, not nearer to zero than plain rounding lets it be."""
    half = scale.to(torch.float16)
    return torch.where(half < 0, half.clamp(max=-MIN_SCALE), half.clamp(min=MIN_SCALE)).to(scale.dtype)


def _symmetric(rows: Tensor, limits: tuple[Tensor, ...], scheme: WeightScheme, error: _Error, tries: int | None) -> tuple[Tensor, ...]:
    half = 2 ** (scheme.bits - 1)
    plain = make_grid(limits, (1.0, 1.0), scheme)
    best, least = plain.scale, error(rows, plain)
    for share in [sign * share for share in SHARES for sign in (1, -1)][:tries]:
        scale = _as_half(plain.scale * share)
        found = error(rows, Grid(scale, 0.0, -half, half - 1))
        better = found < least
        best, least = torch.where(better, scale, best), torch.where(better, found, least)
    reach = best.abs() * half
    return torch.where(best > 0, -reach, 0.0), torch.where(best > 0, 0.0, reach)


def _asymmetric(rows: Tensor, limits: tuple[Tensor, ...], scheme: WeightScheme, error: _Error, tries: int | None) -> tuple[Tensor, ...]:
    highest = 2**scheme.bits - 1
    low, high = limits
    plain = make_grid(limits, (1.0, 1.0), scheme)
    assert isinstance(plain.zero, Tensor)
    scale, zero, least = plain.scale, plain.zero, error(rows, plain)
    for lower, upper in [(lower, upper) for lower in ENDS for upper in ENDS][:tries]:
        grid = make_grid((low * lower, high * upper), (1.0, 1.0), scheme)
        assert isinstance(grid.zero, Tensor)
        found = error(rows, grid)
        better = found < least
        scale, zero = torch.where(better, grid.scale, scale), torch.where(better, grid.zero, zero)
        least = torch.where(better, found, least)
    return -zero * scale, (highest - zero) * scale
