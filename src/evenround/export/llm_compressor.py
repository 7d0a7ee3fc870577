"""`llm_compressor`: compressed-tensors' `pack-quantized`, loaded by transformers and vLLM through compressed-tensors.

Per weight `[out, in]` of `bits`:

| tensor | holds |
|---|---|
| weight_packed | int32 `[out, ceil(in * bits / 32)]`, dense along in (see `evenround.numerics.packing`), value = code |
| weight_scale | fp16 `[out, groups]`; `[out, 1]` for strategy channel; `[1]` for strategy tensor |
| weight_shape | int64 `[2]`: out, in |
| weight_zero_point | asymmetric only: int32 `[ceil(out * bits / 32), groups]`, dense along **out**; |
|                   | for strategy tensor int8 `[1]`, zero point - 2^(bits-1) |

compressed-tensors counts codes from -2^(bits-1) and stores them with that offset added, so the stored numbers are our codes and zero
points. Widths 3, 5, 6 and 7 need compressed-tensors 0.18 or later; files that older versions wrote (`32 // bits` codes a word) are told by
their width and read too.

Scales are float16, as auto-round writes them: the codes were chosen for exactly these scales, and a bfloat16 scale would lose three bits of
them. A reader that keeps the model in bfloat16 rounds them itself; a float32 or dequantizing load gets every bit.

`ignore` names every linear layer that is not quantized, always the output head unless it is quantized. One scheme: targets ["Linear"];
several: a config group each, targets spelled out by name.

What readers make of it (transformers 5.24, compressed-tensors 0.20; found by loading, every width, scheme and strategy):

* symmetric: loads by default and with `CompressedTensorsConfig(dequantize=True)`; mixed schemes load by default only, because
  `dequantize=True` takes one config group for the whole model;
* asymmetric by group or channel: the default load expects the unpacked shape of weight_zero_point and stops, also for files that
  auto-round and llm-compressor wrote; `dequantize=True` loads them. `"dequantize": true` in quantization_config makes that the default, and
  other readers skip the key, so it is written when one config group holds the whole model;
* mixed schemes with such an asymmetric one: neither way loads in transformers (vLLM and compressed-tensors 0.17 do), see `cautions`;
* auto-round's own export of these layouts equals this one byte for byte; it notes no `version`. What we gave up: activation order (g_idx),
  Conv1D layers, quantized activations.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

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
from evenround.numerics.packing import loose_words, pack_bits, packed_words, unpack_bits, unpack_loose
from evenround.scheme import PER_CHANNEL, PER_TENSOR, Scheme, WeightScheme

FORMAT: Final = "pack-quantized"
LAYOUT_VERSION: Final = "0.18.0"
"""The first compressed-tensors with this layout, noted as `version`."""
LINEAR: Final = "Linear"
HEAD: Final = "lm_head"


@dataclass(frozen=True, slots=True)
class LlmCompressorExporter:
    """See the module. Methods as in `evenround.export.base.Exporter`."""

    name: str = "llm_compressor"
    allows_ragged: bool = False

    def for_schemes(self, schemes: Mapping[str, Scheme | None]) -> "LlmCompressorExporter":
        return self

    def check(self, site: Site, scheme: Scheme) -> None:
        check_groups(site, scheme.weight)
        if site.transposed:
            raise UserError(
                f"{site.name} is a transposed layer (Conv1D), and compressed-tensors, which loads format 'llm_compressor' (--format), "
                "knows Linear layers only; use --format auto_round or fake"
            )

    def cautions(self, schemes: Mapping[str, Scheme | None]) -> tuple[str, ...]:
        used = {scheme.weight for scheme in schemes.values() if scheme}
        found = []
        if len(used) > 1 and any(_stops_default_load(scheme) for scheme in used):
            found.append(
                "transformers with compressed-tensors 0.20 cannot load several schemes when one is asymmetric by group or channel; "
                "vLLM can. Use symmetric schemes, one scheme for all layers, or --format auto_round"
            )
        if any(scheme.bits in (3, 5, 6, 7) for scheme in used):
            found.append("3, 5, 6 and 7 bits are packed densely, which compressed-tensors reads from 0.18 on")
        return tuple(found)

    def stored(self, scheme: Scheme) -> Scheme:
        return scheme

    def tensor_specs(self, site: Site, scheme: Scheme) -> dict[str, TensorSpec]:
        return _specs(tensor_prefix(site), scheme.weight, site.shape)

    def pack(self, site: Site, quantized: QuantizedWeight) -> dict[str, Tensor]:
        prefix, scheme = tensor_prefix(site), quantized.scheme
        per_tensor = scheme.group_size == PER_TENSOR
        tensors = {
            f"{prefix}.weight_packed": pack_bits(quantized.codes, scheme.bits),
            f"{prefix}.weight_scale": quantized.scale.reshape(1) if per_tensor else quantized.scale.contiguous(),
            f"{prefix}.weight_shape": torch.tensor(site.shape, dtype=torch.int64),
        }
        if not scheme.symmetric:
            signed = quantized.zero_point.to(torch.int16) - (1 << scheme.bits - 1)
            zero_point = signed.to(torch.int8).reshape(1) if per_tensor else pack_bits(quantized.zero_point, scheme.bits, axis=0)
            tensors[f"{prefix}.weight_zero_point"] = zero_point
        return tensors

    def unpack(self, prefix: str, read: Reader, scheme: WeightScheme, shape: tuple[int, int]) -> QuantizedWeight:
        packed = read(f"{prefix}.weight_packed")
        loose = packed.shape[1] != packed_words(shape[1], scheme.bits)
        take = unpack_loose if loose else unpack_bits
        scale = read(f"{prefix}.weight_scale").reshape(scheme.scale_shape(shape))
        middle = 1 << scheme.bits - 1
        if scheme.symmetric:
            zero_point = torch.full_like(scale, middle, dtype=torch.uint8)
        elif scheme.group_size == PER_TENSOR:
            zero_point = (read(f"{prefix}.weight_zero_point").to(torch.int16) + middle).to(torch.uint8).reshape(1, 1)
        else:
            zero_point = take(read(f"{prefix}.weight_zero_point"), scheme.bits, shape[0], 0)
        return QuantizedWeight(take(packed, scheme.bits, shape[1]), scale, zero_point, scheme)

    def quantization_config(
        self,
        schemes: Mapping[str, Scheme | None],
        sites: Sequence[Site],
        settings: Mapping[str, object],
        default: Scheme,
        unquantized: Sequence[str] = (),
    ) -> dict[str, object]:
        """compressed-tensors' fields, a config group for each scheme in use. `settings` and `default` have no place in them."""
        check_table(schemes, sites)
        by_scheme: dict[WeightScheme, list[str]] = {}
        ignore = list(unquantized)
        for site in sites:
            scheme = schemes[site.name]
            if scheme is None:
                ignore.append(site.name)
            else:
                by_scheme.setdefault(scheme.weight, []).append(site.name)
        if not any(site.is_head for site in sites):
            ignore.append(HEAD)
        groups = {
            f"group_{number}": {
                "targets": names if len(by_scheme) > 1 else [LINEAR],
                "weights": _arguments(scheme),
                "input_activations": None,
                "output_activations": None,
                "format": FORMAT,
            }
            for number, (scheme, names) in enumerate(by_scheme.items())
        }
        return {
            "quant_method": "compressed-tensors",
            "version": LAYOUT_VERSION,
            "format": FORMAT,
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": list(dict.fromkeys(ignore)),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
            **({"dequantize": True} if len(by_scheme) == 1 and _stops_default_load(next(iter(by_scheme))) else {}),
        }

    def read_schemes(
        self, config: Mapping[str, object], specs: Mapping[str, TensorSpec], read: Reader, modules: Mapping[str, str] | None = None
    ) -> dict[str, StoredWeight]:
        rules = _Rules.read(config)
        packed = packed_modules(specs, "weight_packed", modules)
        if not packed:
            raise no_packed_weights("weight_packed", f"format {config.get('format')!r}")
        for target, wanted in rules.targets.items():
            if target != LINEAR and not any(_matches(target, name) for name in packed.values()):
                raise disagreement(target, f"is {wanted.label} in config_groups, but no packed tensors have that name")
        for prefix, name in (modules or {}).items():
            if prefix not in packed and (scheme := rules.scheme(name)) is not None:
                raise disagreement(name, f"is {scheme.label} in the config and not in ignore, but {prefix}.weight_packed is missing")
        return {name: self._stored_weight(prefix, name, rules.scheme(name), specs, read) for prefix, name in packed.items()}

    def _stored_weight(
        self, prefix: str, name: str, scheme: WeightScheme | None, specs: Mapping[str, TensorSpec], read: Reader
    ) -> StoredWeight:
        if scheme is None:
            raise disagreement(name, f"is not quantized in the config, but {prefix}.weight_packed exists")
        expect_tensor(specs, f"{prefix}.weight_shape", (torch.int64,), (2,))
        out_features, in_features = (int(size) for size in read(f"{prefix}.weight_shape"))
        shape = (out_features, in_features)
        if min(shape) < 1:
            raise disagreement(name, f"has weight_shape {list(shape)}")
        packed = specs[f"{prefix}.weight_packed"].shape
        loose = tuple(packed) == (out_features, loose_words(in_features, scheme.bits))
        dense = tuple(packed) == (out_features, packed_words(in_features, scheme.bits))
        for tensor, spec in _specs(prefix, scheme, shape, loose=loose and not dense).items():
            expect_tensor(specs, tensor, SCALE_DTYPES if tensor.endswith("_scale") else (spec.dtype,), spec.shape)
        if scheme.symmetric and f"{prefix}.weight_zero_point" in specs:
            raise disagreement(name, f"is symmetric in the config, but {prefix}.weight_zero_point exists")
        return StoredWeight(name=name, prefix=prefix, scheme=scheme, shape=shape, format=self)


