"""`llm_compressor`: compressed-tensors' formats, loaded by transformers and vLLM through compressed-tensors.

| scheme | compressed-tensors' format | codes (see `evenround.export.tensors`) |
|---|---|---|
| integers; also with float activations | pack-quantized | words |
| integers with integer activations (INT8) | int-quantized | bytes |
| FP8 with quantized activations | float-quantized | bytes |
| FP8 weights alone | naive-quantized | bytes |
| MXFP4, MXFP8, NVFP4 | mxfp4-pack-quantized, mxfp8-quantized, nvfp4-pack-quantized | nibbles, bytes, nibbles |

compressed-tensors counts codes from -2^(bits-1) and stores words with that offset added, so the stored numbers are our codes and zero
points. Widths 3, 5, 6 and 7 need compressed-tensors 0.18 or later; files that older versions wrote (`32 // bits` codes a word) are told by
their width and read too.

`ignore` names every linear layer that is not quantized, always the output head unless it is quantized (auto-round 0.16.1 forgets it for
FP8_STATIC and MXFP: transformers then finds no tensors for the head). One scheme: targets ["Linear"]; several: a config group each, targets
spelled out by name, and `mixed-precision` as the whole's format where theirs differ.

What the config cannot say: that an mx scale of activations is rounded up (`mx_fp_rceil`). It is stored as mx_fp, and readers round such
scales in a way of their own anyhow.

What readers make of it (transformers 5.24, compressed-tensors 0.20; found by loading, every width, scheme and strategy):

* symmetric integers: load by default and with `CompressedTensorsConfig(dequantize=True)`; mixed schemes load by default only, because
  `dequantize=True` takes one config group for the whole model;
* asymmetric words by group or channel: the default load expects the unpacked shape of weight_zero_point and stops, also for files that
  auto-round and llm-compressor wrote; `dequantize=True` loads them. `"dequantize": true` in quantization_config makes that the default, and
  other readers skip the key, so it is written when one config group holds the whole model and its activations are not quantized (the
  dequantized model would compute without that);
* mixed schemes with such an asymmetric one: neither way loads in transformers (vLLM and compressed-tensors 0.17 do), see `cautions`;
* auto-round's own export of words equals this one byte for byte; it notes no `version`. What we gave up: activation order (g_idx), Conv1D
  layers, MXINT4 (compressed-tensors has no such number).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from torch import Tensor

from evenround.checkpoint import TensorSpec
from evenround.errors import UserError
from evenround.export.base import (
    Reader,
    StoredWeight,
    are_strings,
    check_groups,
    check_table,
    code_tensors,
    compile_pattern,
    disagreement,
    no_packed_weights,
    scheme_from_config,
    tensor_prefix,
)
from evenround.export.tensors import BYTES, NIBBLES, WORDS, Layout, check_stored, layout_of, pack_weight, unpack_weight, weight_specs
from evenround.model import Site
from evenround.numerics.quantized import QuantizedWeight
from evenround.scheme import FLOATING, GROUP_OF, MX_GROUP, NV_GROUP, PER_CHANNEL, PER_TENSOR, ActivationScheme, Scheme, WeightScheme

PACKED: Final = "pack-quantized"
LAYOUTS: Mapping[str, Layout] = {
    PACKED: WORDS, "int-quantized": BYTES, "float-quantized": BYTES, "naive-quantized": BYTES, "mxfp8-quantized": BYTES,
    "mxfp4-pack-quantized": NIBBLES, "nvfp4-pack-quantized": NIBBLES,
}  # fmt: skip
"""compressed-tensors' formats of one config group."""
MIXED: Final = "mixed-precision"
LAYOUT_VERSION: Final = "0.18.0"
"""The first compressed-tensors with these layouts, noted as `version`."""
LINEAR: Final = "Linear"
HEAD: Final = "lm_head"
MX_SCALE, NV_SCALE = "torch.uint8", "torch.float8_e4m3fn"


def format_name(scheme: Scheme) -> str:
    """compressed-tensors' name of the format that holds `scheme`."""
    weight = scheme.weight
    if weight.dtype == "int":
        return PACKED if layout_of(scheme) == WORDS else "int-quantized"
    if weight.dtype == "fp":
        return "float-quantized" if scheme.activation.quantized else "naive-quantized"
    if weight.dtype == "nv_fp":
        return "nvfp4-pack-quantized"
    return "mxfp4-pack-quantized" if weight.bits == 4 else "mxfp8-quantized"


