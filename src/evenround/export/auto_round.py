"""`auto_round`: weights as auto-round 0.16 writes them and its reader (also transformers' and vLLM's) loads them.

A checkpoint has one packing_format, chosen for all its layers (hence `for_schemes`):

| packing_format | schemes | a weight `[out, in]` |
|---|---|---|
| `auto_round:auto_gptq` | integers, all symmetric | qweight int32 `[in * bits / 32, out]` packed along in, qzeros int32 |
|  |  | `[groups, out * bits / 32]` packed along out, holding **zero point - 1**, scales float16 `[groups, out]`; no g_idx |
| `auto_round:auto_awq` | integers, all asymmetric with 4 bits | qweight int32 `[in, out / 8]`, qzeros int32 `[groups, out / 8]`, |
|  |  | both packed along out in AWQ's nibble order, zero points as they are; scales as above |
| `auto_round` | other integers | as the first, zero points as they are |
| `auto_round` | MXINT4 with its activations | nibbles of `evenround.export.tensors` |
| `auto_round:llm_compressor` | MXFP4, MXFP8, NVFP4 with their activations, also mixed | bytes and nibbles of `evenround.export.tensors` |
| `auto_round:fp8_static` | FP8_STATIC | bytes, weight_scale `[out]` |
| `auto_round:fp8` | FP8_BLOCK | bytes, the scales named weight_scale_inv (they multiply nevertheless) |

Why not always the first: zero point - 1 cannot say 0, which asymmetric schemes need, and its reader takes symmetric layers only. Facts
about 0.16.1 found by running it, and what is done here instead:

* it refuses symmetric 5, 6 and 7 bits (its reader loads them): written;
* asked for group size -1 or 0 by its model-free route (2, 4 and 8 bits), it warns for every layer and leaves all of them in floating point;
* that route packs asymmetric 4 bits as `auto_round`, the calibrated one as `auto_round:auto_awq`: both load, the latter is what vLLM reads;
* it divides by zero for group size 0, at export and in its reader, and `AutoRoundConfig` refuses 0: a per-tensor scale is repeated for
  every output channel and declared as group size -1, which is the same weight (`stored`);
* it routes by the default scheme alone: an asymmetric layer under a symmetric default goes into `auto_round:auto_gptq`, where its torch
  reader stops and a zero point 0 would come back as 1; mixtures of symmetric and asymmetric layers are written as `auto_round` here;
* asked for a quantized head that is tied to the embedding it leaves it out without a word; here it is written under the module's name;
* its reader takes only layers with both dimensions divisible by 32 and groups that divide `in`; for others it falls back to a placeholder
  that stops with a TypeError. Those are refused here (auto-round leaves layers off 32 unquantized, and writes ragged groups);
* without auto-round-lib or gptqmodel its CPU reader knows no AWQ packing and stops the same way;
* INT8 and INT4 with quantized activations become plain bfloat16 weights (`auto_round:fake`) without a word: refused, `fake` makes that;
* FPW8A16 is written and its reader refuses it (group size 0); MXFP and NVFP4 weights without activations have no kernel in it: refused;
* FP8_BLOCK is written and its reader stops with a TypeError; vLLM reads it: written, with a caution;
* it rounds FP8 scales to the model's bfloat16 after codes were chosen for float32 ones: written as float32.

What we gave up: no g_idx, no activation order, no other packing by name, no Conv1D in other packings than the integers'.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import torch
from torch import Tensor

from evenround.checkpoint import TensorSpec
from evenround.errors import UserError
from evenround.export.autoround_config import SchemeFields, write_config
from evenround.export.base import (
    SCALE_DTYPES,
    Reader,
    StoredWeight,
    check_groups,
    check_table,
    code_tensors,
    disagreement,
    expect_tensor,
    no_packed_weights,
    tensor_prefix,
)
from evenround.export.tensors import BYTES, NIBBLES, Layout, check_stored, pack_weight, unpack_weight, weight_specs
from evenround.model import Site
from evenround.numerics.packing import pack_awq, pack_bits, unpack_awq, unpack_bits
from evenround.numerics.quantized import QuantizedWeight
from evenround.scheme import PER_CHANNEL, PER_TENSOR, PRESETS, Scheme, WeightScheme

Packing = Literal[
    "auto_round:auto_gptq", "auto_round:auto_awq", "auto_round", "auto_round:llm_compressor", "auto_round:fp8_static", "auto_round:fp8"
]
GPTQ: Final = "auto_round:auto_gptq"
AWQ: Final = "auto_round:auto_awq"
RAW: Final = "auto_round"
SHARED: Final = "auto_round:llm_compressor"
FP8_STATIC: Final = "auto_round:fp8_static"
FP8_BLOCK: Final = "auto_round:fp8"

PACKINGS: Mapping[str, Packing] = {
    GPTQ: GPTQ, "auto_round:gptq": GPTQ, AWQ: AWQ, "auto_round:awq": AWQ, RAW: RAW, "auto_round:gptqmodel": RAW, SHARED: SHARED,
    FP8_STATIC: FP8_STATIC, FP8_BLOCK: FP8_BLOCK,
}  # fmt: skip
"""packing_format in config.json → layout."""

BLOCK = 32
"""Both dimensions of integers must be multiples of it."""


def _family(scheme: Scheme) -> str | None:
    """What must be the same for all layers of a checkpoint: `int`, `mx_int` or a packing; None: auto-round cannot load the scheme."""
    weight, activation = scheme.weight, scheme.activation
    if weight.dtype == "int":
        return None if activation.quantized else "int"
    if not activation.quantized or activation.bits != weight.bits:
        return None
    if weight.dtype == "fp":
        return {PRESETS["FP8_STATIC"]: FP8_STATIC, PRESETS["FP8_BLOCK"]: FP8_BLOCK}.get(scheme)
    if weight.dtype.removesuffix("_rceil") != activation.dtype.removesuffix("_rceil"):
        return None
    return "mx_int" if weight.dtype == "mx_int" else SHARED


def choose_packing(schemes: Sequence[Scheme]) -> Packing:
    """The packing of a checkpoint whose quantized layers have these schemes (see the table in the module's description)."""
    families = {_family(scheme) for scheme in schemes}
    if FP8_STATIC in families:
        return FP8_STATIC
    if FP8_BLOCK in families:
        return FP8_BLOCK
    if SHARED in families:
        return SHARED
    if "mx_int" in families:
        return RAW
    if all(scheme.weight.symmetric for scheme in schemes):
        return GPTQ
    return AWQ if all(scheme.weight.bits == 4 and not scheme.weight.symmetric for scheme in schemes) else RAW


def _layout(packing: Packing, weight: WeightScheme) -> Layout | None:
    """None: integers in one of auto-round's own packings."""
    if weight.dtype == "int":
        return None
    if packing == FP8_STATIC:
        return Layout("bytes", flat=True)
    if packing == FP8_BLOCK:
        return Layout("bytes", scale_leaf="weight_scale_inv")
    return NIBBLES if weight.bits == 4 else BYTES


@dataclass(frozen=True, slots=True)
class AutoRoundExporter:
    """See the module. Methods as in `evenround.export.base.Exporter`."""

    packing: Packing | None = None
    """None until `for_schemes`: then each weight is packed as if every layer had its scheme."""
    name: str = "auto_round"
    allows_ragged: bool = False

    def for_schemes(self, schemes: Mapping[str, Scheme | None]) -> "AutoRoundExporter":
        used = [scheme for scheme in schemes.values() if scheme]
        first: dict[str, Scheme] = {}
        for scheme in used:
            first.setdefault(_family(scheme) or "", scheme)
        if len(first) > 1 and "" not in first:  # what it cannot load at all, `check` tells with the layer's name
            labels = " and ".join(scheme.label for scheme in first.values())
            raise UserError(
                f"{labels} cannot lie in one checkpoint of format 'auto_round' (--format), which has one packing for all layers; "
                "use --format llm_compressor or fake, or schemes of one kind"
            )
        return replace(self, packing=choose_packing(used))

    def check(self, site: Site, scheme: Scheme) -> None:
        check_groups(site, scheme.weight)
        family = _family(scheme)
        if family is None:
            alone = "" if scheme.activation.quantized else " without quantized activations"
            raise UserError(
                f"{site.name}: auto-round's reader has no kernel for {scheme.label}{alone}, so format 'auto_round' (--format) does not "
                "take it; use --format llm_compressor or fake"
            )
        if family != "int" and site.transposed:
            raise UserError(
                f"{site.name} is a transposed layer (Conv1D), which auto-round's reader loads with integer weights only, not "
                f"{scheme.label}; use --format fake"
            )
        if family == "int" and (site.shape[0] % BLOCK or site.shape[1] % BLOCK):
            raise UserError(
                f"{site.name}: shape {list(site.shape)} is not a multiple of {BLOCK} in both dimensions, as format 'auto_round' (--format) "
                "needs; leave the layer out with --ignore_layers, or use --format llm_compressor"
            )

    def cautions(self, schemes: Mapping[str, Scheme | None]) -> tuple[str, ...]:
        used = [scheme for scheme in schemes.values() if scheme]
        packing = choose_packing(used)
        found = []
        if packing == AWQ:
            found.append("asymmetric 4-bit weights need auto-round-lib or gptqmodel beside auto-round to load on a CPU")
        if packing == RAW and not any(scheme.activation.quantized for scheme in used):
            found.append("packing 'auto_round' (asymmetric weights other than 4 bit throughout) is read by auto-round, but not by vLLM")
        if packing == FP8_BLOCK:
            found.append(
                "auto-round 0.16.1 itself stops at FP8 in tiles as it loads them (a TypeError); vLLM's reader of this format takes them, "
                "and --format llm_compressor is read by both vLLM and transformers"
            )
        return tuple(found)

    def stored(self, scheme: Scheme) -> Scheme:
        """Per tensor (0) is written as per output channel (-1) with equal scales, mx_fp_rceil weights as mx_fp; all else as it is."""
        weight = scheme.weight
        if weight.dtype == "int" and weight.group_size == PER_TENSOR:
            return replace(scheme, weight=replace(weight, group_size=PER_CHANNEL))
        return replace(scheme, weight=replace(weight, dtype="mx_fp")) if weight.dtype == "mx_fp_rceil" else scheme

    def tensor_specs(self, site: Site, scheme: Scheme) -> dict[str, TensorSpec]:
        return self._specs(tensor_prefix(site), self.stored(scheme), site.shape)

    def _specs(self, prefix: str, scheme: Scheme, shape: tuple[int, int]) -> dict[str, TensorSpec]:
        packing = self.packing or choose_packing([scheme])
        layout = _layout(packing, scheme.weight)
        return weight_specs(prefix, layout, scheme, shape) if layout else _integer_specs(prefix, packing, scheme.weight, shape)

    def pack(self, site: Site, quantized: QuantizedWeight, scheme: Scheme) -> dict[str, Tensor]:
        prefix, weight = tensor_prefix(site), quantized.scheme
        packing = self.packing or choose_packing([scheme])
        layout = _layout(packing, weight)
        if layout:
            return pack_weight(prefix, layout, quantized, scheme)
        scale, zero_point = quantized.scale, quantized.zero_point
        assert zero_point is not None
        if weight.group_size == PER_TENSOR:
            scale, zero_point = scale.expand(site.shape[0], 1), zero_point.expand(site.shape[0], 1)
        scales, zeros = scale.t().contiguous(), zero_point.t().contiguous()
        if packing == AWQ:
            return {f"{prefix}.qweight": pack_awq(quantized.codes.t()), f"{prefix}.qzeros": pack_awq(zeros), f"{prefix}.scales": scales}
        return {
            f"{prefix}.qweight": pack_bits(quantized.codes, weight.bits).t().contiguous(),
            f"{prefix}.qzeros": pack_bits(zeros - int(packing == GPTQ), weight.bits),
            f"{prefix}.scales": scales,
        }

    def unpack(self, prefix: str, read: Reader, scheme: Scheme, shape: tuple[int, int]) -> QuantizedWeight:
        packing, weight = self.packing or choose_packing([scheme]), scheme.weight
        layout = _layout(packing, weight)
        if layout:
            return unpack_weight(prefix, layout, read, scheme, shape)
        qweight, qzeros = read(f"{prefix}.qweight"), read(f"{prefix}.qzeros")
        if packing == AWQ:
            codes, zeros = unpack_awq(qweight).t(), unpack_awq(qzeros)
        else:
            codes = unpack_bits(qweight.t().contiguous(), weight.bits, shape[1])
            zeros = unpack_bits(qzeros, weight.bits, shape[0]) + int(packing == GPTQ)
        scales = read(f"{prefix}.scales")
        return QuantizedWeight(codes.contiguous(), scales.t().contiguous(), zeros.t().contiguous(), weight)

    def quantization_config(
        self,
        schemes: Mapping[str, Scheme | None],
        sites: Sequence[Site],
        settings: Mapping[str, object],
        default: Scheme,
        unquantized: Sequence[str] = (),
    ) -> dict[str, object]:
        """auto-round's fields, see `evenround.export.autoround_config`; FP8 has three more that its readers look at."""
        check_table(schemes, sites)
        used = [scheme for scheme in schemes.values() if scheme]
        packing = choose_packing(used)
        if self.packing != packing and len({choose_packing([scheme]) for scheme in used} | {packing}) > 1:
            raise ValueError("layers call for different packings: take the format from for_schemes(table)")
        table = {name: self.stored(scheme) if scheme else None for name, scheme in schemes.items()}
        config = write_config(packing, table, sites, settings, self.stored(default), unquantized)
        if packing in (FP8_STATIC, FP8_BLOCK):
            config |= {"fmt": "e4m3", "activation_scheme": "static" if packing == FP8_STATIC else "dynamic"}
        if packing == FP8_BLOCK:
            config["weight_block_size"] = [128, 128]
        return config

    def read_schemes(
        self, config: Mapping[str, object], specs: Mapping[str, TensorSpec], read: Reader, modules: Mapping[str, str] | None = None
    ) -> dict[str, StoredWeight]:
        packing = PACKINGS.get(str(config.get("packing_format")))
        if packing is None:
            known = ", ".join(PACKINGS)
            found = config.get("packing_format")
            raise UserError(f"packing_format {found!r} in quantization_config (config.json) cannot be read; readable are: {known}")
        fields, exporter = SchemeFields.read(config), replace(self, packing=packing)
        packed = {prefix: (modules or {}).get(prefix, prefix) for prefix in code_tensors(specs)}
        if not packed:
            raise no_packed_weights(exporter._leaf(fields.default), f"quant_method {config.get('quant_method')!r}")
        for key, scheme in fields.extra.items():
            if scheme and not any(name == key or re.search(key, name) for name in packed.values()):
                raise disagreement(key, f"is {scheme.label} in extra_config, but no packed tensors have that name")
        for prefix, name in (modules or {}).items():
            if prefix not in packed and (scheme := fields.scheme(name)) is not None:
                raise disagreement(name, f"is {scheme.label} in the config, but {prefix}.{exporter._leaf(scheme)} is missing")
        return {name: exporter._stored_weight(prefix, name, fields.scheme(name), specs, read) for prefix, name in packed.items()}

    def _leaf(self, scheme: Scheme) -> str:
        layout = _layout(self.packing or RAW, scheme.weight)
        return layout.code_leaf if layout else "qweight"

    def _stored_weight(self, prefix: str, name: str, scheme: Scheme | None, specs: Mapping[str, TensorSpec], read: Reader) -> StoredWeight:
        if scheme is None:
            raise disagreement(name, f"is left unquantized in the config, but {prefix}.{code_tensors(specs)[prefix]} exists")
        layout = _layout(self.packing or RAW, scheme.weight)
        if layout:
            shape, tensors = check_stored(name, prefix, layout, scheme, specs, read)
            return StoredWeight(name=name, prefix=prefix, scheme=scheme, shape=shape, format=self, tensors=tensors)
        scales = expect_tensor(specs, f"{prefix}.scales", SCALE_DTYPES, None)
        qweight = expect_tensor(specs, f"{prefix}.qweight", (torch.int32,), None).shape
        if len(scales.shape) != 2 or len(qweight) != 2:
            raise disagreement(name, f"has scales {list(scales.shape)} and qweight {list(qweight)}, which should have two dimensions each")
        shape = (scales.shape[1], qweight[0] if self.packing == AWQ else qweight[0] * 32 // scheme.weight.bits)
        wanted = self._specs(prefix, scheme, shape)
        for tensor, spec in wanted.items():
            expect_tensor(specs, tensor, SCALE_DTYPES if tensor.endswith(".scales") else (spec.dtype,), spec.shape)
        return StoredWeight(name=name, prefix=prefix, scheme=scheme, shape=shape, format=self, tensors=tuple(wanted))


def _integer_specs(prefix: str, packing: Packing, weight: WeightScheme, shape: tuple[int, int]) -> dict[str, TensorSpec]:
    out_features, in_features = shape
    groups = weight.groups(in_features)
    out_words = out_features * weight.bits // 32
    qweight = (in_features, out_words) if packing == AWQ else (in_features * weight.bits // 32, out_features)
    return {
        f"{prefix}.qweight": TensorSpec(dtype=torch.int32, shape=qweight),
        f"{prefix}.qzeros": TensorSpec(dtype=torch.int32, shape=(groups, out_words)),
        f"{prefix}.scales": TensorSpec(dtype=torch.float16, shape=(groups, out_features)),
    }
