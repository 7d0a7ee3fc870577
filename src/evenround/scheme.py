"""Quantization schemes as values: compared with `==` and handed on; nothing downstream asks a string what it ends with.

Names of data types are auto-round's: `int`; `fp` (FP8 E4M3); `mx_fp`, `mx_int` (blocks of 32 with a power of two as scale; OCP
Microscaling 1.0); `mx_fp_rceil` (the same with the exponent rounded up); `nv_fp` (FP4 in blocks of 16, E4M3 scales, one float32 scale).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from evenround.errors import UserError, nearest

PER_CHANNEL = -1
PER_TENSOR = 0
MIN_GROUP = 16
MX_GROUP = 32
NV_GROUP = 16

DataType = Literal["int", "fp", "mx_fp", "mx_fp_rceil", "mx_int", "nv_fp"]

FLOATING = 16
"""Bits of what is not quantized."""

BITS_OF: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {"int": tuple(range(2, 9)), "fp": (8,), "mx_fp": (4, 8), "mx_fp_rceil": (4, 8), "mx_int": (4,), "nv_fp": (4,)}
)
"""Widths that each data type comes in."""

GROUP_OF: Mapping[str, int] = MappingProxyType({"mx_fp": MX_GROUP, "mx_fp_rceil": MX_GROUP, "mx_int": MX_GROUP, "nv_fp": NV_GROUP})
"""The only group size of data types that have one."""

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "int_sym": "int", "fp8": "fp", "fp8_e4m3": "fp", "mx_fp4": "mx_fp", "mx_fp8": "mx_fp", "mx_fp4e2m1": "mx_fp", "mx_fp8e4m3": "mx_fp",
        "mx_int4": "mx_int", "nv_fp4": "nv_fp", "nv_fp4_with_static_gs": "nv_fp", "mxfp": "mx_fp", "nvfp": "nv_fp",
    }
)  # fmt: skip
"""Other names of data types in auto-round's configurations."""

GroupSize = int | tuple[int, int]