@dataclass(frozen=True, slots=True)
class LlmCompressorExporter:
    """See the module. Methods as in `evenround.export.base.Exporter`."""

    layout: Layout | None = None
    """Of weights that are read; None: the one that is written for their scheme."""
    name: str = "llm_compressor"
    allows_ragged: bool = False

    def for_schemes(self, schemes: Mapping[str, Scheme | None]) -> "LlmCompressorExporter":
        return self

    def check(self, site: Site, scheme: Scheme) -> None:
        check_groups(site, scheme.weight)
        if site.transposed:
            raise UserError(
                f"{site.name} is a transposed layer (Conv1D), and compressed-tensors, which loads format 'llm_compressor' (--format), "
                f"knows Linear layers only; use --format {'fake' if scheme.activation.quantized else 'auto_round or fake'}"
            )
        if "mx_int" in (scheme.weight.dtype, scheme.activation.dtype):
            raise UserError(
                f"{site.name}: compressed-tensors, which loads format 'llm_compressor' (--format), has no MXINT4; use --format auto_round "
                "or fake, or scheme MXFP4"
            )

    def cautions(self, schemes: Mapping[str, Scheme | None]) -> tuple[str, ...]:
        used = {scheme for scheme in schemes.values() if scheme}
        found = []
        if len(used) > 1 and any(_stops_default_load(scheme) for scheme in used):
            found.append(
                "transformers with compressed-tensors 0.20 cannot load several schemes when one is asymmetric by group or channel; "
                "vLLM can. Use symmetric schemes, one scheme for all layers, or --format auto_round"
            )
        if any(scheme.weight.bits in (3, 5, 6, 7) for scheme in used):
            found.append("3, 5, 6 and 7 bits are packed densely, which compressed-tensors reads from 0.18 on")
        if any(scheme.activation.quantized and scheme.activation.dtype == "int" and scheme.activation.bits < 8 for scheme in used):
            found.append("integer activations of less than 8 bits are computed by transformers with compressed-tensors only, not by vLLM")
        if any((scheme.activation.quantized or len(used) > 1) and scheme.weight.dtype in GROUP_OF for scheme in used):
            found.append(
                "transformers with compressed-tensors 0.20 computes with MX and NVFP4 in bfloat16 only: load with dtype=torch.bfloat16"
            )
        if any(scheme.activation.quantized and scheme.activation.dtype == "mx_fp_rceil" for scheme in used):
            found.append(
                "format 'llm_compressor' cannot say that scales of activations are rounded up: readers round them in their own way"
            )
        return tuple(found)

    def stored(self, scheme: Scheme) -> Scheme:
        """mx_fp_rceil as mx_fp; all else as it is."""
        weight, activation = scheme.weight, scheme.activation
        if weight.dtype == "mx_fp_rceil":
            weight = replace(weight, dtype="mx_fp")
        if activation.dtype == "mx_fp_rceil":
            activation = replace(activation, dtype="mx_fp")
        return Scheme(weight=weight, activation=activation)

    def tensor_specs(self, site: Site, scheme: Scheme) -> dict[str, TensorSpec]:
        return weight_specs(tensor_prefix(site), layout_of(scheme), scheme, site.shape)

    def pack(self, site: Site, quantized: QuantizedWeight, scheme: Scheme) -> dict[str, Tensor]:
        return pack_weight(tensor_prefix(site), layout_of(scheme), quantized, scheme)

    def unpack(self, prefix: str, read: Reader, scheme: Scheme, shape: tuple[int, int]) -> QuantizedWeight:
        return unpack_weight(prefix, self.layout or layout_of(scheme), read, scheme, shape)

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
        by_scheme: dict[Scheme, list[str]] = {}
        ignore = list(unquantized)
        for site in sites:
            scheme = schemes[site.name]
            if scheme is None:
                ignore.append(site.name)
            else:
                by_scheme.setdefault(self.stored(scheme), []).append(site.name)
        if not any(site.is_head for site in sites):
            ignore.append(HEAD)
        groups = {
            f"group_{number}": {
                "targets": names if len(by_scheme) > 1 else [LINEAR],
                "weights": _weight_arguments(scheme.weight),
                "input_activations": _input_arguments(scheme.activation),
                "output_activations": None,
                "format": format_name(scheme),
            }
            for number, (scheme, names) in enumerate(by_scheme.items())
        }
        formats = list(dict.fromkeys(format_name(scheme) for scheme in by_scheme))
        return {
            "quant_method": "compressed-tensors",
            "version": LAYOUT_VERSION,
            "format": formats[0] if len(formats) == 1 else MIXED,
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": list(dict.fromkeys(ignore)),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
            **({"dequantize": True} if len(by_scheme) == 1 and _wants_dequantize(next(iter(by_scheme))) else {}),
        }

    def read_schemes(
        self, config: Mapping[str, object], specs: Mapping[str, TensorSpec], read: Reader, modules: Mapping[str, str] | None = None
    ) -> dict[str, StoredWeight]:
        rules = _Rules.read(config)
        packed = {prefix: (modules or {}).get(prefix, prefix) for prefix in code_tensors(specs)}
        if not packed:
            leaf = next((group.layout.code_leaf for group in rules.targets.values()), "weight_packed")
            raise no_packed_weights(leaf, f"format {config.get('format')!r}")
        for target, group in rules.targets.items():
            if target != LINEAR and not any(_matches(target, name) for name in packed.values()):
                raise disagreement(target, f"is {group.scheme.label} in config_groups, but no packed tensors have that name")
        for prefix, name in (modules or {}).items():
            head = name.rpartition(".")[2] == HEAD  # which auto-round 0.16.1 may leave out of `ignore`
            if prefix not in packed and not head and (found := rules.group(name)) is not None:
                missing = f"{prefix}.{found.layout.code_leaf} is missing"
                raise disagreement(name, f"is {found.scheme.label} in the config and not in ignore, but {missing}")
        return {name: self._stored_weight(prefix, name, rules.group(name), specs, read) for prefix, name in packed.items()}

    def _stored_weight(self, prefix: str, name: str, group: "_Group | None", specs: Mapping[str, TensorSpec], read: Reader) -> StoredWeight:
        if group is None:
            raise disagreement(name, f"is not quantized in the config, but {prefix}.{code_tensors(specs)[prefix]} exists")
        shape, tensors = check_stored(name, prefix, group.layout, group.scheme, specs, read)
        form = replace(self, layout=group.layout)
        return StoredWeight(name=name, prefix=prefix, scheme=group.scheme, shape=shape, format=form, tensors=tensors)