def _specs(prefix: str, scheme: WeightScheme, shape: tuple[int, int], loose: bool = False) -> dict[str, TensorSpec]:
    out_features, in_features = shape
    words = loose_words if loose else packed_words
    per_tensor = scheme.group_size == PER_TENSOR
    scale_shape = (1,) if per_tensor else scheme.scale_shape(shape)
    specs = {
        f"{prefix}.weight_packed": TensorSpec(dtype=torch.int32, shape=(out_features, words(in_features, scheme.bits))),
        f"{prefix}.weight_scale": TensorSpec(dtype=torch.float16, shape=scale_shape),
        f"{prefix}.weight_shape": TensorSpec(dtype=torch.int64, shape=(2,)),
    }
    if not scheme.symmetric:
        packed_shape = (words(out_features, scheme.bits), scheme.groups(in_features))
        zero_point = TensorSpec(dtype=torch.int8, shape=(1,)) if per_tensor else TensorSpec(dtype=torch.int32, shape=packed_shape)
        specs[f"{prefix}.weight_zero_point"] = zero_point
    return specs


def _stops_default_load(scheme: WeightScheme) -> bool:
    """Whether transformers' default load trips over the packed zero points."""
    return not scheme.symmetric and scheme.group_size != PER_TENSOR


def _arguments(scheme: WeightScheme) -> dict[str, object]:
    strategy = {PER_CHANNEL: "channel", PER_TENSOR: "tensor"}.get(scheme.group_size, "group")
    return {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.symmetric,
        "strategy": strategy,
        "group_size": scheme.group_size if strategy == "group" else None,
        "dynamic": False,
    }