def _check_type(what: str, flag: str, dtype: object, bits: object) -> None:
    if not isinstance(dtype, str) or dtype not in BITS_OF:
        hint = nearest(str(dtype), BITS_OF) or "."
        raise UserError(f"{what} type {dtype!r} ({flag}data_type) is not known{hint} Types: {', '.join(BITS_OF)}")
    allowed = BITS_OF[dtype]
    if isinstance(bits, bool) or not isinstance(bits, int) or bits not in allowed:
        kind = "" if dtype == "int" else f" for data type {dtype!r}"
        wanted = "a whole number from 2 to 8" if dtype == "int" else " or ".join(map(str, allowed))
        raise UserError(f"{flag[2:]}bits {bits!r} ({flag}bits) must be {wanted}{kind}")


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightScheme:
    """How one weight `[out, in]` is stored. Groups run along `in`."""

    bits: int
    """2 to 8 for `int`; see `BITS_OF`."""
    group_size: GroupSize = 128
    """Elements that share a scale; -1: one scale per output channel; 0: one for the whole tensor; (rows, columns): tiles, for `fp` only."""
    symmetric: bool = True
    """True: full range with a signed scale, zero point 2^(bits-1). False: a zero point per group (`int` only)."""
    dtype: DataType = "int"

    def __post_init__(self) -> None:
        _check_type("data", "--", self.dtype, self.bits)
        self._check_group()
        if not isinstance(self.symmetric, bool):
            raise UserError(f"sym {self.symmetric!r} must be true or false")
        if not self.symmetric and self.dtype != "int":
            raise UserError(f"data type {self.dtype!r} has no zero points; leave --asym out")

    def _check_group(self) -> None:
        size = self.group_size
        if isinstance(size, tuple):
            if self.dtype != "fp":
                raise UserError(f"group_size {size} (--group_size): only data type 'fp' has tiles; give one number")
            if len(size) != 2 or any(isinstance(side, bool) or not isinstance(side, int) or side < MIN_GROUP for side in size):
                raise UserError(f"group_size {size} (--group_size): a tile is two whole numbers of at least {MIN_GROUP}, such as 128,128")
            return
        if isinstance(size, bool) or not isinstance(size, int):
            raise UserError(f"group_size {size!r} (--group_size) must be a whole number")
        if size != GROUP_OF.get(self.dtype, size):
            raise UserError(f"group_size {size} (--group_size): data type {self.dtype!r} has groups of {GROUP_OF[self.dtype]} only")
        if size not in (PER_CHANNEL, PER_TENSOR) and size < MIN_GROUP:
            raise UserError(
                f"group_size {size} (--group_size) must be at least {MIN_GROUP}, or -1 (one scale per output channel), "
                "or 0 (one scale for the tensor)"
            )

    def groups(self, in_features: int) -> int:
        """Number of groups along `in` for one output channel (1 for per channel and per tensor; a ragged last group counts)."""
        size = self.group_size[1] if isinstance(self.group_size, tuple) else self.group_size
        return 1 if size in (PER_CHANNEL, PER_TENSOR) else -(-in_features // size)

    def scale_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Shape of scales and zero points for a weight `[out, in]`: `[out, groups]`, `[1, 1]` per tensor, `[out / rows, in / columns]`."""
        out_features, in_features = shape
        if isinstance(self.group_size, tuple):
            return -(-out_features // self.group_size[0]), self.groups(in_features)
        return (1, 1) if self.group_size == PER_TENSOR else (out_features, self.groups(in_features))

    def stored_bits(self, shape: tuple[int, int]) -> int:
        """Bits that a weight `[out, in]` takes with its scales: `int` 16 each and `bits` a zero point, `mx` and `nv` 8, `fp` 32."""
        rows, columns = self.scale_shape(shape)
        each = {"int": 16 if self.symmetric else 16 + self.bits, "fp": 32}.get(self.dtype, 8)
        return self.bits * shape[0] * shape[1] + rows * columns * each + (32 if self.dtype == "nv_fp" else 0)

    @property
    def label(self) -> str:
        """Short name for tables: `W4 g128 sym`, `MXFP4`, `FP8 128x128`."""
        if self.dtype in GROUP_OF:
            family, _, rule = self.dtype.upper().replace("_", "", 1).partition("_")
            return f"{family}{self.bits}{' ' + rule.lower() if rule else ''}"
        group = _group_label(self.group_size, "channel")
        return f"FP8 {group}" if self.dtype == "fp" else f"W{self.bits} {group} {'sym' if self.symmetric else 'asym'}"


def _group_label(size: GroupSize, channel: str) -> str:
    if isinstance(size, tuple):
        return f"{size[0]}x{size[1]}"
    return {PER_CHANNEL: channel, PER_TENSOR: "tensor"}.get(size, f"g{size}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationScheme:
    """How a site's input `[…, in]` is quantized."""

    bits: int = FLOATING
    """16: it is not."""
    group_size: int = PER_CHANNEL
    """Elements along `in` that share a scale; -1: one scale per token; 0: one for the whole tensor."""
    symmetric: bool = True
    dtype: DataType = "fp"
    dynamic: bool = True
    """Scales come from the values themselves; False: one for the tensor, from calibration. `nv_fp` has both, block and global scales."""

    def __post_init__(self) -> None:
        if self.bits == FLOATING:
            if (self.group_size, self.symmetric, self.dtype, self.dynamic) != (PER_CHANNEL, True, "fp", True):
                raise UserError("act_bits 16 (--act_bits) leaves activations alone: give 8 or 4 bits, or leave the other --act_ flags out")
            return
        _check_type("activation data", "--act_", self.dtype, self.bits)
        if self.dtype in GROUP_OF and self.dynamic is False:
            raise UserError(f"activation data type {self.dtype!r} takes scales from the values; leave --disable_act_dynamic out")
        size = self.group_size
        if isinstance(size, bool) or not isinstance(size, int) or size < PER_CHANNEL:
            raise UserError(f"act_group_size {size!r} (--act_group_size) must be -1 (per token), 0 (per tensor), or the size of a group")
        if size != GROUP_OF.get(self.dtype, size):
            raise UserError(f"act_group_size {size} (--act_group_size): data type {self.dtype!r} has groups of {GROUP_OF[self.dtype]} only")
        if not isinstance(self.symmetric, bool) or not isinstance(self.dynamic, bool):
            raise UserError(f"act_sym {self.symmetric!r} and act_dynamic {self.dynamic!r} must be true or false")
        if not self.symmetric and self.dtype != "int":
            raise UserError(f"activation data type {self.dtype!r} has no zero points; leave --act_asym out")
        if not self.dynamic and (size != PER_TENSOR or not self.symmetric):
            raise UserError("static activations (--disable_act_dynamic) have one symmetric scale: --act_group_size 0, no --act_asym")

    @property
    def quantized(self) -> bool:
        return self.bits < FLOATING

    @property
    def calibrated(self) -> bool:
        """Whether a scale comes from calibration."""
        return self.quantized and (not self.dynamic or self.dtype == "nv_fp")

    @property
    def label(self) -> str:
        """Short name for tables: `A8 int token`, `A8 fp tensor static`, `A4 mx_fp`."""
        if self.dtype in GROUP_OF:
            return f"A{self.bits} {self.dtype}"
        kind = "int" if self.dtype == "int" else "fp"
        marks = f"{'' if self.symmetric else ' asym'}{'' if self.dynamic else ' static'}"
        return f"A{self.bits} {kind} {_group_label(self.group_size, 'token')}{marks}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """What happens at one site."""

    weight: WeightScheme
    activation: ActivationScheme = ActivationScheme()

    @property
    def label(self) -> str:
        """Short name for tables: the weight's, and the activation's where it is quantized."""
        return f"{self.weight.label} {self.activation.label}" if self.activation.quantized else self.weight.label

    def to_dict(self) -> dict[str, object]:
        """JSON form under auto-round's field names (see `FIELDS`); `act_` fields but `act_bits` only where activations are quantized."""
        weight, activation = self.weight, self.activation
        fields: dict[str, object] = {
            "bits": weight.bits,
            "group_size": list(weight.group_size) if isinstance(weight.group_size, tuple) else weight.group_size,
            "sym": weight.symmetric,
            "data_type": weight.dtype,
            "act_bits": activation.bits,
        }
        if activation.quantized:
            fields |= {
                "act_group_size": activation.group_size,
                "act_sym": activation.symmetric,
                "act_data_type": activation.dtype,
                "act_dynamic": activation.dynamic,
            }
        return fields

    @staticmethod
    def from_dict(fields: Mapping[str, object], base: "Scheme | None" = None) -> "Scheme":
        """The scheme with `fields` (auto-round's names) on top of `base`; an unknown field is an error with the nearest name.

        Another data type brings its own group size and width where `fields` do not say, and activations are quantized as weights are
        where only `act_bits` says that they are. Raises `UserError` for what makes no scheme.
        """
        base = base or DEFAULT
        check_fields(fields)
        given = _named_bits(fields, base) | {key: _plain(key, value) for key, value in fields.items()}
        merged = {**base.to_dict(), **given}
        dtype = merged["data_type"]
        if "group_size" not in given and dtype != base.weight.dtype:
            merged["group_size"] = GROUP_OF.get(str(dtype), DEFAULT.weight.group_size if dtype == "int" else PER_CHANNEL)
        if "bits" not in given and len(BITS_OF.get(str(dtype), ())) == 1:
            merged["bits"] = BITS_OF[str(dtype)][0]
        if dtype != "int" and "sym" not in given:
            merged["sym"] = True
        size = merged["group_size"]
        weight = WeightScheme(
            bits=merged["bits"],  # type: ignore[arg-type]
            group_size=tuple(size) if isinstance(size, list) else size,  # type: ignore[arg-type]
            symmetric=merged["sym"],  # type: ignore[arg-type]
            dtype=dtype,  # type: ignore[arg-type]
        )
        return Scheme(weight=weight, activation=_activation(given, merged, weight, base.activation))


DEFAULT = Scheme(weight=WeightScheme(bits=4))
FIELDS = ("bits", "group_size", "sym", "data_type", "act_bits", "act_group_size", "act_sym", "act_data_type", "act_dynamic")
"""Fields of a scheme under auto-round's names."""

ACT_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "act_group_size": "--act_group_size",
        "act_sym": "--act_asym",
        "act_data_type": "--act_data_type",
        "act_dynamic": "--disable_act_dynamic",
    }
)
"""Flags of the fields that quantize nothing without `act_bits`."""


