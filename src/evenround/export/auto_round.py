"""`auto_round`: integer weights as auto-round 0.16 writes them and its reader (also transformers' and vLLM's) loads them.

A weight `[out, in]` is qweight, qzeros and scales (float16 `[groups, out]`, no g_idx) in the packing_format of its checkpoint:

* `auto_round:auto_gptq`, when every layer is symmetric: qweight int32 `[in * bits / 32, out]` packed along in, qzeros int32
  `[groups, out * bits / 32]` packed along out, holding **zero point - 1**;
* `auto_round:auto_awq`, when every layer is asymmetric with 4 bits: qweight int32 `[in, out / 8]` and qzeros int32 `[groups, out / 8]`,
  both packed along out in AWQ's nibble order, zero points as they are;
* `auto_round` otherwise: as the first, zero points as they are.

One packing holds for the whole checkpoint, hence `for_schemes`. Why not always the first: zero point - 1 cannot say 0, which asymmetric
schemes need, and its reader takes symmetric layers only. Facts about 0.16.1 found by running it, and what is done here instead:

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
* without auto-round-lib or gptqmodel its CPU reader knows no AWQ packing and stops the same way.

What we gave up: no g_idx, no activation order, no other packing by name.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import torch
from torch import Tensor

from evenround.checkpoint import TensorSpec
from evenround.errors import UserError
from evenround.export.base import (
    SCALE_DTYPES,
    Reader,
    StoredWeight,
    are_strings,
    check_groups,
    check_table,
    compile_pattern,
    disagreement,
    expect_tensor,
    no_packed_weights,
    packed_modules,
    scheme_from_config,
    tensor_prefix,
)
from evenround.model import Site
from evenround.numerics.integer import QuantizedWeight
from evenround.numerics.packing import pack_awq, pack_bits, unpack_awq, unpack_bits
from evenround.scheme import PER_CHANNEL, PER_TENSOR, Scheme, WeightScheme

Packing = Literal["auto_round:auto_gptq", "auto_round:auto_awq", "auto_round"]
GPTQ: Final = "auto_round:auto_gptq"
AWQ: Final = "auto_round:auto_awq"
RAW: Final = "auto_round"

PACKINGS: Mapping[str, Packing] = {
    GPTQ: GPTQ, "auto_round:gptq": GPTQ, AWQ: AWQ, "auto_round:awq": AWQ, RAW: RAW, "auto_round:gptqmodel": RAW
}  # fmt: skip
"""packing_format in config.json → layout."""

AUTOROUND_VERSION: Final = "0.16.1"
"""The version whose layouts these are; readers look at `autoround_version`."""

BLOCK = 32
"""Both dimensions must be multiples of it."""

SETTINGS = ("iters", "nsamples", "seqlen", "batch_size", "lr", "minmax_lr", "gradient_accumulate_steps", "enable_quanted_input")
"""Settings that auto-round notes in quantization_config, under its names. Readers ignore them."""


def choose_packing(weights: Sequence[WeightScheme]) -> Packing:
    """The packing of a checkpoint whose quantized layers have these schemes (see the table in the module's description)."""
    if all(weight.symmetric for weight in weights):
        return GPTQ
    return AWQ if all(weight.bits == 4 and not weight.symmetric for weight in weights) else RAW


@dataclass(frozen=True, slots=True)
class AutoRoundExporter:
    """See the module. Methods as in `evenround.export.base.Exporter`."""

    packing: Packing | None = None
    """None until `for_schemes`: then each weight is packed as if every layer had its scheme."""
    name: str = "auto_round"
    allows_ragged: bool = False

    def for_schemes(self, schemes: Mapping[str, Scheme | None]) -> "AutoRoundExporter":
        return replace(self, packing=choose_packing([scheme.weight for scheme in schemes.values() if scheme]))

    def check(self, site: Site, scheme: Scheme) -> None:
        check_groups(site, scheme.weight)
        if site.shape[0] % BLOCK or site.shape[1] % BLOCK:
            raise UserError(
                f"{site.name}: shape {list(site.shape)} is not a multiple of {BLOCK} in both dimensions, as format 'auto_round' (--format) "
                "needs; leave the layer out with --ignore_layers, or use --format llm_compressor"
            )

    def cautions(self, schemes: Mapping[str, Scheme | None]) -> tuple[str, ...]:
        weights = [scheme.weight for scheme in schemes.values() if scheme]
        packing = choose_packing(weights)
        found = []
        if packing == AWQ:
            found.append("asymmetric 4-bit weights need auto-round-lib or gptqmodel beside auto-round to load on a CPU")
        if packing == RAW:
            found.append("packing 'auto_round' (asymmetric weights other than 4 bit throughout) is read by auto-round, but not by vLLM")
        return tuple(found)

    def stored(self, scheme: Scheme) -> Scheme:
        """Per tensor (0) is written as per output channel (-1) with equal scales; all else as it is."""
        if scheme.weight.group_size != PER_TENSOR:
            return scheme
        return replace(scheme, weight=replace(scheme.weight, group_size=PER_CHANNEL))

    def tensor_specs(self, site: Site, scheme: Scheme) -> dict[str, TensorSpec]:
        weight = self.stored(scheme).weight
        return _specs(tensor_prefix(site), self.packing or choose_packing([weight]), weight, site.shape)

    def pack(self, site: Site, quantized: QuantizedWeight) -> dict[str, Tensor]:
        prefix, scheme = tensor_prefix(site), quantized.scheme
        packing = self.packing or choose_packing([scheme])
        scale, zero_point = quantized.scale, quantized.zero_point
        if scheme.group_size == PER_TENSOR:
            scale, zero_point = scale.expand(site.shape[0], 1), zero_point.expand(site.shape[0], 1)
        scales, zeros = scale.t().contiguous(), zero_point.t().contiguous()
        if packing == AWQ:
            return {f"{prefix}.qweight": pack_awq(quantized.codes.t()), f"{prefix}.qzeros": pack_awq(zeros), f"{prefix}.scales": scales}
        return {
            f"{prefix}.qweight": pack_bits(quantized.codes, scheme.bits).t().contiguous(),
            f"{prefix}.qzeros": pack_bits(zeros - int(packing == GPTQ), scheme.bits),
            f"{prefix}.scales": scales,
        }

    def unpack(self, prefix: str, read: Reader, scheme: WeightScheme, shape: tuple[int, int]) -> QuantizedWeight:
        packing = self.packing or choose_packing([scheme])
        qweight, qzeros = read(f"{prefix}.qweight"), read(f"{prefix}.qzeros")
        if packing == AWQ:
            codes, zeros = unpack_awq(qweight).t(), unpack_awq(qzeros)
        else:
            codes = unpack_bits(qweight.t().contiguous(), scheme.bits, shape[1])
            zeros = unpack_bits(qzeros, scheme.bits, shape[0]) + int(packing == GPTQ)
        scales = read(f"{prefix}.scales")
        return QuantizedWeight(codes.contiguous(), scales.t().contiguous(), zeros.t().contiguous(), scheme)

    def quantization_config(
        self,
        schemes: Mapping[str, Scheme | None],
        sites: Sequence[Site],
        settings: Mapping[str, object],
        default: Scheme,
        unquantized: Sequence[str] = (),
    ) -> dict[str, object]:
        """auto-round's fields; `extra_config` lists every layer that differs from `default`: its changed fields, or 16 bits."""
        check_table(schemes, sites)
        packing = choose_packing([scheme.weight for scheme in schemes.values() if scheme])
        if self.packing != packing and len({choose_packing([scheme.weight]) for scheme in schemes.values() if scheme} | {packing}) > 1:
            raise ValueError("layers call for different packings: take the format from for_schemes(table)")
        base = _fields(self.stored(default))
        extra: dict[str, dict[str, object]] = {name: {"bits": 16} for name in unquantized}
        for site in sites:
            scheme = schemes[site.name]
            fields = _fields(self.stored(scheme)) if scheme else {"bits": 16}
            changed = {key: value for key, value in fields.items() if value != base.get(key)}
            if site.is_head and scheme:
                changed = {**fields, "act_bits": 16}
            if changed:
                extra[site.name] = changed
        return {
            **base,
            **{key: settings[key] for key in SETTINGS if settings.get(key) is not None},
            "autoround_version": AUTOROUND_VERSION,
            "block_name_to_quantize": ",".join(_block_prefixes(sites)),
            "quant_method": "auto-round",
            "packing_format": packing,
            **({"extra_config": extra} if extra else {}),
        }

    def read_schemes(
        self, config: Mapping[str, object], specs: Mapping[str, TensorSpec], read: Reader, modules: Mapping[str, str] | None = None
    ) -> dict[str, StoredWeight]:
        packing = PACKINGS.get(str(config.get("packing_format")))
        if packing is None:
            known = ", ".join(PACKINGS)
            found = config.get("packing_format")
            raise UserError(f"packing_format {found!r} in quantization_config (config.json) cannot be read; readable are: {known}")
        rules = _Rules.read(config, packing)
        packed = packed_modules(specs, "qweight", modules)
        if not packed:
            raise no_packed_weights("qweight", f"quant_method {config.get('quant_method')!r}")
        for key, scheme in rules.extra.items():
            if scheme and not any(name == key or re.search(key, name) for name in packed.values()):
                raise disagreement(key, f"is {scheme.label} in extra_config, but no packed tensors have that name")
        for prefix, name in (modules or {}).items():
            if prefix not in packed and (scheme := rules.scheme(name)) is not None:
                raise disagreement(name, f"is {scheme.label} in the config, but {prefix}.qweight is missing")
        exporter = replace(self, packing=packing)
        return {name: exporter._stored_weight(prefix, name, rules.scheme(name), specs) for prefix, name in packed.items()}

    def _stored_weight(self, prefix: str, name: str, scheme: WeightScheme | None, specs: Mapping[str, TensorSpec]) -> StoredWeight:
        if scheme is None:
            raise disagreement(name, f"is left unquantized in the config, but {prefix}.qweight exists")
        scales = expect_tensor(specs, f"{prefix}.scales", SCALE_DTYPES, None)
        qweight = specs[f"{prefix}.qweight"].shape
        if len(scales.shape) != 2 or len(qweight) != 2:
            raise disagreement(name, f"has scales {list(scales.shape)} and qweight {list(qweight)}, which should have two dimensions each")
        shape = (scales.shape[1], qweight[0] if self.packing == AWQ else qweight[0] * 32 // scheme.bits)
        for tensor, spec in _specs(prefix, self.packing or RAW, scheme, shape).items():
            expect_tensor(specs, tensor, SCALE_DTYPES if tensor.endswith(".scales") else (spec.dtype,), spec.shape)
        return StoredWeight(name=name, prefix=prefix, scheme=scheme, shape=shape, format=self)


def _specs(prefix: str, packing: Packing, weight: WeightScheme, shape: tuple[int, int]) -> dict[str, TensorSpec]:
    out_features, in_features = shape
    groups = weight.groups(in_features)
    out_words = out_features * weight.bits // 32
    qweight = (in_features, out_words) if packing == AWQ else (in_features * weight.bits // 32, out_features)
    return {
        f"{prefix}.qweight": TensorSpec(dtype=torch.int32, shape=qweight),
        f"{prefix}.qzeros": TensorSpec(dtype=torch.int32, shape=(groups, out_words)),
        f"{prefix}.scales": TensorSpec(dtype=torch.float16, shape=(groups, out_features)),
    }


def _fields(scheme: Scheme) -> dict[str, object]:
    fields = scheme.to_dict()
    return {key: fields[key] for key in ("bits", "data_type", "group_size", "sym")}


def _block_prefixes(sites: Sequence[Site]) -> list[str]:
    """Names of the block lists, `model.layers`: a site's name up to its block number."""
    prefixes: dict[str, None] = {}
    for site in sites:
        if site.block is not None:
            prefixes.setdefault(site.name.partition(f".{site.block}.")[0])
    return list(prefixes)


@dataclass(frozen=True, slots=True)
class _Rules:
    """What quantization_config says about each module, read as auto-round's reader reads it."""

    default: WeightScheme
    blocks: tuple[str, ...] | None
    extra: Mapping[str, WeightScheme | None]

    @staticmethod
    def read(config: Mapping[str, object], packing: Packing) -> "_Rules":
        default = scheme_from_config("default", config.get("bits"), config.get("group_size"), config.get("sym", True))
        if str(config.get("data_type", "int")) != "int":
            raise UserError(f"data_type {config['data_type']!r} in quantization_config (config.json) cannot be read; only 'int' can")
        blocks = config.get("block_name_to_quantize") or config.get("to_quant_block_names")
        if isinstance(blocks, str):
            blocks = [name.strip() for name in blocks.split(",")]
        extra_config = config.get("extra_config") or {}
        if not isinstance(extra_config, Mapping) or not (blocks is None or are_strings(blocks)):
            raise UserError("quantization_config (config.json): extra_config must be an object and block_name_to_quantize a string or list")
        extra: dict[str, WeightScheme | None] = {}
        for key, fields in extra_config.items():
            compile_pattern(key, "extra_config")
            if not isinstance(fields, Mapping):
                raise UserError(f"quantization_config (config.json), extra_config[{key!r}] is {fields!r}, not an object of scheme fields")
            bits = fields.get("bits", default.bits)
            group_size, symmetric = fields.get("group_size", default.group_size), fields.get("sym", default.symmetric)
            wide = isinstance(bits, int) and bits >= 16
            extra[key] = None if wide else scheme_from_config(f"extra_config[{key!r}]", bits, group_size, symmetric)
        return _Rules(default, tuple(blocks) if blocks else None, extra)

    def scheme(self, name: str) -> WeightScheme | None:
        """An exact name in extra_config, else the first regular expression found in the name, else the default inside the named blocks."""
        if name in self.extra:
            return self.extra[name]
        for key, scheme in self.extra.items():
            if re.search(key, name):
                return scheme
        return self.default if self.blocks is None or any(name.startswith(block) for block in self.blocks) else None
