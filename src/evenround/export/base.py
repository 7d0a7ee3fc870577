"""What every checkpoint format offers: packing of one weight, its config.json entry, and the way back.

A format is a value with pure methods. A weight's tensors depend on its own scheme, and in `auto_round` also on the other layers' (one
packing holds for a whole checkpoint), so `for_schemes` fixes that once for the run's table. The way back works for files that others wrote
in the same layouts: `read_schemes` trusts neither config nor tensors alone, it requires that they agree. What we gave up: formats whose
tensors hold several weights at once.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard

import torch
from torch import Tensor

from evenround.checkpoint import TensorSpec
from evenround.errors import UserError
from evenround.model import Site
from evenround.numerics.quantized import QuantizedWeight
from evenround.scheme import PER_CHANNEL, PER_TENSOR, ActivationScheme, Scheme, WeightScheme

Reader = Callable[[str], Tensor]
"""Tensor name → tensor."""


class Exporter(Protocol):
    """One checkpoint format."""

    @property
    def name(self) -> str:
        """The format's name, as `--format` takes it."""
        ...

    @property
    def allows_ragged(self) -> bool:
        """Whether a last group shorter than the group size can be held."""
        ...

    def for_schemes(self, schemes: Mapping[str, Scheme | None]) -> "Exporter":
        """This format for a checkpoint with this table. Call it once per run, before `tensor_specs` and `pack`.

        Raises `UserError` for schemes that one checkpoint of this format cannot hold together.
        """
        ...

    def check(self, site: Site, scheme: Scheme) -> None:
        """Raise `UserError`, naming the layer and what would do, if readers of this format cannot load `scheme` at `site`."""
        ...

    def cautions(self, schemes: Mapping[str, Scheme | None]) -> tuple[str, ...]:
        """Sentences that a user of a checkpoint with this table should know: readers that need more, or cannot load it."""
        ...

    def stored(self, scheme: Scheme) -> Scheme:
        """The scheme under which the file declares `scheme`: the same weights, possibly in other words (see each format)."""
        ...

    def tensor_specs(self, site: Site, scheme: Scheme) -> dict[str, TensorSpec]:
        """The tensors that replace `site.checkpoint_name`, in writing order. A bias is copied by the caller."""
        ...

    def pack(self, site: Site, quantized: QuantizedWeight, scheme: Scheme) -> dict[str, Tensor]:
        """Those tensors. `scheme`: the site's, as in `tensor_specs`; calibrated activations need `quantized.input_scale`."""
        ...

    def unpack(self, prefix: str, read: Reader, scheme: Scheme, shape: tuple[int, int]) -> QuantizedWeight:
        """The weight `[out, in]` whose tensors are named `prefix.…`, with its input's scale. `scheme` as the file declares it."""
        ...

    def quantization_config(
        self,
        schemes: Mapping[str, Scheme | None],
        sites: Sequence[Site],
        settings: Mapping[str, object],
        default: Scheme,
        unquantized: Sequence[str] = (),
    ) -> dict[str, object] | None:
        """config.json's `quantization_config`, or None when there is none to write.

        `settings`: what the run record calls settings; formats copy the few that their readers know. `default`: the run's default scheme.
        `unquantized`: names of the model's linear layers that are not sites (a vision tower's).
        """
        ...

    def read_schemes(
        self, config: Mapping[str, object], specs: Mapping[str, TensorSpec], read: Reader, modules: Mapping[str, str] | None = None
    ) -> dict[str, "StoredWeight"]:
        """Every quantized weight of a checkpoint with this `quantization_config` and these tensors, by module name.

        `read` is called for tiny tensors only. `modules`: `{tensor name prefix: module name}` of the model's linear layers; with it, names
        in config and file may differ by a prefix, and every linear layer must be either packed or excluded. Raises `UserError` where config
        and tensors disagree.
        """
        ...