def _stops_default_load(scheme: Scheme) -> bool:
    """Whether transformers' default load trips over the packed zero points."""
    return layout_of(scheme) == WORDS and not scheme.weight.symmetric and scheme.weight.group_size != PER_TENSOR


def _wants_dequantize(scheme: Scheme) -> bool:
    """Whether transformers should multiply out as it loads: only where that loses nothing."""
    in_bfloat16 = scheme.weight.dtype in GROUP_OF  # what compressed-tensors makes of mx and nv, whatever the model's type
    return not scheme.activation.quantized and (in_bfloat16 or _stops_default_load(scheme))


def _weight_arguments(scheme: WeightScheme) -> dict[str, object]:
    size = scheme.group_size
    if isinstance(size, tuple):
        strategy = "block"
    else:
        strategy = {PER_CHANNEL: "channel", PER_TENSOR: "tensor"}.get(size, "tensor_group" if scheme.dtype == "nv_fp" else "group")
    return {
        "num_bits": scheme.bits,
        "type": "int" if scheme.dtype == "int" else "float",
        "symmetric": scheme.symmetric,
        "strategy": strategy,
        "group_size": size if strategy.endswith("group") else None,
        "dynamic": False,
        **({"block_structure": list(size)} if isinstance(size, tuple) else {}),
        **_scale_type(scheme),
    }


def _input_arguments(scheme: ActivationScheme) -> dict[str, object] | None:
    if not scheme.quantized:
        return None
    nv = scheme.dtype == "nv_fp"
    strategy = {PER_CHANNEL: "token", PER_TENSOR: "tensor"}.get(scheme.group_size, "tensor_group" if nv else "group")
    return {
        "num_bits": scheme.bits,
        "type": "int" if scheme.dtype == "int" else "float",
        "symmetric": scheme.symmetric,
        "strategy": strategy,
        "group_size": scheme.group_size if strategy.endswith("group") else None,
        "dynamic": "local" if nv else scheme.dynamic,
        **({"observer": "static_minmax"} if nv else {}),
        **_scale_type(scheme),
    }


def _scale_type(scheme: WeightScheme | ActivationScheme) -> dict[str, object]:
    if scheme.dtype == "nv_fp":
        return {"scale_dtype": NV_SCALE}
    return {"scale_dtype": MX_SCALE} if scheme.dtype.startswith("mx_fp") else {}


def _matches(target: str, name: str) -> bool:
    return re.match(target[3:], name) is not None if target.startswith("re:") else target == name


