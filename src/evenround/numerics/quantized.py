"""A quantized weight as a value: codes and scales, independent of any file format."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from evenround.numerics.elements import element_of
from evenround.numerics.grouping import chunks, per_element
from evenround.scheme import WeightScheme

MX_BIAS = 127
"""Stored exponents of `mx` scales: 2^(stored - 127)."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A quantized `[out, in]` weight. Integer: W' = scale * (codes - zero_point); else: W' = element(codes) * scale."""

    codes: Tensor
    """uint8 `[out, in]`. Integer: 0 … 2^bits - 1, symmetric ones with the offset 2^(bits-1); else codes of `numerics.elements`."""
    scale: Tensor
    """Shape `WeightScheme.scale_shape`: `[out, groups]`, `[1, 1]` per tensor, `[out / rows, in / columns]` for tiles.

    int: float16, may be negative in symmetric schemes; fp: float32; mx: uint8, 2^(scale - 127); nv: float8_e4m3fn, to be divided by
    `global_scale`.
    """
    zero_point: Tensor | None
    """int: uint8, same shape as `scale`, 0 … 2^bits - 1; 2^(bits-1) everywhere if symmetric. Else None."""
    scheme: WeightScheme
    global_scale: Tensor | None = None
    """nv: float32 `[1]`, 2688 / largest magnitude of the layers that are served as one. Else None."""
    input_scale: Tensor | None = None
    """float32 `[1]`, where activations have a calibrated scale. fp, int: input = scale * code. nv: 2688 / largest magnitude seen, as
    `global_scale`."""

    def scales(self) -> Tensor:
        """float32 factors of the codes, same shape as `scale`."""
        if self.scheme.dtype == "nv_fp":
            assert self.global_scale is not None
            return self.scale.to(torch.float32) / self.global_scale
        if self.scale.dtype == torch.uint8:
            return torch.ldexp(torch.ones_like(self.scale, dtype=torch.float32), self.scale.to(torch.int32) - MX_BIAS)
        return self.scale.to(torch.float32)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """`[out, in]` in `dtype`, multiplied in float32."""
        result = torch.empty(self.codes.shape, dtype=dtype, device=self.codes.device)
        scales, shape, size = self.scales(), (self.codes.shape[0], self.codes.shape[1]), self.scheme.group_size
        for at in chunks(self.codes):
            if self.zero_point is None:
                centred = element_of(self.scheme).decode(self.codes[at])
            else:
                centred = self.codes[at].to(torch.float32).sub_(per_element(self.zero_point, size, at, shape))
            result[at] = centred.mul_(per_element(scales, size, at, shape))
        return result

    def to(self, device: torch.device) -> "QuantizedWeight":
        """The same on `device`."""
        zero, whole, inputs = (None if part is None else part.to(device) for part in (self.zero_point, self.global_scale, self.input_scale))
        return replace(
            self, codes=self.codes.to(device), scale=self.scale.to(device), zero_point=zero, global_scale=whole, input_scale=inputs
        )
