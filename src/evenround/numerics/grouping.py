"""Weights as groups that share a scale, and the pieces that elementwise work is done in.

A weight is `[out, in]`; its groups are the rows of `[groups, size]`. Along `in` that is a view; tiles are gathered into a copy.
"""

import torch
from torch import Tensor

from evenround.scheme import PER_CHANNEL, PER_TENSOR, GroupSize

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


def to_groups(weight: Tensor, group_size: GroupSize) -> Tensor:
    """`[out, in]` → `[groups, size]`, a view unless groups are ragged (zeros fill them, which move no limit of a group) or tiles."""
    if isinstance(group_size, tuple):
        return _tiles(weight, *group_size)
    in_features = weight.shape[1]
    if group_size == PER_TENSOR:
        return weight.reshape(1, -1)
    size = in_features if group_size == PER_CHANNEL else group_size
    ragged = in_features % size
    if ragged:
        weight = torch.nn.functional.pad(weight, (0, size - ragged))
    return weight.reshape(-1, size)


def _tiles(weight: Tensor, rows: int, columns: int) -> Tensor:
    down, across = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
    missing = (0, across * columns - weight.shape[1], 0, down * rows - weight.shape[0])
    if any(missing):
        weight = torch.nn.functional.pad(weight, missing)
    return weight.reshape(down, rows, across, columns).transpose(1, 2).reshape(down * across, rows * columns)


def from_groups(rows: Tensor, shape: tuple[int, int], group_size: GroupSize) -> Tensor:
    """Inverse of `to_groups` for a weight of `shape` `[out, in]`."""
    out_features, in_features = shape
    if isinstance(group_size, tuple):
        down, across = -(-out_features // group_size[0]), -(-in_features // group_size[1])
        whole = rows.reshape(down, across, *group_size).transpose(1, 2).reshape(down * group_size[0], across * group_size[1])
        return whole[:out_features, :in_features]
    return rows.reshape(out_features, -1)[:, :in_features] if rows.numel() else rows.reshape(shape)


def per_element(per_group: Tensor, group_size: GroupSize, at: slice, shape: tuple[int, int]) -> Tensor:
    """For the rows `at` of a weight of `shape`, the value of each element's group; `[rows, 1]` or `[1, 1]` where a whole row shares one.

    per_group: `[out, groups]`, or as `WeightScheme.scale_shape` tells.
    """
    if group_size == PER_TENSOR:
        return per_group
    if isinstance(group_size, tuple):
        numbers = torch.arange(at.start, min(at.stop, shape[0]), device=per_group.device) // group_size[0]
        return per_group[numbers].repeat_interleave(group_size[1], dim=1)[:, : shape[1]]
    if group_size == PER_CHANNEL:
        return per_group[at]
    return per_group[at].repeat_interleave(group_size, dim=1)[:, : shape[1]]
