"""The rules that give each site its scheme.

The table `{site name: Scheme or None}` is complete and frozen before the first weight is read, so it can be printed, planned and
fingerprinted.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from evenround.errors import UserError, nearest
from evenround.scheme import FLOAT_NAMES, FLOATING, GROUP_OF, PER_TENSOR, Scheme, check_fields, preset


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
            _check_groups(site, scheme, ragged_groups)
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
        return None if value.upper() in FLOAT_NAMES else preset(value, place)
    if not isinstance(value, Mapping):
        raise UserError(f"{place}: {value!r} must be a scheme name or an object of scheme fields")
    try:
        if value.get("bits") != FLOATING:
            return Scheme.from_dict(value, default)
        check_fields(value)
        if value.get("act_bits") not in (None, FLOATING):
            raise UserError(f"bits 16 leaves the layer in floating point, act_bits {value['act_bits']} does not; leave one out")
    except UserError as error:
        raise UserError(f"{place}: {error}") from None
    return None


def _check_groups(site: SiteLike, scheme: Scheme, ragged_groups: bool) -> None:
    in_features, group = site.shape[-1], scheme.weight.group_size
    if scheme.activation.quantized and scheme.activation.dynamic and scheme.activation.group_size == PER_TENSOR:
        raise UserError(
            f"act_group_size 0 (--act_group_size) of {site.name} with dynamic scales: one scale for a batch would make results depend "
            "on how many samples are computed at once; add --disable_act_dynamic, or quantize per token (-1)"
        )
    act_group = scheme.activation.group_size
    if scheme.activation.quantized and act_group > 0 and in_features % act_group:
        per_token = "" if scheme.activation.dtype in GROUP_OF else ", or quantize its input per token (-1)"
        raise UserError(
            f"act_group_size {act_group} (--act_group_size) does not divide the width {in_features} of {site.name}; "
            f"leave the layer out with --ignore_layers{per_token}"
        )
    if isinstance(group, tuple) or group <= 0 or in_features % group == 0 or ragged_groups:
        return
    would = [size for size in (16, 32, 64, 96, 128, 192, 256, 512) if in_features % size == 0]
    others = f"groups that would: {', '.join(map(str, would)) or 'none'}, or -1 (per output channel). Or leave"
    if scheme.weight.dtype in GROUP_OF:
        others = f"data type {scheme.weight.dtype!r} has no others: leave"
    raise UserError(
        f"group_size {group} (--group_size) does not divide the width {in_features} of {site.name}; "
        f"{others} the layer out with --ignore_layers. Only --format fake can hold a ragged last group"
    )


FUSED: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
    ("c_fc_0", "c_fc_1"),
)
"""Last parts of names of layers that vLLM and SGLang run as one, where they have the same parent."""


def split_layers(schemes: Mapping[str, Scheme | None]) -> tuple[tuple[str, ...], ...]:
    """Layers that servers run as one (`fused_groups`), and that have different schemes all the same."""
    return tuple(names for names in fused_groups(list(schemes)) if len({schemes[name] for name in names}) > 1)


def fused_groups(names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """The sites `names` in groups that servers run as one layer: q, k and v of an attention, gate and up of an MLP or of one expert.

    Each name is in one group, a layer that is fused with none by itself; order is that of `names`, groups by their first.
    """
    places = {last: number for number, lasts in enumerate(FUSED) for last in lasts}
    groups: dict[tuple[str, int | str], list[str]] = {}
    for name in names:
        parent, _, last = name.rpartition(".")
        groups.setdefault((parent, places.get(last, last)), []).append(name)
    return tuple(map(tuple, groups.values()))
