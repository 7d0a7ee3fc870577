"""How one quantized weight lies in tensors: compressed-tensors' layouts, which auto-round's float formats share with small changes.

For a weight `[out, in]`, named `prefix.…`:

| codes | tensors |
|---|---|
| words | weight_packed int32 `[out, ceil(in * bits / 32)]`, dense along in (see `evenround.numerics.packing`); weight_shape int64 `[2]`; |
|       | asymmetric: weight_zero_point int32 `[ceil(out * bits / 32), groups]`, dense along **out**; |
|       | per tensor int8 `[1]`, less 2^(bits-1) |
| bytes | weight `[out, in]`: int8, code - 2^(bits-1), or float8_e4m3fn; asymmetric: weight_zero_point int8, less 2^(bits-1) |
| nibbles | weight_packed uint8 `[out, in / 2]`, the even column in the low half |

| scales | type | shape |
|---|---|---|
| weight_scale of int | float16 | `[out, groups]`; `[out, 1]` per channel; `[1]` per tensor |
| of fp | float32 | the same; `[ceil(out / rows), ceil(in / columns)]` for tiles |
| of mx | uint8, 2^(scale - 127) | `[out, in / 32]` |
| of nv | float8_e4m3fn | `[out, in / 16]`, with weight_global_scale float32 `[1]` that divides |

A calibrated input has input_scale float32 `[1]`, or input_global_scale where activations are nv_fp.

Scales of integers are float16, as auto-round writes them: the codes were chosen for exactly these scales, and a bfloat16 scale would lose
three bits of them. For the same reason those of fp are float32, where auto-round rounds to the model's type. A reader that keeps the model
in bfloat16 rounds them itself; a float32 load gets every bit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from evenround.checkpoint import TensorSpec
from evenround.export.base import SCALE_DTYPES, Reader, disagreement, expect_tensor, input_specs, pack_input, stored_input
from evenround.numerics.packing import loose_words, pack_bits, packed_words, unpack_bits, unpack_loose
from evenround.numerics.quantized import QuantizedWeight
from evenround.scheme import PER_CHANNEL, PER_TENSOR, Scheme, WeightScheme


@dataclass(frozen=True, slots=True)
class Layout:
    """Where codes and scales go; see the module."""

    codes: Literal["words", "bytes", "nibbles"]
    scale_leaf: str = "weight_scale"
    flat: bool = False
    """Scales per channel are `[out]`."""

    @property
    def code_leaf(self) -> str:
        """Last part of the name of the tensor with the codes."""
        return "weight" if self.codes == "bytes" else "weight_packed"

    def __str__(self) -> str:
        return self.codes


WORDS, BYTES, NIBBLES = Layout("words"), Layout("bytes"), Layout("nibbles")


def layout_of(scheme: Scheme) -> Layout:
    """The layout that readers of compressed-tensors expect.

    Integers are words, but bytes where activations are integers, too: kernels that multiply integers take bytes.
    """
    weight = scheme.weight
    if weight.dtype == "int":
        return BYTES if scheme.activation.quantized and scheme.activation.dtype == "int" else WORDS
    return NIBBLES if weight.bits == 4 else BYTES


def _scale_dtype(scheme: WeightScheme) -> torch.dtype:
    return {"int": torch.float16, "fp": torch.float32, "nv_fp": torch.float8_e4m3fn}.get(scheme.dtype, torch.uint8)


def _scale_shape(layout: Layout, scheme: WeightScheme, shape: tuple[int, int]) -> tuple[int, ...]:
    if scheme.group_size == PER_TENSOR:
        return (1,)
    return (shape[0],) if layout.flat and scheme.group_size == PER_CHANNEL else scheme.scale_shape(shape)


def weight_specs(prefix: str, layout: Layout, scheme: Scheme, shape: tuple[int, int], loose: bool = False) -> dict[str, TensorSpec]:
    """The tensors of a weight `[out, in]` and its input's scale, in writing order.

    `loose`: as compressed-tensors up to 0.17 packed words.
    """
    weight, (out_features, in_features) = scheme.weight, shape
    count = loose_words if loose else packed_words
    codes = {
        "words": TensorSpec(torch.int32, (out_features, count(in_features, weight.bits))),
        "bytes": TensorSpec(torch.int8 if weight.dtype == "int" else torch.float8_e4m3fn, shape),
        "nibbles": TensorSpec(torch.uint8, (out_features, in_features // 2)),
    }[layout.codes]
    scale_shape = _scale_shape(layout, weight, shape)
    specs = {f"{prefix}.{layout.code_leaf}": codes, f"{prefix}.{layout.scale_leaf}": TensorSpec(_scale_dtype(weight), scale_shape)}
    if layout.codes == "words":
        specs[f"{prefix}.weight_shape"] = TensorSpec(torch.int64, (2,))
    if not weight.symmetric:
        in_words = layout.codes == "words" and weight.group_size != PER_TENSOR
        packed = TensorSpec(torch.int32, (count(out_features, weight.bits), weight.groups(in_features)))
        specs[f"{prefix}.weight_zero_point"] = packed if in_words else TensorSpec(torch.int8, scale_shape)
    if weight.dtype == "nv_fp":
        specs[f"{prefix}.weight_global_scale"] = TensorSpec(torch.float32, (1,))
    return specs | input_specs(prefix, scheme.activation)


def pack_weight(prefix: str, layout: Layout, quantized: QuantizedWeight, scheme: Scheme) -> dict[str, Tensor]:
    """Those tensors."""
    weight, codes = quantized.scheme, quantized.codes
    shape = (codes.shape[0], codes.shape[1])
    tensors: dict[str, Tensor] = {}
    if layout.codes == "words":
        stored = pack_bits(codes, weight.bits)
    elif layout.codes == "nibbles":
        stored = pack_bits(codes, 4).view(torch.uint8)
    else:
        stored = _signed(codes, weight.bits) if weight.dtype == "int" else codes.contiguous().view(torch.float8_e4m3fn)
    scale_shape = _scale_shape(layout, weight, shape)
    tensors[f"{prefix}.{layout.code_leaf}"] = stored
    tensors[f"{prefix}.{layout.scale_leaf}"] = quantized.scale.reshape(scale_shape).contiguous()
    if layout.codes == "words":
        tensors[f"{prefix}.weight_shape"] = torch.tensor(shape, dtype=torch.int64)
    if not weight.symmetric:
        assert quantized.zero_point is not None
        in_words = layout.codes == "words" and weight.group_size != PER_TENSOR
        zero_point = quantized.zero_point
        tensors[f"{prefix}.weight_zero_point"] = (
            pack_bits(zero_point, weight.bits, axis=0) if in_words else _signed(zero_point, weight.bits).reshape(scale_shape)
        )
    if weight.dtype == "nv_fp":
        assert quantized.global_scale is not None
        tensors[f"{prefix}.weight_global_scale"] = quantized.global_scale.to(torch.float32).reshape(1)
    return tensors | pack_input(prefix, scheme.activation, quantized.input_scale)


def _signed(codes: Tensor, bits: int) -> Tensor:
    return (codes.to(torch.int16) - (1 << bits - 1)).to(torch.int8)


def unpack_weight(prefix: str, layout: Layout, read: Reader, scheme: Scheme, shape: tuple[int, int]) -> QuantizedWeight:
    """The weight out of those tensors."""
    weight = scheme.weight
    packed = read(f"{prefix}.{layout.code_leaf}")
    scale = read(f"{prefix}.{layout.scale_leaf}").reshape(weight.scale_shape(shape))
    take = unpack_loose if layout.codes == "words" and packed.shape[1] != packed_words(shape[1], weight.bits) else unpack_bits
    if layout.codes == "words":
        codes = take(packed, weight.bits, shape[1])
    elif layout.codes == "nibbles":
        codes = unpack_bits(packed.contiguous().view(torch.int32), 4, shape[1])
    else:
        codes = _unsigned(packed, weight.bits) if weight.dtype == "int" else packed.view(torch.uint8)
    zero_point, middle = None, 1 << weight.bits - 1
    if weight.dtype == "int" and weight.symmetric:
        zero_point = torch.full_like(scale, middle, dtype=torch.uint8)
    elif weight.dtype == "int":
        stored = read(f"{prefix}.weight_zero_point")
        in_words = stored.dtype == torch.int32
        zero_point = take(stored, weight.bits, shape[0], 0) if in_words else _unsigned(stored, weight.bits).reshape(scale.shape)
    return QuantizedWeight(
        codes=codes,
        scale=scale.to(torch.float32) if weight.dtype == "fp" else scale,
        zero_point=zero_point,
        scheme=weight,
        global_scale=read(f"{prefix}.weight_global_scale").to(torch.float32).reshape(1) if weight.dtype == "nv_fp" else None,
        input_scale=stored_input(prefix, scheme.activation).scale(read),
    )


def _unsigned(codes: Tensor, bits: int) -> Tensor:
    return (codes.to(torch.int16) + (1 << bits - 1)).to(torch.uint8)


def check_stored(
    name: str, prefix: str, layout: Layout, scheme: Scheme, specs: Mapping[str, TensorSpec], read: Reader
) -> tuple[tuple[int, int], tuple[str, ...]]:
    """Shape (out, in) of the weight stored as `prefix.…`, and the names of its tensors.

    Raises `UserError` when a tensor is missing or of another type or shape than `scheme` says.
    """
    shape = _shape(name, prefix, layout, specs, read)
    codes = specs[f"{prefix}.{layout.code_leaf}"].shape
    words = layout.codes == "words"
    loose = words and tuple(codes) == (shape[0], loose_words(shape[1], scheme.weight.bits))
    dense = words and tuple(codes) == (shape[0], packed_words(shape[1], scheme.weight.bits))
    wanted = weight_specs(prefix, layout, scheme, shape, loose=loose and not dense)
    for tensor, spec in wanted.items():
        of_scale = tensor.endswith("_scale") or tensor.endswith(layout.scale_leaf)
        expect_tensor(specs, tensor, SCALE_DTYPES if of_scale and spec.dtype in SCALE_DTYPES else (spec.dtype,), spec.shape)
    if scheme.weight.symmetric and f"{prefix}.weight_zero_point" in specs:
        raise disagreement(name, f"is symmetric in the config, but {prefix}.weight_zero_point exists")
    return shape, tuple(wanted)


def _shape(name: str, prefix: str, layout: Layout, specs: Mapping[str, TensorSpec], read: Reader) -> tuple[int, int]:
    if layout.codes == "words":
        expect_tensor(specs, f"{prefix}.weight_shape", (torch.int64,), (2,))
        out_features, in_features = (int(size) for size in read(f"{prefix}.weight_shape"))
        if min(out_features, in_features) < 1:
            raise disagreement(name, f"has weight_shape {[out_features, in_features]}")
        return out_features, in_features
    codes = expect_tensor(specs, f"{prefix}.{layout.code_leaf}", (torch.uint8, torch.int8, torch.float8_e4m3fn), None).shape
    if len(codes) != 2:
        raise disagreement(name, f"has {layout.code_leaf} {list(codes)}, which should have two dimensions")
    return codes[0], codes[1] * (2 if layout.codes == "nibbles" else 1)