@dataclass(frozen=True, slots=True)
class _Group:
    """A config group."""

    scheme: Scheme
    layout: Layout


@dataclass(frozen=True, slots=True)
class _Rules:
    """Targets and exceptions of a quantization_config, read as compressed-tensors reads them."""

    targets: Mapping[str, _Group]
    ignore: tuple[str, ...]

    @staticmethod
    def read(config: Mapping[str, object]) -> "_Rules":
        groups, ignore = config.get("config_groups"), config.get("ignore") or []
        objects = isinstance(groups, Mapping) and all(isinstance(group, Mapping) for group in groups.values())
        if not isinstance(groups, Mapping) or not objects or not are_strings(ignore):
            raise UserError("quantization_config (config.json): config_groups must be an object of objects and ignore a list of names")
        targets: dict[str, _Group] = {}
        for number, group in groups.items():
            names, weights, inputs = group.get("targets"), group.get("weights") or {}, group.get("input_activations") or {}
            if not isinstance(weights, Mapping) or not isinstance(inputs, Mapping) or not are_strings(names):
                raise UserError(
                    f"quantization_config (config.json), {number}: targets must be a list of names, weights and input_activations objects"
                )
            found = _read_group(number, group.get("format") or config.get("format"), weights, inputs)
            for target in names:
                targets.setdefault(target, found)
        for name in [*targets, *ignore]:
            if name.startswith("re:"):
                compile_pattern(name[3:], "targets and ignore")
        return _Rules(targets, tuple(ignore))

    def group(self, name: str) -> _Group | None:
        """None if ignored or not targeted; else an exact target, else a regular expression, else the class `Linear`."""
        if any(_matches(pattern, name) for pattern in self.ignore):
            return None
        for target in sorted(self.targets, key=lambda target: (target.startswith("re:"), target)):
            if _matches(target, name):
                return self.targets[target]
        return self.targets.get(LINEAR)


def _read_group(number: str, form: object, weights: Mapping[str, object], inputs: Mapping[str, object]) -> _Group:
    """A config group's scheme and layout. Raises `UserError` for what cannot be read."""
    place = f"quantization_config (config.json), {number}"
    fields = {**_fields(f"{place}, weights", weights), "act_bits": FLOATING}
    if inputs:
        known = _fields(f"{place}, input_activations", inputs)
        fields |= {f"act_{key}": value for key, value in known.items()}
        fields["act_dynamic"] = bool(inputs.get("dynamic"))
    scheme = scheme_from_config(number, fields)
    if form == MIXED or form is None:
        form = format_name(scheme)
    layout = LAYOUTS.get(str(form))
    if layout is None or layout not in ((WORDS, BYTES) if scheme.weight.dtype == "int" else (layout_of(scheme),)):
        raise UserError(
            f"{place}: format {form!r} with weights {scheme.weight.label} cannot be read; {format_name(scheme)!r} can, and of formats: "
            f"{', '.join(LAYOUTS)}"
        )
    return _Group(scheme, layout)


def _fields(place: str, arguments: Mapping[str, object]) -> dict[str, object]:
    """bits, data_type, group_size and sym out of compressed-tensors' arguments for weights or inputs."""
    kind, bits, size = arguments.get("type", "int"), arguments.get("num_bits"), _group_size(place, arguments)
    if kind not in ("int", "float"):
        raise UserError(f"{place}: type {kind!r} cannot be read; int and float can")
    dtype = "int"
    if kind == "float":
        mx = size == MX_GROUP and (bits == 4 or arguments.get("scale_dtype") == MX_SCALE)
        dtype = "mx_fp" if mx else "nv_fp" if bits == 4 and size == NV_GROUP else "fp"
    return {"bits": bits, "data_type": dtype, "group_size": size, "sym": arguments.get("symmetric", True)}


def _group_size(place: str, arguments: Mapping[str, object]) -> object:
    """Our group size for a strategy; without one, compressed-tensors infers it from group_size: none is tensor, -1 channel."""
    strategy, group_size = arguments.get("strategy"), arguments.get("group_size")
    if strategy in ("group", "tensor_group") or strategy is None and group_size is not None:
        return group_size
    if strategy in ("channel", "token"):
        return PER_CHANNEL
    if strategy == "block":
        return arguments.get("block_structure")
    if strategy in ("tensor", None):
        return PER_TENSOR
    raise UserError(f"{place}: strategy {strategy!r} cannot be read; group, tensor_group, channel, token, block and tensor can")