def _matches(target: str, name: str) -> bool:
    return re.match(target[3:], name) is not None if target.startswith("re:") else target == name


@dataclass(frozen=True, slots=True)
class _Rules:
    """Targets and exceptions of a `pack-quantized` quantization_config, read as compressed-tensors reads them."""

    targets: Mapping[str, WeightScheme]
    ignore: tuple[str, ...]

    @staticmethod
    def read(config: Mapping[str, object]) -> "_Rules":
        groups, ignore = config.get("config_groups"), config.get("ignore") or []
        objects = isinstance(groups, Mapping) and all(isinstance(group, Mapping) for group in groups.values())
        if not isinstance(groups, Mapping) or not objects or not are_strings(ignore):
            raise UserError("quantization_config (config.json): config_groups must be an object of objects and ignore a list of names")
        targets: dict[str, WeightScheme] = {}
        for number, group in groups.items():
            found, arguments, names = group.get("format") or config.get("format"), group.get("weights") or {}, group.get("targets")
            if not isinstance(arguments, Mapping) or not are_strings(names):
                raise UserError(f"quantization_config (config.json), {number}: targets must be a list of names and weights an object")
            if found != FORMAT or arguments.get("type", "int") != "int" or group.get("input_activations"):
                raise UserError(
                    f"quantization_config (config.json), {number}: format {found!r}, type {arguments.get('type')!r}, input_activations "
                    f"{group.get('input_activations')!r} cannot be read; only weight-only 'int' in {FORMAT!r} can"
                )
            scheme = scheme_from_config(number, arguments.get("num_bits"), _group_size(number, arguments), arguments.get("symmetric", True))
            for target in names:
                targets.setdefault(target, scheme)
        for name in [*targets, *ignore]:
            if name.startswith("re:"):
                compile_pattern(name[3:], "targets and ignore")
        return _Rules(targets, tuple(ignore))

    def scheme(self, name: str) -> WeightScheme | None:
        """None if ignored or not targeted; else an exact target, else a regular expression, else the class `Linear`."""
        if any(_matches(pattern, name) for pattern in self.ignore):
            return None
        for target in sorted(self.targets, key=lambda target: (target.startswith("re:"), target)):
            if _matches(target, name):
                return self.targets[target]
        return self.targets.get(LINEAR)


def _group_size(number: str, arguments: Mapping[str, object]) -> object:
    """Our group size for a strategy; without one, compressed-tensors infers it from group_size: none is tensor, -1 channel."""
    strategy, group_size = arguments.get("strategy"), arguments.get("group_size")
    if strategy == "group" or strategy is None and group_size is not None:
        return group_size
    if strategy == "channel":
        return PER_CHANNEL
    if strategy in ("tensor", None):
        return PER_TENSOR
    raise UserError(f"quantization_config (config.json), {number}: strategy {strategy!r} cannot be read; group, channel and tensor can")
