"""auto-round's quantization_config: its fields written for a table of schemes, and read as auto-round's reader reads them.

One set of fields is the default, for every layer of the blocks in block_name_to_quantize; `extra_config` has what is different by layer
name, or by a regular expression. `act_` fields are there only where activations are quantized.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from evenround.errors import UserError
from evenround.export.base import are_strings, compile_pattern, scheme_from_config
from evenround.model import Site
from evenround.scheme import FIELDS, FLOATING, Scheme

AUTOROUND_VERSION: Final = "0.16.1"
"""The version whose layouts these are; readers look at `autoround_version`."""

SETTINGS = ("iters", "nsamples", "seqlen", "batch_size", "lr", "minmax_lr", "gradient_accumulate_steps", "enable_quanted_input")
"""Settings that auto-round notes in quantization_config, under its names. Readers ignore them."""

NV_INPUT: Final = "nv_fp4_with_static_gs"
"""auto-round's name of nv_fp activations, by which its reader finds the kernel."""


def write_config(
    packing: str,
    schemes: Mapping[str, Scheme | None],
    sites: Sequence[Site],
    settings: Mapping[str, object],
    default: Scheme,
    unquantized: Sequence[str] = (),
) -> dict[str, object]:
    """quantization_config for these schemes; `extra_config` has the changed fields of layers that differ from `default`, or 16 bits."""
    base = _fields(default)
    floating: dict[str, object] = {"bits": FLOATING}
    if "act_bits" in base:
        floating["act_bits"] = FLOATING  # its reader looks for a kernel else
    extra = {name: dict(floating) for name in unquantized}
    for site in sites:
        scheme = schemes[site.name]
        fields = _fields(scheme) if scheme else floating
        if scheme and not scheme.activation.quantized and (site.is_head or "act_bits" in base):
            fields["act_bits"] = FLOATING
        changed = {key: value for key, value in fields.items() if value != base.get(key)}
        if site.is_head and scheme:
            changed = fields
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


def _fields(scheme: Scheme) -> dict[str, object]:
    fields = scheme.to_dict()
    weight = {key: fields[key] for key in ("bits", "data_type", "group_size", "sym")}
    if not scheme.activation.quantized:
        return weight
    activation = {key: value for key, value in fields.items() if key.startswith("act_")}
    if scheme.activation.dtype == "nv_fp":
        activation["act_data_type"] = NV_INPUT
    return weight | activation


def _block_prefixes(sites: Sequence[Site]) -> list[str]:
    """Names of the block lists, `model.layers`: a site's name up to its block number."""
    prefixes: dict[str, None] = {}
    for site in sites:
        if site.block is not None:
            prefixes.setdefault(site.name.partition(f".{site.block}.")[0])
    return list(prefixes)


@dataclass(frozen=True, slots=True)
class SchemeFields:
    """What quantization_config says about each module, read as auto-round's reader reads it."""

    default: Scheme
    blocks: tuple[str, ...] | None
    extra: Mapping[str, Scheme | None]

    @staticmethod
    def read(config: Mapping[str, object]) -> "SchemeFields":
        """Raises `UserError` for fields that make no scheme."""
        known = {key: config[key] for key in FIELDS if key in config}
        default = scheme_from_config("default", {"sym": True, **known, "bits": config.get("bits"), "group_size": config.get("group_size")})
        blocks = config.get("block_name_to_quantize") or config.get("to_quant_block_names")
        if isinstance(blocks, str):
            blocks = [name.strip() for name in blocks.split(",")]
        extra_config = config.get("extra_config") or {}
        if not isinstance(extra_config, Mapping) or not (blocks is None or are_strings(blocks)):
            raise UserError("quantization_config (config.json): extra_config must be an object and block_name_to_quantize a string or list")
        extra: dict[str, Scheme | None] = {}
        for key, fields in extra_config.items():
            compile_pattern(key, "extra_config")
            if not isinstance(fields, Mapping):
                raise UserError(f"quantization_config (config.json), extra_config[{key!r}] is {fields!r}, not an object of scheme fields")
            bits = fields.get("bits", default.weight.bits)
            wide = isinstance(bits, int) and bits >= FLOATING
            # Fields that are left out are the default's, also where a data type would bring others to a user's flags.
            known = {**default.to_dict(), **{name: fields[name] for name in FIELDS if name in fields}}
            extra[key] = None if wide else scheme_from_config(f"extra_config[{key!r}]", known)
        return SchemeFields(default, tuple(blocks) if blocks else None, extra)

    def scheme(self, name: str) -> Scheme | None:
        """An exact name in extra_config, else the first regular expression found in the name, else the default inside the named blocks."""
        if name in self.extra:
            return self.extra[name]
        for key, scheme in self.extra.items():
            if re.search(key, name):
                return scheme
        return self.default if self.blocks is None or any(name.startswith(block) for block in self.blocks) else None