def check_fields(fields: Mapping[str, object]) -> None:
    """Raise `UserError` with the nearest name for a key that is no field of a scheme."""
    for key in fields:
        if key not in FIELDS:
            raise UserError(f"unknown scheme field {key!r}{nearest(key, FIELDS) or '.'} Fields: {', '.join(FIELDS)}")


def _named_bits(fields: Mapping[str, object], base: Scheme) -> dict[str, object]:
    """The bits that names of data types tell (`mx_fp8`), where `fields` do not. Raises `UserError` where they say otherwise."""
    found: dict[str, object] = {}
    for kind, quantized in (("", True), ("act_", base.activation.quantized)):
        name = str(fields.get(f"{kind}data_type")).lower()
        told = re.match(r"[a-z_]+(\d)", name) if name in ALIASES else None
        if told is None:
            continue
        bits, asked = int(told[1]), fields.get(f"{kind}bits")
        if quantized and f"{kind}bits" not in fields:
            found[f"{kind}bits"] = bits
        if asked not in (None, FLOATING, bits):
            raise UserError(f"{kind}bits {asked!r} (--{kind}bits) is not what data type {name!r} (--{kind}data_type) has; leave one out")
    return found


def _plain(key: str, value: object) -> object:
    """A field's value under our names of data types; tiles written `128,128` as a list."""
    if key.endswith("data_type") and isinstance(value, str):
        return ALIASES.get(value.lower(), value.lower())
    if key == "group_size" and isinstance(value, str) and re.fullmatch(r"\s*\d+\s*,\s*\d+\s*", value):
        return [int(side) for side in value.split(",")]
    return list(value) if isinstance(value, tuple) else value


