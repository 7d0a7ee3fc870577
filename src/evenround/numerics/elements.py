"""The small floating point numbers: FP4 E2M1, FP8 E4M3 and the four-bit integers of MXINT4, as grids to round to and as codes.

Rounding is to nearest, halves to the even mantissa, in the element's own exponent range with subnormals, and saturates: none of them has
an infinity that a weight may become. Sources: OCP Microscaling Formats 1.0 §5.3, OCP FP8 1.0.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from evenround.scheme import ActivationScheme, WeightScheme


@dataclass(frozen=True, slots=True)
class Element:
    """A set of numbers ±m·2^e. Codes are sign, exponent, mantissa from the highest bit down."""

    bits: int
    mantissa_bits: int
    lowest_exponent: int
    """Of normal numbers; smaller ones are subnormal and share its spacing."""
    largest: float

    @property
    def largest_exponent(self) -> int:
        """floor(log2(largest)): what the shared exponent of an MX block leaves out."""
        return math.frexp(self.largest)[1] - 1

    def spacing(self, values: Tensor) -> Tensor:
        """Distance between the element's neighbours around each of `values` (float32 or float64), a power of two."""
        integer, mask = (torch.int64, 0x7FF0000000000000) if values.dtype == torch.float64 else (torch.int32, 0x7F800000)
        power = (values.view(integer) & mask).view(values.dtype)  # 2^floor(log2 |value|), or 0
        return power.clamp_(2.0**self.lowest_exponent, 2.0**self.largest_exponent).mul_(2.0**-self.mantissa_bits)

    def round(self, values: Tensor) -> Tensor:
        """The nearest numbers, as if the largest exponent had more mantissas: clamp to have the element's, or tell those beyond."""
        step = self.spacing(values)
        return torch.round(values / step).mul_(step)

    def encode(self, values: Tensor) -> Tensor:
        """uint8 codes of `values` that are numbers of the element; -0.0 has a code of its own."""
        if self == E4M3:
            return values.to(torch.float8_e4m3fn).view(torch.uint8)
        step = self.spacing(values)
        mantissa = (values.abs() / step).to(torch.int32)  # 0 … 2^(m+1) - 1, with the leading one of normal numbers
        exponent = (step / 2.0 ** (self.lowest_exponent - self.mantissa_bits)).log2().to(torch.int32)
        magnitude = mantissa + (exponent << self.mantissa_bits)
        return (magnitude + (torch.signbit(values).to(torch.int32) << (self.bits - 1))).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """float32 numbers that uint8 `codes` stand for."""
        if self == E4M3:
            return codes.view(torch.float8_e4m3fn).to(torch.float32)
        magnitude = (codes & (1 << (self.bits - 1)) - 1).to(torch.int32)
        exponent, mantissa = magnitude >> self.mantissa_bits, magnitude & (1 << self.mantissa_bits) - 1
        normal = exponent.clamp(max=1)
        number = torch.ldexp((mantissa + (normal << self.mantissa_bits)).to(torch.float32), exponent - normal)
        number *= 2.0 ** (self.lowest_exponent - self.mantissa_bits)
        return torch.where(codes >> (self.bits - 1) == 1, -number, number)


E2M1 = Element(bits=4, mantissa_bits=1, lowest_exponent=0, largest=6.0)
"""0, ½, 1, 1½, 2, 3, 4, 6."""
E4M3 = Element(bits=8, mantissa_bits=3, lowest_exponent=-6, largest=448.0)
"""torch's `float8_e4m3fn`."""
INT4 = Element(bits=4, mantissa_bits=2, lowest_exponent=0, largest=1.75)
"""MXINT4: multiples of ¼ up to 1¾, sign and magnitude."""


def element_of(scheme: WeightScheme | ActivationScheme) -> Element:
    """The element of a scheme whose data type is not `int`."""
    if scheme.dtype == "mx_int":
        return INT4
    return E2M1 if scheme.bits == 4 else E4M3