@dataclass(frozen=True, slots=True)
class StoredInput:
    """How a module's input is quantized, as a checkpoint says."""

    scheme: ActivationScheme
    tensor: str | None
    """Name of its calibrated scale; None where there is none."""

    def scale(self, read: Reader) -> Tensor | None:
        """The calibrated scale, float32 `[1]`."""
        return None if self.tensor is None else read(self.tensor).to(torch.float32).reshape(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredWeight:
    """Where a quantized weight lies in a checkpoint, and how to get it out."""

    name: str
    """Module name."""
    prefix: str
    """Its tensors are named `prefix.…`."""
    scheme: Scheme
    """As the file declares it."""
    shape: tuple[int, int]
    """(out, in)."""
    format: Exporter
    tensors: tuple[str, ...]
    """Its tensors, all of them: no float checkpoint has these."""

    def unpack(self, read: Reader) -> QuantizedWeight:
        """The weight itself; `read` must give this checkpoint's tensors."""
        return self.format.unpack(self.prefix, read, self.scheme, self.shape)

    @property
    def input(self) -> StoredInput:
        """How its input is quantized."""
        return stored_input(self.prefix, self.scheme.activation)


def input_leaf(scheme: ActivationScheme) -> str | None:
    """Last part of the name of a calibrated scale, None where there is none. All formats name it alike."""
    if not scheme.calibrated:
        return None
    return "input_global_scale" if scheme.dtype == "nv_fp" else "input_scale"


def stored_input(prefix: str, scheme: ActivationScheme) -> StoredInput:
    """The input of the module whose tensors are named `prefix.…`."""
    leaf = input_leaf(scheme)
    return StoredInput(scheme, leaf and f"{prefix}.{leaf}")


def input_specs(prefix: str, scheme: ActivationScheme) -> dict[str, TensorSpec]:
    """The tensor of a calibrated scale: float32 `[1]`; empty where there is none."""
    name = stored_input(prefix, scheme).tensor
    return {name: TensorSpec(dtype=torch.float32, shape=(1,))} if name else {}


def pack_input(prefix: str, scheme: ActivationScheme, scale: Tensor | None) -> dict[str, Tensor]:
    """That tensor."""
    name = stored_input(prefix, scheme).tensor
    if name is None:
        return {}
    if scale is None:
        raise ValueError(f"{prefix}: its input has a calibrated scale, and none is given")
    return {name: scale.to(torch.float32).reshape(1)}


def tensor_prefix(site: Site) -> str:
    """What packed tensors' names start with: the weight's own name in the checkpoint, or the module's for a head tied to the embedding."""
    return site.name if is_tied_head(site) else site.checkpoint_name.removesuffix(".weight")


def are_strings(value: object) -> TypeGuard[list[str]]:
    """Whether `value`, out of a JSON file, is a list of strings."""
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def is_tied_head(site: Site) -> bool:
    """Whether `site` is an output head whose values are the embedding's tensor."""
    own = site.checkpoint_name.removesuffix(".weight")
    return site.is_head and own.rpartition(".")[2] != site.name.rpartition(".")[2]


def check_groups(site: Site, scheme: WeightScheme) -> None:
    """Raise `UserError` unless the groups divide the width of `site`."""
    width = site.shape[1]
    if isinstance(scheme.group_size, tuple):  # the last tile of a row or column may be cut
        return
    if scheme.group_size not in (PER_CHANNEL, PER_TENSOR) and width % scheme.group_size:
        raise UserError(
            f"{site.name}: group_size {scheme.group_size} (--group_size) does not divide its width {width}, and no reader of this format "
            "loads a ragged last group; choose a divisor, -1 (per output channel), or leave the layer out with --ignore_layers"
        )


def check_table(schemes: Mapping[str, Scheme | None], sites: Iterable[Site]) -> None:
    """Raise `ValueError` unless `schemes` has exactly the names of `sites`."""
    names = {site.name for site in sites}
    if names != set(schemes):
        raise ValueError(f"scheme table and sites differ: {sorted(names ^ set(schemes))[:3]}")


def code_tensors(specs: Mapping[str, TensorSpec]) -> dict[str, str]:
    """`{tensor name prefix: last part of the name}` of every tensor that holds a weight's codes."""
    found = {}
    for name, spec in specs.items():
        prefix, _, leaf = name.rpartition(".")
        if leaf in ("qweight", "weight_packed") or (leaf == "weight" and spec.dtype in CODE_DTYPES):
            found[prefix] = leaf
    return found


def expect_tensor(specs: Mapping[str, TensorSpec], name: str, dtypes: Sequence[torch.dtype], shape: tuple[int, ...] | None) -> TensorSpec:
    """The spec of `name`; raises `UserError` when it is missing or not of one of `dtypes` and of `shape`."""
    spec = specs.get(name)
    if spec is None:
        raise UserError(f"the checkpoint has no {name}, which quantization_config (config.json) calls for; it is incomplete")
    if spec.dtype not in dtypes:
        wanted = " or ".join(map(str, dtypes))
        raise UserError(f"{name} is {spec.dtype}, but the format in quantization_config (config.json) stores {wanted}")
    if shape is not None and tuple(spec.shape) != shape:
        raise UserError(f"{name} has shape {list(spec.shape)}, but quantization_config (config.json) makes it {list(shape)}")
    return spec


def scheme_from_config(place: str, fields: Mapping[str, object], base: Scheme | None = None) -> Scheme:
    """A scheme from values found in config.json under auto-round's field names; raises `UserError` naming the place."""
    try:
        return Scheme.from_dict(fields, base)
    except UserError as error:
        raise UserError(f"quantization_config (config.json), {place}: {error}") from None


def compile_pattern(pattern: str, place: str) -> re.Pattern[str]:
    """`pattern` compiled; raises `UserError` naming the place in config.json."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UserError(f"quantization_config (config.json), {place}: {pattern!r} is no regular expression: {error}") from None


def no_packed_weights(leaf: str, format_name: str) -> UserError:
    """The error for a config that promises packed weights in a checkpoint without any."""
    return UserError(f"quantization_config (config.json) says {format_name}, but the checkpoint has no tensor named ….{leaf}")


def disagreement(name: str, what: str) -> UserError:
    """The error for a module about which config and tensors differ."""
    return UserError(f"quantization_config (config.json) and tensors disagree: {name} {what}")


SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Scales of integers are written as float16, others as float32; these are read."""

PACKED_LEAVES = frozenset(
    (
        "qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_scale_inv", "weight_global_scale", "weight_shape",
        "weight_zero_point", "weight_g_idx",
    )
)  # fmt: skip
"""Last parts of the names of tensors that stand for a quantized weight, beside `weight` itself where it holds bytes."""

INPUT_LEAVES = frozenset(("input_scale", "input_global_scale"))
"""Last parts of the names of scales of inputs."""

CODE_DTYPES = (torch.int8, torch.float8_e4m3fn)
"""Types of a `weight` that holds codes."""


def is_packed(name: str, spec: TensorSpec) -> bool:
    """Whether a tensor is part of a quantized weight."""
    leaf = name.rpartition(".")[2]
    return leaf in PACKED_LEAVES or (leaf == "weight" and spec.dtype in CODE_DTYPES)