def _activation(
    given: Mapping[str, object], merged: Mapping[str, object], weight: WeightScheme, base: ActivationScheme
) -> ActivationScheme:
    bits = merged["act_bits"]
    if given.get("act_data_type") == "float" and given.get("act_bits") is None:
        bits = FLOATING
    if bits is None or bits == FLOATING:
        asked = {key: given[key] for key in ACT_FLAGS if key in given and given[key] not in ("float", None)}
        if asked and "act_bits" not in given:
            what = ", ".join(f"{key} {value} ({ACT_FLAGS[key]})" for key, value in asked.items())
            raise UserError(f"{what} would change nothing: activations are not quantized; add act_bits 8 or 4 (--act_bits)")
        return ActivationScheme()
    dtype = str(merged.get("act_data_type") or weight.dtype)
    another = base.quantized and dtype != base.dtype
    if another and "act_bits" not in given and len(BITS_OF.get(dtype, ())) == 1:
        bits = BITS_OF[dtype][0]
    dynamic, (size, symmetric) = merged.get("act_dynamic"), map((given if another else merged).get, ("act_group_size", "act_sym"))
    if size is None:
        size = GROUP_OF.get(dtype, PER_TENSOR if dynamic is False else PER_CHANNEL)
    return ActivationScheme(
        bits=bits,  # type: ignore[arg-type]
        group_size=size,  # type: ignore[arg-type]
        symmetric=True if symmetric is None else symmetric,  # type: ignore[arg-type]
        dtype=dtype,  # type: ignore[arg-type]
        dynamic=True if dynamic is None else dynamic,  # type: ignore[arg-type]
    )


