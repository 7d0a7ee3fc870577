"""Quantization schemes as values, and the rules that give each site its scheme.

A scheme is a frozen value, compared with `==` and handed on; nothing downstream asks a string what it ends with. The table
`{site name: Scheme or None}` is complete and frozen before the first weight is read, so it can be printed, planned and fingerprinted.

Integer weights are what tuning supports today. `Scheme.activation` and `WeightScheme.dtype` are where float formats and activation
quantization enter; anything but the supported values is refused by name.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol

from evenround.errors import UserError, nearest

PER_CHANNEL = -1
PER_TENSOR = 0
MIN_GROUP = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightScheme:
    """How one weight `[out, in]` is stored. Groups run along `in`."""

    bits: int
    """2 to 8."""
    group_size: int = 128
    """Elements that share a scale; -1: one scale per output channel; 0: one for the whole tensor."""
    symmetric: bool = True
    """True: full range with a signed scale, zero point 2^(bits-1). False: a zero point per group."""
    dtype: Literal["int"] = "int"

    def __post_init__(self) -> None:
        if self.dtype != "int":
            raise UserError(f"data type {self.dtype!r} (--data_type) is not supported yet; use 'int'")
        if isinstance(self.bits, bool) or not isinstance(self.bits, int) or not 2 <= self.bits <= 8:
            raise UserError(f"bits {self.bits!r} (--bits) must be a whole number from 2 to 8")
        if isinstance(self.group_size, bool) or not isinstance(self.group_size, int):
            raise UserError(f"group_size {self.group_size!r} (--group_size) must be a whole number")
        if self.group_size not in (PER_CHANNEL, PER_TENSOR) and self.group_size < MIN_GROUP:
            raise UserError(
                f"group_size {self.group_size} (--group_size) must be at least {MIN_GROUP}, or -1 (one scale per output channel), "
                "or 0 (one scale for the tensor)"
            )
        if not isinstance(self.symmetric, bool):
            raise UserError(f"sym {self.symmetric!r} must be true or false")

    def groups(self, in_features: int) -> int:
        """Number of groups along `in` for one output channel (1 for per channel and per tensor; a ragged last group counts)."""
        return 1 if self.group_size in (PER_CHANNEL, PER_TENSOR) else -(-in_features // self.group_size)

    def scale_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Shape of scales and zero points for a weight `[out, in]`: `[out, groups]`, or `[1, 1]` per tensor."""
        out_features, in_features = shape
        return (1, 1) if self.group_size == PER_TENSOR else (out_features, self.groups(in_features))

    @property
    def label(self) -> str:
        """Short name for tables: `W4 g128 sym`."""
        group = {PER_CHANNEL: "channel", PER_TENSOR: "tensor"}.get(self.group_size, f"g{self.group_size}")
        return f"W{self.bits} {group} {'sym' if self.symmetric else 'asym'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationScheme:
    """How a site's input is quantized. Only 16 bits (not quantized) is supported today."""

    bits: int = 16

    def __post_init__(self) -> None:
        if self.bits != 16:
            raise UserError(f"act_bits {self.bits} (--act_bits) is not supported yet; only 16 (activations are left alone)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """What happens at one site."""

    weight: WeightScheme
    activation: ActivationScheme = ActivationScheme()

    @property
    def label(self) -> str:
        """Short name for tables, the weight's."""
        return self.weight.label

    def to_dict(self) -> dict[str, object]:
        """JSON form under auto-round's field names (`bits`, `group_size`, `sym`, `data_type`, `act_bits`)."""
        weight = self.weight
        return {
            "bits": weight.bits,
            "group_size": weight.group_size,
            "sym": weight.symmetric,
            "data_type": weight.dtype,
            "act_bits": self.activation.bits,
        }

    @staticmethod
    def from_dict(fields: Mapping[str, object], base: "Scheme | None" = None) -> "Scheme":
        """The scheme with `fields` (auto-round's names) on top of `base`; an unknown field is an error with the nearest name."""
        known = {"bits": 4, "group_size": 128, "sym": True, "data_type": "int", "act_bits": 16}
        merged = dict(base.to_dict()) if base else dict(known)
        for key, value in fields.items():
            if key not in known:
                raise UserError(f"unknown scheme field {key!r}{nearest(key, known) or '.'} Fields: {', '.join(known)}")
            merged[key] = value
        weight = WeightScheme(
            bits=merged["bits"],  # type: ignore[arg-type]
            group_size=merged["group_size"],  # type: ignore[arg-type]
            symmetric=merged["sym"],  # type: ignore[arg-type]
            dtype=merged["data_type"],  # type: ignore[arg-type]
        )
        return Scheme(weight=weight, activation=ActivationScheme(bits=merged["act_bits"]))  # type: ignore[arg-type]


def _presets() -> dict[str, Scheme]:
    table = {}
    for bits in range(2, 9):
        for suffix, group in (("", 128), ("G64", 64), ("G32", 32)):
            table[f"W{bits}A16{suffix}"] = Scheme(weight=WeightScheme(bits=bits, group_size=group))
        table[f"W{bits}A16_ASYM"] = Scheme(weight=WeightScheme(bits=bits, symmetric=False))
    return table


PRESETS: Mapping[str, Scheme] = MappingProxyType(_presets())
"""auto-round's preset names (and llm-compressor's `_ASYM`): integer, group 128 unless the name says otherwise."""

NOT_YET = (
    "MXFP4", "MXFP4_RCEIL", "MXFP6", "MXFP8", "MXFP8_RCEIL", "MXINT4", "NVFP4", "NVFP4_E5M3", "FPW8A16", "FP8_BLOCK", "FP8_STATIC",
    "FP8_DYNAMIC", "INT8", "INT8_W8A8", "INT4", "BF16", "W4A16_MIXED",
)  # fmt: skip


def preset(name: str, place: str = "--scheme") -> Scheme:
    """The scheme that `name`, given at `place`, stands for, any case, `-` or `_`. Raises `UserError` with both and the nearest name."""
    folded = name.upper().replace("-", "_")
    for known, scheme in PRESETS.items():
        if folded in (known, known.replace("A16G", "A16_G")):
            return scheme
    if folded in NOT_YET or folded.startswith("GGUF"):
        raise UserError(f"scheme {name!r} ({place}) is not implemented yet; integer weight-only schemes are: {', '.join(PRESETS)}")
    raise UserError(f"no scheme {name!r} ({place}){nearest(name, PRESETS) or '.'} Schemes: {', '.join(PRESETS)}")


class SiteLike(Protocol):
    """What the rules need to know of a site."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def is_head(self) -> bool: ...


Override = str | Mapping[str, object] | Scheme


@dataclass(frozen=True, kw_only=True)
class SchemeRules:
    """What the user asked for, before it meets a model."""

    default: Scheme
    ignore_layers: tuple[str, ...] = ()
    """Names, substrings or regular expressions of sites that stay in floating point (see `select`)."""
    layer_config: Mapping[str, Override] = dataclasses.field(default_factory=dict)
    """Name, substring or regular expression → preset name, fields on top of the default, or a Scheme. A later entry wins;
    an exact name wins over a pattern."""
    quant_lm_head: bool = False


def parse_layer_config(text: str) -> dict[str, Override]:
    """`--layer_config`: JSON, or auto-round's loose form `{mlp.down_proj:{bits:8,group_size:32},k_proj:W8A16}`."""
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError:
        quoted = re.sub(r"(?<![\"'\w.*\\^$|()\[\]+?-])([\w.*\\^$|()\[\]+?-]+)(?=\s*[:,}])", _quote_bare_word, text.replace("'", '"'))
        try:
            parsed = json.loads(quoted)
        except json.JSONDecodeError as error:
            near = quoted[error.pos : error.pos + 20]  # a position would be one in the quoted text
            raise UserError(
                f"layer_config {text!r} (--layer_config) cannot be read: {error.msg} {f'near {near!r}' if near else 'at its end'}; "
                'write JSON such as {"mlp.down_proj": {"bits": 8}, "k_proj": "W8A16"}'
            ) from None
    if not isinstance(parsed, dict):
        raise UserError(f"layer_config {text!r} (--layer_config) must be an object: name or pattern → scheme")
    return parsed


def _quote_bare_word(match: re.Match[str]) -> str:
    word = match.group(1)
    if word.lower() in ("true", "false", "null"):
        return word.lower()
    return word if re.fullmatch(r"-?\d+(\.\d+)?", word) else json.dumps(word)


def select(pattern: str, names: Sequence[str]) -> frozenset[str]:
    """The names that `pattern` stands for: itself if it is one, else all that contain it, else all in which it is found as a regex.

    A number at its end is a whole number: `layers.1` is not in `layers.10`. After `re:` stands a regular expression that must match from a
    name's start. Raises `re.error`.
    """
    if pattern.startswith("re:"):
        return frozenset(name for name in names if re.match(pattern[3:], name))
    if pattern in names:
        return frozenset([pattern])
    contained = re.escape(pattern) + (r"(?!\d)" if pattern[-1:].isdigit() else "")
    return frozenset(name for name in names if re.search(contained, name)) or frozenset(name for name in names if re.search(pattern, name))


def resolve_schemes(sites: Iterable[SiteLike], rules: SchemeRules, *, ragged_groups: bool = False) -> Mapping[str, Scheme | None]:
    """The frozen table `{site name: Scheme, or None for floating point}`, in site order.

    `ragged_groups`: accept a group size that does not divide `in` (only `fake` can hold the ragged last group).
    ignore_layers wins over layer_config. Raises `UserError` for a pattern that matches no site, an unknown scheme or field, groups that do
    not divide a width, and an output head that is named but not to be quantized.
    """
    sites = list(sites)
    names = [site.name for site in sites]
    if rules.quant_lm_head and not any(site.is_head for site in sites):
        raise UserError("--quant_lm_head: this model has no output head that can be quantized; leave the flag out")
    ignored = {name for pattern in rules.ignore_layers for name in _selected("--ignore_layers", pattern, names)}
    overrides = _overrides(sites, rules)
    table: dict[str, Scheme | None] = {}
    for site in sites:
        left_alone = site.name in ignored or (site.is_head and not rules.quant_lm_head)
        scheme = None if left_alone else overrides.get(site.name, rules.default)
        if scheme is not None:
            _check_groups(site, scheme.weight, ragged_groups)
        table[site.name] = scheme
    if not any(table.values()):
        raise UserError("every layer is left in floating point (--ignore_layers, --layer_config): there is nothing to quantize")
    return MappingProxyType(table)


def _selected(flag: str, pattern: str, names: Sequence[str]) -> frozenset[str]:
    """`select`, or `UserError` when there is nothing to select."""
    try:
        chosen = select(pattern, names)
    except re.error as error:
        raise UserError(f"{pattern!r} ({flag}) is neither part of a layer's name nor a regular expression ({error})") from None
    if not chosen:
        last_parts = sorted({name.rsplit(".", 1)[-1] for name in names})
        hint = nearest(pattern, [*names, *last_parts]) or f"; names end in {', '.join(last_parts)}"
        raise UserError(f"{pattern!r} ({flag}) matches no layer{hint}")
    return chosen


def _overrides(sites: Sequence[SiteLike], rules: SchemeRules) -> dict[str, Scheme | None]:
    """What layer_config says of the sites it names. Every entry is checked, also one that others override."""
    names, heads = [site.name for site in sites], {site.name for site in sites if site.is_head}
    exact: dict[str, Scheme | None] = {}
    broad: dict[str, Scheme | None] = {}
    for pattern, value in rules.layer_config.items():
        scheme, chosen = _apply(pattern, value, rules.default), _selected("--layer_config", pattern, names)
        if scheme is not None and chosen <= heads and not rules.quant_lm_head:
            raise UserError(f"{pattern!r} (--layer_config) names the output head, which is left alone unless --quant_lm_head is given")
        (exact if pattern in chosen else broad).update(dict.fromkeys(chosen, scheme))
    return {**broad, **exact}


def _apply(pattern: str, value: Override, default: Scheme) -> Scheme | None:
    """The scheme that one entry of layer_config asks for; None: 16 bits, floating point."""
    place = f"--layer_config {pattern!r}"
    if isinstance(value, Scheme):
        return value
    if isinstance(value, str):
        return preset(value, place)
    if not isinstance(value, Mapping):
        raise UserError(f"{place}: {value!r} must be a scheme name or an object of scheme fields")
    floating = value.get("bits") == 16
    try:
        scheme = Scheme.from_dict({**value, "bits": default.weight.bits} if floating else value, default)
    except UserError as error:
        raise UserError(f"{place}: {error}") from None
    return None if floating else scheme


def _check_groups(site: SiteLike, weight: WeightScheme, ragged_groups: bool) -> None:
    in_features = site.shape[-1]
    if weight.group_size <= 0 or in_features % weight.group_size == 0 or ragged_groups:
        return
    would = [group for group in (16, 32, 64, 96, 128, 192, 256, 512) if in_features % group == 0]
    raise UserError(
        f"group_size {weight.group_size} (--group_size) does not divide the width {in_features} of {site.name}; "
        f"groups that would: {', '.join(map(str, would)) or 'none'}, or -1 (per output channel). "
        "Or leave the layer out with --ignore_layers. Only --format fake can hold a ragged last group"
    )