def _presets() -> dict[str, Scheme]:
    table = {}
    for bits in range(2, 9):
        for suffix, group in (("", 128), ("G64", 64), ("G32", 32)):
            table[f"W{bits}A16{suffix}"] = Scheme(weight=WeightScheme(bits=bits, group_size=group))
        table[f"W{bits}A16_ASYM"] = Scheme(weight=WeightScheme(bits=bits, symmetric=False))
    for bits in (4, 8):
        mx = WeightScheme(bits=bits, group_size=MX_GROUP, dtype="mx_fp")
        table[f"MXFP{bits}"] = Scheme(weight=mx, activation=ActivationScheme(bits=bits, group_size=MX_GROUP, dtype="mx_fp"))
        table[f"MXFP{bits}_RCEIL"] = Scheme(weight=mx, activation=ActivationScheme(bits=bits, group_size=MX_GROUP, dtype="mx_fp_rceil"))
        table[f"MXFP{bits}A16"] = Scheme(weight=mx)
        channel = WeightScheme(bits=bits, group_size=PER_CHANNEL)
        table[f"INT{bits}"] = Scheme(weight=channel, activation=ActivationScheme(bits=bits, dtype="int"))
    mx_int = WeightScheme(bits=4, group_size=MX_GROUP, dtype="mx_int")
    table["MXINT4"] = Scheme(weight=mx_int, activation=ActivationScheme(bits=4, group_size=MX_GROUP, dtype="mx_int"))
    nv = WeightScheme(bits=4, group_size=NV_GROUP, dtype="nv_fp")
    table["NVFP4"] = Scheme(weight=nv, activation=ActivationScheme(bits=4, group_size=NV_GROUP, dtype="nv_fp"))
    table["NVFP4A16"] = Scheme(weight=nv)
    channel = WeightScheme(bits=8, group_size=PER_CHANNEL, dtype="fp")
    table["FPW8A16"] = Scheme(weight=WeightScheme(bits=8, group_size=PER_TENSOR, dtype="fp"))
    table["FP8_STATIC"] = Scheme(weight=channel, activation=ActivationScheme(bits=8, group_size=PER_TENSOR, dynamic=False))
    table["FP8_DYNAMIC"] = Scheme(weight=channel, activation=ActivationScheme(bits=8))
    tiles = WeightScheme(bits=8, group_size=(128, 128), dtype="fp")
    table["FP8_BLOCK"] = Scheme(weight=tiles, activation=ActivationScheme(bits=8, group_size=128))
    table["INT8_W8A8"] = table["INT8"]
    return table


PRESETS: Mapping[str, Scheme] = MappingProxyType(_presets())
"""auto-round's preset names (and llm-compressor's `_ASYM`, `FP8_DYNAMIC`, `MXFP4A16`, `NVFP4A16`)."""

FLOAT_NAMES = ("BF16", "FP16", "FP32")
"""Scheme names of layers that stay in floating point."""

NOT_YET = ("MXFP6", "NVFP4_E5M3", "W4A16_MIXED")


def preset(name: str, place: str = "--scheme") -> Scheme:
    """The scheme that `name`, given at `place`, stands for, any case, `-` or `_`. Raises `UserError` with both and the nearest name."""
    folded = name.upper().replace("-", "_")
    for known, scheme in PRESETS.items():
        if folded in (known, known.replace("A16G", "A16_G")):
            return scheme
    if folded in FLOAT_NAMES:
        raise UserError(f"scheme {name!r} ({place}) quantizes nothing; leave layers out with --ignore_layers, or name it in --layer_config")
    if folded in NOT_YET or folded.startswith("GGUF"):
        raise UserError(f"scheme {name!r} ({place}) is not implemented yet; schemes are: {', '.join(PRESETS)}")
    raise UserError(f"no scheme {name!r} ({place}){nearest(name, PRESETS) or '.'} Schemes: {', '.join(PRESETS)}")
